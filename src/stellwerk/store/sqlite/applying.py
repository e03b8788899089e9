"""One call of `apply`: in hope first, with a comparison where hope fails; then the claims; then the journal.

In hope means: write with the version in the WHERE and count the rows. Equal: all batches stand. Short: undo, read
the versions, let `check_batches` decide, and write those that stand. The contract is the same either way.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Sequence

import msgspec

from stellwerk.core.batch import (
    ROWS_PER_BUNCH,
    AlreadyLive,
    Applied,
    Batch,
    Claim,
    Committed,
    Conflict,
    Receipt,
    RowKey,
    check_batches,
    rows_compared,
)
from stellwerk.core.event_ids import next_event_id
from stellwerk.core.run import NO_QUEUE, State
from stellwerk.store.sqlite.claiming import Claiming, GateBook, keys_of, running_keys, unpark
from stellwerk.store.sqlite.journal import Head, write_events
from stellwerk.store.sqlite.rows import SQL, decode_gates, encode_text
from stellwerk.store.sqlite.sheet import Known, NotPlain, Sheet, merged_sheet, plain_sheet
from stellwerk.store.sqlite.writing import Mismatch, count_sheet, write_counts, write_sheet

Problems = list[Conflict | AlreadyLive | None]

_decode_before = msgspec.json.Decoder(list[tuple[str, str, int, int]]).decode
_decode_names = msgspec.json.Decoder(list[str]).decode
_decode_pairs = msgspec.json.Decoder(list[tuple[str, str]]).decode
_decode_triples = msgspec.json.Decoder(list[tuple[str, str, int]]).decode
_decode_known = msgspec.json.Decoder(list[tuple[str, int, int, str, str, str | None, int | None, str | None]]).decode


class Result:
    """What a call did, and what the writer must remember if it is committed."""

    __slots__ = ("applied", "book", "head")

    def __init__(self, applied: Applied, head: Head, book: GateBook) -> None:
        self.applied, self.head, self.book = applied, head, book


def apply_call(
    connection: sqlite3.Connection,
    head: Head,
    book: GateBook,
    batches: Sequence[Batch],
    claims: Sequence[Claim],
    now_ms: int,
) -> Result:
    """Do all that one call asks for, inside the savepoint `hope` that the caller has set."""
    first = next_event_id(head.last, now_ms)
    try:
        sheet = plain_sheet(batches, first, head.last)
    except NotPlain:
        return _apply_compared(connection, head, book, batches, claims, now_ms)
    try:
        _read_before(connection, sheet)
        problems: Problems = [None] * len(batches)
        result = _Call(connection, head, book, now_ms, hopeful=True).run(sheet, problems, claims)
    except (Mismatch, sqlite3.IntegrityError):
        connection.execute(SQL["give_up_hope"])
        return _apply_compared(connection, head, book, batches, claims, now_ms)
    return result


def _apply_compared(
    connection: sqlite3.Connection,
    head: Head,
    book: GateBook,
    batches: Sequence[Batch],
    claims: Sequence[Claim],
    now_ms: int,
) -> Result:
    known, problems = _compare(connection, book, batches)
    standing = [batch for batch, problem in zip(batches, problems, strict=True) if problem is None]
    sheet = merged_sheet(standing, known, next_event_id(head.last, now_ms), head.last)
    try:
        return _Call(connection, head, book, now_ms, hopeful=False).run(sheet, problems, claims)
    except (Mismatch, sqlite3.IntegrityError) as error:
        raise AssertionError(f"a batch writes a row that cannot be: {error}") from error


class _Call:
    """One call on its way from a sheet to the answer."""

    def __init__(
        self, connection: sqlite3.Connection, head: Head, book: GateBook, now_ms: int, *, hopeful: bool
    ) -> None:
        self._connection, self._head, self._book, self._now_ms = connection, head, book, now_ms
        self._hopeful = hopeful
        self._counts: Counter[tuple[str, str]] = Counter()
        self._claimable: set[str] = set()
        self._early: list[int] = []  # rows that were written before the last EventId was known

    def run(self, sheet: Sheet, problems: Problems, claims: Sequence[Claim]) -> Result:
        """Write the sheet, serve the claims, journal the events."""
        first = next_event_id(self._head.last, self._now_ms)
        events, event_ids = sheet.events, sheet.event_ids
        self._claimable |= sheet.claimable
        unparks = sheet.unparks
        if any(unparks) or sheet.gates or self._book.limited:
            # Unparking and limits look at the rows of the database: these must be there.
            sheet = self._write_early(sheet)
        unparked = [0] * len(unparks)
        if any(unparks):
            unparked = [sum(self._unpark(key, ROWS_PER_BUNCH) for key in keys) for keys in unparks]
        if claims:
            claiming = Claiming(self._connection, sheet, self._book, events, self._now_ms)
            found = [claiming.serve(claim) for claim in claims]
            self._claimable |= claiming.claimable
            last = first + len(events) - 1 if events else self._head.last
            claimed = tuple([claiming.finish(one, last) for one in found])
        else:
            last = first + len(events) - 1 if events else self._head.last
            claimed = ()
        write_sheet(self._connection, sheet, last, hopeful=self._hopeful)
        count_sheet(sheet, self._counts)
        if self._early:
            self._connection.execute(SQL["touch_runs"], (last, encode_text(self._early)))
        write_counts(self._connection, self._counts)
        head = write_events(self._connection, self._head, events, first)
        committed = iter([Committed(*pair) for pair in zip(event_ids, unparked, strict=True)])
        receipts: list[Receipt] = [next(committed) if problem is None else problem for problem in problems]
        applied = Applied(
            receipts=tuple(receipts),
            claimed=claimed,
            first_event_id=first if events else 0,
            events=tuple(events),
            claimable=frozenset(self._claimable),
        )
        return Result(applied, head, self._book)

    def _write_early(self, sheet: Sheet) -> Sheet:
        """Write the batches before the claims; answer a new sheet for what the claims will write."""
        connection = self._connection
        yielded: Counter[str] = Counter()
        if self._book.limited or sheet.gates:  # gates that are yet to be written may be limits
            yielded = self._yielded(sheet)
        write_sheet(connection, sheet, 0, hopeful=self._hopeful)
        count_sheet(sheet, self._counts)
        self._early = [sheet.added[run_id] for run_id in (*sheet.adds, *sheet.changes)]
        if sheet.gates:
            self._book = read_gates(connection)
        concerned = [key for key in self._book.limited if yielded[key] > 0]
        if concerned:
            running = running_keys(connection)
            for key in concerned:
                if running[key] < self._book.limits[key]:
                    self._unpark(key, yielded[key])
        return Sheet()

    def _yielded(self, sheet: Sheet) -> Counter[str]:
        """How many runs of each key were running or claimable before this sheet, and are neither after it."""
        yielded = Counter(key for keys in sheet.gave_way.values() for key in keys)
        readied: list[int] = []
        others: list[int] = []
        if self._hopeful:
            for run_id, (run, _) in sheet.changes.items():
                if run.state is State.READY and run.spec.queue != NO_QUEUE:
                    readied.append(sheet.added[run_id])
                elif run.state is not State.RUNNING:
                    others.append(sheet.added[run_id])
        drops = list(sheet.drops) if self._hopeful else sheet.unseen_drops
        asked: list[tuple[str, Sequence[int | str]]] = [
            ("running_specs", readied),
            ("yielding_specs", others),
            ("yielding_specs_by_id", drops),
        ]
        for name, rows in asked:
            if rows:
                yielded += keys_of(self._connection.execute(SQL[name], (encode_text(rows),)).fetchone()[0])
        return yielded

    def _unpark(self, key: str, limit: int) -> int:
        unparked, queues = unpark(self._connection, key, limit)
        self._claimable.update(queues)
        return len(unparked)


def read_gates(connection: sqlite3.Connection) -> GateBook:
    """All gates, in order."""
    return GateBook(decode_gates(connection.execute(SQL["all_gates"]).fetchone()[0]))


def _read_before(connection: sqlite3.Connection, sheet: Sheet) -> None:
    """Note what the runs of a hopeful sheet were before; a run that is not there ends the hope."""
    if sheet.changes:
        rows = sheet.added if not sheet.adds else {run_id: sheet.added[run_id] for run_id in sheet.changes}
        _count_before(connection, sheet, "rows_before", encode_text(rows), len(rows))
        readied = [sheet.added[run_id] for run_id, (run, _) in sheet.changes.items() if run.state is State.READY]
        if readied:
            found = connection.execute(SQL["newly_claimable"], (encode_text(readied),)).fetchone()[0]
            sheet.claimable.update(_decode_names(found))
    if sheet.drops:
        _count_before(connection, sheet, "rows_before_by_id", encode_text(list(sheet.drops)), len(sheet.drops))


def _count_before(connection: sqlite3.Connection, sheet: Sheet, name: str, rows: str, count: int) -> None:
    for queue, state, is_free, number in _decode_before(connection.execute(SQL[name], (rows,)).fetchone()[0]):
        sheet.before[queue, state] += number
        if state == "ready" and is_free:
            sheet.stale[queue] += number
        count -= number
    if count != 0:
        raise Mismatch


def _compare(
    connection: sqlite3.Connection, book: GateBook, batches: Sequence[Batch]
) -> tuple[dict[str, Known], Problems]:
    """Read all that the batches compare with, and let the core decide which stand."""
    rows = [row for batch in batches for row, _ in rows_compared(batch)]
    run_ids = {row[1] for row in rows if row[0] == "run"}
    places = {row[1:] for row in rows if row[0] == "record"}
    live_keys = {add.wanted_key for batch in batches for add in batch.adds if add.wanted_key is not None}
    known: dict[str, Known] = {}
    holders: dict[str, str] = {}
    versions: dict[RowKey, int] = {("gate", gate.key, gate.kind): gate.version for gate in book.gates}
    if run_ids:
        text = connection.execute(SQL["run_versions"], (encode_text(list(run_ids)),)).fetchone()[0]
        for run_id, added, version, state, queue, parked, alarm_ms, live_key in _decode_known(text):
            known[run_id] = Known(added, version, state, queue, parked, alarm_ms, live_key)
            versions["run", run_id] = version
    if live_keys:
        text = connection.execute(SQL["live_holders"], (encode_text(list(live_keys)),)).fetchone()[0]
        holders.update(_decode_pairs(text))
    if places:
        text = connection.execute(SQL["record_versions"], (encode_text(list(places)),)).fetchone()[0]
        for kind, key, version in _decode_triples(text):
            versions["record", kind, key] = version

    def lease_of(run_id: str) -> int | None:
        row = known.get(run_id)
        return row.alarm_ms if row is not None and row.state == "running" else None

    return known, check_batches(batches, lambda row: versions.get(row, 0), holders.get, lease_of)
