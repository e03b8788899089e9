"""The two pipes of one attempt: their write ends for the command, their read ends for the host.

The host reads itself, on readiness, one read per event, so that a flood cannot starve the others. When the log store
is slow the reading pauses, which slows the command down; but not for ever.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from stellwerk.core.logs import STDERR, STDOUT
from stellwerk.execute.protocol import Output

READ_BYTES = 65_536  # what a pipe holds; larger reads find no more
READ_LATE_S = 0.005
ROOM_LOOK_S = 0.01
PAUSE_MAX_S = 5.0


class AttemptPipes:
    """Made before the start; `write_ends` are closed by `given` once the keeper has them."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        output: Output,
        *,
        run_id: str,
        number: int,
        ended: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._output = output
        self._run_id = run_id
        self._number = number
        self._ended = ended
        stdout_read, stdout_write = os.pipe()
        try:
            stderr_read, stderr_write = os.pipe()
        except OSError:
            os.close(stdout_read)
            os.close(stdout_write)
            raise
        os.set_blocking(stdout_read, False)
        os.set_blocking(stderr_read, False)
        self._read_ends = {stdout_read: STDOUT, stderr_read: STDERR}
        self.write_ends: tuple[int, ...] = (stdout_write, stderr_write)
        self._is_registered = False
        self._paused_since: float | None = None
        self._room_timer: asyncio.TimerHandle | None = None

    @property
    def is_at_end(self) -> bool:
        return not self._read_ends

    def given(self) -> None:
        """The keeper has the write ends: ours would keep the pipes from ever ending."""
        for fd in self.write_ends:
            os.close(fd)
        self.write_ends = ()

    def begin_reading(self) -> None:
        """Read whatever comes from now on."""
        if self._is_registered or self._room_timer is not None:
            return
        self._is_registered = True
        for fd, stream in self._read_ends.items():
            self._loop.add_reader(fd, self._readable, fd, stream)

    def read_rest(self) -> bool:
        """The tree is gone: take what the pipes still hold. False if somebody else keeps one open."""
        for fd, stream in list(self._read_ends.items()):
            while self._read_once(fd, stream):
                pass
        return self.is_at_end

    def close(self) -> None:
        """Close what is still open, whatever may be in it."""
        self.given()
        if self._room_timer is not None:
            self._room_timer.cancel()
        for fd in list(self._read_ends):
            self._close_read_end(fd)

    def _readable(self, fd: int, stream: int) -> None:
        self._read_once(fd, stream)
        if self.is_at_end:
            self._ended()

    def _read_once(self, fd: int, stream: int) -> bool:
        """Read once; False when there is nothing to read for now, or ever."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close_read_end(fd)
            return False
        has_room = self._output.write(self._run_id, self._number, stream, data)
        if has_room:
            self._paused_since = None
        elif self._is_registered:
            self._pause()
        return True

    def _close_read_end(self, fd: int) -> None:
        if self._is_registered:
            self._loop.remove_reader(fd)
        del self._read_ends[fd]
        os.close(fd)

    # ── back-pressure ──

    def _pause(self) -> None:
        now = self._loop.time()
        if self._paused_since is None:
            self._paused_since = now
        if now - self._paused_since >= PAUSE_MAX_S:
            return  # read on, or a dead log store would hold the command for ever; the buffer counts what it drops
        self._is_registered = False
        for fd in self._read_ends:
            self._loop.remove_reader(fd)
        self._room_timer = self._loop.call_later(ROOM_LOOK_S, self._look_for_room)

    def _look_for_room(self) -> None:
        self._room_timer = None
        assert self._paused_since is not None
        has_room = self._output.write(self._run_id, self._number, STDOUT, b"")
        if has_room or self._loop.time() - self._paused_since >= PAUSE_MAX_S:
            self.begin_reading()
        else:
            self._room_timer = self._loop.call_later(ROOM_LOOK_S, self._look_for_room)


class LateReading:
    """Most commands are over in a few milliseconds and are read once, at their end: registering a reader for them
    costs more than it brings. One timer serves all that were started since it was set."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._fresh: list[AttemptPipes] = []

    def add(self, pipes: AttemptPipes) -> None:
        """Begin to read these soon, if they are still there."""
        if not self._fresh:
            self._loop.call_later(READ_LATE_S, self._begin)
        self._fresh.append(pipes)

    def _begin(self) -> None:
        fresh, self._fresh = self._fresh, []
        for pipes in fresh:
            if not pipes.is_at_end:
                pipes.begin_reading()
