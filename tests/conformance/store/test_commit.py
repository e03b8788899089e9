"""A batch is written whole or not at all, after comparing versions."""

from __future__ import annotations

import pytest
from msgspec import structs

from stellwerk.core.batch import AlreadyLive, Batch, Committed, Conflict, RowVersion
from stellwerk.core.errors import Unavailable
from stellwerk.core.facts import Facts
from stellwerk.core.run import Body, Command, Failed, Nothing, Signal, State
from stellwerk.store.memory import MemoryStore
from stellwerk.store.protocol import Store
from tests.builders import (
    NOW_MS,
    a_cancel,
    a_claim,
    a_drop,
    a_gate,
    a_record,
    a_run,
    a_spec,
    a_touch,
    an_add,
    an_edit,
    an_end,
    an_expiry,
    do,
    refusal,
    row,
    start_one,
    together,
)


async def test_an_added_run_is_there_as_it_was_decided(store: Store) -> None:
    decided, _ = a_run("a", priority=7)
    await do(store, an_add("a", priority=7))
    found = await row(store, "a")
    assert found.with_(added=0, changed=0) == decided


async def test_a_spec_comes_back_with_all_its_parts(store: Store) -> None:
    spec = a_spec(labels={"team": "ä"}, keys=("chain:x",), action=Command(("echo", "ü", "")))
    await do(store, an_add("a", spec))
    assert (await row(store, "a")).spec == spec


async def test_nothing_of_a_batch_is_written_if_one_row_has_moved(store: Store) -> None:
    await do(store, an_add("a"))
    old = await row(store, "a")
    await do(store, an_edit(old, priority=5))
    stale = together([an_add("b"), a_record("r"), a_gate("*"), an_edit(old, priority=9)])
    await store.apply([stale], (), NOW_MS)
    found = await store.load(Facts(runs=("a", "b"), records=(("thing", "r"),), gates=True))
    assert (list(found.runs), found.runs["a"].priority, found.records, found.gates) == (["a"], 5, {}, ())


async def test_a_refused_batch_writes_no_event(store: Store) -> None:
    await do(store, an_add("a"))
    before = (await store.read_journal(after=0, limit=100)).last
    applied = await store.apply([an_add("a")], (), NOW_MS)
    assert (applied.events, (await store.read_journal(after=0, limit=100)).last) == ((), before)


async def test_a_refused_batch_does_not_keep_its_neighbours_from_standing(store: Store) -> None:
    await do(store, an_add("a"))
    applied = await store.apply([an_add("b"), an_add("a"), an_add("c")], (), NOW_MS)
    assert [type(receipt) for receipt in applied.receipts] == [Committed, Conflict, Committed]


async def test_a_conflict_names_the_run_that_was_already_there(store: Store) -> None:
    await do(store, an_add("a"))
    assert await refusal(store, an_add("a")) == Conflict(("run", "a"))


async def test_a_conflict_names_the_run_that_has_moved(store: Store) -> None:
    await do(store, an_add("a"))
    old = await row(store, "a")
    await do(store, a_touch(old))
    assert await refusal(store, a_cancel(old)) == Conflict(("run", "a"))


async def test_a_conflict_names_the_record_that_has_moved(store: Store) -> None:
    await do(store, a_record("r"))
    assert await refusal(store, a_record("r")) == Conflict(("record", "thing", "r"))


async def test_a_conflict_names_the_gate_that_has_moved(store: Store) -> None:
    await do(store, a_gate("*"))
    assert await refusal(store, a_gate("*")) == Conflict(("gate", "*", "pause"))


async def test_a_run_that_is_gone_conflicts(store: Store) -> None:
    await do(store, an_add("a"))
    old = await row(store, "a")
    await do(store, a_cancel(old))
    await do(store, a_drop(await row(store, "a")))
    assert await refusal(store, a_touch(old)) == Conflict(("run", "a"))


async def test_a_drop_of_a_run_that_has_moved_conflicts(store: Store) -> None:
    await do(store, an_add("a"))
    await do(store, a_cancel(await row(store, "a")))
    old = await row(store, "a")
    await do(store, a_touch(old))
    assert await refusal(store, a_drop(old)) == Conflict(("run", "a"))


async def test_a_row_relied_on_that_has_moved_conflicts(store: Store) -> None:
    await do(store, an_add("a"))
    old = await row(store, "a")
    await do(store, a_touch(old))
    batch = together([an_add("b"), Batch(relied=(RowVersion(("run", "a"), old.version),))])
    assert await refusal(store, batch) == Conflict(("run", "a"))


async def test_a_row_relied_on_that_has_not_moved_lets_the_batch_stand(store: Store) -> None:
    await do(store, an_add("a"))
    batch = together([an_add("b"), Batch(relied=(RowVersion(("run", "a"), 1),))])
    assert isinstance(await refusal(store, batch), Committed)


@pytest.mark.parametrize("absent", [("run", "r"), ("record", "thing", "r"), ("gate", "r", "pause")])
async def test_a_row_relied_on_as_absent_must_be_absent(store: Store, absent: tuple[str, ...]) -> None:
    relying = Batch(relied=(RowVersion(absent, 0),))
    await do(store, relying)
    await do(store, an_add("r"), a_record("r"), a_gate("r"))
    assert await refusal(store, relying) == Conflict(absent)


async def test_relying_on_a_row_does_not_change_it(store: Store) -> None:
    await do(store, an_add("a"))
    before = await row(store, "a")
    await do(store, together([an_add("b"), Batch(relied=(RowVersion(("run", "a"), 1),))]))
    assert await row(store, "a") == before


async def test_a_later_batch_builds_on_what_an_earlier_one_of_the_call_wrote(store: Store) -> None:
    run, _ = a_run("a")
    edited = an_edit(run, priority=5)
    applied = await do(store, an_add("a"), edited, a_cancel(edited.changes[0].run))
    found = await row(store, "a")
    assert (found.state, found.priority, found.version, len(applied.events)) == (State.CANCELLED, 5, 3, 4)


async def test_a_later_batch_conflicts_with_an_earlier_one_of_the_call(store: Store) -> None:
    await do(store, an_add("a"))
    run = await row(store, "a")
    applied = await store.apply([an_edit(run, priority=5), an_edit(run, priority=9)], (), NOW_MS)
    assert (applied.receipts[1], (await row(store, "a")).priority) == (Conflict(("run", "a")), 5)


async def test_a_batch_that_was_refused_is_not_built_on(store: Store) -> None:
    await do(store, a_record("r"))
    applied = await store.apply([a_record("r"), a_record("r", version=3)], (), NOW_MS)
    assert applied.receipts == (Conflict(("record", "thing", "r")), Conflict(("record", "thing", "r")))


async def test_a_batch_decided_on_a_refused_one_is_refused_even_if_the_number_fits(store: Store) -> None:
    await do(store, a_record("r"), a_record("r", version=2, body=b"real"))
    batches = [a_record("r", version=2, body=b"stale"), a_record("r", version=3, body=b"on what never was")]
    applied = await store.apply(batches, (), NOW_MS)
    assert applied.receipts == (Conflict(("record", "thing", "r")), Conflict(("record", "thing", "r")))


async def test_a_run_can_be_added_again_after_its_drop_in_the_same_call(store: Store) -> None:
    await do(store, an_add("a"))
    await do(store, a_cancel(await row(store, "a")))
    await do(store, a_drop(await row(store, "a")), an_add("a", priority=3))
    found = await row(store, "a")
    assert (found.version, found.priority, found.state) == (1, 3, State.READY)


async def test_a_second_run_with_a_live_key_is_refused_with_the_name_of_the_first(store: Store) -> None:
    await do(store, an_add("a", live_key="k"))
    assert await refusal(store, an_add("b", live_key="k")) == AlreadyLive("k", "a")
    ends_at_once = an_add("c", structs.replace(a_spec(action=Nothing()), live_key="k"), live_key="k")
    assert await refusal(store, ends_at_once) == AlreadyLive("k", "a")


async def test_a_live_key_is_compared_within_one_call(store: Store) -> None:
    applied = await store.apply([an_add("a", live_key="k"), an_add("b", live_key="k")], (), NOW_MS)
    assert applied.receipts[1] == AlreadyLive("k", "a")


async def test_a_live_key_is_compared_within_one_batch(store: Store) -> None:
    both = together([an_add("a", live_key="k"), an_add("b", live_key="k")])
    assert await refusal(store, both) == AlreadyLive("k", "a")
    assert (await store.load(Facts(runs=("a", "b")))).runs == {}


async def test_a_live_key_is_held_while_the_run_runs_and_free_when_it_has_ended(store: Store) -> None:
    await do(store, an_add("a", live_key="k"))
    run = await start_one(store, "a")
    while_running = await refusal(store, an_add("b", live_key="k"))
    await do(store, an_end(run))
    assert while_running == AlreadyLive("k", "a")
    assert isinstance(await refusal(store, an_add("b", live_key="k")), Committed)


async def test_a_live_key_freed_by_an_earlier_batch_of_the_call_can_be_taken(store: Store) -> None:
    await do(store, an_add("a", live_key="k"))
    await do(store, a_cancel(await row(store, "a")), an_add("b", live_key="k"))
    assert (await store.load(Facts(live_keys=("k",)))).holders == {"k": "b"}


async def test_a_live_key_can_be_handed_over_within_one_batch(store: Store) -> None:
    await do(store, an_add("a", live_key="k"))
    await do(store, together([an_add("b", live_key="k"), an_end(await start_one(store, "a"))]))
    assert (await store.load(Facts(live_keys=("k",)))).holders == {"k": "b"}


async def test_a_live_key_is_held_while_the_run_waits(store: Store) -> None:
    await do(store, an_add("a", live_key="k", due_ms=NOW_MS + 1_000))
    await do(store, an_edit(await row(store, "a"), due_ms=NOW_MS + 9_000))
    assert (await store.load(Facts(live_keys=("k", "other")))).holders == {"k": "a"}


async def test_a_change_may_name_the_lease_it_saw(store: Store) -> None:
    await do(store, an_add("a"))
    run = await start_one(store, "a")
    assert run.alarm_ms is not None
    assert isinstance(await refusal(store, an_expiry(run, now_ms=run.alarm_ms)), Committed)


async def test_a_change_that_saw_another_lease_end_conflicts(store: Store) -> None:
    await do(store, an_add("a"))
    run = await start_one(store, "a")
    assert run.alarm_ms is not None
    expiry = an_expiry(run.with_(alarm_ms=run.alarm_ms - 1), now_ms=run.alarm_ms)
    assert await refusal(store, expiry) == Conflict(("run", "a"))
    assert (await row(store, "a")).state is State.RUNNING


async def test_every_new_run_knows_the_event_that_added_it(store: Store) -> None:
    applied = await do(store, an_add("a"), together([an_add("b"), an_add("c")]))
    first = applied.first_event_id
    found = (await store.load(Facts(runs=("a", "b", "c")))).runs
    assert [found[run_id].added for run_id in "abc"] == [first, first + 2, first + 4]


async def test_a_change_leaves_the_moment_of_adding(store: Store) -> None:
    await do(store, an_add("a"))
    run = await row(store, "a")
    await do(store, an_edit(run.with_(added=1), priority=5), now_ms=NOW_MS + 5)
    assert (await row(store, "a")).added == run.added


async def test_every_run_written_was_changed_at_the_last_event_of_the_call(store: Store) -> None:
    applied = await store.apply([an_add("a"), an_add("b")], [a_claim(limit=1)], NOW_MS)
    last = applied.first_event_id + len(applied.events) - 1
    found = (await store.load(Facts(runs=("a", "b")))).runs
    assert {found["a"].changed, found["b"].changed, applied.claimed[0].runs[0].run.changed} == {last}


async def test_a_run_written_without_an_event_was_changed_at_the_last_event_there_is(store: Store) -> None:
    await do(store, an_add("a"))
    applied = await do(store, an_add("b"), now_ms=NOW_MS + 1)
    await do(store, a_touch(await row(store, "a")), now_ms=NOW_MS + 2)
    assert (await row(store, "a")).changed == applied.first_event_id + 1


async def test_a_receipt_names_the_last_event_of_its_batch(store: Store) -> None:
    applied = await store.apply([an_add("a"), an_add("b")], [a_claim()], NOW_MS)
    first = applied.first_event_id
    assert applied.receipts == (Committed(first + 1), Committed(first + 3))


async def test_a_receipt_of_a_batch_without_events_names_the_last_before_it(store: Store) -> None:
    before = await do(store, an_add("a"))
    applied = await do(store, a_record("r"), an_add("b"), a_record("s"), now_ms=NOW_MS + 1)
    ids = [receipt.event_id for receipt in applied.receipts if isinstance(receipt, Committed)]
    first = applied.first_event_id
    assert ids == [before.first_event_id + 1, first + 1, first + 1]


async def test_bodies_are_kept_beside_the_run(store: Store) -> None:
    args = Body("args", b"\x00\xff[1]")
    await do(store, an_add("a", a_spec(bodies=[args]), bodies=[args]))
    found = await store.load(Facts(bodies=(("a", "args"), ("a", "stdin"), ("b", "args"))))
    assert found.bodies == {("a", "args"): b"\x00\xff[1]"}


async def test_a_change_may_bring_a_body(store: Store) -> None:
    await do(store, an_add("a", bodies=[Body("args", b"1")]))
    run = await start_one(store, "a")
    await do(store, an_end(run, bodies=[Body("result", b"2")]))
    found = await store.load(Facts(bodies=(("a", "args"), ("a", "result"))))
    assert found.bodies == {("a", "args"): b"1", ("a", "result"): b"2"}


async def test_a_dropped_run_takes_its_bodies_along(store: Store) -> None:
    await do(store, an_add("a", bodies=[Body("args", b"1")]))
    await do(store, a_cancel(await row(store, "a")))
    await do(store, a_drop(await row(store, "a")))
    assert (await store.load(Facts(runs=("a",), bodies=(("a", "args"),)))).bodies == {}


async def test_bodies_of_a_dropped_run_do_not_come_back_with_its_id(store: Store) -> None:
    await do(store, an_add("a", bodies=[Body("args", b"1")]))
    await do(store, a_cancel(await row(store, "a")))
    await do(store, a_drop(await row(store, "a")), an_add("a"))
    assert (await store.load(Facts(bodies=(("a", "args"),)))).bodies == {}


async def test_queues_in_which_a_ready_run_appeared_are_claimable(store: Store) -> None:
    applied = await do(store, an_add("a", a_spec(queue="q")), an_add("b", a_spec(queue="r"), due_ms=NOW_MS + 1))
    assert applied.claimable == {"q"}


async def test_a_run_that_was_claimable_before_makes_its_queue_no_more_so(store: Store) -> None:
    await do(store, an_add("a"))
    applied = await do(store, an_edit(await row(store, "a"), priority=5))
    assert applied.claimable == frozenset()


async def test_a_queue_is_claimable_again_after_a_retry_without_delay(store: Store) -> None:
    await do(store, an_add("a"))
    run = await start_one(store, "a")
    again = await do(store, an_expiry(run, now_ms=NOW_MS + 100_000), now_ms=NOW_MS + 100_000)
    assert again.claimable == {"default"}


async def test_runs_without_a_worker_make_no_queue_claimable(store: Store) -> None:
    applied = await do(store, an_add("a", a_spec(action=Signal())))
    assert ((await row(store, "a")).state, applied.claimable) == (State.READY, frozenset())


async def test_an_ended_run_makes_no_queue_claimable(store: Store) -> None:
    await do(store, an_add("a"))
    applied = await do(store, an_end(await start_one(store, "a"), Failed("exit", "1")))
    assert applied.claimable == frozenset()


async def test_a_call_without_anything_changes_nothing(store: Store) -> None:
    await do(store, an_add("a"))
    before = await store.read_journal(after=0, limit=10)
    applied = await store.apply((), (), NOW_MS + 1)
    assert (applied.receipts, applied.claimed, applied.events, applied.claimable) == ((), (), (), frozenset())
    assert await store.read_journal(after=0, limit=10) == before


async def test_a_call_without_events_has_no_first_event(store: Store) -> None:
    await do(store, an_add("a"))
    applied = await do(store, a_record("r"), now_ms=NOW_MS + 1)
    assert (applied.first_event_id, applied.events) == (0, ())


async def test_a_foreign_store_refuses_batches_and_claims_until_it_is_adopted() -> None:
    store = MemoryStore()
    store.pretend_foreign("an older copy")
    with pytest.raises(Unavailable):
        await store.apply([an_add("a")], [a_claim()], NOW_MS)
    await store.adopt(NOW_MS, "ada")
    assert (await store.load(Facts(runs=("a",)))).runs == {}
    await do(store, an_add("a"))
