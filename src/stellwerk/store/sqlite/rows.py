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

SQL = read_statements("stellwerk.store.sqlite", "queries.sql")
BULK = {name: Bulk(text) for name, text in SQL.items() if ":rows(" in text}

# As `run_item` in queries.sql puts it.
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


def is_plain(run: Run) -> bool:
    """Whether a new run fits the short insert: what only the past of a run can fill is empty."""
    return run.ended_ms is None and run.tries == 0 and run.crashes == 0 and run.reason is None \
        and run.error is None and run.exit_code is None and run.result is None and not run.stop_asked  # fmt: skip


def insert_values(run: Run, added: int, changed: int) -> tuple[Any, ...]:
    """The columns of `insert_runs`."""
    spec = run.spec
    return (
        added, run.id, run.version, run.state._value_, spec.queue, spec.scope, spec.name, run.priority,
        spec.created_ms, run.attempt, run.due_ms, run.alarm_ms, run.live_key, run.worker, run.started_ms,
        run.waits_for, run.has_children, run.parked, changed, encode(spec).decode(),
    )  # fmt: skip


def rest_values(run: Run) -> tuple[Any, ...]:
    """The further columns of `insert_runs_whole`."""
    return (
        run.tries, run.crashes, run.ended_ms, run.reason, run.error, run.exit_code, run.stop_asked,
        None if run.result is None else encode_text(run.result),
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
