"""The log buffer alone: lines, numbers, limits."""

from __future__ import annotations

import asyncio
from pathlib import Path

from stellwerk.core.logs import STDERR, STDOUT, SYSTEM, LogPiece
from stellwerk.execute.log_buffer import LogBuffer, LogLimits


class Woken:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def new_buffer(folder: Path, woken: Woken | None = None, **limits: int) -> LogBuffer:
    return LogBuffer(
        now_ms=lambda: 7,
        wake=woken if woken is not None else Woken(),
        folder=folder,
        limits=LogLimits(**limits),
        partial_after_s=0.05,
    )


def taken(buffer: LogBuffer) -> list[LogPiece]:
    pieces = []
    while chunks := buffer.take():
        pieces += [piece for chunk in chunks for piece in chunk.lines]
        buffer.confirm(chunks)
    return pieces


async def test_bytes_are_cut_to_lines_across_writes(tmp_path: Path) -> None:
    buffer = new_buffer(tmp_path)
    for data in (b"a", b"b\nc\n\n", b"\xff\xfe\n"):
        assert buffer.write("r", 1, STDOUT, data)
    assert taken(buffer) == [LogPiece(STDOUT, 7, data) for data in (b"ab", b"c", b"", b"\xff\xfe")]


async def test_two_streams_do_not_mix_within_a_line(tmp_path: Path) -> None:
    buffer = new_buffer(tmp_path)
    buffer.write("r", 1, STDOUT, b"out")
    buffer.write("r", 1, STDERR, b"err\n")
    buffer.write("r", 1, STDOUT, b"put\n")
    assert taken(buffer) == [LogPiece(STDERR, 7, b"err"), LogPiece(STDOUT, 7, b"output")]


async def test_a_long_line_is_cut_at_the_limit(tmp_path: Path) -> None:
    buffer = new_buffer(tmp_path, line_bytes=4)
    buffer.write("r", 1, STDOUT, b"123456789\n1234\n")
    assert taken(buffer) == [
        LogPiece(STDOUT, 7, b"1234", cut=True),
        LogPiece(STDOUT, 7, b"5678", cut=True),
        LogPiece(STDOUT, 7, b"9"),
        LogPiece(STDOUT, 7, b"1234"),
    ]


async def test_a_line_without_newline_is_shown_after_a_while(tmp_path: Path) -> None:
    woken = asyncio.Event()
    buffer = LogBuffer(now_ms=lambda: 7, wake=woken.set, folder=tmp_path, partial_after_s=0.05)
    buffer.write("r", 1, STDOUT, b"password: ")
    assert buffer.take() == []
    await asyncio.wait_for(woken.wait(), 20)
    buffer.write("r", 1, STDOUT, b"x\n")
    assert taken(buffer) == [LogPiece(STDOUT, 7, b"password: ", cut=True), LogPiece(STDOUT, 7, b"x")]


async def test_a_line_without_newline_goes_out_at_the_close(tmp_path: Path) -> None:
    buffer = new_buffer(tmp_path)
    buffer.write("r", 1, STDOUT, b"end")
    buffer.close("r", 1)
    assert not buffer.is_drained("r", 1)
    assert taken(buffer) == [LogPiece(STDOUT, 7, b"end", cut=True)]
    assert buffer.is_drained("r", 1)


async def test_chunks_are_numbered_from_1_in_each_attempt(tmp_path: Path) -> None:
    buffer = new_buffer(tmp_path)
    numbers = []
    for run_id in ("a", "b", "a"):
        buffer.write(run_id, 1, STDOUT, b"x\n")
        chunks = buffer.take()
        numbers += [(chunk.run_id, chunk.sequence) for chunk in chunks]
        buffer.confirm(chunks)
    assert numbers == [("a", 1), ("b", 1), ("a", 2)]


async def test_the_worker_is_woken_once_for_many_lines(tmp_path: Path) -> None:
    woken = Woken()
    buffer = new_buffer(tmp_path, woken)
    for _ in range(10):
        buffer.write("r", 1, STDOUT, b"x\n")
    assert woken.count == 1


async def test_too_much_waiting_asks_for_a_pause_until_it_is_confirmed(tmp_path: Path) -> None:
    buffer = new_buffer(tmp_path, waiting_bytes=1_000, waiting_bytes_max=2_000)
    assert not buffer.write("r", 1, STDOUT, b"x" * 1_000 + b"\n")
    assert buffer.write("other", 1, STDOUT, b"x\n")
    chunks = buffer.take()
    assert not buffer.write("r", 1, STDOUT, b"")
    buffer.confirm(chunks)
    assert buffer.write("r", 1, STDOUT, b"")


async def test_what_does_not_fit_is_dropped_and_counted(tmp_path: Path) -> None:
    buffer = new_buffer(tmp_path, waiting_bytes=100, waiting_bytes_max=200)
    buffer.write("r", 1, STDOUT, b"x" * 300 + b"\nhalf")
    buffer.write("r", 1, STDOUT, b" lost\n")
    assert [piece.data for piece in taken(buffer)] == [b"x" * 300, b"half"]
    buffer.write("r", 1, STDOUT, b"on\n")
    marker, after = taken(buffer)
    assert marker.stream == SYSTEM
    assert marker.data.startswith(b"[6 bytes of output are missing here")
    assert after.data == b"on"


async def test_beyond_the_cap_the_end_is_kept_aside_and_comes_after_a_marker(tmp_path: Path) -> None:
    buffer = new_buffer(tmp_path, head_bytes=35, tail_bytes=55, waiting_bytes=300, chunk_bytes=150)
    for number in range(100):
        buffer.write("r", 1, STDOUT, b"%010d\n" % number)
    buffer.close("r", 1)
    pieces = taken(buffer)
    texts = [piece.data for piece in pieces if piece.stream == STDOUT]
    assert texts == [b"%010d" % number for number in (0, 1, 2, 95, 96, 97, 98, 99)]
    assert pieces[3].stream == SYSTEM
    assert pieces[3].data.startswith(b"[1012 bytes of output are missing here")
    assert buffer.is_drained("r", 1)


async def test_the_kept_end_comes_back_in_bunches_that_wait_for_confirmation(tmp_path: Path) -> None:
    buffer = new_buffer(tmp_path, head_bytes=0, tail_bytes=10_000, waiting_bytes=1_000, chunk_bytes=500)
    for number in range(500):
        buffer.write("r", 1, STDOUT, b"%010d\n" % number)
    buffer.close("r", 1)
    unconfirmed = []
    while chunks := buffer.take():
        unconfirmed += chunks
    assert sum(len(chunk.lines) for chunk in unconfirmed) < 30
    buffer.confirm(unconfirmed)
    lines = [piece.data for chunk in unconfirmed for piece in chunk.lines][1:] + [p.data for p in taken(buffer)]
    assert lines == [b"%010d" % number for number in range(500)]
    assert buffer.is_drained("r", 1)


async def test_empty_lines_count_towards_the_cap(tmp_path: Path) -> None:
    buffer = new_buffer(tmp_path, head_bytes=10, tail_bytes=10)
    buffer.write("r", 1, STDOUT, b"\n" * 1_000)
    buffer.close("r", 1)
    assert len(taken(buffer)) == 21


async def test_an_attempt_without_output_leaves_no_trace(tmp_path: Path) -> None:
    buffer = new_buffer(tmp_path)
    buffer.close("r", 1)
    assert buffer.is_drained("r", 1)
    assert buffer.take() == []
