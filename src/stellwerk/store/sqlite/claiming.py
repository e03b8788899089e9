"""Claims: the best ready runs of a queue, from the database and from what the same call has just written.

The lifecycle is not spelled a second time in SQL: candidates come by index, `gates.verdict`, `start` and `evolve` of
the core decide, and the rows are written with the others of the call.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import merge

from msgspec import structs

from stellwerk.core.batch import ROWS_PER_BUNCH, Claim, Claimed, ClaimedRun
from stellwerk.core.events import AnyEvent
from stellwerk.core.gates import Gate, Open, by_key, verdict
from stellwerk.core.run import NO_QUEUE, Body, Run, State
from stellwerk.core.run_machine import evolve, start
from stellwerk.store.sqlite.rows import SQL, decode_specs, encode_text, runs_of
from stellwerk.store.sqlite.sheet import Sheet, urgency

PAGE_RUNS_MAX = 1_024  # candidates read at once


class Found:
    """What one claim has found so far."""

    __slots__ = ("more", "parked", "refused", "started")

    def __init__(self) -> None:
        self.started: list[str] = []
        self.parked = 0
        self.more = False
        self.refused: list[tuple[str, Gate]] = []


class Claiming:
    """The claims of one call. What they start and park goes onto the sheet; their events come after its own."""

    def __init__(
        self, connection: sqlite3.Connection, sheet: Sheet, gates: Sequence[Gate], events: list[AnyEvent], now_ms: int
    ) -> None:
        self._connection = connection
        self._sheet = sheet
        self._gates = by_key(gates)
        self._is_limited = any(gate.limit is not None for gate in gates)
        self._running: Mapping[str, int] | None = None
        self._events = events
        self._now_ms = now_ms
        self._lines: dict[str, _Line] = {}

    def serve(self, claim: Claim) -> Found:
        """Start the best, park the held."""
        assert claim.queue != NO_QUEUE, "runs without a worker are never claimed"
        found = Found()
        if claim.only:
            self._serve_only(claim, found)
            return found
        line = self._line(claim.queue)
        while len(found.started) < claim.limit:
            run = line.best(claim.limit - len(found.started))
            if run is None:
                break
            if found.parked == ROWS_PER_BUNCH:
                found.more = True
                break
            line.take()
            self._decide(run, claim, found)
        return found

    def _serve_only(self, claim: Claim, found: Found) -> None:
        for run in self._line(claim.queue).named(claim.only):
            if len(found.started) == claim.limit:
                break
            if found.parked == ROWS_PER_BUNCH:
                found.more = True
                break
            self._decide(run, claim, found)

    def _line(self, queue: str) -> _Line:
        line = self._lines.get(queue)
        if line is None:
            line = self._lines[queue] = _Line(self._connection, self._sheet, queue)
        return line

    def _decide(self, run: Run, claim: Claim, found: Found) -> None:
        if self._gates:
            answer = verdict(run, self._gates, self._count_running(), self._now_ms)
            if not isinstance(answer, Open):
                self._park(run, answer.gate.key)
                found.parked += 1
                if claim.only:
                    found.refused.append((run.id, answer.gate))
                return
        event = start(run, claim.worker, self._now_ms + claim.lease_ms, self._now_ms)
        self._events.append(event)
        started = evolve(run, event)
        sheet = self._sheet
        if run.id in sheet.adds:
            sheet.adds[run.id] = started
        elif run.id in sheet.changes:
            sheet.changes[run.id] = (started, sheet.changes[run.id][1])
        else:
            sheet.changes[run.id] = (started, run.version)
            sheet.added[run.id] = run.added
            sheet.before[run.spec.queue, "ready"] += 1
        found.started.append(run.id)
        if self._is_limited:
            for key in run.spec.keys:
                self._count_running()[key] += 1

    def _park(self, run: Run, key: str) -> None:
        sheet = self._sheet
        if run.id in sheet.adds:
            sheet.adds[run.id] = run.with_(parked=key)
        elif run.id in sheet.changes:
            sheet.changes[run.id] = (run.with_(parked=key), sheet.changes[run.id][1])
        else:
            sheet.parks.setdefault(key, []).append(run.added)
            self._lines[run.spec.queue].gone.add(run.id)

    def _count_running(self) -> Counter[str]:
        """How many runs of each key are running; read only where a limit asks for it."""
        if self._running is None:
            self._running = Counter()
            if self._is_limited:
                self._running = running_keys(self._connection)
                # Rows of a sheet that is not yet written are not as the database has them; but whatever leaves
                # `running` under a limit was written before the claims.
                for run, _ in self._sheet.changes.values():
                    assert run.state is not State.RUNNING, "a running run is on an unwritten sheet under a limit"
        return self._running


class _Line:
    """The ready runs of one queue, best first: those of the database merged with those of the sheet."""

    def __init__(self, connection: sqlite3.Connection, sheet: Sheet, queue: str) -> None:
        self._connection, self._sheet, self._queue = connection, sheet, queue
        self._fresh = sheet.ready_in(queue)[::-1]  # best last
        self._stale = sheet.stale[queue]
        self._rows: list[Run] = []  # best last
        self._read = 0
        self._is_read_out = False
        self.gone: set[str] = set()  # parked by a claim that named them

    def best(self, wanted: int) -> Run | None:
        """The best that is left; reads `wanted` more from the database if it must."""
        row = self._best_row(wanted)
        fresh = self._fresh[-1] if self._fresh else None
        if row is None or (fresh is not None and urgency(fresh) < urgency(row)):
            return fresh
        return row

    def take(self) -> None: ...

    def named(self, only: Sequence[str]) -> list[Run]: ...

    def _best_row(self, wanted: int) -> Run | None: ...
