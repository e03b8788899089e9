"""Small things to build rows, batches and claims with, by the core's own decisions only.

At the end stand the few acts that nearly every test of a store needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from stellwerk.core.batch import (
    AddRun,
    Applied,
    Batch,
    Claim,
    Claimed,
    Committed,
    DropGate,
    DropRecord,
    DropRun,
    Edge,
    PutGate,
    PutRecord,
    Receipt,
    Record,
    changed,
)
from stellwerk.core.events import AnyEvent, AnyRunEvent, GateOpened, GateShut
from stellwerk.core.facts import Facts
from stellwerk.core.gates import Gate, GateKind
from stellwerk.core.logs import STDOUT, LogChunk, LogPiece
from stellwerk.core.names import run_keys
from stellwerk.core.retry import RetryPolicy
from stellwerk.core.run import (
    KEEP_MS_DEFAULT,
    NO_QUEUE,
    PRIORITY_DEFAULT,
    WORKERLESS,
    Action,
    Body,
    BodyRef,
    Command,
    Outcome,
    Parent,
    Run,
    Spec,
    Succeeded,
)
from stellwerk.core.run_machine import add, cancel, drop, edit, evolve, expire, finish, ready
from stellwerk.store.protocol import Store

NOW_MS = 1_700_000_000_000  # when tests begin
LEASE_MS = 30_000
WORKER = "worker-1"
ACTOR = "tester"


def a_spec(
    *,
    scope: str = "shop",
    name: str = "sync",
    queue: str = "default",
    action: Action | None = None,
    created_ms: int = NOW_MS,
    keys: tuple[str, ...] = (),
    parents: Sequence[Parent] = (),
    bodies: Sequence[Body] = (),
    labels: Mapping[str, str] | None = None,
    keep_ms: int | None = KEEP_MS_DEFAULT,
    retry: RetryPolicy | None = None,
) -> Spec:
    """What never changes of a run. `keys` come on top of those that every run carries."""
    action = Command(("true",)) if action is None else action
    queue = NO_QUEUE if isinstance(action, WORKERLESS) else queue
    return Spec(
        scope=scope,
        name=name,
        action=action,
        created_ms=created_ms,
        queue=queue,
        keys=run_keys(queue, scope, name, keys),
        retry=retry,
        keep_ms=keep_ms,
        labels=labels or {},
        inputs=tuple(BodyRef(body.key, len(body.data), "digest") for body in bodies),
        parents=tuple(parents),
    )


def a_run(
    run_id: str = "run",
    spec: Spec | None = None,
    *,
    priority: int = PRIORITY_DEFAULT,
    due_ms: int | None = None,
    live_key: str | None = None,
    waits_for: int | None = None,
    has_children: bool = False,
    now_ms: int = NOW_MS,
) -> tuple[Run, list[AnyRunEvent]]:
    """A new run and the events that made it. It waits for all its parents, unless told for how many."""
    spec = structs.replace(a_spec() if spec is None else spec, live_key=live_key)
    return add(
        run_id,
        spec,
        priority=priority,
        due_ms=due_ms,
        live_key=live_key,
        waits_for=len(spec.parents) if waits_for is None else waits_for,
        has_children=has_children,
        now_ms=now_ms,
        actor=ACTOR,
    )


def an_add(
    run_id: str = "run",
    spec: Spec | None = None,
    *,
    bodies: Sequence[Body] = (),
    priority: int = PRIORITY_DEFAULT,
    due_ms: int | None = None,
    live_key: str | None = None,
    waits_for: int | None = None,
    has_children: bool = False,
    now_ms: int = NOW_MS,
) -> Batch:
    """The batch that adds one run, with the edges to its parents."""
    run, events = a_run(
        run_id,
        spec,
        priority=priority,
        due_ms=due_ms,
        live_key=live_key,
        waits_for=waits_for,
        has_children=has_children,
        now_ms=now_ms,
    )
    edges = tuple(Edge(parent.run_id, run_id, parent.when) for parent in run.spec.parents)
    return Batch(adds=(AddRun(run, tuple(bodies)),), edges=edges, events=tuple(events))


def together(batches: Iterable[Batch]) -> Batch:
    """One batch that does what all these do."""
    batches = tuple(batches)
    return Batch(
        adds=tuple(item for batch in batches for item in batch.adds),
        changes=tuple(item for batch in batches for item in batch.changes),
        drops=tuple(item for batch in batches for item in batch.drops),
        edges=tuple(item for batch in batches for item in batch.edges),
        records=tuple(item for batch in batches for item in batch.records),
        gates=tuple(item for batch in batches for item in batch.gates),
        relied=tuple(item for batch in batches for item in batch.relied),
        unparks=tuple(item for batch in batches for item in batch.unparks),
        events=tuple(item for batch in batches for item in batch.events),
    )


def a_change(
    run: Run, events: Sequence[AnyRunEvent], *, bodies: Sequence[Body] = (), lease_ms: int | None = None
) -> Batch:
    """The batch that these events of one run make; a dropped run goes."""
    after = run
    for event in events:
        after = evolve(after, event)
    return Batch(changes=(changed(after, bodies=tuple(bodies), lease_ms=lease_ms),), events=tuple(events))


def a_readying(run: Run, *, now_ms: int) -> Batch:
    return a_change(run, ready(run, now_ms, ACTOR))


def an_end(
    run: Run,
    outcome: Outcome | None = None,
    *,
    now_ms: int = NOW_MS,
    bodies: Sequence[Body] = (),
) -> Batch:
    """The current attempt ends; it succeeds unless told otherwise."""
    outcome = Succeeded() if outcome is None else outcome
    worker = run.worker or WORKER
    result = next((BodyRef(body.key, len(body.data), "digest") for body in bodies), None)
    events = finish(run, run.attempt, worker, outcome, result=result, now_ms=now_ms, chance=0.5)
    return a_change(run, events, bodies=bodies)


def an_expiry(run: Run, *, now_ms: int) -> Batch:
    """The lease is over; the change names the lease end that it saw."""
    return a_change(run, expire(run, now_ms, 0.5, ACTOR), lease_ms=run.alarm_ms)


def a_cancel(run: Run, *, now_ms: int = NOW_MS) -> Batch:
    return a_change(run, cancel(run, "not wanted", now_ms, ACTOR))


def an_edit(run: Run, *, priority: int | None = None, due_ms: int | None = None, now_ms: int = NOW_MS) -> Batch:
    return a_change(run, edit(run, priority, due_ms, now_ms, ACTOR))


def a_touch(run: Run) -> Batch:
    """A change without an event, as the parent of a new edge gets it."""
    return Batch(changes=(changed(run.with_(has_children=True)),))


def a_drop(run: Run) -> Batch:
    """Forget an ended run as soon as its time of keeping is over."""
    assert run.alarm_ms is not None
    return Batch(drops=(DropRun(run.id, run.version),), events=tuple(drop(run, run.alarm_ms, ACTOR)))


def a_gate(
    key: str,
    kind: GateKind = "pause",
    *,
    version: int = 1,
    floor: int | None = None,
    limit: int | None = None,
    until_ms: int | None = None,
    exempt: tuple[str, ...] = (),
    now_ms: int = NOW_MS,
) -> Batch:
    """The batch that shuts a gate."""
    gate = Gate(key, kind, version, floor, limit, exempt, until_ms, "because", ACTOR, now_ms)
    event = GateShut(key, ACTOR, now_ms, key, kind, "because", floor, limit, until_ms, exempt)
    return Batch(gates=(PutGate(gate),), events=(event,))


def a_limit(key: str, limit: int, *, version: int = 1) -> Batch:
    return a_gate(key, "limit", limit=limit, version=version)


def an_opening(
    key: str, kind: GateKind = "pause", *, version: int = 1, unparks: bool = True, now_ms: int = NOW_MS
) -> Batch:
    """The batch that opens a gate and brings back what it held."""
    event = GateOpened(key, ACTOR, now_ms, key, kind, "enough")
    return Batch(gates=(DropGate(key, kind, version),), unparks=(key,) if unparks else (), events=(event,))


def a_record(
    key: str = "one",
    *,
    kind: str = "thing",
    version: int = 1,
    body: bytes = b"{}",
    tag: str = "",
    alarm_ms: int | None = None,
    events: Sequence[AnyEvent] = (),
) -> Batch:
    record = Record(kind, key, version, body, tag, alarm_ms)
    return Batch(records=(PutRecord(record),), events=tuple(events))


def a_record_drop(key: str = "one", *, kind: str = "thing", version: int = 1) -> Batch:
    return Batch(records=(DropRecord(kind, key, version),))


def a_claim(
    queue: str = "default",
    *,
    worker: str = WORKER,
    limit: int = 10,
    lease_ms: int = LEASE_MS,
    only: tuple[str, ...] = (),
) -> Claim:
    return Claim(queue, worker, limit, lease_ms, only)


def a_chunk(run: Run, sequence: int, *lines: bytes, stream: int = STDOUT, attempt: int | None = None) -> LogChunk:
    pieces = tuple(LogPiece(stream, NOW_MS, line) for line in lines)
    return LogChunk(run.id, run.attempt if attempt is None else attempt, sequence, pieces)


# -- acts -------------------------------------------------------------------------------------------------------------


async def do(store: Store, *batches: Batch, now_ms: int = NOW_MS) -> Applied:
    """Apply these batches, all of which must stand."""
    applied = await store.apply(batches, (), now_ms)
    for receipt in applied.receipts:
        assert isinstance(receipt, Committed), receipt
    return applied


async def refusal(store: Store, batch: Batch, now_ms: int = NOW_MS) -> Receipt:
    """What the store says to a batch."""
    applied = await store.apply([batch], (), now_ms)
    return applied.receipts[0]


async def claim(store: Store, wanted: Claim | None = None, *, now_ms: int = NOW_MS) -> Claimed:
    applied = await store.apply((), [a_claim() if wanted is None else wanted], now_ms)
    return applied.claimed[0]


async def start_one(store: Store, run_id: str, *, now_ms: int = NOW_MS, worker: str = WORKER) -> Run:
    """Claim just this run, which must be claimable."""
    found = await row(store, run_id)
    claimed = await claim(store, a_claim(found.spec.queue, worker=worker, only=(run_id,)), now_ms=now_ms)
    assert len(claimed.runs) == 1, claimed
    return claimed.runs[0].run


async def row(store: Store, run_id: str) -> Run:
    """The row of a run that must be there."""
    return (await store.load(Facts(runs=(run_id,)))).runs[run_id]


def ids_of(claimed: Claimed) -> list[str]:
    """Which runs a claim started, in order."""
    return [found.run.id for found in claimed.runs]
