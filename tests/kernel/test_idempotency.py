"""A request repeated under the same key is answered as before, and does nothing a second time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stellwerk.core.errors import Clash, Refused
from stellwerk.core.facts import Facts
from stellwerk.core.run import State
from stellwerk.kernel.submit import IDEMPOTENCY, IDEMPOTENCY_KEPT_MS, Idempotency
from tests.kernel.rig import ACTOR, Latch, Rig, a_run, close, host, settings_in

KEY = Idempotency("order-17", "digest of the request")


async def test_the_same_key_answers_with_the_same_run(rig: Rig) -> None:
    first = await rig.kernel.submit([a_run(), a_run()], ACTOR, KEY)
    await rig.ends_of([added.id for added in first.runs])
    second = await rig.kernel.submit([a_run(), a_run()], ACTOR, KEY)
    assert second.runs == first.runs
    assert second.event_id == first.event_id
    assert (first.repeated, second.repeated) == (False, True)
    assert (await rig.store.count()).states[State.SUCCEEDED] == 2


async def test_the_same_key_with_another_request_is_refused(rig: Rig) -> None:
    await rig.submit(a_run(), key=KEY)
    with pytest.raises(Clash):
        await rig.submit(a_run(), key=Idempotency(KEY.key, "another digest"))


async def test_many_who_repeat_at_once_get_one_answer(rig: Rig) -> None:
    answers = await asyncio.gather(*(rig.kernel.submit([a_run()], ACTOR, KEY) for _ in range(50)))
    assert len({answer.runs for answer in answers}) == 1
    assert sum(not answer.repeated for answer in answers) == 1


async def test_a_key_is_remembered_over_a_restart(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    async with host(settings) as rig:
        first = await rig.kernel.submit([a_run()], ACTOR, KEY)
        await rig.end_of(first.runs[0].id)
    async with host(settings) as rig:
        second = await rig.kernel.submit([a_run()], ACTOR, KEY)
        assert (second.runs, second.event_id) == (first.runs, first.event_id)
        with pytest.raises(Clash):
            await rig.submit(a_run(), key=Idempotency(KEY.key, "another digest"))


async def test_a_key_is_kept_for_a_day_and_then_dropped(rig: Rig) -> None:
    before_ms = rig.parts.env.now_ms()
    await rig.submit(a_run(), key=KEY)
    record = (await rig.store.load(Facts(records=((IDEMPOTENCY, KEY.key),)))).records[IDEMPOTENCY, KEY.key]
    assert record.alarm_ms is not None
    assert IDEMPOTENCY_KEPT_MS == 24 * 3_600_000
    assert record.alarm_ms >= before_ms + IDEMPOTENCY_KEPT_MS


async def test_a_refused_request_does_not_use_its_key_up(rig: Rig) -> None:
    with pytest.raises(Refused):
        await rig.submit(a_run(parents=("nobody",)), key=KEY)
    (run_id,) = await rig.submit(a_run(), key=KEY)
    assert (await rig.end_of(run_id)).state is State.SUCCEEDED


async def test_a_repeated_request_whose_live_key_was_taken_keeps_its_first_answer(rig: Rig, latch: Latch) -> None:
    (held,) = await rig.submit(latch.command(live_key="k"))
    first = await rig.kernel.submit([a_run(live_key="k")], ACTOR, KEY)
    assert (first.runs[0].id, first.runs[0].new) == (held, False)
    latch.open()
    await rig.end_of(held)
    second = await rig.kernel.submit([a_run(live_key="k")], ACTOR, KEY)
    assert (second.runs, second.event_id) == (first.runs, first.event_id)


async def test_a_key_whose_answer_was_lost_with_the_host_is_answered_by_the_next(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    rig = Rig(settings)
    await rig.parts.open()
    first = await rig.kernel.submit([a_run()], ACTOR, KEY)
    await close(rig)
    async with host(settings) as rig:
        assert (await rig.kernel.submit([a_run()], ACTOR, KEY)).runs == first.runs
        assert (await rig.end_of(first.runs[0].id)).state is State.SUCCEEDED
