"""A host that was killed is followed by another on the same folder: its runs are rescued at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stellwerk.core.errors import Refused
from stellwerk.core.events import ResultRejected, RunPostponed, RunStarted, RunSucceeded
from stellwerk.core.run import State
from tests.kernel.rig import Latch, Rig, host, settings_in

ROOT = Path(__file__).parents[2]


@pytest.fixture
def killed(tmp_path: Path, latch: Latch) -> Iterator[dict[str, Any]]:
    """What a host said that was then killed with SIGKILL."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    argv = [sys.executable, "-m", "tests.kernel.abandoned_host", str(tmp_path), str(latch.path)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, env=env, cwd=ROOT, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said, "the host said nothing"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
    yield json.loads(said)


async def test_after_a_kill_the_next_host_rescues_at_once_and_every_run_ends(
    tmp_path: Path, killed: dict[str, Any], latch: Latch
) -> None:
    latch.open()
    # The leases of the dead host would last for half a minute; on this store they are over with the opening.
    async with host(settings_in(tmp_path, lease_ms=3_600_000)) as rig:
        command, call, no_retries, one_retry = await rig.ends_of(killed["running"])
        for run in (command, call):
            assert (run.state, run.attempt, run.crashes) == (State.SUCCEEDED, 2, 1)
        assert (no_retries.state, no_retries.reason, no_retries.attempt) == (State.FAILED, "worker lost", 1)
        assert (one_retry.state, one_retry.attempt, one_retry.tries) == (State.SUCCEEDED, 2, 2)
        for name in ("ready", "waiting"):
            run = await rig.end_of(killed[name])
            assert (run.state, run.attempt, run.crashes) == (State.SUCCEEDED, 1, 0)


async def test_after_a_kill_no_process_of_the_dead_host_is_left_and_no_late_result_counts(
    tmp_path: Path, killed: dict[str, Any], latch: Latch
) -> None:
    async with host(settings_in(tmp_path)) as rig:
        second = await rig.until(killed["first"], lambda run: run.attempt == 2, "started again")
        assert second.worker == rig.kernel.host_id
        latch.open()
        await rig.ends_of(killed["running"])
        journal = await rig.journal()
        assert not [event for event in journal if isinstance(event, ResultRejected)]
        ends = [event for event in journal if isinstance(event, RunSucceeded) and event.run in killed["running"]]
        assert {event.worker for event in ends} == {rig.kernel.host_id}
        rescues = [event for event in journal if isinstance(event, RunPostponed)]
        assert {(event.worker, event.reason) for event in rescues} == {(None, "worker lost")}
        starts = [event for event in journal if isinstance(event, RunStarted) and event.run == killed["first"]]
        assert [event.attempt for event in starts] == [1, 2]


async def test_a_second_host_on_the_same_folder_is_refused(rig: Rig, tmp_path: Path) -> None:
    second = Rig(settings_in(tmp_path))
    with pytest.raises(Refused, match="in use"):
        await second.parts.open()
    await asyncio.sleep(0)
