"""A sheet: every row as it shall be after a call, whichever batch of the call wrote it last.

So each row is written once, with its last version and the last EventId of the call; a run that is added and claimed
in one call is inserted as running. Nothing here touches the database.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from stellwerk.core.batch import Batch, PutGate, PutRecord, Record
from stellwerk.core.events import AnyEvent, RunAdded
from stellwerk.core.gates import Gate
from stellwerk.core.run import NO_QUEUE, Run, State


class Known:
    """What the database says of a run, as far as a comparison needs it."""

    __slots__ = ("added", "alarm_ms", "live_key", "parked", "queue", "state", "version")

    def __init__(
        self, added: int, version: int, state: str, queue: str, parked: str | None,
        alarm_ms: int | None, live_key: str | None,
    ) -> None:  # fmt: skip
        self.added, self.version, self.state, self.queue = added, version, state, queue
        self.parked, self.alarm_ms, self.live_key = parked, alarm_ms, live_key


class Sheet:
    """`changes` holds each run with the version that its row has in the database."""

    __slots__ = (
        "added", "adds", "before", "bodies", "changes", "claimable", "drops", "edges", "event_ids", "events",
        "gates", "gave_way", "parks", "records", "records_gone", "stale", "unparks", "unseen_drops",
    )  # fmt: skip

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self.event_ids: list[int] = []  # of the last event of each standing batch
        self.unparks: list[tuple[str, ...]] = []  # of each standing batch
        self.adds: dict[str, Run] = {}
        self.added: dict[str, int] = {}  # of the runs in adds and changes
        self.changes: dict[str, tuple[Run, int]] = {}
        self.drops: dict[str, int] = {}
        self.bodies: dict[tuple[str, str], bytes] = {}
        self.edges: dict[tuple[str, str], str] = {}
        self.records: dict[tuple[str, str], Record] = {}
        self.records_gone: set[tuple[str, str]] = set()  # dropped first; some may be put again
        self.gates: dict[tuple[str, str], Gate | None] = {}  # None: goes
        self.parks: dict[str, list[int]] = {}  # key → runs of the database that are held
        # What the changed and dropped runs were before: filled in from the database.
        self.before: Counter[tuple[str, str]] = Counter()  # (queue, state)
        self.stale: Counter[str] = Counter()  # queue → claimable in the database, but not as it stands there
        self.claimable: set[str] = set()
        # Only of batches that were compared; else the database is asked, where a limit makes it matter.
        self.gave_way: dict[str, tuple[str, ...]] = {}  # runs that were running or claimable, and their keys
        self.unseen_drops: list[str] = []  # dropped without having been changed in the same call

    def ready_in(self, queue: str) -> list[Run]:
        """Runs of this sheet that a claim may take, best first."""
        changed = (run for run, _ in self.changes.values())
        ready = [
            run
            for rows in (self.adds.values(), changed)
            for run in rows
            if run.state is State.READY and run.spec.queue == queue and run.parked is None
        ]
        ready.sort(key=urgency)
        return ready


class NotPlain(Exception):
    """The batches touch a row twice or more than runs: compare first."""


def urgency(run: Run) -> tuple[int, int, str]:
    """Best first: priority, higher first, then created, oldest first, then id."""
    return (-run.priority, run.spec.created_ms, run.id)


def plain_sheet(batches: Sequence[Batch], first: int, last_before: int) -> Sheet:
    """The sheet of batches that touch each row once, on the hope that all of them stand."""
    sheet = Sheet()
    rows = 0
    for batch in batches:
        if batch.records or batch.gates or batch.relied:
            raise NotPlain
        for add in batch.adds:
            if add.run.live_key is None and add.run.spec.live_key is not None:
                raise NotPlain  # it ends with its adding: no index of the database sees the key that must be free
        _note_events(sheet, batch, first, last_before)
        _note_adds(sheet, batch)
        for change in batch.changes:
            run = change.run
            if change.lease_ms is not None or run.added == 0:
                raise NotPlain
            if run.parked is not None:
                run = run.with_(parked=None)
            sheet.changes[run.id] = (run, run.version - 1)
            sheet.added[run.id] = run.added
            if change.bodies:
                for body in change.bodies:
                    sheet.bodies[run.id, body.key] = body.data
        for drop in batch.drops:
            sheet.drops[drop.run_id] = drop.version
        for edge in batch.edges:
            sheet.edges[edge.parent, edge.child] = edge.when
        rows += len(batch.adds) + len(batch.changes) + len(batch.drops)
    if rows != len({*sheet.adds, *sheet.changes, *sheet.drops}):
        raise NotPlain
    return sheet


def merged_sheet(batches: Iterable[Batch], known: dict[str, Known], first: int, last_before: int) -> Sheet:
    """The sheet of batches that were compared and stand; a later one may rewrite rows of an earlier one."""
    sheet = Sheet()
    for batch in batches:
        event_id = _note_events(sheet, batch, first, last_before)
        _note_adds(sheet, batch)
        for change in batch.changes:
            _merge_change(sheet, change.run.with_(parked=None), known)
            for body in change.bodies:
                sheet.bodies[change.run.id, body.key] = body.data
        for drop in batch.drops:
            _merge_drop(sheet, drop.run_id, known)
        for edge in batch.edges:
            sheet.edges[edge.parent, edge.child] = edge.when
        for item in batch.records:
            if isinstance(item, PutRecord):
                _merge_record(sheet, item.record, event_id)
            else:
                sheet.records.pop((item.kind, item.key), None)
                sheet.records_gone.add((item.kind, item.key))
        for gate in batch.gates:
            if isinstance(gate, PutGate):
                sheet.gates[gate.gate.key, gate.gate.kind] = gate.gate
            else:
                sheet.gates[gate.key, gate.kind] = None
    _note_before(sheet, known)
    return sheet


def _note_events(sheet: Sheet, batch: Batch, first: int, last_before: int) -> int:
    added = sheet.added
    event_id = first + len(sheet.events)
    for event in batch.events:
        if type(event) is RunAdded:
            added[event.run] = event_id
        event_id += 1
    sheet.events.extend(batch.events)
    event_id = event_id - 1 if sheet.events else last_before
    sheet.event_ids.append(event_id)
    sheet.unparks.append(batch.unparks)
    return event_id


def _note_adds(sheet: Sheet, batch: Batch) -> None:
    for add in batch.adds:
        run = add.run
        if run.parked is not None:
            run = run.with_(parked=None)
        assert run.id in sheet.added, f"run {run.id} is added without its event"
        sheet.adds[run.id] = run
        if run.state is State.READY and run.spec.queue != NO_QUEUE:
            sheet.claimable.add(run.spec.queue)
        if add.bodies:
            for body in add.bodies:
                sheet.bodies[run.id, body.key] = body.data


def _merge_change(sheet: Sheet, run: Run, known: dict[str, Known]) -> None:
    before = sheet.adds.get(run.id)
    if before is not None:
        was_ready, was_running = before.state is State.READY, before.state is State.RUNNING
        sheet.adds[run.id] = run
    elif run.id in sheet.changes:
        before, base = sheet.changes[run.id]
        was_ready, was_running = before.state is State.READY, before.state is State.RUNNING
        sheet.changes[run.id] = (run, base)
    else:
        row = known[run.id]
        was_ready, was_running = row.state == "ready" and row.parked is None, row.state == "running"
        sheet.changes[run.id] = (run, row.version)
        sheet.added[run.id] = row.added
    if was_ready or was_running:
        sheet.gave_way[run.id] = run.spec.keys
    if run.state is State.RUNNING:
        sheet.gave_way.pop(run.id, None)
    elif run.state is State.READY and run.spec.queue != NO_QUEUE:
        if was_ready:
            sheet.gave_way.pop(run.id, None)
        else:
            sheet.claimable.add(run.spec.queue)


def _merge_drop(sheet: Sheet, run_id: str, known: dict[str, Known]) -> None:
    run = sheet.adds.pop(run_id, None)
    if run is None:
        run, _ = sheet.changes.pop(run_id, (None, 0))
        sheet.drops[run_id] = known[run_id].version
        if run is None:
            sheet.unseen_drops.append(run_id)
    if run is not None and run.state in (State.READY, State.RUNNING):
        sheet.gave_way[run_id] = run.spec.keys
    for place in [place for place in sheet.bodies if place[0] == run_id]:
        del sheet.bodies[place]
    for edge in [edge for edge in sheet.edges if run_id in edge]:
        del sheet.edges[edge]


def _merge_record(sheet: Sheet, record: Record, event_id: int) -> None:
    # `added` counts only if the record is new: the statement leaves that of a known one alone.
    place = (record.kind, record.key)
    before = sheet.records.get(place)
    added = event_id if before is None else before.added
    sheet.records[place] = Record(
        record.kind, record.key, record.version, record.body, record.tag, record.alarm_ms, added
    )


def _note_before(sheet: Sheet, known: dict[str, Known]) -> None:
    for run_id in (*sheet.changes, *sheet.drops):
        row = known[run_id]
        sheet.before[row.queue, row.state] += 1
        if row.state == "ready" and row.parked is None:
            sheet.stale[row.queue] += 1
