"""Every statement that meets many runs walks the index that was made for it; none walks the history."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from sqlite3 import Connection

import pytest

from stellwerk.store.sqlite.opening import connect_writer
from stellwerk.store.sqlite.rows import BULK, SQL

TABLES_THAT_GROW = ("runs", "r", "labels", "l", "bodies", "b", "edges", "e", "records", "journal", "logs")
KEY = r"(PRIMARY KEY|rowid)"


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[Connection]:
    made = connect_writer(tmp_path / "stellwerk.db")
    yield made
    made.close()


def plan(connection: Connection, name: str) -> list[str]:
    """What SQLite will do, line by line. Values do not matter: the file has no statistics."""
    text = next(iter(BULK[name].pieces([0] * BULK[name].columns)))[0] if name in BULK else SQL[name]
    names = set(re.findall(r"(?<!:):([a-z_]+)", text))
    values = dict.fromkeys(names) if names else [None] * text.count("?")
    return [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {text}", values)]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("candidates", r"SEARCH runs USING INDEX runs_ready \(queue=\?\)"),
        ("best_parked", r"SEARCH runs USING INDEX runs_parked \(parked=\?\)"),
        ("candidates_only", r"SEARCH runs USING INDEX sqlite_autoindex_runs_1 \(id=\?\)"),
        ("all_running_specs", "USING INDEX runs_running"),
        ("end_leases", "USING INDEX runs_running"),
        ("rows_before", rf"SEARCH r USING INTEGER {KEY}"),
        ("update_runs", rf"SEARCH runs USING INTEGER {KEY}"),
        ("update_runs_results", rf"SEARCH runs USING INTEGER {KEY}"),
        ("update_runs_each", rf"SEARCH runs USING INTEGER {KEY}"),
        ("touch_runs", rf"SEARCH runs USING INTEGER {KEY}"),
        ("park", rf"SEARCH runs USING INTEGER {KEY}"),
        ("unpark", rf"SEARCH runs USING INTEGER {KEY}"),
        ("drop_runs", rf"SEARCH runs USING INTEGER {KEY}"),
        ("drop_logs", r"SEARCH logs USING .* \(run=\?\)"),
        ("runs_by_id", r"SEARCH runs USING INDEX sqlite_autoindex_runs_1 \(id=\?\)"),
        ("drop_labels", r"SEARCH labels USING .*INDEX labels_run \(run=\?\)"),
        ("drop_edges_up", r"SEARCH edges USING .*INDEX edges_child \(child=\?\)"),
        ("run_versions", r"SEARCH r USING INDEX sqlite_autoindex_runs_1 \(id=\?\)"),
        ("live_holders", r"SEARCH r USING INDEX runs_live \(live_key=\?\)"),
        ("record_versions", r"SEARCH r USING .*PRIMARY KEY \(kind=\? AND key=\?\)"),
        ("extend", rf"SEARCH runs USING INTEGER {KEY}"),
        ("kept", r"SEARCH r USING INDEX sqlite_autoindex_runs_1 \(id=\?\)"),
        ("waiting_children", r"SEARCH e USING PRIMARY KEY \(parent=\? AND child>\?\)"),
        ("bodies", r"SEARCH b USING PRIMARY KEY \(run=\? AND key=\?\)"),
        ("due_runs", r"SEARCH runs USING INDEX runs_alarm \(alarm_ms>\? AND alarm_ms<\?\)"),
        ("due_records", r"SEARCH records USING INDEX records_alarm"),
        ("next_alarm", r"SEARCH runs USING COVERING INDEX runs_alarm \(alarm_ms>\?\)"),
        ("find_all", rf"SEARCH runs USING INTEGER {KEY} \(rowid<\?\)"),
        ("find_waiting", r"SEARCH runs USING INDEX runs_waiting \(added<\?\)"),
        ("find_running", r"SEARCH runs USING INDEX runs_running \(added<\?\)"),
        ("find_succeeded", r"SEARCH runs USING INDEX runs_succeeded \(added<\?\)"),
        ("find_failed", r"SEARCH runs USING INDEX runs_failed \(added<\?\)"),
        ("find_cancelled", r"SEARCH runs USING INDEX runs_cancelled \(added<\?\)"),
        ("find_ready", "USING INDEX runs_ready"),
        ("find_parked", "USING INDEX runs_parked"),
        ("find_job", r"SEARCH runs USING INDEX runs_job \(scope=\?\)"),
        ("find_job_named", r"SEARCH runs USING INDEX runs_job \(scope=\? AND name=\? AND rowid<\?\)"),
        ("find_label", r"SEARCH l USING PRIMARY KEY \(key=\? AND value=\? AND run<\?\)"),
        ("journal_after", rf"SEARCH journal USING INTEGER {KEY} \(rowid>\?\)"),
        ("read_logs", r"SEARCH logs USING PRIMARY KEY \(run=\? AND last_line>\?\)"),
        ("logs_taken", r"SEARCH l USING .*INDEX logs_taken \(run=\? AND attempt=\? AND sequence=\?\)"),
        ("log_heads", r"SEARCH r USING INDEX sqlite_autoindex_runs_1 \(id=\?\)"),
        ("log_end", r"SEARCH logs USING .*PRIMARY KEY \(run=\?\)"),
    ],
)
def test_a_statement_walks_its_index(connection: Connection, name: str, wanted: str) -> None:
    lines = plan(connection, name)
    assert any(re.search(wanted, line) for line in lines), lines


IN_ORDER = ["candidates", "best_parked", "find_all", "find_failed", "find_job_named", "find_label", "journal_after"]


@pytest.mark.parametrize("name", IN_ORDER)
def test_what_is_read_in_order_is_not_sorted(connection: Connection, name: str) -> None:
    assert not [line for line in plan(connection, name) if "FOR ORDER BY" in line]


# A scan of an index that holds only live runs, or only the wanted ones, is no scan of the history.
SMALL_INDEX = re.compile(r"USING (COVERING )?INDEX runs_(ready|parked|running)\b")


STATEMENTS = sorted(name for name, text in SQL.items() if re.match(r"(SELECT|UPDATE|DELETE|INSERT)\b", text))
READ_FROM_AN_END = {"journal_ends", "journal_oldest", "stamp"}  # LIMIT, or max() of the key


@pytest.mark.parametrize("name", STATEMENTS)
def test_no_statement_scans_a_table_that_grows(connection: Connection, name: str) -> None:
    grows = re.compile(rf"SCAN ({'|'.join(TABLES_THAT_GROW)})\b")
    scans = [line for line in plan(connection, name) if grows.match(line) and not SMALL_INDEX.search(line)]
    assert scans == [] or name in READ_FROM_AN_END
