"""A limit lets so many runs of a key run at once; an end makes place for exactly one."""

from __future__ import annotations

from stellwerk.core.batch import Batch, DropRun
from stellwerk.core.facts import Facts
from stellwerk.core.run import Failed, Returned, Run
from stellwerk.store.protocol import Store
from tests.builders import (
    LEASE_MS,
    NOW_MS,
    a_cancel,
    a_claim,
    a_drop,
    a_gate,
    a_limit,
    a_spec,
    an_add,
    an_end,
    an_expiry,
    an_opening,
    claim,
    do,
    ids_of,
    row,
    together,
)

JOB = "job:shop/sync"


async def started(store: Store, *, limit: int = 10) -> list[Run]:
    return [found.run for found in (await claim(store, a_claim(limit=limit))).runs]


async def test_no_more_than_the_limit_run_at_once(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"), an_add("c"), a_limit(JOB, 2))
    claimed = await claim(store)
    assert (ids_of(claimed), claimed.parked) == (["a", "b"], 1)
    assert (await row(store, "c")).parked == JOB


async def test_a_limit_counts_what_already_ran_when_it_was_set(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"))
    await started(store, limit=1)
    await do(store, a_limit(JOB, 1))
    assert ids_of(await claim(store)) == []


async def test_a_limit_is_counted_over_all_claims_of_a_call(store: Store) -> None:
    await do(store, an_add("a", a_spec(queue="q")), an_add("b", a_spec(queue="r")), a_limit("scope:shop", 1))
    applied = await store.apply((), [a_claim("q"), a_claim("r")], NOW_MS)
    assert [ids_of(claimed) for claimed in applied.claimed] == [["a"], []]


async def test_a_limit_does_not_hold_runs_of_other_keys(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"), an_add("c", a_spec(name="other")), a_limit(JOB, 1))
    assert ids_of(await claim(store)) == ["a", "c"]


async def test_a_limit_of_none_holds_all(store: Store) -> None:
    await do(store, an_add("a"), a_limit(JOB, 0))
    assert ids_of(await claim(store)) == []


async def test_an_end_frees_exactly_one_place_for_the_best(store: Store) -> None:
    await do(store, an_add("a"), an_add("b", priority=5), an_add("c", priority=50), an_add("d", priority=5))
    await do(store, a_limit(JOB, 1))
    (run,) = await started(store)
    applied = await do(store, an_end(run))
    found = (await store.load(Facts(runs=("b", "c", "d")))).runs
    assert ([found[run_id].parked for run_id in "bcd"], applied.claimable) == ([JOB, None, JOB], frozenset({"default"}))
    assert ids_of(await claim(store)) == ["c"]


async def test_a_claim_of_the_same_call_takes_the_freed_place(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"), an_add("c"), a_limit(JOB, 1))
    (run,) = await started(store)
    applied = await store.apply([an_end(run)], [a_claim()], NOW_MS)
    assert ids_of(applied.claimed[0]) == ["b"]


async def test_two_ends_free_two_places(store: Store) -> None:
    await do(store, *(an_add(run_id) for run_id in "abcde"), a_limit(JOB, 2))
    first, second = await started(store)
    applied = await store.apply([an_end(first), an_end(second)], [a_claim()], NOW_MS)
    assert ids_of(applied.claimed[0]) == ["c", "d"]


async def test_all_parked_runs_have_their_turn(store: Store) -> None:
    await do(store, *(an_add(run_id) for run_id in "abcde"), a_limit(JOB, 2))
    order: list[str] = []
    running = await started(store)
    while running:
        order.extend(run.id for run in running)
        applied = await store.apply([an_end(run) for run in running], [a_claim()], NOW_MS)
        running = [found.run for found in applied.claimed[0].runs]
    assert order == ["a", "b", "c", "d", "e"]


async def test_a_failure_frees_a_place(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"), a_limit(JOB, 1))
    (run,) = await started(store)
    await do(store, an_end(run, Failed("exit")))
    assert ids_of(await claim(store)) == ["b"]


async def test_an_expired_lease_frees_a_place(store: Store) -> None:
    await do(store, an_add("a", priority=1), an_add("b", priority=1), a_limit(JOB, 1))
    (run,) = await started(store)
    await do(store, an_expiry(run, now_ms=NOW_MS + LEASE_MS))
    assert (await row(store, "b")).parked is None


async def test_a_run_put_back_frees_a_place_and_stands_in_line_again(store: Store) -> None:
    await do(store, an_add("a"), an_add("b", priority=500), a_limit(JOB, 1))
    (run,) = await started(store)
    await do(store, an_end(run, Returned()))
    assert ((await row(store, "a")).parked, ids_of(await claim(store))) == (None, ["b"])


async def test_a_run_asked_to_stop_keeps_its_place_until_it_has_ended(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"), a_limit(JOB, 1))
    (run,) = await started(store)
    await do(store, a_cancel(run))
    assert (await row(store, "b")).parked == JOB
    await do(store, an_end(await row(store, "a"), Failed("signal")))
    assert (await row(store, "b")).parked is None


async def test_the_end_of_a_run_that_did_not_run_frees_nothing(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"), an_add("c"), a_limit(JOB, 1))
    await started(store)
    await do(store, a_cancel(await row(store, "b")))
    assert (await row(store, "c")).parked == JOB


async def test_the_drop_of_an_ended_run_frees_nothing(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"), an_add("c"), a_limit(JOB, 1))
    (run,) = await started(store)
    await do(store, an_end(run))
    await do(store, a_drop(await row(store, "a")))
    assert (await row(store, "c")).parked == JOB


async def test_a_run_that_ends_and_is_dropped_in_one_call_frees_its_place(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"), a_limit(JOB, 1))
    (run,) = await started(store)
    ended = an_end(run)
    await do(store, ended, a_drop(ended.changes[0].run))
    assert (await row(store, "b")).parked is None


async def test_a_running_run_that_is_dropped_with_its_end_frees_its_place(store: Store) -> None:
    # A run that is not kept needs no row for its end: the batch may drop it at once.
    await do(store, an_add("a"), an_add("b"), a_limit(JOB, 1))
    (run,) = await started(store)
    ended = an_end(run)
    dropped = a_drop(ended.changes[0].run)
    await do(store, Batch(drops=(DropRun(run.id, run.version),), events=(*ended.events, *dropped.events)))
    assert (await row(store, "b")).parked is None


async def test_an_end_frees_a_place_of_each_limit_it_was_under(store: Store) -> None:
    await do(store, an_add("a", a_spec(keys=("x", "y"))), a_limit("x", 1), a_limit("y", 1))
    (run,) = await started(store)
    await do(store, an_add("b", a_spec(keys=("x",))), an_add("c", a_spec(keys=("y",))))
    await started(store)
    await do(store, an_end(run))
    assert ids_of(await claim(store)) == ["b", "c"]


async def test_an_end_does_not_bring_back_what_a_pause_holds_elsewhere(store: Store) -> None:
    await do(store, an_add("a"), an_add("b", a_spec(name="paused")), a_limit(JOB, 1), a_gate("job:shop/paused"))
    (run,) = await started(store)
    await do(store, an_end(run))
    assert (await row(store, "b")).parked == "job:shop/paused"


async def test_an_end_at_a_key_without_a_limit_brings_nothing_back(store: Store) -> None:
    await do(store, an_add("a"))
    (run,) = await started(store)
    await do(store, an_add("b"), a_gate(JOB))
    await claim(store)
    await do(store, an_end(run))
    assert (await row(store, "b")).parked == JOB


async def test_a_raised_limit_brings_back_what_the_batch_says(store: Store) -> None:
    await do(store, *(an_add(run_id) for run_id in "abcd"), a_limit(JOB, 1))
    await started(store)
    await do(store, together([a_limit(JOB, 3, version=2), Batch(unparks=(JOB,))]))
    claimed = await claim(store)
    assert (ids_of(claimed), claimed.parked) == (["b", "c"], 1)


async def test_without_its_limit_all_run(store: Store) -> None:
    await do(store, *(an_add(run_id) for run_id in "abc"), a_limit(JOB, 1))
    await started(store)
    await do(store, an_opening(JOB, "limit"))
    assert ids_of(await claim(store)) == ["b", "c"]


async def test_running_runs_are_counted_by_each_key_that_has_a_limit(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"), an_add("c", a_spec(scope="other")))
    await do(store, a_limit("*", 9), a_limit(JOB, 9), a_limit("scope:none", 9), a_gate("scope:nowhere"))
    runs = await started(store)
    await do(store, an_end(runs[0]))
    running = (await store.load(Facts(running=True))).running
    assert {key: number for key, number in running.items() if number} == {"*": 2, JOB: 1}


async def test_keys_without_a_limit_are_not_counted(store: Store) -> None:
    await do(store, an_add("a"), a_gate("scope:other"))
    await started(store)
    assert (await store.load(Facts(running=True))).running == {}


async def test_a_key_is_counted_from_the_moment_it_has_a_limit(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"))
    await started(store)
    await do(store, a_limit("queue:default", 5))
    assert (await store.load(Facts(running=True))).running == {"queue:default": 2}


async def test_a_limit_and_a_pause_at_one_key_both_hold(store: Store) -> None:
    await do(store, an_add("a"), a_limit(JOB, 5), a_gate(JOB))
    assert ids_of(await claim(store)) == []
    await do(store, an_opening(JOB))
    assert ids_of(await claim(store)) == ["a"]
