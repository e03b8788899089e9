"""At most one live run holds a live key; the insert decides, whoever asks at the same time."""

from __future__ import annotations

import asyncio

from stellwerk.core.events import RunAdded
from stellwerk.core.queries import RunQuery
from stellwerk.core.retry import RetryPolicy
from stellwerk.core.run import FINAL, Nothing, Signal, State
from tests.kernel.rig import ACTOR, Latch, Rig, a_run, a_script


async def test_a_second_run_with_a_live_key_answers_with_the_first(rig: Rig, latch: Latch) -> None:
    first = await rig.kernel.submit([latch.command(live_key="k")], ACTOR)
    second = await rig.kernel.submit([a_run(live_key="k")], ACTOR)
    assert (first.runs[0].new, second.runs[0].new) == (True, False)
    assert first.runs[0].id == second.runs[0].id
    assert sum((await rig.store.count()).states.values()) == 1


async def test_a_live_key_is_free_again_when_its_run_has_ended(rig: Rig) -> None:
    first = await rig.run(a_run(live_key="k"))
    assert first.live_key is None
    second = await rig.run(a_run(live_key="k"))
    assert second.id != first.id
    assert second.spec.live_key == "k"


async def test_a_live_key_is_held_while_a_run_waits_for_its_next_try(rig: Rig) -> None:
    (first,) = await rig.submit(a_script("exit 1", live_key="k", retry=RetryPolicy(1, delay_ms=3_600_000)))
    await rig.until(first, lambda run: run.tries == 1, "postponed")
    assert await rig.submit(a_run(live_key="k")) == [first]


async def test_a_live_key_is_held_by_a_run_that_waits_and_given_up_with_its_cancellation(rig: Rig) -> None:
    (first,) = await rig.submit(a_run(live_key="k", due_ms=rig.parts.env.now_ms() + 3_600_000))
    assert await rig.submit(a_run(live_key="k")) == [first]
    await rig.kernel.cancel(first, ACTOR)
    (second,) = await rig.submit(a_run(live_key="k"))
    assert second != first


async def test_in_one_request_only_the_first_entry_with_a_live_key_is_new(rig: Rig, latch: Latch) -> None:
    (held,) = await rig.submit(latch.command(live_key="held"))
    answer = await rig.kernel.submit([a_run(live_key="a"), a_run(live_key="a"), a_run(live_key="held"), a_run()], ACTOR)
    assert [added.new for added in answer.runs] == [True, False, False, True]
    assert answer.runs[0].id == answer.runs[1].id
    assert answer.runs[2].id == held


async def test_a_child_of_an_entry_whose_live_key_is_taken_waits_for_the_live_run(rig: Rig) -> None:
    (held,) = await rig.submit(a_run(Signal(), live_key="k"))
    parent, child = await rig.submit(a_run(live_key="k"), a_run(parents=(0,)))
    assert parent == held
    assert (await rig.row(child)).waits_for == 1
    await rig.kernel.settle(held, ACTOR, True, "go")
    assert (await rig.end_of(child)).state is State.SUCCEEDED


async def test_many_who_want_the_same_live_key_at_once_get_one_run(rig: Rig, latch: Latch) -> None:
    answers = await asyncio.gather(*(rig.kernel.submit([latch.command(live_key="k")], ACTOR) for _ in range(100)))
    assert len({answer.runs[0].id for answer in answers}) == 1
    assert sum(answer.runs[0].new for answer in answers) == 1


async def test_a_live_key_taken_and_freed_all_the_time_is_never_held_twice(rig: Rig) -> None:
    async def client() -> None:
        for _ in range(15):
            answer = await rig.kernel.submit([a_run(Nothing() if _ % 3 == 0 else None, live_key="k")], ACTOR)
            await rig.end_of(answer.runs[0].id)

    await asyncio.gather(*(client() for _ in range(8)))
    holder: str | None = None
    for stamped in await rig.stamped():
        event = stamped.event
        run_id = getattr(event, "run", None)
        if isinstance(event, RunAdded):
            assert holder is None, f"{event.run} was added while {holder} held the key"
            holder = event.run
        elif run_id == holder and type(event).__name__ in ("RunSucceeded", "RunFailed", "RunCancelled", "RunSettled"):
            holder = None
    assert holder is None
    assert all(run.state in FINAL for run in (await rig.kernel.find_runs(RunQuery(limit=1_000))).runs)


async def test_a_rerun_asks_for_the_live_key_of_the_old_run(rig: Rig, latch: Latch) -> None:
    old = await rig.run(a_run(live_key="k"))
    (held,) = await rig.submit(latch.command(live_key="k"))
    (added,) = (await rig.kernel.rerun(old.id, ACTOR)).runs
    assert (added.id, added.new) == (held, False)
