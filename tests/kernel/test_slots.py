"""Slots: how many runs of a queue are at work at once, also while more are claimed ahead."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stellwerk.core.run import State
from tests.kernel.rig import Latch, Rig, a_call, a_run, host, settings_in, within


async def a_quick_stream(rig: Rig, isolation: str) -> None:
    """Makes the worker claim and hand over ahead of the slots."""
    await rig.ends_of(await rig.submit(*[a_call("nothing", isolation=isolation) for _ in range(1_000)]))


@pytest.mark.parametrize("kinds", [("thread", "process"), ("process", "thread")])
async def test_calls_of_two_kinds_share_the_slots(one_slot: Rig, tmp_path: Path, kinds: tuple[str, str]) -> None:
    rig = one_slot
    await a_quick_stream(rig, kinds[0])
    first, second = Latch(tmp_path / "first"), Latch(tmp_path / "second")
    ids = await rig.submit(first.call(isolation=kinds[0]), second.call(isolation=kinds[1]))
    await first.call_begun()
    # Time enough for a second slot to show itself, if there were one.
    await asyncio.sleep(0.3)
    assert not second.path.with_name("second.begun").exists()
    first.open()
    await second.call_begun()
    second.open()
    assert {run.state for run in await rig.ends_of(ids)} == {State.SUCCEEDED}


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_calls_that_wait_behind_a_slow_one_go_back_to_the_queue(
    one_slot: Rig, latch: Latch, isolation: str
) -> None:
    rig = one_slot
    await a_quick_stream(rig, isolation)
    slow, *others = await rig.submit(
        latch.call(isolation=isolation), *[a_call("nothing", isolation=isolation) for _ in range(40)]
    )
    await latch.call_begun()

    async def are_back() -> None:
        while any([(await rig.row(run_id)).state is State.RUNNING for run_id in others]):
            await asyncio.sleep(0.05)  # going back is journaled as a postponement of each, in no order to wait for

    await within(are_back(), "the others to be given back")
    await rig.shut("*")
    latch.open()
    await rig.end_of(slow)
    # The gate was shut before any of them began: none may start now.
    await asyncio.sleep(0.3)
    assert {(await rig.row(run_id)).state for run_id in others} == {State.READY}
    await rig.unshut("*")
    runs = await rig.ends_of(others)
    assert {(run.state, run.tries, run.crashes) for run in runs} == {(State.SUCCEEDED, 1, 0)}


async def test_numbered_runs_get_rising_whole_numbers_in_order_of_commit(rig: Rig) -> None:
    async def submit() -> list[str]:
        return await rig.submit(a_run(numbered=True), a_run(numbered=True))

    answers = await asyncio.gather(*(submit() for _ in range(50)))
    ids = [run_id for answer in answers for run_id in answer]
    assert sorted(map(int, ids)) == list(range(1, 101))
    rows = sorted([await rig.row(run_id) for run_id in ids], key=lambda run: run.added)
    assert [int(run.id) for run in rows] == list(range(1, 101))


async def test_numbers_go_on_after_a_restart_and_none_is_given_twice(tmp_path: Path) -> None:
    async with host(settings_in(tmp_path)) as rig:
        (first,) = await rig.submit(a_run(numbered=True))
    async with host(settings_in(tmp_path)) as rig:
        (second,) = await rig.submit(a_run(numbered=True))
    assert int(second) > int(first)
