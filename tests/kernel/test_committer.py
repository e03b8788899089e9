"""The committer: many callers, one transaction; claims ride along; nobody is spoilt by a neighbour or forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from stellwerk.core.batch import Applied, Batch, Claim, Committed
from stellwerk.core.errors import Unavailable
from stellwerk.core.run import Nothing, State
from stellwerk.kernel import committer as committing
from tests.builders import an_add
from tests.kernel.rig import ACTOR, Meddler, Rig, a_call, a_run, host, settings_in, within


@pytest.fixture
def meddler(tmp_path: Path) -> Meddler:
    return Meddler(tmp_path / "data")


@pytest.fixture
async def met(tmp_path: Path, meddler: Meddler) -> AsyncIterator[Rig]:
    """A host whose store a test can hold up."""
    async with host(settings_in(tmp_path), meddler.as_store()) as rig:
        yield rig


class Dam:
    """Holds calls of the store back until it is opened."""

    def __init__(self, meddler: Meddler) -> None:
        self._meddler = meddler
        self._open = asyncio.Event()
        self.reached = asyncio.Event()
        meddler.before = self

    async def __call__(self, batches: Sequence[Batch], claims: Sequence[Claim]) -> None:
        self.reached.set()
        await self._open.wait()

    def open(self) -> None:
        self._meddler.before = None
        self._open.set()


async def test_while_one_commit_is_in_flight_the_next_gathers_all_who_come(met: Rig, meddler: Meddler) -> None:
    (warm,) = await met.submit(a_run())
    await met.end_of(warm)
    dam = Dam(meddler)
    first = asyncio.create_task(met.submit(a_run(Nothing())))
    await dam.reached.wait()
    meddler.calls.clear()
    others = [asyncio.create_task(met.submit(a_run(Nothing()))) for _ in range(200)]
    await asyncio.sleep(0)
    commits = met.kernel.committer.commits
    dam.open()
    await asyncio.gather(first, *others)
    assert max(batches for batches, _ in meddler.calls) == 200
    assert met.kernel.committer.commits - commits <= 3


async def test_submit_and_start_are_one_transaction_on_an_idle_host(met: Rig, meddler: Meddler) -> None:
    (warm,) = await met.submit(a_call("nothing"))
    await met.end_of(warm)
    while any(meddler.calls):
        meddler.calls.clear()
        await asyncio.sleep(0.05)
    (run_id,) = await met.submit(a_call("nothing"))
    assert meddler.calls[0] == (1, 1)
    added, readied, started = (await met.stamped(run_id))[:3]
    assert [added.event_id + 1, added.event_id + 2] == [readied.event_id, started.event_id]


async def test_an_idle_host_asks_its_store_nothing(met: Rig, meddler: Meddler) -> None:
    run = await met.run(a_call("nothing"))
    assert run.state is State.SUCCEEDED
    await asyncio.sleep(0.2)
    looks = met.parts.host.ticker.looks
    meddler.calls.clear()
    await asyncio.sleep(0.5)
    assert meddler.calls == []
    assert met.parts.host.ticker.looks == looks


async def test_a_bad_batch_does_not_spoil_its_neighbours(
    met: Rig, meddler: Meddler, caplog: pytest.LogCaptureFixture
) -> None:
    (warm,) = await met.submit(a_run())
    await met.end_of(warm)

    async def refuse(batches: Sequence[Batch], claims: Sequence[Claim]) -> None:
        if any(add.run.spec.name == "bad" for batch in batches for add in batch.adds):
            raise AssertionError("a batch that cannot be")

    dam = Dam(meddler)
    first = asyncio.create_task(met.submit(a_run(Nothing())))
    await dam.reached.wait()
    tasks = [
        asyncio.create_task(met.submit(a_run(Nothing() if place % 2 else None, name="bad" if place == 5 else "good")))
        for place in range(12)
    ]
    await asyncio.sleep(0)
    dam.open()
    meddler.before = refuse
    answers = await within(asyncio.gather(first, *tasks, return_exceptions=True), "all callers are answered")
    bad = [answer for answer in answers if isinstance(answer, BaseException)]
    assert len(bad) == 1
    assert isinstance(bad[0], AssertionError)
    for answer in answers:
        if not isinstance(answer, BaseException):
            assert (await met.end_of(answer[0])).state is State.SUCCEEDED
    assert "the store failed" in caplog.text


async def test_what_the_store_refuses_reaches_the_caller_and_claims_recover(
    met: Rig, meddler: Meddler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committing, "LOOK_AGAIN_S", 0.05)

    async def refuse(batches: Sequence[Batch], claims: Sequence[Claim]) -> None:
        raise Unavailable("the disk is full")

    (warm,) = await met.submit(a_run())
    await met.end_of(warm)
    meddler.before = refuse
    for _ in range(3):
        with pytest.raises(Unavailable, match="disk is full"):
            await met.submit(a_run())
    assert met.parts.health()["state"] == "degraded"
    assert "the disk is full" in met.parts.health()["degraded"]
    meddler.before = None
    run = await met.run(a_run())
    assert run.state is State.SUCCEEDED
    assert met.kernel.committer.trouble is None


async def test_when_the_store_answers_again_an_idle_host_is_well_again(
    met: Rig, meddler: Meddler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committing, "LOOK_AGAIN_S", 0.05)

    async def refuse(batches: Sequence[Batch], claims: Sequence[Claim]) -> None:
        raise Unavailable("the disk is full")

    (warm,) = await met.submit(a_run())
    await met.end_of(warm)
    meddler.before = refuse
    with pytest.raises(Unavailable):
        await met.submit(a_run(Nothing()))
    meddler.before = None

    async def well() -> None:
        while met.kernel.committer.trouble is not None:
            await asyncio.sleep(0.01)

    await within(well(), "the trouble is forgotten")


async def test_an_end_that_the_store_refuses_is_reported_again(
    met: Rig, meddler: Meddler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("stellwerk.kernel.worker.REPORT_AGAIN_S", 0.05)
    refused = 0

    async def refuse(batches: Sequence[Batch], claims: Sequence[Claim]) -> None:
        nonlocal refused
        if any(change.run.state is State.SUCCEEDED for batch in batches for change in batch.changes) and refused < 3:
            refused += 1
            raise Unavailable("the disk is full")

    meddler.before = refuse
    run = await met.run(a_run())
    assert (run.state, run.attempt, refused) == (State.SUCCEEDED, 1, 3)


async def test_an_answer_that_was_lost_after_the_commit_ends_the_run_once(
    met: Rig, meddler: Meddler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stellwerk.kernel.worker.REPORT_AGAIN_S", 0.05)
    lost = 0

    async def lose(applied: Applied) -> None:
        nonlocal lost
        if any(type(event).__name__ == "RunSucceeded" for event in applied.events) and not lost:
            lost += 1
            raise Unavailable("the connection broke")

    meddler.after = lose
    (run_id,) = await met.submit(a_call("nothing"))

    async def ended() -> None:
        while (await met.row(run_id)).state is not State.SUCCEEDED or met.parts.worker.running:
            await asyncio.sleep(0.01)

    await within(ended(), "the end is in the store and the worker has let go")
    assert lost == 1
    assert (await met.story(run_id)).count("RunSucceeded") == 1
    assert "ResultRejected" not in await met.story(run_id)


async def test_a_claim_that_came_back_empty_while_a_commit_was_in_flight_is_not_forgotten(
    met: Rig, meddler: Meddler
) -> None:
    async def shuffle(batches: Sequence[Batch], claims: Sequence[Claim]) -> None:
        for _ in range(len(meddler.calls) % 4):
            await asyncio.sleep(0)

    meddler.before = shuffle

    async def client(place: int) -> None:
        for number in range(12):
            wanted = a_call("nothing", isolation="thread") if (place + number) % 2 else a_run()
            (run_id,) = await met.submit(wanted)
            for _ in range((place * number) % 7):
                await asyncio.sleep(0)
            await met.end_of(run_id)

    await within(asyncio.gather(*(client(place) for place in range(16))), "every run ends")


async def test_one_run_after_another_never_waits_for_a_forgotten_claim(met: Rig) -> None:
    for place in range(150):
        run = await met.run(a_call("nothing", isolation="thread"))
        assert run.state is State.SUCCEEDED, place


async def test_a_caller_that_gave_up_does_not_disturb_the_others(met: Rig, meddler: Meddler) -> None:
    dam = Dam(meddler)
    first = asyncio.create_task(met.submit(a_run(Nothing())))
    await dam.reached.wait()
    tasks = [asyncio.create_task(met.submit(a_run(Nothing()))) for _ in range(6)]
    await asyncio.sleep(0)
    for task in (first, *tasks[::2]):
        task.cancel()
    dam.open()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(answer, list) for answer in answers] == [False, True] * 3


async def test_too_much_that_waits_is_refused_before_it_is_acknowledged(
    met: Rig, meddler: Meddler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committing, "ROWS_WAITING_MAX", 50)
    (warm,) = await met.submit(a_run())
    await met.end_of(warm)
    dam = Dam(meddler)
    tasks = [asyncio.create_task(met.submit(*[a_run(Nothing())] * 10)) for _ in range(20)]
    await dam.reached.wait()
    await asyncio.sleep(0.05)
    dam.open()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, Unavailable)]
    taken = [answer for answer in answers if isinstance(answer, list)]
    assert refused
    assert taken
    assert len(refused) + len(taken) == 20
    assert (await met.store.count()).states[State.SUCCEEDED] == 10 * len(taken) + 1


async def test_after_close_a_commit_is_refused(tmp_path: Path) -> None:
    async with host(settings_in(tmp_path)) as rig:
        pass
    with pytest.raises(Unavailable):
        await rig.kernel.submit([a_run()], ACTOR)


async def test_what_was_gathered_before_the_close_is_still_committed(
    met: Rig, meddler: Meddler, tmp_path: Path
) -> None:
    dam = Dam(meddler)
    tasks = [asyncio.create_task(met.submit(a_run(Nothing()))) for _ in range(5)]
    await dam.reached.wait()
    closing = asyncio.create_task(met.parts.close(asyncio.Event()))
    await asyncio.sleep(0.05)
    dam.open()
    ids = [found for answer in await asyncio.gather(*tasks) for found in answer]
    await closing
    async with host(met.settings) as rig:
        assert {(await rig.row(run_id)).state for run_id in ids} == {State.SUCCEEDED}


async def test_a_batch_and_its_conflicting_neighbour_are_answered_apart(met: Rig) -> None:
    now_ms = met.parts.env.now_ms()
    batches = [an_add("one", now_ms=now_ms), an_add("one", now_ms=now_ms), an_add("two", now_ms=now_ms)]
    receipts = await met.kernel.committer.commit(batches)
    assert [isinstance(receipt, Committed) for receipt in receipts] == [True, False, True]
