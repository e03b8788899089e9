"""Records are small versioned things by kind and key."""

from __future__ import annotations

from msgspec import structs

from stellwerk.core.batch import Committed, Conflict, PutRecord, Record
from stellwerk.core.facts import Facts
from stellwerk.store.protocol import Store
from tests.builders import NOW_MS, a_record, a_record_drop, an_add, do, refusal, together


async def load(store: Store, key: str = "one", kind: str = "thing") -> Record | None:
    return (await store.load(Facts(records=((kind, key),)))).records.get((kind, key))


async def test_a_record_comes_back_as_it_was_put(store: Store) -> None:
    await do(store, a_record("ä/1", body=b"\x00\xff", tag="red", alarm_ms=NOW_MS + 5))
    assert await load(store, "ä/1") == Record("thing", "ä/1", 1, b"\x00\xff", "red", NOW_MS + 5)


async def test_an_absent_record_is_not_answered(store: Store) -> None:
    assert (await store.load(Facts(records=(("thing", "one"),), kinds=("thing",)))).records == {}


async def test_a_new_record_must_be_absent(store: Store) -> None:
    await do(store, a_record())
    assert await refusal(store, a_record()) == Conflict(("record", "thing", "one"))


async def test_a_record_is_replaced_by_the_next_version(store: Store) -> None:
    await do(store, a_record(body=b"1", tag="red", alarm_ms=NOW_MS))
    await do(store, a_record(body=b"2", version=2))
    assert await load(store) == Record("thing", "one", 2, b"2")


async def test_a_record_that_is_absent_cannot_be_replaced(store: Store) -> None:
    assert await refusal(store, a_record(version=2)) == Conflict(("record", "thing", "one"))


async def test_a_record_is_dropped(store: Store) -> None:
    await do(store, a_record())
    await do(store, a_record_drop())
    assert await load(store) is None


async def test_a_dropped_record_can_be_put_anew(store: Store) -> None:
    await do(store, a_record(), a_record_drop(), a_record(body=b"again"))
    found = await load(store)
    assert found is not None
    assert (found.version, found.body) == (1, b"again")


async def test_a_drop_of_another_version_conflicts(store: Store) -> None:
    await do(store, a_record(), a_record(version=2))
    assert await refusal(store, a_record_drop(version=1)) == Conflict(("record", "thing", "one"))


async def test_the_same_key_of_another_kind_is_another_record(store: Store) -> None:
    await do(store, a_record(kind="one", key="x"), a_record(kind="two", key="x", body=b"2"))
    await do(store, a_record_drop(kind="one", key="x"))
    found = await load(store, "x", "two")
    assert found is not None
    assert found.body == b"2"


async def test_a_new_record_was_added_at_the_last_event_of_its_batch(store: Store) -> None:
    applied = await do(store, together([an_add("a"), a_record("one")]), an_add("b"))
    found = await load(store)
    assert found is not None
    assert found.added == applied.first_event_id + 1


async def test_a_new_record_in_a_batch_without_events_was_added_at_the_last_event_there_is(store: Store) -> None:
    applied = await do(store, an_add("a"))
    await do(store, a_record("one"), now_ms=NOW_MS + 1)
    found = await load(store)
    assert found is not None
    assert found.added == applied.first_event_id + 1


async def test_a_replaced_record_keeps_the_moment_of_its_adding(store: Store) -> None:
    await do(store, together([an_add("a"), a_record("one")]))
    before = await load(store)
    await do(store, together([an_add("b"), a_record("one", version=2)]), now_ms=NOW_MS + 1)
    after = await load(store)
    assert before is not None
    assert after is not None
    assert (after.version, after.added) == (2, before.added)


async def test_what_the_author_says_of_added_does_not_count(store: Store) -> None:
    batch = a_record("one")
    (put,) = batch.records
    assert isinstance(put, PutRecord)
    await do(store, structs.replace(batch, records=(PutRecord(structs.replace(put.record, added=99)),)))
    found = await load(store)
    assert found is not None
    assert found.added == 0


async def test_all_records_of_a_kind_are_found(store: Store) -> None:
    await do(store, *(a_record(key, kind=kind) for key in "ba" for kind in ("x", "y", "z")))
    found = (await store.load(Facts(records=(("y", "a"),), kinds=("x",)))).records
    assert set(found) == {("y", "a"), ("x", "a"), ("x", "b")}


async def test_a_record_whose_alarm_has_rung_is_due(store: Store) -> None:
    await do(store, a_record("early", alarm_ms=NOW_MS), a_record("late", alarm_ms=NOW_MS + 1), a_record("never"))
    due = await store.due(NOW_MS, 10)
    assert ([record.key for record in due.records], due.next_ms) == (["early"], NOW_MS + 1)


async def test_due_records_come_by_alarm_then_kind_then_key(store: Store) -> None:
    await do(
        store,
        a_record("b", kind="x", alarm_ms=NOW_MS),
        a_record("a", kind="x", alarm_ms=NOW_MS),
        a_record("z", kind="w", alarm_ms=NOW_MS),
        a_record("first", kind="x", alarm_ms=NOW_MS - 1),
    )
    due = await store.due(NOW_MS, 3)
    assert [(record.kind, record.key) for record in due.records] == [("x", "first"), ("w", "z"), ("x", "a")]


async def test_an_alarm_that_was_taken_away_does_not_ring(store: Store) -> None:
    await do(store, a_record(alarm_ms=NOW_MS), a_record(version=2))
    due = await store.due(NOW_MS, 10)
    assert (due.records, due.next_ms) == ((), None)


async def test_a_dropped_record_does_not_ring(store: Store) -> None:
    await do(store, a_record(alarm_ms=NOW_MS), a_record_drop())
    assert (await store.due(NOW_MS, 10)).records == ()


async def test_a_record_without_an_event_is_committed_all_the_same(store: Store) -> None:
    assert await refusal(store, a_record()) == Committed(0)
