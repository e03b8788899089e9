"""Folding the journal gives the tables: what a reader of the events alone must come to.

`fold` knows nothing of a store, only `evolve` and the edges that the specs name. `difference` compares what it came to
with what a store says; the simulation uses it as a checker. Apart from it are what is not journaled: leases, versions,
parking, and how many parents a child still waits for while chores are owed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator

from msgspec import Struct

from stellwerk.core.dag import satisfied
from stellwerk.core.errors import ImpossibleEvent
from stellwerk.core.events import (
    GateOpened,
    GateShut,
    ResultRejected,
    RunAdded,
    RunDropped,
    RunEvent,
    RunReadied,
    Stamped,
)
from stellwerk.core.facts import Facts
from stellwerk.core.gates import Gate
from stellwerk.core.queries import PAGE_ROWS_MAX, RunQuery
from stellwerk.core.run import FINAL, Run, State, When
from stellwerk.core.run_machine import added_run, evolve, parent_ended
from stellwerk.store.protocol import Store

CHORE = "chore"  # the kind of the records that say what is owed
PARENTS_PER_LOAD = 1_000


class Tables(Struct):
    """What the events say there is. `Run.added` is the id of RunAdded, `Run.changed` that of the run's last event."""

    runs: dict[str, Run] = {}
    edges: dict[tuple[str, str], When] = {}  # (parent, child) → when
    gates: dict[tuple[str, str], Gate] = {}
    children: dict[str, set[str]] = {}  # parent → children, the edges again
    parents: set[str] = set()  # all that were ever named as a parent
    last: int = 0


def fold(events: Iterable[Stamped]) -> Tables:
    """The tables that a journal from its very beginning makes."""
    tables = Tables()
    for stamped in events:
        if stamped.event_id <= tables.last:
            raise ImpossibleEvent(f"event {stamped.event_id} follows {tables.last}")
        tables.last = stamped.event_id
        event = stamped.event
        if isinstance(event, RunEvent):
            _fold_run(tables, stamped.event_id, event)
        elif isinstance(event, GateShut):
            _fold_gate(tables, event)
        elif isinstance(event, GateOpened):
            if tables.gates.pop((event.gate, event.kind), None) is None:
                raise ImpossibleEvent(f"gate {event.gate} ({event.kind}) was opened and not shut")
    return tables


async def difference(tables: Tables, store: Store) -> list[str]:
    """How the tables of a store differ from those that its journal makes; nothing, if all is well."""
    loaded = await store.load(Facts(kinds=(CHORE,), gates=True))
    if loaded.event_id != tables.last:
        return [f"the store is at event {loaded.event_id}, the fold at {tables.last}"]
    is_owed = bool(loaded.records)
    found = {run.id: run async for run in _all_runs(store)}
    differences = [f"run {run_id} is only in the store" for run_id in sorted(found.keys() - tables.runs.keys())]
    differences += [f"run {run_id} is only in the journal" for run_id in sorted(tables.runs.keys() - found.keys())]
    for run_id in sorted(tables.runs.keys() & found.keys()):
        differences += _run_differences(tables, tables.runs[run_id], found[run_id], is_owed)
    differences += _gate_differences(tables, loaded.gates)
    if not is_owed:
        differences += [text async for text in _edge_differences(tables, store)]
    return differences


# -- folding ----------------------------------------------------------------------------------------------------------


def _fold_run(tables: Tables, event_id: int, event: RunEvent) -> None:
    if isinstance(event, RunAdded):
        if event.run in tables.runs:
            raise ImpossibleEvent(f"run {event.run} was added twice")
        _add(tables, event_id, event)
        return
    if isinstance(event, ResultRejected):
        return  # a word that did not count changes no row, and its run may be gone
    run = tables.runs.get(event.run)
    if run is None:
        raise ImpossibleEvent(f"{type(event).__name__} of run {event.run}, which is not there")
    if isinstance(event, RunReadied) and run.waits_for > 0:
        raise ImpossibleEvent(f"run {run.id} was readied while it waited for {run.waits_for} parents")
    after = evolve(run, event).with_(changed=event_id)  # type: ignore[arg-type]  # every RunEvent is AnyRunEvent
    if isinstance(event, RunDropped):
        _drop(tables, run.id)
        return
    tables.runs[run.id] = after
    if after.state in FINAL and run.state not in FINAL:
        _tell_children(tables, after)


def _add(tables: Tables, event_id: int, event: RunAdded) -> None:
    tables.runs[event.run] = added_run(event).with_(added=event_id, changed=event_id)
    for parent in event.spec.parents:
        tables.edges[parent.run_id, event.run] = parent.when
        tables.children.setdefault(parent.run_id, set()).add(event.run)
        tables.parents.add(parent.run_id)


def _drop(tables: Tables, run_id: str) -> None:
    for parent in tables.runs.pop(run_id).spec.parents:
        tables.edges.pop((parent.run_id, run_id), None)
        tables.children.get(parent.run_id, set()).discard(run_id)
    for child in tables.children.pop(run_id, set()):
        del tables.edges[run_id, child]
    tables.parents.discard(run_id)


def _tell_children(tables: Tables, parent: Run) -> None:
    """One parent fewer for those whose edge is satisfied; the others are cancelled by an event of their own."""
    for child_id in sorted(tables.children.get(parent.id, ())):
        child = tables.runs.get(child_id)
        if child is None or child.state is not State.WAITING or child.waits_for == 0:
            continue
        if satisfied(tables.edges[parent.id, child_id], parent.state):
            tables.runs[child_id] = parent_ended(child)


def _fold_gate(tables: Tables, event: GateShut) -> None:
    tables.gates[event.gate, event.kind] = Gate(
        key=event.gate,
        kind=event.kind,  # type: ignore[arg-type]  # events spell it as a plain string
        floor=event.floor,
        limit=event.limit,
        exempt=event.exempt,
        until_ms=event.until_ms,
        reason=event.reason,
        actor=event.actor,
        at_ms=event.at_ms,
    )


# -- comparing --------------------------------------------------------------------------------------------------------


async def _all_runs(store: Store) -> AsyncIterator[Run]:
    before: int | None = None
    while True:
        page = await store.find_runs(RunQuery(before=before, limit=PAGE_ROWS_MAX))
        for run in page.runs:
            yield run
        if page.before is None:
            return
        assert before is None or page.before < before
        before = page.before


def _run_differences(tables: Tables, folded: Run, stored: Run, is_owed: bool) -> Iterator[str]:
    skipped = {"version", "parked", "changed", "has_children"}
    if folded.state is State.RUNNING:
        skipped.add("alarm_ms")
    if is_owed and folded.state is State.WAITING:
        skipped |= {"waits_for", "alarm_ms"}
    for name in Run.__struct_fields__:
        if name not in skipped and getattr(folded, name) != getattr(stored, name):
            yield f"run {folded.id}: {name} is {getattr(stored, name)!r}, by the journal {getattr(folded, name)!r}"
    if not folded.changed <= stored.changed <= tables.last:
        yield f"run {folded.id}: changed is {stored.changed}, its last event {folded.changed}"
    if stored.has_children and folded.id not in tables.parents:
        yield f"run {folded.id} has children, by the journal it has none"
    live_children = [
        child for child in _children(tables, folded.id) if child.state is State.WAITING and child.waits_for
    ]
    if folded.is_live and live_children and not stored.has_children:
        yield f"run {folded.id} does not know of its child {live_children[0].id}"


def _gate_differences(tables: Tables, stored: Iterable[Gate]) -> Iterator[str]:
    found: dict[tuple[str, str], Gate] = {(gate.key, gate.kind): gate for gate in stored}
    for place in sorted({*found, *tables.gates}):
        shown = found.get(place)
        folded = tables.gates.get(place)
        if shown is None or folded is None:
            yield f"gate {place} is only in the {'journal' if shown is None else 'store'}"
            continue
        for name in Gate.__struct_fields__:
            if name != "version" and getattr(shown, name) != getattr(folded, name):
                yield f"gate {place}: {name} is {getattr(shown, name)!r}, by the journal {getattr(folded, name)!r}"


async def _edge_differences(tables: Tables, store: Store) -> AsyncIterator[str]:
    """A store answers only children that still wait, and needs no edge whose parent has ended: compare the rest."""
    live = sorted(run.id for run in tables.runs.values() if run.is_live)
    for place in range(0, len(live), PARENTS_PER_LOAD):
        parents = tuple(live[place : place + PARENTS_PER_LOAD])
        loaded = await store.load(Facts(children_of=parents, children_max=len(tables.runs)))
        for parent in parents:
            found = {child.run.id: child.when for child in loaded.children.get(parent, ())}
            folded = {
                child.id: tables.edges[parent, child.id]
                for child in _children(tables, parent)
                if child.state is State.WAITING
            }
            if found != folded:
                yield f"children of {parent} are {found}, by the journal {folded}"


def _children(tables: Tables, parent: str) -> list[Run]:
    ids = sorted(tables.children.get(parent, ()))
    return [tables.runs[run_id] for run_id in ids if run_id in tables.runs]
