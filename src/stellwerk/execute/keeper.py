"""The keeper: one small process per host that starts, times, kills and reaps everything the host runs.

It decides nothing about runs. It knows trees: what to spawn, until when, alive or not. It has one thread and never
blocks on its host, so that it can kill while the host is frozen, busy or dead. See `forest` for how trees end, and
`guard` for who cleans up when the keeper itself dies.
"""

from __future__ import annotations

import array
import errno
import gc
import os
import selectors
import signal
import socket
from fcntl import F_DUPFD_CLOEXEC, fcntl

from stellwerk.execute.boot_clock import boot_ms
from stellwerk.execute.forest import Forest
from stellwerk.execute.keeper_frames import (
    FDS_PER_START_MAX,
    Hello,
    Move,
    Order,
    Ping,
    Pong,
    Quit,
    Refused,
    Renew,
    Report,
    Start,
    Started,
    Stop,
    decode_order,
    encode_reports,
    take_frames,
)
from stellwerk.execute.linux_calls import become_subreaper, open_boot_timer, set_boot_timer
from stellwerk.execute.process_table import IS_LINUX, read_row
from stellwerk.execute.program_path import find_program
from stellwerk.execute.tag import Tag, put_back, start_digest, wear_tag, worn_limit
from stellwerk.execute.tree import Tree

RECEIVES_PER_TURN = 8  # starting is slow work: look at deaths and deadlines in between
RECEIVE_BYTES = 65_536
STARTED_WAITS_MS = 2  # most commands are over by then: STARTED and GONE in one frame wake the host once
RUN_ID_VARIABLE = b"STELLWERK_RUN_ID"


class Keeper:
    """The keeper's loop and its channel."""

    def __init__(self, channel: socket.socket, host_pid: int) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._forest = Forest()
        self._received = bytearray()
        self._fds: list[int] = []  # received, not yet claimed by their START
        self._unsent = bytearray()
        self._started: list[Report] = []  # waiting for company
        self._started_until_ms = 0
        self._host_is_gone = False
        self._quits = False
        self._child_died = True
        self._armed_ms: int | None = None
        self._worn_limit = worn_limit()
        # Whatever Python, the guard or the host's own parent ignores, a command shall find as usual.
        self._ignored = [one for one in signal.valid_signals() if signal.getsignal(one) == signal.SIG_IGN]
        self._pid = os.getpid()
        row = read_row(self._pid)
        self._digest = start_digest(row.start_ticks if row is not None else 0)
        self._is_subreaper = become_subreaper()
        self._watch(host_pid)

    def run(self) -> None:
        """Work until the host is gone and every tree with it."""
        self._say(Hello(self._pid, self._abilities()))
        self._send()
        while not self._is_over():
            for key, _ in self._selector.select(self._timeout_s()):
                key.data()
            now_ms = boot_ms()
            if self._child_died:
                self._child_died = False
                self._forest.reap(now_ms)
            self._forest.expire(now_ms)
            self._forest.work(now_ms)
            self._release_started(now_ms)
            self._send()
            self._arm_timer()

    def _is_over(self) -> bool:
        if self._host_is_gone:
            return self._forest.is_empty
        return self._quits and self._forest.is_empty and not self._unsent

    def _abilities(self) -> dict[str, str]:
        tag_works = wear_tag(Tag(self._pid, self._digest, 0))
        put_back(self._worn_limit)
        return {
            "subreaper": "yes" if self._is_subreaper else "no",
            "tag": "yes" if tag_works else "no",
            "children": self._forest.child_source,
        }

    # ── waiting ──

    def _watch(self, host_pid: int) -> None:
        self._channel.setblocking(False)
        self._selector.register(self._channel, selectors.EVENT_READ, self._channel_is_ready)
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wake_read = wake_read
        self._selector.register(wake_read, selectors.EVENT_READ, self._signal_came)
        if IS_LINUX:
            # A forked child of the host may hold its end of the channel open; the pidfd tells all the same.
            try:
                self._selector.register(os.pidfd_open(host_pid), selectors.EVENT_READ, self._host_died)
            except OSError:
                self._host_died()
        self._timer = open_boot_timer()
        if self._timer is not None:
            self._selector.register(self._timer, selectors.EVENT_READ, self._timer_rang)

    def _timeout_s(self) -> float | None:
        moments = [
            self._forest.next_look_ms(),
            self._started_until_ms if self._started else None,
            self._forest.next_deadline_ms() if self._timer is None else None,
        ]
        next_ms = min((moment for moment in moments if moment is not None), default=None)
        if next_ms is None:
            return None
        return max(0, next_ms - boot_ms()) / 1_000

    def _arm_timer(self) -> None:
        if self._timer is None:
            return
        deadline_ms = self._forest.next_deadline_ms()
        if deadline_ms is None:
            return
        # A renewal only moves deadlines back: let the timer ring early once instead of setting it each time.
        if self._armed_ms is None or deadline_ms < self._armed_ms:
            self._armed_ms = deadline_ms
            set_boot_timer(self._timer, deadline_ms)

    def _timer_rang(self) -> None:
        assert self._timer is not None
        self._armed_ms = None
        try:
            os.read(self._timer, 8)
        except BlockingIOError:
            pass  # set anew since it rang

    def _signal_came(self) -> None:
        self._child_died = True
        try:
            os.read(self._wake_read, 4_096)
        except BlockingIOError:
            pass

    def _host_died(self) -> None:
        self._host_is_gone = True
        self._forest.stop_all(boot_ms())
        for fd in list(self._selector.get_map()):
            key = self._selector.get_key(fd)
            if key.data in (self._host_died, self._channel_is_ready):
                self._selector.unregister(fd)

    # ── the channel ──

    def _channel_is_ready(self) -> None:
        for _ in range(RECEIVES_PER_TURN):
            if self._host_is_gone or not self._receive():
                return

    def _receive(self) -> bool:
        """Take in one message. The kernel never joins the descriptors of two, so only a few are ever held."""
        room = socket.CMSG_SPACE(FDS_PER_START_MAX * array.array("i").itemsize)
        try:
            data, notes, flags, _ = self._channel.recvmsg(RECEIVE_BYTES, room, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
        except BlockingIOError:
            return False
        except OSError:
            data, notes, flags = b"", [], 0
        if flags & socket.MSG_CTRUNC:
            # Descriptors were dropped silently and all later ones would shift: die, the guard cleans up.
            raise RuntimeError("the host sent more file descriptors than the keeper may hold")
        for level, kind, content in notes:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._keep_fds(content)
        if not data:
            self._host_died()
            return False
        self._received += data
        for frame in take_frames(self._received):
            self._obey(decode_order(frame))
        return True

    def _keep_fds(self, content: bytes) -> None:
        fds = array.array("i")
        fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        self._fds.extend(fds)
        if not IS_LINUX:  # there they arrived with close-on-exec set
            for fd in fds:
                os.set_inheritable(fd, False)

    def _obey(self, order: Order) -> None:
        match order:
            case Start():
                self._start(order)
            case Renew(deadline_boot_ms):
                self._forest.renew(deadline_boot_ms, boot_ms())
            case Move(handle, deadline_boot_ms):
                self._forest.move_deadline(handle, deadline_boot_ms, boot_ms())
            case Stop(handle, grace_ms):
                self._forest.stop(handle, grace_ms, boot_ms())
            case Ping():
                self._say(Pong())
            case Quit():
                self._quits = True
                self._forest.stop_all(boot_ms())

    def _say(self, report: Report) -> None:
        self._forest.reports.append(report)

    def _release_started(self, now_ms: int) -> None:
        reports = self._forest.reports
        if self._started and (reports or now_ms >= self._started_until_ms):
            reports[:0] = self._started  # a tree's STARTED never comes after its GONE
            self._started.clear()

    def _send(self) -> None:
        reports = self._forest.reports
        if self._host_is_gone:
            reports.clear()
            return
        if reports:
            self._unsent += encode_reports(reports)
            reports.clear()
        if not self._unsent:
            return
        try:
            sent = self._channel.send(self._unsent)
            del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._host_died()
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if self._selector.get_key(self._channel).events != events:
            self._selector.modify(self._channel, events, self._channel_is_ready)

    # ── starting ──

    def _start(self, order: Start) -> None:
        fds, self._fds = self._fds[: order.fd_count], self._fds[order.fd_count :]
        try:
            if len(fds) != order.fd_count:
                raise RuntimeError(f"START of {order.handle} came with {len(fds)} of {order.fd_count} descriptors")
            self._try_to_start(order, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _try_to_start(self, order: Start, fds: list[int]) -> None:
        if self._quits:
            self._say(Refused(order.handle, errno.ESHUTDOWN, "the host is shutting down"))
            return
        if self._forest.is_past(order.deadline_boot_ms, boot_ms()):
            self._say(Refused(order.handle, errno.ETIMEDOUT, "its lease had ended before it could be started"))
            return
        number = self._forest.free_number()
        try:
            root = self._spawn(order, number, fds)
        except OSError as error:
            self._say(Refused(order.handle, error.errno or errno.EINVAL, _in_words(error)))
            return
        except ValueError as error:  # a null byte in an argument, a = in a variable's name
            self._say(Refused(order.handle, errno.EINVAL, str(error)))
            return
        run_id = order.env.get(RUN_ID_VARIABLE)
        self._forest.plant(
            Tree(
                handle=order.handle,
                number=number,
                root=root,
                deadline_ms=order.deadline_boot_ms,
                run_id_entry=None if run_id is None else RUN_ID_VARIABLE + b"=" + run_id,
            )
        )
        if not self._started:
            self._started_until_ms = boot_ms() + STARTED_WAITS_MS
        self._started.append(Started(order.handle, root))

    def _spawn(self, order: Start, number: int, fds: list[int]) -> int:
        """Set on the keeper itself what the child shall inherit: it has one thread, so there is no race."""
        try:
            os.chdir(order.cwd)
        except OSError as error:
            raise OSError(
                error.errno, f"cannot enter the working directory {os.fsdecode(order.cwd)!r}: {error.strerror}"
            ) from None
        moved = _out_of_the_way(fds)
        try:
            program = find_program(order.argv[0] if order.argv else b"", order.env.get(b"PATH"))
            wear_tag(Tag(self._pid, self._digest, number))
            return os.posix_spawn(
                program,
                order.argv,
                order.env,
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(moved)],
                setsid=True,
                setsigmask=[],
                setsigdef=self._ignored,
            )
        finally:
            put_back(self._worn_limit)
            os.chdir("/")  # a folder that the keeper stands in could not be unmounted
            for fd in set(moved) - set(fds):
                os.close(fd)


def _out_of_the_way(fds: list[int]) -> list[int]:
    """No source may have the number of a target, or an earlier dup2 would overwrite it."""
    return [fd if fd >= len(fds) else fcntl(fd, F_DUPFD_CLOEXEC, len(fds)) for fd in fds]


def _in_words(error: OSError) -> str:
    what = error.filename if error.filename is not None else None
    name = os.fsdecode(what) if isinstance(what, bytes) else what
    return f"{error.strerror}: {name!r}" if name else str(error.strerror)


def keep(channel: socket.socket, host_pid: int) -> None:
    """Be the keeper of this host until it is gone."""
    os.umask(0o077)
    gc.freeze()  # what was imported stays; no collection need look at it again
    Keeper(channel, host_pid).run()
