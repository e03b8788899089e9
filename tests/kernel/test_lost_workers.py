"""A worker lost in mid-run: forgiven three times where nothing is written about retries, else one of the executions."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from stellwerk.core.events import RunPostponed
from stellwerk.core.retry import CRASHES_MAX, RetryPolicy
from stellwerk.core.run import Shell, State
from tests.kernel.rig import Latch, Rig, a_call, a_run, within


async def test_a_child_that_dies_is_forgiven_and_the_run_is_tried_again(rig: Rig) -> None:
    run = await rig.run(a_call("die_until", {"attempt": 3}))
    assert (run.state, run.attempt, run.crashes, run.tries) == (State.SUCCEEDED, 3, 2, 1)
    assert await rig.result(run.id) == 3
    postponed = [event for event in await rig.journal(run.id) if isinstance(event, RunPostponed)]
    assert [(event.reason, event.counted, event.due_ms - event.at_ms) for event in postponed] == [
        ("worker lost", "crash", 0)
    ] * 2


async def test_a_run_that_kills_its_worker_again_and_again_fails_and_says_how_often(rig: Rig) -> None:
    run = await rig.run(a_call("exit_hard"))
    assert (run.state, run.reason, run.attempt) == (State.FAILED, "worker lost", CRASHES_MAX + 1)
    assert run.error is not None
    assert f"{CRASHES_MAX + 1} times" in run.error
    assert run.tries == 0


@pytest.mark.parametrize("most", [0, 1])
async def test_where_retries_are_written_a_lost_worker_is_one_of_the_executions(rig: Rig, most: int) -> None:
    run = await rig.run(a_call("exit_hard", retry=RetryPolicy(most)))
    assert (run.state, run.reason, run.attempt) == (State.FAILED, "worker lost", most + 1)
    assert (run.tries, run.crashes) == (most + 1, 0)


async def test_a_written_retry_with_a_delay_waits_after_a_lost_worker(rig: Rig) -> None:
    (run_id,) = await rig.submit(a_call("exit_hard", retry=RetryPolicy(1, delay_ms=3_600_000)))
    run = await rig.until(run_id, lambda run: run.tries == 1, "postponed")
    assert run.state is State.WAITING
    assert await rig.reasons(run_id) == ["RetryDelay"]


async def test_a_neighbour_is_not_disturbed_by_a_child_that_dies(rig: Rig, latch: Latch) -> None:
    (neighbour,) = await rig.submit(latch.call())
    await rig.running(neighbour)
    await rig.run(a_call("die_until", {"attempt": 2}))
    latch.open()
    run = await rig.end_of(neighbour)
    assert (run.state, run.attempt) == (State.SUCCEEDED, 1)


async def test_when_the_keeper_is_killed_its_runs_are_lost_and_tried_again(rig: Rig, latch: Latch) -> None:
    ids = await rig.submit(latch.command(), latch.command(), latch.call())
    for run_id in ids:
        await rig.running(run_id)
    await latch.call_begun()
    await _begun(rig, ids)
    _kill_keeper(rig)
    for run_id in ids:
        await rig.until(run_id, lambda run: run.attempt >= 2, "started again")
    latch.open()
    runs = await rig.ends_of(ids)
    assert {run.state for run in runs} == {State.SUCCEEDED}
    assert {run.crashes for run in runs} == {1}


async def test_when_the_keeper_is_killed_a_run_with_no_retries_has_failed(rig: Rig, latch: Latch) -> None:
    (run_id,) = await rig.submit(latch.command(retry=RetryPolicy(0)))
    await rig.running(run_id)
    await _begun(rig, [run_id])
    _kill_keeper(rig)
    run = await rig.end_of(run_id)
    assert (run.state, run.reason, run.tries, run.crashes) == (State.FAILED, "worker lost", 1, 0)
    assert (await rig.run(a_run())).state is State.SUCCEEDED


async def test_a_lost_worker_of_a_run_that_shall_stop_leaves_it_cancelled(rig: Rig) -> None:
    (run_id,) = await rig.submit(a_call("wait_for", ["/never/there"]))
    await rig.running(run_id)
    await rig.kernel.cancel(run_id, "tester", "enough")
    run = await rig.end_of(run_id)
    assert (run.state, run.reason, run.crashes) == (State.CANCELLED, "enough", 0)


def _kill_keeper(rig: Rig) -> None:
    pair = rig.parts.link._pair
    assert pair is not None
    assert pair._keeper_pid is not None
    os.kill(pair._keeper_pid, signal.SIGKILL)


async def _begun(rig: Rig, ids: list[str]) -> None:
    """Wait until the commands of these runs are really there: each has its id in its environment."""
    rows = [await rig.row(run_id) for run_id in ids]
    await within(_all_there([run.id for run in rows if isinstance(run.spec.action, Shell)]), "the commands begin")


async def _all_there(ids: list[str]) -> None:
    while not all(map(_process_of, ids)):
        await asyncio.sleep(0.02)


def _process_of(run_id: str) -> bool:
    wanted = f"STELLWERK_RUN_ID={run_id}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    return True
            except OSError:
                continue
    return False
