"""Children wait for their parents, follow them when they end, and never start before."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from stellwerk.core.errors import Refused
from stellwerk.core.events import RunReadied, RunStarted
from stellwerk.core.facts import Facts
from stellwerk.core.queries import RunQuery
from stellwerk.core.run import Nothing, Run, Signal, State, When
from stellwerk.kernel.turns import CHORE
from tests.kernel.rig import ACTOR, Latch, Rig, a_call, a_run, a_script, within

MANY = 2_500  # more than two bunches


async def test_a_child_starts_when_all_its_parents_have_succeeded(rig: Rig) -> None:
    a, b, child = await rig.submit(a_run(Signal()), a_run(Signal()), a_run(parents=(0, 1)))
    await rig.kernel.settle(a, ACTOR, True, "go")
    row = await rig.row(child)
    assert (row.state, row.waits_for) == (State.WAITING, 1)
    await rig.kernel.settle(b, ACTOR, True, "go")
    assert (await rig.end_of(child)).state is State.SUCCEEDED


ENDS: list[tuple[When, str, State]] = [
    ("succeeded", "succeeds", State.SUCCEEDED),
    ("succeeded", "fails", State.CANCELLED),
    ("succeeded", "is cancelled", State.CANCELLED),
    ("failed", "succeeds", State.CANCELLED),
    ("failed", "fails", State.SUCCEEDED),
    ("failed", "is cancelled", State.CANCELLED),
    ("ended", "succeeds", State.SUCCEEDED),
    ("ended", "fails", State.SUCCEEDED),
    ("ended", "is cancelled", State.SUCCEEDED),
]


@pytest.mark.parametrize("added", ["before", "after"])
@pytest.mark.parametrize(("when", "how", "wanted"), ENDS)
async def test_what_the_end_of_a_parent_means_for_its_child(
    rig: Rig, when: When, how: str, wanted: State, added: str
) -> None:
    (parent,) = await rig.submit(a_run(Signal()))
    child = ""
    if added == "before":
        (child,) = await rig.submit(a_run(parents=(parent,), when=when))
    if how == "is cancelled":
        await rig.kernel.cancel(parent, ACTOR)
    else:
        await rig.kernel.settle(parent, ACTOR, how == "succeeds", "by hand")
    if added == "after":
        (child,) = await rig.submit(a_run(parents=(parent,), when=when))
    run = await rig.end_of(child)
    assert run.state is wanted
    if wanted is State.CANCELLED:
        assert run.reason is not None
        assert parent in run.reason


async def test_a_failing_worker_run_cancels_its_whole_tree_with_a_reason(rig: Rig) -> None:
    ids = await rig.submit(
        a_script("exit 1"),
        a_run(parents=(0,)),
        a_run(parents=(1,)),
        a_run(parents=(2,)),
        a_run(parents=(1,), when="ended"),
    )
    runs = await rig.ends_of(ids)
    assert [run.state for run in runs] == [State.FAILED, *[State.CANCELLED] * 3, State.SUCCEEDED]
    assert runs[3].reason == f"parent {ids[2]} was cancelled"


async def test_cancelling_a_run_that_waits_carries_down_its_tree(rig: Rig) -> None:
    later_ms = rig.parts.env.now_ms() + 3_600_000
    top, child, grandchild = await rig.submit(a_run(due_ms=later_ms), a_run(parents=(0,)), a_run(parents=(1,)))
    await rig.kernel.cancel(top, ACTOR)
    assert [(await rig.row(run_id)).state for run_id in (top, child, grandchild)] == [State.CANCELLED] * 3


async def test_a_diamond_runs_each_of_its_runs_once(rig: Rig) -> None:
    ids = await rig.submit(
        a_call("nothing"),
        a_call("nothing", parents=(0,)),
        a_call("nothing", parents=(0,)),
        a_call("nothing", parents=(1, 2)),
    )
    runs = await rig.ends_of(ids)
    assert [run.state for run in runs] == [State.SUCCEEDED] * 4
    starts = await rig.starts()
    assert Counter(starts) == Counter(ids)
    assert (starts[0], starts[-1]) == (ids[0], ids[-1])


async def test_two_parents_that_end_in_the_same_moment_release_their_child_once(rig: Rig) -> None:
    for _ in range(10):
        ids = await rig.submit(*[a_call("nothing") for _ in range(8)], a_call("nothing", parents=tuple(range(8))))
        assert (await rig.end_of(ids[-1])).state is State.SUCCEEDED
        assert (await rig.story(ids[-1])).count("RunReadied") == 1


async def test_a_parent_named_twice_counts_once(rig: Rig) -> None:
    parent, child = await rig.submit(a_run(Signal()), a_run(parents=(0, 0)))
    assert (await rig.row(child)).waits_for == 1
    await rig.kernel.settle(parent, ACTOR, True, "go")
    assert (await rig.end_of(child)).state is State.SUCCEEDED


async def test_a_child_with_a_due_time_waits_for_both(rig: Rig) -> None:
    due_ms = rig.parts.env.now_ms() + 300
    parent, child = await rig.submit(a_run(Signal()), a_run(parents=(0,), due_ms=due_ms))
    assert sorted(await rig.reasons(child)) == ["NotDue", "WaitingForParents"]
    await rig.kernel.settle(parent, ACTOR, True, "go")
    run = await rig.end_of(child)
    assert run.started_ms is not None
    assert run.started_ms >= due_ms


async def test_a_request_whose_entries_wait_for_each_other_is_refused_whole(rig: Rig) -> None:
    with pytest.raises(Refused):
        await rig.submit(a_run(parents=(1,)), a_run(parents=(2,)), a_run(parents=(0,)), a_run())
    with pytest.raises(Refused):
        await rig.submit(a_run(parents=(0,)))
    with pytest.raises(Refused):
        await rig.submit(a_run(parents=(7,)))
    assert not (await rig.store.find_runs(RunQuery())).runs


async def test_parents_may_stand_behind_their_children_in_a_request(rig: Rig) -> None:
    ids = await rig.submit(a_run(parents=(1,)), a_run(parents=(2,)), a_run())
    await rig.ends_of(ids)
    assert await rig.starts() == ids[::-1]


async def test_a_child_may_be_added_to_a_running_parent(rig: Rig, latch: Latch) -> None:
    (parent,) = await rig.submit(latch.command())
    await rig.running(parent)
    (child,) = await rig.submit(a_run(parents=(parent,)))
    assert (await rig.row(child)).state is State.WAITING
    latch.open()
    assert (await rig.end_of(child)).state is State.SUCCEEDED


async def test_adding_a_child_to_a_running_parent_does_not_shorten_its_lease(rig: Rig, latch: Latch) -> None:
    (parent,) = await rig.submit(latch.command())
    before = await rig.running(parent)
    assert before.alarm_ms is not None
    await rig.submit(a_run(parents=(parent,)))
    after = await rig.row(parent)
    assert after.alarm_ms is not None
    assert after.alarm_ms >= before.alarm_ms
    assert (after.worker, after.attempt) == (before.worker, before.attempt)


async def test_a_child_added_while_its_parent_is_just_ending_is_never_forgotten(rig: Rig) -> None:
    async def one(place: int) -> Run:
        (parent,) = await rig.submit(a_call("nothing") if place % 2 else a_run())
        for _ in range(place % 5):
            await asyncio.sleep(0)
        (child,) = await rig.submit(a_call("nothing", parents=(parent,), when="ended"))
        return await rig.end_of(child)

    ends = await asyncio.gather(*(one(place) for place in range(120)))
    assert {run.state for run in ends} == {State.SUCCEEDED}


async def test_a_child_added_while_its_parent_is_being_settled_is_never_forgotten(rig: Rig) -> None:
    async def one() -> Run:
        (parent,) = await rig.submit(a_run(Signal()))
        settling = asyncio.create_task(rig.kernel.settle(parent, ACTOR, True, "go"))
        (child,) = await rig.submit(a_run(Nothing(), parents=(parent,)))
        await settling
        return await rig.end_of(child)

    ends = await asyncio.gather(*(one() for _ in range(60)))
    assert {run.state for run in ends} == {State.SUCCEEDED}


async def test_no_child_starts_before_its_parents_have_ended(rig: Rig) -> None:
    ids = await rig.submit(*[a_call("nothing", parents=tuple(range(max(0, place - 3), place))) for place in range(60)])
    await rig.ends_of(ids)
    ended: set[str] = set()
    for event in await rig.journal():
        if isinstance(event, RunStarted):
            place = ids.index(event.run)
            assert ended >= set(ids[max(0, place - 3) : place])
        elif type(event).__name__ == "RunSucceeded":
            ended.add(getattr(event, "run"))  # noqa: B009


async def test_a_chain_of_500_runs_that_do_nothing_ends_with_its_head(rig: Rig) -> None:
    wishes = [a_run(Signal()), *[a_run(Nothing(), parents=(place,)) for place in range(500)]]
    ids = await rig.submit(*wishes)
    await rig.kernel.settle(ids[0], ACTOR, True, "go")
    runs = await rig.ends_of(ids)
    assert {run.state for run in runs} == {State.SUCCEEDED}


async def test_a_chain_of_500_runs_is_cancelled_with_its_head(rig: Rig) -> None:
    wishes = [a_run(Signal()), *[a_run(parents=(place,)) for place in range(500)]]
    ids = await rig.submit(*wishes)
    await rig.kernel.cancel(ids[0], ACTOR)
    runs = await rig.ends_of(ids)
    assert {run.state for run in runs} == {State.CANCELLED}


async def test_a_chain_longer_than_a_bunch_ends_too(rig: Rig) -> None:
    wishes = [a_run(Signal()), *[a_run(Nothing(), parents=(place,)) for place in range(1_050)]]
    ids = await rig.submit(*wishes)
    await rig.kernel.settle(ids[0], ACTOR, True, "go")
    runs = await rig.ends_of(ids)
    assert {run.state for run in runs} == {State.SUCCEEDED}
    await _nothing_owed(rig)


async def test_more_children_than_a_batch_takes_are_released_by_a_chore(rig: Rig) -> None:
    (parent,) = await rig.submit(a_run(Signal()))
    ids = await rig.submit(*[a_run(Nothing(), parents=(parent,)) for _ in range(MANY)])
    await rig.kernel.settle(parent, ACTOR, True, "go")
    runs = await rig.ends_of(ids)
    assert {run.state for run in runs} == {State.SUCCEEDED}
    readied = Counter(event.run for event in await rig.journal() if isinstance(event, RunReadied))
    assert set(readied.values()) == {1}
    await _nothing_owed(rig)


async def test_more_children_than_a_batch_takes_are_cancelled_with_what_hangs_on_them(rig: Rig) -> None:
    (parent,) = await rig.submit(a_run(Signal()))
    ids = await rig.submit(*[a_run(parents=(parent,)) for _ in range(MANY)])
    below = await rig.submit(*[a_run(parents=(ids[place],)) for place in (0, 1_000, MANY - 1)])
    last = await rig.submit(a_run(Nothing(), parents=tuple(below), when="ended"))
    await rig.kernel.settle(parent, ACTOR, False, "no")
    runs = await rig.ends_of([*ids, *below])
    assert {run.state for run in runs} == {State.CANCELLED}
    assert (await rig.end_of(last[0])).state is State.SUCCEEDED
    await _nothing_owed(rig)


async def test_children_added_while_a_chore_releases_the_others_are_not_forgotten(rig: Rig) -> None:
    (parent,) = await rig.submit(a_run(Signal()))
    ids = await rig.submit(*[a_run(Nothing(), parents=(parent,)) for _ in range(MANY)])
    settling = asyncio.create_task(rig.kernel.settle(parent, ACTOR, True, "go"))
    more = [(await rig.submit(a_run(Nothing(), parents=(parent,))))[0] for _ in range(20)]
    await settling
    runs = await rig.ends_of([*ids, *more])
    assert {run.state for run in runs} == {State.SUCCEEDED}


async def test_a_run_with_many_parents_starts_after_the_last(rig: Rig) -> None:
    parents = await rig.submit(*[a_call("nothing") for _ in range(300)])
    (child,) = await rig.submit(a_call("nothing", parents=tuple(parents)))
    assert (await rig.end_of(child)).state is State.SUCCEEDED
    assert (await rig.starts())[-1] == child


async def test_a_child_that_was_cancelled_is_left_alone_by_the_end_of_its_parent(rig: Rig) -> None:
    parent, child = await rig.submit(a_run(Signal()), a_run(parents=(0,)))
    await rig.kernel.cancel(child, ACTOR)
    await rig.kernel.settle(parent, ACTOR, True, "go")
    assert (await rig.story(child)) == ["RunAdded", "RunCancelled"]


async def _nothing_owed(rig: Rig) -> None:
    """The drop of the last chore carries no event, so it is waited for by looking."""

    async def none_left() -> None:
        while (await rig.store.load(Facts(kinds=(CHORE,)))).records:
            await asyncio.sleep(0.01)

    await within(none_left(), "all that is owed is done")
