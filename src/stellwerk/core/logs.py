"""Log lines: what an attempt wrote, kept as bytes, numbered by the store over all attempts of a run."""

from __future__ import annotations

from msgspec import Struct

STDOUT, STDERR, SYSTEM = 1, 2, 3  # streams of a log line, as stored
STREAM_NAMES = {STDOUT: "stdout", STDERR: "stderr", SYSTEM: "system"}

LINE_BYTES_MAX = 64 * 1024  # a longer line is cut here, and the rest is the next line
ATTEMPT_BYTES_MAX = 64 * 1024 * 1024
ATTEMPT_HEAD_BYTES = 56 * 1024 * 1024  # as it comes; of the rest the last 8 MiB are kept, after a marker


class LogPiece(Struct, frozen=True, array_like=True):
    """One line of output, bytes as they came, without the newline; `cut` if no newline followed (yet)."""

    stream: int
    at_ms: int
    data: bytes
    cut: bool = False


class LogChunk(Struct, frozen=True):
    """Lines of one attempt in arrival order. `sequence` counts from 1 in the attempt: each is taken once."""

    run_id: str
    attempt: int
    sequence: int
    lines: tuple[LogPiece, ...]


class LogLine(Struct, frozen=True):
    """A line as it is read back; `line` counts from 1 over all attempts of the run."""

    line: int
    attempt: int
    piece: LogPiece


class Appended(Struct, frozen=True):
    """The chunk is in the store (or was already); `last_line` is the number of its last line."""

    last_line: int


class Fenced(Struct, frozen=True):
    """The attempt is over or the run is gone: the chunk was refused."""


class LogQuery(Struct, frozen=True):
    """Lines of a run after a line number, of some streams only if given."""

    run_id: str
    after_line: int = 0
    limit: int = 1_000
    streams: frozenset[int] = frozenset()


class LogPage(Struct, frozen=True):
    """`examined` is the last line looked at (filters may hide it); `last_line` the last there is."""

    lines: tuple[LogLine, ...]
    examined: int
    last_line: int
