"""The SQLite store: one file in the data folder, one writer, two readers. See `protocol.Store` for what it promises."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec

from stellwerk.core.batch import Applied, Batch, Claim
from stellwerk.core.errors import BrokenStore, Unavailable
from stellwerk.core.facts import Facts, Loaded
from stellwerk.core.logs import Appended, Fenced, LogChunk, LogPage, LogQuery
from stellwerk.core.queries import Counts, Due, JournalSlice, LeaseRef, Retention, RunPage, RunQuery
from stellwerk.store.sqlite import journal, log_lines, reading
from stellwerk.store.sqlite.ballast import Ballast
from stellwerk.store.sqlite.identity import Mark, read_mark, why_foreign, write_mark
from stellwerk.store.sqlite.opening import (
    DATABASE_NAME,
    MEMORY_FILE_SYSTEMS,
    Folder,
    connect_reader,
    connect_writer,
)
from stellwerk.store.sqlite.rows import SQL
from stellwerk.store.sqlite.session import Failure, Session, Work, explain
from stellwerk.store.sqlite.writer import InlineWriter, Writer, WriterThread

READERS = 2

T = TypeVar("T")


class SqliteStore:
    """`inline`: everything in the caller's thread, so that nothing depends on the scheduling of threads."""

    def __init__(self, folder: Path, *, inline: bool = False) -> None:
        self._folder = Folder(folder)
        self._path = folder / DATABASE_NAME
        self._inline = inline
        self._durability = "D0"
        self._connection: sqlite3.Connection | None = None
        self._session: Session | None = None
        self._writer: Writer | None = None
        self._readers: SimpleQueue[sqlite3.Connection] = SimpleQueue()
        self._pool: ThreadPoolExecutor | None = None

    # -- lifetime -----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        if self._inline:
            self._open()
        else:
            await asyncio.get_running_loop().run_in_executor(None, self._open)

    def _open(self) -> None:
        self._folder.take()
        try:
            self._open_database()
        except BaseException:
            self._close_connections()
            self._folder.release()
            raise

    def _open_database(self) -> None:
        known = read_mark(self._folder.path)
        is_new = not self._path.exists()
        try:
            self._connection = connect_writer(self._path)
            ballast = Ballast(self._folder.path)
            session = Session(self._connection, self._path, ballast)
        except sqlite3.OperationalError as error:
            raise explain(error, self._path) from error
        session.foreign = why_foreign(known, Mark(session.epoch, session.head.last), is_new=is_new)
        ballast.take_in()
        outcome = session.execute([Session.end_leases])[0]
        if isinstance(outcome, Failure):
            # On a full disk the first try has thrown the ballast off.
            outcome = session.execute([Session.end_leases])[0]
        if isinstance(outcome, Failure):
            raise outcome.error
        self._remember(session)
        for _ in range(READERS):
            self._readers.put(connect_reader(self._path))
        self._durability = self._probe_durability(self._connection)
        self._session = session
        if self._inline:
            self._writer = InlineWriter(session)
        else:
            self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="stellwerk-sqlite-reader")
            self._writer = WriterThread(session)

    def _probe_durability(self, connection: sqlite3.Connection) -> str:
        if self._folder.file_system() in MEMORY_FILE_SYSTEMS:
            return "D0"
        is_full = connection.execute(SQL["synchronous"]).fetchone()[0] >= 2
        return "D3" if is_full else "D2"

    async def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        if self._inline:
            self._close(writer)
        else:
            await asyncio.get_running_loop().run_in_executor(None, self._close, writer)

    def _close(self, writer: Writer) -> None:
        writer.stop()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        if self._session is not None:
            self._remember(self._session)
        self._close_connections()
        self._folder.release()

    def _remember(self, session: Session) -> None:
        """Mark how far the store has come, if it is ours."""
        if session.foreign is None:
            try:
                write_mark(self._folder.path, Mark(session.epoch, session.head.last))
            except OSError:
                pass  # a full disk; a mark that is behind is still right

    def _close_connections(self) -> None:
        while not self._readers.empty():
            self._readers.get().close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def durability(self) -> str:
        return self._durability

    def exclusive(self) -> bool:
        return True

    def foreign(self) -> str | None:
        return self._session.foreign if self._session is not None else None

    def low(self) -> str | None:
        return self._session.low() if self._session is not None else None

    async def adopt(self, now_ms: int, actor: str) -> None:
        session = self._opened()
        known = read_mark(self._folder.path)
        await self._request(lambda session: session.adopt(known, now_ms, actor))
        try:
            write_mark(self._folder.path, Mark(session.epoch, session.head.last))
        except OSError as error:
            raise Unavailable(f"the adoption could not be remembered in {self._folder.path}: {error}") from error
        session.foreign = None

    async def epoch(self) -> str:
        return self._opened().epoch

    # -- change -------------------------------------------------------------------------------------------------------

    async def apply(self, batches: Sequence[Batch], claims: Sequence[Claim], now_ms: int) -> Applied:
        applied: Applied = await self._request(lambda session: session.apply(batches, claims, now_ms))
        return applied

    async def extend(self, leases: Sequence[LeaseRef], until_ms: int, now_ms: int) -> list[str]:
        given_up: list[str] = await self._request(lambda session: session.extend(leases, until_ms, now_ms))
        return given_up

    # -- look ---------------------------------------------------------------------------------------------------------

    async def load(self, facts: Facts) -> Loaded:
        return await self._look(lambda connection: reading.load(connection, facts))

    async def find_runs(self, query: RunQuery) -> RunPage:
        return await self._look(lambda connection: reading.find_runs(connection, query))

    async def count(self) -> Counts:
        return await self._look(reading.count)

    async def due(self, now_ms: int, limit: int) -> Due:
        return await self._look(lambda connection: reading.due(connection, now_ms, limit))

    # -- journal ------------------------------------------------------------------------------------------------------

    async def read_journal(self, after: int, limit: int, run: str | None = None) -> JournalSlice:
        return await self._look(lambda connection: journal.read_journal(connection, after, limit, run))

    async def trim_journal(self, keep: Retention, now_ms: int) -> int:
        trimmed: int = await self._request(lambda session: session.trim_journal(keep, now_ms))
        return trimmed

    # -- logs ---------------------------------------------------------------------------------------------------------

    async def append_logs(self, chunks: Sequence[LogChunk]) -> list[Appended | Fenced]:
        answers: list[Appended | Fenced] = await self._request(lambda session: session.append_logs(chunks))
        return answers

    async def read_logs(self, query: LogQuery) -> LogPage:
        return await self._look(lambda connection: log_lines.read_logs(connection, query))

    # -- threads ------------------------------------------------------------------------------------------------------

    def _opened(self) -> Session:
        if self._writer is None or self._session is None:
            raise Unavailable("the store is not open")
        return self._session

    async def _request(self, work: Work) -> Any:
        if self._writer is None:
            raise Unavailable("the store is not open")
        return await self._writer.request(work)

    async def _look(self, look: Callable[[sqlite3.Connection], T]) -> T:
        if self._writer is None:
            raise Unavailable("the store is not open")
        if self._pool is None:
            return self._read(look)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._read, look)

    def _read(self, look: Callable[[sqlite3.Connection], T]) -> T:
        """One look is one read transaction: all it finds is true at one moment."""
        connection = self._readers.get()
        try:
            connection.execute(SQL["begin_reading"])
            try:
                return look(connection)
            finally:
                connection.execute(SQL["roll_back"])
        except sqlite3.Error as error:
            raise explain(error, self._path) from error
        except msgspec.MsgspecError as error:
            raise BrokenStore(f"a row of {self._path} is not as it was written: {error}") from error
        finally:
            self._readers.put(connection)
