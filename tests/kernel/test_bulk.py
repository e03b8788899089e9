"""Verbs on all runs that a filter finds: at once up to 1,000, as a chore beyond."""

from __future__ import annotations

import pytest

from stellwerk.core.queries import RunQuery
from stellwerk.core.run import Nothing, Signal, State
from tests.kernel.rig import ACTOR, Latch, Rig, a_run

MANY = 2_300


async def _states(rig: Rig) -> dict[State, int]:
    return {state: number for state, number in (await rig.store.count()).states.items() if number}


async def test_a_bulk_cancel_ends_what_its_filter_finds_and_nothing_else(rig: Rig, latch: Latch) -> None:
    red = await rig.submit(*[a_run(Signal(), labels={"colour": "red"}) for _ in range(5)])
    blue = await rig.submit(*[a_run(Signal(), labels={"colour": "blue"}) for _ in range(3)])
    (running,) = await rig.submit(latch.command(labels={"colour": "red"}))
    await rig.running(running)
    done = await rig.kernel.bulk("cancel", RunQuery(label=("colour", "red")), ACTOR, dry_run=False, reason="enough")
    assert (done.count, set(done.ids), done.chore) == (6, {*red, running}, None)
    ends = await rig.ends_of([*red, running])
    assert {(run.state, run.reason) for run in ends} == {(State.CANCELLED, "enough")}
    assert {(await rig.row(run_id)).state for run_id in blue} == {State.READY}
    assert done.event_id > 0


async def test_a_dry_run_counts_and_changes_nothing(rig: Rig) -> None:
    ids = await rig.submit(*[a_run(Signal()) for _ in range(4)])
    before = (await rig.store.count()).event_id
    done = await rig.kernel.bulk("cancel", RunQuery(scope="shop"), ACTOR, dry_run=True)
    assert (done.count, set(done.ids), done.chore) == (4, set(ids), None)
    assert (await rig.store.count()).event_id == before


async def test_a_bulk_verb_that_finds_nothing_answers_with_a_stamp(rig: Rig) -> None:
    run = await rig.run(a_run())
    for verb, query in (("cancel", RunQuery(scope="shop")), ("rerun", RunQuery(states=frozenset({State.RUNNING})))):
        done = await rig.kernel.bulk(verb, query, ACTOR, dry_run=False)
        assert (done.count, done.ids) == (0, ())
        assert done.event_id >= run.changed


async def test_a_bulk_rerun_repeats_each_run_once(rig: Rig) -> None:
    ids = await rig.submit(*[a_run(Nothing(), name=f"n{place}") for place in range(7)])
    done = await rig.kernel.bulk("rerun", RunQuery(scope="shop"), ACTOR, dry_run=False)
    assert done.count == 7
    runs = (await rig.store.find_runs(RunQuery(limit=100))).runs
    assert sorted(run.spec.rerun_of for run in runs if run.spec.rerun_of) == sorted(ids)


@pytest.mark.parametrize("dry_run", [True, False])
async def test_a_cancel_of_very_many_is_a_chore_that_ends_them_all(rig: Rig, dry_run: bool) -> None:
    ids = await rig.submit(*[a_run(Signal()) for _ in range(MANY)])
    (child,) = await rig.submit(a_run(parents=(ids[0], ids[-1]), name="child"))
    done = await rig.kernel.bulk("cancel", RunQuery(name="sync"), ACTOR, dry_run=dry_run, reason="enough")
    assert (done.count, len(done.ids), done.chore is None) == (MANY, 1_000, dry_run)
    if dry_run:
        assert await _states(rig) == {State.READY: MANY, State.WAITING: 1}
        return
    ends = await rig.ends_of([*ids, child])
    assert {run.state for run in ends} == {State.CANCELLED}
    assert {run.reason for run in ends[:-1]} == {"enough"}


async def test_runs_added_after_a_bulk_cancel_of_very_many_are_not_meant(rig: Rig) -> None:
    ids = await rig.submit(*[a_run(Signal()) for _ in range(MANY)])
    await rig.kernel.bulk("cancel", RunQuery(scope="shop"), ACTOR, dry_run=False)
    (later,) = await rig.submit(a_run(Signal()))
    await rig.ends_of(ids)
    assert (await rig.row(later)).state is State.READY


async def test_a_rerun_of_very_many_is_a_chore_that_repeats_each_once(rig: Rig) -> None:
    ids = await rig.submit(*[a_run(Nothing()) for _ in range(MANY)])
    done = await rig.kernel.bulk("rerun", RunQuery(scope="shop"), ACTOR, dry_run=False)
    assert (done.count, done.chore is not None) == (MANY, True)
    after = done.event_id
    while (await _states(rig)).get(State.SUCCEEDED, 0) < 2 * MANY:
        after = (await rig.kernel.feed.wait_after(after, limit=10_000, timeout_s=60)).last
    again = [run.spec.rerun_of for run in (await rig.store.find_runs(RunQuery(limit=2 * MANY))).runs]
    assert sorted(found for found in again if found is not None) == sorted(ids)


async def test_a_bulk_cancel_of_running_runs_ends_them(rig: Rig, latch: Latch) -> None:
    ids = await rig.submit(*[latch.command() for _ in range(10)])
    await rig.running(ids[0])
    done = await rig.kernel.bulk("cancel", RunQuery(scope="shop"), ACTOR, dry_run=False)
    assert done.count == 10
    assert {run.state for run in await rig.ends_of(ids)} == {State.CANCELLED}
