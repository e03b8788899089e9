"""Overload and broken parts: refused before the acknowledgement, never dropped after it, and never silent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stellwerk.core.errors import Unavailable
from stellwerk.core.logs import STDOUT, LogChunk, LogQuery
from stellwerk.core.run import Nothing, State
from stellwerk.kernel import feed as feeding
from tests.kernel.rig import Latch, Meddler, Rig, a_call, a_command, a_run, a_script, host, settings_in, within


async def test_more_followers_than_a_host_bears_are_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "FOLLOWERS_MAX", 3)
    last = (await rig.store.count()).event_id
    waits = [asyncio.create_task(rig.kernel.feed.wait_after(last, timeout_s=60)) for _ in range(3)]
    while rig.kernel.feed.followers < 3:
        await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await rig.kernel.feed.wait_after(last, timeout_s=60)
    await rig.submit(a_run(Nothing()))
    await within(asyncio.gather(*waits), "the others are answered")


async def test_output_that_the_store_does_not_take_never_fails_the_run(tmp_path: Path) -> None:
    meddler = Meddler(tmp_path / "data")

    async def refuse(chunks: Sequence[LogChunk]) -> Any:
        raise Unavailable("the disk is full")

    meddler.append_logs = refuse  # type: ignore[attr-defined]
    async with host(settings_in(tmp_path), meddler.as_store()) as rig:
        for _ in range(3):
            assert (await rig.run(a_command("/bin/echo", "hello"))).state is State.SUCCEEDED


async def test_a_store_that_breaks_at_the_output_does_not_stop_the_reports(tmp_path: Path) -> None:
    meddler = Meddler(tmp_path / "data")

    async def broken(chunks: Sequence[LogChunk]) -> Any:
        raise RuntimeError("a bug")

    meddler.append_logs = broken  # type: ignore[attr-defined]
    async with host(settings_in(tmp_path), meddler.as_store()) as rig:
        for _ in range(3):
            assert (await rig.run(a_command("/bin/echo", "hello"))).state is State.SUCCEEDED


async def test_an_executor_that_raises_does_not_stop_the_committer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.run(a_run())
    executor = rig.parts.worker._executors["command", ""]

    def broken(attempts: object) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(executor, "start", broken)
        await within(rig.submit(a_run()), "the submit is acknowledged")
    assert (await within(rig.run(a_run()), "a run after the bug")).state is State.SUCCEEDED


async def test_lines_come_to_a_follower_while_the_run_runs(rig: Rig, latch: Latch) -> None:
    script = f"echo one; echo two >&2; while [ ! -e {latch.path} ]; do sleep 0.01; done; echo three"
    (run_id,) = await rig.submit(a_script(script))
    seen: list[str] = []
    after = 0
    while len(seen) < 2:
        page, run = await within(rig.kernel.logs_after(LogQuery(run_id, after), timeout_s=60), "lines")
        seen += [line.piece.data.decode() for line in page.lines]
        after = page.examined
        assert run.run.state is State.RUNNING
    assert sorted(seen) == ["one", "two"]
    waiting = asyncio.create_task(rig.kernel.logs_after(LogQuery(run_id, after), timeout_s=60))
    await asyncio.sleep(0)
    latch.open()
    page, _ = await within(waiting, "the last line")
    assert [line.piece.data for line in page.lines] == [b"three"]
    await rig.end_of(run_id)
    page, run = await rig.kernel.logs_after(LogQuery(run_id, page.examined), timeout_s=60)
    assert (page.lines, run.run.state) == ((), State.SUCCEEDED)


async def test_a_follower_of_one_stream_is_answered_at_the_end_of_the_run(rig: Rig, latch: Latch) -> None:
    (run_id,) = await rig.submit(a_script(f"while [ ! -e {latch.path} ]; do sleep 0.01; done; echo err >&2"))
    query = LogQuery(run_id, streams=frozenset({STDOUT}))
    waiting = asyncio.create_task(rig.kernel.logs_after(query, timeout_s=60))
    await rig.running(run_id)
    latch.open()
    page, _ = await within(waiting, "an answer")
    assert page.lines == ()


async def test_a_follower_of_a_silent_run_is_answered_at_the_timeout(rig: Rig, latch: Latch) -> None:
    (run_id,) = await rig.submit(latch.command())
    page, run = await within(rig.kernel.logs_after(LogQuery(run_id), timeout_s=0.1), "an answer")
    assert page.lines == ()
    assert run.run.is_live


async def test_a_thousand_runs_of_all_kinds_at_once_all_end(rig: Rig) -> None:
    wishes = [a_call("nothing", isolation="thread") for _ in range(500)]
    wishes += [a_call("nothing") for _ in range(400)]
    wishes += [a_run() for _ in range(60)]
    wishes += [a_run(Nothing()) for _ in range(40)]
    wishes[::7] = [a_call("add", [1, place]) for place in range(len(wishes[::7]))]
    answers = await asyncio.gather(*(rig.submit(wish) for wish in wishes))
    runs = await rig.ends_of([found for answer in answers for found in answer])
    assert {run.state for run in runs} == {State.SUCCEEDED}
    assert {run.attempt for run in runs} <= {0, 1, 2}
    assert {run.crashes for run in runs} == {0}
