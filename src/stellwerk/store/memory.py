"""The contract of a store as the plainest code: dictionaries, one thread, nothing clever.

Every other store is compared with this one. No method awaits anything, so each is one step for everybody else. Nothing
survives the process: for tests, for the simulation, and for trying things out.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct, structs

from stellwerk.core.batch import (
    ROWS_PER_BATCH_MAX,
    ROWS_PER_BUNCH,
    Applied,
    Batch,
    Claim,
    Claimed,
    ClaimedRun,
    Committed,
    PutGate,
    PutRecord,
    Receipt,
    Record,
    RowKey,
    check_batches,
    rows_compared,
)
from stellwerk.core.errors import Unavailable
from stellwerk.core.event_ids import event_id_ms, next_event_id
from stellwerk.core.events import AnyEvent, RunAdded, RunEvent, Stamped, StoreAdopted
from stellwerk.core.facts import Child, Facts, Loaded
from stellwerk.core.gates import Gate, Open, by_key, verdict
from stellwerk.core.logs import Appended, Fenced, LogChunk, LogLine, LogPage, LogQuery
from stellwerk.core.queries import (
    PAGE_ROWS_MAX,
    Counts,
    Due,
    JournalSlice,
    LeaseRef,
    Retention,
    RunPage,
    RunQuery,
)
from stellwerk.core.run import (
    FINAL,
    NO_QUEUE,
    PRIORITY_MAX,
    PRIORITY_MIN,
    Body,
    Check,
    Run,
    State,
    When,
)
from stellwerk.core.run_machine import evolve, start

JOURNAL_STRETCH_EVENTS = 10_000  # what one reading with a filter looks at
TRIM_CHUNKS_MAX = 1_000  # calls whose events one trimming forgets


class MemoryStore:
    """The reference. See `protocol.Store` for what each method means."""

    def __init__(self, epoch: str = "memory", *, exclusive: bool = True) -> None:
        self._epoch = epoch
        self._exclusive = exclusive  # False: a simulation lets several hosts share it
        self._foreign: str | None = None

        self._runs: dict[str, Run] = {}
        self._bodies: dict[str, dict[str, bytes]] = {}  # run → key → data
        self._children: dict[str, dict[str, When]] = {}  # parent → child → when
        self._parents: dict[str, set[str]] = {}  # child → parents
        self._records: dict[tuple[str, str], Record] = {}
        self._gates: dict[tuple[str, str], Gate] = {}

        # What follows from the runs; only `_put_run` writes it.
        self._holders: dict[str, str] = {}  # live key → run
        self._claimable: dict[str, set[str]] = {}  # queue → ready unparked runs
        self._parked: dict[str, set[str]] = {}  # key → runs parked under it
        self._running: Counter[str] = Counter()  # key → running runs that carry it
        self._counts: Counter[tuple[str, State]] = Counter()  # (queue, state) → runs

        self._journal: list[Stamped] = []
        self._chunks: list[int] = []  # how many events each call wrote, as far as they are kept
        self._forgotten = 0
        self._last = 0

        self._lines: dict[str, list[LogLine]] = {}
        self._taken: dict[str, dict[tuple[int, int], Appended]] = {}  # run → (attempt, sequence) → answer

    # -- lifetime -----------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""

    def durability(self) -> str:
        return "D0"

    def exclusive(self) -> bool:
        return self._exclusive

    def low(self) -> str | None:
        return None

    def foreign(self) -> str | None:
        return self._foreign

    def pretend_foreign(self, reason: str) -> None:
        """For tests: from now on this is not the store that its host knows."""
        self._foreign = reason

    async def adopt(self, now_ms: int, actor: str) -> None:
        # One number is left out, so that even a follower who has seen the last event asks after less than
        # `forgotten`. The events themselves stay readable.
        adopted = StoreAdopted("store", actor, now_ms, self._epoch)
        self._write_events([adopted], next_event_id(self._last + 1, now_ms))
        self._forgotten = self._last - 1
        self._foreign = None

    async def epoch(self) -> str:
        return self._epoch

    # -- change -------------------------------------------------------------------------------------------

    async def apply(self, batches: Sequence[Batch], claims: Sequence[Claim], now_ms: int) -> Applied:
        if self._foreign is not None:
            raise Unavailable(f"the store is foreign: {self._foreign}")
        for batch in batches:
            _check_batch(batch)
        problems = check_batches(batches, self._version_of, self._holders.get, self._lease_of)
        call = _Call(first=next_event_id(self._last, now_ms), last_before=self._last)
        standing = [batch for batch, problem in zip(batches, problems, strict=True) if problem is None]
        event_ids = [self._write_batch(batch, call) for batch in standing]
        self._free_places(call)
        unparked = [self._unpark_all(batch.unparks, call) for batch in standing]
        claimed = [self._claim(claim, call, now_ms) for claim in claims]
        if call.events:
            self._write_events(call.events, call.first)
        for run_id in call.written:
            if run_id in self._runs:
                self._put_run(self._runs[run_id].with_(changed=self._last), call)
        committed = iter([Committed(*pair) for pair in zip(event_ids, unparked, strict=True)])
        receipts: list[Receipt] = [next(committed) if problem is None else problem for problem in problems]
        return Applied(
            receipts=tuple(receipts),
            claimed=tuple(self._show_claimed(found) for found in claimed),
            first_event_id=call.first if call.events else 0,
            events=tuple(call.events),
            claimable=frozenset(call.claimable),
        )

    async def extend(self, leases: Sequence[LeaseRef], until_ms: int, now_ms: int) -> list[str]:
        given_up: list[str] = []
        for lease in leases:
            run = self._runs.get(lease.run_id)
            if run is None or not _holds(lease, run, now_ms):
                given_up.append(lease.run_id)
                continue
            assert run.alarm_ms is not None
            self._runs[run.id] = run.with_(alarm_ms=max(run.alarm_ms, until_ms))
            if run.stop_asked:
                given_up.append(run.id)
        return given_up

    # -- look ---------------------------------------------------------------------------------------------

    async def load(self, facts: Facts) -> Loaded:
        kinds = set(facts.kinds)
        records = {place: self._records[place] for place in facts.records if place in self._records}
        records |= {place: record for place, record in sorted(self._records.items()) if place[0] in kinds}
        children = {parent: self._waiting_children(parent, facts) for parent in facts.children_of}
        bodies: dict[tuple[str, str], bytes] = {}
        for run_id, key in facts.bodies:
            if key in self._bodies.get(run_id, {}):
                bodies[run_id, key] = self._bodies[run_id][key]
        return Loaded(
            event_id=self._last,
            runs={run_id: self._runs[run_id] for run_id in facts.runs if run_id in self._runs},
            holders={key: self._holders[key] for key in facts.live_keys if key in self._holders},
            children={parent: found for parent, found in children.items() if found},
            live_below=frozenset(parent for parent in facts.live_below if self._has_live_child(parent)),
            records=records,
            bodies=bodies,
            gates=self._gates_in_order() if facts.gates else (),
            running={key: self._running[key] for key in self._limited_keys()} if facts.running else {},
        )

    async def find_runs(self, query: RunQuery) -> RunPage:
        limit = min(query.limit, PAGE_ROWS_MAX)
        found = [run for run in self._runs.values() if _matches(run, query)]
        found.sort(key=lambda run: -run.added)
        page = tuple(found[:limit])
        return RunPage(self._last, page, page[-1].added if page and len(found) > limit else None)

    async def count(self) -> Counts:
        queues = {place: number for place, number in self._counts.items() if number > 0}
        states: Counter[State] = Counter()
        for (_, state), number in queues.items():
            states[state] += number
        return Counts(self._last, dict(states), queues)

    async def due(self, now_ms: int, limit: int) -> Due:
        runs = [(run.alarm_ms, run.id, run) for run in self._runs.values() if run.alarm_ms is not None]
        records = [
            (record.alarm_ms, place, record) for place, record in self._records.items() if record.alarm_ms is not None
        ]
        gates = [(gate.until_ms, place, gate) for place, gate in self._gates.items() if gate.until_ms is not None]
        alarms = [entry[0] for entries in (runs, records, gates) for entry in entries]
        return Due(
            runs=tuple(run for alarm_ms, _, run in sorted(runs, key=_alarm) if alarm_ms <= now_ms)[:limit],
            records=tuple(record for at_ms, _, record in sorted(records, key=_alarm) if at_ms <= now_ms)[:limit],
            gates=tuple(gate for until_ms, _, gate in sorted(gates, key=_alarm) if until_ms <= now_ms)[:limit],
            next_ms=min((alarm_ms for alarm_ms in alarms if alarm_ms > now_ms), default=None),
        )

    # -- journal ------------------------------------------------------------------------------------------

    async def read_journal(self, after: int, limit: int, run: str | None = None) -> JournalSlice:
        begin = bisect_right(self._journal, after, key=lambda stamped: stamped.event_id)
        stretch = self._journal[begin : begin + JOURNAL_STRETCH_EVENTS]
        found: list[Stamped] = []
        examined = self._last if begin + len(stretch) == len(self._journal) else stretch[-1].event_id
        for stamped in stretch:
            if len(found) == limit:
                examined = found[-1].event_id
                break
            if run is None or (isinstance(stamped.event, RunEvent) and stamped.event.run == run):
                found.append(stamped)
        return JournalSlice(tuple(found), self._forgotten, examined, self._last)

    async def trim_journal(self, keep: Retention, now_ms: int) -> int:
        left, chunks = len(self._journal), 0
        for size in self._chunks[:-1][:TRIM_CHUNKS_MAX]:
            last_of_chunk = self._journal[len(self._journal) - left + size - 1]
            is_young = event_id_ms(last_of_chunk.event_id) > now_ms - keep.age_ms
            is_wanted = is_young or left - size < keep.events_min
            if is_wanted and left <= keep.events_max:
                break
            left -= size
            chunks += 1
        trimmed = len(self._journal) - left
        if trimmed > 0:
            self._forgotten = max(self._forgotten, self._journal[trimmed - 1].event_id)
            del self._journal[:trimmed]
            del self._chunks[:chunks]
        return trimmed

    # -- logs ---------------------------------------------------------------------------------------------

    async def append_logs(self, chunks: Sequence[LogChunk]) -> list[Appended | Fenced]:
        return [self._append_chunk(chunk) for chunk in chunks]

    async def read_logs(self, query: LogQuery) -> LogPage:
        lines = self._lines.get(query.run_id, [])
        found: list[LogLine] = []
        examined = len(lines)
        for line in lines[query.after_line :]:
            if len(found) == query.limit:
                examined = found[-1].line
                break
            if not query.streams or line.piece.stream in query.streams:
                found.append(line)
        return LogPage(tuple(found), examined, len(lines))

    def _append_chunk(self, chunk: LogChunk) -> Appended | Fenced:
        run = self._runs.get(chunk.run_id)
        if run is None or run.state is not State.RUNNING or run.attempt != chunk.attempt:
            return Fenced()
        taken = self._taken.setdefault(run.id, {})
        place = (chunk.attempt, chunk.sequence)
        if place not in taken:
            lines = self._lines.setdefault(run.id, [])
            for piece in chunk.lines:
                lines.append(LogLine(len(lines) + 1, chunk.attempt, piece))
            taken[place] = Appended(len(lines))
        return taken[place]

    # -- comparing ----------------------------------------------------------------------------------------

    def _version_of(self, row: RowKey) -> int:
        found: Run | Record | Gate | None
        match row:
            case ("run", run_id):
                found = self._runs.get(run_id)
            case ("record", kind, key):
                found = self._records.get((kind, key))
            case ("gate", key, kind):
                found = self._gates.get((key, kind))
            case _:
                raise AssertionError(f"{row} names no row")
        return 0 if found is None else found.version

    def _lease_of(self, run_id: str) -> int | None:
        run = self._runs.get(run_id)
        return run.alarm_ms if run is not None and run.state is State.RUNNING else None

    # -- writing ------------------------------------------------------------------------------------------

    def _write_batch(self, batch: Batch, call: _Call) -> int:
        """Write a standing batch; answer the id of its last event, or of the last before it."""
        added: dict[str, int] = {}
        for event in batch.events:
            event_id = call.first + len(call.events)
            call.events.append(event)
            if isinstance(event, RunAdded):
                added[event.run] = event_id
        event_id = call.last_event_id()
        for change in batch.changes:
            # Whoever wrote a ready run may have changed what holds it: the next claim decides afresh.
            old = self._runs[change.run.id]
            self._put_run(change.run.with_(added=old.added, parked=None), call)
            self._put_bodies(change.run.id, change.bodies)
            call.written.add(change.run.id)
        for drop in batch.drops:
            self._drop_run(drop.run_id, call)
        for add in batch.adds:
            self._put_run(add.run.with_(added=added[add.run.id], parked=None), call)
            self._put_bodies(add.run.id, add.bodies)
            call.written.add(add.run.id)
        for edge in batch.edges:
            self._children.setdefault(edge.parent, {})[edge.child] = edge.when
            self._parents.setdefault(edge.child, set()).add(edge.parent)
        self._write_records(batch, event_id)
        for item in batch.gates:
            if isinstance(item, PutGate):
                self._gates[item.gate.key, item.gate.kind] = item.gate
            else:
                del self._gates[item.key, item.kind]
        return event_id

    def _write_records(self, batch: Batch, event_id: int) -> None:
        for item in batch.records:
            if isinstance(item, PutRecord):
                place = (item.record.kind, item.record.key)
                old = self._records.get(place)
                added = event_id if old is None else old.added
                self._records[place] = structs.replace(item.record, added=added)
            else:
                del self._records[item.kind, item.key]

    def _put_bodies(self, run_id: str, bodies: Iterable[Body]) -> None:
        for body in bodies:
            self._bodies.setdefault(run_id, {})[body.key] = body.data

    def _put_run(self, run: Run, call: _Call) -> None:
        """Write a row and all that follows from it."""
        check_run(run)
        was_claimable = self._is_claimable(run.id)
        self._take_out(run.id, call)
        self._runs[run.id] = run
        self._counts[run.spec.queue, run.state] += 1
        if run.live_key is not None:
            assert run.live_key not in self._holders, f"{run.live_key} would be held twice"
            self._holders[run.live_key] = run.id
        if run.state is State.RUNNING:
            self._running.update(run.spec.keys)
            call.gave_way.pop(run.id, None)
        if run.parked is not None:
            self._parked.setdefault(run.parked, set()).add(run.id)
        if self._is_claimable(run.id):
            self._claimable.setdefault(run.spec.queue, set()).add(run.id)
            if was_claimable:
                call.gave_way.pop(run.id, None)
            else:
                call.claimable.add(run.spec.queue)

    def _take_out(self, run_id: str, call: _Call) -> None:
        """Undo what follows from the row as it stands."""
        old = self._runs.pop(run_id, None)
        if old is None:
            return
        self._counts[old.spec.queue, old.state] -= 1
        if old.live_key is not None:
            del self._holders[old.live_key]
        if old.state is State.RUNNING:
            self._running.subtract(old.spec.keys)
        if old.state is State.RUNNING or (old.state is State.READY and old.parked is None):
            call.gave_way[old.id] = old
        if old.parked is not None:
            self._parked[old.parked].discard(old.id)
        self._claimable.get(old.spec.queue, set()).discard(old.id)

    def _drop_run(self, run_id: str, call: _Call) -> None:
        self._take_out(run_id, call)
        self._bodies.pop(run_id, None)
        self._lines.pop(run_id, None)
        self._taken.pop(run_id, None)
        for child in self._children.pop(run_id, {}):
            self._parents[child].discard(run_id)
        for parent in self._parents.pop(run_id, set()):
            self._children[parent].pop(run_id, None)

    def _write_events(self, events: Sequence[AnyEvent], first: int) -> None:
        assert first > self._last
        self._journal.extend(Stamped(first + place, event) for place, event in enumerate(events))
        self._chunks.append(len(events))
        self._last = first + len(events) - 1

    # -- parking and limits -------------------------------------------------------------------------------

    def _is_claimable(self, run_id: str) -> bool:
        run = self._runs.get(run_id)
        return run is not None and run.state is State.READY and run.parked is None and run.spec.queue != NO_QUEUE

    def _free_places(self, call: _Call) -> bool:
        """Each run that gave way brings back the best run parked under each limit that it was under and has room."""
        room = {gate.key for gate in self._gates.values() if gate.limit is not None} & {
            key for run in call.gave_way.values() for key in run.spec.keys
        }
        room = {key for key in room if self._running[key] < self._lowest_limit(key)}
        count = 0
        for run_id, run in sorted(call.gave_way.items()):
            now = self._runs.get(run_id)
            for key in run.spec.keys:
                if key in room and (now is None or now.parked != key):
                    count += self._unpark(key, 1, call)
        call.gave_way.clear()
        return count > 0

    def _lowest_limit(self, key: str) -> int:
        return min(gate.limit for gate in self._gates.values() if gate.key == key and gate.limit is not None)

    def _unpark_all(self, keys: Iterable[str], call: _Call) -> int:
        return sum(self._unpark(key, ROWS_PER_BUNCH, call) for key in keys)

    def _unpark(self, key: str, limit: int, call: _Call) -> int:
        parked = (self._runs[run_id] for run_id in self._parked.get(key, ()))
        best = heapq.nsmallest(limit, parked, key=_urgency)
        for run in best:
            self._put_run(run.with_(parked=None), call)
        return len(best)

    def _limited_keys(self) -> list[str]:
        return sorted({gate.key for gate in self._gates.values() if gate.limit is not None})

    def _gates_in_order(self) -> tuple[Gate, ...]:
        return tuple(gate for _, gate in sorted(self._gates.items()))

    # -- claiming -----------------------------------------------------------------------------------------

    def _claim(self, claim: Claim, call: _Call, now_ms: int) -> _Found:
        assert claim.queue != NO_QUEUE, "runs without a worker are never claimed"
        gates = by_key(self._gates_in_order())
        found = _Found()
        candidates = [self._runs[run_id] for run_id in self._claimable.get(claim.queue, ())]
        if claim.only:
            candidates = [run for run in candidates if run.id in claim.only]
        for run in sorted(candidates, key=_urgency):
            if len(found.started) == claim.limit:
                break
            if found.parked == ROWS_PER_BUNCH:
                found.more = True
                break
            answer = verdict(run, gates, self._running, now_ms)
            if isinstance(answer, Open):
                event = start(run, claim.worker, now_ms + claim.lease_ms, now_ms)
                call.events.append(event)
                self._put_run(evolve(run, event).with_(version=run.version + 1), call)
                call.written.add(run.id)
                found.started.append(run.id)
            else:
                self._put_run(run.with_(parked=answer.gate.key), call)
                found.parked += 1
                if claim.only:
                    found.refused.append((run.id, answer.gate))
        if self._free_places(call):
            # What was put aside for another gate made room for others.
            found.more = True
        return found

    def _show_claimed(self, found: _Found) -> Claimed:
        runs = tuple(self._show_started(self._runs[run_id]) for run_id in found.started)
        return Claimed(runs, found.parked, found.more, tuple(found.refused))

    def _show_started(self, run: Run) -> ClaimedRun:
        bodies = self._bodies.get(run.id, {})
        inputs = [reference.key for reference in run.spec.inputs if reference.key in bodies]
        return ClaimedRun(run, tuple(Body(key, bodies[key]) for key in inputs))

    # -- edges --------------------------------------------------------------------------------------------

    def _has_live_child(self, parent: str) -> bool:
        children = (self._runs.get(child) for child in self._children.get(parent, ()))
        return any(child is not None and child.is_live for child in children)

    def _waiting_children(self, parent: str, facts: Facts) -> tuple[Child, ...]:
        waiting: list[Child] = []
        for child, when in sorted(self._children.get(parent, {}).items()):
            run = self._runs.get(child)
            if run is not None and run.state is State.WAITING and child > facts.children_after:
                waiting.append(Child(run, when))
        return tuple(waiting[: facts.children_max + 1])


class _Call(Struct):
    """What one call of `apply` has done so far."""

    first: int  # id of its first event, if there is one
    last_before: int
    events: list[AnyEvent] = []
    written: set[str] = set()
    gave_way: dict[str, Run] = {}  # were running or claimable, and are neither now
    claimable: set[str] = set()

    def last_event_id(self) -> int:
        return self.first + len(self.events) - 1 if self.events else self.last_before


class _Found(Struct):
    """What one claim has found so far."""

    started: list[str] = []
    parked: int = 0
    more: bool = False
    refused: list[tuple[str, Gate]] = []


def check_run(run: Run) -> None:
    """Refuse a row that nobody would ever look at again, or that two would fight over: a bug of its author."""
    assert run.version >= 1, f"run {run.id} has no version"
    assert PRIORITY_MIN <= run.priority <= PRIORITY_MAX, f"run {run.id} has priority {run.priority}"
    assert run.waits_for >= 0, f"run {run.id} waits for {run.waits_for} parents"
    if run.state is State.WAITING:
        has_alarm = run.alarm_ms is not None
        assert has_alarm == (run.waits_for == 0), f"waiting run {run.id} must have an alarm or parents"
    if run.state is State.READY:
        may_have_alarm = isinstance(run.spec.action, Check)
        assert run.alarm_ms is None or may_have_alarm, f"ready run {run.id} has an alarm"
        assert run.waits_for == 0, f"ready run {run.id} waits for parents"
    else:
        assert run.parked is None, f"run {run.id} is {run.state} and parked"
    if run.state is State.RUNNING:
        assert run.alarm_ms is not None, f"running run {run.id} has no lease"
        assert run.worker is not None, f"running run {run.id} has no worker"
        assert run.attempt >= 1, f"running run {run.id} has no attempt"
    if run.state in FINAL:
        assert run.live_key is None, f"ended run {run.id} still holds {run.live_key}"
        assert run.ended_ms is not None, f"ended run {run.id} has no end"
    else:
        assert run.ended_ms is None, f"live run {run.id} has an end"


def _check_batch(batch: Batch) -> None:
    """Look at all that a batch wants to write, before anything is written."""
    rows = [row for row, _ in rows_compared(structs.replace(batch, relied=()))]
    assert len(rows) <= ROWS_PER_BATCH_MAX, f"a batch of {len(rows)} rows"
    assert len(rows) == len(set(rows)), "a batch writes a row twice"
    added = {event.run for event in batch.events if isinstance(event, RunAdded)}
    assert added == {add.run.id for add in batch.adds}, "every new run has its RunAdded, and the reverse"
    for add in batch.adds:
        assert add.run.version == 1, f"new run {add.run.id} has version {add.run.version}"
        check_run(add.run)
    for change in batch.changes:
        check_run(change.run.with_(parked=None))


def _urgency(run: Run) -> tuple[int, int, str]:
    """Best first: priority, higher first, then created, oldest first, then id."""
    return (-run.priority, run.spec.created_ms, run.id)


def _alarm(entry: tuple[int, object, object]) -> tuple[int, object]:
    return entry[:2]


def _holds(lease: LeaseRef, run: Run, now_ms: int) -> bool:
    if run.state is not State.RUNNING or run.attempt != lease.attempt or run.worker != lease.worker:
        return False
    return run.alarm_ms is not None and run.alarm_ms > now_ms


def _matches(run: Run, query: RunQuery) -> bool:
    spec = run.spec
    return (
        (not query.states or run.state in query.states)
        and (query.scope is None or spec.scope == query.scope)
        and (query.name is None or spec.name == query.name)
        and (query.label is None or spec.labels.get(query.label[0]) == query.label[1])
        and (query.since_ms is None or spec.created_ms >= query.since_ms)
        and (query.until_ms is None or spec.created_ms < query.until_ms)
        and (query.before is None or run.added < query.before)
    )
