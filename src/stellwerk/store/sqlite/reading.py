"""Looking: each function is called inside one read transaction, so that all it answers is true at one moment."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from stellwerk.core.batch import Record
from stellwerk.core.facts import Child, Facts, Loaded
from stellwerk.core.queries import PAGE_ROWS_MAX, Counts, Due, RunPage, RunQuery
from stellwerk.core.run import Run, State, When
from stellwerk.store.sqlite.claiming import GateBook, read_bodies, running_keys
from stellwerk.store.sqlite.rows import SQL, decode_gates, encode_text, records_of, runs_of

RARE_RUNS_MAX = 20_000  # a state with fewer runs is searched by its own index, whatever else is asked
EVENT_ID_MAX = 2**62

_decode_names = msgspec.json.Decoder(list[str]).decode
_decode_pairs = msgspec.json.Decoder(list[tuple[str, str]]).decode
_decode_edges = msgspec.json.Decoder(list[tuple[str, list[tuple[str, When]]]]).decode
_decode_counts = msgspec.json.Decoder(list[tuple[str, State, int]]).decode

# A run that is ready is in one of two indexes.
_BY_STATE: Mapping[State, Sequence[str]] = {
    State.WAITING: ("find_waiting",),
    State.READY: ("find_ready", "find_parked"),
    State.RUNNING: ("find_running",),
    State.SUCCEEDED: ("find_succeeded",),
    State.FAILED: ("find_failed",),
    State.CANCELLED: ("find_cancelled",),
}


def load(connection: sqlite3.Connection, facts: Facts) -> Loaded:
    """All that a decision needs."""
    records: dict[tuple[str, str], Record] = {}
    for name, wanted in (("records_by_key", facts.records), ("records_by_kind", facts.kinds)):
        if wanted:
            for record in records_of(one_text(connection, name, encode_text(wanted))):
                records[record.kind, record.key] = record
    holders: dict[str, str] = {}
    if facts.live_keys:
        holders.update(_decode_pairs(one_text(connection, "live_holders", encode_text(facts.live_keys))))
    running: dict[str, int] = {}
    gates = GateBook(decode_gates(one_text(connection, "all_gates")) if facts.gates or facts.running else ())
    if facts.running and gates.limited:
        counted = running_keys(connection)
        running = {key: counted[key] for key in gates.limited}
    return Loaded(
        event_id=stamp(connection),
        runs=runs_by_id(connection, facts.runs),
        holders=holders,
        children=_waiting_children(connection, facts),
        live_below=_live_below(connection, facts),
        records=records,
        bodies=read_bodies(connection, facts.bodies),
        gates=gates.gates if facts.gates else (),
        running=running,
    )


def stamp(connection: sqlite3.Connection) -> int:
    """The last EventId."""
    return int(connection.execute(SQL["stamp"]).fetchone()[0])


def runs_by_id(connection: sqlite3.Connection, run_ids: Sequence[str]) -> dict[str, Run]:
    """Those of the named runs that exist."""
    if not run_ids:
        return {}
    return {run.id: run for run in runs_of(one_text(connection, "runs_by_id", encode_text(run_ids)))}


def _live_below(connection: sqlite3.Connection, facts: Facts) -> frozenset[str]:
    if not facts.live_below:
        return frozenset()
    return frozenset(_decode_names(one_text(connection, "live_below", encode_text(facts.live_below))))


def _waiting_children(connection: sqlite3.Connection, facts: Facts) -> dict[str, tuple[Child, ...]]:
    if not facts.children_of:
        return {}
    values = {
        "parents": encode_text(facts.children_of),
        "after": facts.children_after,
        "most": facts.children_max + 1,
    }
    edges = dict(_decode_edges(connection.execute(SQL["waiting_children"], values).fetchone()[0]))
    runs = runs_by_id(connection, list({child for found in edges.values() for child, _ in found}))
    return {
        parent: tuple(Child(runs[child], when) for child, when in found) for parent, found in edges.items() if found
    }


def count(connection: sqlite3.Connection) -> Counts:
    """From the counters."""
    queues = {(queue, state): number for queue, state, number in _decode_counts(one_text(connection, "counts"))}
    states: Counter[State] = Counter()
    for (_, state), number in queues.items():
        states[state] += number
    return Counts(stamp(connection), dict(states), queues)


def due(connection: sqlite3.Connection, now_ms: int, limit: int) -> Due:
    """What has rung, and what rings next."""
    return Due(
        runs=tuple(runs_of(connection.execute(SQL["due_runs"], (now_ms, limit)).fetchone()[0])),
        records=tuple(records_of(connection.execute(SQL["due_records"], (now_ms, limit)).fetchone()[0])),
        gates=tuple(decode_gates(connection.execute(SQL["due_gates"], (now_ms, limit)).fetchone()[0])),
        next_ms=connection.execute(SQL["next_alarm"], {"now_ms": now_ms}).fetchone()[0],
    )


def find_runs(connection: sqlite3.Connection, query: RunQuery) -> RunPage:
    """A page of runs, newest first. One more than asked for is read, to know whether there are more."""
    limit = min(query.limit, PAGE_ROWS_MAX)
    values = {
        "states": encode_text(sorted(query.states)) if query.states else None,
        "scope": query.scope,
        "name": query.name,
        "label_key": None if query.label is None else query.label[0],
        "label_value": None if query.label is None else query.label[1],
        "since_ms": query.since_ms,
        "until_ms": query.until_ms,
        "before": EVENT_ID_MAX if query.before is None else query.before,
        "limit": limit + 1,
    }
    runs: list[Run] = []
    for name in _searches(connection, query):
        runs += runs_of(connection.execute(SQL[name], values).fetchone()[0])
    runs.sort(key=lambda run: -run.added)
    page = tuple(runs[:limit])
    return RunPage(stamp(connection), page, page[-1].added if page and len(runs) > limit else None)


def _searches(connection: sqlite3.Connection, query: RunQuery) -> Sequence[str]:
    """Which index to walk: the one that leads to few rows."""
    by_state = [name for state in sorted(query.states) for name in _BY_STATE[state]]
    if query.label is None and query.scope is None:
        return by_state or ["find_all"]
    if query.states:
        counts = count(connection).states
        if sum(counts.get(state, 0) for state in query.states) <= RARE_RUNS_MAX:
            return by_state
    if query.label is not None:
        return ["find_label"]
    return ["find_job" if query.name is None else "find_job_named"]


def one_text(connection: sqlite3.Connection, name: str, *values: str) -> str:
    """The one text that a statement answers."""
    found: str = connection.execute(SQL[name], values).fetchone()[0]
    return found
