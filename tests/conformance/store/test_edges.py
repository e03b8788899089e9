"""Edges are kept between runs, seen from the parent, and go with either of the two."""

from __future__ import annotations

from stellwerk.core.batch import Batch, Committed, Conflict, Edge, changed
from stellwerk.core.dag import child_after
from stellwerk.core.facts import Child, Facts
from stellwerk.core.run import Parent, Run, State
from stellwerk.store.protocol import Store
from tests.builders import (
    ACTOR,
    NOW_MS,
    a_cancel,
    a_drop,
    a_spec,
    a_touch,
    an_add,
    an_end,
    do,
    refusal,
    row,
    start_one,
    together,
)


def a_child(run_id: str, *parents: Parent) -> Batch:
    return an_add(run_id, a_spec(parents=parents))


async def children(store: Store, parent: str, children_max: int = 1_000) -> tuple[Child, ...]:
    found = await store.load(Facts(children_of=(parent,), children_max=children_max))
    return found.children.get(parent, ())


async def child_ids(store: Store, parent: str) -> list[str]:
    return [child.run.id for child in await children(store, parent)]


async def test_a_waiting_child_is_seen_from_its_parent_with_its_condition(store: Store) -> None:
    await do(store, an_add("p", has_children=True), a_child("c", Parent("p", "failed")))
    assert await children(store, "p") == (Child(await row(store, "c"), "failed"),)


async def test_a_run_without_children_has_none(store: Store) -> None:
    await do(store, an_add("p"))
    assert await children(store, "p") == ()
    assert await children(store, "unknown") == ()


async def test_children_are_ordered_by_id(store: Store) -> None:
    await do(store, an_add("p", has_children=True), *(a_child(run_id, Parent("p")) for run_id in ("c", "a", "B")))
    assert await child_ids(store, "p") == ["B", "a", "c"]


async def test_children_of_several_parents_are_told_apart(store: Store) -> None:
    await do(
        store, an_add("p"), an_add("q"), a_child("c", Parent("p"), Parent("q", "ended")), a_child("d", Parent("q"))
    )
    found = (await store.load(Facts(children_of=("p", "q", "c")))).children
    seen = {parent: [(child.run.id, child.when) for child in found[parent]] for parent in ("p", "q")}
    assert seen == {"p": [("c", "succeeded")], "q": [("c", "ended"), ("d", "succeeded")]}


async def test_one_child_more_than_the_bunch_is_answered(store: Store) -> None:
    await do(store, an_add("p", has_children=True), *(a_child(run_id, Parent("p")) for run_id in "abcde"))
    assert [child.run.id for child in await children(store, "p", children_max=2)] == ["a", "b", "c"]


async def test_a_child_that_no_longer_waits_is_not_answered(store: Store) -> None:
    await do(store, an_add("p"), a_child("a", Parent("p")), a_child("b", Parent("p")))
    await do(store, a_cancel(await row(store, "a")))
    assert await child_ids(store, "p") == ["b"]


async def test_children_that_no_longer_wait_do_not_count_against_the_bunch(store: Store) -> None:
    await do(store, an_add("p"), *(a_child(run_id, Parent("p")) for run_id in "abcd"))
    await do(store, a_cancel(await row(store, "a")), a_cancel(await row(store, "b")))
    assert [child.run.id for child in await children(store, "p", children_max=1)] == ["c", "d"]


async def test_a_parent_has_something_live_below_it_until_its_last_child_has_ended(store: Store) -> None:
    await do(store, an_add("p", has_children=True), an_add("q"), a_child("a", Parent("p")), a_child("b", Parent("p")))
    asked = Facts(live_below=("p", "q", "unknown"))
    assert (await store.load(asked)).live_below == {"p"}
    await do(store, an_end(await start_one(store, "p")))
    await do(store, a_cancel(await row(store, "a")))
    released = release((await row(store, "p")), *await children(store, "p"))
    await do(store, released)
    assert (await row(store, "b")).state is State.READY
    assert (await store.load(asked)).live_below == {"p"}
    await do(store, an_end(await start_one(store, "b")))
    assert (await store.load(asked)).live_below == frozenset()


async def test_an_edge_is_kept_when_the_parent_has_ended(store: Store) -> None:
    await do(store, an_add("p", has_children=True), a_child("c", Parent("p")))
    await do(store, an_end(await start_one(store, "p")))
    assert await child_ids(store, "p") == ["c"]


async def test_the_end_of_a_parent_releases_its_child(store: Store) -> None:
    await do(store, an_add("p", has_children=True), a_child("c", Parent("p")))
    ended = an_end(await start_one(store, "p"))
    await do(store, together([ended, release(ended.changes[0].run, *await children(store, "p"))]))
    assert ((await row(store, "c")).state, await child_ids(store, "p")) == (State.READY, [])


async def test_a_child_of_two_parents_waits_for_both(store: Store) -> None:
    await do(store, an_add("p"), an_add("q"), a_child("c", Parent("p"), Parent("q")))
    ended = an_end(await start_one(store, "p"))
    await do(store, together([ended, release(ended.changes[0].run, *await children(store, "p"))]))
    child = await row(store, "c")
    assert (child.state, child.waits_for, child.version) == (State.WAITING, 1, 2)
    assert await child_ids(store, "q") == ["c"]


async def test_two_ends_that_release_one_child_cannot_both_be_decided_on_the_same_row(store: Store) -> None:
    await do(store, an_add("p"), an_add("q"), a_child("c", Parent("p"), Parent("q")))
    seen = await children(store, "p")
    ends = [an_end(await start_one(store, parent)) for parent in ("p", "q")]
    batches = [together([ended, release(ended.changes[0].run, *seen)]) for ended in ends]
    applied = await store.apply(batches, (), NOW_MS)
    assert isinstance(applied.receipts[0], Committed)
    assert applied.receipts[1] == Conflict(("run", "c"))
    assert (await row(store, "q")).state is State.RUNNING


async def test_a_dropped_parent_takes_its_edges_along(store: Store) -> None:
    await do(store, an_add("p"), a_child("c", Parent("p")))
    await do(store, a_cancel(await row(store, "p")))
    await do(store, a_drop(await row(store, "p")), an_add("p"))
    assert await child_ids(store, "p") == []


async def test_a_dropped_child_takes_its_edges_along(store: Store) -> None:
    await do(store, an_add("p"), a_child("c", Parent("p")))
    await do(store, a_cancel(await row(store, "c")))
    await do(store, a_drop(await row(store, "c")), an_add("c", due_ms=NOW_MS + 5))
    assert await child_ids(store, "p") == []


async def test_an_edge_can_be_added_between_runs_that_are_there(store: Store) -> None:
    await do(store, an_add("p"), an_add("c", due_ms=NOW_MS + 5))
    child = (await row(store, "c")).with_(waits_for=1, alarm_ms=None)
    linked = Batch(changes=(changed(child),), edges=(Edge("p", "c", "ended"),))
    await do(store, together([linked, a_touch(await row(store, "p"))]))
    assert await children(store, "p") == (Child(await row(store, "c"), "ended"),)


async def test_an_end_decided_before_an_edge_was_added_conflicts(store: Store) -> None:
    await do(store, an_add("p"))
    run = await start_one(store, "p")
    await do(store, together([a_touch(run), a_child("c", Parent("p"))]))
    assert await refusal(store, an_end(run)) == Conflict(("run", "p"))


async def test_a_refused_batch_leaves_no_edge(store: Store) -> None:
    await do(store, an_add("p"))
    await store.apply([together([a_child("c", Parent("p")), an_add("p")])], (), NOW_MS)
    await do(store, an_add("c", due_ms=NOW_MS + 5))
    assert await child_ids(store, "p") == []


def release(parent: Run, *seen: Child) -> Batch:
    """What the end of a parent makes of its children."""
    batches: list[Batch] = []
    for child in seen:
        after = child_after(parent, child.run, child.when, NOW_MS, ACTOR)
        assert after is not None
        batches.append(Batch(changes=(changed(after[0]),), events=tuple(after[1])))
    return together(batches)
