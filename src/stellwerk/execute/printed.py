"""Catching what a function prints in a thread that is one of many: by context variable, not by process.

`sys.stdout` and `sys.stderr` are replaced once by streams that look, at every write, whether the writer's context
belongs to a call; if not, they pass it on to where it went before.
"""

from __future__ import annotations

import contextvars
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from stellwerk.core.logs import STDERR, STDOUT

HELD_BYTES_MAX = 64 * 1024  # an unfinished line longer than this is handed on

Sink = Callable[[int, bytes], None]

_call: contextvars.ContextVar[_Prints | None] = contextvars.ContextVar("stellwerk_prints", default=None)


@contextmanager
def capture_prints(sink: Sink) -> Iterator[None]:
    """Within this context what is printed goes to the sink, whole lines at a time."""
    prints = _Prints(sink)
    token = _call.set(prints)
    try:
        yield
    finally:
        _call.reset(token)
        prints.flush()


def install_capture() -> None:
    """Put our streams in place, unless they are: whoever redirects the host's output may have replaced them."""
    if not isinstance(sys.stdout, _Splitter):
        sys.stdout = _Splitter(sys.stdout, STDOUT)
    if not isinstance(sys.stderr, _Splitter):
        sys.stderr = _Splitter(sys.stderr, STDERR)


def uninstall_capture() -> None:
    """Put back what stood there. Another executor still open puts ours in place again with its next start."""
    if isinstance(sys.stdout, _Splitter):
        sys.stdout = sys.stdout.original
    if isinstance(sys.stderr, _Splitter):
        sys.stderr = sys.stderr.original


class _Prints:
    """What one call has printed and not yet handed on, by stream."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held: dict[int, bytearray] = {}

    def write(self, stream: int, data: bytes) -> None:
        held = self._held.get(stream)
        if held is None:
            held = self._held[stream] = bytearray()
        held += data
        if data.endswith(b"\n") or len(held) > HELD_BYTES_MAX:
            self._hand_on(stream, held)

    def flush(self) -> None:
        for stream, held in self._held.items():
            if held:
                self._hand_on(stream, held)

    def _hand_on(self, stream: int, held: bytearray) -> None:
        data = bytes(held)
        held.clear()
        self._sink(stream, data)


class _Splitter(io.TextIOBase):
    """A text stream that is another for each call."""

    def __init__(self, original: TextIO, stream: int) -> None:
        self.original = original
        self._stream = stream

    def write(self, text: str) -> int:
        prints = _call.get()
        if prints is None:
            return self.original.write(text)
        prints.write(self._stream, text.encode("utf-8", "backslashreplace"))
        return len(text)

    def flush(self) -> None:
        prints = _call.get()
        if prints is not None:
            prints.flush()
        elif not self.original.closed:
            self.original.flush()

    @property
    def buffer(self) -> io.RawIOBase:
        """For those who write bytes to `sys.stdout.buffer`."""
        return _BytesSplitter(self.original, self._stream)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return _call.get() is None and self.original.isatty()

    def fileno(self) -> int:
        return self.original.fileno()

    def close(self) -> None:
        """Not ours to close: a call that closes its stdout must not close everybody's."""


class _BytesSplitter(io.RawIOBase):
    def __init__(self, original: TextIO, stream: int) -> None:
        self.original = original
        self._stream = stream

    def write(self, data: object) -> int:
        piece = bytes(memoryview(data))  # type: ignore[arg-type]
        prints = _call.get()
        if prints is None:
            return self.original.buffer.write(piece)
        prints.write(self._stream, piece)
        return len(piece)

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """As above."""
