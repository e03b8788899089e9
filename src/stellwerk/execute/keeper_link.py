"""The host's side of the keeper: start, stop and renew process trees, and hear of their ends.

Everything happens in the loop's thread, and nothing blocks. A keeper that dies is replaced; its trees are reported as
lost only when the guard's exit (or a sweep) has proved that none of them is left.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from stellwerk.core.errors import Unavailable
from stellwerk.execute.keeper_frames import (
    FDS_PER_START_MAX,
    Gone,
    Hello,
    Move,
    Ping,
    Pong,
    Quit,
    Refused,
    Renew,
    Report,
    Start,
    Started,
    Stop,
    Stuck,
)
from stellwerk.execute.keeper_pair import KeeperPair, first_open_files_soft, raise_open_files
from stellwerk.execute.sweep import sweep

HELLO_WITHIN_S = 30.0  # a fresh Python on a very busy machine
QUIT_WITHIN_S = 10.0
PING_EVERY_S = 5.0  # a keeper silent for two of these while something runs is killed


class Spawn(Struct, frozen=True):
    """What to start. `fds` become 0, 1, 2, 3, …; the caller closes its own copies after `start`."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    fds: tuple[int, ...]
    deadline_boot_ms: int
    grace_ms: int = 0  # between TERM and KILL when the link is closed while it runs


class SpawnListener(Protocol):
    """Who wants to know about one tree. `failed` or `ended` comes exactly once, as the last call."""

    def started(self, pid: int) -> None: ...

    def failed(self, errno: int, text: str) -> None:
        """It never started."""

    def ended(self, wait_status: int, why: str, cpu_ms: int) -> None:
        """The whole tree is gone; why: exit, stop, deadline, or keeper lost."""

    def stuck(self, text: str) -> None:
        """Some of it does not die; said again while it lasts."""


class _Open(Struct):
    listener: SpawnListener
    pair: KeeperPair
    grace_ms: int


class KeeperLink:
    """Open it first of all, close it last of all."""

    def __init__(self, *, ping_every_s: float = PING_EVERY_S) -> None:
        self._ping_every_s = ping_every_s
        self._pair: KeeperPair | None = None  # takes new trees
        self._pairs: list[KeeperPair] = []  # with those that only drain
        self._open: dict[int, _Open] = {}
        self._greeted: set[int] = set()  # ids of pairs that said HELLO
        self._abilities: Mapping[str, str] = {}
        self._handle = 0
        self._is_closing = False
        self._changed: asyncio.Future[None] | None = None
        self._silence_timer: asyncio.TimerHandle | None = None
        self._heard_since = True

    async def open(self) -> None:
        """Start guard and keeper, and wait until the keeper is ready."""
        self._loop = asyncio.get_running_loop()
        first_open_files_soft()
        pair = self._new_pair()
        try:
            await self._wait_until(lambda: id(pair) in self._greeted or pair.is_keeper_lost, HELLO_WITHIN_S)
        except TimeoutError:
            pair.kill_guard()
        if id(pair) not in self._greeted:
            raise Unavailable("the keeper process did not start; its own message is on the standard error of this host")
        raise_open_files()

    async def close(self) -> None:
        """End every tree, wait for the ends, and for the guard's exit."""
        self._is_closing = True
        for handle, entry in list(self._open.items()):
            self.stop(handle, entry.grace_ms)
        await self._wait_until(lambda: not self._open, None)
        for pair in self._pairs:
            pair.send(Quit())
        try:
            await self._wait_until(lambda: not self._pairs, QUIT_WITHIN_S)
        except TimeoutError:
            for pair in self._pairs:
                pair.kill_keeper()
            await self._wait_until(lambda: not self._pairs, None)

    def start(self, spawn: Spawn, listener: SpawnListener) -> int:
        """Ask for a tree; the answer comes to the listener. Never blocks."""
        self._handle += 1
        handle = self._handle
        try:
            if len(spawn.fds) > FDS_PER_START_MAX:
                raise OSError(errno.E2BIG, f"{len(spawn.fds)} descriptors are more than {FDS_PER_START_MAX}")
            if self._is_closing:
                raise OSError(errno.ESHUTDOWN, "the host is shutting down")
            order = Start(
                handle,
                [os.fsencode(word) for word in spawn.argv],
                {os.fsencode(name): os.fsencode(value) for name, value in spawn.env.items()},
                os.fsencode(spawn.cwd),
                spawn.deadline_boot_ms,
                len(spawn.fds),
            )
            pair = self._pair if self._pair is not None else self._new_pair()
            pair.send(order, spawn.fds)
        except (OSError, ValueError) as error:
            number = error.errno if isinstance(error, OSError) and error.errno else errno.EINVAL
            self._loop.call_soon(listener.failed, number, str(error))
            return handle
        self._open[handle] = _Open(listener, pair, spawn.grace_ms)
        if self._silence_timer is None:
            self._watch_silence()
        return handle

    def stop(self, handle: int, grace_ms: int) -> None:
        """TERM, then KILL after the grace; 0: KILL at once. Unknown handles have ended already."""
        entry = self._open.get(handle)
        if entry is not None:
            entry.pair.send(Stop(handle, grace_ms))

    def renew(self, deadline_boot_ms: int, given_up: Sequence[int]) -> None:
        """The store prolonged all leases but those given up, which are killed."""
        for handle in given_up:
            self.stop(handle, 0)
        for pair in self._pairs:
            pair.send(Renew(deadline_boot_ms))

    def set_deadline(self, handle: int, deadline_boot_ms: int) -> None:
        """A new deadline of its own for one tree: a warm child outlives the leases of its calls."""
        entry = self._open.get(handle)
        if entry is not None:
            entry.pair.send(Move(handle, deadline_boot_ms))

    def capabilities(self) -> Mapping[str, str]:
        """For /health: each entry is `ok` or begins with `degraded: `."""
        tree_kill = "ok" if self._abilities.get("subreaper") == "yes" else "degraded: tree kill is best effort"
        tag = "ok" if self._abilities.get("tag") == "yes" else "degraded: leftovers of a crash cannot be found"
        unguarded = any(pair.is_guard_gone and not pair.is_keeper_lost for pair in self._pairs)
        guard = "degraded: unguarded until the running commands end" if unguarded else "ok"
        return {"tree_kill": tree_kill, "tag": tag, "guard": guard}

    # ── what a pair tells (PairWatcher) ──

    def heard(self, pair: KeeperPair, reports: list[Report]) -> None:
        """Pass the keeper's reports on."""
        self._heard_since = True
        for report in reports:
            try:
                self._pass_on(pair, report)
            except Exception as error:
                # One listener's bug must not swallow the ends of the others.
                self._loop.call_exception_handler({"message": f"a listener failed on {report}", "exception": error})

    def _pass_on(self, pair: KeeperPair, report: Report) -> None:
        match report:
            case Started(handle, pid):
                if handle in self._open:
                    self._open[handle].listener.started(pid)
            case Gone(handle, wait_status, why, cpu_ms):
                self._forget(handle).listener.ended(wait_status, why, cpu_ms)
            case Refused(handle, number, text):
                self._forget(handle).listener.failed(number, text)
            case Stuck(handle, text):
                self._open[handle].listener.stuck(text)
            case Hello(pid, abilities):
                pair.keeper_is(pid)
                self._greeted.add(id(pair))
                self._abilities = abilities
                self._tell_waiter()
            case Pong():
                pass  # that it spoke is all

    def keeper_lost(self, pair: KeeperPair) -> None:
        """Its trees are the guard's now; new ones go to a new pair."""
        if pair is self._pair:
            self._pair = None
        if pair.is_guard_gone:
            self._bury(pair)
        elif id(pair) in self._greeted:
            self._replace()
        self._tell_waiter()

    def guard_gone(self, pair: KeeperPair) -> None:
        """Either the proof that nothing is left, or the keeper has lost its guard and only drains from now on."""
        if pair is self._pair:
            self._pair = None
            if id(pair) in self._greeted:  # else only when the next tree is asked for, or this would spin
                self._replace()
        if pair.is_keeper_lost:
            self._bury(pair)
        elif not self._opened_by(pair):
            pair.send(Quit())

    def _replace(self) -> None:
        if self._pair is None and not self._is_closing:
            self._new_pair()

    def _bury(self, pair: KeeperPair) -> None:
        if pair.guard_cleaned_up or not self._opened_by(pair):
            self._report_lost(pair)
            return
        # Both were killed: only a sweep can prove that their trees are gone.
        sweeping = self._loop.run_in_executor(None, _sweep_after, pair)
        sweeping.add_done_callback(lambda _: self._report_lost(pair))

    def _report_lost(self, pair: KeeperPair) -> None:
        self._pairs.remove(pair)
        pair.forget_keeper()
        was_ready = id(pair) in self._greeted
        self._greeted.discard(id(pair))
        for handle in self._opened_by(pair):
            listener = self._forget(handle).listener
            if was_ready:
                listener.ended(0, "keeper lost", 0)
            else:
                listener.failed(errno.EAGAIN, "the keeper process did not start; see the host's standard error")
        self._tell_waiter()

    # ── own affairs ──

    def _new_pair(self) -> KeeperPair:
        self._pair = KeeperPair(self._loop, self)
        self._pairs.append(self._pair)
        return self._pair

    def _opened_by(self, pair: KeeperPair) -> list[int]:
        return [handle for handle, entry in self._open.items() if entry.pair is pair]

    def _forget(self, handle: int) -> _Open:
        entry = self._open.pop(handle)
        if entry.pair is not self._pair and not entry.pair.is_keeper_lost and not self._opened_by(entry.pair):
            entry.pair.send(Quit())  # an unguarded keeper has drained
        if self._changed is not None:
            self._tell_waiter()
        return entry

    def _watch_silence(self) -> None:
        self._heard_since = True
        self._silence_timer = self._loop.call_later(self._ping_every_s, self._silence_is_over, False)

    def _silence_is_over(self, was_asked: bool) -> None:
        """While something runs, ask a silent keeper whether it lives; an idle host does not wake up for this."""
        self._silence_timer = None
        if not self._open:
            return
        asks = not self._heard_since
        if asks and was_asked:
            for pair in self._pairs:
                pair.kill_keeper()
        elif asks:
            for pair in self._pairs:
                pair.send(Ping())
        self._heard_since = False
        self._silence_timer = self._loop.call_later(self._ping_every_s, self._silence_is_over, asks)

    async def _wait_until(self, is_so: Callable[[], bool], within_s: float | None) -> None:
        async with asyncio.timeout(within_s):
            while not is_so():
                self._changed = self._loop.create_future()
                await self._changed
        self._changed = None

    def _tell_waiter(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


def _sweep_after(pair: KeeperPair) -> None:
    pair.wait_for_keeper_death()
    sweep()
