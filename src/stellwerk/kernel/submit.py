"""From requests for new runs to one batch: ids, live keys, parents, idempotency. All or nothing per request."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct, structs

from stellwerk.core import dag, run_machine
from stellwerk.core.batch import AddRun, Batch, ChangeRun, Edge, PutRecord, Record, RowVersion, changed
from stellwerk.core.errors import Clash, Refused
from stellwerk.core.events import AnyEvent, RunCancelled
from stellwerk.core.facts import Facts, Loaded
from stellwerk.core.names import run_keys
from stellwerk.core.retry import RetryPolicy
from stellwerk.core.run import (
    FINAL,
    KEEP_MS_DEFAULT,
    NO_QUEUE,
    PRIORITY_DEFAULT,
    WORKERLESS,
    Action,
    Body,
    BodyRef,
    Parent,
    Run,
    Spec,
    When,
)
from stellwerk.core.times import DAY_MS

IDEMPOTENCY = "idempotency"
IDEMPOTENCY_KEPT_MS = DAY_MS
RUNS_PER_REQUEST_MAX = 10_000
PARENTS_MAX = 10_000


class NewRun(Struct, frozen=True):
    """A run that someone wants. A parent is the id of a run, or the place of another entry in the same request."""

    scope: str
    name: str
    action: Action
    priority: int = PRIORITY_DEFAULT
    due_ms: int | None = None
    live_key: str | None = None
    parents: tuple[str | int, ...] = ()
    when: When = "succeeded"
    retry: RetryPolicy | None = None
    timeout_ms: int | None = None
    keep_ms: int | None = KEEP_MS_DEFAULT
    labels: Mapping[str, str] = {}
    env: Mapping[str, str] = {}
    cwd: str | None = None
    bodies: tuple[Body, ...] = ()
    queue: str = "default"
    door: str = "native"
    more_keys: tuple[str, ...] = ()
    rerun_of: str | None = None
    run_id: str | None = None  # a door's own; else one is made
    numbered: bool = False  # its id shall be the next whole number


class Idempotency(Struct, frozen=True):
    """A caller's key, and a digest of what it asked for: the same key with another wish is refused."""

    key: str
    digest: str


class Added(Struct, frozen=True):
    """One entry's answer: a new run, or the live run that already holds its live key."""

    id: str
    new: bool


class Submitted(Struct, frozen=True):
    """The answer to a request. `repeated`: it was answered before, and this is the same answer."""

    runs: tuple[Added, ...]
    event_id: int
    repeated: bool = False


class _Remembered(Struct, frozen=True):
    """The body of an idempotency record."""

    digest: str
    runs: tuple[Added, ...]


def body_ref(body: Body) -> BodyRef:
    """What row and journal say of a body."""
    digest = hashlib.blake2b(body.data, digest_size=16).hexdigest()
    return BodyRef(body.key, len(body.data), digest)


def facts_of(wanted: Sequence[NewRun], idempotency: Idempotency | None) -> Facts | None:
    """What must be read before these can be decided; None for the plain case, which reads nothing."""
    live_keys = {new.live_key for new in wanted if new.live_key is not None}
    parents = {parent for new in wanted for parent in new.parents if isinstance(parent, str)}
    if not live_keys and not parents and idempotency is None:
        return None
    records = () if idempotency is None else ((IDEMPOTENCY, idempotency.key),)
    # Ids that a door gave are read too: one that is taken is refused, not tried again and again.
    given = {new.run_id for new in wanted if new.run_id is not None}
    return Facts(runs=tuple(parents | given), live_keys=tuple(live_keys), records=records)


def remembered(loaded: Loaded, idempotency: Idempotency | None) -> Submitted | None:
    """The answer that was given to the same key before, if any."""
    if idempotency is None:
        return None
    record = loaded.records.get((IDEMPOTENCY, idempotency.key))
    if record is None:
        return None
    first = msgspec.json.decode(record.body, type=_Remembered)
    if first.digest != idempotency.digest:
        raise Clash("this Idempotency-Key was used for another request; use a new key for a new request")
    return Submitted(first.runs, record.added, repeated=True)


def decide(
    wanted: Sequence[NewRun],
    ids: Sequence[str],
    loaded: Loaded,
    idempotency: Idempotency | None,
    now_ms: int,
    actor: str,
) -> tuple[Batch, tuple[Added, ...]]:
    """The batch that adds all entries whose live key is free, and the answer for each entry."""
    answers = _live_keys(wanted, ids, loaded)
    writer = _Writer(wanted, answers, loaded, now_ms, actor)
    for place in _parents_first(wanted):
        if answers[place].new:
            writer.add(place)
    records: tuple[PutRecord, ...] = ()
    if idempotency is not None:
        body = msgspec.json.encode(_Remembered(idempotency.digest, tuple(answers)))
        alarm_ms = now_ms + IDEMPOTENCY_KEPT_MS
        records = (PutRecord(Record(IDEMPOTENCY, idempotency.key, 1, body, "", alarm_ms)),)
    return writer.batch(records), tuple(answers)


def _live_keys(wanted: Sequence[NewRun], ids: Sequence[str], loaded: Loaded) -> list[Added]:
    holders = dict(loaded.holders)
    answers: list[Added] = []
    for new, run_id in zip(wanted, ids, strict=True):
        holder = None if new.live_key is None else holders.get(new.live_key)
        if holder is not None:
            answers.append(Added(holder, new=False))
            continue
        if new.live_key is not None:
            holders[new.live_key] = run_id
        answers.append(Added(run_id, new=True))
    return answers


def _parents_first(wanted: Sequence[NewRun]) -> Sequence[int]:
    """The entries in an order in which every parent stands before its children."""
    inner = {place: [parent for parent in new.parents if isinstance(parent, int)] for place, new in enumerate(wanted)}
    if not any(inner.values()):
        return range(len(wanted))
    for place, parents in inner.items():
        for parent in parents:
            if not 0 <= parent < len(wanted):
                raise Refused(f'"#{parent}" names no entry of this request', f"[{place}].parents")
    cycle = dag.find_cycle(inner)
    if cycle is not None:
        raise Refused(f"entries {', '.join(f'#{entry}' for entry in cycle[:10])} wait for each other", f"[{cycle[0]}]")
    order: list[int] = []
    seen: set[int] = set()
    stack = list(range(len(wanted) - 1, -1, -1))
    while stack:
        place = stack[-1]
        if place in seen:
            stack.pop()
            continue
        missing = [parent for parent in inner[place] if parent not in seen]
        if missing:
            stack.extend(missing)
        else:
            seen.add(place)
            order.append(place)
            stack.pop()
    return order


class _Writer:
    """Builds the batch entry by entry; parents of the same request are looked up among the rows already built."""

    def __init__(
        self, wanted: Sequence[NewRun], answers: Sequence[Added], loaded: Loaded, now_ms: int, actor: str
    ) -> None:
        self._wanted = wanted
        self._answers = answers
        self._loaded = loaded
        self._now_ms = now_ms
        self._actor = actor
        self._adds: dict[str, AddRun] = {}
        self._edges: list[Edge] = []
        self._events: list[AnyEvent] = []
        self._touched: dict[str, ChangeRun] = {}
        self._relied: dict[str, RowVersion] = {}

    def add(self, place: int) -> None:
        new = self._wanted[place]
        run_id = self._answers[place].id
        if new.run_id is not None and run_id in self._loaded.runs:
            raise Clash(f"there is already a run {run_id}")
        parents, waits_for, impossible = self._parents(place, new) if new.parents else ((), 0, None)
        spec = _spec(new, parents, self._now_ms)
        due_ms = new.due_ms if new.due_ms is not None and new.due_ms > self._now_ms else None
        run, events = run_machine.add(
            run_id,
            spec,
            priority=new.priority,
            due_ms=due_ms,
            live_key=new.live_key,
            waits_for=waits_for + (impossible is not None),
            has_children=False,
            now_ms=self._now_ms,
            actor=self._actor,
        )
        if impossible is not None:
            cancelled = RunCancelled(spec.key, self._actor, self._now_ms, run_id, 0, impossible)
            run = run_machine.evolve(run, cancelled)
            events.append(cancelled)
        self._adds[run_id] = AddRun(run, new.bodies)
        self._events.extend(events)

    def _parents(self, place: int, new: NewRun) -> tuple[tuple[Parent, ...], int, str | None]:
        """The edges of an entry, how many parents are still open, and why it can never start, if so."""
        found: dict[str, Parent] = {}
        waits_for = 0
        impossible: str | None = None
        child = self._answers[place].id
        for parent_ref in new.parents:
            parent = self._parent_row(parent_ref, place)
            if parent.id in found:
                continue
            found[parent.id] = Parent(parent.id, new.when)
            holds = dag.satisfied(new.when, parent.state)
            if holds is None:
                waits_for += 1
                self._edges.append(Edge(parent.id, child, new.when))
            elif not holds and impossible is None:
                impossible = dag.impossible_reason(parent.id, parent.state)
        return tuple(found.values()), waits_for, impossible

    def _parent_row(self, parent: str | int, place: int) -> Run:
        """The parent's row as it will be after this batch; a live one learns that it has children."""
        run_id = self._answers[parent].id if isinstance(parent, int) else parent
        inner = self._adds.get(run_id)
        if inner is not None:
            if inner.run.state not in FINAL and not inner.run.has_children:
                self._adds[run_id] = structs.replace(inner, run=inner.run.with_(has_children=True))
            return inner.run
        run = self._loaded.runs.get(run_id)
        if run is None:
            raise Refused(f"parent {run_id} does not exist", f"[{place}].parents")
        if run.state in FINAL:
            self._relied[run_id] = RowVersion(("run", run_id), run.version)
        else:
            # Its version rises, so that an end decided without this child meets a conflict.
            self._touched[run_id] = changed(run.with_(has_children=True))
        return run

    def batch(self, records: tuple[PutRecord, ...]) -> Batch:
        return Batch(
            adds=tuple(self._adds.values()),
            changes=tuple(self._touched.values()),
            edges=tuple(self._edges),
            records=records,
            relied=tuple(self._relied.values()),
            events=tuple(self._events),
        )


def _spec(new: NewRun, parents: tuple[Parent, ...], now_ms: int) -> Spec:
    queue = NO_QUEUE if isinstance(new.action, WORKERLESS) else new.queue
    return Spec(
        scope=new.scope,
        name=new.name,
        action=new.action,
        created_ms=now_ms,
        queue=queue,
        door=new.door,
        keys=run_keys(queue, new.scope, new.name, new.more_keys),
        retry=new.retry,
        timeout_ms=new.timeout_ms,
        keep_ms=new.keep_ms,
        labels=new.labels,
        env=new.env,
        cwd=new.cwd,
        inputs=tuple(body_ref(body) for body in new.bodies),
        parents=parents,
        rerun_of=new.rerun_of,
        live_key=new.live_key,
    )
