"""The writer's session: what the one writing connection does and remembers, call by call.

Several requests may share one transaction and one flush. Each is undone alone if it fails; a full or broken disk fails
them all, before any of them is acknowledged.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stellwerk.core.batch import Applied, Batch, Claim
from stellwerk.core.errors import BrokenStore, StellwerkError, Unavailable
from stellwerk.core.event_ids import EVENTS_PER_MS, next_event_id
from stellwerk.core.events import StoreAdopted
from stellwerk.core.logs import Appended, Fenced, LogChunk
from stellwerk.core.queries import LeaseRef, Retention
from stellwerk.store.sqlite import journal, log_lines
from stellwerk.store.sqlite.applying import apply_call, read_gates
from stellwerk.store.sqlite.ballast import Ballast
from stellwerk.store.sqlite.identity import Mark, write_mark
from stellwerk.store.sqlite.rows import SQL, encode_text

WAL_BYTES_MAX = 64 * 1024 * 1024  # beyond that the writer waits for readers and starts the WAL afresh
MARK_EVERY_IDS = 10_000 * EVENTS_PER_MS  # EventIds tell the time: ten seconds in which something happened
WAL_LOOK_CALLS = 256  # how often the size is looked at

_FULL = {sqlite3.SQLITE_FULL}
_BROKEN_DISK = {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY}
_HELD = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}

_decode_numbers = msgspec.json.Decoder(list[int]).decode

Work = Callable[["Session"], Any]


class Failure:
    """A request that was undone, and why."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Session:
    """Used by one thread at a time."""

    def __init__(self, connection: sqlite3.Connection, database: Path, ballast: Ballast) -> None:
        self._connection = connection
        self._database = database
        self._ballast = ballast
        self._calls = 0
        self._has_trimmed = False
        self.head = journal.read_head(connection)
        self.book = read_gates(connection)
        self.epoch: str = connection.execute(SQL["get_meta"], ("epoch",)).fetchone()[0]
        self.foreign: str | None = None
        self._marked = self.head.last

    # -- transactions -------------------------------------------------------------------------------------------------

    def execute(self, works: Sequence[Work]) -> list[Any]:
        """Do all in one transaction; answer the result of each, or its Failure, after the flush."""
        head, book = self.head, self.book
        try:
            self._connection.execute(SQL["begin_writing"])
            outcomes = [self._attempt(work) for work in works]
            self._connection.execute(SQL["commit"])
        except sqlite3.Error as error:
            self.head, self.book = head, book
            failure = Failure(self._recover(error))
            return [failure for _ in works]
        self._calls += 1
        if self.head.last - self._marked > MARK_EVERY_IDS:
            self._mark()
        if self._calls % WAL_LOOK_CALLS == 0:
            self._look_after_wal()
        if self._has_trimmed:
            self._vacuum()
        return outcomes

    def _attempt(self, work: Work) -> Any:
        head, book = self.head, self.book
        self._connection.execute(SQL["hope"])
        try:
            outcome = work(self)
        except sqlite3.OperationalError:
            raise
        except Exception as error:
            self.head, self.book = head, book
            self._connection.execute(SQL["give_up_hope"])
            outcome = Failure(error)
        self._connection.execute(SQL["end_of_hope"])
        return outcome

    def _recover(self, error: sqlite3.Error) -> StellwerkError:
        """Undo what is left of the transaction, and say what happened."""
        if self._connection.in_transaction:
            try:
                self._connection.execute(SQL["roll_back"])
            except sqlite3.Error:
                pass  # SQLite has already done it
        code = primary_code(error)
        if code in _FULL | _BROKEN_DISK:
            self._ballast.throw_off()
            self._checkpoint()
        return explain(error, self._database)

    def _mark(self) -> None:
        """Note how far the store has come, so that an older copy put in its place is noticed also after a crash."""
        self._marked = self.head.last
        if self.foreign is None:
            try:
                write_mark(self._database.parent, Mark(self.epoch, self.head.last))
            except OSError:
                pass  # the next one is soon

    def _look_after_wal(self) -> None:
        """SQLite copies the WAL back by itself; only readers that overlap without end could let it grow."""
        try:
            if self._database.with_name(f"{self._database.name}-wal").stat().st_size > WAL_BYTES_MAX:
                self._checkpoint()
        except OSError:
            pass  # the next look will tell

    def _vacuum(self) -> None:
        """Give free pages back. Only a script runs this pragma to its end, and a script cannot share a transaction."""
        self._has_trimmed = False
        try:
            self._connection.executescript(SQL["vacuum"])
        except sqlite3.Error:
            pass  # the next trimming tries again

    def _checkpoint(self) -> None:
        try:
            self._connection.execute(SQL["checkpoint"]).fetchall()
        except sqlite3.Error:
            pass  # it is tried again with every commit

    def low(self) -> str | None:
        """Why new runs are refused, as long as that is so."""
        try:
            is_low = self._ballast.is_missed()
        except OSError:
            is_low = True
        return f"the disk of {self._database.parent} is nearly full; no new runs are taken" if is_low else None

    # -- requests -----------------------------------------------------------------------------------------------------

    def apply(self, batches: Sequence[Batch], claims: Sequence[Claim], now_ms: int) -> Applied:
        if self.foreign is not None:
            raise Unavailable(f"the store is foreign: {self.foreign}")
        if self._ballast.is_off:
            self._ballast.take_in()
            if self._ballast.is_off and batches and all(map(_only_adds, batches)):
                raise Unavailable(
                    f"the disk of {self._database.parent} is nearly full; no new runs are taken until there is room",
                    retry_after_s=10,
                )
        result = apply_call(self._connection, self.head, self.book, batches, claims, now_ms)
        self.head, self.book = result.head, result.book
        return result.applied

    def extend(self, leases: Sequence[LeaseRef], until_ms: int, now_ms: int) -> list[str]:
        """Prolong what is held; answer the others, and those asked to stop."""
        names = encode_text([(lease.run_id, lease.attempt, lease.worker) for lease in leases])
        kept = set(_decode_numbers(self._connection.execute(SQL["kept"], (names, now_ms)).fetchone()[0]))
        self._connection.execute(SQL["extend"], (until_ms, names, now_ms))
        return [lease.run_id for place, lease in enumerate(leases) if place not in kept]

    def append_logs(self, chunks: Sequence[LogChunk]) -> list[Appended | Fenced]:
        return log_lines.append_logs(self._connection, chunks)

    def trim_journal(self, keep: Retention, now_ms: int) -> int:
        """Forget what need not be kept, and give some of the room back to the file system."""
        self._has_trimmed = True
        return journal.trim_journal(self._connection, keep, now_ms)

    def end_leases(self) -> None:
        self._connection.execute(SQL["end_leases"])

    def adopt(self, known: Mark | None, now_ms: int, actor: str) -> None:
        """Journal the adoption; whoever followed before asks after less than `forgotten`, and is torn."""
        last = max(self.head.last, known.last if known is not None else 0)
        event = StoreAdopted("store", actor, now_ms, self.epoch)
        self.head = journal.write_events(self._connection, self.head, [event], next_event_id(last + 1, now_ms))
        self._connection.execute(SQL["put_meta"], ("forgotten", str(self.head.last - 1)))


def _only_adds(batch: Batch) -> bool:
    return bool(batch.adds) and not batch.changes and not batch.drops


def primary_code(error: sqlite3.Error) -> int:
    """What kind of error it is, without the fine print."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def explain(error: sqlite3.Error, database: Path) -> StellwerkError:
    """An error of SQLite as one of ours."""
    code = primary_code(error)
    if code in _FULL:
        return Unavailable(
            f"the disk of {database.parent} is full; nothing was acknowledged. Make room, no restart is needed.",
            retry_after_s=10,
        )
    if code in _BROKEN_DISK:
        return Unavailable(
            f"{database} cannot be read or written ({error}); nothing was acknowledged. Look at its disk.",
            retry_after_s=10,
        )
    if code in _HELD:
        return Unavailable(f"{database} is held by another program; nothing was acknowledged")
    return BrokenStore(f"{database}: {error}")
