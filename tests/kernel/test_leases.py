"""Leases: prolonged while the host lives, lost when it freezes, never shortened by a change of the row."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from stellwerk.core.batch import Batch, Claim, PutRecord, Record
from stellwerk.core.events import ResultRejected
from stellwerk.core.facts import Facts
from stellwerk.core.queries import LeaseRef
from stellwerk.core.run import State
from tests.kernel.rig import ACTOR, Latch, Meddler, Rig, a_run, a_script, host, settings_in, within


async def test_a_run_longer_than_its_lease_is_not_started_twice(tmp_path: Path, latch: Latch) -> None:
    async with host(settings_in(tmp_path, lease_ms=1_000)) as rig:
        ids = await rig.submit(latch.command(), latch.call())
        begun = {run_id: (await rig.running(run_id)).alarm_ms or 0 for run_id in ids}

        async def prolonged() -> None:
            while any([((await rig.row(run_id)).alarm_ms or 0) < begun[run_id] + 1_500 for run_id in ids]):
                await asyncio.sleep(0.05)

        await within(prolonged(), "the leases are prolonged")
        latch.open()
        assert [(run.state, run.attempt) for run in await rig.ends_of(ids)] == [(State.SUCCEEDED, 1)] * 2


@pytest.mark.parametrize("kind", ["command", "call"])
async def test_a_host_frozen_past_its_lease_loses_the_attempt_and_the_run_starts_again(
    tmp_path: Path, latch: Latch, kind: str
) -> None:
    async with host(settings_in(tmp_path, lease_ms=1_000)) as rig:
        (run_id,) = await rig.submit(latch.command() if kind == "command" else latch.call())
        await rig.running(run_id)
        if kind == "call":
            await latch.call_begun()
        time.sleep(2.5)  # the loop stands still, as under SIGSTOP; the keeper does not
        await rig.until(run_id, lambda run: run.attempt == 2, "started again")
        latch.open()
        run = await rig.end_of(run_id)
        assert (run.state, run.attempt, run.crashes) == (State.SUCCEEDED, 2, 1)
        assert not [event for event in await rig.journal(run_id) if isinstance(event, ResultRejected)]


@pytest.mark.parametrize("what", ["a child is added", "a stop is asked for"])
async def test_a_change_that_meets_a_heartbeat_does_not_shorten_the_lease(
    tmp_path: Path, latch: Latch, what: str
) -> None:
    meddler = Meddler(tmp_path / "data")
    async with host(settings_in(tmp_path, kill_grace_ms=60_000), meddler.as_store()) as rig:
        (run_id,) = await rig.submit(a_script(f"trap '' TERM; while [ ! -e {latch.path} ]; do sleep 0.01; done"))
        old = await rig.running(run_id)
        until_ms = rig.parts.env.now_ms() + 3_600_000

        async def heartbeat(batches: Sequence[Batch], claims: Sequence[Claim]) -> None:
            if any(change.run.id == run_id for batch in batches for change in batch.changes):
                meddler.before = None
                lease = LeaseRef(run_id, old.attempt, rig.kernel.host_id)
                assert await meddler.real.extend([lease], until_ms, rig.parts.env.now_ms()) == []

        meddler.before = heartbeat
        if what == "a child is added":
            await rig.submit(a_run(parents=(run_id,)))
            assert (await rig.row(run_id)).has_children
        else:
            await rig.kernel.cancel(run_id, ACTOR)
            assert (await rig.row(run_id)).stop_asked
        assert (await rig.row(run_id)).alarm_ms == until_ms
        latch.open()
        await rig.end_of(run_id)


async def test_very_many_runs_that_are_due_at_once_all_start(rig: Rig) -> None:
    due_ms = rig.parts.env.now_ms() + 700
    ids = await rig.submit(*[a_run(name="gone", due_ms=due_ms) for _ in range(2_300)])
    await rig.shut("job:shop/gone")

    async def readied() -> None:
        while (await rig.store.count()).states.get(State.READY, 0) < len(ids):
            await rig.kernel.feed.wait_after((await rig.store.count()).event_id, timeout_s=1)

    await within(readied(), "all are ready")


async def test_a_record_whose_time_is_over_is_dropped(rig: Rig) -> None:
    record = Record("idempotency", "old", 1, b"{}", "", rig.parts.env.now_ms() + 50)
    await rig.kernel.committer.commit([Batch(records=(PutRecord(record),))])

    async def gone() -> None:
        while (await rig.store.load(Facts(records=(("idempotency", "old"),)))).records:
            await asyncio.sleep(0.01)

    await within(gone(), "the record is dropped")


async def test_a_run_asked_to_stop_while_it_waits_behind_a_slow_one_is_cancelled(one_slot: Rig, latch: Latch) -> None:
    rig = one_slot
    # A quick stream makes the worker claim ahead; then a slow one stands before the others.
    await rig.ends_of(await rig.submit(*[a_run() for _ in range(20)]))
    slow, *others = await rig.submit(latch.command(), *[a_run() for _ in range(10)])
    await rig.running(slow)
    for run_id in others:
        await rig.kernel.cancel(run_id, ACTOR)
    runs = await rig.ends_of(others)
    assert {run.state for run in runs} == {State.CANCELLED}
    latch.open()
    await rig.end_of(slow)


async def test_a_run_claimed_ahead_and_put_back_is_started_later_and_nothing_is_counted(one_slot: Rig) -> None:
    rig = one_slot
    await rig.ends_of(await rig.submit(*[a_run() for _ in range(30)]))
    ids = await rig.submit(*[a_script("sleep 1.1") for _ in range(2)], *[a_run() for _ in range(5)])
    runs = await rig.ends_of(ids)
    assert {(run.state, run.crashes, run.tries) for run in runs} == {(State.SUCCEEDED, 0, 1)}
