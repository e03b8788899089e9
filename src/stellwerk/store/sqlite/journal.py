"""The journal: one row per call, its events as one msgpack list, numbered by the single writer."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from stellwerk.core.errors import BrokenStore
from stellwerk.core.event_ids import event_id_ms
from stellwerk.core.events import AnyEvent, RunEvent, Stamped
from stellwerk.core.queries import JournalSlice, Retention
from stellwerk.store.sqlite.rows import SQL

STRETCH_EVENTS = 10_000  # what one reading looks at
TRIM_ROWS_MAX = 1_000  # calls whose events one trimming forgets
ROW_EVENTS_MAX = 4_000  # a larger call takes several rows, so that a page does not decode megabytes

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[AnyEvent]).decode
_decode_rows = msgspec.json.Decoder(list[tuple[int, int, int]]).decode
_decode_sizes = msgspec.json.Decoder(list[tuple[int, int]]).decode


class Head(Struct, frozen=True):
    """The end of the journal: its last EventId, and how many events were ever written."""

    last: int
    position: int


def read_head(connection: sqlite3.Connection) -> Head:
    """Where the journal ends."""
    found = connection.execute(SQL["journal_ends"]).fetchone()
    return Head(0, 0) if found is None else Head(found[0], found[1])


def write_events(connection: sqlite3.Connection, head: Head, events: Sequence[AnyEvent], first: int) -> Head:
    """Append the events of a call."""
    last, position = head.last, head.position
    assert first > last
    for begin in range(0, len(events), ROW_EVENTS_MAX):
        part = events[begin : begin + ROW_EVENTS_MAX]
        last = first + begin + len(part) - 1
        position += len(part)
        connection.execute(SQL["insert_journal"], (last, len(part), position, _encode(part)))
    return Head(last, position)


def read_journal(connection: sqlite3.Connection, after: int, limit: int, run: str | None) -> JournalSlice:
    """Events after an EventId, over a bounded stretch."""
    last, forgotten = connection.execute(SQL["stamp"]).fetchone()
    found: list[Stamped] = []
    examined, seen = last, 0
    for last_id, count, body in _read_rows(connection, after, limit, run):
        first = last_id - count + 1
        begin = max(first, after + 1)
        if len(found) == limit:
            # What lies between the last one found and this one is hidden, so it counts as seen.
            examined = found[-1].event_id if run is None else begin - 1
            break
        end = min(last_id, begin + STRETCH_EVENTS - seen - 1)
        if body:
            end = _collect(found, _events(body, last_id, count), first, begin, end, limit, run)
        seen += end - begin + 1
        if end < last_id or (seen == STRETCH_EVENTS and last_id < last):
            examined = end
            break
    return JournalSlice(tuple(found), forgotten, examined, last)


def _read_rows(
    connection: sqlite3.Connection, after: int, limit: int, run: str | None
) -> Iterator[tuple[int, int, bytes]]:
    """Last id, count and body of as many calls as may be needed, and one more: it tells that this is not all."""
    position = connection.execute(SQL["journal_position"], (after,)).fetchone()
    if position is None:
        return
    wanted = STRETCH_EVENTS if run is not None else min(limit, STRETCH_EVENTS)
    values: dict[str, Any] = {"after": after, "until": position[0] + wanted + 1, "rows": wanted + 2}
    if run is None:
        sizes, digits = connection.execute(SQL["journal_after"], values).fetchone()
    else:
        sizes, digits = connection.execute(SQL["journal_after_of"], {**values, "run": run.encode()}).fetchone()
    data = bytes.fromhex(digits or "")
    begin = 0
    for last_id, count, size in _decode_rows(sizes):
        yield last_id, count, data[begin : begin + size]
        begin += size


def _collect(
    found: list[Stamped], events: list[AnyEvent], first: int, begin: int, end: int, limit: int, run: str | None
) -> int:
    """Add the wanted events with ids from `begin` to `end` until there are enough; answer the last one seen."""
    for event_id in range(begin, end + 1):
        event = events[event_id - first]
        if run is None or (isinstance(event, RunEvent) and event.run == run):
            found.append(Stamped(event_id, event))
            if len(found) == limit:
                return event_id
    return end


def _events(body: bytes, last_id: int, count: int) -> list[AnyEvent]:
    try:
        events = _decode(body)
    except msgspec.MsgspecError as error:
        raise BrokenStore(f"the events up to {last_id} cannot be read: {error}") from error
    if len(events) != count:
        raise BrokenStore(f"the journal has {len(events)} events up to {last_id} where {count} were written")
    return events


def trim_journal(connection: sqlite3.Connection, keep: Retention, now_ms: int) -> int:
    """Forget whole calls, oldest first; answer how many events."""
    ends = connection.execute(SQL["journal_ends"]).fetchone()
    if ends is None:
        return 0
    kept = left = ends[2]
    forgotten = 0
    text = connection.execute(SQL["journal_oldest"], (TRIM_ROWS_MAX,)).fetchone()[0]
    for last_id, count in _decode_sizes(text):
        is_young = event_id_ms(last_id) > now_ms - keep.age_ms
        is_wanted = is_young or left - count < keep.events_min
        if is_wanted and left <= keep.events_max:
            break
        left -= count
        forgotten = last_id
    if forgotten > 0:
        connection.execute(SQL["trim_journal"], (forgotten,))
        if forgotten > connection.execute(SQL["stamp"]).fetchone()[1]:
            connection.execute(SQL["put_meta"], ("forgotten", str(forgotten)))
    return int(kept - left)
