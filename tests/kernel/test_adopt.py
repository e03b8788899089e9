"""A store that the host does not know: nothing is claimed or written until an operator says that it is right."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from stellwerk.core.errors import Clash, Unavailable
from stellwerk.core.events import StoreAdopted
from stellwerk.core.run import Nothing, State
from stellwerk.kernel.feed import NonEmpty, Torn
from tests.kernel.rig import ACTOR, Latch, Rig, a_run, host, settings_in, within


async def _restored(tmp_path: Path, latch: Latch) -> tuple[str, str, int]:
    """Make a data folder in which an older copy of the database was put back.

    Answers a run that had ended, one that is ready in the copy, and the last EventId that a follower may know.
    """
    settings = settings_in(tmp_path)
    async with host(settings) as rig:
        done = await rig.run(a_run())
        await rig.shut("*")
        (ready,) = await rig.submit(a_run())
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    async with host(settings) as rig:
        await rig.unshut("*")
        await rig.submit(*[a_run(Nothing()) for _ in range(5)])
        await rig.end_of(ready)
        last = (await rig.store.count()).event_id
    for path in (tmp_path / "data").glob("stellwerk.db*"):
        path.unlink()
    for path in (tmp_path / "copy").glob("stellwerk.db*"):
        shutil.copy(path, tmp_path / "data")
    return done.id, ready, last


async def test_a_foreign_store_answers_reads_and_refuses_writes_and_claims(tmp_path: Path, latch: Latch) -> None:
    done, ready, last = await _restored(tmp_path, latch)
    async with host(settings_in(tmp_path)) as rig:
        assert rig.store.foreign() is not None
        with pytest.raises(Unavailable, match="foreign"):
            await rig.submit(a_run())
        with pytest.raises(Unavailable):
            await rig.kernel.cancel(ready, ACTOR)
        with pytest.raises(Unavailable):
            await rig.unshut("*")
        assert (await rig.row(done)).state is State.SUCCEEDED
        assert (await rig.row(ready)).state is State.READY
        assert "NotClaiming" in await rig.reasons(ready)
        health = rig.parts.health()
        assert health["state"] == "degraded"
        assert any("adopt" in text for text in health["degraded"])
        answer = await within(rig.kernel.feed.wait_after(last, timeout_s=60), "torn")
        assert isinstance(answer, Torn)
        assert ready not in await rig.starts()


async def test_an_adopted_store_goes_on_and_who_followed_before_is_torn(tmp_path: Path, latch: Latch) -> None:
    _, ready, last = await _restored(tmp_path, latch)
    async with host(settings_in(tmp_path)) as rig:
        before = (await rig.store.count()).event_id
        waiting = asyncio.create_task(rig.kernel.feed.wait_after(before, timeout_s=60))
        await asyncio.sleep(0)
        epoch, event_id = await rig.kernel.adopt("token:admin")
        assert epoch == await rig.store.epoch()
        assert isinstance(await within(waiting, "who waits is torn"), Torn)
        for after in (0, before, last, last - 1):
            assert isinstance(await rig.kernel.feed.wait_after(after), Torn), after
        assert event_id > last
        answer = await rig.kernel.feed.wait_after(event_id - 1)
        assert isinstance(answer, NonEmpty)
        assert isinstance(answer.events[0].event, StoreAdopted)
        await rig.unshut("*")
        assert (await rig.end_of(ready)).state is State.SUCCEEDED
        assert rig.parts.health()["state"] == _usual(rig)
        assert await rig.reasons(ready) == ["Ended"]
    async with host(settings_in(tmp_path)) as rig:
        assert rig.store.foreign() is None
        assert (await rig.run(a_run())).state is State.SUCCEEDED


async def test_a_store_in_the_middle_of_work_is_claimed_from_as_soon_as_it_is_adopted(
    tmp_path: Path, latch: Latch
) -> None:
    settings = settings_in(tmp_path)
    async with host(settings) as rig:
        (later,) = await rig.submit(a_run(due_ms=rig.parts.env.now_ms() + 50))
        await rig.end_of(later)
    (tmp_path / "data" / "store-epoch").write_text('{"epoch":"another","last":0}')
    async with host(settings) as rig:
        assert rig.store.foreign() is not None
        await rig.kernel.adopt(ACTOR)
        run = await within(rig.run(a_run()), "a run after the adoption")
        assert run.state is State.SUCCEEDED
        assert rig.kernel.committer.trouble is None


async def test_a_database_that_is_gone_is_not_silently_made_anew(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    async with host(settings) as rig:
        await rig.run(a_run())
    for path in (tmp_path / "data").glob("stellwerk.db*"):
        path.unlink()
    async with host(settings) as rig:
        assert "gone" in (rig.store.foreign() or "")
        with pytest.raises(Unavailable):
            await rig.submit(a_run())


async def test_a_store_that_is_known_need_not_be_adopted(rig: Rig) -> None:
    with pytest.raises(Clash):
        await rig.kernel.adopt(ACTOR)


def _usual(rig: Rig) -> str:
    """What this machine's health is without trouble in the kernel: its keeper may be degraded."""
    return "ok" if all(text == "ok" for text in rig.parts.link.capabilities().values()) else "degraded"
