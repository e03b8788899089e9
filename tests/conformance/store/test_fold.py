"""Folding the journal gives the tables, whatever was done, and a table that lies is found out."""

from __future__ import annotations

import pytest

from stellwerk.core.batch import Batch, Edge, changed
from stellwerk.core.errors import ImpossibleEvent
from stellwerk.core.events import RunEdited, Stamped
from stellwerk.core.run import Parent
from stellwerk.store.memory import MemoryStore
from stellwerk.store.protocol import Store
from tests.builders import (
    ACTOR,
    NOW_MS,
    a_cancel,
    a_change,
    a_gate,
    a_record,
    a_spec,
    a_touch,
    an_add,
    an_opening,
    do,
    row,
    together,
)
from tests.conformance.fold import difference, fold
from tests.conformance.operations import Operations

SEQUENCES, CALLS = 15, 40


async def journal(store: Store) -> list[Stamped]:
    events: list[Stamped] = []
    while True:
        page = await store.read_journal(after=events[-1].event_id if events else 0, limit=500)
        if not page.events:
            return events
        assert not events or page.events[0].event_id > events[-1].event_id
        events.extend(page.events)


async def told(store: Store) -> list[str]:
    return await difference(fold(await journal(store)), store)


async def test_the_journal_of_random_operations_gives_the_tables() -> None:
    for seed in range(SEQUENCES):
        store, operations = MemoryStore(), Operations(seed)
        for _ in range(CALLS):
            operations.tick()
            batches, claims = await operations.call(store)
            await store.apply(batches, claims, operations.now_ms)
            await store.extend(await operations.leases(store), operations.now_ms + 5_000, operations.now_ms)
            assert await told(store) == [], f"seed {seed}"


async def test_the_journal_of_any_store_gives_its_tables(store: Store) -> None:
    operations = Operations(seed=1)
    for _ in range(CALLS):
        operations.tick()
        batches, claims = await operations.call(store)
        await store.apply(batches, claims, operations.now_ms)
    assert await told(store) == []


async def test_a_change_without_its_event_is_found_out() -> None:
    store = MemoryStore()
    await do(store, an_add("a"))
    await do(store, Batch(changes=(changed((await row(store, "a")).with_(priority=7)),)))
    assert await told(store) == ["run a: priority is 7, by the journal 100"]


async def test_an_event_without_its_change_is_found_out() -> None:
    store = MemoryStore()
    await do(store, an_add("a"))
    await do(store, Batch(events=(RunEdited("shop/sync", ACTOR, NOW_MS, "a", 7, None),)))
    assert "run a: priority is 100, by the journal 7" in await told(store)


async def test_an_edge_that_was_not_written_is_found_out() -> None:
    store = MemoryStore()
    await do(store, an_add("p", has_children=True), an_add("c", a_spec(parents=[Parent("p")])))
    assert await told(store) == []
    await do(store, Batch(edges=(Edge("p", "c", "failed"),)))
    assert await told(store) == ["children of p are {'c': 'failed'}, by the journal {'c': 'succeeded'}"]


async def test_a_parent_that_does_not_know_of_its_child_is_found_out() -> None:
    store = MemoryStore()
    await do(store, an_add("p"), an_add("c", a_spec(parents=[Parent("p")])), an_add("q"))
    await do(store, a_touch(await row(store, "q")))
    assert await told(store) == [
        "run p does not know of its child c",
        "run q has children, by the journal it has none",
    ]


async def test_a_gate_that_nobody_shut_is_found_out() -> None:
    store = MemoryStore()
    await do(store, a_gate("x"), Batch(gates=a_gate("y").gates))
    assert await told(store) == ["gate ('y', 'pause') is only in the store"]


async def test_a_gate_opened_by_an_event_only_is_found_out() -> None:
    store = MemoryStore()
    await do(store, a_gate("x"), Batch(events=an_opening("x").events))
    assert await told(store) == ["gate ('x', 'pause') is only in the store"]


async def test_a_child_readied_before_its_parents_ended_is_impossible() -> None:
    store = MemoryStore()
    await do(store, an_add("p", has_children=True), an_add("c", a_spec(parents=[Parent("p")])))
    early = (await row(store, "c")).with_(waits_for=0)
    await do(store, a_change(early, an_add("c").events[1:]))  # type: ignore[arg-type]  # its RunReadied
    with pytest.raises(ImpossibleEvent):
        fold(await journal(store))


async def test_waiting_children_are_not_compared_while_chores_are_owed() -> None:
    store = MemoryStore()
    await do(store, an_add("p", has_children=True), an_add("c", a_spec(parents=[Parent("p")])))
    parent = await row(store, "p")
    await do(store, together([a_cancel(parent), a_record("children", kind="chore")]))
    assert await told(store) == []
