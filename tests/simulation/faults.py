"""What may break, and how often: drawn once per seed, so that some worlds are calm and some are cruel.

`FaultyStore` and `FaultyDispatch` stand between a host and the shared truth. A call takes time before and after the
store does its part, so a host that stops dead or freezes in between leaves it undone, or done and unanswered.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from msgspec import Struct

from stellwerk.core.batch import Applied, Batch, Claim
from stellwerk.core.errors import Unavailable
from stellwerk.core.facts import Facts, Loaded
from stellwerk.core.logs import Appended, Fenced, LogChunk, LogPage, LogQuery
from stellwerk.core.queries import Counts, Due, JournalSlice, LeaseRef, Retention, RunPage, RunQuery
from stellwerk.dispatch.protocol import Wake
from stellwerk.store.protocol import Store

Answer = TypeVar("Answer")


class Rates(Struct):
    """Chances of each fault, per call, wake, attempt or second."""

    commit_fails: float = 0.0  # refused before anything was done
    commit_breaks: float = 0.0  # the same, with an error that nobody expected
    answer_lost: float = 0.0  # done, and the caller hears Unavailable
    commit_slow: float = 0.0  # seconds instead of milliseconds
    read_fails: float = 0.0
    extend_fails: float = 0.0
    logs_refused: float = 0.0
    wake_lost: float = 0.0
    wake_doubled: float = 0.0
    wake_late: float = 0.0
    host_dies: float = 0.0  # per second and host
    host_freezes: float = 0.0
    host_stops: float = 0.0  # an orderly stop, and a start after it
    clock_jumps: float = 0.0  # of all clocks at once, forward
    clock_skew_ms: int = 0  # of each host, fixed
    attempt_fails: float = 0.0
    attempt_lost: float = 0.0
    attempt_hangs: float = 0.0
    stop_ignored: float = 0.0
    keeper_fails: float = 0.0  # nobody ends the attempts of a frozen host at their deadline


_MOST = Rates(
    commit_fails=0.08,
    commit_breaks=0.03,
    answer_lost=0.08,
    commit_slow=0.05,
    read_fails=0.08,
    extend_fails=0.15,
    logs_refused=0.2,
    wake_lost=0.6,
    wake_doubled=0.3,
    wake_late=0.4,
    host_dies=0.06,
    host_freezes=0.08,
    host_stops=0.03,
    clock_jumps=0.05,
    attempt_fails=0.35,
    attempt_lost=0.15,
    attempt_hangs=0.15,
    stop_ignored=0.5,
    keeper_fails=1.0,
)


def draw_rates(chance: random.Random) -> Rates:
    """Each fault is absent in a third of the worlds, else somewhere below its most."""
    rates = Rates()
    for name in Rates.__struct_fields__:
        if name == "clock_skew_ms":
            continue
        if chance.random() < 0.67:
            setattr(rates, name, getattr(_MOST, name) * chance.random())
    if chance.random() < 0.5:
        rates.clock_skew_ms = chance.randrange(1, 500)
    return rates


class Faults:
    """The faults of one world; `on` is false while it heals."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.on = True

    def strikes(self, chance: random.Random, name: str) -> bool:
        return self.on and chance.random() < getattr(self.rates, name)


class FaultyStore:
    """One host's way to the store that all share. `watched` is told what is really done, as it is done."""

    def __init__(self, inner: Store, faults: Faults, chance: random.Random, watched: Watched) -> None:
        self._inner = inner
        self._faults = faults
        self._chance = chance
        self._watched = watched

    # -- lifetime: opening and closing the shared store is the world's business ----------------------------------------

    async def open(self) -> None:
        await self._pause()

    async def close(self) -> None:
        """It stays open for the others."""

    def durability(self) -> str:
        return self._inner.durability()

    def exclusive(self) -> bool:
        return self._inner.exclusive()

    def low(self) -> str | None:
        return self._inner.low()

    def foreign(self) -> str | None:
        return self._inner.foreign()

    async def adopt(self, now_ms: int, actor: str) -> None:
        await self._inner.adopt(now_ms, actor)

    async def epoch(self) -> str:
        return await self._inner.epoch()

    # -- change -------------------------------------------------------------------------------------------------------

    async def apply(self, batches: Sequence[Batch], claims: Sequence[Claim], now_ms: int) -> Applied:
        await self._pause()
        if self._faults.strikes(self._chance, "commit_slow"):
            await asyncio.sleep(self._chance.uniform(0.5, 6.0))
        if self._faults.strikes(self._chance, "commit_fails"):
            raise Unavailable("simulated: the store refused before it did anything")
        if self._faults.strikes(self._chance, "commit_breaks"):
            raise OSError("simulated: the connection broke before anything was sent")
        applied = await self._watched.apply(batches, claims, now_ms)
        await self._pause()
        if self._faults.strikes(self._chance, "answer_lost"):
            raise Unavailable("simulated: done, but the answer was lost")
        return applied

    async def extend(self, leases: Sequence[LeaseRef], until_ms: int, now_ms: int) -> list[str]:
        await self._pause()
        if self._faults.strikes(self._chance, "extend_fails"):
            raise Unavailable("simulated: no heartbeat now")
        answer = await self._watched.extend(leases, until_ms, now_ms)
        await self._pause()
        return answer

    # -- look ---------------------------------------------------------------------------------------------------------

    async def load(self, facts: Facts) -> Loaded:
        return await self._read(lambda: self._inner.load(facts))

    async def find_runs(self, query: RunQuery) -> RunPage:
        return await self._read(lambda: self._inner.find_runs(query))

    async def count(self) -> Counts:
        return await self._read(self._inner.count)

    async def due(self, now_ms: int, limit: int) -> Due:
        return await self._read(lambda: self._inner.due(now_ms, limit))

    async def read_journal(self, after: int, limit: int, run: str | None = None) -> JournalSlice:
        return await self._read(lambda: self._inner.read_journal(after, limit, run))

    async def trim_journal(self, keep: Retention, now_ms: int) -> int:
        return await self._read(lambda: self._inner.trim_journal(keep, now_ms))

    async def append_logs(self, chunks: Sequence[LogChunk]) -> list[Appended | Fenced]:
        await self._pause()
        if self._faults.strikes(self._chance, "logs_refused"):
            raise Unavailable("simulated: no room for logs")
        return await self._inner.append_logs(chunks)

    async def read_logs(self, query: LogQuery) -> LogPage:
        return await self._read(lambda: self._inner.read_logs(query))

    async def _read(self, look: Callable[[], Awaitable[Answer]]) -> Answer:
        await self._pause()
        if self._faults.strikes(self._chance, "read_fails"):
            raise Unavailable("simulated: the store does not answer now")
        answer = await look()
        await self._pause()
        return answer

    async def _pause(self) -> None:
        """A call takes some time each way; often so little that two hosts meet at the same moment."""
        if self._chance.random() < 0.5:
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(self._chance.random() * 0.004)


class Watched:
    """The shared store with someone who writes down all that it does. Applying and writing down are one step."""

    def __init__(
        self,
        inner: Store,
        applied: Callable[[Sequence[Batch], Sequence[Claim], int, Applied], None],
        extended: Callable[[Sequence[LeaseRef], int, int, list[str]], None],
    ) -> None:
        self.inner = inner
        self._applied = applied
        self._extended = extended

    async def apply(self, batches: Sequence[Batch], claims: Sequence[Claim], now_ms: int) -> Applied:
        applied = await self.inner.apply(batches, claims, now_ms)
        self._applied(batches, claims, now_ms, applied)
        return applied

    async def extend(self, leases: Sequence[LeaseRef], until_ms: int, now_ms: int) -> list[str]:
        answer = await self.inner.extend(leases, until_ms, now_ms)
        self._extended(leases, until_ms, now_ms, answer)
        return answer


class Wire:
    """What carries wakes between the hosts of a world."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.ends: list[FaultyDispatch] = []


class FaultyDispatch:
    """One host's end of the wire: wakes are lost, doubled and late."""

    def __init__(self, wire: Wire, chance: random.Random, poll_ms: int | None) -> None:
        self._wire = wire
        self._chance = chance
        self._poll_ms = poll_ms
        self._came: list[Wake] = []
        self._something = asyncio.Event()

    async def open(self) -> None:
        self._wire.ends.append(self)

    async def close(self) -> None:
        if self in self._wire.ends:
            self._wire.ends.remove(self)

    def poll_ms(self) -> int | None:
        return self._poll_ms

    async def wake(self, wakes: Sequence[Wake]) -> None:
        for wake in sorted(wakes, key=lambda one: (one.topic, one.runs)):
            for end in list(self._wire.ends):
                self._send(end, wake)

    def _send(self, end: FaultyDispatch, wake: Wake) -> None:
        strikes = self._wire.faults.strikes
        if strikes(self._chance, "wake_lost"):
            return
        loop = asyncio.get_running_loop()
        late_s = self._chance.uniform(0.1, 3.0) if strikes(self._chance, "wake_late") else 0.0
        loop.call_later(late_s, end.take, wake)
        if strikes(self._chance, "wake_doubled"):
            loop.call_later(late_s + self._chance.random(), end.take, wake)

    def take(self, wake: Wake) -> None:
        self._came.append(wake)
        self._something.set()

    async def wait(self, timeout_ms: int | None) -> list[Wake]:
        if not self._came:
            try:
                async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1_000):
                    await self._something.wait()
            except TimeoutError:
                return []
        self._something.clear()
        came, self._came = self._came, []
        return came
