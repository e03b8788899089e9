"""Turns: a run's row meets a decision, its children follow, and the whole is one batch.

Ends of attempts, expired leases, due times, cancellations and edits all go this way, many at once. A turn is decided
on the row that the caller holds; only a conflict makes it read, and only a run with children reads those.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import Struct

from stellwerk.core import run_machine
from stellwerk.core.batch import (
    Batch,
    ChangeRun,
    Committed,
    DropRun,
    PutRecord,
    Record,
    RowVersion,
    changed,
)
from stellwerk.core.dag import consequences
from stellwerk.core.errors import Unavailable
from stellwerk.core.events import AnyRunEvent, ResultRejected, RunDropped, RunStopAsked
from stellwerk.core.facts import Child, Facts
from stellwerk.core.run import FINAL, Body, BodyRef, Outcome, Run
from stellwerk.dispatch.protocol import STOP, Dispatch, Wake
from stellwerk.kernel.committer import Committer
from stellwerk.kernel.env import Env
from stellwerk.store.protocol import Store

CALM_TRIES = 3  # conflicts after which a turn goes alone and with jitter
TRIES_MAX = 50
AHEAD_PARENTS_MAX = 100  # whose children are read before it is known that they are needed
CHORE = "chore"


class Turn(Protocol):
    """One decision about one run. `run` is the row that the caller holds."""

    @property
    def run(self) -> Run: ...
    @property
    def actor(self) -> str: ...
    @property
    def bodies(self) -> tuple[Body, ...]: ...
    @property
    def guards_lease(self) -> bool: ...
    def decide(self, run: Run, now_ms: int, chance: float) -> list[AnyRunEvent]: ...


class Finish(Struct, frozen=True):
    """A worker says how its attempt ended."""

    run: Run
    attempt: int
    actor: str  # the worker
    outcome: Outcome
    result: BodyRef | None = None
    bodies: tuple[Body, ...] = ()
    guards_lease: bool = False

    def decide(self, run: Run, now_ms: int, chance: float) -> list[AnyRunEvent]:
        return run_machine.finish(
            run, self.attempt, self.actor, self.outcome, result=self.result, now_ms=now_ms, chance=chance
        )


class Expire(Struct, frozen=True):
    """A lease is over. The change names the lease end it saw: a living worker's lease is never taken."""

    run: Run
    actor: str
    bodies: tuple[Body, ...] = ()
    guards_lease: bool = True

    def decide(self, run: Run, now_ms: int, chance: float) -> list[AnyRunEvent]:
        return run_machine.expire(run, now_ms, chance, self.actor)


class Ready(Struct, frozen=True):
    """A due time has come."""

    run: Run
    actor: str
    bodies: tuple[Body, ...] = ()
    guards_lease: bool = False

    def decide(self, run: Run, now_ms: int, chance: float) -> list[AnyRunEvent]:
        return run_machine.ready(run, now_ms, self.actor)


class Cancel(Struct, frozen=True):
    """Someone wants it ended. In bulk, runs that have ended meanwhile are left alone instead of refused."""

    run: Run
    actor: str
    reason: str
    in_bulk: bool = False
    bodies: tuple[Body, ...] = ()
    guards_lease: bool = False

    def decide(self, run: Run, now_ms: int, chance: float) -> list[AnyRunEvent]:
        if self.in_bulk and run.state in FINAL:
            return []
        return run_machine.cancel(run, self.reason, now_ms, self.actor)


class Edit(Struct, frozen=True):
    run: Run
    actor: str
    priority: int | None
    due_ms: int | None
    bodies: tuple[Body, ...] = ()
    guards_lease: bool = False

    def decide(self, run: Run, now_ms: int, chance: float) -> list[AnyRunEvent]:
        return run_machine.edit(run, self.priority, self.due_ms, now_ms, self.actor)


class Settle(Struct, frozen=True):
    """A run that needs no worker ends."""

    run: Run
    actor: str
    succeeded: bool
    reason: str
    bodies: tuple[Body, ...] = ()
    guards_lease: bool = False

    def decide(self, run: Run, now_ms: int, chance: float) -> list[AnyRunEvent]:
        return run_machine.settle(run, self.succeeded, self.reason, now_ms, self.actor)


class Drop(Struct, frozen=True):
    """The time of keeping is over."""

    run: Run
    actor: str
    bodies: tuple[Body, ...] = ()
    guards_lease: bool = False

    def decide(self, run: Run, now_ms: int, chance: float) -> list[AnyRunEvent]:
        return run_machine.drop(run, now_ms, self.actor)


class Turned(Struct, frozen=True):
    """What became of a turn: the row as it is now, and the EventId at which that is true."""

    run: Run
    event_id: int


class ChildrenOwed(Struct, frozen=True, tag="children"):
    """A chore: children of an ended run that one batch could not take."""

    parent: str
    after: str = ""


class Turner:
    """Does turns: read → decide → commit → wake, the one loop."""

    def __init__(self, store: Store, committer: Committer, dispatch: Dispatch, env: Env) -> None:
        self._store = store
        self._committer = committer
        self._dispatch = dispatch
        self._env = env
        self.contended = 0  # turns that now go alone after conflicts; /health shows it

    async def turn(self, turns: Sequence[Turn], *, give_up: bool = False) -> list[Turned | None]:
        """Decide and commit all. None: the run is gone, or (with `give_up`) someone else was faster."""
        done: list[Turned | None] = [None] * len(turns)
        rows: dict[str, Run] = {}
        left = list(range(len(turns)))
        for tries in range(TRIES_MAX):
            if tries >= CALM_TRIES:
                await asyncio.sleep(self._env.chance() * 0.01 * tries)
            left = await self._try(turns, left, rows, done, alone=tries >= CALM_TRIES)
            if not left or give_up:
                return done
            loaded = await self._store.load(Facts(runs=tuple(turns[place].run.id for place in left)))
            rows.update(loaded.runs)
            left = [place for place in left if turns[place].run.id in loaded.runs]
        raise Unavailable(f"{len(left)} runs change too fast to be decided about; try again")

    async def _try(
        self,
        turns: Sequence[Turn],
        places: list[int],
        rows: dict[str, Run],
        done: list[Turned | None],
        *,
        alone: bool,
    ) -> list[int]:
        """One pass; answers the places that met a conflict."""
        self.contended += alone
        try:
            if not alone:
                return await self._pass(turns, places, rows, done)
            conflicts: list[int] = []
            for place in places:
                conflicts.extend(await self._pass(turns, [place], rows, done))
            return conflicts
        finally:
            self.contended -= alone

    async def _pass(
        self, turns: Sequence[Turn], places: list[int], rows: dict[str, Run], done: list[Turned | None]
    ) -> list[int]:
        children: dict[str, tuple[Child, ...]] = {}
        levels = 1
        while True:
            plan = _plan([turns[place] for place in places], rows, children, self._env.now_ms(), self._env)
            if not plan.missing:
                break
            await self._read_down(tuple(dict.fromkeys(plan.missing)), children, levels)
            levels *= 2
        if not plan.batches:
            for place in places:
                done[place] = Turned(rows.get(turns[place].run.id, turns[place].run), 0)
            return []
        receipts = await self._committer.commit(plan.batches)
        conflicts: list[int] = []
        stops: list[str] = []
        for place, step in zip(places, plan.steps, strict=True):
            if step.batch_place is None:
                done[place] = Turned(step.run, 0)
                continue
            receipt = receipts[step.batch_place]
            if isinstance(receipt, Committed):
                done[place] = Turned(step.run, receipt.event_id)
                if step.stops:
                    stops.append(step.run.id)
            else:
                conflicts.append(place)
        await self.tell_stops(stops)
        return conflicts

    async def _read_down(self, parents: tuple[str, ...], children: dict[str, tuple[Child, ...]], levels: int) -> None:
        """Read children, and theirs: as many levels at once as were needed so far, so that a chain is not decided
        anew for each of its links.
        """
        for _ in range(levels):
            loaded = await self._store.load(Facts(children_of=parents))
            below: list[str] = []
            for parent in parents:
                children[parent] = loaded.children.get(parent, ())
                below.extend(child.run.id for child in children[parent] if child.run.has_children)
            parents = tuple(run_id for run_id in dict.fromkeys(below) if run_id not in children)[:AHEAD_PARENTS_MAX]
            if not parents:
                return

    async def tell_stops(self, run_ids: Sequence[str]) -> None:
        """Running attempts were asked to stop: whoever holds them may look now instead of at the next heartbeat."""
        if run_ids:
            await self._dispatch.wake([Wake(STOP, tuple(run_ids))])


THE_ENDS = -1  # the place of the batch of all ends: the last


class _Step:
    """What was decided about one turn; no batch if there was nothing to do."""

    __slots__ = ("batch_place", "run", "stops")

    def __init__(self, run: Run, batch_place: int | None, stops: bool) -> None:
        self.run = run
        self.batch_place = batch_place
        self.stops = stops


class _Plan:
    __slots__ = ("batches", "missing", "steps")

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.steps: list[_Step] = []
        self.missing: list[str] = []


def _plan(
    turns: Sequence[Turn],
    known: dict[str, Run],
    children: dict[str, tuple[Child, ...]],
    now_ms: int,
    env: Env,
) -> _Plan:
    """Decide all turns, one after another over an overlay of what was just decided."""
    plan = _Plan()
    overlay: dict[str, Run] = {}
    ends: dict[str, ChangeRun] = {}
    end_events: list[AnyRunEvent] = []
    for turn in turns:
        before = turn.run
        if overlay or known:
            before = overlay.get(before.id) or known.get(before.id) or before
        events = turn.decide(before, now_ms, env.chance())
        if not events and before.id not in overlay:
            plan.steps.append(_Step(before, None, False))
            continue
        if not events:
            # Nothing to do only because of what was just decided about another run: that must stand.
            plan.steps.append(_Step(before, len(plan.batches), False))
            plan.batches.append(Batch(relied=(_relied(before),)))
            continue
        run = before
        for event in events:
            run = run_machine.evolve(run, event)
        plan.steps.append(_Step(run, len(plan.batches), isinstance(events[-1], RunStopAsked)))
        if isinstance(events[0], ResultRejected):
            plan.batches.append(Batch(events=tuple(events)))
            continue
        if isinstance(events[-1], RunDropped):
            plan.batches.append(Batch(drops=(DropRun(run.id, run.version),), events=tuple(events)))
            continue
        change = changed(run, bodies=turn.bodies, lease_ms=before.alarm_ms if turn.guards_lease else None)
        if run.has_children and run.state in FINAL:
            _with_children(plan, change, run, events, children, overlay, now_ms, turn.actor)
        elif type(turn) is Finish and not known and run.id not in ends:
            # Ends seldom meet a conflict, so at first they go as one batch; each alone if it is refused.
            ends[run.id] = change
            end_events.extend(events)
            plan.steps[-1].batch_place = THE_ENDS
        else:
            plan.batches.append(Batch(changes=(change,), events=tuple(events)))
        if run.has_children or overlay:
            overlay[run.id] = change.run
    if ends:
        plan.batches.append(Batch(changes=tuple(ends.values()), events=tuple(end_events)))
    return plan


def _with_children(
    plan: _Plan,
    change: ChangeRun,
    run: Run,
    events: list[AnyRunEvent],
    children: dict[str, tuple[Child, ...]],
    overlay: dict[str, Run],
    now_ms: int,
    actor: str,
) -> None:
    found = consequences(run, children, overlay, now_ms, actor)
    plan.missing.extend(found.missing)
    changes = [change]
    for child in found.changes.values():
        child_change = changed(child)
        changes.append(child_change)
        overlay[child.id] = child_change.run
    plan.batches.append(
        Batch(
            changes=tuple(changes),
            records=tuple(owed_children(parent, now_ms) for parent in found.owed),
            relied=tuple(_relied(child) for child in found.relied.values()),
            events=(*events, *found.events),
        )
    )


def _relied(run: Run) -> RowVersion:
    return RowVersion(("run", run.id), run.version)


def owed_children(parent: str, now_ms: int) -> PutRecord:
    """The chore that carries the end of a run down to very many children."""
    body = msgspec.json.encode(ChildrenOwed(parent))
    return PutRecord(Record(CHORE, f"children/{parent}", 1, body, "children", now_ms))
