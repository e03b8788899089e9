"""Chores: work that is owed and may be large, done in bunches by any host.

Each bunch and the shorter chore are one batch, so a crash between two bunches loses nothing and does nothing twice.
"""

from __future__ import annotations

import msgspec
from msgspec import structs

from stellwerk.core.batch import ROWS_PER_BUNCH, Batch, Committed, DropRecord, PutRecord, Record, changed
from stellwerk.core.dag import child_after
from stellwerk.core.events import AnyRunEvent
from stellwerk.core.facts import Facts
from stellwerk.core.run import FINAL, Run, State
from stellwerk.core.run_machine import cancel, evolve
from stellwerk.kernel.kernel import BulkVerb, Kernel, Unpark
from stellwerk.kernel.submit import decide as decide_adds
from stellwerk.kernel.submit import facts_of
from stellwerk.kernel.turns import ChildrenOwed, owed_children

Chore = Unpark | BulkVerb | ChildrenOwed
_decode = msgspec.json.Decoder(Chore)


async def do_bunch(kernel: Kernel, record: Record) -> bool:
    """One bunch of a chore. False: someone else was faster; look again later."""
    chore = _decode.decode(record.body)
    if isinstance(chore, Unpark):
        return await _unpark(kernel, record, chore)
    if isinstance(chore, ChildrenOwed):
        return await _children(kernel, record, chore)
    return await _bulk(kernel, record, chore)


async def _commit(kernel: Kernel, batch: Batch) -> Committed | None:
    (receipt,) = await kernel.committer.commit([batch])
    return receipt if isinstance(receipt, Committed) else None


def _done(record: Record) -> DropRecord:
    return DropRecord(record.kind, record.key, record.version)


def _shorter(record: Record, chore: Chore, now_ms: int) -> PutRecord:
    body = msgspec.json.encode(chore)
    return PutRecord(structs.replace(record, version=record.version + 1, body=body, alarm_ms=now_ms))


async def _unpark(kernel: Kernel, record: Record, chore: Unpark) -> bool:
    """Bring runs parked under a key back, best first. Whatever is held by another gate is parked again by a claim."""
    left = chore.left
    if left is None:
        left = (await kernel.store.count()).states.get(State.READY, 0)
    again = _shorter(record, structs.replace(chore, left=left - ROWS_PER_BUNCH), kernel.env.now_ms())
    receipt = await _commit(kernel, Batch(records=(again,), unparks=(chore.key,)))
    if receipt is None:
        return False
    if receipt.unparked < ROWS_PER_BUNCH or left <= ROWS_PER_BUNCH:
        await _commit(kernel, Batch(records=(_done(again.record),)))
    return True


async def _children(kernel: Kernel, record: Record, chore: ChildrenOwed) -> bool:
    """Carry the end of a run down to its next bunch of children."""
    facts = Facts(runs=(chore.parent,), children_of=(chore.parent,), children_after=chore.after)
    loaded = await kernel.store.load(facts)
    parent = loaded.runs.get(chore.parent)
    edges = loaded.children.get(chore.parent, ())[:ROWS_PER_BUNCH]
    if parent is None or parent.state not in FINAL or not edges:
        return await _commit(kernel, Batch(records=(_done(record),))) is not None
    now_ms, actor = kernel.env.now_ms(), kernel.host_id
    changes: list[Run] = []
    events: list[AnyRunEvent] = []
    owed: list[PutRecord | DropRecord] = [_shorter(record, structs.replace(chore, after=edges[-1].run.id), now_ms)]
    for edge in edges:
        after = child_after(parent, edge.run, edge.when, now_ms, actor)
        if after is None:
            continue
        child, child_events = after
        changes.append(child)
        events.extend(child_events)
        if child.state in FINAL and child.has_children:
            owed.append(owed_children(child.id, now_ms))
    batch = Batch(changes=tuple(changed(run) for run in changes), records=tuple(owed), events=tuple(events))
    return await _commit(kernel, batch) is not None


async def _bulk(kernel: Kernel, record: Record, chore: BulkVerb) -> bool:
    """Cancel or rerun the next page of what a filter finds."""
    page = await kernel.store.find_runs(chore.query)
    if not page.runs:
        return await _commit(kernel, Batch(records=(_done(record),))) is not None
    now_ms = kernel.env.now_ms()
    next_query = structs.replace(chore.query, before=page.runs[-1].added)
    rest = _shorter(record, structs.replace(chore, query=next_query), now_ms)
    if chore.verb == "rerun":
        wanted = await kernel.again(page.runs)
        facts = facts_of(wanted, None)
        loaded = await kernel.store.load(facts if facts is not None else Facts())
        ids = [kernel.env.new_id() for _ in wanted]
        batch, _ = decide_adds(wanted, ids, loaded, None, now_ms, chore.actor)
        return await _commit(kernel, structs.replace(batch, records=(rest,))) is not None
    return await _cancel_page(kernel, chore, page.runs, rest, now_ms)


async def _cancel_page(kernel: Kernel, chore: BulkVerb, runs: tuple[Run, ...], rest: PutRecord, now_ms: int) -> bool:
    changes: list[Run] = []
    events: list[AnyRunEvent] = []
    owed: list[PutRecord] = [rest]
    stopping: list[str] = []
    for run in runs:
        if run.state in FINAL:
            continue
        found = cancel(run, chore.reason, now_ms, chore.actor)
        if not found:
            continue
        for event in found:
            run = evolve(run, event)
        changes.append(run)
        events.extend(found)
        if run.state not in FINAL:
            stopping.append(run.id)
        elif run.has_children:
            owed.append(owed_children(run.id, now_ms))
    batch = Batch(changes=tuple(changed(run) for run in changes), records=tuple(owed), events=tuple(events))
    if await _commit(kernel, batch) is None:
        return False
    await kernel.turner.tell_stops(stopping)
    return True
