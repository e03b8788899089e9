"""An orderly stop: no more claims, what runs may end, what does not goes back, and nothing is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from stellwerk.core.batch import Batch, Claim
from stellwerk.core.retry import RetryPolicy
from stellwerk.core.run import State
from tests.kernel.rig import Latch, Meddler, Rig, a_call, a_run, a_script, host, settings_in, within


async def _opened(tmp_path: Path, **workers: int) -> Rig:
    rig = Rig(settings_in(tmp_path, **workers))
    await rig.parts.open()
    return rig


async def test_a_stop_waits_for_what_runs_and_claims_no_more(tmp_path: Path, latch: Latch) -> None:
    rig = await _opened(tmp_path, slots=1)
    first, second = await rig.submit(latch.command(), a_run())
    await rig.running(first)
    closing = asyncio.create_task(rig.parts.close())
    await asyncio.sleep(0.1)
    assert not closing.done()
    latch.open()
    await within(closing, "the stop")
    async with host(rig.settings) as after:
        run = await after.row(first)
        assert (run.state, run.attempt) == (State.SUCCEEDED, 1)
        assert (await after.end_of(second)).attempt == 1


@pytest.mark.parametrize("kind", ["command", "call"])
@pytest.mark.parametrize("retry", [None, RetryPolicy(0)])
async def test_after_the_time_to_drain_runs_are_put_back_and_nothing_is_counted(
    tmp_path: Path, latch: Latch, kind: str, retry: RetryPolicy | None
) -> None:
    rig = await _opened(tmp_path, drain_ms=100, kill_grace_ms=500)
    wanted = latch.command(retry=retry) if kind == "command" else latch.call(retry=retry)
    (run_id,) = await rig.submit(wanted)
    await rig.running(run_id)
    await within(rig.parts.close(), "the stop")
    latch.open()
    async with host(rig.settings) as after:
        run = await after.end_of(run_id)
        assert (run.state, run.crashes, run.tries, run.attempt) == (State.SUCCEEDED, 0, 1, 2)
        postponed = [event for event in await after.journal(run_id) if type(event).__name__ == "RunPostponed"]
        assert [getattr(event, "counted", "") for event in postponed] == ["no"]


async def test_a_hurry_skips_the_wait(tmp_path: Path, latch: Latch) -> None:
    rig = await _opened(tmp_path, drain_ms=3_600_000, kill_grace_ms=3_600_000)
    (run_id,) = await rig.submit(latch.command())
    await rig.running(run_id)
    hurry = asyncio.Event()
    closing = asyncio.create_task(rig.parts.close(hurry))
    await asyncio.sleep(0.05)
    assert not closing.done()
    hurry.set()
    await within(closing, "the hurried stop")
    latch.open()
    async with host(rig.settings) as after:
        run = await after.end_of(run_id)
        assert (run.state, run.crashes, run.attempt) == (State.SUCCEEDED, 0, 2)


async def test_a_command_that_ignores_the_term_is_ended_all_the_same(tmp_path: Path) -> None:
    rig = await _opened(tmp_path, drain_ms=0, kill_grace_ms=100)
    pid = tmp_path / "pid"
    script = f"trap '' TERM; echo $$ > {pid}.new; mv {pid}.new {pid}; while :; do sleep 1; done"
    (run_id,) = await rig.submit(a_script(script))

    async def begun() -> None:
        while not pid.exists():
            await asyncio.sleep(0.01)

    await within(begun(), "the script begins")
    await within(rig.parts.close(), "the stop")
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()
    async with host(settings_in(tmp_path)) as after:
        await after.kernel.cancel(run_id, "tester")
        assert (await after.end_of(run_id)).crashes == 0


async def test_a_run_that_succeeds_while_the_host_stops_has_succeeded(tmp_path: Path) -> None:
    rig = await _opened(tmp_path, drain_ms=10_000)
    ids = await rig.submit(*[a_script("sleep 0.1") for _ in range(4)])
    for run_id in ids:
        await rig.running(run_id)
    await rig.parts.close()
    async with host(rig.settings) as after:
        assert [(run.state, run.attempt) for run in await after.ends_of(ids)] == [(State.SUCCEEDED, 1)] * 4


async def test_many_short_calls_at_the_stop_are_all_done_once_or_put_back(tmp_path: Path) -> None:
    rig = await _opened(tmp_path)
    ids = await rig.submit(*[a_call("nothing", isolation="thread") for _ in range(1_500)])
    await rig.event(object, holds=lambda event: type(event).__name__ == "RunSucceeded")
    await within(rig.parts.close(), "the stop")
    async with host(rig.settings) as after:
        runs = await after.ends_of(ids)
        assert {(run.state, run.crashes) for run in runs} == {(State.SUCCEEDED, 0)}


async def test_a_claim_in_flight_at_the_stop_is_put_back_and_not_counted(tmp_path: Path) -> None:
    meddler = Meddler(tmp_path / "data")
    rig = Rig(settings_in(tmp_path), meddler.as_store())
    await rig.parts.open()
    await rig.run(a_run())
    reached, go = asyncio.Event(), asyncio.Event()

    async def hold(batches: Sequence[Batch], claims: Sequence[Claim]) -> None:
        if claims and batches:
            reached.set()
            await go.wait()

    meddler.before = hold
    submitting = asyncio.create_task(rig.submit(a_run()))
    await within(reached.wait(), "the claim is on its way")
    closing = asyncio.create_task(rig.parts.close())
    await asyncio.sleep(0.1)
    meddler.before = None
    go.set()
    (run_id,) = await submitting
    await within(closing, "the stop")
    async with host(rig.settings) as after:
        run = await after.end_of(run_id)
        assert (run.state, run.crashes) == (State.SUCCEEDED, 0)


async def test_a_host_that_cannot_open_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_in(tmp_path)
    rig = Rig(settings)

    async def broken(*_args: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(rig.parts.worker, "_executor_for", broken)
    with pytest.raises(OSError, match="no more processes"):
        await rig.parts.open()
    async with host(settings) as after:
        assert (await after.run(a_run())).state is State.SUCCEEDED


async def test_a_call_in_a_thread_that_does_not_end_is_put_back_too(tmp_path: Path, latch: Latch) -> None:
    rig = await _opened(tmp_path, drain_ms=50, kill_grace_ms=50)
    (run_id,) = await rig.submit(latch.call(isolation="thread"))
    await rig.running(run_id)
    await latch.call_begun()
    closing = asyncio.create_task(rig.parts.close())
    await within(closing, "the stop")
    latch.open()
    async with host(rig.settings) as after:
        run = await after.end_of(run_id)
        assert (run.state, run.crashes) == (State.SUCCEEDED, 0)
