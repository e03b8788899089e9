"""Log lines: numbered per run, chunk by chunk, each (attempt, sequence) once."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import msgspec

from stellwerk.core.errors import BrokenStore
from stellwerk.core.logs import Appended, Fenced, LogChunk, LogLine, LogPage, LogPiece, LogQuery
from stellwerk.store.sqlite.rows import BULK, SQL, encode_text

STRETCH_LINES = 100_000  # what one reading with a filter looks at
CHUNKS_PER_READING = 10_000

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[LogPiece]).decode
_decode_heads = msgspec.json.Decoder(list[tuple[str, int, int, int]]).decode
_decode_taken = msgspec.json.Decoder(list[tuple[int, int, int, int]]).decode

_FENCED = Fenced()


def append_logs(connection: sqlite3.Connection, chunks: Sequence[LogChunk]) -> list[Appended | Fenced]:
    """Take the chunks of attempts that are running: two statements to look, and one per 128 chunks to write."""
    if not chunks:
        return []
    run_ids = encode_text(list({chunk.run_id for chunk in chunks}))
    heads: dict[str, tuple[int, int]] = {}  # run → added, attempt
    ends: dict[int, int] = {}  # added → last line
    for run_id, added, attempt, last_line in _decode_heads(
        connection.execute(SQL["log_heads"], (run_ids,)).fetchone()[0]
    ):
        heads[run_id] = (added, attempt)
        ends[added] = last_line
    taken = _read_taken(connection, chunks, heads)
    answers: list[Appended | Fenced] = []
    values: list[Any] = []
    for chunk in chunks:
        added, attempt = heads.get(chunk.run_id, (0, 0))
        if added == 0 or attempt != chunk.attempt:
            answers.append(_FENCED)
            continue
        place = (added, attempt, chunk.sequence)
        if place not in taken:
            ends[added] += len(chunk.lines)
            taken[place] = ends[added]
            values += (added, ends[added], attempt, chunk.sequence, len(chunk.lines), _encode(chunk.lines))
        answers.append(Appended(taken[place]))
    if values:
        BULK["insert_logs"].write(connection, values)
    return answers


def _read_taken(
    connection: sqlite3.Connection, chunks: Sequence[LogChunk], heads: dict[str, tuple[int, int]]
) -> dict[tuple[int, int, int], int]:
    """Which of the chunks are already there, with their last lines."""
    places = [(heads[c.run_id][0], c.attempt, c.sequence) for c in chunks if c.run_id in heads]
    if not places:
        return {}
    text = connection.execute(SQL["logs_taken"], (encode_text(places),)).fetchone()[0]
    return {(run, attempt, sequence): last for run, attempt, sequence, last in _decode_taken(text)}


def read_logs(connection: sqlite3.Connection, query: LogQuery) -> LogPage:
    """Lines after a line number, of some streams only if given."""
    end = connection.execute(SQL["log_end"], (query.run_id,)).fetchone()
    if end is None:
        return LogPage((), 0, 0)
    added, last_line = end
    found: list[LogLine] = []
    examined, seen = last_line, 0
    rows = connection.execute(SQL["read_logs"], (added, query.after_line, CHUNKS_PER_READING))
    for last, attempt, count, body in rows:
        pieces = _pieces(body, count, query.run_id)
        first = last - count + 1
        for number in range(max(first, query.after_line + 1), last + 1):
            if len(found) == query.limit:
                examined = found[-1].line
                break
            if seen == STRETCH_LINES:
                examined = number - 1
                break
            piece = pieces[number - first]
            seen += 1
            if not query.streams or piece.stream in query.streams:
                found.append(LogLine(number, attempt, piece))
        else:
            continue
        break
    rows.close()
    return LogPage(tuple(found), examined, last_line)


def _pieces(body: bytes, count: int, run_id: str) -> list[LogPiece]:
    try:
        pieces = _decode(body)
    except msgspec.MsgspecError as error:
        raise BrokenStore(f"log lines of run {run_id} cannot be read: {error}") from error
    if len(pieces) != count:
        raise BrokenStore(f"a chunk of run {run_id} has {len(pieces)} lines where {count} were written")
    return pieces
