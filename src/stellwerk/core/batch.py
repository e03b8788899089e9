"""A batch: one decision, as rows that shall be, rows it relied on, and the events that say why.

A store writes a batch whole or not at all, after comparing versions. It knows no rule beyond that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct, structs

from stellwerk.core.events import AnyEvent
from stellwerk.core.gates import Gate
from stellwerk.core.run import Body, Run, State, When

ROWS_PER_BUNCH = 1_000  # what may be large is done in bunches of this size, each in one batch
ROWS_PER_BATCH_MAX = 25_000  # the largest request is 10,000 runs; a larger batch is a bug

RowKey = tuple[str, ...]  # ("run", id) | ("record", kind, key) | ("gate", key, kind)


class AddRun(Struct, frozen=True):
    """A new row; its id must not be taken, nor its live key."""

    run: Run
    bodies: tuple[Body, ...] = ()

    @property
    def wanted_key(self) -> str | None:
        """The live key that must be free: also for a run that ends with its adding, and so never holds it."""
        return self.run.live_key or self.run.spec.live_key


class ChangeRun(Struct, frozen=True):
    """The whole new row. Its version is the old one + 1; `lease_ms`, if given, is the lease end that was seen."""

    run: Run
    bodies: tuple[Body, ...] = ()
    lease_ms: int | None = None


class DropRun(Struct, frozen=True):
    """The row, its bodies, logs and edges go."""

    run_id: str
    version: int


class Edge(Struct, frozen=True):
    parent: str
    child: str
    when: When = "succeeded"


class Record(Struct, frozen=True):
    """A small versioned thing by kind and key. `tag` is one short word to filter by; `added` an EventId."""

    kind: str
    key: str
    version: int
    body: bytes
    tag: str = ""
    alarm_ms: int | None = None
    added: int = 0


class PutRecord(Struct, frozen=True):
    """The record as it shall be; the row must have version `record.version - 1` (0: must be absent)."""

    record: Record


class DropRecord(Struct, frozen=True):
    kind: str
    key: str
    version: int


class PutGate(Struct, frozen=True):
    """The gate as it shall be; the row must have version `gate.version - 1` (0: must be absent)."""

    gate: Gate


class DropGate(Struct, frozen=True):
    key: str
    kind: str
    version: int


class RowVersion(Struct, frozen=True):
    """A row that was read, is not written, and must be unchanged. Version 0: it must be absent."""

    row: RowKey
    version: int


class Batch(Struct, frozen=True):
    """One decision. `unparks` are keys of which the best `ROWS_PER_BUNCH` parked runs shall be claimable again."""

    adds: tuple[AddRun, ...] = ()
    changes: tuple[ChangeRun, ...] = ()
    drops: tuple[DropRun, ...] = ()
    edges: tuple[Edge, ...] = ()
    records: tuple[PutRecord | DropRecord, ...] = ()
    gates: tuple[PutGate | DropGate, ...] = ()
    relied: tuple[RowVersion, ...] = ()
    unparks: tuple[str, ...] = ()
    events: tuple[AnyEvent, ...] = ()


class Committed(Struct, frozen=True):
    """The batch is in the store; `event_id` is that of its last event (or of the last before it, if it had none)."""

    event_id: int
    unparked: int = 0


class Conflict(Struct, frozen=True):
    """A row was not as it was when the batch was decided: read again, decide again."""

    row: RowKey


class AlreadyLive(Struct, frozen=True):
    """Another live run holds the live key."""

    live_key: str
    run_id: str


Receipt = Committed | Conflict | AlreadyLive


class Claim(Struct, frozen=True):
    """Take up to `limit` ready runs of a queue, best first. `only`: consider just these runs."""

    queue: str
    worker: str
    limit: int
    lease_ms: int
    only: tuple[str, ...] = ()


class ClaimedRun(Struct, frozen=True):
    """A started run with the bodies that its spec names as inputs."""

    run: Run
    bodies: tuple[Body, ...] = ()


class Claimed(Struct, frozen=True):
    """`parked` held runs were put aside, and if `more`, a further look may find others behind them."""

    runs: tuple[ClaimedRun, ...] = ()
    parked: int = 0
    more: bool = False
    refused: tuple[tuple[str, Gate], ...] = ()  # with `only`: what held the others


class Applied(Struct, frozen=True):
    """The answer to one call. `events` are all events of the call in order, numbered from `first_event_id`.

    `claimable` are the queues in which runs became claimable.
    """

    receipts: tuple[Receipt, ...]
    claimed: tuple[Claimed, ...]
    first_event_id: int
    events: tuple[AnyEvent, ...]
    claimable: frozenset[str] = frozenset()


def changed(run: Run, *, bodies: tuple[Body, ...] = (), lease_ms: int | None = None) -> ChangeRun:
    """The change that writes `run`, decided on the version it still carries.

    One that stays running keeps the lease that was read: a heartbeat since then raised no version, and would be undone.
    """
    if run.state is State.RUNNING and lease_ms is None:
        lease_ms = run.alarm_ms
    return ChangeRun(structs.replace(run, version=run.version + 1), bodies, lease_ms)


def rows_compared(batch: Batch) -> Iterator[tuple[RowKey, int]]:
    """Every row of a batch with the version that it must have now (0: absent)."""
    for add in batch.adds:
        yield ("run", add.run.id), 0
    for change in batch.changes:
        yield ("run", change.run.id), change.run.version - 1
    for drop in batch.drops:
        yield ("run", drop.run_id), drop.version
    for record in batch.records:
        if isinstance(record, PutRecord):
            yield ("record", record.record.kind, record.record.key), record.record.version - 1
        else:
            yield ("record", record.kind, record.key), record.version
    for gate in batch.gates:
        if isinstance(gate, PutGate):
            yield ("gate", gate.gate.key, gate.gate.kind), gate.gate.version - 1
        else:
            yield ("gate", gate.key, gate.kind), gate.version
    for relied in batch.relied:
        yield relied.row, relied.version


def rows_written(batch: Batch) -> Iterator[tuple[RowKey, int]]:
    """Every row that a batch writes, with the version that it has afterwards (0: gone)."""
    for add in batch.adds:
        yield ("run", add.run.id), add.run.version
    for change in batch.changes:
        yield ("run", change.run.id), change.run.version
    for drop in batch.drops:
        yield ("run", drop.run_id), 0
    for item in batch.records:
        if isinstance(item, PutRecord):
            yield ("record", item.record.kind, item.record.key), item.record.version
        else:
            yield ("record", item.kind, item.key), 0
    for gate in batch.gates:
        if isinstance(gate, PutGate):
            yield ("gate", gate.gate.key, gate.gate.kind), gate.gate.version
        else:
            yield ("gate", gate.key, gate.kind), 0


def check_batches(
    batches: Sequence[Batch],
    version_of: Callable[[RowKey], int],
    holder_of: Callable[[str], str | None],
    lease_of: Callable[[str], int | None],
) -> list[Conflict | AlreadyLive | None]:
    """Which batches of a call stand (None), in order; each sees what the ones before it wrote.

    `version_of` answers 0 for an absent row, `holder_of` the live run that holds a live key, `lease_of` the lease end
    of a running run.
    """
    written = _Written(version_of, holder_of, lease_of)
    verdicts: list[Conflict | AlreadyLive | None] = []
    for batch in batches:
        problem = written.problem(batch)
        verdicts.append(problem)
        if problem is None:
            written.note(batch)
        else:
            written.note_refused(batch)
    return verdicts


class _Written:
    """The store as the next batch of a call sees it: what is there, under what the call has written so far."""

    def __init__(
        self,
        version_of: Callable[[RowKey], int],
        holder_of: Callable[[str], str | None],
        lease_of: Callable[[str], int | None],
    ) -> None:
        self._version_of = version_of
        self._holder_of = holder_of
        self._lease_of = lease_of
        self._versions: dict[RowKey, int] = {}
        self._refused: set[tuple[RowKey, int]] = set()  # versions that refused batches would have written
        self._holders: dict[str, str] = {}  # live keys taken by runs of this call
        self._freed: set[str] = set()  # runs that gave their live key up in this call

    def problem(self, batch: Batch) -> Conflict | AlreadyLive | None:
        """Why a batch does not stand; None if it does."""
        for row, wanted in rows_compared(batch):
            if (self._versions[row] if row in self._versions else self._version_of(row)) != wanted:
                return Conflict(row)
            if (row, wanted) in self._refused:
                # It may build on a batch that was refused: another's version of the same number is not that one.
                return Conflict(row)
        for change in batch.changes:
            row = ("run", change.run.id)
            # A row that this call wrote has the lease that it wrote.
            if change.lease_ms is not None and row not in self._versions:
                if self._lease_of(change.run.id) != change.lease_ms:
                    return Conflict(row)
        freed = _freed(batch)
        taken: dict[str, str] = {}
        for add in batch.adds:
            live_key = add.wanted_key
            if live_key is None:
                continue
            holder = taken.get(live_key) or self._holder(live_key, freed)
            if holder is not None:
                return AlreadyLive(live_key, holder)
            if add.run.live_key is not None:
                taken[live_key] = add.run.id
        return None

    def _holder(self, live_key: str, freed: set[str]) -> str | None:
        holder = self._holders.get(live_key)
        if holder is None or holder in freed:
            holder = self._holder_of(live_key)
        return None if holder in freed or holder in self._freed else holder

    def note(self, batch: Batch) -> None:
        """Remember what a standing batch writes, for the batches behind it."""
        self._versions.update(rows_written(batch))
        self._freed |= _freed(batch)
        for add in batch.adds:
            self._freed.discard(add.run.id)
            if add.run.live_key is not None:
                self._holders[add.run.live_key] = add.run.id

    def note_refused(self, batch: Batch) -> None:
        """Remember what a refused batch would have written: nothing behind it may build on that."""
        self._refused.update((("run", change.run.id), change.run.version) for change in batch.changes)
        for item in batch.records:
            if isinstance(item, PutRecord):
                self._refused.add((("record", item.record.kind, item.record.key), item.record.version))
        for gate in batch.gates:
            if isinstance(gate, PutGate):
                self._refused.add((("gate", gate.gate.key, gate.gate.kind), gate.gate.version))


def _freed(batch: Batch) -> set[str]:
    """Runs that hold no live key after this batch."""
    gone = {drop.run_id for drop in batch.drops}
    gone.update(change.run.id for change in batch.changes if change.run.live_key is None)
    return gone
