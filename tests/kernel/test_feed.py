"""Following the journal: everything in order exactly once, or Torn."""

from __future__ import annotations

import asyncio
from pathlib import Path

from stellwerk.core.events import RunAdded, type_name
from stellwerk.core.queries import Retention
from stellwerk.core.run import Nothing, Signal
from stellwerk.kernel import feed as feeding
from stellwerk.kernel.feed import Empty, Filter, NonEmpty, Torn
from tests.kernel.rig import DEADLINE_S, Rig, a_call, a_run, host, settings_in, within


async def test_events_come_in_order_and_each_once_to_a_follower_who_pages(rig: Rig) -> None:
    ids = await rig.submit(*[a_call("nothing") for _ in range(100)])
    seen: list[int] = []
    added: list[str] = []
    after = 0
    ends = 0
    while ends < 100:
        answer = await rig.kernel.feed.wait_after(after, limit=7, timeout_s=DEADLINE_S)
        assert isinstance(answer, NonEmpty), answer
        assert len(answer.events) <= 7
        seen += [stamped.event_id for stamped in answer.events]
        added += [stamped.event.run for stamped in answer.events if isinstance(stamped.event, RunAdded)]
        ends += sum(type_name(stamped.event) == "RunSucceeded" for stamped in answer.events)
        assert answer.last == answer.events[-1].event_id or len(answer.events) < 7
        after = answer.last
    assert seen == sorted(set(seen))
    assert added == ids
    assert seen == [stamped.event_id for stamped in await rig.stamped()]


async def test_a_filter_shows_what_it_names_and_moves_past_the_rest(rig: Rig) -> None:
    one, other = await rig.submit(a_run(Nothing(), scope="a", name="x"), a_run(Nothing(), scope="b", name="x"))
    last = (await rig.store.count()).event_id
    for wanted, names in (
        (Filter(run=one), ["RunAdded", "RunReadied", "RunSettled"]),
        (Filter(prefix="b/"), ["RunAdded", "RunReadied", "RunSettled"]),
        (Filter(types=frozenset({"RunSettled"})), ["RunSettled", "RunSettled"]),
        (Filter(types=frozenset({"RunSettled"}), run=other), ["RunSettled"]),
    ):
        answer = await rig.kernel.feed.wait_after(0, wanted)
        assert isinstance(answer, NonEmpty)
        assert [type_name(stamped.event) for stamped in answer.events] == names
        assert answer.last == last
    answer = await rig.kernel.feed.wait_after(0, Filter(prefix="nobody"))
    assert answer == Empty(last)


async def test_with_nothing_to_tell_the_answer_comes_with_the_timeout(rig: Rig) -> None:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    last = (await rig.store.count()).event_id
    answer = await within(rig.kernel.feed.wait_after(last, timeout_s=0.1), "an empty answer")
    assert answer == Empty(last)
    assert loop.time() - begun >= 0.1


async def test_a_quiet_filter_is_woken_by_others_events_only_to_move_on(rig: Rig) -> None:
    last = (await rig.store.count()).event_id
    waiting = asyncio.create_task(rig.kernel.feed.wait_after(last, Filter(prefix="nobody"), timeout_s=0.3))
    await asyncio.sleep(0)
    await rig.submit(a_run(Nothing()))
    answer = await waiting
    assert answer == Empty((await rig.store.count()).event_id)


async def test_who_asks_after_more_than_there_is_is_torn(rig: Rig) -> None:
    await rig.submit(a_run(Nothing()))
    last = (await rig.store.count()).event_id
    assert await rig.kernel.feed.wait_after(last, timeout_s=0) == Empty(last)
    answer = await within(rig.kernel.feed.wait_after(last + 1, timeout_s=30), "torn")
    assert answer == Torn(0, last)


async def test_who_asks_after_what_was_trimmed_is_torn_and_one_later_is_not(rig: Rig) -> None:
    for _ in range(20):
        await rig.submit(a_run(Nothing()))
    ids = [stamped.event_id for stamped in await rig.stamped()]
    rig.kernel.feed.ring_after = ids[-1]  # as if the ring had long forgotten: the store answers
    while await rig.store.trim_journal(Retention(10, 0, 10), rig.parts.env.now_ms() + 1):
        pass
    edge = (await rig.store.read_journal(ids[-1], 1)).forgotten
    assert edge in ids[1:-1]
    for after in (0, ids[0], edge - 1):
        assert await rig.kernel.feed.wait_after(after, timeout_s=DEADLINE_S) == Torn(edge, ids[-1])
    for after in (edge, edge + 1):
        answer = await rig.kernel.feed.wait_after(after)
        assert isinstance(answer, NonEmpty)
        assert [stamped.event_id for stamped in answer.events] == [found for found in ids if found > after]


async def test_who_is_behind_the_ring_reads_the_store_without_a_gap(rig: Rig) -> None:
    ring, feeding.RING_EVENTS_MAX = feeding.RING_EVENTS_MAX, 50
    try:
        for _ in range(20):
            await rig.submit(*[a_run(Nothing()) for _ in range(5)])
        assert rig.kernel.feed.ring_after > 0
        seen: list[int] = []
        after = 0
        while isinstance(answer := await rig.kernel.feed.wait_after(after, limit=11), NonEmpty):
            seen += [stamped.event_id for stamped in answer.events]
            after = answer.last
    finally:
        feeding.RING_EVENTS_MAX = ring
    assert seen == [stamped.event_id for stamped in await rig.stamped()]
    assert len(seen) == 300


async def test_2000_who_wait_are_all_answered(rig: Rig) -> None:
    (run_id,) = await rig.submit(a_run(Signal()))
    last = (await rig.store.count()).event_id
    waits = [
        asyncio.create_task(
            rig.kernel.feed.wait_after(last, Filter(run=run_id) if place % 2 else Filter(), timeout_s=DEADLINE_S)
        )
        for place in range(2_000)
    ]
    while rig.kernel.feed.followers < 2_000:
        await asyncio.sleep(0.01)
    await rig.kernel.settle(run_id, "tester", True, "go")
    answers = await within(asyncio.gather(*waits), "2,000 answers")
    assert all(isinstance(answer, NonEmpty) and len(answer.events) == 1 for answer in answers)
    assert rig.kernel.feed.followers == 0
    stamped = answers[0].events[0]  # type: ignore[union-attr]
    assert rig.kernel.feed.encoded(stamped) is rig.kernel.feed.encoded(stamped)


async def test_who_waits_when_the_host_stops_is_answered(tmp_path: Path) -> None:
    async with host(settings_in(tmp_path)) as rig:
        last = (await rig.store.count()).event_id
        waiting = asyncio.create_task(rig.kernel.feed.wait_after(last, timeout_s=3_600))
        while not rig.kernel.feed.followers:
            await asyncio.sleep(0)
    assert await within(waiting, "an answer at the stop") == Empty(last)


async def test_a_follower_of_before_a_restart_goes_on_after_it(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    async with host(settings) as rig:
        await rig.submit(a_run(Nothing()))
        after = (await rig.store.count()).event_id
    async with host(settings) as rig:
        (run_id,) = await rig.submit(a_run(Nothing()))
        answer = await rig.kernel.feed.wait_after(after)
        assert isinstance(answer, NonEmpty)
        assert [type_name(stamped.event) for stamped in answer.events] == ["RunAdded", "RunReadied", "RunSettled"]
        assert {getattr(stamped.event, "run", "") for stamped in answer.events} == {run_id}


async def test_a_read_carries_the_event_id_it_is_true_at(rig: Rig) -> None:
    (run_id,) = await rig.submit(a_run(Nothing()))
    seen = await rig.kernel.run(run_id)
    counts = await rig.store.count()
    last = (await rig.stamped())[-1].event_id
    assert seen.event_id == counts.event_id == last == seen.run.changed
