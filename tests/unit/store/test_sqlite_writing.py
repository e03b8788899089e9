"""What only the SQLite store does: bulk statements, hope and its failure, requests that share a flush."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stellwerk.core.batch import Applied, Batch, Committed, Conflict
from stellwerk.core.errors import Unavailable
from stellwerk.core.queries import LeaseRef, Retention, RunQuery
from stellwerk.core.run import Body, Failed, Run, State, Succeeded
from stellwerk.store.memory import MemoryStore
from stellwerk.store.protocol import Store
from stellwerk.store.sqlite import session
from stellwerk.store.sqlite.journal import ROW_EVENTS_MAX
from stellwerk.store.sqlite.session import Failure, Session
from stellwerk.store.sqlite.store import SqliteStore
from tests.builders import (
    NOW_MS,
    a_cancel,
    a_chunk,
    a_claim,
    a_drop,
    a_limit,
    a_spec,
    an_add,
    an_edit,
    an_end,
    claim,
    do,
    row,
    together,
)


@pytest.fixture(params=["threads", "inline"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SqliteStore]:
    made = SqliteStore(tmp_path, inline=request.param == "inline")
    await made.open()
    yield made
    await made.close()


async def both(store: Store, reference: Store, *batches: Batch, limit: int = 0) -> Applied:
    """One call to both; the answers must be equal."""
    claims = [a_claim(limit=limit)] if limit else []
    wanted, found = [await each.apply(batches, claims, NOW_MS) for each in (reference, store)]
    assert found == wanted
    return found


async def all_runs(store: Store) -> tuple[Run, ...]:
    return (await store.find_runs(RunQuery(limit=10_000))).runs


# -- bulk -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 127, 128, 129, 300])
async def test_any_number_of_runs_lives_a_whole_life_as_in_memory(store: SqliteStore, count: int) -> None:
    reference = MemoryStore()
    adds = together(an_add(f"r{number:04d}", priority=1 + number % 3) for number in range(count))
    started = (await both(store, reference, adds, limit=count)).claimed[0]
    ends = []
    for number, found in enumerate(started.runs):
        match number % 4:
            case 0:
                ends.append(an_end(found.run))
            case 1:
                ends.append(an_end(found.run, Succeeded(b"1"), bodies=[Body("result", b"%d" % number)]))
            case 2:
                ends.append(an_end(found.run, Failed("exit", f"code {number}", number % 7)))
            case _:
                ends.append(a_cancel(found.run))
    await both(store, reference, *ends)
    assert await all_runs(store) == await all_runs(reference)
    assert (await store.count()).queues == (await reference.count()).queues
    drops = [a_drop(run) for run in await all_runs(store) if run.state is not State.RUNNING]
    await both(store, reference, *drops)
    assert await all_runs(store) == await all_runs(reference)


async def test_one_conflict_among_many_is_found_and_the_others_stand(store: SqliteStore) -> None:
    reference = MemoryStore()
    await both(store, reference, together(an_add(f"r{number:04d}") for number in range(300)))
    runs = await all_runs(store)
    await both(store, reference, an_edit(runs[7], priority=500))
    applied = await both(store, reference, *(a_cancel(run) for run in runs), an_add("new"), limit=5)
    assert applied.receipts.count(Conflict(("run", runs[7].id))) == 1
    assert sum(isinstance(receipt, Committed) for receipt in applied.receipts) == 300
    assert [found.run.id for found in applied.claimed[0].runs] == [runs[7].id, "new"]
    assert await all_runs(store) == await all_runs(reference)


async def test_texts_come_back_whatever_is_in_them(store: SqliteStore) -> None:
    ugly = "nul \0, quote \" ' \\ / \x7f \u2028 emoji 🚂 and a bracket ]"
    await do(store, an_add("a", a_spec(labels={"k": ugly})))
    run = (await claim(store)).runs[0].run
    await do(store, an_end(run, Failed("error", ugly)))
    found = await row(store, "a")
    assert (found.error, found.spec.labels["k"]) == (ugly, ugly)
    assert [one.id for one in (await store.find_runs(RunQuery(label=("k", ugly)))).runs] == ["a"]


async def test_an_added_of_another_run_is_not_believed(store: SqliteStore) -> None:
    await do(store, an_add("a"), an_add("b"))
    wrong = (await row(store, "a")).with_(added=(await row(store, "b")).added)
    await do(store, an_edit(wrong, priority=7))
    assert (await row(store, "a")).priority == 7
    assert (await row(store, "b")).priority == 100


async def test_a_call_with_very_many_events_is_read_page_by_page(store: SqliteStore) -> None:
    count = ROW_EVENTS_MAX // 2 + 100
    await do(store, together(an_add(f"r{number:05d}") for number in range(count)))
    after, seen = 0, 0
    while page := (await store.read_journal(after=after, limit=999)).events:
        assert page[0].event_id > after
        seen, after = seen + len(page), page[-1].event_id
    assert seen == 2 * count
    last = (await store.read_journal(after=0, limit=10, run=f"r{count - 1:05d}")).events
    assert len(last) == 2


async def test_trimming_gives_room_back_to_the_file_system(store: SqliteStore) -> None:
    batch = together(an_add(f"r{number:05d}") for number in range(2_000))
    await do(store, batch)
    await do(store, an_add("last"))
    free = await store._look(lambda connection: connection.execute("PRAGMA freelist_count").fetchone()[0])
    assert await store.trim_journal(Retention(0, 0, 0), NOW_MS + 1) == 4_000
    left = await store._look(lambda connection: connection.execute("PRAGMA freelist_count").fetchone()[0])
    assert left <= free + 20, "pages that became free went back"


async def test_a_limit_is_kept_within_and_across_calls(store: SqliteStore) -> None:
    reference = MemoryStore()
    await both(store, reference, a_limit("queue:default", 2), *(an_add(f"r{number}") for number in range(6)))
    started = (await both(store, reference, an_add("z"), limit=5)).claimed[0]
    assert len(started.runs) == 2
    again = await both(store, reference, an_end(started.runs[0].run), limit=5)
    assert len(again.claimed[0].runs) == 1
    assert await all_runs(store) == await all_runs(reference)


# -- requests that share a flush --------------------------------------------------------------------------------------


async def test_requests_made_at_once_are_all_answered(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    await store.open()
    await do(store, an_add("a"))
    run = (await claim(store)).runs[0].run
    answers = await asyncio.gather(
        store.append_logs([a_chunk(run, 1, b"hello")]),
        store.extend([LeaseRef("a", 1, run.worker or "")], NOW_MS + 90_000, NOW_MS),
        *(store.apply([an_add(f"r{number}")], [], NOW_MS) for number in range(200)),
        store.apply([an_end(run)], [], NOW_MS),
    )
    assert answers[1] == []
    assert (await store.count()).states == {State.READY: 200, State.SUCCEEDED: 1}
    await store.close()


async def test_a_request_that_fails_is_undone_alone(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path, inline=True)
    await store.open()
    inner = store._session
    assert inner is not None

    def fail_late(session: Session) -> None:
        session.apply([an_add("lost")], [], NOW_MS)
        raise ValueError("a bug")

    outcomes = inner.execute(
        [
            lambda session: session.apply([an_add("a")], [], NOW_MS),
            fail_late,
            lambda session: session.apply([an_add("b")], [], NOW_MS),
        ]
    )
    assert isinstance(outcomes[1], Failure)
    assert [run.id for run in await all_runs(store)] == ["b", "a"]
    ids = [stamped.event_id for stamped in (await store.read_journal(after=0, limit=10)).events]
    assert ids == list(range(ids[0], ids[0] + 4)), "the numbers of the lost call were used again"
    await store.close()


async def test_a_caller_that_gave_up_does_not_disturb_the_others(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    await store.open()
    impatient = asyncio.ensure_future(store.apply([an_add("a")], [], NOW_MS))
    await asyncio.sleep(0)
    impatient.cancel()
    await do(store, an_add("b"))
    assert {run.id for run in await all_runs(store)} >= {"b"}
    await store.close()


async def test_a_file_held_by_another_program_is_unavailable_for_the_moment(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path, inline=True)
    await store.open()
    assert store._connection is not None
    store._connection.execute("PRAGMA busy_timeout = 10")
    other = sqlite3.connect(tmp_path / "stellwerk.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match="held by another program"):
        await store.apply([an_add("a")], [], NOW_MS)
    other.execute("ROLLBACK")
    other.close()
    await do(store, an_add("a"))
    await store.close()


async def test_the_wal_does_not_grow_without_end_beside_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "WAL_BYTES_MAX", 1024 * 1024)
    monkeypatch.setattr(session, "WAL_LOOK_CALLS", 8)
    store = SqliteStore(tmp_path, inline=True)
    await store.open()
    is_over = threading.Event()

    def read_on() -> None:
        reader = sqlite3.connect(f"file:{tmp_path}/stellwerk.db?mode=ro", uri=True, isolation_level=None)
        while not is_over.is_set():
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM runs").fetchone()
            time.sleep(0.003)
            reader.execute("COMMIT")
        reader.close()

    readers = [threading.Thread(target=read_on) for _ in range(2)]
    for reader in readers:
        reader.start()
    sizes = []
    for number in range(100):
        await do(store, an_add(f"r{number}", bodies=[Body("args", b"x" * 100_000)]))
        sizes.append((tmp_path / "stellwerk.db-wal").stat().st_size)
    is_over.set()
    for reader in readers:
        reader.join()
    assert max(sizes) < 4 * 1024 * 1024, "of 10 MiB that were written"
    await store.close()
