"""Log lines are numbered over all attempts of a run, taken once, and refused from an attempt that is over."""

from __future__ import annotations

from stellwerk.core.logs import STDERR, STDOUT, Appended, Fenced, LogChunk, LogPage, LogPiece, LogQuery
from stellwerk.core.run import Returned, Run
from stellwerk.store.protocol import Store
from tests.builders import NOW_MS, a_cancel, a_chunk, a_drop, an_add, an_end, do, row, start_one


async def a_started_run(store: Store, run_id: str = "a") -> Run:
    await do(store, an_add(run_id))
    return await start_one(store, run_id)


async def read(store: Store, run_id: str = "a", after_line: int = 0) -> list[tuple[int, int, bytes]]:
    page = await store.read_logs(LogQuery(run_id, after_line))
    return [(line.line, line.attempt, line.piece.data) for line in page.lines]


async def test_lines_are_numbered_from_one(store: Store) -> None:
    run = await a_started_run(store)
    assert await store.append_logs([a_chunk(run, 1, b"x", b"y")]) == [Appended(2)]
    assert await read(store) == [(1, 1, b"x"), (2, 1, b"y")]


async def test_a_line_comes_back_as_it_came(store: Store) -> None:
    run = await a_started_run(store)
    piece = LogPiece(STDERR, NOW_MS + 3, b"\x00\xff\r \xc3", cut=True)
    await store.append_logs([LogChunk("a", run.attempt, 1, (piece, LogPiece(STDOUT, NOW_MS, b"")))])
    page = await store.read_logs(LogQuery("a"))
    assert [line.piece for line in page.lines] == [piece, LogPiece(STDOUT, NOW_MS, b"")]


async def test_chunks_follow_each_other(store: Store) -> None:
    run = await a_started_run(store)
    await store.append_logs([a_chunk(run, 1, b"x")])
    assert await store.append_logs([a_chunk(run, 2, b"y", b"z"), a_chunk(run, 3, b"!")]) == [Appended(3), Appended(4)]
    assert await read(store) == [(1, 1, b"x"), (2, 1, b"y"), (3, 1, b"z"), (4, 1, b"!")]


async def test_numbers_go_on_over_attempts(store: Store) -> None:
    run = await a_started_run(store)
    await store.append_logs([a_chunk(run, 1, b"x")])
    await do(store, an_end(run, Returned()))
    again = await start_one(store, "a")
    assert await store.append_logs([a_chunk(again, 1, b"y")]) == [Appended(2)]
    assert await read(store) == [(1, 1, b"x"), (2, 2, b"y")]


async def test_a_repeated_chunk_is_taken_once_and_answered_as_before(store: Store) -> None:
    run = await a_started_run(store)
    await store.append_logs([a_chunk(run, 1, b"x", b"y"), a_chunk(run, 2, b"z")])
    assert await store.append_logs([a_chunk(run, 1, b"x", b"y")]) == [Appended(2)]
    assert len(await read(store)) == 3


async def test_a_chunk_repeated_within_one_call_is_taken_once(store: Store) -> None:
    run = await a_started_run(store)
    assert await store.append_logs([a_chunk(run, 1, b"x"), a_chunk(run, 1, b"x")]) == [Appended(1), Appended(1)]
    assert len(await read(store)) == 1


async def test_an_empty_chunk_is_answered_with_the_last_line(store: Store) -> None:
    run = await a_started_run(store)
    await store.append_logs([a_chunk(run, 1, b"x")])
    assert await store.append_logs([a_chunk(run, 2)]) == [Appended(1)]


async def test_an_attempt_that_is_over_is_fenced(store: Store) -> None:
    run = await a_started_run(store)
    await do(store, an_end(run, Returned()))
    again = await start_one(store, "a")
    assert await store.append_logs([a_chunk(run, 1, b"late"), a_chunk(again, 1, b"x")]) == [Fenced(), Appended(1)]
    assert await read(store) == [(1, 2, b"x")]


async def test_a_repeated_chunk_of_an_attempt_that_is_over_is_fenced(store: Store) -> None:
    run = await a_started_run(store)
    await store.append_logs([a_chunk(run, 1, b"x")])
    await do(store, an_end(run))
    assert await store.append_logs([a_chunk(run, 1, b"x")]) == [Fenced()]
    assert len(await read(store)) == 1


async def test_a_run_that_has_not_started_is_fenced(store: Store) -> None:
    await do(store, an_add("a"))
    assert await store.append_logs([a_chunk(await row(store, "a"), 1, b"x")]) == [Fenced()]


async def test_an_attempt_that_has_not_begun_is_fenced(store: Store) -> None:
    run = await a_started_run(store)
    assert await store.append_logs([a_chunk(run, 1, b"x", attempt=2)]) == [Fenced()]


async def test_an_unknown_run_is_fenced(store: Store) -> None:
    assert await store.append_logs([LogChunk("nobody", 1, 1, ())]) == [Fenced()]


async def test_a_run_asked_to_stop_may_still_write(store: Store) -> None:
    run = await a_started_run(store)
    await do(store, a_cancel(run))
    assert await store.append_logs([a_chunk(run, 1, b"x")]) == [Appended(1)]


async def test_lines_stay_readable_after_the_end(store: Store) -> None:
    run = await a_started_run(store)
    await store.append_logs([a_chunk(run, 1, b"x")])
    await do(store, an_end(run))
    assert await read(store) == [(1, 1, b"x")]


async def test_a_dropped_run_takes_its_lines_along(store: Store) -> None:
    run = await a_started_run(store)
    await store.append_logs([a_chunk(run, 1, b"x", b"y")])
    await do(store, an_end(run))
    await do(store, a_drop(await row(store, "a")), an_add("a"))
    again = await start_one(store, "a")
    assert await store.read_logs(LogQuery("a")) == LogPage((), 0, 0)
    assert await store.append_logs([a_chunk(again, 1, b"new")]) == [Appended(1)]


async def test_runs_have_lines_of_their_own(store: Store) -> None:
    first, second = await a_started_run(store, "a"), await a_started_run(store, "b")
    await store.append_logs([a_chunk(first, 1, b"x"), a_chunk(second, 1, b"y")])
    assert (await read(store, "a"), await read(store, "b")) == ([(1, 1, b"x")], [(1, 1, b"y")])


async def test_lines_after_a_number_are_read(store: Store) -> None:
    run = await a_started_run(store)
    await store.append_logs([a_chunk(run, 1, b"x", b"y"), a_chunk(run, 2, b"z")])
    assert await read(store, after_line=1) == [(2, 1, b"y"), (3, 1, b"z")]


async def test_a_limit_cuts_and_says_how_far_it_looked(store: Store) -> None:
    run = await a_started_run(store)
    await store.append_logs([a_chunk(run, 1, b"x", b"y", b"z")])
    page = await store.read_logs(LogQuery("a", limit=2))
    assert ([line.line for line in page.lines], page.examined, page.last_line) == ([1, 2], 2, 3)


async def test_who_has_read_all_has_looked_at_all(store: Store) -> None:
    run = await a_started_run(store)
    await store.append_logs([a_chunk(run, 1, b"x", b"y")])
    assert await store.read_logs(LogQuery("a", after_line=2)) == LogPage((), 2, 2)


async def test_a_reader_of_one_stream_gets_to_the_end_page_by_page(store: Store) -> None:
    run = await a_started_run(store)
    await store.append_logs(
        [
            a_chunk(run, 1, b"1"),
            a_chunk(run, 2, b"2", b"3", stream=STDERR),
            a_chunk(run, 3, b"4"),
            a_chunk(run, 4, b"5"),
        ]
    )
    seen: list[int] = []
    after, last = 0, 1
    while after < last:
        page = await store.read_logs(LogQuery("a", after, limit=2, streams=frozenset({STDOUT})))
        seen.extend(line.line for line in page.lines)
        assert page.examined > after
        after, last = page.examined, page.last_line
    assert seen == [1, 4, 5]


async def test_lines_of_some_streams_only_are_read(store: Store) -> None:
    run = await a_started_run(store)
    await store.append_logs([a_chunk(run, 1, b"out"), a_chunk(run, 2, b"err", stream=STDERR)])
    page = await store.read_logs(LogQuery("a", streams=frozenset({STDERR})))
    assert ([line.line for line in page.lines], page.examined, page.last_line) == ([2], 2, 2)


async def test_lines_of_an_unknown_run_are_none(store: Store) -> None:
    assert await store.read_logs(LogQuery("nobody")) == LogPage((), 0, 0)


async def test_lines_are_not_journaled(store: Store) -> None:
    run = await a_started_run(store)
    before = (await store.read_journal(after=0, limit=10)).last
    await store.append_logs([a_chunk(run, 1, b"x")])
    assert ((await store.read_journal(after=0, limit=10)).last, await row(store, "a")) == (before, run)
