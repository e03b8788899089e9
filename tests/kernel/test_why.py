"""Why is it not running? Every kind of answer, asked of real rows."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from stellwerk.core.batch import Batch, Claim
from stellwerk.core.errors import NotFound, Unavailable
from stellwerk.core.gates import GateKind
from stellwerk.core.retry import RetryPolicy
from stellwerk.core.run import Check, Nothing, Signal
from stellwerk.core.times import show_time
from tests.kernel.rig import ACTOR, Latch, Meddler, Rig, a_call, a_run, a_script, host, settings_in

HOUR_MS = 3_600_000


async def test_a_run_that_is_unknown_has_no_reason(rig: Rig) -> None:
    with pytest.raises(NotFound):
        await rig.why("nobody")


async def test_ended_says_how(rig: Rig) -> None:
    done = await rig.run(a_script("exit 3"))
    (reason,) = await rig.why(done.id)
    assert done.ended_ms is not None
    assert reason.type == "Ended"
    assert reason.evidence == {
        "state": "failed",
        "attempt": 1,
        "ended_at": show_time(done.ended_ms),
        "exit_code": 3,
    }


async def test_running_says_where_and_since_when(rig: Rig, latch: Latch) -> None:
    (run_id,) = await rig.submit(latch.command())
    run = await rig.running(run_id)
    (reason,) = await rig.why(run_id)
    assert run.started_ms is not None
    assert reason.type == "Running"
    assert (reason.evidence["attempt"], reason.evidence["worker"]) == (1, rig.kernel.host_id)
    assert reason.evidence["started_at"] == show_time(run.started_ms)


async def test_stopping_says_that_its_end_was_asked_for(rig: Rig) -> None:
    (run_id,) = await rig.submit(a_script("trap '' TERM; while :; do sleep 1; done"))
    await rig.running(run_id)
    await rig.kernel.cancel(run_id, ACTOR)
    seen = await rig.reasons(run_id)
    assert seen in (["Running", "Stopping"], ["Ended"])


async def test_waiting_for_parents_names_those_still_open(rig: Rig) -> None:
    a, b, child = await rig.submit(a_run(Signal()), a_run(Signal()), a_run(parents=(0, 1)))
    await rig.kernel.settle(a, ACTOR, True, "go")
    (reason,) = await rig.why(child)
    assert reason.type == "WaitingForParents"
    assert reason.evidence == {"open": 1, "parents": [{"id": b, "when": "succeeded", "state": "ready"}]}


async def test_not_due_says_when(rig: Rig) -> None:
    due_ms = rig.parts.env.now_ms() + HOUR_MS
    (run_id,) = await rig.submit(a_run(due_ms=due_ms))
    (reason,) = await rig.why(run_id)
    assert (reason.type, reason.until_ms, reason.evidence["due_at"]) == ("NotDue", due_ms, show_time(due_ms))


async def test_retry_delay_says_what_failed_and_when_the_next_try_comes(rig: Rig) -> None:
    (run_id,) = await rig.submit(a_script("exit 9", retry=RetryPolicy(1, delay_ms=HOUR_MS)))
    run = await rig.until(run_id, lambda run: run.tries == 1, "postponed")
    (reason,) = await rig.why(run_id)
    assert (reason.type, reason.until_ms) == ("RetryDelay", run.due_ms)
    assert reason.evidence["reason"] == "exit"


@pytest.mark.parametrize(
    ("kind", "wanted"), [("pause", "Paused"), ("block", "Blocked"), ("hold", "Held"), ("missing", "NoDefinition")]
)
async def test_a_gate_says_which_and_whose(rig: Rig, kind: GateKind, wanted: str) -> None:
    until_ms = rig.parts.env.now_ms() + HOUR_MS
    await rig.shut("scope:shop", kind, until_ms=until_ms)
    (run_id,) = await rig.submit(a_run())
    (reason,) = await rig.why(run_id)
    assert (reason.type, reason.until_ms) == (wanted, until_ms)
    assert (reason.evidence["gate"], reason.evidence["actor"]) == ("scope:shop", ACTOR)


async def test_a_gate_that_will_hold_is_told_beside_what_holds_now(rig: Rig) -> None:
    await rig.shut("*")
    (run_id,) = await rig.submit(a_run(due_ms=rig.parts.env.now_ms() + HOUR_MS))
    assert await rig.reasons(run_id) == ["NotDue", "Paused"]


async def test_limit_reached_says_how_many_run(rig: Rig, latch: Latch) -> None:
    await rig.shut("*", "limit", limit=1)
    first, second = await rig.submit(latch.command(), a_run())
    await rig.running(first)
    assert await rig.reasons(second) == ["LimitReached"]


async def test_no_free_slot_says_how_many_there_are_and_how_many_wait(one_slot: Rig, latch: Latch) -> None:
    (first,) = await one_slot.submit(latch.command())
    await one_slot.running(first)
    (run_id, _) = await one_slot.submit(a_run(), a_run())
    (reason,) = await one_slot.why(run_id)
    assert reason.type == "NoFreeSlot"
    assert reason.evidence == {"queue": "default", "slots": 1, "ready": 2}


async def test_no_worker_says_that_nobody_here_serves_the_queue(rig: Rig) -> None:
    (run_id,) = await rig.submit(a_run(queue="sync"))
    (reason,) = await rig.why(run_id)
    assert (reason.type, reason.evidence) == ("NoWorker", {"queue": "sync"})


async def test_waiting_for_signal_and_condition_not_met(rig: Rig) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        wanted = (a_run(Signal()), a_run(Check("port", address, interval_ms=10)))
        approval, check = await rig.submit(*wanted)
        assert await rig.reasons(approval) == ["WaitingForSignal"]
        (reason,) = await rig.why(check)
        assert (reason.type, reason.evidence) == ("ConditionNotMet", {"kind": "port", "value": address})
        assert reason.until_ms is not None


async def test_gates_are_no_reason_for_what_needs_no_worker(rig: Rig) -> None:
    await rig.shut("*")
    (approval,) = await rig.submit(a_run(Signal()))
    assert await rig.reasons(approval) == ["WaitingForSignal"]


async def test_nothing_that_waits_says_for_what(rig: Rig) -> None:
    _, child = await rig.submit(a_run(Signal()), a_run(Nothing(), parents=(0,)))
    assert await rig.reasons(child) == ["WaitingForParents"]


async def test_not_claiming_says_what_the_store_said(tmp_path: Path) -> None:
    meddler = Meddler(tmp_path / "data")
    async with host(settings_in(tmp_path), meddler.as_store()) as rig:
        await rig.shut("*")
        (run_id,) = await rig.submit(a_run())

        async def refuse(batches: Sequence[Batch], claims: Sequence[Claim]) -> None:
            raise Unavailable("the disk is full")

        meddler.before = refuse
        with pytest.raises(Unavailable):
            await rig.submit(a_run())
        assert await rig.reasons(run_id) == ["Paused", "NotClaiming"]
        meddler.before = None


async def test_stuck_says_which_processes_do_not_end(rig: Rig, monkeypatch: pytest.MonkeyPatch, latch: Latch) -> None:
    (run_id,) = await rig.submit(latch.command())
    await rig.running(run_id)
    executor = rig.parts.worker._executors["command", ""]
    # A process that no signal ends cannot be made without help of the kernel; what the keeper says of one can.
    monkeypatch.setattr(executor, "stuck", lambda: {run_id: "4711 (dd) in state D"})
    running, stuck = await rig.why(run_id)
    assert (running.type, stuck.type) == ("Running", "Stuck")
    assert stuck.evidence == {"processes": "4711 (dd) in state D"}


async def test_a_lost_worker_in_a_retry_delay_says_so(rig: Rig) -> None:
    (run_id,) = await rig.submit(a_call("exit_hard", retry=RetryPolicy(1, delay_ms=HOUR_MS)))
    await rig.until(run_id, lambda run: run.tries == 1, "postponed")
    (reason,) = await rig.why(run_id)
    assert reason.evidence["reason"] == "worker lost"


async def test_about_to_start_is_all_that_is_left_for_a_ready_run_with_a_free_slot(tmp_path: Path) -> None:
    meddler = Meddler(tmp_path / "data")
    async with host(settings_in(tmp_path), meddler.as_store()) as rig:
        await rig.run(a_run())
        # No claim is served from here on: the run stays ready beside free slots.
        rig.kernel.committer.withdraw("default")
        (run_id,) = await rig.submit(a_run())
        (reason,) = await rig.why(run_id)
        assert reason.type == "AboutToStart"
        rig.parts.worker._ask(rig.parts.worker._lines["default"])
        await rig.end_of(run_id)
