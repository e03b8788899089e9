"""A lease is prolonged by its holder, and lost once it is over."""

from __future__ import annotations

from stellwerk.core.batch import Committed, Conflict
from stellwerk.core.queries import LeaseRef
from stellwerk.core.run import Returned, Run, State
from stellwerk.store.protocol import Store
from tests.builders import (
    LEASE_MS,
    NOW_MS,
    WORKER,
    a_cancel,
    a_drop,
    an_add,
    an_end,
    an_expiry,
    do,
    refusal,
    row,
    start_one,
)


def the_lease(run: Run) -> LeaseRef:
    return LeaseRef(run.id, run.attempt, WORKER)


async def a_started_run(store: Store, run_id: str = "a") -> Run:
    await do(store, an_add(run_id))
    return await start_one(store, run_id)


async def test_a_lease_that_is_not_over_is_prolonged(store: Store) -> None:
    run = await a_started_run(store)
    given_up = await store.extend([the_lease(run)], NOW_MS + 90_000, NOW_MS + 1)
    assert (given_up, (await row(store, "a")).alarm_ms) == ([], NOW_MS + 90_000)


async def test_prolonging_changes_nothing_but_the_lease(store: Store) -> None:
    run = await a_started_run(store)
    before = (await store.read_journal(after=0, limit=10)).last
    await store.extend([the_lease(run)], NOW_MS + 90_000, NOW_MS + 1)
    assert await row(store, "a") == run.with_(alarm_ms=NOW_MS + 90_000)
    assert (await store.read_journal(after=0, limit=10)).last == before


async def test_a_lease_is_never_made_shorter(store: Store) -> None:
    run = await a_started_run(store)
    await store.extend([the_lease(run)], NOW_MS + 2, NOW_MS + 1)
    assert (await row(store, "a")).alarm_ms == NOW_MS + LEASE_MS


async def test_a_lease_can_be_prolonged_in_its_last_millisecond(store: Store) -> None:
    run = await a_started_run(store)
    assert await store.extend([the_lease(run)], NOW_MS + 90_000, NOW_MS + LEASE_MS - 1) == []


async def test_a_lease_that_is_over_is_lost_even_if_nobody_has_taken_it(store: Store) -> None:
    run = await a_started_run(store)
    assert await store.extend([the_lease(run)], NOW_MS + 90_000, NOW_MS + LEASE_MS) == ["a"]
    assert await row(store, "a") == run


async def test_an_expired_run_is_lost_to_its_worker(store: Store) -> None:
    run = await a_started_run(store)
    await do(store, an_expiry(run, now_ms=NOW_MS + LEASE_MS))
    assert await store.extend([the_lease(run)], NOW_MS + 90_000, NOW_MS + LEASE_MS) == ["a"]


async def test_an_earlier_attempt_of_the_same_worker_is_lost(store: Store) -> None:
    first = await a_started_run(store)
    await do(store, an_end(first, Returned()))
    second = await start_one(store, "a")
    assert await store.extend([the_lease(first)], NOW_MS + 90_000, NOW_MS + 1) == ["a"]
    assert await store.extend([the_lease(second)], NOW_MS + 90_000, NOW_MS + 1) == []


async def test_the_lease_of_another_worker_cannot_be_prolonged(store: Store) -> None:
    run = await a_started_run(store)
    assert await store.extend([LeaseRef("a", run.attempt, "stranger")], NOW_MS + 90_000, NOW_MS) == ["a"]
    assert await row(store, "a") == run


async def test_an_ended_run_is_given_up(store: Store) -> None:
    run = await a_started_run(store)
    await do(store, an_end(run))
    assert await store.extend([the_lease(run)], NOW_MS + 90_000, NOW_MS) == ["a"]


async def test_a_dropped_run_is_given_up(store: Store) -> None:
    run = await a_started_run(store)
    await do(store, an_end(run))
    await do(store, a_drop(await row(store, "a")))
    assert await store.extend([the_lease(run)], NOW_MS + 90_000, NOW_MS) == ["a"]


async def test_a_run_asked_to_stop_is_answered_and_its_lease_prolonged(store: Store) -> None:
    run = await a_started_run(store)
    await do(store, a_cancel(run))
    assert await store.extend([the_lease(run)], NOW_MS + 90_000, NOW_MS + 1) == ["a"]
    stopping = await row(store, "a")
    assert (stopping.state, stopping.alarm_ms) == (State.RUNNING, NOW_MS + 90_000)


async def test_each_lease_of_a_call_is_answered_in_order(store: Store) -> None:
    runs = [await a_started_run(store, run_id) for run_id in ("d", "c", "b", "a")]
    await do(store, an_end(runs[0]), an_end(runs[2]))
    leases = [the_lease(run) for run in runs]
    assert await store.extend(leases, NOW_MS + 90_000, NOW_MS) == ["d", "b"]
    assert (await row(store, "a")).alarm_ms == NOW_MS + 90_000


async def test_no_leases_are_no_work(store: Store) -> None:
    assert await store.extend([], NOW_MS + 90_000, NOW_MS) == []


async def test_an_end_decided_before_a_prolongation_still_stands(store: Store) -> None:
    run = await a_started_run(store)
    await store.extend([the_lease(run)], NOW_MS + 90_000, NOW_MS + 1)
    assert isinstance(await refusal(store, an_end(run)), Committed)


async def test_a_lease_prolonged_meanwhile_is_not_taken(store: Store) -> None:
    run = await a_started_run(store)
    await store.extend([the_lease(run)], NOW_MS + 90_000, NOW_MS + 1)
    assert await refusal(store, an_expiry(run, now_ms=NOW_MS + LEASE_MS)) == Conflict(("run", "a"))


async def test_a_prolonged_lease_moves_the_alarm(store: Store) -> None:
    run = await a_started_run(store)
    await store.extend([the_lease(run)], NOW_MS + 90_000, NOW_MS + 1)
    due = await store.due(NOW_MS + LEASE_MS, 10)
    assert (due.runs, due.next_ms) == ((), NOW_MS + 90_000)
