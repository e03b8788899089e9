"""What clients do: they submit, cancel, edit, rerun, shut and open gates, read and follow, on any host that answers.

An answer that did not come leaves a client in doubt. It may ask again with the same idempotency key; else it never
counts on what it asked for.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from stellwerk.core.errors import Clash, NotFound, Refused, StellwerkError, Unavailable
from stellwerk.core.gates import Gate, GateKind
from stellwerk.core.queries import RunQuery
from stellwerk.core.retry import RetryPolicy
from stellwerk.core.run import Body, Check, Command, Nothing, PythonCall, Shell, Signal, State
from stellwerk.kernel.feed import EVERYTHING, Filter, NonEmpty, Torn
from stellwerk.kernel.submit import Idempotency, NewRun, Submitted
from tests.simulation.checkers import ACKS, FOLLOWED, READS, REPEATS, Violation
from tests.simulation.world import HostGone, SimHost, World

Answer = TypeVar("Answer")

SCOPES = ("a", "b")
NAMES = ("x", "y", "fails")
LIVE_KEYS = ("k1", "k2", "k3")
GATE_KEYS = ("*", "queue:default", "queue:other", "scope:a", "scope:b", "job:a/x", "job:b/y")
LIMIT_KEYS = ("queue:default", "scope:a", "scope:b", "job:a/x", "job:a/y")
NO_ANSWER = (Unavailable, HostGone, OSError)


class Follower:
    """Follows the feed, remembers what it saw, and goes on at any host after any trouble."""

    def __init__(self, world: World, name: str, wanted: Filter) -> None:
        self._world = world
        self._chance = random.Random(f"{world.seed}/follower/{name}")
        self.name = name
        self.wanted = wanted
        self.stretches: list[tuple[int, int, list[int]]] = [(0, 0, [])]  # after, until, what was seen
        self.ended = False

    @property
    def after(self) -> int:
        return self.stretches[-1][1]

    async def follow(self) -> None:
        while True:
            await self.step(self._chance.choice(self._world.hosts), self._chance.uniform(0.0, 4.0))
            await asyncio.sleep(self._chance.choice((0.0, 0.01, 1.0)))

    async def step(self, host: SimHost, timeout_s: float) -> None:
        limit = self._chance.choice((1, 3, 1_000))
        asked = self.after
        try:
            answer = await host.call(host.kernel.feed.wait_after(asked, self.wanted, limit=limit, timeout_s=timeout_s))
        except NO_ANSWER:
            return
        begin, _, seen = self.stretches[-1]
        if isinstance(answer, Torn):
            forgotten = (await self._world.store.read_journal(0, 1)).forgotten
            if asked >= forgotten and asked <= self._world.watch.last:
                self._world.watch.wrong(FOLLOWED, f"{self.name} was torn at {asked}; forgotten is {forgotten}")
            stamp = (await self._world.store.count()).event_id
            self.stretches.append((stamp, stamp, []))
            return
        events = [stamped.event_id for stamped in answer.events] if isinstance(answer, NonEmpty) else []
        if answer.last < asked or any(event_id > answer.last for event_id in events):
            text = f"{self.name} asked after {asked} and is told to go on from {answer.last}"
            self._world.watch.wrong(FOLLOWED, text)
        self.stretches[-1] = (begin, answer.last, seen + events)


class Workload:
    """All clients of a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.followers = [Follower(world, "all", EVERYTHING), Follower(world, "scope a", Filter(prefix="a/"))]
        self.followers.append(Follower(world, "starts", Filter(types=frozenset({"RunStarted", "RunSucceeded"}))))
        self._left = world.shape.runs
        self._known: list[str] = []
        self._answers: dict[str, tuple[str, ...]] = {}
        self._clients: list[asyncio.Task[None]] = []
        self._following: list[asyncio.Task[None]] = []
        self._settling: asyncio.Task[None] | None = None

    def start(self) -> None:
        for number in range(self.world.shape.clients):
            client = _Client(self, random.Random(f"{self.world.seed}/client/{number}"), f"client-{number}")
            self._clients.append(asyncio.create_task(client.live()))
        self._following = [asyncio.create_task(follower.follow()) for follower in self.followers]

    def done(self) -> bool:
        for client in self._clients:
            if client.done():
                client.result()
        return all(client.done() for client in self._clients)

    def take(self, wanted: int) -> int:
        """How many of these runs may still be submitted."""
        taken = min(wanted, self._left)
        self._left -= taken
        return taken

    @property
    def left(self) -> int:
        return self._left

    @property
    def known(self) -> list[str]:
        return self._known

    def submitted(self, answer: Submitted, key: str | None) -> None:
        ids = tuple(one.id for one in answer.runs)
        self.world.watch.acknowledged(ids, answer.event_id)
        self._known.extend(one.id for one in answer.runs if one.new)
        if key is not None:
            before = self._answers.setdefault(key, ids)
            if before != ids:
                self.world.watch.wrong(REPEATS, f"{key} was answered with {before}, and then with {ids}")

    def check_repeats(self) -> None:
        """No key made more runs than its answer names."""
        made: dict[str, set[str]] = {}
        for story in self.world.watch.stories.values():
            key = story.spec.labels.get("request")
            if key is not None:
                made.setdefault(key, set()).add(story.run)
        for key, ids in self._answers.items():
            extra = {run for run in made.get(key, set()) if self.world.watch.stories[run].spec.rerun_of is None}
            if not extra <= set(ids):
                raise Violation(REPEATS, f"{key} was answered with {ids}, but made {sorted(extra)}")

    async def open_everything(self, host: SimHost) -> None:
        """All gates are opened, all signals given."""
        gates, _ = await host.call(host.kernel.gates())
        for gate in gates:
            try:
                await host.call(host.kernel.unshut(gate.key, gate.kind, "healer"))
            except NotFound:
                continue  # its time was over just now
        self._settling = asyncio.create_task(self._settle_signals(host))

    async def _settle_signals(self, host: SimHost) -> None:
        """Approvals may become ready only after their parents have ended: look again and again."""
        while True:
            page = await host.call(host.kernel.find_runs(RunQuery(states=frozenset({State.WAITING, State.READY}))))
            for run in page.runs:
                if isinstance(run.spec.action, Signal) and run.waits_for == 0:
                    try:
                        await host.call(host.kernel.settle(run.id, "healer", True, "approved"))
                    except Refused:
                        continue  # someone else was faster
            await asyncio.sleep(1.0)

    async def finish_following(self) -> None:
        """Followers read up to the end, on every host."""
        for task in self._following:
            task.cancel()
        for follower in self.followers:
            for host in self.world.hosts:
                for _ in range(2_000):
                    before = follower.after
                    await follower.step(host, 0.0)
                    if follower.after == before:
                        break
            if follower.after < self.world.watch.last:
                text = f"{follower.name} came to {follower.after}, the journal to {self.world.watch.last}"
                self.world.watch.wrong(FOLLOWED, text)


class _Client:
    """One client, with its own dice."""

    def __init__(self, workload: Workload, chance: random.Random, name: str) -> None:
        self._workload = workload
        self._world = workload.world
        self._chance = chance
        self._name = name
        self._keys = 0
        self._verbs: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (10, self._submit),
            (3, self._cancel),
            (3, self._edit),
            (1, self._rerun),
            (1, self._bulk),
            (3, self._shut),
            (3, self._unshut),
            (1, self._settle),
            (4, self._read),
        ]

    async def live(self) -> None:
        weights = [weight for weight, _ in self._verbs]
        verbs = [verb for _, verb in self._verbs]
        while self._workload.left > 0 and self._world.faults.on:
            (verb,) = self._chance.choices(verbs, weights)
            await verb()
            await asyncio.sleep(self._chance.choice((0.0, 0.05, 0.3, 1.0)))

    async def _ask(self, work: Callable[[SimHost], Coroutine[Any, Any, Answer]]) -> Answer | None:
        """Ask any host. None: refused, or no answer."""
        host = self._chance.choice(self._world.hosts)
        if not host.up:
            await asyncio.sleep(0.2)
            return None
        try:
            return await host.call(work(host))
        except (Refused, *NO_ANSWER):
            return None

    # -- runs ---------------------------------------------------------------------------------------------------------

    async def _submit(self) -> None:
        count = self._workload.take(self._chance.choice((1, 1, 1, 2, 5, 9)))
        if count == 0:
            return
        key = None
        if self._chance.random() < 0.4:
            self._keys += 1
            key = f"{self._name}-{self._keys}"
        wanted = [self._new(place, count, key) for place in range(count)]
        idempotency = None if key is None else Idempotency(key, f"digest of {key}")
        for _ in range(1 if key is None else self._chance.choice((1, 2, 4))):
            answer = await self._try_submit(wanted, idempotency)
            if answer is not None:
                self._workload.submitted(answer, key)
        if key is not None and self._chance.random() < 0.1:
            await self._other_wish(wanted, key)

    async def _try_submit(self, wanted: list[NewRun], idempotency: Idempotency | None) -> Submitted | None:
        host = self._chance.choice(self._world.hosts)
        try:
            return await host.call(host.kernel.submit(wanted, self._name, idempotency))
        except NO_ANSWER:
            return None
        except Clash as error:
            self._world.watch.wrong(ACKS, f"a plain submit was refused: {error}")
        except Refused:
            return None  # a parent is gone, or was never there
        return None

    async def _other_wish(self, wanted: list[NewRun], key: str) -> None:
        """The same key with another wish is refused, if the first was heard."""
        try:
            host = self._chance.choice(self._world.hosts)
            answer = await host.call(host.kernel.submit(wanted, self._name, Idempotency(key, "another digest")))
        except (Refused, *NO_ANSWER):
            return
        if key in self._workload._answers and answer.repeated:
            self._world.watch.wrong(REPEATS, f"{key} was answered although the wish was another")

    def _new(self, place: int, count: int, key: str | None) -> NewRun:
        chance = self._chance
        scope, name = chance.choice(SCOPES), chance.choices(NAMES, (5, 5, 1))[0]
        parents: list[str | int] = []
        if count > 1 and chance.random() < 0.5:
            parents.extend(chance.sample(range(count), k=min(place, chance.randrange(1, 4))) if place else [])
            parents = [parent for parent in parents if isinstance(parent, int) and parent < place]
        if self._workload.known and chance.random() < 0.3:
            parents.append(chance.choice(self._workload.known[-12:]))
        draw = chance.random()
        return NewRun(
            scope=scope,
            name=name,
            action=self._action(),
            priority=chance.choice((1, 100, 100, 500, 1_000)),
            due_ms=self._moment(8_000) if draw < 0.2 else None,
            live_key=chance.choice(LIVE_KEYS) if chance.random() < 0.25 else None,
            parents=tuple(parents),
            when=chance.choice(("succeeded", "succeeded", "failed", "ended")),
            retry=self._retry(),
            timeout_ms=chance.choice((None, None, 1_000, 10_000)),
            keep_ms=chance.choice((86_400_000, 86_400_000, 86_400_000, None, 0, 3_000)),
            labels={} if key is None else {"request": key},
            bodies=(Body("stdin", b"hello"),) if chance.random() < 0.1 else (),
            queue=chance.choices(("default", "other"), (3, 1))[0],
        )

    def _action(self) -> Any:
        draw = self._chance.random()
        if draw < 0.4:
            return Command(("true",))
        if draw < 0.55:
            return Shell("true")
        if draw < 0.75:
            return PythonCall("module:function")
        if draw < 0.88:
            return PythonCall("module:function", "thread")
        if draw < 0.94:
            return Nothing()
        if draw < 0.97:
            return Signal()
        at_s = self._world.loop.time() + self._chance.uniform(0.0, 10.0)
        return Check("file", f"{at_s:.3f}", 700, self._chance.choice((None, 3_000)))

    def _retry(self) -> RetryPolicy | None:
        draw = self._chance.random()
        if draw < 0.5:
            return None
        if draw < 0.6:
            return RetryPolicy(0)
        return RetryPolicy(self._chance.randrange(1, 4), self._chance.choice((0, 100, 2_000)), 2.0, 0.3)

    def _moment(self, within_ms: int) -> int:
        return self._world.hosts[0].kernel.env.now_ms() + self._chance.randrange(-500, within_ms)

    def _some_run(self) -> str | None:
        known = self._workload.known
        return self._chance.choice(known[-25:]) if known else None

    async def _cancel(self) -> None:
        run_id = self._some_run()
        if run_id is not None:
            await self._ask(lambda host: host.kernel.cancel(run_id, self._name))

    async def _edit(self) -> None:
        run_id = self._some_run()
        if run_id is None:
            return
        priority = self._chance.choice((None, 1, 999))
        due_ms = self._moment(4_000) if self._chance.random() < 0.6 else None
        await self._ask(lambda host: host.kernel.edit(run_id, self._name, priority, due_ms))

    async def _rerun(self) -> None:
        run_id = self._some_run()
        if run_id is not None:
            answer = await self._ask(lambda host: host.kernel.rerun(run_id, self._name))
            if answer is not None:
                self._workload.submitted(answer, None)

    async def _settle(self) -> None:
        run_id = self._some_run()
        succeeded = self._chance.random() < 0.7
        if run_id is not None:
            await self._ask(lambda host: host.kernel.settle(run_id, self._name, succeeded, "decided"))

    async def _bulk(self) -> None:
        """Rerun what failed is rare: it must not keep the world busy for ever."""
        query = RunQuery(scope=self._chance.choice(SCOPES), name=self._chance.choice(NAMES))
        verb = "cancel"
        if self._chance.random() < 0.3:
            verb, query = "rerun", RunQuery(scope="a", name="fails")
        dry_run = self._chance.random() < 0.2
        await self._ask(lambda host: host.kernel.bulk(verb, query, self._name, dry_run=dry_run, reason="in bulk"))

    # -- gates --------------------------------------------------------------------------------------------------------

    async def _shut(self) -> None:
        chance = self._chance
        until_ms = self._moment(6_000) if chance.random() < 0.4 else None
        if chance.random() < 0.5:
            gate = Gate(chance.choice(LIMIT_KEYS), "limit", limit=chance.randrange(0, 3), until_ms=until_ms)
        else:
            kind: GateKind = chance.choice(("pause", "block", "hold"))
            floor = chance.choice((None, None, 200))
            exempt = ("a/y",) if chance.random() < 0.2 else ()
            gate = Gate(chance.choice(GATE_KEYS), kind, floor=floor, until_ms=until_ms, exempt=exempt)
        await self._ask(lambda host: host.kernel.shut(gate))

    async def _unshut(self) -> None:
        gates = sorted(self._world.watch.gates)
        if gates:
            key, kind = self._chance.choice(gates)
            await self._ask(lambda host: host.kernel.unshut(key, kind, self._name))  # type: ignore[arg-type]

    # -- reads --------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        draw = self._chance.random()
        watch = self._world.watch
        if draw < 0.4:
            await self._read_run()
        elif draw < 0.6:
            counts = await self._ask(lambda host: host.kernel.count())
            if counts is not None:
                watch.counted(dict(counts.states), counts.event_id)
        elif draw < 0.8:
            page = await self._ask(lambda host: host.kernel.find_runs(RunQuery(limit=1_000)))
            if page is not None:
                for run in page.runs:
                    watch.read(run, page.event_id)
        else:
            found = await self._ask(lambda host: host.kernel.gates())
            if found is not None:
                watch.gates_read(*found)

    async def _read_run(self) -> None:
        run_id = self._some_run()
        if run_id is None:
            return
        host = self._chance.choice(self._world.hosts)
        try:
            seen = await host.call(host.kernel.run(run_id))
            self._world.watch.read(seen.run, seen.event_id)
            await host.call(host.kernel.why(run_id))
        except NotFound:
            if not self._world.watch.stories[run_id].dropped:
                self._world.watch.wrong(READS, f"run {run_id} was acknowledged and is not found")
        except (StellwerkError, *NO_ANSWER):
            return
