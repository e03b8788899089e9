"""Calls of Python functions in warm child processes: which call goes to which child, and how many children there are.

Short calls are queued, up to 16 a child. A call that runs for 20 ms makes its child *live*: its queue is taken back
and goes elsewhere, its output is read as it comes. Ending a call early means ending its child; a spare stands ready.
Nothing here makes a task, future or timer per call: one timer serves all.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from stellwerk.core.logs import STDERR, STDOUT
from stellwerk.core.run import Failed, Lost, Outcome, Returned
from stellwerk.execute.boot_clock import boot_ms
from stellwerk.execute.call_frames import EXPIRED, HELLO, ChildSettings, Reply
from stellwerk.execute.keeper_link import KeeperLink
from stellwerk.execute.protocol import Attempt, Ended, Output
from stellwerk.execute.warm_child import Call, Phase, WarmChild

WARM_MIN = 2  # one to take the next call, one to take its place
STARTING_MAX = 4  # an interpreter's start is 40 ms of a core; all at once would stall the machine
STARTING_S = 60.0  # a child that is not ready by then hangs, in an import from a lost file system perhaps
LIVE_AFTER_S = 0.020
HELD_IDLE_S = 0.2  # a child that is idle for so long is told to the keeper as idle
KEPT_IDLE_S = 10.0  # a child beyond the minimum is let go after so long
PAUSE_S = 5.0  # output that finds no room waits for at most so long, then it is read all the same
ASK_FOR_ROOM_S = 0.02
RESTART_DELAYS_S = (0.1, 0.5, 2.0, 10.0)  # after children that ended before they were ready
STARTS_UNTIL_REFUSED = 3  # so many in a row, and waiting calls fail instead of waiting for ever
FOLDER_PREFIX = "python-"
CLOSE_S = 15.0  # a tree that cannot die must not hold up the host's stop

STOPPED = Failed(reason="stopped", error="stopped on request")
CORES = os.cpu_count() or 1
CLOSING = Returned(reason="the host is stopping")
NOT_BEGUN = Returned(reason="put back before it began")


class PythonExecutor:
    """Executor for PythonCall with isolation `process`."""

    def __init__(
        self,
        link: KeeperLink,
        output: Output,
        wake: Callable[[], None],
        *,
        children: int,
        base_env: Mapping[str, str],
        default_cwd: str,
        import_paths: Sequence[str],
        temp_root: str,
        kill_grace_ms: int,
        allowed_packages: Sequence[str] | None,
    ) -> None:
        assert children >= 1
        self._link = link
        self._output = output
        self._wake = wake
        self._children_max = children
        self._base_env = base_env
        self._default_cwd = default_cwd
        self._import_paths = tuple(import_paths)
        self._allowed_packages = None if allowed_packages is None else tuple(allowed_packages)
        self._temp_root = temp_root
        self._kill_grace_ms = kill_grace_ms
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._children: list[WarmChild] = []
        self._calls: dict[tuple[str, int], Call] = {}
        self._pending: deque[Call] = deque()  # given to no child
        self._ended: list[Ended] = []
        self._stuck: dict[str, str] = {}
        self._serials = itertools.count(HELLO + 1)
        self._failed_starts = 0
        self._start_after = 0.0
        self._is_closing = False
        self._all_gone = asyncio.Event()
        self._removals: set[asyncio.Future[None]] = set()

    # --- Executor --------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start the first children now: the first run should find them warm."""
        self._loop = asyncio.get_running_loop()
        self._in_thread(_remove_abandoned, self._temp_root)
        self._balance()

    async def close(self) -> None:
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        for child in list(self._children):
            self._settle(child)
            if child.open:
                child.open[0].ending = CLOSING
            child.stop(self._kill_grace_ms if child.open else 0)
        self._return_pending()
        try:
            async with asyncio.timeout(CLOSE_S):
                while self._children:
                    self._all_gone.clear()
                    await self._all_gone.wait()
        except TimeoutError:
            # Their calls are not reported: their trees may live. Their leases will end, and the store decides.
            for child in list(self._children):
                child.open.clear()
                self._forget(child, "could not be ended in time")
        if self._removals:
            await asyncio.wait(self._removals)

    def start(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            call = Call(attempt, next(self._serials))
            self._calls[attempt.run_id, attempt.number] = call
            self._pending.append(call)
        if self._is_closing:
            self._return_pending()
        self._feed()

    def stop(self, run_id: str, number: int, grace_ms: int) -> None:
        call = self._calls.get((run_id, number))
        if call is not None:
            self._end_early(call, STOPPED, grace_ms)

    def narrow(self, width: int) -> bool:
        self._children_max = width
        return True

    def give_back(self) -> None:
        for child in list(self._children):
            if child.open:
                self._settle(child)
        self._return_pending()
        if self._ended:
            self._wake()

    def renew(self, deadline_boot_ms: int, given_up: Sequence[tuple[str, int]]) -> None:
        """Prolong the deadlines of all children that have calls; what was given up is killed at once.

        By a word for each child and not by the link's `renew`, which would reach the trees of others as well.
        """
        for run_id, number in given_up:
            self.stop(run_id, number, 0)
        for call in self._calls.values():
            if call.deadline_boot_ms < deadline_boot_ms and call.ending is None:
                call.deadline_boot_ms = deadline_boot_ms
        for child in self._children:
            if not child.is_stopping:
                child.renew()

    def take_ended(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        return ended

    def stuck(self) -> Mapping[str, str]:
        return self._stuck

    def reload(self) -> None:
        """New children for all further calls: the old ones have the old modules. Open calls go on to their ends."""
        for child in list(self._children):
            if child.phase is Phase.READY:
                self._settle(child)
                if child.open:
                    child.phase = Phase.LEAVING
                else:
                    child.dismiss()
        self._balance()

    # --- giving calls to children ----------------------------------------------------------------------

    def _feed(self) -> None:
        """Give waiting calls to children with room, evenly, those without a call first."""
        if not self._pending:
            return
        now, now_boot_ms = self._loop.time(), boot_ms()
        expired = []
        takers = self._takers(now_boot_ms)
        for position, child in enumerate(takers):
            if not self._pending:
                break
            if not child.open:
                child.head_since = now
            # Short calls fill one child before the next: each child that must wake up costs more than they do.
            share = child.room if child.has_short_calls else -(-len(self._pending) // (len(takers) - position))
            for _ in range(min(child.room, share, len(self._pending))):
                call = self._pending[0]
                if call.deadline_boot_ms <= now_boot_ms:
                    # Not given: the keeper would rightly kill the child.
                    expired.append(call)
                elif not child.give(call, now_boot_ms):
                    break
                self._pending.popleft()
        if expired:
            self._end_all(expired, EXPIRED)
        self._look_again_at(now + LIVE_AFTER_S)

    def _takers(self, now_boot_ms: int) -> list[WarmChild]:
        """Children that may be given calls: as many idle ones as the limit leaves, then those at work with room."""
        busy = sum(1 for child in self._children if child.open and not child.is_stopping)
        ready = [child for child in self._children if child.is_open_for_calls(now_boot_ms)]
        at_work = [child for child in ready if child.open]
        idle = [child for child in ready if not child.open][: max(0, self._children_max - busy)]
        short = [child for child in (*at_work, *idle) if child.has_short_calls]
        # Of those with short calls, more than there are cores would only take turns.
        return short[:CORES] if short else idle + at_work

    def _settle(self, child: WarmChild) -> None:
        """Make sure what the child is doing: afterwards at most one call is open there, and that one has begun.

        The queue first, the replies second: a child answers before it reads on, so when its queue is empty all
        its answers but the last are in the socket.
        """
        self._pending.extendleft(reversed(child.take_back()))
        replies, is_closed = child.receive()
        self._take(child, replies)
        while replies and not is_closed:
            replies, is_closed = child.receive()
            self._take(child, replies)

    # --- hearing from children -------------------------------------------------------------------------

    def _replies_came(self, child: WarmChild) -> None:
        replies, is_closed = child.receive()
        self._take(child, replies)
        if is_closed:
            self._loop.remove_reader(child.replies_fd)
            self._settle(child)
            child.give_up()
        self._feed()
        if not child.open:
            self._look_again_at(child.idle_since + HELD_IDLE_S)
        if self._ended:
            self._wake()

    def _take(self, child: WarmChild, replies: Iterable[Reply]) -> None:
        now = self._loop.time()
        output, ended = self._output, self._ended
        for reply in replies:
            if reply.serial == HELLO:
                self._became_ready(child)
                continue
            call = child.answered(reply, now)
            attempt = call.attempt
            if child.is_live:
                self._leave_live(child)
            if reply.stdout:
                output.write(attempt.run_id, attempt.number, STDOUT, reply.stdout)
            if reply.stderr:
                output.write(attempt.run_id, attempt.number, STDERR, reply.stderr)
            if reply.is_leaving:
                child.phase = Phase.LEAVING
            if type(reply.outcome) is Returned and call.deadline_boot_ms > boot_ms():
                # Its lease was prolonged after it had been written into the request.
                call.child = None
                self._pending.appendleft(call)
                continue
            output.close(attempt.run_id, attempt.number)
            del self._calls[attempt.run_id, attempt.number]
            ended.append(Ended(attempt.run_id, attempt.number, reply.outcome))
        if child.phase is Phase.LEAVING and not child.is_stopping:
            self._pending.extendleft(reversed(child.take_back()))
            if not child.open:
                child.dismiss()

    def _became_ready(self, child: WarmChild) -> None:
        self._failed_starts = 0
        child.was_ready = True
        if child.phase is Phase.STARTING:
            child.phase = Phase.READY
            child.idle_since = self._loop.time()
            self._balance()

    def child_ended(self, child: WarmChild, why: str) -> None:
        """The process and all below it are gone."""
        if child not in self._children:
            return
        if not child.was_ready and not child.is_stopping:
            self._start_failed(why)
        self._forget(child, why)
        if self._is_closing:
            self._return_pending()
        self._balance()
        self._feed()
        if self._ended:
            self._wake()
        if not self._children:
            self._all_gone.set()

    def _forget(self, child: WarmChild, why: str) -> None:
        child.phase = Phase.LEAVING
        self._settle(child)
        if child.is_live:
            self._leave_live(child)
        if child.open:
            self._lose(child.open.popleft(), child, why)
        assert not child.open, "only the first open call can have begun"
        if child.replies_fd >= 0:
            self._loop.remove_reader(child.replies_fd)
        child.release()
        self._children.remove(child)
        self._in_thread(_remove_folder, child.temp_folder)

    def _in_thread(self, remove: Callable[[str], None], path: str) -> None:
        # A function may have left a million files.
        removal = self._loop.run_in_executor(None, remove, path)
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    def _lose(self, call: Call, child: WarmChild, why: str) -> None:
        attempt = call.attempt
        for fd, stream in ((child.stdout_fd, STDOUT), (child.stderr_fd, STDERR)):
            # The tree is gone, so what is in the pipe is all there is.
            while data := child.read_output(fd):
                self._output.write(attempt.run_id, attempt.number, stream, data)
        self._stuck.pop(attempt.run_id, None)
        self._end_all([call], call.ending or Lost(f"the process of the call {why}"))

    def child_stuck(self, child: WarmChild, text: str) -> None:
        if child.open:
            self._stuck[child.open[0].attempt.run_id] = text

    def _end_all(self, calls: Iterable[Call], outcome: Outcome) -> None:
        for call in calls:
            attempt = call.attempt
            self._output.close(attempt.run_id, attempt.number)
            del self._calls[attempt.run_id, attempt.number]
            self._ended.append(Ended(attempt.run_id, attempt.number, outcome))
        if self._ended:
            self._wake()

    def _return_pending(self) -> None:
        calls = list(self._pending)
        self._pending.clear()
        self._end_all(calls, CLOSING if self._is_closing else NOT_BEGUN)

    # --- ending calls early ----------------------------------------------------------------------------

    def _end_early(self, call: Call, outcome: Outcome, grace_ms: int) -> None:
        """A waiting call simply ends; one that has begun ends with its child, unless its answer comes first."""
        child = call.child
        if child is not None:
            self._settle(child)
        if call.child is None:
            if call in self._pending:
                self._pending.remove(call)
                self._end_all([call], outcome)
        elif child is not None and child.open and child.open[0] is call:
            if call.ending is None:
                call.ending = outcome
            child.stop(grace_ms)
            self._balance()
        self._feed()
        if self._ended:
            self._wake()

    # --- live output -----------------------------------------------------------------------------------

    def _go_live(self, child: WarmChild) -> None:
        """A call that runs for long keeps nobody waiting, and is heard while it runs."""
        self._settle(child)
        if child.open:
            child.is_slow()
            child.is_live = True
            self._read_on(child)

    def _read_on(self, child: WarmChild) -> None:
        child.is_paused = False
        self._loop.add_reader(child.stdout_fd, self._output_came, child, child.stdout_fd, STDOUT)
        self._loop.add_reader(child.stderr_fd, self._output_came, child, child.stderr_fd, STDERR)

    def _output_came(self, child: WarmChild, fd: int, stream: int) -> None:
        # One read per event, so that a flood does not starve others.
        data = child.read_output(fd)
        if data == b"":
            self._loop.remove_reader(fd)
        elif data is not None:
            attempt = child.open[0].attempt
            if self._output.write(attempt.run_id, attempt.number, stream, data):
                child.refused_since = None
            else:
                self._pause(child)

    def _pause(self, child: WarmChild) -> None:
        """Stop reading, which slows the function down; but not for ever: after that the output drops what it must."""
        now = self._loop.time()
        if child.refused_since is None:
            child.refused_since = now
        if now - child.refused_since < PAUSE_S:
            child.is_paused = True
            self._stop_reading(child)
            self._look_again_at(now + ASK_FOR_ROOM_S)

    def _ask_for_room(self, child: WarmChild) -> float | None:
        """Read on if the output takes more, or the pause was long enough; else the moment to ask again."""
        now = self._loop.time()
        attempt = child.open[0].attempt
        if self._output.write(attempt.run_id, attempt.number, STDOUT, b""):
            child.refused_since = None
        if child.refused_since is None or now - child.refused_since >= PAUSE_S:
            self._read_on(child)
            return None
        return now + ASK_FOR_ROOM_S

    def _leave_live(self, child: WarmChild) -> None:
        child.is_live = child.is_paused = False
        child.refused_since = None
        self._stop_reading(child)

    def _stop_reading(self, child: WarmChild) -> None:
        self._loop.remove_reader(child.stdout_fd)
        self._loop.remove_reader(child.stderr_fd)

    # --- the one timer ---------------------------------------------------------------------------------

    def _look_again_at(self, moment: float) -> None:
        if self._is_closing or (self._timer is not None and self._timer_at <= moment):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = moment
        self._timer = self._loop.call_at(moment, self._look)

    def _look(self) -> None:
        """Find what has become late: slow calls, time limits, idle children."""
        self._timer = None
        for child in list(self._children):
            moment = self._look_at_busy(child) if child.open else self._look_at_idle(child)
            if moment is not None:
                self._look_again_at(moment)
        self._balance()
        self._feed()
        if self._ended:
            self._wake()

    def _look_at_busy(self, child: WarmChild) -> float | None:
        """See to a child with calls; the answer is when to look again, if not at another's reply."""
        now = self._loop.time()
        if child.is_stopping:
            return None
        if not child.is_live:
            if now - child.head_since < LIVE_AFTER_S:
                return child.head_since + LIVE_AFTER_S
            self._go_live(child)
        if not child.open:
            return now + HELD_IDLE_S
        ask_at = self._ask_for_room(child) if child.is_paused else None
        moments = [] if ask_at is None else [ask_at]
        timeout_ms = child.open[0].attempt.timeout_ms
        if timeout_ms is not None:
            late_at = child.head_since + timeout_ms / 1_000
            if now >= late_at:
                outcome = Failed(reason="timeout", error=f"not done within {timeout_ms} ms")
                self._end_early(child.open[0], outcome, self._kill_grace_ms)
            else:
                moments.append(late_at)
        return min(moments, default=None)

    def _look_at_idle(self, child: WarmChild) -> float | None:
        idle_s = self._loop.time() - child.idle_since
        if child.phase is Phase.STARTING:
            if idle_s < STARTING_S:
                return child.idle_since + STARTING_S
            child.give_up()
        if child.phase is not Phase.READY:
            return None
        if child.is_held:
            if idle_s < HELD_IDLE_S:
                return child.idle_since + HELD_IDLE_S
            child.hold_to_nothing()
        if self._alive() > self._wanted():
            if idle_s < KEPT_IDLE_S:
                return child.idle_since + KEPT_IDLE_S
            child.dismiss()
        return None

    # --- how many children -----------------------------------------------------------------------------

    def _wanted(self) -> int:
        """Every child with a long call needs another beside it; short calls need no more than the minimum."""
        held_up = sum(1 for child in self._children if child.is_live and child.phase is Phase.READY)
        if self._pending and not any(child.has_short_calls for child in self._children):
            held_up += len(self._pending)
        return min(self._children_max + 1, max(WARM_MIN, held_up + 1))

    def _balance(self) -> None:
        """Start children as they are needed; those too many go by themselves when idle."""
        if self._is_closing:
            return
        now = self._loop.time()
        if now < self._start_after:
            self._look_again_at(self._start_after)
            return
        starting = sum(1 for child in self._children if child.phase is Phase.STARTING)
        for _ in range(min(self._wanted() - self._alive(), STARTING_MAX - starting)):
            self._launch()

    def _alive(self) -> int:
        return sum(1 for child in self._children if child.phase is not Phase.LEAVING)

    def _launch(self) -> None:
        # Not by pid and a count alone: in a container the next host has the same pid, and finds what a crash left.
        folder = f"{self._temp_root}/{FOLDER_PREFIX}{os.getpid()}-{os.urandom(6).hex()}"
        child = WarmChild(self, self._link, folder)
        child.idle_since = self._loop.time()
        self._look_again_at(child.idle_since + STARTING_S)
        self._children.append(child)
        settings = ChildSettings(self._import_paths, self._allowed_packages, folder)
        try:
            child.launch(settings, self._base_env, self._default_cwd)
        except OSError as error:
            # No descriptors left, or no keeper just now: later perhaps.
            self._start_failed(f"could not be started: {error}")
            self._forget(child, "could not be started")
            return
        self._loop.add_reader(child.replies_fd, self._replies_came, child)

    def _start_failed(self, why: str) -> None:
        if self._loop.time() < self._start_after:
            return  # several that were started together failed together: that is one failure
        self._failed_starts += 1
        delay_s = RESTART_DELAYS_S[min(self._failed_starts, len(RESTART_DELAYS_S)) - 1]
        self._start_after = self._loop.time() + delay_s
        self._look_again_at(self._start_after)
        is_hopeless = self._failed_starts >= STARTS_UNTIL_REFUSED
        if is_hopeless and not any(child.phase is Phase.READY for child in self._children):
            error = f"no process for Python calls can be started; the last one {why}"
            self._end_all(list(self._pending), Failed(reason="start", error=error))
            self._pending.clear()


def _remove_abandoned(temp_root: str) -> None:
    """Remove the private folders of hosts that are gone: they had no time to do it themselves."""
    for folder in Path(temp_root).glob(f"{FOLDER_PREFIX}*-*"):
        pid = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)):
            _remove_folder(str(folder))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _remove_folder(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
