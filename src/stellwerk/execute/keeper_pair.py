"""One guard and its keeper, seen from the host: starting them, the channel, and how their ends are noticed."""

from __future__ import annotations

import array
import asyncio
import errno
import os
import resource
import select
import signal
import socket
import sys
from collections import deque
from collections.abc import Sequence
from fcntl import F_DUPFD_CLOEXEC, fcntl
from functools import cache
from pathlib import Path
from typing import Protocol

import msgspec

from stellwerk.execute.guard import ALIVE_FD, CHANNEL_FD
from stellwerk.execute.keeper_frames import Order, Report, decode_reports, encode_order, take_frames

RECEIVE_BYTES = 262_144
TOO_MANY_IN_FLIGHT_PAUSE_S = 0.005  # the kernel says when it refuses, but not when it would take more
DYING_MAX_S = 5.0
FIRST_FREE_FD = 10  # above the numbers that the guard gets


class PairWatcher(Protocol):
    """Whom a pair tells what it hears."""

    def heard(self, pair: KeeperPair, reports: list[Report]) -> None: ...

    def keeper_lost(self, pair: KeeperPair) -> None:
        """The channel is at its end."""

    def guard_gone(self, pair: KeeperPair) -> None:
        """The guard has exited; `pair.guard_cleaned_up` says whether that proves anything."""


@cache
def first_open_files_soft() -> int:
    """The soft limit this process began with: it raises its own later, commands shall keep this one."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_open_files() -> None:
    """Two pipes per command: take all that the hard limit allows. Only after the keeper has started."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if wanted > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class KeeperPair:
    """Starts a guard and its keeper at once; orders may be sent from then on, the channel holds them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, watcher: PairWatcher) -> None:
        self._loop = loop
        self._watcher = watcher
        self._outgoing: deque[tuple[bytes, tuple[int, ...]]] = deque()  # with copies of the descriptors
        self._received = bytearray()
        self._keeper_pidfd: int | None = None
        self._keeper_pid: int | None = None
        self.is_keeper_lost = False
        self.is_guard_gone = False
        self.guard_cleaned_up = False
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._alive, their_alive = os.pipe()
        try:
            self._guard_pid = _spawn_guard(theirs.fileno(), their_alive)
        except BaseException:
            self._channel.close()
            os.close(self._alive)
            raise
        finally:
            theirs.close()
            os.close(their_alive)
        self._channel.setblocking(False)
        loop.add_reader(self._channel.fileno(), self._readable)
        loop.add_reader(self._alive, self._guard_ended)

    def keeper_is(self, pid: int) -> None:
        """Learned from HELLO; kept as a pidfd, so that a later kill meets the keeper or nobody."""
        self._keeper_pid = pid
        if hasattr(os, "pidfd_open"):
            try:
                self._keeper_pidfd = os.pidfd_open(pid)
            except OSError:
                pass  # dead already: the channel will say so

    def kill_keeper(self) -> None:
        """It does not answer: the guard shall clean up."""
        try:
            if self._keeper_pidfd is not None:
                signal.pidfd_send_signal(self._keeper_pidfd, signal.SIGKILL)
            elif self._keeper_pid is not None and not self.is_guard_gone:
                os.kill(self._keeper_pid, signal.SIGKILL)
        except OSError:
            pass

    def wait_for_keeper_death(self) -> None:
        """Its channel ends a moment before it is dead, and a sweep spares the trees of the living. For a thread."""
        if self._keeper_pidfd is not None:
            select.select([self._keeper_pidfd], [], [], DYING_MAX_S)

    def forget_keeper(self) -> None:
        """Everything about it has been reported."""
        if self._keeper_pidfd is not None:
            os.close(self._keeper_pidfd)
            self._keeper_pidfd = None

    def kill_guard(self) -> None:
        """For a pair that never came up."""
        if not self.is_guard_gone:
            os.kill(self._guard_pid, signal.SIGKILL)

    # ── sending ──

    def send(self, order: Order, fds: Sequence[int] = ()) -> None:
        """Send now if the channel takes it, else keep it (and copies of the descriptors) until it does."""
        if self.is_keeper_lost:
            return
        frame = encode_order(order)
        if self._outgoing:
            self._keep(frame, fds)
            return
        sent = self._try_to_send(frame, fds)
        if sent == 0:
            self._keep(frame, fds)
        elif sent < len(frame):
            self._keep(frame[sent:], ())

    def _keep(self, frame: bytes, fds: Sequence[int]) -> None:
        self._outgoing.append((frame, tuple(os.dup(fd) for fd in fds)))

    def _try_to_send(self, frame: bytes, fds: Sequence[int]) -> int:
        notes = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            return self._channel.sendmsg([frame], notes)
        except BlockingIOError:
            self._loop.add_writer(self._channel.fileno(), self._writable)
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                return len(frame)  # the keeper is gone; the reader learns that and reports everything as lost
            self._loop.call_later(TOO_MANY_IN_FLIGHT_PAUSE_S, self._writable)
        return 0

    def _writable(self) -> None:
        if self.is_keeper_lost:
            return
        self._loop.remove_writer(self._channel.fileno())
        while self._outgoing:
            frame, fds = self._outgoing[0]
            sent = self._try_to_send(frame, fds)
            if sent == 0:
                return
            _close_all(fds)
            self._outgoing.popleft()
            if sent < len(frame):
                self._outgoing.appendleft((frame[sent:], ()))

    # ── hearing ──

    def _readable(self) -> None:
        try:
            data = self._channel.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose_keeper()
            return
        self._received += data
        for frame in take_frames(self._received):
            self._watcher.heard(self, decode_reports(frame))

    def _lose_keeper(self) -> None:
        self.is_keeper_lost = True
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._channel.close()
        for _, fds in self._outgoing:
            _close_all(fds)
        self._outgoing.clear()
        self._watcher.keeper_lost(self)

    def _guard_ended(self) -> None:
        self._loop.remove_reader(self._alive)
        os.close(self._alive)
        try:
            # Its descriptors are closed, so it is past its last instruction: this does not wait.
            _, status = os.waitpid(self._guard_pid, 0)
            self.guard_cleaned_up = os.WIFEXITED(status)
        except ChildProcessError:
            pass  # someone in this process reaps everything: how it ended is unknown
        self.is_guard_gone = True
        self._watcher.guard_gone(self)


def _spawn_guard(channel: int, alive: int) -> int:
    # Not the host's environment: no secret of it shall stand in the guard's. And not its import path, but the two
    # places that are needed, which makes the start short (-S).
    places = {str(Path(__file__).parents[2]), str(Path(msgspec.__file__).parents[1])}
    channel, alive = fcntl(channel, F_DUPFD_CLOEXEC, FIRST_FREE_FD), fcntl(alive, F_DUPFD_CLOEXEC, FIRST_FREE_FD)
    actions: list[tuple[int, int, int] | tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        (os.POSIX_SPAWN_DUP2, channel, CHANNEL_FD),
        (os.POSIX_SPAWN_DUP2, alive, ALIVE_FD),
    ]
    if not _is_open(2):
        actions.append((os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0))
    argv = [sys.executable, "-S", "-P", "-m", "stellwerk.execute.guard", str(os.getpid()), str(first_open_files_soft())]
    try:
        return os.posix_spawn(
            sys.executable,
            argv,
            {"PYTHONPATH": os.pathsep.join(sorted(places))},
            file_actions=actions,
            setsid=True,
            setsigmask=[],
            setsigdef=sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}),
        )
    finally:
        os.close(channel)
        os.close(alive)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
