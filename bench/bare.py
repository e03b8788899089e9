"""Yardsticks: bare SQLite loops that make the same durable steps and nothing else."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

SCHEMA = """
CREATE TABLE runs(id TEXT PRIMARY KEY, state TEXT, priority INT, created INT, worker TEXT) STRICT;
CREATE INDEX ready ON runs(priority DESC, created, id) WHERE state = 'ready';
"""
INSERT = "INSERT INTO runs VALUES (?, 'ready', 100, ?, NULL)"
PICK = "SELECT id FROM runs WHERE state = 'ready' ORDER BY priority DESC, created, id LIMIT 1"
CLAIM = "UPDATE runs SET state = 'running', worker = 'w' WHERE id = ?"
FINISH = "UPDATE runs SET state = 'succeeded' WHERE id = ?"


def open_bare(folder: Path) -> sqlite3.Connection:
    """A database like the store's own: WAL, every commit flushed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "bare.db"
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.executescript(SCHEMA)
    return connection


def cycle(connection: sqlite3.Connection, number: int) -> None:
    """Insert, claim, finish: a commit each."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(INSERT, (f"{number:012d}", number))
    connection.execute("COMMIT")
    connection.execute("BEGIN IMMEDIATE")
    (found,) = connection.execute(PICK).fetchone()
    connection.execute(CLAIM, (found,))
    connection.execute("COMMIT")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(FINISH, (found,))
    connection.execute("COMMIT")


def cycles_per_second(folder: Path, seconds: float = 2.0) -> float:
    """How many whole cycles the bare loop makes in a second."""
    connection = open_bare(folder)
    started = time.perf_counter()
    count = 0
    while time.perf_counter() - started < seconds:
        cycle(connection, count)
        count += 1
    elapsed = time.perf_counter() - started
    connection.close()
    return count / elapsed
