"""Edges: a child waits for its parents. What does the end of a parent mean for its children?

No recursion anywhere: the caller keeps a list of ended runs and works it off, so depth costs no stack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from stellwerk.core.batch import ROWS_PER_BUNCH
from stellwerk.core.events import AnyRunEvent, RunCancelled
from stellwerk.core.facts import Child
from stellwerk.core.run import FINAL, Run, State, When
from stellwerk.core.run_machine import evolve, parent_ended, ready


def satisfied(when: When, state: State) -> bool | None:
    """Whether an edge is satisfied by a parent in this state; None while the parent has not ended."""
    if state not in FINAL:
        return None
    return when in ("ended", state.value)


def impossible_reason(parent_id: str, state: State) -> str:
    """Why a child can never start."""
    return f"parent {parent_id} {'was ' if state is State.CANCELLED else ''}{state.value}"


def child_after(parent: Run, child: Run, when: When, now_ms: int, actor: str) -> tuple[Run, list[AnyRunEvent]] | None:
    """What the end of `parent` makes of a waiting child: ready, cancelled, or one parent fewer. None: nothing."""
    if child.state is not State.WAITING or child.waits_for == 0:
        return None
    holds = satisfied(when, parent.state)
    if holds is None:
        return None
    if not holds:
        cancelled = RunCancelled(
            child.spec.key, actor, now_ms, child.id, child.attempt, impossible_reason(parent.id, parent.state)
        )
        return evolve(child, cancelled), [cancelled]
    child = parent_ended(child)
    events = ready(child, now_ms, actor)
    for event in events:
        child = evolve(child, event)
    return child, events


class Consequences(Struct):
    """What an end does to the runs below it.

    `owed`: parents with more children than one batch takes; `missing`: parents whose children must be read first;
    `relied`: children left alone because of what this gather decided about them before, which must stand.
    """

    changes: dict[str, Run]
    events: list[AnyRunEvent]
    owed: list[str]
    missing: list[str]
    relied: dict[str, Run]


def consequences(
    ended: Run, children: Mapping[str, Sequence[Child]], rows: Mapping[str, Run], now_ms: int, actor: str
) -> Consequences:
    """Carry the end of a run down: children readied, cancelled or still waiting, and what follows from those.

    `rows` are rows that this gather has already decided about; they stand before what was read.
    """
    found = Consequences({}, [], [], [], {})
    ended_runs = [ended]
    while ended_runs:
        parent = ended_runs.pop()
        if not parent.has_children:
            continue
        edges = children.get(parent.id)
        if edges is None:
            found.missing.append(parent.id)
        elif len(found.changes) + len(edges) > ROWS_PER_BUNCH:
            found.owed.append(parent.id)
        else:
            for edge in edges:
                row = found.changes.get(edge.run.id) or rows.get(edge.run.id) or edge.run
                after = child_after(parent, row, edge.when, now_ms, actor)
                if after is None:
                    if edge.run.id in rows and edge.run.id not in found.changes:
                        found.relied[edge.run.id] = row
                    continue
                child, events = after
                found.changes[child.id] = child
                found.events.extend(events)
                if child.state in FINAL:
                    ended_runs.append(child)
    return found


def find_cycle(parents_of: Mapping[int, Sequence[int]]) -> list[int] | None:
    """A cycle among the entries of one request, as the entries that cannot be put in order; None if there is none."""
    children_of: dict[int, list[int]] = {}
    open_parents: dict[int, int] = {}
    for child, parents in parents_of.items():
        open_parents[child] = len(parents)
        for parent in parents:
            children_of.setdefault(parent, []).append(child)
    free = [entry for entry, count in open_parents.items() if count == 0]
    while free:
        for child in children_of.get(free.pop(), ()):
            open_parents[child] -= 1
            if open_parents[child] == 0:
                free.append(child)
    left = [entry for entry, count in open_parents.items() if count > 0]
    return left or None
