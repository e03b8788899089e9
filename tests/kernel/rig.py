"""A real host for tests, and ways to wait for what it does: by following the feed, never by sleeping."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import pytest

from stellwerk.assemble import Parts
from stellwerk.core.batch import Applied, Batch, Claim
from stellwerk.core.errors import NotFound
from stellwerk.core.events import AnyEvent, AnyRunEvent, RunStarted, Stamped, type_name
from stellwerk.core.facts import Facts
from stellwerk.core.gates import Gate, GateKind, Reason
from stellwerk.core.logs import LogQuery
from stellwerk.core.run import FINAL, Action, Body, Command, PythonCall, Run, Shell, State
from stellwerk.kernel.feed import Filter, NonEmpty, Torn
from stellwerk.kernel.kernel import Kernel
from stellwerk.kernel.settings import Settings, WorkerSettings
from stellwerk.kernel.submit import Idempotency, NewRun
from stellwerk.store.protocol import Store
from stellwerk.store.sqlite.store import SqliteStore

DEADLINE_S = 60.0  # only a test that fails waits so long
SLOTS = 4
ACTOR = "tester"
ENDS = frozenset({"RunSucceeded", "RunFailed", "RunCancelled", "RunSettled"})

# The module `work`, which lies in the folder of the config file.
WORK = '''
import asyncio
import os
import signal
import time
from pathlib import Path


def nothing():
    pass


def add(a, b):
    return a + b


async def add_later(a, b):
    await asyncio.sleep(0)
    return a + b


def describe(run, loud=False):
    return {"id": run.id, "attempt": run.attempt, "scope": run.scope, "name": run.name,
            "labels": dict(run.labels), "loud": loud}


def where():
    return os.getcwd()


def pid():
    return os.getpid()


def letters(count):
    return "x" * count


def fail():
    raise ValueError("no such luck")


def exit_hard():
    os._exit(7)


def die_until(attempt, run):
    """Takes its own process with it, until the attempt named."""
    if run.attempt < attempt:
        os.kill(os.getpid(), signal.SIGKILL)
    return run.attempt


def wait_for(path):
    Path(f"{path}.begun").touch() if Path(path).parent.exists() else None
    while not Path(path).exists():
        time.sleep(0.005)
    return "seen"
'''

T = TypeVar("T")


def settings_in(folder: Path, **workers: Any) -> Settings:
    """Settings of a small host; `slots` are those of the queue `default`."""
    slots = workers.pop("slots", SLOTS)
    workers.setdefault("kill_grace_ms", 2_000)
    config = folder / "config"
    config.mkdir(exist_ok=True)
    (config / "work.py").write_text(WORK)
    return Settings(folder=config, data=folder / "data", workers=WorkerSettings(slots={"default": slots}, **workers))


class Rig:
    """One host with short words for what tests do all the time."""

    def __init__(self, settings: Settings, store: Store | None = None) -> None:
        self.parts = Parts(settings, store=store)
        self.settings = settings
        self.folder = settings.folder

    @property
    def kernel(self) -> Kernel:
        return self.parts.kernel

    @property
    def store(self) -> Store:
        return self.parts.store

    # -- acts ---------------------------------------------------------------------------------------------------------

    async def submit(self, *wanted: NewRun, key: Idempotency | None = None) -> list[str]:
        """Add runs in one request; answers their ids."""
        submitted = await self.kernel.submit(wanted, ACTOR, key)
        return [added.id for added in submitted.runs]

    async def run(self, wanted: NewRun) -> Run:
        """Add a run and wait for its end."""
        (run_id,) = await self.submit(wanted)
        return await self.end_of(run_id)

    async def shut(self, key: str, kind: GateKind = "pause", **more: Any) -> Gate:
        gate, _ = await self.kernel.shut(Gate(key, kind, reason="because", actor=ACTOR, **more))
        return gate

    async def unshut(self, key: str, kind: GateKind = "pause") -> None:
        await self.kernel.unshut(key, kind, ACTOR)

    # -- looks --------------------------------------------------------------------------------------------------------

    async def row(self, run_id: str) -> Run:
        return (await self.kernel.run(run_id)).run

    async def result(self, run_id: str) -> Any:
        data = (await self.kernel.run(run_id)).result
        return None if data is None else msgspec.json.decode(data)

    async def why(self, run_id: str) -> list[Reason]:
        reasons, _ = await self.kernel.why(run_id)
        return reasons

    async def reasons(self, run_id: str) -> list[str]:
        return [reason.type for reason in await self.why(run_id)]

    async def output(self, run_id: str) -> list[str]:
        page = await self.store.read_logs(LogQuery(run_id))
        return [line.piece.data.decode() for line in page.lines]

    async def exists(self, run_id: str) -> bool:
        try:
            await self.kernel.run(run_id)
        except NotFound:
            return False
        return True

    async def journal(self, run_id: str | None = None) -> list[AnyEvent]:
        """All events there are, from the store."""
        return [stamped.event for stamped in await self.stamped(run_id)]

    async def stamped(self, run_id: str | None = None) -> list[Stamped]:
        found: list[Stamped] = []
        after = 0
        while True:
            part = await self.store.read_journal(after, 5_000, run_id)
            found.extend(part.events)
            if part.examined >= part.last or part.examined <= after:
                return found
            after = part.examined

    async def story(self, run_id: str) -> list[str]:
        """The names of a run's events."""
        return [type_name(event) for event in await self.journal(run_id)]

    async def starts(self) -> list[str]:
        """Which runs were started, in order."""
        return [event.run for event in await self.journal() if isinstance(event, RunStarted)]

    # -- waits --------------------------------------------------------------------------------------------------------

    async def until(self, run_id: str, holds: Callable[[Run], bool], what: str) -> Run:
        """Follow the run's events until its row is as wanted."""
        seen = await self.kernel.run(run_id)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + DEADLINE_S
        while not holds(seen.run):
            left_s = deadline - loop.time()
            if left_s <= 0:
                pytest.fail(f"run {run_id} is not {what} after {DEADLINE_S} s: {seen.run}; {await self.why(run_id)}")
            await self.kernel.feed.wait_after(seen.event_id, Filter(run=run_id), timeout_s=left_s)
            seen = await self.kernel.run(run_id)
        return seen.run

    async def end_of(self, run_id: str) -> Run:
        return await self.until(run_id, lambda run: run.state in FINAL, "ended")

    async def ends_of(self, run_ids: Sequence[str]) -> list[Run]:
        """The rows of many runs, when all have ended."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + DEADLINE_S
        after = (await self.store.count()).event_id
        rows = await self._rows(run_ids)
        left = {run_id for run_id, run in rows.items() if run.state not in FINAL}
        while left:
            left_s = deadline - loop.time()
            if left_s <= 0:
                pytest.fail(
                    f"{len(left)} of {len(run_ids)} runs have not ended within {DEADLINE_S} s: {sorted(left)[:3]}"
                )
            answer = await self.kernel.feed.wait_after(after, Filter(types=ENDS), limit=10_000, timeout_s=left_s)
            after = answer.last
            if isinstance(answer, NonEmpty):
                left.difference_update(getattr(stamped.event, "run", "") for stamped in answer.events)
        rows = await self._rows(run_ids)
        return [rows[run_id] for run_id in run_ids]

    async def _rows(self, run_ids: Sequence[str]) -> dict[str, Run]:
        rows: dict[str, Run] = {}
        for place in range(0, len(run_ids), 1_000):
            rows.update((await self.store.load(Facts(runs=tuple(run_ids[place : place + 1_000])))).runs)
        return rows

    async def state_of(self, run_id: str, state: State) -> Run:
        return await self.until(run_id, lambda run: run.state is state, state)

    async def running(self, run_id: str) -> Run:
        return await self.state_of(run_id, State.RUNNING)

    async def event(self, kind: type[T], *, after: int = 0, holds: Callable[[T], bool] = lambda _event: True) -> T:
        """The first event of a kind (and with a property), also if it is yet to come."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + DEADLINE_S
        while True:
            left_s = deadline - loop.time()
            if left_s <= 0:
                pytest.fail(f"no {kind.__name__} came within {DEADLINE_S} s")
            answer = await self.kernel.feed.wait_after(after, timeout_s=left_s)
            assert not isinstance(answer, Torn)
            if isinstance(answer, NonEmpty):
                for stamped in answer.events:
                    if isinstance(stamped.event, kind) and holds(stamped.event):
                        return stamped.event
            after = answer.last

    async def dropped(self, run_id: str) -> None:
        """Wait until a run is forgotten."""
        after = (await self.store.count()).event_id
        loop = asyncio.get_running_loop()
        deadline = loop.time() + DEADLINE_S
        while await self.exists(run_id):
            left_s = deadline - loop.time()
            if left_s <= 0:
                pytest.fail(f"run {run_id} was not dropped within {DEADLINE_S} s: {await self.row(run_id)}")
            after = (await self.kernel.feed.wait_after(after, Filter(run=run_id), timeout_s=left_s)).last

    async def is_idle(self) -> None:
        """Wait until no run of any kind is live."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + DEADLINE_S
        while True:
            counts = await self.store.count()
            live = sum(number for state, number in counts.states.items() if state not in FINAL)
            if live == 0:
                return
            left_s = deadline - loop.time()
            if left_s <= 0:
                pytest.fail(f"{live} runs have not ended after {DEADLINE_S} s: {counts.states}")
            await self.kernel.feed.wait_after(counts.event_id, timeout_s=left_s)


@asynccontextmanager
async def host(settings: Settings, store: Store | None = None) -> AsyncIterator[Rig]:
    """A host that is opened and, at the end, closed in a hurry."""
    rig = Rig(settings, store)
    await rig.parts.open()
    try:
        yield rig
    finally:
        await close(rig)


async def close(rig: Rig, *, in_a_hurry: bool = True) -> None:
    """Stop a host; harmless for one that was stopped by the test."""
    hurry = asyncio.Event()
    if in_a_hurry:
        hurry.set()
    await rig.parts.close(hurry)


async def within(work: Awaitable[T], what: str) -> T:
    """Wait for something that must come; say what it was if it does not."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            return await work
    except TimeoutError:
        pytest.fail(f"{what}: not within {DEADLINE_S} s")


# -- wishes -----------------------------------------------------------------------------------------------------------


def a_run(action: Action | None = None, **more: Any) -> NewRun:
    more.setdefault("scope", "shop")
    more.setdefault("name", "sync")
    return NewRun(action=Command(("/bin/true",)) if action is None else action, **more)


def a_command(*argv: str, **more: Any) -> NewRun:
    return a_run(Command(argv), **more)


def a_script(script: str, **more: Any) -> NewRun:
    return a_run(Shell(script), **more)


def a_call(function: str, args: Sequence[Any] | Mapping[str, Any] | None = None, **more: Any) -> NewRun:
    """A call of a function of the module `work`."""
    bodies = () if args is None else (Body("args", msgspec.json.encode(args)),)
    isolation = more.pop("isolation", "process")
    return a_run(PythonCall(f"work:{function}", isolation), bodies=bodies, **more)


class Latch:
    """Holds commands and calls up until the test opens it: they wait for a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def command(self, **more: Any) -> NewRun:
        return a_script(f"while [ ! -e '{self.path}' ]; do sleep 0.01; done", **more)

    def call(self, **more: Any) -> NewRun:
        return a_call("wait_for", [str(self.path)], **more)

    async def call_begun(self) -> None:
        """A call that was given to a child which has not begun it is given to another if that one dies."""
        begun = self.path.with_name(self.path.name + ".begun")

        async def there() -> None:
            while not begun.exists():
                await asyncio.sleep(0.01)

        await within(there(), "the call begins")

    def open(self) -> None:
        self.path.touch()


class Meddler:
    """The real store, with a place where a test may hold up, count or refuse what goes through `apply`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.real = SqliteStore(folder)
        self.calls: list[tuple[int, int]] = []  # batches and claims of each call
        self.before: Callable[[Sequence[Batch], Sequence[Claim]], Awaitable[None]] | None = None
        self.after: Callable[[Applied], Awaitable[None]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    async def apply(self, batches: Sequence[Batch], claims: Sequence[Claim], now_ms: int) -> Applied:
        self.calls.append((len(batches), len(claims)))
        if self.before is not None:
            await self.before(batches, claims)
        applied = await self.real.apply(batches, claims, now_ms)
        if self.after is not None:
            await self.after(applied)
        return applied

    def as_store(self) -> Store:
        return cast(Store, self)


def events_of(events: Sequence[AnyEvent], run_id: str) -> list[AnyRunEvent]:
    return [event for event in events if getattr(event, "run", None) == run_id]  # type: ignore[misc]
