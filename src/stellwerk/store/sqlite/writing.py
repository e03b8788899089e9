"""From a sheet to the tables, in few statements: rows that get the same new head are one UPDATE."""

from __future__ import annotations

import sqlite3
from collections import Counter
from typing import Any

from stellwerk.store.sqlite.rows import (
    BULK,
    SQL,
    encode_text,
    head_of,
    insert_of,
    insert_values,
)
from stellwerk.store.sqlite.sheet import Sheet

GROUP_ROWS_MIN = 3  # smaller groups are written together, each row with a head of its own


class Mismatch(Exception):
    """Fewer rows were written than hoped: somebody else wrote one of them since, or a key is taken."""


def write_sheet(connection: sqlite3.Connection, sheet: Sheet, changed: int, *, hopeful: bool) -> None:
    """Write all rows of a sheet.

    In hope, new runs come first: a live key that this same call gives up counts as taken, as the comparison has it.
    After a comparison they come last, so that an id dropped by this call is free.
    """
    if hopeful:
        _insert_runs(connection, sheet, changed)
    if sheet.drops:
        _drop_runs(connection, sheet)
    if sheet.changes:
        _update_runs(connection, sheet, changed)
    if not hopeful:
        _insert_runs(connection, sheet, changed)
    for key, parked in sheet.parks.items():
        connection.execute(SQL["park"], (key, encode_text(parked)))
    if sheet.bodies:
        values = [value for (run, key), data in sheet.bodies.items() for value in (run, key, data)]
        BULK["put_bodies"].write(connection, values)
    if sheet.edges:
        values = [value for (parent, child), when in sheet.edges.items() for value in (parent, child, when)]
        BULK["put_edges"].write(connection, values)
    if sheet.records or sheet.records_gone:
        _write_records(connection, sheet)
    if sheet.gates:
        _write_gates(connection, sheet)


def count_sheet(sheet: Sheet, counts: Counter[tuple[str, str]]) -> None:
    """Add to the counters what a sheet makes of them: minus what its rows were, plus what they are."""
    counts.subtract(sheet.before)
    counts.update([(run.spec.queue, run.state._value_) for run in sheet.adds.values()])
    counts.update([(run.spec.queue, run.state._value_) for run, _ in sheet.changes.values()])


def write_counts(connection: sqlite3.Connection, counts: Counter[tuple[str, str]]) -> None:
    """One statement for all counters that moved."""
    moved = [(queue, state, number) for (queue, state), number in counts.items() if number != 0]
    if moved:
        connection.execute(SQL["add_counts"], (encode_text(moved),))


# -- runs -------------------------------------------------------------------------------------------------------------


def _insert_runs(connection: sqlite3.Connection, sheet: Sheet, changed: int) -> None:
    if not sheet.adds:
        return
    inserts: dict[str, list[Any]] = {}
    labels: list[Any] = []
    for run_id, run in sheet.adds.items():
        added = sheet.added[run_id]
        name, more = insert_of(run)
        values = inserts.get(name)
        if values is None:
            values = inserts[name] = []
        values += insert_values(run, added, changed)
        values += more
        if run.spec.labels:
            for key, value in run.spec.labels.items():
                labels += (key, value, added)
    written = sum(BULK[name].write(connection, values) for name, values in inserts.items())
    if written != len(sheet.adds):
        raise Mismatch
    if labels:
        BULK["insert_labels"].write(connection, labels)


def _update_runs(connection: sqlite3.Connection, sheet: Sheet, changed: int) -> None:
    added = sheet.added
    alike: dict[tuple[Any, ...], list[int]] = {}  # same head, no result
    results: dict[tuple[Any, ...], dict[int, str]] = {}  # same head, each its own result
    for run_id, (run, base) in sheet.changes.items():
        head = (*head_of(run), base)
        if run.result is None:
            group = alike.get(head)
            if group is None:
                alike[head] = [added[run_id]]
            else:
                group.append(added[run_id])
        else:
            results.setdefault(head, {})[added[run_id]] = encode_text(run.result)
    written = 0
    singles: list[Any] = []
    for head, rows in alike.items():
        if len(rows) < GROUP_ROWS_MIN:
            for row in rows:
                singles += (*head[:-1], None, changed, row, head[-1])
        else:
            values = (*head[:-1], changed, encode_text(rows), head[-1])
            written += connection.execute(SQL["update_runs"], values).rowcount
    for head, texts in results.items():
        if len(texts) < GROUP_ROWS_MIN:
            for row, text in texts.items():
                singles += (*head[:-1], text, changed, row, head[-1])
        else:
            values = (*head[:-1], changed, encode_text(texts), head[-1])
            written += connection.execute(SQL["update_runs_results"], values).rowcount
    if singles:
        written += BULK["update_runs_each"].write(connection, singles)
    if written != len(sheet.changes):
        raise Mismatch


def _drop_runs(connection: sqlite3.Connection, sheet: Sheet) -> None:
    run_ids = encode_text(list(sheet.drops))
    connection.execute(SQL["drop_logs"], (run_ids,))
    connection.execute(SQL["drop_labels"], (run_ids,))
    connection.execute(SQL["drop_bodies"], (run_ids,))
    connection.execute(SQL["drop_edges_down"], (run_ids,))
    connection.execute(SQL["drop_edges_up"], (run_ids,))
    if connection.execute(SQL["drop_runs"], (encode_text(sheet.drops),)).rowcount != len(sheet.drops):
        raise Mismatch


# -- records and gates ------------------------------------------------------------------------------------------------


def _write_records(connection: sqlite3.Connection, sheet: Sheet) -> None:
    if sheet.records_gone:
        connection.execute(SQL["drop_records"], (encode_text(list(sheet.records_gone)),))
    values: list[Any] = []
    for record in sheet.records.values():
        values += (
            record.kind, record.key, record.version, record.tag, record.alarm_ms, record.added, record.body,
        )  # fmt: skip
    if values:
        BULK["put_records"].write(connection, values)


def _write_gates(connection: sqlite3.Connection, sheet: Sheet) -> None:
    gone = [place for place, gate in sheet.gates.items() if gate is None]
    if gone:
        connection.execute(SQL["drop_gates"], (encode_text(gone),))
    values: list[Any] = []
    for gate in sheet.gates.values():
        if gate is not None:
            values += (gate.key, gate.kind, gate.until_ms, encode_text(gate))
    if values:
        BULK["put_gates"].write(connection, values)
