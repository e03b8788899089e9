"""What runs inside a warm child process: one call at a time, each answered before the next is read.

So output, left-over processes and a kill always belong to one run. Imports little: a child is started whenever
one was killed, and somebody may be waiting for it.
"""

from __future__ import annotations

import array
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence

import msgspec

from stellwerk.core.run import Failed, Outcome, Returned, Succeeded
from stellwerk.execute.boot_clock import boot_ms
from stellwerk.execute.call import (
    NOTHING_RETURNED,
    Coroutines,
    Functions,
    error_text,
    perform,
    put_first_on_path,
)
from stellwerk.execute.call_frames import (
    EXPIRED,
    FRAME_BYTES_MAX,
    HELLO,
    IN_MEMFD,
    REPLY_FD,
    REQUEST_FD,
    STDERR_READ_FD,
    STDOUT_READ_FD,
    ChildSettings,
    Reply,
    Request,
    decode_request,
    reply_frame,
)
from stellwerk.execute.child_surroundings import Surroundings
from stellwerk.execute.leftovers import end_leftovers
from stellwerk.execute.linux_calls import become_subreaper
from stellwerk.sdk.inside import RunView

CALLS_MAX = 10_000  # then the child is replaced: what leaks slowly in functions never adds up
GROWTH_BYTES_MAX = 256 * 1024 * 1024  # above the memory it started with; then the same
ROOM_FOR_ONE_FD = socket.CMSG_SPACE(array.array("i").itemsize)


class Terminated(BaseException):
    """This process was asked to end."""


class WarmChild:
    """The loop of a child: read a request, call, clean up, answer."""

    def __init__(self, settings: ChildSettings) -> None:
        self._requests = socket.socket(fileno=REQUEST_FD)
        self._replies = socket.socket(fileno=REPLY_FD)
        self._functions = Functions(settings.allowed_packages)
        self._coroutines = Coroutines()
        self._surroundings = Surroundings(settings.temp_folder)
        self._calls = 0
        self._pid = os.getpid()
        self._is_terminated = False
        signal.signal(signal.SIGTERM, self._terminate)
        self._memory = _Memory()

    def serve(self) -> None:
        """Until the host closes its end, or this child has served its time."""
        self._send(HELLO, NOTHING_RETURNED, took_us=0, is_leaving=False)
        is_leaving = False
        while not is_leaving:
            request = self._next_request()
            if request is None:
                break
            began = time.perf_counter_ns()
            outcome, has_new_threads = self._execute(request)
            if self._is_terminated:
                break
            self._calls += 1
            is_leaving = has_new_threads or self._calls >= CALLS_MAX or self._memory.has_grown()
            took_us = (time.perf_counter_ns() - began) // 1_000
            self._send(request.serial, outcome, took_us=took_us, is_leaving=is_leaving)
        self._surroundings.remove()
        if self._is_terminated:
            # No answer: the host knows why it asked, and takes what was written out of the pipes itself.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    def _terminate(self, _signal: int, _frame: object) -> None:
        """Unwind the call, so that its `finally` blocks run within the grace that it is given."""
        self._is_terminated = True
        raise Terminated

    def _next_request(self) -> Request | None:
        # Blocks for ever: if the host dies, its end of the socket is closed (and the keeper kills us anyway).
        frame, ancillary, _flags, _address = self._requests.recvmsg(
            FRAME_BYTES_MAX, ROOM_FOR_ONE_FD, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        )
        if not frame:
            return None
        if frame[:1] == IN_MEMFD:
            frame = _read_memfd(ancillary)
        return decode_request(frame)

    def _execute(self, request: Request) -> tuple[Outcome, bool]:
        """Make the call, then end whatever it left; True if it left threads, which nobody can end."""
        if boot_ms() >= request.deadline_boot_ms:
            return EXPIRED, False
        run = RunView(request.run_id, request.number, request.scope, request.name, request.labels)
        threads = threading.active_count()
        outcome: Outcome
        try:
            self._surroundings.prepare(request)
            # Threads that an import starts serve all calls; only those of the call itself are left over.
            self._functions.find(request.function)
            threads = threading.active_count()
        except BaseException as error:
            outcome = Failed(reason="error", error=error_text(error))
        else:
            outcome = perform(self._functions, request.function, request.args, run, self._coroutines)
        if os.getpid() != self._pid:
            os._exit(0)  # a fork made by the function came back out of it; the original goes on
        end_leftovers()  # first: they may still write, into the output and into the private folder
        self._surroundings.restore()
        return outcome, threading.active_count() > threads

    def _send(self, serial: int, outcome: Outcome, *, took_us: int, is_leaving: bool) -> None:
        assert isinstance(outcome, Succeeded | Failed | Returned), "a child never calls itself lost"
        stdout, stderr = self._surroundings.take_output()
        self._replies.sendall(reply_frame(Reply(serial, outcome, stdout, stderr, took_us, is_leaving)))


def _read_memfd(ancillary: Sequence[tuple[int, int, bytes]]) -> bytes:
    fds = array.array("i")
    for _level, _kind, data in ancillary:
        fds.frombytes(data)
    with os.fdopen(fds[0], "rb") as file:
        file.seek(0)
        return file.read()


class _Memory:
    """How much this process has grown since it started; always "not" where /proc does not tell."""

    def __init__(self) -> None:
        try:
            self._statm: int | None = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._statm = None
        self._pages_max = self._pages() + GROWTH_BYTES_MAX // os.sysconf("SC_PAGE_SIZE")

    def has_grown(self) -> bool:
        return self._pages() > self._pages_max

    def _pages(self) -> int:
        return 0 if self._statm is None else int(os.pread(self._statm, 64, 0).split(None, 2)[1])


def main() -> None:
    """Started by `python_call`, with the settings as JSON in the last argument."""
    settings = msgspec.json.decode(sys.argv.pop(), type=ChildSettings)
    for fd in (REQUEST_FD, REPLY_FD, STDOUT_READ_FD, STDERR_READ_FD):
        os.set_inheritable(fd, False)  # a subprocess of the user's must not hold our sockets
    become_subreaper()
    put_first_on_path(settings.import_paths)
    try:
        WarmChild(settings).serve()
    except Exception:
        traceback.print_exc()  # a bug of ours; the host keeps it with the call that is lost
    finally:
        # Not the ordinary way out: it would wait for threads that a function left, perhaps for ever.
        os._exit(0)


if __name__ == "__main__":
    main()
