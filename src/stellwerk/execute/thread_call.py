"""Calls of trusted Python functions in threads of the host: the cheapest way, with the weakest promises.

What a thread cannot give, and a process would: nothing can kill it. A time limit or a stop reports the attempt at
once and raises an exception in the thread, which arrives when the function next runs Python code (not in a sleep or
in C); the thread is free for other calls only when the function has really ended, and may work on until then, also
past its lease. Environment, folder and os-level output are the host's own; what is printed is caught, raw writes to
descriptors and prints of threads that the function itself starts are not.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue

from msgspec import Struct

from stellwerk.core.logs import STDOUT
from stellwerk.core.run import Failed, Outcome, PythonCall, Returned
from stellwerk.execute.call import Coroutines, Functions, perform, put_first_on_path
from stellwerk.execute.printed import capture_prints, install_capture, uninstall_capture
from stellwerk.execute.protocol import Attempt, Ended, Output
from stellwerk.sdk.inside import RunView

LONG_CALL_S = 0.05  # a call that runs so long may be computing, and then everybody else waits for the interpreter
WATCH_S = 0.25  # how often a long call is looked at
SHARED_INTERVAL_S = 0.00005  # beside a long call; else Python's own 5 ms: a forced switch is dear
CLOSE_S = 1.0  # threads that do not end by then are left behind; they are daemons
UNREAD_BYTES_MAX = 4 * 1024 * 1024  # printed and not yet taken by the loop; then printing waits
PAUSE_S = 5.0  # … but not for ever, here and when the output has no room
ASK_FOR_ROOM_S = 0.02

STOPPED = Failed(reason="stopped", error="stopped on request; the function may run on for a while")
CLOSING = Returned(reason="the host is stopping")
NOT_BEGUN = Returned(reason="put back before it began")


class CallAborted(BaseException):
    """Raised inside a function whose attempt is over: its time was up, or somebody stopped it."""


class Printed(Struct, frozen=True):
    """Bytes on their way from a thread to the loop."""

    run_id: str
    number: int
    stream: int
    data: bytes


class ThreadExecutor:
    """Executor for PythonCall with isolation `thread`."""

    def __init__(
        self,
        output: Output,
        wake: Callable[[], None],
        *,
        threads: int,
        import_paths: Sequence[str],
        allowed_packages: Sequence[str] | None,
    ) -> None:
        assert threads >= 1
        self._output = output
        self._wake = wake
        self._import_paths = tuple(import_paths)
        self._functions = Functions(allowed_packages)
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        # Ends and printed bytes in one order, so that an end never overtakes its own output.
        self._arrived: deque[Ended | Printed] = deque()
        self._is_woken = False
        self._unread_bytes = 0
        self._was_read = threading.Event()
        self._workers = [_Worker(self, number) for number in range(threads)]
        self._calls: dict[tuple[str, int], _Call] = {}
        self._timed: set[_Call] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._usual_interval_s = sys.getswitchinterval()
        self._shares = False
        self._is_closing = False
        self._loop: asyncio.AbstractEventLoop

    # --- Executor --------------------------------------------------------------------------------------

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        put_first_on_path(self._import_paths)
        for worker in self._workers:
            worker.start()

    async def close(self) -> None:
        self._is_closing = True
        for timer in (self._timer, self._watch):
            if timer is not None:
                timer.cancel()
        if self._shares:
            sys.setswitchinterval(self._usual_interval_s)
        for call in list(self._calls.values()):
            self._end_early(call, CLOSING)
        for _ in self._workers:
            self._queue.put(None)
        await self._loop.run_in_executor(None, self._join)
        uninstall_capture()

    def _join(self) -> None:
        until = time.monotonic() + CLOSE_S
        for worker in self._workers:
            worker.join(max(0.0, until - time.monotonic()))

    def start(self, attempts: Sequence[Attempt]) -> None:
        install_capture()
        for attempt in attempts:
            call = _Call(attempt)
            self._calls[attempt.run_id, attempt.number] = call
            if self._is_closing:
                self._end_early(call, CLOSING)
                continue
            if attempt.timeout_ms is not None:
                self._timed.add(call)
            self._queue.put(call)
        if self._timed and self._timer is None:
            self._look()
        if self._watch is None and self._calls:
            self._watch = self._loop.call_later(LONG_CALL_S, self._watch_long_calls)

    def _watch_long_calls(self) -> None:
        """Let the other threads of the host have their turn sooner while a function may be computing."""
        self._watch = None
        now = time.monotonic()
        is_long = any(call.began and now - call.began > LONG_CALL_S for call in self._calls.values())
        if is_long != self._shares:
            self._shares = is_long
            sys.setswitchinterval(SHARED_INTERVAL_S if is_long else self._usual_interval_s)
        if self._calls:
            self._watch = self._loop.call_later(WATCH_S if is_long else LONG_CALL_S, self._watch_long_calls)

    def stop(self, run_id: str, number: int, grace_ms: int) -> None:
        """Best effort, see above; a grace means nothing to a thread."""
        call = self._calls.get((run_id, number))
        if call is not None:
            self._end_early(call, STOPPED)

    def narrow(self, width: int) -> bool:
        """Whoever is in the queue is taken by any thread that is free."""
        return width >= len(self._workers)

    def give_back(self) -> None:
        taken: list[_Call] = []
        with contextlib.suppress(Empty):
            while (call := self._queue.get_nowait()) is not None:
                taken.append(call)
        for call in taken:
            self._end_early(call, NOT_BEGUN)

    def renew(self, deadline_boot_ms: int, given_up: Sequence[tuple[str, int]]) -> None:
        """No keeper watches over threads; what was given up is at least asked to stop."""
        for run_id, number in given_up:
            self.stop(run_id, number, 0)

    def take_ended(self) -> list[Ended]:
        # Before looking: what arrives from now on wakes again.
        self._is_woken = False
        ended: list[Ended] = []
        arrived, output = self._arrived, self._output
        while arrived:
            item = arrived.popleft()
            if type(item) is Ended:
                call = self._calls.pop((item.run_id, item.number), None)
                if call is not None:
                    self._timed.discard(call)
                    self._let_go(call)
                    output.close(item.run_id, item.number)
                    ended.append(item)
            elif type(item) is Printed:
                self._unread_bytes -= len(item.data)
                # After its end nothing more of an attempt is taken: its thread may not know yet.
                call = self._calls.get((item.run_id, item.number))
                if call is not None:
                    if not output.write(item.run_id, item.number, item.stream, item.data):
                        self._hold_up(call)
        if not self._was_read.is_set():
            self._was_read.set()
        return ended

    def stuck(self) -> Mapping[str, str]:
        return {}

    # --- an output without room ------------------------------------------------------------------------

    def _hold_up(self, call: _Call) -> None:
        """Let the function wait at its next print until there is room."""
        if call.room_again is None:
            call.room_again = threading.Event()
            self._loop.call_later(ASK_FOR_ROOM_S, self._ask_for_room, call)

    def _ask_for_room(self, call: _Call) -> None:
        if call.room_again is not None:
            attempt = call.attempt
            if self._output.write(attempt.run_id, attempt.number, STDOUT, b""):
                self._let_go(call)
            else:
                self._loop.call_later(ASK_FOR_ROOM_S, self._ask_for_room, call)

    def _let_go(self, call: _Call) -> None:
        room_again, call.room_again = call.room_again, None
        if room_again is not None:
            room_again.set()

    # --- from the threads ------------------------------------------------------------------------------

    def report(self, item: Ended | Printed) -> None:
        """Hand something to the loop, and wake it if nobody has."""
        self._arrived.append(item)
        if not self._is_woken:
            self._is_woken = True
            self._wake()

    def printed(self, call: _Call, stream: int, data: bytes) -> None:
        room_again = call.room_again
        if room_again is not None:
            room_again.wait(PAUSE_S)
        if self._unread_bytes > UNREAD_BYTES_MAX:
            self._was_read.clear()
            self._was_read.wait(PAUSE_S)
        # Not exact between threads, and need not be: it only slows a flood down.
        self._unread_bytes += len(data)
        self.report(Printed(call.attempt.run_id, call.attempt.number, stream, data))

    def next_call(self) -> _Call | None:
        return self._queue.get()

    def perform(self, call: _Call, coroutines: Coroutines) -> Outcome:
        attempt = call.attempt
        assert isinstance(attempt.action, PythonCall)
        run = RunView(attempt.run_id, attempt.number, attempt.scope, attempt.name, attempt.labels)
        with capture_prints(partial(self.printed, call)):
            return perform(self._functions, attempt.action.function, attempt.args, run, coroutines)

    # --- time limits and stops -------------------------------------------------------------------------

    def _end_early(self, call: _Call, outcome: Outcome) -> None:
        with call.lock:
            if call.is_reported:
                return
            call.is_reported = True
            worker = call.worker
            if worker is not None:
                worker.abort(call)
        self.report(Ended(call.attempt.run_id, call.attempt.number, outcome))

    def _look(self) -> None:
        """End what is over its time; look again when the next one can be."""
        self._timer = None
        now = time.monotonic()
        moments = []
        for call in list(self._timed):
            timeout_ms = call.attempt.timeout_ms
            assert timeout_ms is not None
            # Threads do not tell when they begin a call; one that has not begun has all its time before it.
            late_at = (call.began or now) + timeout_ms / 1_000
            if now >= late_at:
                self._timed.discard(call)
                self._end_early(call, Failed(reason="timeout", error=f"not done within {timeout_ms} ms"))
            else:
                moments.append(late_at)
        if moments:
            self._timer = self._loop.call_later(min(moments) - now, self._look)


class _Call:
    """One attempt on its way through queue and thread."""

    __slots__ = ("attempt", "began", "is_reported", "lock", "room_again", "worker")

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.lock = threading.Lock()  # between the thread that ends it and the loop that ends it early
        self.is_reported = False
        self.began = 0.0
        self.worker: _Worker | None = None  # while it runs
        self.room_again: threading.Event | None = None  # while its output is refused


class _Worker(threading.Thread):
    """One thread, one call at a time."""

    def __init__(self, executor: ThreadExecutor, number: int) -> None:
        super().__init__(name=f"stellwerk-call-{number}", daemon=True)
        self._executor = executor
        self._coroutines = Coroutines()
        self._is_aborted = False

    def run(self) -> None:
        while True:
            try:
                call = self._executor.next_call()
                if call is None:
                    break
                self._serve(call)
            except CallAborted:
                # It came just after its call had ended: the loop has reported that call, nothing is owed.
                pass
            self._forget_abort()
        self._coroutines.close()

    def abort(self, call: _Call) -> None:
        """Raise CallAborted in this thread; the caller holds the call's lock, so it is still this call's."""
        self._is_aborted = True
        assert self.ident is not None
        _raise_in(self.ident, CallAborted)
        self._coroutines.interrupt()

    def _serve(self, call: _Call) -> None:
        with call.lock:
            if call.is_reported:
                return  # ended while it waited
            call.began = time.monotonic()
            call.worker = self
        try:
            outcome = self._executor.perform(call, self._coroutines)
        finally:
            with call.lock:
                call.worker = None
                is_ours = not call.is_reported
                call.is_reported = True
        if is_ours:
            self._executor.report(Ended(call.attempt.run_id, call.attempt.number, outcome))

    def _forget_abort(self) -> None:
        """Take back an exception that has not arrived, or it would swallow the next call on its way in.

        `worker` is None by now, so no new one can be set.
        """
        while self._is_aborted:
            try:
                self._is_aborted = False
                _raise_in(threading.get_ident(), None)
            except CallAborted:
                pass


def _raise_in(thread_ident: int, kind: type[BaseException] | None) -> None:
    target = ctypes.py_object(kind) if kind is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_ident), target)
