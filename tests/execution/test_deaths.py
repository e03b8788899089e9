"""Host, keeper and guard are killed or frozen, alone and together: no process survives, or the next start sweeps it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from stellwerk.execute.process_table import read_row
from stellwerk.execute.sweep import sweep
from tests.execution.small_host import SHAPES
from tests.execution.survivors import ROOT, alive, host_environment, new_token, wait_until

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs subreapers and pidfds"),
]


class Host:
    """A small host with its nasty commands, up and complete."""

    def __init__(self, lease_ms: int = 60_000) -> None:
        self.token = new_token()
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/execution/small_host.py"), str(lease_ms)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=host_environment(NASTY_TOKEN=self.token),
        )
        pids = self.hear()
        self.keeper: int = pids["keeper"]
        self.guard: int = pids["guard"]

    def hear(self) -> dict:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")

    def nobody_is_left(self) -> bool:
        return not alive(self.token)

    def settled(self) -> set[int]:
        """Those that stay the same; runners never do."""
        return alive(self.token, "three_sessions") | alive(self.token, "stopped")

    def hear_ends(self, why: str) -> None:
        ends = [self.hear() for _ in SHAPES]
        assert {end["why"] for end in ends} == {why}
        assert {end["ended"] for end in ends} == set(SHAPES)

    def close(self) -> None:
        for pid in (self.process.pid, self.keeper, self.guard):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        wait_until(lambda: _is_gone(self.keeper) and _is_gone(self.guard), "keeper and guard to go")
        sweep()


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


@pytest.fixture
def short_leased() -> Iterator[Host]:
    host = Host(lease_ms=3_000)
    yield host
    host.close()


def test_a_killed_host_leaves_nobody(host: Host) -> None:
    assert len(alive(host.token)) > len(SHAPES)
    os.kill(host.process.pid, signal.SIGKILL)
    wait_until(host.nobody_is_left, "the keeper to end everything")
    wait_until(lambda: _is_gone(host.keeper) and _is_gone(host.guard), "keeper and guard to go as well")


def test_a_killed_host_leaves_nobody_although_a_forked_child_of_it_holds_the_channel(host: Host) -> None:
    host.tell("fork")
    forked = host.hear()["forked"]
    os.kill(host.process.pid, signal.SIGKILL)
    try:
        wait_until(host.nobody_is_left, "the keeper to end everything")
    finally:
        os.kill(forked, signal.SIGKILL)


def test_a_killed_keeper_is_cleaned_up_after_by_its_guard_and_replaced(host: Host) -> None:
    os.kill(host.keeper, signal.SIGKILL)
    host.hear_ends("keeper lost")
    assert host.nobody_is_left()
    host.tell("one more")
    assert host.hear() == {"later": "runs"}


def test_a_frozen_keeper_is_found_by_ping_and_replaced(host: Host) -> None:
    os.kill(host.keeper, signal.SIGSTOP)
    host.hear_ends("keeper lost")
    assert host.nobody_is_left()


def test_a_killed_guard_degrades_the_host_and_loses_nothing(host: Host) -> None:
    before = host.settled()
    os.kill(host.guard, signal.SIGKILL)
    health = {"guard": "ok"}

    def is_unguarded() -> bool:
        host.tell("health")
        health.update(host.hear())
        return health["guard"] != "ok"

    wait_until(is_unguarded, "the host to notice")
    assert health["guard"].startswith("degraded: unguarded")
    assert host.settled() == before
    assert len(before) == 7
    host.tell("one more")
    assert host.hear() == {"later": "runs"}
    os.kill(host.process.pid, signal.SIGKILL)
    wait_until(host.nobody_is_left, "both keepers to end everything")
    wait_until(lambda: not alive(host.token + "-later"), "the new keeper to end everything")


def test_guard_and_keeper_killed_together_are_swept_by_the_host(host: Host) -> None:
    os.kill(host.guard, signal.SIGKILL)
    os.kill(host.keeper, signal.SIGKILL)
    host.hear_ends("keeper lost")
    assert host.nobody_is_left()


def test_host_and_keeper_killed_together_leave_nobody(host: Host) -> None:
    os.kill(host.process.pid, signal.SIGKILL)
    os.kill(host.keeper, signal.SIGKILL)
    wait_until(host.nobody_is_left, "the guard to end everything")


def test_host_and_guard_killed_together_leave_nobody(host: Host) -> None:
    os.kill(host.guard, signal.SIGKILL)
    os.kill(host.process.pid, signal.SIGKILL)
    wait_until(host.nobody_is_left, "the keeper to end everything")


def test_what_all_three_leave_when_killed_together_is_swept_by_the_next_start(host: Host) -> None:
    for pid in (host.guard, host.process.pid, host.keeper):
        os.kill(pid, signal.SIGSTOP)
    for pid in (host.guard, host.process.pid, host.keeper):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: _is_gone(host.keeper), "the keeper to be dead")
    sweep()  # how many it meets is not asserted: another host that starts on this machine sweeps as well
    assert host.nobody_is_left()


def test_a_sweep_spares_the_trees_of_a_living_keeper(host: Host) -> None:
    before = host.settled()
    sweep()
    assert host.settled() == before
    assert len(before) == 7


def test_a_host_frozen_past_its_deadline_is_fenced_by_the_keeper(short_leased: Host) -> None:
    os.kill(short_leased.process.pid, signal.SIGSTOP)
    wait_until(short_leased.nobody_is_left, "the keeper to end everything at the deadline")
    os.kill(short_leased.process.pid, signal.SIGCONT)
    short_leased.hear_ends("deadline")


def test_a_machine_frozen_past_the_deadline_ends_its_trees_on_resume(short_leased: Host) -> None:
    frozen = (short_leased.process.pid, short_leased.guard, short_leased.keeper)
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    resumes = time.monotonic() + 3.0
    wait_until(lambda: time.monotonic() > resumes, "the lease to pass")
    assert not short_leased.nobody_is_left()
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    short_leased.hear_ends("deadline")
    assert short_leased.nobody_is_left()


def test_an_orderly_end_of_the_host_leaves_nobody(host: Host) -> None:
    assert host.process.stdin is not None
    host.process.stdin.close()
    host.hear_ends("stop")
    assert host.hear() == {"closed": True}
    assert host.process.wait() == 0
    assert host.nobody_is_left()
    assert _is_gone(host.guard)


def _is_gone(pid: int) -> bool:
    row = read_row(pid)
    return row is None or row.state == "Z"
