"""One small world from one seed: hosts of the real kernel, one store, a wire between them, and things that break.

Two phases: faults on, then healed, and now everything must finish. Three kinds of world: several hosts that share a
memory store; one host on an exclusive memory store; one host on SQLite, run inline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import shutil
import tempfile
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from stellwerk.core import dag
from stellwerk.core.errors import StellwerkError, Unavailable
from stellwerk.core.logs import STDOUT, LogChunk, LogPiece
from stellwerk.core.queries import Retention
from stellwerk.core.run import Check, Failed, Lost, Outcome, Returned, State, Succeeded
from stellwerk.execute.protocol import Attempt, Ended
from stellwerk.kernel import chores
from stellwerk.kernel import kernel as kernel_module
from stellwerk.kernel.env import time_ordered_id
from stellwerk.kernel.host import Host
from stellwerk.kernel.kernel import Kernel
from stellwerk.kernel.settings import WorkerSettings
from stellwerk.kernel.ticker import Ticker
from stellwerk.kernel.worker import Worker
from stellwerk.store import memory as memory_module
from stellwerk.store.memory import MemoryStore
from stellwerk.store.protocol import Store
from stellwerk.store.sqlite import applying as sqlite_applying
from stellwerk.store.sqlite import claiming as sqlite_claiming
from tests.simulation import checkers
from tests.simulation.checkers import Violation, Watch
from tests.simulation.faults import Faults, FaultyDispatch, FaultyStore, Rates, Watched, Wire, draw_rates
from tests.simulation.loop import OUTSIDE, Deadlock, Place, Spinning, VirtualLoop

Answer = TypeVar("Answer")

BASE_MS = 1_700_000_000_000
POLL_MS = 2_000
LEASE_MS = 3_000
QUEUES = {"default": 3, "other": 2}
CALL_S_MAX = 15.0  # a client waits no longer for an answer
HEAL_S_MAX = 150.0  # in that time everything must have ended
TRACE_LINES_MAX = 4_000


class Shape(Struct, frozen=True):
    """What kind of world a seed makes."""

    hosts: int
    store: str  # "shared", "memory" or "sqlite"
    clients: int
    runs: int
    fault_s: float
    bunch: int  # rows per bunch: small, so that chores are needed
    trims: bool


def draw_shape(chance: random.Random, store: str | None = None) -> Shape:
    kind = store or ("memory" if chance.random() < 0.15 else "shared")
    return Shape(
        hosts=3 if kind == "shared" else 1,
        store=kind,
        clients=chance.randrange(2, 5),
        runs=chance.randrange(30, 61),
        fault_s=chance.uniform(10.0, 30.0),
        bunch=chance.choice((3, 5, 8, 1_000)),
        trims=chance.random() < 0.3,
    )


class HostGone(Exception):
    """The host died, or does not answer: nobody knows what was done."""


# -- what a host is made of -------------------------------------------------------------------------------------------


class SimEnv:
    """Virtual time, seeded chance. All clocks may jump forward; each host is off by its own skew."""

    def __init__(self, world: World, name: str, skew_ms: int) -> None:
        self._world = world
        self._random = random.Random(f"{world.seed}/env/{name}")
        self._skew_ms = skew_ms
        self._last_ms = 0
        self._count = 0

    def now_ms(self) -> int:
        now_ms = BASE_MS + int(self._world.loop.time() * 1_000) + self._world.jumped_ms + self._skew_ms
        self._last_ms = max(self._last_ms, now_ms)
        return self._last_ms

    def boot_ms(self) -> int:
        return int(self._world.loop.time() * 1_000) + self._world.jumped_ms

    def chance(self) -> float:
        return self._random.random()

    def new_id(self) -> str:
        self._count += 1
        return time_ordered_id(self.now_ms(), self._count % 0xFFFFF, self._random.getrandbits(40))

    def secret(self) -> str:
        return f"{self._random.getrandbits(256):x}"


class SimLogs:
    """Lines that attempts wrote and the store has not yet taken."""

    def __init__(self) -> None:
        self._chunks: list[LogChunk] = []
        self.confirmed = 0

    def write(self, run_id: str, attempt: int, sequence: int, at_ms: int) -> None:
        text = f"{attempt}/{sequence}".encode()
        self._chunks.append(LogChunk(run_id, attempt, sequence, (LogPiece(STDOUT, at_ms, text),)))

    def take(self) -> list[LogChunk]:
        chunks, self._chunks = self._chunks, []
        return chunks

    def confirm(self, chunks: Sequence[LogChunk]) -> None:
        self.confirmed += len(chunks)


class _Going:
    """An attempt in the hands of the executor."""

    __slots__ = ("attempt", "deadline_ms", "sequence", "stop", "timer")

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.deadline_ms = attempt.lease_deadline_boot_ms
        self.sequence = 0
        self.stop = False
        self.timer: Any = None


class SimExecutor:
    """Attempts take virtual time and end as chance will have it; a keeper ends those whose lease is not renewed."""

    def __init__(self, host: SimHost, kind: str, queue: str, slots: int) -> None:
        self._host = host
        self._world = host.world
        self._chance = random.Random(f"{host.world.seed}/executor/{host.name}/{kind}/{queue}")
        self._slots = 10**6 if kind == "command" else slots  # commands are bounded by the worker
        self._queue: deque[_Going] = deque()
        self._going: dict[tuple[str, int], _Going] = {}
        self._active = 0
        self._ended: list[Ended] = []
        self._closed = False

    async def open(self) -> None:
        await asyncio.sleep(self._chance.random() * 0.01)

    async def close(self) -> None:
        self._closed = True
        for going in self._going.values():
            if going.timer is not None:
                going.timer.cancel()
        self._going.clear()
        self._queue.clear()

    def start(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            going = _Going(attempt)
            place = (attempt.run_id, attempt.number)
            self._world.watch.began(place, self._host.kernel.host_id, self._host.kernel.env.now_ms())
            self._going[place] = going
            self._queue.append(going)
        self._begin_some()

    def _begin_some(self) -> None:
        while self._queue and self._active < self._slots:
            going = self._queue.popleft()
            if (going.attempt.run_id, going.attempt.number) not in self._going:
                continue
            self._active += 1
            seconds, outcome = self._fate(going.attempt)
            self._after(going, seconds, outcome)
            if self._chance.random() < 0.5:
                self._write(going)

    def _fate(self, attempt: Attempt) -> tuple[float, Outcome]:
        faults = self._world.faults
        seconds = self._chance.choice((0.01, 0.1, 0.5, 2.0)) * (0.5 + self._chance.random())
        if faults.strikes(self._chance, "attempt_hangs"):
            seconds = self._chance.uniform(5.0, 40.0)
        if attempt.timeout_ms is not None and seconds * 1_000 > attempt.timeout_ms:
            return attempt.timeout_ms / 1_000, Failed("timeout", "took too long")
        if faults.strikes(self._chance, "attempt_fails") or attempt.name == "fails":
            return seconds, Failed("exit", "exit code 1", 1)
        if faults.strikes(self._chance, "attempt_lost"):
            return seconds, Lost("the process vanished")
        return seconds, Succeeded(f'"{attempt.run_id}/{attempt.number}"'.encode(), 0)

    def _after(self, going: _Going, seconds: float, outcome: Outcome) -> None:
        if going.timer is not None:
            going.timer.cancel()
        loop = self._world.loop
        going.timer = loop.call_later(seconds, self._end, going, loop.time() + seconds, outcome)

    def _end(self, going: _Going, at_s: float, outcome: Outcome) -> None:
        place = (going.attempt.run_id, going.attempt.number)
        if self._closed or place not in self._going:
            return
        left_s = (going.deadline_ms - self._host.kernel.env.boot_ms()) / 1_000
        if left_s < 0 and not self._host.keeper_fails:
            outcome = Lost("lease deadline passed")  # its keeper was not frozen with the host
        del self._going[place]
        self._active -= 1
        if self._chance.random() < 0.5:
            self._write(going)
        self._world.watch.executed(place, self._host.kernel.host_id, outcome)
        self._ended.append(Ended(*place, outcome))
        self._begin_some()
        self._host.worker.wake()

    def _write(self, going: _Going) -> None:
        going.sequence += 1
        now_ms = self._host.kernel.env.now_ms()
        self._host.logs.write(going.attempt.run_id, going.attempt.number, going.sequence, now_ms)

    def stop(self, run_id: str, number: int, grace_ms: int) -> None:
        going = self._going.get((run_id, number))
        if going is None:
            return
        if going in self._queue:
            self._queue.remove(going)
            self._active += 1  # given back by its end
            self._after(going, 0.0, Returned("stopped before it began"))
            return
        going.stop = True
        seconds = self._chance.random() * 0.1
        if grace_ms > 0 and self._world.faults.strikes(self._chance, "stop_ignored"):
            seconds = grace_ms / 1_000
        if self._chance.random() < 0.1:
            self._after(going, seconds, Succeeded(f'"{run_id}/{number}"'.encode(), 0))  # it was just done
        else:
            self._after(going, seconds, Failed("stopped", "stopped on request", 143))

    def narrow(self, width: int) -> bool:
        return False

    def give_back(self) -> None:
        """Whatever is started here begins at once."""

    def renew(self, deadline_boot_ms: int, given_up: Sequence[tuple[str, int]]) -> None:
        lost = set(given_up)
        for place, going in self._going.items():
            if place not in lost:
                going.deadline_ms = max(going.deadline_ms, deadline_boot_ms)

    def take_ended(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        return ended

    def stuck(self) -> Mapping[str, str]:
        return {}

    @property
    def busy(self) -> int:
        return len(self._going)


class SimHost:
    """A host of the real parts, at a place of its own, that can be broken in several ways."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.starts = 0
        self.up = False
        self.busy_with_fault = False
        self.place = OUTSIDE
        self.name = ""
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._calls = 0

    def make(self) -> None:
        """New parts; what an earlier start left behind is never run again."""
        world = self.world
        self.starts += 1
        self.name = f"{self.number}.{self.starts}"
        self.place = Place(self.name)
        chance = random.Random(f"{world.seed}/host/{self.name}")
        self.keeper_fails = chance.random() < world.faults.rates.keeper_fails
        skew_ms = chance.randrange(-world.faults.rates.clock_skew_ms, world.faults.rates.clock_skew_ms + 1)
        env = SimEnv(world, self.name, skew_ms)
        store = FaultyStore(world.store, world.faults, random.Random(f"{world.seed}/store/{self.name}"), world.watched)
        wire_chance = random.Random(f"{world.seed}/wire/{self.name}")
        dispatch = FaultyDispatch(world.wire, wire_chance, None if store.exclusive() else POLL_MS)
        self.kernel = Kernel(store, dispatch, env, host_id=f"host-{self.name}")
        self.logs = SimLogs()
        self.executors: list[SimExecutor] = []
        settings = WorkerSettings(slots=QUEUES, lease_ms=LEASE_MS, drain_ms=2_000, kill_grace_ms=1_000)
        self.worker = Worker(self.kernel, settings, self._executor, self.logs, {})
        retention = Retention()
        self.ticker = Ticker(self.kernel, self.worker.holds, self._probe, dispatch.poll_ms(), retention)
        self.host = Host(self.kernel, self.worker, self.ticker, dispatch)
        self.dispatch = dispatch

    def _executor(self, kind: str, queue: str, slots: int) -> SimExecutor:
        executor = SimExecutor(self, kind, queue, slots)
        self.executors.append(executor)
        return executor

    async def _probe(self, check: Check, now_ms: int) -> bool:
        return self.world.loop.time() >= float(check.value)

    async def open(self) -> None:
        """Start it, again and again until the store lets it."""
        while True:
            await self.world.reopen()
            self.make()
            try:
                await self.call(self.host.open(), opening=True)
            except (StellwerkError, HostGone, OSError):
                self.bury()
                await asyncio.sleep(0.5)
                continue
            self.up = True
            self.world.note(f"host {self.name} is up")
            return

    async def call(self, work: Coroutine[Any, Any, Answer], *, opening: bool = False) -> Answer:
        """Have the host do something, as a client over a wire: no answer may come, and then nobody knows."""
        if not self.up and not opening:
            work.close()
            raise HostGone("nobody listens")
        loop = self.world.loop
        answer: asyncio.Future[Answer] = loop.create_future()
        self._calls += 1
        number = self._calls
        self._pending[number] = answer
        task = loop.create_task(work, context=loop.context_of(self.place))
        # The answer travels in our own context: a host that froze after it answered does not hold it back.
        task.add_done_callback(lambda done: _hand_over(done, answer), context=loop.context_of(OUTSIDE))
        timer = loop.call_later(CALL_S_MAX, _give_up, answer, context=loop.context_of(OUTSIDE))
        try:
            return await answer
        finally:
            timer.cancel()
            self._pending.pop(number, None)

    def bury(self) -> None:
        """It stops dead: nothing of it is run again, nothing is cleaned up."""
        self.world.loop.kill(self.place)
        self.up = False
        if self.dispatch in self.world.wire.ends:
            self.world.wire.ends.remove(self.dispatch)
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(HostGone("the host died"))

    async def die(self, down_s: float) -> None:
        self.world.note(f"host {self.name} stops dead")
        self.bury()
        await asyncio.sleep(down_s)
        await self.open()

    async def freeze(self, seconds: float) -> None:
        self.world.note(f"host {self.name} freezes for {seconds:.1f} s")
        self.world.loop.freeze(self.place)
        await asyncio.sleep(seconds)
        self.world.loop.thaw(self.place)
        self.world.note(f"host {self.name} goes on")

    async def stop(self) -> None:
        """An orderly stop, then a new start."""
        self.world.note(f"host {self.name} stops in order")
        skip = asyncio.Event()
        place, loop = self.place, self.world.loop
        closing = loop.create_task(self.host.close(skip), context=loop.context_of(place))
        await asyncio.wait([closing], timeout=120)
        if not closing.done():
            raise Violation("an orderly stop comes to its end", f"host {self.name} did not stop within 120 s")
        closing.result()
        self.world.watch.stopped_in_order(self.kernel.host_id)
        self.bury()
        await self.open()


def _hand_over(done: asyncio.Task[Answer], answer: asyncio.Future[Answer]) -> None:
    if answer.done():
        if not done.cancelled():
            done.exception()  # looked at, so that nobody complains
        return
    if done.cancelled():
        answer.set_exception(HostGone("the host gave the call up"))
    elif (error := done.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(done.result())


def _give_up(answer: asyncio.Future[Any]) -> None:
    if not answer.done():
        answer.set_exception(HostGone("no answer came in time"))


# -- the world --------------------------------------------------------------------------------------------------------


class Report(Struct):
    """What came of one seed."""

    seed: int
    shape: Shape
    events: int
    runs: int
    virtual_s: float
    digest: str
    ended: dict[str, int]


class World:
    """All of it, from one seed."""

    def __init__(self, seed: int, loop: VirtualLoop, store: str | None = None, rates: Rates | None = None) -> None:
        self.seed = seed
        self.loop = loop
        chance = random.Random(f"{seed}/world")
        self.shape = draw_shape(chance, store)
        drawn = draw_rates(chance)
        self.faults = Faults(rates or drawn)
        self.jumped_ms = 0
        self._breaking: list[asyncio.Task[None]] = []
        self.trace: deque[str] = deque(maxlen=TRACE_LINES_MAX)
        self._folder: str | None = None
        self.store = self._make_store()
        self.watch = Watch(self)
        self.watched = Watched(self.store, self.watch.applied, self.watch.extended)
        if self.store.exclusive():
            # In-process wakes are never lost, and nobody polls to make up for it.
            for name in ("wake_lost", "wake_doubled", "wake_late"):
                setattr(self.faults.rates, name, 0.0)
        self.wire = Wire(self.faults)
        self.hosts = [SimHost(self, number) for number in range(self.shape.hosts)]
        self.chance = random.Random(f"{seed}/breaker")

    def _make_store(self) -> Store:
        if self.shape.store != "sqlite":
            return MemoryStore(exclusive=self.shape.store == "memory")
        from stellwerk.store.sqlite.store import SqliteStore

        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # what a power cut does is not simulated here
        self._folder = tempfile.mkdtemp(prefix="stellwerk-sim-", dir=memory)
        return SqliteStore(Path(self._folder), inline=True)

    async def reopen(self) -> None:
        """A new start of the only host opens the file anew, and that ends all leases of earlier starts."""
        if self._folder is None:
            return
        from stellwerk.store.sqlite.store import SqliteStore

        await self.store.close()
        self.store = self.watched.inner = SqliteStore(Path(self._folder), inline=True)
        await self.store.open()
        self.watch.leases_ended()

    def note(self, text: str) -> None:
        self.trace.append(f"{self.loop.time():9.3f}  {text}")

    async def live(self) -> Report:
        """The whole life of this world; raises Violation if anything does not hold."""
        from tests.simulation.workload import Workload

        try:
            await self.store.open()
            for host in self.hosts:
                await host.open()
            workload = Workload(self)
            workload.start()
            breaker = asyncio.create_task(self._break_things())
            await asyncio.wait([breaker], timeout=self.shape.fault_s)
            breaker.cancel()
            self.watch.look_at_clients(workload)
            await self.watch.compare_tables()
            await self._heal(workload)
            await checkers.check_healed(self, workload)
        finally:
            await self.store.close()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
        return self._report()

    def _report(self) -> Report:
        watch = self.watch
        ended: dict[str, int] = {}
        for story in watch.stories.values():
            ended[story.state.value] = ended.get(story.state.value, 0) + 1
        return Report(
            self.seed, self.shape, len(watch.events), len(watch.stories), self.loop.time(), watch.digest(), ended
        )

    # -- breaking -----------------------------------------------------------------------------------------------------

    async def _break_things(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            if self.faults.strikes(self.chance, "clock_jumps"):
                self.jumped_ms += self.chance.randrange(500, 10_000)
                self.note("all clocks jump forward")
            if self.shape.trims and self.chance.random() < 0.2:
                keep = Retention(events_min=self.chance.randrange(1, 60), age_ms=1, events_max=100)
                await self.store.trim_journal(keep, BASE_MS + int(self.loop.time() * 1_000) + self.jumped_ms)
            for host in self.hosts:
                if host.busy_with_fault or not host.up:
                    continue
                if self.faults.strikes(self.chance, "host_dies"):
                    self._do(host, host.die(self.chance.uniform(0.1, 8.0)))
                elif self.faults.strikes(self.chance, "host_freezes"):
                    self._do(host, host.freeze(self.chance.uniform(0.5, 10.0)))
                elif self.faults.strikes(self.chance, "host_stops"):
                    self._do(host, host.stop())

    def _do(self, host: SimHost, fault: Coroutine[Any, Any, None]) -> None:
        async def one() -> None:
            try:
                await fault
            except Violation as violation:
                self.watch.violations.append(violation)
            finally:
                host.busy_with_fault = False

        host.busy_with_fault = True
        self._breaking.append(asyncio.create_task(one()))

    # -- healing ------------------------------------------------------------------------------------------------------

    async def _heal(self, workload: Any) -> None:
        """No more faults; all hosts are up; clients finish. First under the gates that stand, then with all open."""
        self.faults.on = False
        self.note("healing")
        deadline = self.loop.time() + HEAL_S_MAX
        while any(host.busy_with_fault or not host.up for host in self.hosts):
            await self._wait_a_little(deadline, "all hosts come up again")
        while not workload.done():
            await self._wait_a_little(deadline, "clients come to an end")
        await self._settle_down(deadline)
        await checkers.check_nothing_forgotten(self)
        await workload.open_everything(self.hosts[0])
        while await self._is_anything_live():
            if self.loop.time() > deadline:
                await checkers.report_stuck(self)
            await self._wait_a_little(deadline + 1, "every run ends")
        await asyncio.sleep(2 * POLL_MS / 1_000 + 1)

    async def _settle_down(self, deadline: float) -> None:
        """Until nothing has been committed for some polls."""
        last, since = -1, self.loop.time()
        while self.loop.time() - since < 3 * POLL_MS / 1_000 and self.loop.time() < deadline:
            if self.watch.last != last:
                last, since = self.watch.last, self.loop.time()
            await asyncio.sleep(0.5)
            self.watch.raise_first()

    async def _wait_a_little(self, deadline: float, what: str) -> None:
        self.watch.raise_first()
        if self.loop.time() > deadline:
            raise Violation("after healing everything comes to an end", f"not in time: {what}")
        await asyncio.sleep(0.5)

    async def _is_anything_live(self) -> bool:
        counts = (await self.store.count()).states
        return any(counts.get(state, 0) for state in (State.WAITING, State.READY, State.RUNNING))


# -- running one ------------------------------------------------------------------------------------------------------


class Failure(Exception):
    """A seed that failed: which sentence did not hold, and the tail of what happened."""

    def __init__(self, seed: int, checker: str, text: str, trace: Sequence[str]) -> None:
        super().__init__(f"seed {seed}: not true that {checker}: {text}")
        self.seed = seed
        self.checker = checker
        self.text = text
        self.trace = trace


@contextlib.contextmanager
def small_bunches(rows: int) -> Iterator[None]:
    """Chores are for very many rows; here a few are very many."""
    modules: tuple[Any, ...] = (dag, chores, kernel_module, memory_module, sqlite_applying, sqlite_claiming)
    before = [module.ROWS_PER_BUNCH for module in modules]
    for module in modules:
        module.ROWS_PER_BUNCH = rows
    try:
        yield
    finally:
        for module, old in zip(modules, before, strict=True):
            module.ROWS_PER_BUNCH = old


def simulate(seed: int, store: str | None = None, rates: Rates | None = None) -> Report:
    """One world, from its seed to its end. Raises Failure."""
    logging.getLogger("stellwerk").setLevel(logging.CRITICAL + 1)
    loop = VirtualLoop()
    world = World(seed, loop, store, rates)
    try:
        with small_bunches(world.shape.bunch):
            report: Report = loop.run_until_complete(world.live())
        world.watch.raise_first()
        return report
    except Violation as violation:
        raise Failure(seed, violation.checker, violation.text, world.trace) from None
    except Deadlock as error:
        raise Failure(seed, "somebody can always go on", str(error), world.trace) from None
    except Spinning as error:
        raise Failure(seed, "nobody spins", str(error), world.trace) from None
    except (Unavailable, AssertionError, StellwerkError, HostGone) as error:
        raise Failure(seed, "nothing breaks on the way", repr(error), world.trace) from error
    finally:
        loop.close()
