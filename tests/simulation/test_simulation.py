"""Three hosts with faults, over many seeds; bugs planted on purpose; and every seed that ever failed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.simulation.loop import Deadlock, Place, VirtualLoop, run_virtually
from tests.simulation.planted_bugs import BUGS, SEEDS_MAX, Bug, hunt
from tests.simulation.world import Failure, simulate

pytestmark = pytest.mark.simulation

SEEDS = 500
SEEDS_PER_CHUNK = 25
SQLITE_SEEDS = 24
SQLITE_SEEDS_PER_CHUNK = 8
TAIL_LINES = 40
KNOWN_SEEDS = Path(__file__).with_name("known_seeds.txt")


def check_seed(seed: int, store: str | None = None) -> None:
    try:
        simulate(seed, store)
    except Failure as failure:
        tail = "\n".join(list(failure.trace)[-TAIL_LINES:])
        kind = f" --store {store}" if store else ""
        pytest.fail(f"{tail}\n{failure}\nSee it again: ./dev sim --seed {seed}{kind}", pytrace=False)


def known_seeds() -> list[tuple[str, int]]:
    lines = [line for line in KNOWN_SEEDS.read_text().splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], int(line.split()[1])) for line in lines]


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_CHUNK))
def test_what_must_hold_holds_whatever_breaks(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_CHUNK):
        check_seed(seed)


@pytest.mark.parametrize("first", range(0, SQLITE_SEEDS, SQLITE_SEEDS_PER_CHUNK))
def test_what_must_hold_holds_on_sqlite(first: int) -> None:
    for seed in range(first, first + SQLITE_SEEDS_PER_CHUNK):
        check_seed(seed, "sqlite")


@pytest.mark.parametrize("store", ["shared", "memory", "sqlite"])
def test_seeds_that_once_failed_hold_now(store: str) -> None:
    for kind, seed in known_seeds():
        if kind == store:
            check_seed(seed, kind)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: Bug) -> None:
    caught = hunt(bug)
    assert caught is not None, f"{SEEDS_MAX} seeds did not find it"
    assert caught.checker in bug.caught_by, caught


def test_the_same_seed_gives_the_same_world() -> None:
    assert simulate(7).digest == simulate(7).digest


def test_worlds_are_busy() -> None:
    """A simulation in which little happens would prove little."""
    reports = [simulate(seed) for seed in range(20)]
    assert sum(report.runs for report in reports) > 500
    for state in ("succeeded", "failed", "cancelled"):
        assert sum(report.ended.get(state, 0) for report in reports) > 50


def test_hours_of_virtual_time_take_no_time() -> None:
    async def sleep() -> float:
        await asyncio.sleep(10 * 3_600)
        return asyncio.get_running_loop().time()

    assert run_virtually(sleep) == 10 * 3_600


def test_waiting_for_nothing_is_reported_as_a_deadlock() -> None:
    async def wait() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock):
        run_virtually(wait)


def test_a_frozen_place_goes_on_where_it_was_and_a_dead_one_does_not() -> None:
    loop = VirtualLoop()
    frozen, dead = Place("frozen"), Place("dead")
    seen: list[str] = []

    async def say(word: str) -> None:
        await asyncio.sleep(1)
        seen.append(word)

    async def main() -> None:
        for place in (frozen, dead):
            loop.create_task(say(place.name), context=loop.context_of(place))
        await asyncio.sleep(0.5)
        loop.freeze(frozen)
        loop.kill(dead)
        await asyncio.sleep(5)
        assert seen == []
        loop.thaw(frozen)
        await asyncio.sleep(0.1)

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    assert seen == ["frozen"]
