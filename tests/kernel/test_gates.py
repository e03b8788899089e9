"""Gates hold back claims, not rows: pause, block, hold, limit; and what they held comes back in order."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stellwerk.core.errors import NotFound
from stellwerk.core.events import GateOpened, RunStarted
from stellwerk.core.gates import Gate
from stellwerk.core.run import State
from tests.kernel.rig import ACTOR, Latch, Rig, a_call, a_run, host, settings_in, within

ENDS = ("RunSucceeded", "RunFailed", "RunCancelled", "RunPostponed")


async def test_a_paused_job_does_not_start_but_its_neighbour_does(rig: Rig) -> None:
    await rig.shut("job:shop/sync")
    held, neighbour = await rig.submit(a_run(), a_run(name="other"))
    await rig.end_of(neighbour)
    assert (await rig.row(held)).state is State.READY
    (reason,) = await rig.why(held)
    assert (reason.type, reason.evidence["gate"]) == ("Paused", "job:shop/sync")
    assert "because" in reason.message


@pytest.mark.parametrize("key", ["*", "scope:shop", "job:shop/sync", "queue:default"])
async def test_a_gate_may_stand_at_each_key_of_a_run(rig: Rig, key: str) -> None:
    await rig.shut(key)
    (run_id,) = await rig.submit(a_run())
    assert await rig.reasons(run_id) == ["Paused"]
    await rig.unshut(key)
    assert (await rig.end_of(run_id)).state is State.SUCCEEDED


async def test_what_was_paused_comes_back_in_order_of_priority(one_slot: Rig) -> None:
    rig = one_slot
    await rig.shut("*")
    wanted: list[tuple[int, str]] = []
    for priority in (100, 900, 1, 500, 900):
        (run_id,) = await rig.submit(a_run(priority=priority))
        wanted.append((-priority, run_id))
    await _parked(rig, [run_id for _, run_id in wanted])
    await rig.unshut("*")
    await rig.ends_of([run_id for _, run_id in wanted])
    assert await rig.starts() == [run_id for _, run_id in sorted(wanted, key=lambda pair: pair[0])]


async def test_more_paused_runs_than_a_bunch_all_come_back_in_order(tmp_path: Path) -> None:
    async with host(settings_in(tmp_path, slots=1)) as rig:
        await rig.shut("scope:shop")
        ids = await rig.submit(*[a_call("nothing", isolation="thread") for _ in range(1_100)])
        ids += await rig.submit(a_call("nothing", isolation="thread", priority=900))
        await _parked(rig, ids)
        (neighbour,) = await rig.submit(a_run(scope="other"))
        await rig.end_of(neighbour)
        await rig.unshut("scope:shop")
        await rig.ends_of(ids)
        starts = await rig.starts()
        assert Counter(starts) == Counter([neighbour, *ids])
        assert starts[1] == ids[-1]


async def test_a_running_attempt_goes_on_under_a_pause(rig: Rig, latch: Latch) -> None:
    (run_id,) = await rig.submit(latch.command())
    await rig.running(run_id)
    await rig.shut("*")
    latch.open()
    assert (await rig.end_of(run_id)).state is State.SUCCEEDED


async def test_nothing_starts_after_a_pause_was_acknowledged(rig: Rig) -> None:
    async def shut() -> int:
        _, event_id = await rig.kernel.shut(Gate("*", "pause", actor=ACTOR))
        return event_id

    ids, shut_at = await asyncio.gather(rig.submit(*[a_run() for _ in range(100)]), shut())
    ids += await rig.submit(*[a_run() for _ in range(20)])
    (probe,) = await rig.submit(a_run())
    assert await rig.reasons(probe) == ["Paused"]
    started = [stamped.event_id for stamped in await rig.stamped() if isinstance(stamped.event, RunStarted)]
    assert not [event_id for event_id in started if event_id > shut_at]
    await rig.unshut("*")
    await rig.ends_of(ids)


async def test_a_block_survives_the_unpause_of_the_same_key(rig: Rig) -> None:
    await rig.shut("*", "block")
    await rig.shut("*", "pause")
    (run_id,) = await rig.submit(a_run())
    assert sorted(await rig.reasons(run_id)) == ["Blocked", "Paused"]
    await rig.unshut("*", "pause")
    assert await rig.reasons(run_id) == ["Blocked"]
    await rig.unshut("*", "block")
    assert (await rig.end_of(run_id)).state is State.SUCCEEDED


async def test_a_run_held_by_two_gates_starts_only_when_both_are_open(rig: Rig) -> None:
    await rig.shut("scope:shop")
    await rig.shut("job:shop/sync")
    (run_id,) = await rig.submit(a_run())
    await _parked(rig, [run_id])
    for key in ("scope:shop", "job:shop/sync"):
        assert (await rig.row(run_id)).state is State.READY
        await rig.unshut(key)
    assert (await rig.end_of(run_id)).state is State.SUCCEEDED


async def test_a_gate_that_is_not_there_cannot_be_opened(rig: Rig) -> None:
    with pytest.raises(NotFound):
        await rig.unshut("*")


async def test_a_gate_with_an_end_opens_by_itself_and_lets_its_runs_go(rig: Rig) -> None:
    until_ms = rig.parts.env.now_ms() + 400
    await rig.shut("*", until_ms=until_ms)
    (run_id,) = await rig.submit(a_run())
    (reason,) = await rig.why(run_id)
    assert (reason.type, reason.until_ms) == ("Paused", until_ms)
    run = await rig.end_of(run_id)
    assert run.started_ms is not None
    assert run.started_ms >= until_ms
    opened = await rig.event(GateOpened)
    assert opened.gate == "*"
    assert not (await rig.kernel.gates())[0]


async def test_a_gate_shut_again_has_its_new_end(rig: Rig) -> None:
    await rig.shut("*", until_ms=rig.parts.env.now_ms() + 3_600_000)
    (run_id,) = await rig.submit(a_run())
    await _parked(rig, [run_id])
    await rig.shut("*", until_ms=rig.parts.env.now_ms() + 100)
    assert (await rig.end_of(run_id)).state is State.SUCCEEDED


async def test_a_hold_lets_the_more_urgent_through(rig: Rig) -> None:
    await rig.shut("*", "hold", floor=500)
    low, high = await rig.submit(a_run(priority=499), a_run(priority=500))
    await rig.end_of(high)
    assert await rig.reasons(low) == ["Held"]


async def test_a_held_run_that_is_made_more_urgent_goes_through(rig: Rig) -> None:
    await rig.shut("*", "hold", floor=500)
    (run_id,) = await rig.submit(a_run(priority=100))
    await _parked(rig, [run_id])
    await rig.kernel.edit(run_id, ACTOR, 600, None)
    assert (await rig.end_of(run_id)).state is State.SUCCEEDED


async def test_a_gate_spares_the_jobs_that_are_exempt(rig: Rig) -> None:
    await rig.shut("*", exempt=("shop/vip",))
    held, exempt = await rig.submit(a_run(), a_run(name="vip"))
    await rig.end_of(exempt)
    assert (await rig.row(held)).state is State.READY


async def test_a_parked_run_can_be_cancelled(rig: Rig) -> None:
    await rig.shut("*")
    (run_id,) = await rig.submit(a_run())
    await _parked(rig, [run_id])
    await rig.kernel.cancel(run_id, ACTOR)
    row = await rig.row(run_id)
    assert (row.state, row.parked) == (State.CANCELLED, None)


async def test_a_limit_is_never_exceeded_under_load(tmp_path: Path) -> None:
    async with host(settings_in(tmp_path, slots=8)) as rig:
        await rig.shut("scope:shop", "limit", limit=2)
        await rig.shut("job:shop/one", "limit", limit=1)
        wishes = [a_call("nothing", name="one" if place % 3 == 0 else "two") for place in range(150)]
        wishes += [a_run(name="three") for _ in range(20)]
        ids = await rig.submit(*wishes)
        free = await rig.submit(*[a_call("nothing", scope="free") for _ in range(50)])
        runs = await rig.ends_of([*ids, *free])
        assert {run.state for run in runs} == {State.SUCCEEDED}
        most = _most_at_once(await rig.journal())
        assert most["shop"] == 2
        assert most["shop/one"] == 1
        assert most["free"] > 1


async def test_a_run_held_by_a_limit_says_so_and_starts_when_a_place_is_free(rig: Rig, latch: Latch) -> None:
    await rig.shut("job:shop/sync", "limit", limit=1)
    first, second = await rig.submit(latch.command(), a_run())
    await rig.running(first)
    (reason,) = await rig.why(second)
    assert reason.type == "LimitReached"
    assert "1 of at most 1" in reason.message
    latch.open()
    assert (await rig.end_of(second)).state is State.SUCCEEDED


@pytest.mark.parametrize("how", ["cancel", "fail"])
async def test_a_place_under_a_limit_is_freed_however_its_run_ends(rig: Rig, latch: Latch, how: str) -> None:
    await rig.shut("*", "limit", limit=1)
    first, second = await rig.submit(latch.command(timeout_ms=300 if how == "fail" else None), a_run())
    await rig.running(first)
    if how == "cancel":
        await rig.kernel.cancel(first, ACTOR)
    assert (await rig.end_of(second)).state is State.SUCCEEDED


async def test_a_raised_limit_lets_more_start(rig: Rig, latch: Latch) -> None:
    await rig.shut("*", "limit", limit=1)
    ids = await rig.submit(*[latch.command() for _ in range(3)])
    await rig.running(ids[0])
    await rig.shut("*", "limit", limit=3)
    for run_id in ids:
        await rig.running(run_id)
    latch.open()
    await rig.ends_of(ids)


async def test_a_limit_of_nothing_holds_all(rig: Rig) -> None:
    await rig.shut("*", "limit", limit=0)
    (run_id,) = await rig.submit(a_run())
    assert await rig.reasons(run_id) == ["LimitReached"]


async def test_gates_outlive_a_restart_and_so_do_the_runs_they_hold(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    async with host(settings) as rig:
        await rig.shut("*")
        (run_id,) = await rig.submit(a_run())
        await _parked(rig, [run_id])
    async with host(settings) as rig:
        assert await rig.reasons(run_id) == ["Paused"]
        await rig.unshut("*")
        assert (await rig.end_of(run_id)).state is State.SUCCEEDED


async def test_pausing_and_unpausing_all_the_time_loses_no_run(rig: Rig) -> None:
    async def pause() -> None:
        for _ in range(25):
            await rig.shut("*")
            await asyncio.sleep(0.002)
            await rig.unshut("*")

    async def submit() -> list[str]:
        ids: list[str] = []
        for _ in range(40):
            ids += await rig.submit(a_call("nothing", isolation="thread"), a_run())
        return ids

    _, ids = await asyncio.gather(pause(), submit())
    runs = await rig.ends_of(ids)
    assert {run.attempt for run in runs} == {1}


def _most_at_once(journal: Sequence[Any]) -> Counter[str]:
    """The most running runs of each scope and each job, by the journal's word."""
    running: dict[str, str] = {}
    level: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for event in journal:
        name = type(event).__name__
        if name == "RunStarted":
            running[event.run] = event.key
            for key in (event.key, event.key.partition("/")[0]):
                level[key] += 1
                most[key] = max(most[key], level[key])
        elif name in ENDS and event.run in running:
            key = running.pop(event.run)
            level[key] -= 1
            level[key.partition("/")[0]] -= 1
    return most


async def _parked(rig: Rig, ids: list[str]) -> None:
    """Wait until claims have put these aside. Parking is not an event, so it is looked for."""

    async def put_aside() -> None:
        while (await rig.row(ids[0])).parked is None or (await rig.row(ids[-1])).parked is None:
            await asyncio.sleep(0.01)

    await within(put_aside(), "the runs are parked")
