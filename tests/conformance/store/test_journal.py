"""Events are numbered at commit, read in order, and forgotten in whole calls."""

from __future__ import annotations

import pytest

from stellwerk.core.event_ids import EVENTS_PER_MS
from stellwerk.core.events import StoreAdopted
from stellwerk.core.queries import JournalSlice, Retention
from stellwerk.core.times import DAY_MS
from stellwerk.store.protocol import Store
from tests.builders import NOW_MS, a_cancel, a_claim, a_gate, a_record, an_add, do, row, together

FIRST = NOW_MS * EVENTS_PER_MS
NOTHING = Retention(events_min=0, age_ms=0, events_max=10)


async def journal(store: Store) -> JournalSlice:
    return await store.read_journal(after=0, limit=1_000)


async def ids(store: Store) -> list[int]:
    return [stamped.event_id for stamped in (await journal(store)).events]


async def three_calls(store: Store) -> None:
    """Two events each, a second apart."""
    for place, run_id in enumerate("abc"):
        await do(store, an_add(run_id), now_ms=NOW_MS + place * 1_000)


# -- numbering --------------------------------------------------------------------------------------------------------


async def test_an_empty_journal_has_no_last_event(store: Store) -> None:
    assert await journal(store) == JournalSlice((), 0, 0, 0)


async def test_the_first_event_tells_the_time(store: Store) -> None:
    applied = await do(store, an_add("a"))
    assert applied.first_event_id == FIRST


async def test_events_of_a_call_have_consecutive_ids(store: Store) -> None:
    await store.apply([an_add("a"), an_add("b")], [a_claim()], NOW_MS)
    assert await ids(store) == list(range(FIRST, FIRST + 6))


async def test_a_refused_batch_leaves_no_gap(store: Store) -> None:
    await do(store, an_add("a"))
    await store.apply([an_add("b"), an_add("a"), an_add("c")], (), NOW_MS + 1)
    assert (await ids(store))[2:] == list(range(FIRST + EVENTS_PER_MS, FIRST + EVENTS_PER_MS + 4))


async def test_ids_rise_when_the_clock_stands_still(store: Store) -> None:
    await do(store, an_add("a"))
    await do(store, an_add("b"))
    assert await ids(store) == list(range(FIRST, FIRST + 4))


async def test_ids_rise_when_the_clock_goes_back(store: Store) -> None:
    await do(store, an_add("a"))
    applied = await do(store, an_add("b"), now_ms=NOW_MS - DAY_MS)
    assert applied.first_event_id == FIRST + 2


async def test_ids_rise_through_more_events_than_fit_in_a_millisecond(store: Store) -> None:
    await do(store, together(an_add(f"r{number:04}") for number in range(700)))
    applied = await do(store, an_add("last"), now_ms=NOW_MS + 1)
    assert applied.first_event_id == FIRST + 1_400


async def test_the_journal_holds_what_the_call_answered(store: Store) -> None:
    applied = await store.apply([an_add("a"), a_gate("*")], [a_claim()], NOW_MS)
    assert tuple(stamped.event for stamped in (await journal(store)).events) == applied.events


async def test_a_call_without_events_leaves_the_journal_alone(store: Store) -> None:
    await do(store, an_add("a"))
    await do(store, a_record("r"), now_ms=NOW_MS + 1)
    assert (await journal(store)).last == FIRST + 1


# -- reading ----------------------------------------------------------------------------------------------------------


async def test_events_after_an_id_are_read_in_order(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"))
    found = await store.read_journal(after=FIRST, limit=10)
    assert [stamped.event_id for stamped in found.events] == [FIRST + 1, FIRST + 2, FIRST + 3]


async def test_a_reader_who_has_seen_all_sees_nothing_new(store: Store) -> None:
    await do(store, an_add("a"))
    assert await store.read_journal(after=FIRST + 1, limit=10) == JournalSlice((), 0, FIRST + 1, FIRST + 1)


async def test_a_limit_cuts_and_says_how_far_it_looked(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"))
    found = await store.read_journal(after=0, limit=3)
    assert (len(found.events), found.examined, found.last) == (3, FIRST + 2, FIRST + 3)


async def test_a_limit_cuts_in_the_middle_of_a_call_and_the_next_read_goes_on_there(store: Store) -> None:
    await three_calls(store)
    seen: list[int] = []
    after = 0
    while len(page := (await store.read_journal(after=after, limit=1)).events) > 0:
        assert page[0].event_id > after
        seen.append(page[0].event_id)
        after = page[0].event_id
    assert seen == await ids(store)


async def test_a_reader_of_one_run_sees_only_its_events(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"), a_gate("a"))
    await do(store, a_cancel(await row(store, "a")))
    found = await store.read_journal(after=0, limit=10, run="a")
    names = [type(stamped.event).__name__ for stamped in found.events]
    assert (names, found.examined) == (["RunAdded", "RunReadied", "RunCancelled"], found.last)


async def test_a_reader_of_one_run_gets_to_the_end_page_by_page(store: Store) -> None:
    await do(store, an_add("a"), an_add("b"))
    await do(store, a_cancel(await row(store, "a")), a_cancel(await row(store, "b")))
    seen: list[int] = []
    after, last = 0, 1
    while after < last:
        found = await store.read_journal(after=after, limit=1, run="a")
        seen.extend(stamped.event_id for stamped in found.events)
        assert found.examined > after
        after, last = found.examined, found.last
    assert seen == [FIRST, FIRST + 1, FIRST + 4]


async def test_a_reader_of_an_unknown_run_sees_nothing_and_has_looked_at_all(store: Store) -> None:
    await do(store, an_add("a"))
    assert await store.read_journal(after=0, limit=10, run="b") == JournalSlice((), 0, FIRST + 1, FIRST + 1)


# -- forgetting -------------------------------------------------------------------------------------------------------


async def test_a_young_journal_is_kept(store: Store) -> None:
    await three_calls(store)
    assert await store.trim_journal(Retention(), NOW_MS + 5_000) == 0
    assert (await journal(store)).forgotten == 0


async def test_what_is_old_and_not_needed_is_forgotten(store: Store) -> None:
    await three_calls(store)
    trimmed = await store.trim_journal(Retention(events_min=0, age_ms=1_500), NOW_MS + 2_000)
    found = await journal(store)
    assert (trimmed, len(found.events), found.forgotten) == (2, 4, FIRST + 1)


async def test_an_event_exactly_as_old_as_asked_is_forgotten(store: Store) -> None:
    await three_calls(store)
    assert await store.trim_journal(Retention(events_min=0, age_ms=1_000), NOW_MS + 2_000) == 4


async def test_the_last_event_always_stays(store: Store) -> None:
    await three_calls(store)
    trimmed = await store.trim_journal(NOTHING, NOW_MS + DAY_MS)
    found = await journal(store)
    assert (trimmed, [stamped.event_id for stamped in found.events][-1]) == (4, found.last)


async def test_no_fewer_than_the_least_number_are_kept_however_old(store: Store) -> None:
    await three_calls(store)
    assert await store.trim_journal(Retention(events_min=3, age_ms=0), NOW_MS + DAY_MS) == 2
    assert len(await ids(store)) == 4


async def test_no_more_than_the_greatest_number_are_kept_however_young(store: Store) -> None:
    await three_calls(store)
    assert await store.trim_journal(Retention(events_min=0, age_ms=DAY_MS, events_max=4), NOW_MS + 2_000) == 2


async def test_calls_are_forgotten_whole(store: Store) -> None:
    await three_calls(store)
    await store.trim_journal(Retention(events_min=0, age_ms=DAY_MS, events_max=3), NOW_MS + 2_000)
    assert len(await ids(store)) == 2


async def test_trimming_twice_forgets_once(store: Store) -> None:
    await three_calls(store)
    assert await store.trim_journal(NOTHING, NOW_MS + DAY_MS) == 4
    assert await store.trim_journal(NOTHING, NOW_MS + DAY_MS) == 0
    assert (await journal(store)).forgotten == FIRST + 1_000 * EVENTS_PER_MS + 1


async def test_trimming_an_empty_journal_is_nothing(store: Store) -> None:
    assert await store.trim_journal(NOTHING, NOW_MS) == 0


async def test_one_trimming_forgets_at_most_a_thousand_calls(store: Store) -> None:
    for number in range(1_003):
        await do(store, an_add(f"r{number:04}"))
    assert await store.trim_journal(NOTHING, NOW_MS + DAY_MS) == 2_000
    assert await store.trim_journal(NOTHING, NOW_MS + DAY_MS) == 4


async def test_forgetting_does_not_touch_the_runs(store: Store) -> None:
    await three_calls(store)
    before = await row(store, "a")
    await store.trim_journal(NOTHING, NOW_MS + DAY_MS)
    assert await row(store, "a") == before


async def test_numbers_go_on_after_forgetting(store: Store) -> None:
    await three_calls(store)
    await store.trim_journal(NOTHING, NOW_MS + DAY_MS)
    last = (await journal(store)).last
    applied = await do(store, an_add("d"), now_ms=NOW_MS)
    assert applied.first_event_id == last + 1


@pytest.mark.parametrize(("offset", "is_torn"), [(-1, True), (0, False), (1, False)])
async def test_who_asks_after_less_than_what_was_forgotten_is_torn(store: Store, offset: int, is_torn: bool) -> None:
    await three_calls(store)
    await store.trim_journal(Retention(events_min=0, age_ms=DAY_MS, events_max=2), NOW_MS + 2_000)
    forgotten = (await journal(store)).forgotten
    found = await store.read_journal(after=forgotten + offset, limit=10)
    assert (forgotten + offset < found.forgotten) is is_torn
    assert [stamped.event_id for stamped in found.events] == [found.last - 1, found.last]


# -- adopting ---------------------------------------------------------------------------------------------------------


async def test_adopting_is_journaled(store: Store) -> None:
    await do(store, an_add("a"))
    await store.adopt(NOW_MS + 1, "ada")
    event = (await journal(store)).events[-1].event
    assert isinstance(event, StoreAdopted)
    assert (event.epoch, event.actor, event.at_ms) == (await store.epoch(), "ada", NOW_MS + 1)


async def test_a_follower_who_had_seen_all_is_torn_by_an_adoption(store: Store) -> None:
    await do(store, an_add("a"))
    seen = (await journal(store)).last
    await store.adopt(NOW_MS, "ada")
    found = await store.read_journal(after=seen, limit=10)
    assert seen < found.forgotten < found.last


async def test_a_follower_who_has_seen_the_adoption_is_not_torn(store: Store) -> None:
    await store.adopt(NOW_MS, "ada")
    seen = (await journal(store)).last
    await do(store, an_add("a"))
    found = await store.read_journal(after=seen, limit=10)
    assert (seen >= found.forgotten, len(found.events)) == (True, 2)
