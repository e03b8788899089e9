"""Runs as rows and back. All SQL of this store is read here, once.

`state._value_` is the plain string of a state: ten times faster to get than `.value`, and to bind than the enum.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import structs

from stellwerk.core.batch import Record
from stellwerk.core.gates import Gate
from stellwerk.core.run import BodyRef, Run, Spec, State
from stellwerk.store.sql_file import Bulk, read_statements

SQL = read_statements(
    "stellwerk.store.sqlite",
    *("shapes.sql", "writing.sql", "claiming.sql", "reading.sql", "journal.sql", "connection.sql"),
)
BULK = {name: Bulk(text) for name, text in SQL.items() if ":rows(" in text}

# As `run_item` in shapes.sql puts it.
RunItem = tuple[
    Spec, BodyRef | None, bool, bool,
    str, int, State, int, int, int, int, int | None, int | None, str | None, str | None,
    int | None, int | None, str | None, str | None, int | None, int, str | None, int, int,
]  # fmt: skip
RecordItem = tuple[str, str, int, str, str, int | None, int]

decode_items = msgspec.json.Decoder(list[RunItem]).decode
decode_specs = msgspec.json.Decoder(list[Spec]).decode
decode_gates = msgspec.json.Decoder(list[Gate]).decode
decode_record_items = msgspec.json.Decoder(list[RecordItem]).decode
encode = msgspec.json.Encoder().encode

_NO_PAST = (None, None, None, None, None, None, None, 0, 0, 0, False, False)
_NOTHING_BUT_DUE = (None, None, None, None, None, None, None, None, None, 0, 0, 0, 0, 0, 0)


def encode_text(value: Any) -> str:
    """JSON as text, for a column or a parameter."""
    return encode(value).decode()


def runs_of(text: str) -> list[Run]:
    """The runs of a list of `run_item`."""
    return [
        Run(
            run_id, version, state, priority, spec, attempt, tries, crashes, due_ms, alarm_ms, live_key, worker,
            started_ms, ended_ms, reason, error, exit_code, waits_for, has_children, stop_asked, result,
            parked, added, changed,
        )
        for (
            spec, result, has_children, stop_asked,
            run_id, version, state, priority, attempt, tries, crashes, due_ms, alarm_ms, live_key, worker,
            started_ms, ended_ms, reason, error, exit_code, waits_for, parked, added, changed,
        ) in decode_items(text)
    ]  # fmt: skip


def records_of(text: str) -> list[Record]:
    """The records of a list of record items."""
    return [
        Record(kind, key, version, bytes.fromhex(body), tag, alarm_ms, added)
        for kind, key, version, body, tag, alarm_ms, added in decode_record_items(text)
    ]


def insert_of(run: Run) -> tuple[str, tuple[Any, ...]]:
    """The insert that fits a new run, and the values of the columns that it has beyond those of every run."""
    if (
        run.due_ms, run.ended_ms, run.reason, run.error, run.exit_code, run.parked, run.result,
        run.tries, run.crashes, run.waits_for, run.has_children, run.stop_asked,
    ) == _NO_PAST:  # fmt: skip
        if run.worker is None:
            if run.alarm_ms is None and run.started_ms is None and run.attempt == 0:
                return ("insert_bare", ()) if run.live_key is None else ("insert_live", (run.live_key,))
        else:
            started = (run.attempt, run.alarm_ms, run.worker, run.started_ms)
            return ("insert_started", started) if run.live_key is None else (
                "insert_started_live", (*started, run.live_key))  # fmt: skip
    return _insert_rest(run)


def _insert_rest(run: Run) -> tuple[str, tuple[Any, ...]]:
    """The same for runs that are not ready at once."""
    result = None if run.result is None else encode_text(run.result)
    texts = (run.reason, run.error, run.exit_code, run.parked, result)
    numbers = (run.attempt, run.tries, run.crashes, run.waits_for, int(run.has_children), int(run.stop_asked))
    whole = (run.due_ms, run.alarm_ms, run.live_key, run.worker, run.started_ms, run.ended_ms, *texts, *numbers)
    if whole[2:] == _NOTHING_BUT_DUE:
        return "insert_due", whole[:2]
    return "insert_whole", whole


def insert_values(run: Run, added: int, changed: int) -> tuple[Any, ...]:
    """The columns that every insert begins with."""
    spec = run.spec
    return (
        added, run.id, run.version, run.state._value_, spec.queue, spec.scope, spec.name, run.priority,
        spec.created_ms, changed, encode(spec).decode(),
    )  # fmt: skip


def head_of(run: Run) -> tuple[Any, ...]:
    """The changing columns but result and changed, in the order of `update_runs`; equal heads are one group."""
    (
        _, version, state, priority, _, attempt, tries, crashes, due_ms, alarm_ms, live_key, worker, started_ms,
        ended_ms, reason, error, exit_code, waits_for, has_children, stop_asked, _, parked, _, _,
    ) = structs.astuple(run)  # fmt: skip
    return (
        version, state._value_, priority, attempt, tries, crashes, due_ms, alarm_ms, live_key, worker, started_ms,
        ended_ms, reason, error, exit_code, waits_for, has_children, stop_asked, parked,
    )  # fmt: skip
