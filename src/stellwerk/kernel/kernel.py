"""The kernel's verbs: what a door may ask for. Each is a use of one loop: read → decide → commit → wake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from stellwerk.core import gates as gate_rules
from stellwerk.core.batch import (
    ROWS_PER_BUNCH,
    AlreadyLive,
    Batch,
    Committed,
    DropGate,
    PutGate,
    PutRecord,
    Record,
)
from stellwerk.core.errors import Clash, NotFound, Unavailable
from stellwerk.core.events import GateOpened, GateShut
from stellwerk.core.facts import Facts, Loaded
from stellwerk.core.gates import Gate, GateKind, Reason, Surroundings
from stellwerk.core.logs import LogPage, LogQuery
from stellwerk.core.queries import Counts, RunPage, RunQuery
from stellwerk.core.run import FINAL, LIVE, Body, Parent, Run, State
from stellwerk.dispatch.protocol import Dispatch
from stellwerk.kernel import submit as submitting
from stellwerk.kernel.committer import Committer
from stellwerk.kernel.env import Env
from stellwerk.kernel.feed import Feed, Filter
from stellwerk.kernel.ids import Numbers
from stellwerk.kernel.submit import Idempotency, NewRun, Submitted
from stellwerk.kernel.turns import CALM_TRIES, CHORE, TRIES_MAX, Cancel, Edit, Settle, Turn, Turner
from stellwerk.store.protocol import Store

Answer = TypeVar("Answer")
Decide = Callable[[Loaded, int], tuple[Batch | None, Answer]]


class Unpark(Struct, frozen=True, tag="unpark"):
    """A chore: runs parked under a key whose gate has opened; `left` is how many there can be at most.

    What another gate of the same key still holds is parked again by the next claim, and must not be met for ever.
    """

    key: str
    left: int | None = None


class BulkVerb(Struct, frozen=True, tag="bulk"):
    """A chore: cancel or rerun everything that a filter finds, from the newest to the oldest."""

    verb: str
    actor: str
    query: RunQuery
    reason: str = ""


class Bulk(Struct, frozen=True):
    """The answer to a verb on many runs; `ids` are the first 1,000."""

    count: int
    ids: tuple[str, ...]
    chore: str | None
    event_id: int


class RunSeen(Struct, frozen=True):
    """A run with its result, true at `event_id`."""

    run: Run
    result: bytes | None
    event_id: int


class Slots(Struct, frozen=True):
    """What `why` and `/health` want to know of the workers of this host."""

    slots: int | None
    busy: int
    stuck: str | None = None


class Kernel:
    """Doors see this and nothing behind it."""

    def __init__(self, store: Store, dispatch: Dispatch, env: Env, host_id: str) -> None:
        self.store = store
        self.env = env
        self.host_id = host_id
        self.feed = Feed(store)
        self.committer = Committer(store, env, self.feed, dispatch)
        self.numbers = Numbers(store, self.committer)
        self.turner = Turner(store, self.committer, dispatch, env)
        self.slots_of: Callable[[Run], Slots] = lambda _run: Slots(None, 0)
        self._log_followers: dict[str, set[asyncio.Future[None]]] = {}

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def change(self, facts: Facts, decide: Decide[Answer]) -> tuple[Answer, int]:
        """Read, decide, commit, again after a conflict. Answers what `decide` said, and the EventId it is true at."""
        for tries in range(TRIES_MAX):
            if tries >= CALM_TRIES:
                await asyncio.sleep(self.env.chance() * 0.01 * tries)
            loaded = await self.store.load(facts)
            batch, answer = decide(loaded, self.env.now_ms())
            if batch is None:
                return answer, loaded.event_id
            (receipt,) = await self.committer.commit([batch])
            if isinstance(receipt, Committed):
                return answer, receipt.event_id
        raise Unavailable("what you want to change changes too fast; try again")

    # -- runs ---------------------------------------------------------------------------------------------------------

    async def submit(self, wanted: Sequence[NewRun], actor: str, idempotency: Idempotency | None = None) -> Submitted:
        """Add runs, all or nothing; entries whose live key is taken answer with the live run's id."""
        numbered = sum(new.numbered for new in wanted)
        facts = submitting.facts_of(wanted, idempotency)
        for tries in range(TRIES_MAX):
            if tries >= CALM_TRIES:
                await asyncio.sleep(self.env.chance() * 0.01 * tries)
            loaded = Loaded(0)
            if facts is not None:
                loaded = await self._load_with_holders(facts, wanted)
                before = submitting.remembered(loaded, idempotency)
                if before is not None:
                    return before
            await self.numbers.reserve(numbered)
            # Drawn anew for every try, and without a pause before the commit: numbers rise in order of commit.
            ids = [self._new_id(new) for new in wanted]
            batch, answers = submitting.decide(wanted, ids, loaded, idempotency, self.env.now_ms(), actor)
            if not batch.adds and not batch.records:
                return Submitted(answers, loaded.event_id)
            (receipt,) = await self.committer.commit([batch])
            if isinstance(receipt, Committed):
                return Submitted(answers, receipt.event_id)
            if isinstance(receipt, AlreadyLive) or facts is not None:
                continue
            raise Clash(f"there is already a run {receipt.row[1]}")
        raise Unavailable("the live keys or parents of this request change too fast; try again")

    def _new_id(self, new: NewRun) -> str:
        if new.run_id is not None:
            return new.run_id
        return self.numbers.draw() if new.numbered else self.env.new_id()

    async def _load_with_holders(self, facts: Facts, wanted: Sequence[NewRun]) -> Loaded:
        """Holders of live keys may themselves be parents of other entries: then their rows are needed too."""
        loaded = await self.store.load(facts)
        if loaded.holders and any(isinstance(parent, int) for new in wanted for parent in new.parents):
            runs = tuple({*facts.runs, *loaded.holders.values()})
            loaded = await self.store.load(msgspec.structs.replace(facts, runs=runs))
        return loaded

    async def run(self, run_id: str) -> RunSeen:
        """A run and its result."""
        loaded = await self.store.load(Facts(runs=(run_id,), bodies=((run_id, "result"),)))
        run = loaded.runs.get(run_id)
        if run is None:
            raise NotFound(f"there is no run {run_id}")
        return RunSeen(run, loaded.bodies.get((run_id, "result")), loaded.event_id)

    async def find_runs(self, query: RunQuery) -> RunPage:
        return await self.store.find_runs(query)

    async def count(self) -> Counts:
        return await self.store.count()

    async def cancel(self, run_id: str, actor: str, reason: str = "cancelled by request") -> int:
        """End a run that has not started, ask for the end of one that has. Answers the EventId."""
        seen = await self.run(run_id)
        return await self._one_turn(Cancel(seen.run, actor, reason), seen.event_id)

    async def edit(self, run_id: str, actor: str, priority: int | None, due_ms: int | None) -> int:
        """Change priority or due time while it waits."""
        seen = await self.run(run_id)
        return await self._one_turn(Edit(seen.run, actor, priority, due_ms), seen.event_id)

    async def settle(self, run_id: str, actor: str, succeeded: bool, reason: str) -> int:
        """End a run that needs no worker, such as an approval."""
        seen = await self.run(run_id)
        return await self._one_turn(Settle(seen.run, actor, succeeded, reason), seen.event_id)

    async def _one_turn(self, turn: Turn, stamp: int) -> int:
        (turned,) = await self.turner.turn([turn])
        if turned is None:
            raise NotFound(f"there is no run {turn.run.id}")
        return turned.event_id or stamp

    async def rerun(self, run_id: str, actor: str) -> Submitted:
        """A new run like an old one that has ended, linked to it."""
        seen = await self.run(run_id)
        if seen.run.state in LIVE:
            raise Clash(f"run {run_id} is {seen.run.state}; only a run that has ended can be rerun")
        wanted = await self.again([seen.run])
        if not wanted:
            raise NotFound(f"there is no run {run_id}")
        return await self.submit(wanted, actor)

    async def again(self, runs: Sequence[Run]) -> list[NewRun]:
        """Requests that repeat old runs: same work and keys, no parents, due now; without those dropped meanwhile."""
        wanted = tuple((run.id, ref.key) for run in runs for ref in run.spec.inputs)
        bodies: Mapping[tuple[str, str], bytes] = {}
        if wanted:
            bodies = (await self.store.load(Facts(bodies=wanted))).bodies
        there = [run for run in runs if all((run.id, ref.key) in bodies for ref in run.spec.inputs)]
        return [_again(run, bodies) for run in there]

    # -- many runs ----------------------------------------------------------------------------------------------------

    async def bulk(self, verb: str, query: RunQuery, actor: str, *, dry_run: bool, reason: str = "") -> Bulk:
        """Cancel or rerun all that a filter finds: up to 1,000 at once, more as a chore."""
        states = (query.states or frozenset(State)) & (LIVE if verb == "cancel" else FINAL)
        if not states:
            return Bulk(0, (), None, (await self.count()).event_id)
        query = msgspec.structs.replace(query, states=states, limit=ROWS_PER_BUNCH, before=None)
        page = await self.store.find_runs(query)
        ids = tuple(run.id for run in page.runs)
        if page.before is None:
            event_id = page.event_id
            if not dry_run and page.runs:
                event_id = await self._bunch(verb, page.runs, actor, reason) or event_id
            return Bulk(len(ids), ids, None, event_id)
        count = len(ids) + await self._count_after(query, page.before)
        if dry_run:
            return Bulk(count, ids, None, page.event_id)
        key = self.env.new_id()
        first = max(run.added for run in page.runs) + 1  # runs added from now on are not meant
        body = msgspec.json.encode(BulkVerb(verb, actor, msgspec.structs.replace(query, before=first), reason))
        put = PutRecord(Record(CHORE, f"bulk/{key}", 1, body, verb, self.env.now_ms()))
        _, event_id = await self.change(Facts(), lambda _loaded, _now_ms: (Batch(records=(put,)), None))
        return Bulk(count, ids, key, event_id)

    async def _bunch(self, verb: str, runs: Sequence[Run], actor: str, reason: str) -> int:
        if verb == "rerun":
            return (await self.submit(await self.again(runs), actor)).event_id
        turned = await self.turner.turn([Cancel(run, actor, reason, in_bulk=True) for run in runs])
        return max((one.event_id for one in turned if one is not None), default=0)

    async def _count_after(self, query: RunQuery, before: int | None) -> int:
        count = 0
        while before is not None:
            page = await self.store.find_runs(msgspec.structs.replace(query, before=before, limit=10_000))
            count += len(page.runs)
            before = page.before
        return count

    # -- gates --------------------------------------------------------------------------------------------------------

    async def gates(self) -> tuple[tuple[Gate, ...], int]:
        loaded = await self.store.load(Facts(gates=True))
        return loaded.gates, loaded.event_id

    async def shut(self, gate: Gate) -> tuple[Gate, int]:
        """Put a gate, or change the one of the same key and kind."""

        def decide(loaded: Loaded, now_ms: int) -> tuple[Batch, Gate]:
            version = next((old.version for old in loaded.gates if (old.key, old.kind) == (gate.key, gate.kind)), 0)
            put = msgspec.structs.replace(gate, version=version + 1, at_ms=now_ms)
            event = GateShut(
                gate_event_key(gate.key),
                gate.actor,
                now_ms,
                gate.key,
                gate.kind,
                gate.reason,
                gate.floor,
                gate.limit,
                gate.until_ms,
                gate.exempt,
            )
            # A changed gate may let through what its old form had parked.
            owed = (owed_unpark(gate.key, f"{version}", now_ms),) if version else ()
            return Batch(gates=(PutGate(put),), records=owed, events=(event,)), put

        return await self.change(Facts(gates=True), decide)

    async def unshut(self, key: str, kind: GateKind, actor: str, reason: str = "") -> int:
        """Take a gate away; what was parked under it comes back in bunches."""

        def decide(loaded: Loaded, now_ms: int) -> tuple[Batch, None]:
            found = next((old for old in loaded.gates if (old.key, old.kind) == (key, kind)), None)
            if found is None:
                raise NotFound(f"there is no {kind} at {key}")
            return open_gate(found, actor, reason, now_ms), None

        _, event_id = await self.change(Facts(gates=True), decide)
        return event_id

    # -- why ----------------------------------------------------------------------------------------------------------

    async def why(self, run_id: str) -> tuple[list[Reason], int]:
        """Why this run is where it is: asked of the functions that decide."""
        loaded = await self.store.load(Facts(runs=(run_id,), gates=True, running=True))
        run = loaded.runs.get(run_id)
        if run is None:
            raise NotFound(f"there is no run {run_id}")
        parents: list[tuple[Parent, State | None]] = []
        if run.waits_for > 0:
            names = tuple(parent.run_id for parent in run.spec.parents)
            rows = (await self.store.load(Facts(runs=names))).runs
            parents = [(p, rows[p.run_id].state if p.run_id in rows else None) for p in run.spec.parents]
        counts = await self.store.count()
        here = self.slots_of(run)
        around = Surroundings(
            gates=loaded.gates,
            running=loaded.running,
            parents=parents,
            slots=here.slots,
            busy=here.busy,
            ahead=counts.queues.get((run.spec.queue, State.READY), 0),
            stuck=here.stuck,
            claims_refused=self.store.foreign() or self.committer.trouble,
        )
        return gate_rules.why(run, around, self.env.now_ms()), loaded.event_id

    # -- logs ---------------------------------------------------------------------------------------------------------

    async def logs_after(self, query: LogQuery, timeout_s: float) -> tuple[LogPage, RunSeen]:
        """Lines of a run after a line: at once if there are any or it has ended, else the first that come in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            waiter: asyncio.Future[None] = loop.create_future()
            waiting = self._log_followers.setdefault(query.run_id, set())
            waiting.add(waiter)
            try:
                # Run first, then lines: if it has ended now, all its lines are there.
                seen = await self.run(query.run_id)
                page = await self.store.read_logs(query)
                left_s = deadline - loop.time()
                if page.lines or seen.run.state in FINAL or page.examined < page.last_line:
                    return page, seen
                if left_s <= 0 or self.feed.closed:
                    return page, seen
                query = msgspec.structs.replace(query, after_line=max(query.after_line, page.examined))
                ended = asyncio.ensure_future(self._ended(query.run_id, seen.event_id, left_s))
                await asyncio.wait([waiter, ended], return_when=asyncio.FIRST_COMPLETED)
                ended.cancel()
            finally:
                waiting.discard(waiter)
                if not waiting:
                    self._log_followers.pop(query.run_id, None)

    async def _ended(self, run_id: str, after: int, timeout_s: float) -> None:
        await self.feed.wait_after(after, Filter(run=run_id), limit=1, timeout_s=timeout_s)

    def logs_came(self, run_ids: Sequence[str]) -> None:
        """Lines of these runs are in the store: tell who waits."""
        for run_id in run_ids:
            for waiter in self._log_followers.get(run_id, ()):
                if not waiter.done():
                    waiter.set_result(None)

    # -- the store ----------------------------------------------------------------------------------------------------

    async def adopt(self, actor: str) -> tuple[str, int]:
        """An operator says that a store which this host did not know is the right one."""
        if self.store.foreign() is None:
            raise Clash("this store is the one that the host knows; there is nothing to adopt")
        await self.store.adopt(self.env.now_ms(), actor)
        await self.feed.look()
        self.committer.look()
        return await self.store.epoch(), self.feed.last


def gate_event_key(gate: str) -> str:
    """The `key` of a gate's events, so that a prefix filter finds them with the runs they hold."""
    kind, _, rest = gate.partition(":")
    return rest if kind in ("job", "scope") and rest else gate


def owed_unpark(key: str, mark: str, now_ms: int) -> PutRecord:
    """The chore that brings parked runs back."""
    body = msgspec.json.encode(Unpark(key))
    return PutRecord(Record(CHORE, f"unpark/{key}/{now_ms}/{mark}", 1, body, "unpark", now_ms))


def open_gate(gate: Gate, actor: str, reason: str, now_ms: int) -> Batch:
    """Take this gate away: one row, one event, and the parked runs owed."""
    event = GateOpened(gate_event_key(gate.key), actor, now_ms, gate.key, gate.kind, reason)
    return Batch(
        gates=(DropGate(gate.key, gate.kind, gate.version),),
        records=(owed_unpark(gate.key, gate.kind, now_ms),),
        events=(event,),
    )


def _again(run: Run, bodies: Mapping[tuple[str, str], bytes]) -> NewRun:
    spec = run.spec
    return NewRun(
        scope=spec.scope,
        name=spec.name,
        action=spec.action,
        priority=run.priority,
        live_key=spec.live_key,
        retry=spec.retry,
        timeout_ms=spec.timeout_ms,
        keep_ms=spec.keep_ms,
        labels=spec.labels,
        env=spec.env,
        cwd=spec.cwd,
        bodies=tuple(Body(ref.key, bodies[run.id, ref.key]) for ref in spec.inputs),
        queue=spec.queue,
        door=spec.door,
        more_keys=spec.keys[4:],
        rerun_of=run.id,
    )
