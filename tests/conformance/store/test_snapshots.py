"""Reads are stamped, paged in commit order, and counted from counters; alarms ring in order."""

from __future__ import annotations

import pytest

from stellwerk.core.facts import Facts, Loaded
from stellwerk.core.queries import Due, RunQuery
from stellwerk.core.run import Check, Failed, Nothing, Returned, Run, Signal, State
from stellwerk.core.times import DAY_MS
from stellwerk.store.protocol import Store
from tests.builders import (
    LEASE_MS,
    NOW_MS,
    a_cancel,
    a_claim,
    a_drop,
    a_gate,
    a_readying,
    a_record,
    a_spec,
    a_touch,
    an_add,
    an_edit,
    an_end,
    an_opening,
    claim,
    do,
    row,
    start_one,
    together,
)


async def find(store: Store, query: RunQuery) -> list[str]:
    return [run.id for run in (await store.find_runs(query)).runs]


async def walk(store: Store, query: RunQuery) -> list[list[str]]:
    """All pages of a query."""
    pages: list[list[str]] = []
    before: int | None = None
    while True:
        page = await store.find_runs(RunQuery(query.states, query.scope, before=before, limit=query.limit))
        pages.append([run.id for run in page.runs])
        if page.before is None:
            return pages
        assert before is None or page.before < before
        before = page.before


# -- stamps -----------------------------------------------------------------------------------------------------------


async def test_an_empty_store_answers_with_the_stamp_zero(store: Store) -> None:
    loaded = await store.load(Facts(runs=("a",), live_keys=("k",), children_of=("a",), gates=True, running=True))
    assert loaded == Loaded(0)


async def test_every_read_carries_the_last_event_as_its_stamp(store: Store) -> None:
    applied = await do(store, an_add("a"))
    last = applied.first_event_id + 1
    stamps = [(await store.load(Facts())).event_id, (await store.find_runs(RunQuery())).event_id]
    assert [*stamps, (await store.count()).event_id] == [last, last, last]


async def test_only_what_exists_is_loaded(store: Store) -> None:
    await do(store, an_add("a", live_key="k"), an_add("b"))
    loaded = await store.load(Facts(runs=("b", "a", "c"), live_keys=("k", "l")))
    assert (set(loaded.runs), loaded.holders) == ({"a", "b"}, {"k": "a"})


async def test_what_was_not_asked_for_is_not_loaded(store: Store) -> None:
    await do(store, an_add("a", live_key="k"), a_gate("*"), a_record("r"))
    loaded = await store.load(Facts())
    assert loaded == Loaded(loaded.event_id)


# -- finding ----------------------------------------------------------------------------------------------------------


async def test_runs_are_found_newest_first_in_commit_order(store: Store) -> None:
    await do(store, an_add("b", a_spec(created_ms=NOW_MS + 9)), an_add("c"))
    await do(store, an_add("a", a_spec(created_ms=NOW_MS - 9)), now_ms=NOW_MS - DAY_MS)
    assert await find(store, RunQuery()) == ["a", "c", "b"]


async def test_found_rows_are_whole(store: Store) -> None:
    await do(store, an_add("a", a_spec(labels={"x": "y"})))
    page = await store.find_runs(RunQuery())
    assert page.runs == (await row(store, "a"),)


async def test_a_page_leads_to_the_next_and_the_last_leads_nowhere(store: Store) -> None:
    await do(store, *(an_add(run_id) for run_id in "abcde"))
    assert await walk(store, RunQuery(limit=2)) == [["e", "d"], ["c", "b"], ["a"]]


async def test_a_page_that_ends_exactly_at_the_end_leads_nowhere(store: Store) -> None:
    await do(store, *(an_add(run_id) for run_id in "abcd"))
    assert await walk(store, RunQuery(limit=2)) == [["d", "c"], ["b", "a"]]


async def test_runs_added_while_paging_do_not_disturb_the_pages(store: Store) -> None:
    await do(store, *(an_add(run_id) for run_id in "abc"))
    first = await store.find_runs(RunQuery(limit=2))
    await do(store, an_add("d"))
    second = await store.find_runs(RunQuery(limit=2, before=first.before))
    assert [run.id for run in (*first.runs, *second.runs)] == ["c", "b", "a"]


async def test_an_empty_page_leads_nowhere(store: Store) -> None:
    page = await store.find_runs(RunQuery())
    assert (page.runs, page.before) == ((), None)


async def some_runs(store: Store) -> None:
    await do(
        store,
        an_add("a", a_spec(scope="s", name="x", labels={"team": "red"}, created_ms=NOW_MS)),
        an_add("b", a_spec(scope="s", name="y", labels={"team": "blue", "more": "red"}, created_ms=NOW_MS + 1)),
        an_add("c", a_spec(scope="t", name="x", labels={"team": "red"}, created_ms=NOW_MS + 2), due_ms=NOW_MS + 5),
        an_add("d", a_spec(scope="t", name="y", created_ms=NOW_MS + 3)),
    )
    await do(store, a_cancel(await row(store, "d")))


@pytest.mark.parametrize(
    ("query", "found"),
    [
        (RunQuery(states=frozenset({State.READY})), ["b", "a"]),
        (RunQuery(states=frozenset({State.WAITING, State.CANCELLED})), ["d", "c"]),
        (RunQuery(states=frozenset({State.RUNNING})), []),
        (RunQuery(scope="s"), ["b", "a"]),
        (RunQuery(name="x"), ["c", "a"]),
        (RunQuery(scope="t", name="x"), ["c"]),
        (RunQuery(label=("team", "red")), ["c", "a"]),
        (RunQuery(label=("more", "blue")), []),
        (RunQuery(since_ms=NOW_MS + 1), ["d", "c", "b"]),
        (RunQuery(until_ms=NOW_MS + 1), ["a"]),
        (RunQuery(since_ms=NOW_MS + 1, until_ms=NOW_MS + 3), ["c", "b"]),
        (RunQuery(states=frozenset({State.READY}), name="x", label=("team", "red"), limit=1), ["a"]),
    ],
)
async def test_a_filter_finds_what_it_says(store: Store, query: RunQuery, found: list[str]) -> None:
    await some_runs(store)
    assert await find(store, query) == found


async def test_pages_of_a_filter_leave_nothing_out(store: Store) -> None:
    await do(store, *(an_add(f"r{number}", a_spec(scope="s" if number % 3 else "t")) for number in range(9)))
    pages = await walk(store, RunQuery(scope="s", limit=2))
    assert [run_id for page in pages for run_id in page] == ["r8", "r7", "r5", "r4", "r2", "r1"]


async def test_a_dropped_run_is_not_found(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"))
    await do(store, a_cancel(await row(store, "a")))
    await do(store, a_drop(await row(store, "a")))
    assert await find(store, RunQuery()) == ["b"]


# -- counting ---------------------------------------------------------------------------------------------------------


async def counted(store: Store) -> dict[tuple[str, State], int]:
    """What the counters say, after comparing them with the rows."""
    counts = await store.count()
    by_queue = {place: number for place, number in counts.queues.items() if number}
    by_state = {state: number for state, number in counts.states.items() if number}
    found: dict[tuple[str, State], int] = {}
    states: dict[State, int] = {}
    for run in (await store.find_runs(RunQuery(limit=10_000))).runs:
        found[run.spec.queue, run.state] = found.get((run.spec.queue, run.state), 0) + 1
        states[run.state] = states.get(run.state, 0) + 1
    assert (by_queue, by_state) == (found, states)
    return by_queue


async def test_an_empty_store_counts_nothing(store: Store) -> None:
    assert await counted(store) == {}


async def test_runs_are_counted_by_queue_and_state(store: Store) -> None:
    await do(store, an_add("a"), an_add("b", due_ms=NOW_MS + 1), an_add("c", a_spec(queue="q")), an_add("d"))
    ready = State.READY
    assert await counted(store) == {("default", ready): 2, ("default", State.WAITING): 1, ("q", ready): 1}


async def test_counters_are_right_after_a_whole_life(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"))
    run = (await claim(store, a_claim(limit=1))).runs[0].run
    assert await counted(store) == {("default", State.RUNNING): 1, ("default", State.READY): 1}
    await do(store, an_end(run, Returned()))
    assert await counted(store) == {("default", State.READY): 2}
    await do(store, an_end(await start_one(store, "a"), Failed("exit")))
    await do(store, a_cancel(await row(store, "b")))
    assert await counted(store) == {("default", State.FAILED): 1, ("default", State.CANCELLED): 1}
    await do(store, a_drop(await row(store, "a")), a_drop(await row(store, "b")))
    assert await counted(store) == {}


async def test_a_refused_batch_is_not_counted(store: Store) -> None:
    await do(store, an_add("a"))
    await store.apply([together([an_add("b"), an_add("a")])], (), NOW_MS)
    assert await counted(store) == {("default", State.READY): 1}


async def test_several_changes_of_a_run_in_one_call_are_counted_once(store: Store) -> None:
    await do(store, an_add("a"))
    run = await row(store, "a")
    postponed = an_edit(run, due_ms=NOW_MS + 5)
    await do(store, postponed, a_cancel(postponed.changes[0].run))
    assert await counted(store) == {("default", State.CANCELLED): 1}


async def test_parking_does_not_change_the_counters(store: Store) -> None:
    await do(store, an_add("a"), a_gate("*"))
    await claim(store)
    assert await counted(store) == {("default", State.READY): 1}


async def test_the_end_of_a_parked_run_is_counted(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"), a_gate("*"))
    await claim(store)
    await do(store, a_cancel(await row(store, "a")))
    assert await counted(store) == {("default", State.READY): 1, ("default", State.CANCELLED): 1}


async def test_runs_without_a_worker_are_counted_too(store: Store) -> None:
    await do(store, an_add("a", a_spec(action=Signal())), an_add("b", a_spec(action=Nothing())))
    assert sum((await counted(store)).values()) == 2


# -- alarms -----------------------------------------------------------------------------------------------------------


def due_ids(due: Due) -> list[str]:
    return [run.id for run in due.runs]


async def test_an_empty_store_has_no_alarms(store: Store) -> None:
    assert await store.due(NOW_MS, 10) == Due()


async def test_a_waiting_run_is_due_at_its_moment_and_not_before(store: Store) -> None:
    await do(store, an_add("a", due_ms=NOW_MS + 5))
    before, then = await store.due(NOW_MS + 4, 10), await store.due(NOW_MS + 5, 10)
    assert (due_ids(before), before.next_ms) == ([], NOW_MS + 5)
    assert (due_ids(then), then.next_ms) == (["a"], None)


async def test_due_rows_are_whole(store: Store) -> None:
    await do(store, an_add("a", due_ms=NOW_MS + 5))
    assert (await store.due(NOW_MS + 5, 10)).runs == (await row(store, "a"),)


async def test_due_runs_come_by_alarm_then_id(store: Store) -> None:
    await do(
        store,
        an_add("b", due_ms=NOW_MS + 2),
        an_add("c", due_ms=NOW_MS + 1),
        an_add("a", due_ms=NOW_MS + 2),
        an_add("d", due_ms=NOW_MS + 3),
    )
    assert due_ids(await store.due(NOW_MS + 2, 10)) == ["c", "a", "b"]


async def test_no_more_than_the_limit_are_due_at_once(store: Store) -> None:
    await do(store, *(an_add(run_id, due_ms=NOW_MS + 1) for run_id in "abc"))
    await do(store, a_record("x", alarm_ms=NOW_MS + 1), a_record("y", alarm_ms=NOW_MS + 1))
    due = await store.due(NOW_MS + 1, 2)
    assert (due_ids(due), len(due.records)) == (["a", "b"], 2)


async def test_the_next_moment_is_the_earliest_of_runs_records_and_gates(store: Store) -> None:
    await do(store, an_add("a", due_ms=NOW_MS + 30), a_record("r", alarm_ms=NOW_MS + 20))
    await do(store, a_gate("x", until_ms=NOW_MS + 10))
    moments = [(await store.due(NOW_MS + after_ms, 10)).next_ms for after_ms in (0, 10, 20, 30)]
    assert moments == [NOW_MS + 10, NOW_MS + 20, NOW_MS + 30, None]


async def test_the_next_moment_is_behind_now_even_if_the_limit_hid_some(store: Store) -> None:
    await do(store, *(an_add(run_id, due_ms=NOW_MS + 1) for run_id in "ab"), an_add("c", due_ms=NOW_MS + 9))
    due = await store.due(NOW_MS + 1, 1)
    assert (due_ids(due), due.next_ms) == (["a"], NOW_MS + 9)


async def test_a_readied_run_does_not_ring_again(store: Store) -> None:
    await do(store, an_add("a", due_ms=NOW_MS + 5))
    await do(store, a_readying(await row(store, "a"), now_ms=NOW_MS + 5))
    assert await store.due(NOW_MS + DAY_MS, 10) == Due()


async def test_a_running_run_rings_when_its_lease_is_over(store: Store) -> None:
    await do(store, an_add("a"))
    await start_one(store, "a")
    assert due_ids(await store.due(NOW_MS + LEASE_MS - 1, 10)) == []
    assert due_ids(await store.due(NOW_MS + LEASE_MS, 10)) == ["a"]


async def test_an_ended_run_rings_when_it_may_be_forgotten(store: Store) -> None:
    await do(store, an_add("a", a_spec(keep_ms=1_000)), an_add("b", a_spec(keep_ms=None)))
    await do(store, a_cancel(await row(store, "a")), a_cancel(await row(store, "b")))
    assert due_ids(await store.due(NOW_MS + 999, 10)) == []
    assert due_ids(await store.due(NOW_MS + DAY_MS, 10)) == ["a"]


async def test_a_ready_check_rings_at_once(store: Store) -> None:
    await do(store, an_add("a", a_spec(action=Check("file", "/tmp/x"))))
    assert due_ids(await store.due(NOW_MS, 10)) == ["a"]


async def test_a_child_that_waits_for_parents_does_not_ring(store: Store) -> None:
    await do(store, an_add("a", due_ms=NOW_MS + 1, waits_for=1))
    assert await store.due(NOW_MS + DAY_MS, 10) == Due()


async def test_a_dropped_run_does_not_ring(store: Store) -> None:
    await do(store, an_add("a"))
    await do(store, a_cancel(await row(store, "a")))
    await do(store, a_drop(await row(store, "a")))
    assert await store.due(NOW_MS + 100 * DAY_MS, 10) == Due()


async def test_a_gate_is_due_when_its_time_is_over(store: Store) -> None:
    await do(store, a_gate("b", until_ms=NOW_MS + 5), a_gate("a", until_ms=NOW_MS + 5), a_gate("c"))
    before, then = await store.due(NOW_MS + 4, 10), await store.due(NOW_MS + 5, 10)
    assert ([gate.key for gate in before.gates], [gate.key for gate in then.gates]) == ([], ["a", "b"])


async def test_an_opened_gate_is_not_due(store: Store) -> None:
    await do(store, a_gate("a", until_ms=NOW_MS + 5))
    await do(store, an_opening("a"))
    assert await store.due(NOW_MS + DAY_MS, 10) == Due()


async def test_looking_changes_nothing(store: Store) -> None:
    await do(store, an_add("a", due_ms=NOW_MS + 5), a_gate("*"))
    first = await everything(store)
    assert await everything(store) == first


async def everything(store: Store) -> tuple[object, ...]:
    runs: tuple[Run, ...] = (await store.find_runs(RunQuery())).runs
    journal = await store.read_journal(after=0, limit=100)
    return runs, journal, await store.count(), await store.due(NOW_MS + 5, 10), await store.load(Facts(gates=True))


async def test_a_change_without_an_event_is_seen_by_the_next_read(store: Store) -> None:
    await do(store, an_add("a"))
    await do(store, a_touch(await row(store, "a")))
    assert (await row(store, "a")).has_children
