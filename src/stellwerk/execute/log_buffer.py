"""Output on its way to the log store: bytes in, numbered lines out, bounded.

Bytes are kept as they came. They are cut to lines here and nowhere else; a line without a newline is handed over as
`cut` after a second, so that a prompt or a progress bar is seen. All calls come from the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from stellwerk.core.logs import (
    ATTEMPT_BYTES_MAX,
    ATTEMPT_HEAD_BYTES,
    LINE_BYTES_MAX,
    STDERR,
    STDOUT,
    SYSTEM,
    LogChunk,
    LogPiece,
)
from stellwerk.execute.log_tail import LogTail, written_bytes

PARTIAL_AFTER_S = 1.0
LINE_COST_BYTES = 64  # what an empty line costs in memory, so that a million of them count too


class LogLimits(Struct, frozen=True):
    """How much is kept, and how much may wait for the store."""

    head_bytes: int = ATTEMPT_HEAD_BYTES
    tail_bytes: int = ATTEMPT_BYTES_MAX - ATTEMPT_HEAD_BYTES
    line_bytes: int = LINE_BYTES_MAX
    waiting_bytes: int = 512 * 1024  # beyond this the reader is asked to pause
    waiting_bytes_max: int = 1024 * 1024  # beyond this it is dropped and counted
    chunk_bytes: int = 256 * 1024


class _AttemptLog:
    """What is known of one attempt's output until all of it is in the store."""

    __slots__ = (
        "chunks_out",
        "dropped_bytes",
        "head_left",
        "is_closed",
        "key",
        "partial_since",
        "partials",
        "sequence",
        "tail",
        "tail_pieces",
        "waiting",
        "waiting_bytes",
    )

    def __init__(self, key: tuple[str, int], head_bytes: int) -> None:
        self.key = key
        self.sequence = 0
        self.waiting: list[LogPiece] = []
        self.waiting_bytes = 0  # those handed out and not confirmed included
        self.chunks_out: dict[int, int] = {}  # sequence → bytes
        self.partials: dict[int, bytes] = {}  # stream → bytes that no newline followed yet
        self.partial_since = 0.0
        self.head_left = head_bytes
        self.tail: LogTail | None = None
        self.tail_pieces: Iterator[LogPiece] | None = None
        self.dropped_bytes = 0
        self.is_closed = False

    @property
    def is_drained(self) -> bool:
        return self.is_closed and not self.waiting and not self.chunks_out and self.tail_pieces is None


class LogBuffer:
    """Implements `Output`. `wake` tells the worker that `take` has something; it must be cheap when called twice."""

    def __init__(
        self,
        *,
        now_ms: Callable[[], int],
        wake: Callable[[], None],
        folder: Path,
        limits: LogLimits | None = None,
        partial_after_s: float = PARTIAL_AFTER_S,
    ) -> None:
        self._now_ms = now_ms
        self._wake = wake
        self._folder = folder
        self._limits = limits if limits is not None else LogLimits()
        self._partial_after_s = partial_after_s
        self._logs: dict[tuple[str, int], _AttemptLog] = {}
        self._with_lines: dict[tuple[str, int], _AttemptLog] = {}
        self._with_partials: dict[tuple[str, int], _AttemptLog] = {}
        self._partial_timer: asyncio.TimerHandle | None = None

    # ── in ──

    def write(self, run_id: str, number: int, stream: int, data: bytes) -> bool:
        """Take bytes as they came. False: pause, and ask again with no bytes; writing on may drop them."""
        if not data:
            log = self._logs.get((run_id, number))
            return log is None or log.waiting_bytes < self._limits.waiting_bytes
        log = self._log_of(run_id, number)
        if log.waiting_bytes >= self._limits.waiting_bytes_max:
            self._drop(log, len(data))
            return False
        if log.dropped_bytes:
            self._tell_dropped(log)
        self._cut(log, stream, data)
        return log.waiting_bytes < self._limits.waiting_bytes

    def system(self, run_id: str, number: int, text: str) -> None:
        """A line of our own beside the attempt's output."""
        self._add_line(self._log_of(run_id, number), LogPiece(SYSTEM, self._now_ms(), text.encode()))

    def close(self, run_id: str, number: int) -> None:
        """No more output of this attempt comes: what is still held goes out."""
        log = self._logs.get((run_id, number))
        if log is None or log.is_closed:
            return
        self._flush_partials(log)
        if log.dropped_bytes:
            self._tell_dropped(log)
        log.is_closed = True
        if log.tail is not None:
            missing, log.tail_pieces = log.tail.read_last()
            self._append(log, LogPiece(SYSTEM, self._now_ms(), _missing_in_words(missing, self._limits)))
        self._forget_if_drained(log)

    # ── out ──

    def take(self) -> list[LogChunk]:
        """A bunch of lines of every attempt that has some; each must be confirmed."""
        chunks = []
        for log in list(self._with_lines.values()):
            self._refill_from_tail(log)
            if log.waiting:
                log.sequence += 1
                lines, size = self._next_lines(log)
                log.chunks_out[log.sequence] = size
                chunks.append(LogChunk(log.key[0], log.key[1], log.sequence, lines))
            if not log.waiting:
                del self._with_lines[log.key]
                self._forget_if_drained(log)
        return chunks

    def confirm(self, chunks: Sequence[LogChunk]) -> None:
        """These are in the store, or the store refused them for good: there is room again."""
        for chunk in chunks:
            log = self._logs.get((chunk.run_id, chunk.attempt))
            if log is None:
                continue
            log.waiting_bytes -= log.chunks_out.pop(chunk.sequence, 0)
            if log.tail_pieces is not None:
                self._has_more(log)
            self._forget_if_drained(log)

    def is_drained(self, run_id: str, number: int) -> bool:
        """Nothing of this attempt waits to be taken or confirmed any more."""
        return (run_id, number) not in self._logs

    # ── lines ──

    def _log_of(self, run_id: str, number: int) -> _AttemptLog:
        key = (run_id, number)
        log = self._logs.get(key)
        if log is None:
            log = self._logs[key] = _AttemptLog(key, self._limits.head_bytes)
        return log

    def _cut(self, log: _AttemptLog, stream: int, data: bytes) -> None:
        now_ms = self._now_ms()
        *whole, rest = (log.partials.pop(stream, b"") + data).split(b"\n")
        for line in whole:
            line = self._cut_long(log, stream, line, now_ms)
            self._add_line(log, LogPiece(stream, now_ms, line))
        rest = self._cut_long(log, stream, rest, now_ms)
        if rest:
            log.partials[stream] = rest
            self._watch_partials(log)
        elif not log.partials:
            self._with_partials.pop(log.key, None)

    def _cut_long(self, log: _AttemptLog, stream: int, line: bytes, now_ms: int) -> bytes:
        limit = self._limits.line_bytes
        while len(line) > limit:
            self._add_line(log, LogPiece(stream, now_ms, line[:limit], cut=True))
            line = line[limit:]
        return line

    def _add_line(self, log: _AttemptLog, piece: LogPiece) -> None:
        size = written_bytes(piece)
        if log.tail is None and log.head_left >= size:
            log.head_left -= size
            self._append(log, piece)
            return
        if log.tail is None:
            log.tail = LogTail(self._folder, self._limits.tail_bytes)
        log.tail.add(piece)

    def _append(self, log: _AttemptLog, piece: LogPiece) -> None:
        log.waiting.append(piece)
        log.waiting_bytes += len(piece.data) + LINE_COST_BYTES
        self._has_more(log)

    def _has_more(self, log: _AttemptLog) -> None:
        if log.key not in self._with_lines:
            self._with_lines[log.key] = log
            self._wake()

    def _next_lines(self, log: _AttemptLog) -> tuple[tuple[LogPiece, ...], int]:
        size = count = 0
        for piece in log.waiting:
            cost = len(piece.data) + LINE_COST_BYTES
            if count and size + cost > self._limits.chunk_bytes:
                break
            size += cost
            count += 1
        lines = tuple(log.waiting[:count])
        del log.waiting[:count]
        return lines, size

    def _refill_from_tail(self, log: _AttemptLog) -> None:
        # The kept end comes back from disk bunch by bunch, or 8 MiB of it would stand in memory at once.
        while log.tail_pieces is not None and log.waiting_bytes < self._limits.waiting_bytes:
            piece = next(log.tail_pieces, None)
            if piece is None:
                log.tail_pieces = None
            else:
                log.waiting.append(piece)
                log.waiting_bytes += len(piece.data) + LINE_COST_BYTES

    def _forget_if_drained(self, log: _AttemptLog) -> None:
        if log.is_drained:
            self._logs.pop(log.key, None)
            if log.tail is not None:
                log.tail.close()

    # ── too much ──

    def _drop(self, log: _AttemptLog, size: int) -> None:
        if log.dropped_bytes == 0:
            self._flush_partials(log)  # what comes after the gap must not be glued to it
        log.dropped_bytes += size

    def _tell_dropped(self, log: _AttemptLog) -> None:
        text = f"[{log.dropped_bytes} bytes of output are missing here: the log store was too slow]"
        log.dropped_bytes = 0
        self._append(log, LogPiece(SYSTEM, self._now_ms(), text.encode()))

    # ── lines that no newline ends ──

    def _watch_partials(self, log: _AttemptLog) -> None:
        if log.key in self._with_partials:
            return
        loop = asyncio.get_running_loop()
        log.partial_since = loop.time()
        self._with_partials[log.key] = log
        if self._partial_timer is None:
            self._partial_timer = loop.call_later(self._partial_after_s, self._flush_old_partials)

    def _flush_old_partials(self) -> None:
        self._partial_timer = None
        loop = asyncio.get_running_loop()
        for log in list(self._with_partials.values()):
            if loop.time() - log.partial_since + 0.001 < self._partial_after_s:
                # Dicts keep the order of arrival: all others are younger.
                self._partial_timer = loop.call_at(log.partial_since + self._partial_after_s, self._flush_old_partials)
                return
            self._flush_partials(log)

    def _flush_partials(self, log: _AttemptLog) -> None:
        self._with_partials.pop(log.key, None)
        now_ms = self._now_ms()
        for stream in (STDOUT, STDERR):
            rest = log.partials.pop(stream, b"")
            if rest:
                self._add_line(log, LogPiece(stream, now_ms, rest, cut=True))


def _missing_in_words(missing: int, limits: LogLimits) -> bytes:
    kept = limits.head_bytes + limits.tail_bytes
    return f"[{missing} bytes of output are missing here: an attempt keeps {kept} bytes of its output]".encode()
