"""A claim moves the best ready runs of a queue to running."""

from __future__ import annotations

from stellwerk.core.events import RunStarted
from stellwerk.core.run import Body, Signal, State
from stellwerk.store.protocol import Store
from tests.builders import (
    LEASE_MS,
    NOW_MS,
    WORKER,
    a_cancel,
    a_claim,
    a_gate,
    a_spec,
    an_add,
    an_edit,
    an_end,
    an_expiry,
    claim,
    do,
    ids_of,
    row,
    start_one,
)


async def test_a_claimed_run_runs_with_a_worker_and_a_lease(store: Store) -> None:
    await do(store, an_add("a"))
    claimed = await claim(store, a_claim(worker="w", lease_ms=5_000), now_ms=NOW_MS + 7)
    run = claimed.runs[0].run
    assert (run.state, run.worker, run.attempt, run.version) == (State.RUNNING, "w", 1, 2)
    assert (run.started_ms, run.alarm_ms) == (NOW_MS + 7, NOW_MS + 5_007)


async def test_a_claimed_run_is_in_the_store_as_it_was_answered(store: Store) -> None:
    await do(store, an_add("a"))
    claimed = await claim(store)
    assert claimed.runs[0].run == await row(store, "a")


async def test_a_claim_is_journaled(store: Store) -> None:
    await do(store, an_add("a"))
    applied = await store.apply((), [a_claim()], NOW_MS + 1)
    started = RunStarted("shop/sync", WORKER, NOW_MS + 1, "a", 1, WORKER, NOW_MS + 1 + LEASE_MS)
    assert applied.events == (started,)


async def test_the_order_is_priority_then_age_then_id(store: Store) -> None:
    await do(
        store,
        an_add("a-young", a_spec(created_ms=NOW_MS + 1)),
        an_add("old-b", a_spec(created_ms=NOW_MS)),
        an_add("old-a", a_spec(created_ms=NOW_MS)),
        an_add("urgent", a_spec(created_ms=NOW_MS + 2), priority=900),
        an_add("lazy", a_spec(created_ms=NOW_MS - 9), priority=1),
    )
    assert ids_of(await claim(store)) == ["urgent", "old-a", "old-b", "a-young", "lazy"]


async def test_ids_are_compared_by_their_bytes(store: Store) -> None:
    await do(store, an_add("b"), an_add("B"), an_add("a10"), an_add("a9"), an_add("_"))
    assert ids_of(await claim(store)) == ["B", "_", "a10", "a9", "b"]


async def test_no_more_than_the_limit_is_claimed(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"), an_add("c"))
    first = await claim(store, a_claim(limit=2))
    assert (ids_of(first), first.more) == (["a", "b"], False)
    assert ids_of(await claim(store, a_claim(limit=2))) == ["c"]


async def test_a_claim_for_nothing_takes_nothing(store: Store) -> None:
    await do(store, an_add("a"), a_gate("*"))
    claimed = await claim(store, a_claim(limit=0))
    assert (claimed.runs, claimed.parked) == ((), 0)


async def test_only_runs_of_the_queue_are_claimed(store: Store) -> None:
    await do(store, an_add("a", a_spec(queue="q")), an_add("b", a_spec(queue="r")))
    assert ids_of(await claim(store, a_claim("r"))) == ["b"]


async def test_a_queue_that_nobody_knows_is_empty(store: Store) -> None:
    claimed = await claim(store, a_claim("never heard of"))
    assert (claimed.runs, claimed.parked, claimed.more, claimed.refused) == ((), 0, False, ())


async def test_only_ready_runs_are_claimed(store: Store) -> None:
    await do(store, an_add("waits", due_ms=NOW_MS + 1), an_add("ended"), an_add("runs"))
    await do(store, a_cancel(await row(store, "ended")))
    await start_one(store, "runs")
    assert ids_of(await claim(store)) == []


async def test_runs_without_a_worker_are_not_claimed(store: Store) -> None:
    await do(store, an_add("a", a_spec(action=Signal())))
    assert ids_of(await claim(store)) == []


async def test_a_run_is_claimed_once(store: Store) -> None:
    await do(store, an_add("a"))
    applied = await store.apply((), [a_claim(worker="w"), a_claim(worker="v")], NOW_MS)
    assert [ids_of(claimed) for claimed in applied.claimed] == [["a"], []]


async def test_a_claim_sees_the_batches_of_its_call(store: Store) -> None:
    applied = await store.apply([an_add("a")], [a_claim()], NOW_MS)
    assert ids_of(applied.claimed[0]) == ["a"]
    assert [type(event).__name__ for event in applied.events] == ["RunAdded", "RunReadied", "RunStarted"]


async def test_a_claim_does_not_see_a_batch_that_was_refused(store: Store) -> None:
    await do(store, an_add("a", due_ms=NOW_MS + 1))
    applied = await store.apply([an_add("a")], [a_claim()], NOW_MS)
    assert ids_of(applied.claimed[0]) == []


async def test_a_claim_does_not_take_a_run_that_a_batch_of_its_call_ended(store: Store) -> None:
    await do(store, an_add("a"))
    applied = await store.apply([a_cancel(await row(store, "a"))], [a_claim()], NOW_MS)
    assert ids_of(applied.claimed[0]) == []


async def test_every_start_counts_an_attempt(store: Store) -> None:
    await do(store, an_add("a"))
    first = await start_one(store, "a")
    later_ms = NOW_MS + LEASE_MS
    await do(store, an_expiry(first, now_ms=later_ms), now_ms=later_ms)
    second = await start_one(store, "a", now_ms=later_ms)
    assert (second.attempt, second.version) == (2, 4)


async def test_bodies_that_the_spec_names_as_inputs_come_along_in_their_order(store: Store) -> None:
    args, stdin, other = Body("args", b"1"), Body("stdin", b"2"), Body("other", b"3")
    await do(store, an_add("a", a_spec(bodies=[stdin, args]), bodies=[args, stdin, other]))
    claimed = await claim(store)
    assert claimed.runs[0].bodies == (stdin, args)


async def test_bodies_of_one_run_do_not_come_with_another(store: Store) -> None:
    args = Body("args", b"1")
    await do(store, an_add("a", a_spec(bodies=[args]), bodies=[args]), an_add("b"))
    claimed = await claim(store)
    assert [found.bodies for found in claimed.runs] == [(args,), ()]


async def test_with_only_just_those_runs_are_considered(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"), an_add("c"))
    assert ids_of(await claim(store, a_claim(only=("c", "b", "unknown")))) == ["b", "c"]


async def test_with_only_runs_of_another_queue_are_left(store: Store) -> None:
    await do(store, an_add("a", a_spec(queue="q")))
    assert ids_of(await claim(store, a_claim("r", only=("a",)))) == []


async def test_with_only_the_limit_holds_too(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"), an_add("c", priority=900))
    assert ids_of(await claim(store, a_claim(limit=1, only=("b", "c")))) == ["c"]


async def test_with_only_each_refused_run_is_answered_with_what_held_it(store: Store) -> None:
    shut = a_gate("job:shop/held")
    await do(store, an_add("a"), an_add("b", a_spec(name="held")), shut)
    claimed = await claim(store, a_claim(only=("a", "b")))
    gate = shut.gates[0].gate  # type: ignore[union-attr]  # a_gate puts
    assert (ids_of(claimed), claimed.refused, claimed.parked) == (["a"], (("b", gate),), 1)


async def test_without_only_nothing_is_answered_about_held_runs(store: Store) -> None:
    await do(store, an_add("a"), a_gate("*"))
    claimed = await claim(store)
    assert (claimed.refused, claimed.parked) == ((), 1)


async def test_an_edited_priority_counts_at_the_next_claim(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"))
    await do(store, an_edit(await row(store, "b"), priority=500))
    assert ids_of(await claim(store, a_claim(limit=1))) == ["b"]


async def test_a_run_postponed_by_an_edit_is_not_claimed(store: Store) -> None:
    await do(store, an_add("a"))
    await do(store, an_edit(await row(store, "a"), due_ms=NOW_MS + 5))
    assert ids_of(await claim(store)) == []


async def test_a_claim_that_found_nothing_writes_no_event(store: Store) -> None:
    applied = await store.apply((), [a_claim()], NOW_MS)
    assert (applied.events, (await store.read_journal(after=0, limit=1)).last) == ((), 0)


async def test_an_end_and_the_next_start_fit_in_one_call(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"))
    run = (await claim(store, a_claim(limit=1))).runs[0].run
    applied = await store.apply([an_end(run)], [a_claim(limit=1)], NOW_MS)
    assert ids_of(applied.claimed[0]) == ["b"]
