"""Gates hold claims back; held runs are parked and come back when the gate opens."""

from __future__ import annotations

from stellwerk.core.batch import Batch, Committed
from stellwerk.core.facts import Facts
from stellwerk.core.gates import Gate
from stellwerk.core.run import State
from stellwerk.store.protocol import Store
from tests.builders import (
    ACTOR,
    NOW_MS,
    a_cancel,
    a_claim,
    a_drop,
    a_gate,
    a_spec,
    a_touch,
    an_add,
    an_edit,
    an_opening,
    claim,
    do,
    ids_of,
    row,
    together,
)


async def parked(store: Store, *run_ids: str) -> list[str | None]:
    found = (await store.load(Facts(runs=run_ids))).runs
    return [found[run_id].parked for run_id in run_ids]


async def test_a_gate_comes_back_as_it_was_put(store: Store) -> None:
    await do(store, a_gate("job:a/b", "block", floor=5, until_ms=NOW_MS + 1, exempt=("x/y", "x/z")))
    gate = Gate("job:a/b", "block", 1, 5, None, ("x/y", "x/z"), NOW_MS + 1, "because", ACTOR, NOW_MS)
    assert (await store.load(Facts(gates=True))).gates == (gate,)


async def test_gates_come_by_key_then_kind(store: Store) -> None:
    await do(store, a_gate("b"), a_gate("a"), a_gate("a", "block"))
    found = (await store.load(Facts(gates=True))).gates
    assert [(gate.key, gate.kind) for gate in found] == [("a", "block"), ("a", "pause"), ("b", "pause")]


async def test_a_gate_is_replaced_by_the_next_version(store: Store) -> None:
    await do(store, a_gate("a"), a_gate("a", version=2, floor=9))
    (gate,) = (await store.load(Facts(gates=True))).gates
    assert (gate.version, gate.floor) == (2, 9)


async def test_an_opened_gate_is_gone(store: Store) -> None:
    await do(store, a_gate("a"), an_opening("a"))
    assert (await store.load(Facts(gates=True))).gates == ()


async def test_a_paused_job_is_not_claimed_but_its_neighbour_is(store: Store) -> None:
    await do(store, an_add("a", a_spec(name="held")), an_add("b"), a_gate("job:shop/held"))
    claimed = await claim(store)
    assert (ids_of(claimed), claimed.parked) == (["b"], 1)


async def test_a_held_run_is_parked_under_the_key_of_the_gate(store: Store) -> None:
    await do(store, an_add("a"), a_gate("scope:shop"))
    await claim(store)
    assert await parked(store, "a") == ["scope:shop"]


async def test_of_several_gates_the_widest_key_parks(store: Store) -> None:
    await do(store, an_add("a"), a_gate("job:shop/sync"), a_gate("*"), a_gate("scope:shop"))
    await claim(store)
    assert await parked(store, "a") == ["*"]


async def test_parking_is_no_change(store: Store) -> None:
    await do(store, an_add("a"), a_gate("*"))
    before = await row(store, "a")
    await do(store, an_add("b", a_spec(queue="elsewhere")), now_ms=NOW_MS + 1)
    applied = await store.apply((), [a_claim()], NOW_MS + 2)
    assert (await row(store, "a"), applied.events) == (before.with_(parked="*"), ())


async def test_a_parked_run_is_not_looked_at_again(store: Store) -> None:
    await do(store, an_add("a"), a_gate("*"))
    await claim(store)
    assert (await claim(store)).parked == 0


async def test_a_parked_run_is_not_claimed_even_if_the_gate_is_gone(store: Store) -> None:
    await do(store, an_add("a"), a_gate("*"))
    await claim(store)
    await do(store, an_opening("*", unparks=False))
    assert ids_of(await claim(store)) == []
    assert ids_of(await claim(store, a_claim(only=("a",)))) == []


async def test_parked_runs_come_back_in_their_order(store: Store) -> None:
    await do(store, an_add("a", priority=1), an_add("b", priority=900), an_add("c"), a_gate("*"))
    await claim(store)
    applied = await do(store, an_opening("*"))
    receipt = applied.receipts[0]
    assert isinstance(receipt, Committed)
    assert (receipt.unparked, applied.claimable) == (3, frozenset({"default"}))
    assert ids_of(await claim(store)) == ["b", "c", "a"]


async def test_unparking_is_no_change(store: Store) -> None:
    await do(store, an_add("a"), a_gate("*"))
    await claim(store)
    before = await row(store, "a")
    await do(store, Batch(unparks=("*",)), an_add("b"), now_ms=NOW_MS + 1)
    assert await row(store, "a") == before.with_(parked=None)


async def test_a_claim_of_the_same_call_sees_what_was_unparked(store: Store) -> None:
    await do(store, an_add("a"), a_gate("*"))
    await claim(store)
    applied = await store.apply([an_opening("*")], [a_claim()], NOW_MS)
    assert ids_of(applied.claimed[0]) == ["a"]


async def test_only_runs_parked_under_that_key_come_back(store: Store) -> None:
    await do(store, an_add("a", a_spec(scope="s")), an_add("b", a_spec(scope="t")))
    await do(store, a_gate("scope:s"), a_gate("scope:t"))
    await claim(store)
    await do(store, an_opening("scope:s"))
    assert await parked(store, "a", "b") == [None, "scope:t"]


async def test_a_refused_batch_unparks_nothing(store: Store) -> None:
    await do(store, an_add("a"), a_gate("*"))
    await claim(store)
    await store.apply([an_opening("*", version=2)], (), NOW_MS)
    assert await parked(store, "a") == ["*"]


async def test_unparking_where_nothing_is_parked_is_nothing(store: Store) -> None:
    applied = await do(store, Batch(unparks=("*", "scope:shop")))
    assert (applied.receipts, applied.claimable) == ((Committed(0),), frozenset())


async def test_a_run_that_comes_back_may_be_held_by_another_gate(store: Store) -> None:
    await do(store, an_add("a"), a_gate("*"), a_gate("scope:shop"))
    await claim(store)
    await do(store, an_opening("*"))
    claimed = await claim(store)
    assert (ids_of(claimed), claimed.parked, await parked(store, "a")) == ([], 1, ["scope:shop"])


async def test_runs_from_the_floor_on_pass(store: Store) -> None:
    await do(store, an_add("a", priority=499), an_add("b", priority=500), a_gate("*", floor=500))
    assert ids_of(await claim(store)) == ["b"]


async def test_exempt_jobs_pass(store: Store) -> None:
    await do(store, an_add("a"), an_add("b", a_spec(name="vip")), a_gate("*", exempt=("shop/vip",)))
    assert ids_of(await claim(store)) == ["b"]


async def test_a_gate_holds_until_its_moment_and_not_longer(store: Store) -> None:
    await do(store, an_add("a"), a_gate("*", until_ms=NOW_MS + 5))
    assert ids_of(await claim(store, now_ms=NOW_MS + 4)) == []
    await do(store, Batch(unparks=("*",)))
    assert ids_of(await claim(store, now_ms=NOW_MS + 5)) == ["a"]


async def test_a_gate_shut_in_the_same_call_holds(store: Store) -> None:
    await do(store, an_add("a"))
    applied = await store.apply([a_gate("*")], [a_claim()], NOW_MS)
    assert ids_of(applied.claimed[0]) == []


async def test_a_gate_at_a_key_of_the_run_alone_holds(store: Store) -> None:
    await do(store, an_add("a", a_spec(keys=("chain:x",))), an_add("b"), a_gate("chain:x"))
    assert ids_of(await claim(store)) == ["b"]


async def test_a_parked_run_can_be_cancelled_and_does_not_come_back(store: Store) -> None:
    await do(store, an_add("a"), a_gate("*"))
    await claim(store)
    await do(store, a_cancel(await row(store, "a")))
    applied = await do(store, an_opening("*"))
    assert applied.claimable == frozenset()
    assert ((await row(store, "a")).state, await parked(store, "a")) == (State.CANCELLED, [None])


async def test_a_dropped_run_does_not_come_back(store: Store) -> None:
    await do(store, an_add("a"), a_gate("*"))
    await claim(store)
    await do(store, a_cancel(await row(store, "a")))
    await do(store, a_drop(await row(store, "a")))
    applied = await do(store, an_opening("*"))
    assert applied.receipts == (Committed(applied.first_event_id, unparked=0),)


async def test_a_parked_run_that_is_written_is_claimable_again(store: Store) -> None:
    # Its priority may now be above the floor: the next claim decides afresh.
    await do(store, an_add("a"), a_gate("*", floor=500))
    await claim(store)
    applied = await do(store, an_edit(await row(store, "a"), priority=600))
    assert (await parked(store, "a"), applied.claimable) == ([None], frozenset({"default"}))
    assert ids_of(await claim(store)) == ["a"]


async def test_a_parked_run_postponed_by_an_edit_does_not_come_back_before_its_time(store: Store) -> None:
    await do(store, an_add("a"), a_gate("*"))
    await claim(store)
    await do(store, an_edit(await row(store, "a"), due_ms=NOW_MS + 5))
    await do(store, an_opening("*"))
    assert (ids_of(await claim(store)), (await row(store, "a")).state) == ([], State.WAITING)


async def test_what_the_author_of_a_change_says_of_parking_does_not_count(store: Store) -> None:
    await do(store, an_add("a"), a_gate("*"))
    await claim(store)
    stale = await row(store, "a")
    await do(store, an_opening("*"))
    await do(store, a_touch(stale))
    assert ids_of(await claim(store)) == ["a"]


async def test_a_claim_parks_at_most_a_thousand_runs_and_says_that_there_are_more(store: Store) -> None:
    await do(store, together(an_add(f"r{number:04}") for number in range(1_200)), a_gate("*"))
    await do(store, an_add("z", a_spec(queue="default", scope="free"), priority=1))
    first, second = await claim(store), await claim(store)
    assert ((first.parked, first.more), (second.parked, second.more)) == ((1_000, True), (201, False))


async def test_a_run_behind_a_thousand_held_ones_is_found_at_the_next_look(store: Store) -> None:
    await do(store, together(an_add(f"r{number:04}") for number in range(1_000)), a_gate("job:shop/sync"))
    await do(store, an_add("z", a_spec(name="free")))
    first = await claim(store)
    assert (ids_of(first), first.parked, first.more) == ([], 1_000, True)
    assert ids_of(await claim(store)) == ["z"]


async def test_unparking_brings_the_best_thousand_back(store: Store) -> None:
    await do(store, together(an_add(f"r{number:04}", priority=1 + number % 2) for number in range(1_200)))
    await do(store, a_gate("*"))
    await claim(store)
    await claim(store)
    first = await do(store, an_opening("*"))
    best = await claim(store, a_claim(limit=2_000))
    second = await do(store, Batch(unparks=("*",)))
    unparked = [receipt.unparked for receipt in (*first.receipts, *second.receipts) if isinstance(receipt, Committed)]
    assert (unparked, len(best.runs)) == ([1_000, 200], 1_000)
    assert ids_of(best)[:2] == ["r0001", "r0003"]
    assert ids_of(best)[599:602] == ["r1199", "r0000", "r0002"]
