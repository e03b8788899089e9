"""Random operations from a seed, each batch a decision of the core on the rows as they are.

What a kernel would do, without the kernel: adds with edges, ends that release or cancel children, edits, gates,
records, drops, and now and then a batch that is too late. Applied to two stores,
they must give the same answers twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import get_args

from msgspec import Struct, structs

from stellwerk.core.batch import (
    AddRun,
    Batch,
    Claim,
    DropGate,
    DropRecord,
    DropRun,
    Edge,
    PutGate,
    PutRecord,
    Record,
    RowVersion,
    changed,
)
from stellwerk.core.dag import child_after, satisfied
from stellwerk.core.events import AnyEvent, AnyRunEvent, GateOpened, GateShut
from stellwerk.core.facts import Facts
from stellwerk.core.gates import Gate, GateKind
from stellwerk.core.logs import LogChunk, LogPiece
from stellwerk.core.queries import LeaseRef, Retention, RunQuery
from stellwerk.core.retry import RetryPolicy
from stellwerk.core.run import (
    FINAL,
    WORKERLESS,
    Action,
    Body,
    BodyRef,
    Check,
    Command,
    Failed,
    Lost,
    Nothing,
    Outcome,
    Parent,
    Returned,
    Run,
    Signal,
    State,
    Succeeded,
    When,
)
from stellwerk.core.run_machine import cancel, drop, edit, evolve, expire, finish, ready, settle
from stellwerk.store.protocol import Store
from tests.builders import ACTOR, NOW_MS, a_run, a_spec

QUEUES = ("default", "other")
SCOPES = ("s", "t")
NAMES = ("x", "y")
WORKERS = ("w1", "w2")
EXTRA_KEYS = ("chain:1", "chain:2")
GATE_KEYS = ("*", "queue:default", "scope:s", "scope:t", "job:s/x", *EXTRA_KEYS)
KINDS = ("thing", "other")
LIVE_KEYS = ("k1", "k2", "k3")
PRIORITIES = (1, 100, 100, 100, 500, 1_000)
RUNS_MAX = 60  # beyond that old ones are dropped rather than new ones added


class View(Struct):
    """The rows as the next batch will find them, if all batches before it stand."""

    runs: dict[str, Run]
    children: dict[str, dict[str, When]]
    gates: dict[tuple[str, str], Gate]
    records: dict[tuple[str, str], Record]

    def holder(self, live_key: str) -> str | None:
        return next((run.id for run in self.runs.values() if run.live_key == live_key), None)


async def view_of(store: Store) -> View:
    """All rows of a small store."""
    page = await store.find_runs(RunQuery(limit=10_000))
    ids = tuple(run.id for run in page.runs)
    loaded = await store.load(Facts(children_of=ids, kinds=KINDS, gates=True))
    children = {parent: {child.run.id: child.when for child in found} for parent, found in loaded.children.items()}
    gates: dict[tuple[str, str], Gate] = {(gate.key, gate.kind): gate for gate in loaded.gates}
    return View(
        {run.id: run for run in sorted(page.runs, key=lambda run: run.id)}, children, gates, dict(loaded.records)
    )


class Draft:
    """One batch in the making: rows evolve on a copy, and the view learns of them only with `done`."""

    def __init__(self, view: View, now_ms: int) -> None:
        self.view = view
        self.now_ms = now_ms
        self.events: list[AnyEvent] = []
        self.adds: dict[str, Run] = {}
        self.changes: dict[str, Run] = {}
        self.bodies: dict[str, tuple[Body, ...]] = {}
        self.edges: list[Edge] = []
        self.lease_ms: dict[str, int | None] = {}

    def add(self, run: Run, events: Sequence[AnyRunEvent]) -> None:
        self.adds[run.id] = run
        self.events.extend(events)

    def touch(self, run: Run) -> None:
        """The parent of a new edge."""
        self.changes[run.id] = self.row(run.id).with_(has_children=True)

    def happen(self, run: Run, events: Sequence[AnyRunEvent]) -> None:
        """Apply what was decided about a run, and all that follows for its children."""
        if not events:
            return
        after = run
        for event in events:
            after = evolve(after, event)
        self.changes[run.id] = after
        self.events.extend(events)
        ended = [after] if after.state in FINAL and run.state not in FINAL else []
        while ended:
            parent = ended.pop()
            for child_id, when in sorted(self.view.children.get(parent.id, {}).items()):
                found = child_after(parent, self.row(child_id), when, self.now_ms, ACTOR)
                if found is None:
                    continue
                child, child_events = found
                self.changes[child_id] = child
                self.events.extend(child_events)
                if child.state in FINAL:
                    ended.append(child)

    def row(self, run_id: str) -> Run:
        return self.changes.get(run_id) or self.view.runs[run_id]

    def done(self) -> Batch:
        changes = []
        for run in self.changes.values():
            change = changed(run, bodies=self.bodies.get(run.id, ()), lease_ms=self.lease_ms.get(run.id))
            changes.append(change)
            self.view.runs[run.id] = change.run
        for edge in self.edges:
            self.view.children.setdefault(edge.parent, {})[edge.child] = edge.when
        self.view.runs |= self.adds
        adds = tuple(AddRun(run, self.bodies.get(run.id, ())) for run in self.adds.values())
        return Batch(adds=adds, changes=tuple(changes), edges=tuple(self.edges), events=tuple(self.events))


class Operations:
    """A source of operations. The same seed and the same answers give the same operations."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_ms = NOW_MS
        self.made = 0
        self.old: list[Run] = []  # rows as they once were

    def tick(self) -> None:
        """Time goes on, stands still, or goes back a little."""
        self.now_ms += self.random.choice((0, 0, 1, 10, 200, 1_000, 3_000, -50))

    # -- changes ------------------------------------------------------------------------------------------------------

    async def call(self, store: Store) -> tuple[list[Batch], list[Claim]]:
        """Some batches, each decided on what the ones before it leave, and some claims."""
        view = await view_of(store)
        self.old.extend(self.random.sample(list(view.runs.values()), min(2, len(view.runs))))
        batches: list[Batch] = []
        for _ in range(self.random.choice((0, 1, 1, 2, 3))):
            batch = self._batch(view)
            if batch != Batch():
                batches.append(batch)
        if self.random.random() < 0.2:
            # At the end only: what follows a refused batch must not have been decided on it.
            batches.append(self._late(view))
        claims = [self._claim(view) for _ in range(self.random.choice((0, 0, 1, 1, 2)))]
        return batches, claims

    def _batch(self, view: View) -> Batch:
        weights: dict[Callable[[View], Batch], int] = {
            self._add: 30,
            self._end: 25,
            self._gate: 14,
            self._ready: 8,
            self._edit: 8,
            self._drop: 8,
            self._cancel: 7,
            self._expire: 6,
            self._record: 6,
            self._settle: 5,
            self._reject: 2,
            self._unpark: 2,
        }
        (choose,) = self.random.choices(list(weights), list(weights.values()))
        if choose == self._add and len(view.runs) > RUNS_MAX:
            choose = self._drop
        return choose(view)

    def _pick(self, runs: Sequence[Run]) -> Run | None:
        return self.random.choice(runs) if runs else None

    def _runs(self, view: View, *states: State) -> list[Run]:
        return [run for run in view.runs.values() if run.state in states]

    def _add(self, view: View) -> Batch:
        random = self.random
        draft = Draft(view, self.now_ms)
        for _ in range(random.choice((1, 1, 2, 3))):
            self._add_one(view, draft)
        refused = [run for run in draft.adds.values() if run.live_key and view.holder(run.live_key) is not None]
        keys = [run.live_key for run in draft.adds.values() if run.live_key]
        if refused or len(keys) != len(set(keys)):
            # Another holds the key: nothing may build on this batch, so the view does not learn of it.
            children = {parent: dict(found) for parent, found in view.children.items()}
            draft.view = structs.replace(view, runs=dict(view.runs), children=children)
        return draft.done()

    def _add_one(self, view: View, draft: Draft) -> None:
        random = self.random
        self.made += 1
        run_id = f"{random.choice('abc')}{self.made}"
        action: Action = random.choices(
            (Command(("true",)), Signal(), Nothing(), Check("until", "later")), (12, 1, 2, 1)
        )[0]
        bodies = [Body(key, random.randbytes(3)) for key in ("args", "stdin") if random.random() < 0.2]
        parents = self._parents(view, draft)
        live_key = random.choice(LIVE_KEYS) if random.random() < 0.2 else None
        spec = a_spec(
            scope=random.choice(SCOPES),
            name=random.choice(NAMES),
            queue=random.choice(QUEUES),
            action=action,
            created_ms=self.now_ms - random.choice((0, 0, 5)),
            keys=tuple(key for key in EXTRA_KEYS if random.random() < 0.2),
            parents=parents,
            bodies=bodies,
            labels={"team": random.choice(("red", "blue"))} if random.random() < 0.5 else {},
            keep_ms=random.choice((None, 0, 0, 500, 100_000)),
            retry=random.choice((None, None, RetryPolicy(2, 100), RetryPolicy(1))),
        )
        waiting_for = [parent for parent in parents if draft.row(parent.run_id).is_live]
        run, events = a_run(
            run_id,
            spec,
            priority=random.choice(PRIORITIES),
            due_ms=random.choice((None, None, self.now_ms - 5, self.now_ms + 5, self.now_ms + 2_000)),
            live_key=live_key,
            waits_for=len(waiting_for),
            now_ms=self.now_ms,
        )
        draft.add(run, events)
        draft.bodies[run_id] = tuple(bodies)
        for parent in waiting_for:
            draft.edges.append(Edge(parent.run_id, run_id, parent.when))
            draft.touch(draft.row(parent.run_id))

    def _parents(self, view: View, draft: Draft) -> list[Parent]:
        if self.random.random() < 0.6 or not view.runs:
            return []
        chosen = self.random.sample(sorted(view.runs), min(self.random.choice((1, 1, 2)), len(view.runs)))
        parents = [Parent(run_id, self.random.choice(get_args(When))) for run_id in chosen]
        return [parent for parent in parents if satisfied(parent.when, draft.row(parent.run_id).state) is not False]

    def _end(self, view: View) -> Batch:
        run = self._pick(self._runs(view, State.RUNNING))
        draft = Draft(view, self.now_ms)
        if run is None or run.worker is None:
            return draft.done()
        outcomes: tuple[Outcome, ...] = (Succeeded(exit_code=0), Failed("exit", "ä", 1), Lost(), Returned())
        outcome = self.random.choices(outcomes, (6, 3, 1, 1))[0]
        result: BodyRef | None = None
        if isinstance(outcome, Succeeded) and self.random.random() < 0.3:
            draft.bodies[run.id] = (Body("result", b"[1]"),)
            result = BodyRef("result", 3, "digest")
        chance = self.random.random()
        events = finish(run, run.attempt, run.worker, outcome, result=result, now_ms=self.now_ms, chance=chance)
        draft.happen(run, events)
        return draft.done()

    def _expire(self, view: View) -> Batch:
        draft = Draft(view, self.now_ms)
        for run in self._runs(view, State.RUNNING):
            draft.happen(draft.row(run.id), expire(draft.row(run.id), self.now_ms, 0.5, ACTOR))
            draft.lease_ms[run.id] = run.alarm_ms
        return draft.done()

    def _ready(self, view: View) -> Batch:
        draft = Draft(view, self.now_ms)
        for run in self._runs(view, State.WAITING):
            draft.happen(draft.row(run.id), ready(draft.row(run.id), self.now_ms, ACTOR))
        return draft.done()

    def _cancel(self, view: View) -> Batch:
        draft = Draft(view, self.now_ms)
        run = self._pick(self._runs(view, State.WAITING, State.READY, State.RUNNING))
        if run is not None:
            draft.happen(run, cancel(run, "not wanted", self.now_ms, ACTOR))
        return draft.done()

    def _edit(self, view: View) -> Batch:
        draft = Draft(view, self.now_ms)
        run = self._pick(self._runs(view, State.WAITING, State.READY))
        if run is not None:
            priority = self.random.choice((None, *PRIORITIES))
            due_ms = self.random.choice((None, self.now_ms, self.now_ms + 500))
            draft.happen(run, edit(run, priority, due_ms, self.now_ms, ACTOR))
        return draft.done()

    def _settle(self, view: View) -> Batch:
        draft = Draft(view, self.now_ms)
        waiting = self._runs(view, State.WAITING, State.READY)
        run = self._pick([run for run in waiting if isinstance(run.spec.action, WORKERLESS) and run.waits_for == 0])
        if run is not None:
            draft.happen(run, settle(run, self.random.random() < 0.7, "so it is", self.now_ms, ACTOR))
        return draft.done()

    def _drop(self, view: View) -> Batch:
        final = [run for run in view.runs.values() if drop(run, self.now_ms, ACTOR)]
        gone = self.random.sample(final, min(len(final), self.random.choice((1, 1, 3, 8))))
        for run in gone:
            del view.runs[run.id]
            view.children.pop(run.id, None)
        for children in view.children.values():
            for run in gone:
                children.pop(run.id, None)
        drops = tuple(DropRun(run.id, run.version) for run in gone)
        return Batch(drops=drops, events=tuple(event for run in gone for event in drop(run, self.now_ms, ACTOR)))

    def _reject(self, view: View) -> Batch:
        run = self._pick(list(view.runs.values()))
        if run is None:
            return Batch()
        events = finish(run, run.attempt + 1, "stranger", Succeeded(), result=None, now_ms=self.now_ms, chance=0.5)
        return Batch(events=tuple(events))

    def _gate(self, view: View) -> Batch:
        random = self.random
        key = random.choice(GATE_KEYS)
        kind: GateKind = random.choice(("pause", "limit", "limit"))
        old = view.gates.get((key, kind))
        unparks = (key,) if random.random() < 0.8 else ()
        if old is not None and random.random() < 0.6:
            del view.gates[key, kind]
            opened = GateOpened(key, ACTOR, self.now_ms, key, kind, "enough")
            return Batch(gates=(DropGate(key, kind, old.version),), unparks=unparks, events=(opened,))
        gate = Gate(
            key=key,
            kind=kind,
            version=1 if old is None else old.version + 1,
            floor=random.choice((None, 100, 600)) if kind == "pause" else None,
            limit=random.choice((0, 1, 2, 3)) if kind == "limit" else None,
            exempt=("s/x",) if random.random() < 0.2 else (),
            until_ms=random.choice((None, None, self.now_ms + 1_000)),
            actor=ACTOR,
            at_ms=self.now_ms,
        )
        view.gates[key, kind] = gate
        shut = GateShut(
            key, ACTOR, self.now_ms, key, kind, gate.reason, gate.floor, gate.limit, gate.until_ms, gate.exempt
        )
        return Batch(gates=(PutGate(gate),), unparks=unparks if old is not None else (), events=(shut,))

    def _record(self, view: View) -> Batch:
        random = self.random
        kind, key = random.choice(KINDS), random.choice("abc")
        old = view.records.get((kind, key))
        if old is not None and random.random() < 0.4:
            del view.records[kind, key]
            return Batch(records=(DropRecord(kind, key, old.version),))
        alarm_ms = random.choice((None, self.now_ms, self.now_ms + 700))
        version = 1 if old is None else old.version + 1
        record = Record(kind, key, version, random.randbytes(4), random.choice(("", "red")), alarm_ms)
        view.records[kind, key] = record
        return Batch(records=(PutRecord(record),))

    def _unpark(self, view: View) -> Batch:
        return Batch(unparks=tuple(self.random.sample(GATE_KEYS, 2)))

    def _late(self, view: View) -> Batch:
        """A batch that was decided on rows that may have moved since."""
        random = self.random
        stale = self._pick([run for run in self.old if run.state is State.READY])
        if stale is not None and random.random() < 0.6:
            events = edit(stale, random.choice(PRIORITIES), None, self.now_ms, ACTOR)
            return Batch(changes=(changed(evolve(stale, events[0])),), events=tuple(events))
        known = self._pick(list(view.runs.values()))
        relied = self._pick(self.old)
        if known is None or relied is None or random.random() < 0.3:
            return Batch(records=(PutRecord(Record("thing", "a", random.randint(1, 3), b"late")),))
        record = view.records.get(("other", "c"))
        put = Record("other", "c", 1 if record is None else record.version + 1, b"relied")
        return Batch(records=(PutRecord(put),), relied=(RowVersion(("run", relied.id), relied.version),))

    def _claim(self, view: View) -> Claim:
        random = self.random
        only: tuple[str, ...] = ()
        if random.random() < 0.3 and view.runs:
            only = tuple(random.sample(sorted(view.runs), min(3, len(view.runs))))
        lease_ms = random.choice((500, 2_000, 20_000))
        return Claim(random.choice(QUEUES), random.choice(WORKERS), random.choice((0, 1, 2, 5)), lease_ms, only)

    # -- leases, logs, journal ----------------------------------------------------------------------------------------

    async def leases(self, store: Store) -> list[LeaseRef]:
        found = await store.find_runs(RunQuery(limit=10_000))
        chosen = [run for run in found.runs if run.state is State.RUNNING or self.random.random() < 0.1]
        return [LeaseRef(run.id, run.attempt, run.worker or self.random.choice(WORKERS)) for run in chosen]

    async def chunks(self, store: Store) -> list[LogChunk]:
        found = await store.find_runs(RunQuery(limit=10_000))
        chosen = [run for run in found.runs if run.state is State.RUNNING or self.random.random() < 0.1]
        return [self._chunk(run) for run in chosen]

    def _chunk(self, run: Run) -> LogChunk:
        random = self.random
        stream = random.choice((1, 2, 3))
        lines = tuple(
            LogPiece(stream, self.now_ms, random.randbytes(2), random.random() < 0.1)
            for _ in range(random.choice((0, 1, 3)))
        )
        return LogChunk(run.id, run.attempt + random.choice((0, 0, 0, 0, 1)), random.randint(1, 4), lines)

    def retention(self) -> Retention:
        random = self.random
        return Retention(random.choice((0, 10)), random.choice((0, 1_000, 10_000)), random.choice((20, 100)))
