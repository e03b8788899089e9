"""The host's side of one warm child: its sockets and pipes, and the calls it was given.

The host keeps a copy of the child's end of the request socket. To take calls back it reads that queue itself: the
kernel gives each frame to exactly one reader, so what comes back was never begun, and of what does not come back and
is not answered at most one has begun.
"""

from __future__ import annotations

import array
import enum
import os
import socket
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from stellwerk.core.run import Outcome, PythonCall
from stellwerk.execute.call_frames import (
    FRAME_BYTES_MAX,
    IN_MEMFD,
    PIPE_BYTES,
    SERIAL_BYTES,
    ChildSettings,
    Reply,
    Request,
    encode_frame,
    serial_of,
    split_replies,
)
from stellwerk.execute.keeper_link import KeeperLink, Spawn
from stellwerk.execute.nameless_file import nameless_file
from stellwerk.execute.process_table import IS_LINUX
from stellwerk.execute.protocol import Attempt

NO_DEADLINE_BOOT_MS = 2**53  # of a child without a call: nothing runs that a lease could lose
RECEIVE_BYTES = 256 * 1024
QUEUED_MAX = 64  # all of them wait behind a slow neighbour for at most 20 ms, then they are taken back
SHORT_US = 1_000  # a call up to here is short
SHORTS_UNTIL_TRUSTED = 8  # so many short calls in a row until a child is given more than one at a time

# Not `-m`: that would need PYTHONPATH where Stellwerk is not installed, and PYTHONPATH would reach the user's own
# subprocesses. `-P` keeps the current folder off the path.
BOOTSTRAP = "import sys; sys.path.append(sys.argv.pop(1)); from stellwerk.execute.child import main; main()"
PACKAGE_ROOT = str(Path(__file__).parent.parent.parent)


class Phase(enum.Enum):
    """Where a child is in its life."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"  # gets no further call; its end is awaited


class Call:
    """One attempt on its way. Mutable and slotted: it is made and changed for every single call."""

    __slots__ = ("attempt", "child", "deadline_boot_ms", "ending", "serial")

    def __init__(self, attempt: Attempt, serial: int) -> None:
        self.attempt = attempt
        self.serial = serial
        self.deadline_boot_ms = attempt.lease_deadline_boot_ms
        self.child: WarmChild | None = None
        self.ending: Outcome | None = None  # how it ends if its child goes down: somebody has asked for that


class Owner(Protocol):
    """Who is told what the keeper says about a child."""

    def child_ended(self, child: WarmChild, why: str) -> None: ...

    def child_stuck(self, child: WarmChild, text: str) -> None: ...


class WarmChild:
    """One child process. What to do with it is decided by its owner."""

    def __init__(self, owner: Owner, link: KeeperLink, temp_folder: str) -> None:
        self.phase = Phase.STARTING
        self.open: deque[Call] = deque()  # given and not answered, oldest first; only the first can have begun
        self.head_since = 0.0  # loop time at which the first of them can have begun
        self.idle_since = 0.0
        self.is_live = False  # its output is read while its one call runs
        self.is_stopping = False
        self.was_ready = False
        self.is_paused = False  # live, but its output is not read: there is no room for it
        self.refused_since: float | None = None  # loop time since which the output has taken nothing
        self.temp_folder = temp_folder
        self.stdout_fd = self.stderr_fd = self.replies_fd = -1
        self._owner = owner
        self._link = link
        self._handle = -1
        self._deadline_boot_ms = NO_DEADLINE_BOOT_MS
        self._shorts = 0
        self._received = bytearray()
        self._requests: socket.socket | None = None
        self._requests_read: socket.socket | None = None
        self._replies: socket.socket | None = None

    # --- its process -----------------------------------------------------------------------------------

    def launch(self, settings: ChildSettings, env: Mapping[str, str], cwd: str) -> None:
        """Ask the keeper for the process; `child_ended` follows in any case."""
        self._requests, self._requests_read = _request_sockets()
        self._replies, replies_child = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._requests.setblocking(False)
        self._replies.setblocking(False)
        self.replies_fd = self._replies.fileno()
        self.stdout_fd, stdout_child = os.pipe()
        self.stderr_fd, stderr_child = os.pipe()
        # The child reads these pipes too, and must not wait on an empty one. The flag belongs to both copies.
        os.set_blocking(self.stdout_fd, False)
        os.set_blocking(self.stderr_fd, False)
        stdin_child = os.open(os.devnull, os.O_RDONLY)
        lent = (stdin_child, stdout_child, stderr_child, replies_child.fileno())
        try:
            self._handle = self._link.start(
                Spawn(
                    argv=(
                        sys.executable,
                        "-P",
                        "-c",
                        BOOTSTRAP,
                        PACKAGE_ROOT,
                        msgspec.json.encode(settings).decode(),
                    ),
                    env=env,
                    cwd=cwd,
                    fds=(
                        stdin_child,
                        stdout_child,
                        stderr_child,
                        self._requests_read.fileno(),
                        replies_child.fileno(),
                        self.stdout_fd,
                        self.stderr_fd,
                    ),
                    deadline_boot_ms=NO_DEADLINE_BOOT_MS,
                ),
                self,
            )
        finally:
            replies_child.detach()
            for fd in lent:
                os.close(fd)

    def started(self, pid: int) -> None:
        """The process exists; it is ready only when it says so itself."""

    def failed(self, errno: int, text: str) -> None:
        self._owner.child_ended(self, f"could not be started: {text} (errno {errno})")

    def ended(self, wait_status: int, why: str, cpu_ms: int) -> None:
        self._owner.child_ended(self, _end_in_words(wait_status, why))

    def stuck(self, text: str) -> None:
        self._owner.child_stuck(self, text)

    def stop(self, grace_ms: int) -> None:
        """End the process and all below it; a second stop may shorten the grace."""
        self.phase = Phase.LEAVING
        self.is_stopping = True
        self._link.stop(self._handle, grace_ms)

    def give_up(self) -> None:
        """It does not speak any more: usually that is its end, of which the keeper will tell; else it is made so."""
        self.phase = Phase.LEAVING
        self._link.stop(self._handle, 0)

    def dismiss(self) -> None:
        """Let a child without calls go by itself: it finds its queue closed."""
        assert not self.open
        self.phase = Phase.LEAVING
        if self._requests is not None:
            self._requests.close()
            self._requests = None

    def release(self) -> None:
        """Give back all descriptors, once the process is gone."""
        for end in (self._requests, self._requests_read, self._replies):
            if end is not None:
                end.close()
        self._requests = self._requests_read = self._replies = None
        for fd in (self.stdout_fd, self.stderr_fd):
            if fd >= 0:
                os.close(fd)
        self.stdout_fd = self.stderr_fd = self.replies_fd = -1

    # --- its calls -------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """How many more calls it may be given: several only while its calls prove short."""
        return (QUEUED_MAX if self._shorts >= SHORTS_UNTIL_TRUSTED else 1) - len(self.open)

    def is_open_for_calls(self, now_boot_ms: int) -> bool:
        """Not if the keeper is about to end it: a deadline that has passed is not taken back."""
        return self.phase is Phase.READY and self.room > 0 and self._deadline_boot_ms > now_boot_ms

    @property
    def has_short_calls(self) -> bool:
        return self._shorts >= SHORTS_UNTIL_TRUSTED

    def give(self, call: Call, now_boot_ms: int) -> bool:
        """Queue a call; False if the socket is full for now."""
        # The keeper first: a host frozen between the two must not leave a call without a deadline.
        self._hold_to(call.deadline_boot_ms, now_boot_ms)
        assert self._requests is not None
        frame = _request_frame(call)
        try:
            if len(frame) <= FRAME_BYTES_MAX:
                self._requests.send(frame)
            else:
                _send_in_memfd(self._requests, call.serial, frame)
        except BlockingIOError:
            return False
        call.child = self
        self.open.append(call)
        return True

    def take_back(self) -> list[Call]:
        """Read the child's queue in its place: the calls it has not begun, oldest first."""
        if self._requests_read is None:
            return []
        taken: set[int] = set()
        while True:
            try:
                frame, ancillary, _flags, _address = self._requests_read.recvmsg(
                    FRAME_BYTES_MAX, socket.CMSG_SPACE(4), socket.MSG_DONTWAIT | getattr(socket, "MSG_CMSG_CLOEXEC", 0)
                )
            except BlockingIOError:
                break
            if not frame:
                break  # our own end is closed
            for _level, _kind, data in ancillary:
                for fd in array.array("i", data):
                    os.close(fd)
            taken.add(serial_of(frame))
        # The child reads on meanwhile, so what we got need not be the end of the queue: each frame says whose it is.
        back = [call for call in self.open if call.serial in taken]
        self.open = deque(call for call in self.open if call.serial not in taken)
        for call in back:
            call.child = None
        return back

    def receive(self) -> tuple[list[Reply], bool]:
        """One read of the replies: those complete by now, and whether the child has closed its end."""
        if self._replies is None:
            return [], False
        try:
            piece = self._replies.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return [], False
        except ConnectionError:
            piece = b""
        self._received += piece
        try:
            return split_replies(self._received), not piece
        except msgspec.DecodeError:
            return [], True  # a function wrote into our socket: this child can tell us nothing any more

    def answered(self, reply: Reply, now: float) -> Call:
        """The call that this reply ends."""
        call = self.open.popleft()
        assert call.serial == reply.serial, "a child answers in the order of its requests"
        self._shorts = self._shorts + 1 if reply.took_us <= SHORT_US else 0
        self.head_since = self.idle_since = now
        return call

    def is_slow(self) -> None:
        """Its call runs for long: from now on one at a time."""
        self._shorts = 0

    def read_output(self, fd: int) -> bytes | None:
        """One read of a pipe: None if it is empty for now, b"" at its end."""
        try:
            return os.read(fd, PIPE_BYTES)
        except BlockingIOError:
            return None

    # --- its deadline ----------------------------------------------------------------------------------

    def _hold_to(self, deadline_boot_ms: int, now_boot_ms: int) -> None:
        """See that the keeper ends the child when this lease is over, without a word to it for every call.

        Lowered always; raised only when the keeper's deadline has lost a quarter of what the lease has left.
        Until then it is early, which is safe, and far enough for the next renewal to come first.
        """
        held = self._deadline_boot_ms
        if deadline_boot_ms < held or deadline_boot_ms - held > (deadline_boot_ms - now_boot_ms) >> 2:
            if self.open:
                # Those given before are nearer their ends; theirs is the one that counts.
                deadline_boot_ms = min(deadline_boot_ms, *(call.deadline_boot_ms for call in self.open))
            self._set_deadline(deadline_boot_ms)

    def renew(self) -> None:
        """The leases of its calls were prolonged."""
        if self.open:
            self._set_deadline(min(call.deadline_boot_ms for call in self.open))

    def hold_to_nothing(self) -> None:
        """It has been idle for a while: it must not die by a lease of calls long ended."""
        self._set_deadline(NO_DEADLINE_BOOT_MS)

    @property
    def is_held(self) -> bool:
        return self._deadline_boot_ms != NO_DEADLINE_BOOT_MS

    def _set_deadline(self, deadline_boot_ms: int) -> None:
        if deadline_boot_ms != self._deadline_boot_ms:
            self._deadline_boot_ms = deadline_boot_ms
            self._link.set_deadline(self._handle, deadline_boot_ms)


def _request_sockets() -> tuple[socket.socket, socket.socket]:
    """A pair that keeps frames apart and lets each be read by exactly one reader."""
    if IS_LINUX:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for end in pair:
        # Elsewhere the usual limit of a frame is 2 KiB.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * FRAME_BYTES_MAX)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * FRAME_BYTES_MAX)
    return pair


def _request_frame(call: Call) -> bytes:
    attempt = call.attempt
    action = attempt.action
    assert isinstance(action, PythonCall)
    return encode_frame(
        Request(
            call.serial,
            action.function,
            attempt.run_id,
            attempt.number,
            attempt.scope,
            attempt.name,
            attempt.args,
            attempt.env,
            attempt.labels,
            attempt.cwd,
            call.deadline_boot_ms,
        )
    )


def _send_in_memfd(requests: socket.socket, serial: int, frame: bytes) -> None:
    fd = nameless_file(frame)
    try:
        socket.send_fds(requests, [IN_MEMFD + serial.to_bytes(SERIAL_BYTES, "big")], [fd])
    finally:
        os.close(fd)


def _end_in_words(wait_status: int, why: str) -> str:
    if why == "deadline":
        return "was killed: the lease ended before the call did"
    if why == "keeper lost":
        return "was killed: the keeper of this host was lost"
    code = os.waitstatus_to_exitcode(wait_status)
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
