"""Claims: the best ready runs of a queue, from the database and from what the same call is about to write.

The lifecycle is not spelled a second time in SQL: candidates come by index, `gates.verdict`, `start` and `evolve` of
the core decide, and the rows are written with the others of the call.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Sequence

import msgspec
from msgspec import Struct, structs

from stellwerk.core.batch import ROWS_PER_BUNCH, Claim, Claimed, ClaimedRun
from stellwerk.core.events import AnyEvent
from stellwerk.core.gates import Gate, Open, by_key, verdict
from stellwerk.core.run import NO_QUEUE, Body, Run
from stellwerk.core.run_machine import evolve, start
from stellwerk.store.sqlite.rows import SQL, encode_text, runs_of
from stellwerk.store.sqlite.sheet import Sheet, urgency

PAGE_RUNS_MIN, PAGE_RUNS_MAX = 64, 1_024  # candidates read at once after the first look: the first were held


class GateBook:
    """All gates, as the single writer keeps them in memory."""

    __slots__ = ("by_key", "gates", "limited", "limits")

    def __init__(self, gates: Sequence[Gate]) -> None:
        self.gates = tuple(gates)
        self.by_key = by_key(gates)
        self.limits: dict[str, int] = {}  # key → the lowest limit there
        for gate in gates:
            if gate.limit is not None:
                self.limits[gate.key] = min(gate.limit, self.limits.get(gate.key, gate.limit))
        self.limited = sorted(self.limits)


class Found:
    """What one claim has found so far."""

    __slots__ = ("more", "parked", "refused", "started")

    def __init__(self) -> None:
        self.started: list[Run] = []
        self.parked = 0
        self.more = False
        self.refused: list[tuple[str, Gate]] = []


class Claiming:
    """The claims of one call. What they start and park goes onto the sheet, their events behind the others."""

    def __init__(
        self, connection: sqlite3.Connection, sheet: Sheet, book: GateBook, events: list[AnyEvent], now_ms: int
    ) -> None:
        self._connection, self._sheet, self._book = connection, sheet, book
        self._events, self._now_ms = events, now_ms
        self._running: Counter[str] = Counter()
        if book.limited:
            self._running = running_keys(connection)
        self._lines: dict[str, _Line] = {}
        self._held: dict[str, tuple[Run, str | None]] = {}  # parked by the claim at hand, and the key
        self.claimable: set[str] = set()

    def serve(self, claim: Claim) -> Found:
        """Start the best, park the held."""
        assert claim.queue != NO_QUEUE, "runs without a worker are never claimed"
        found = Found()
        self._look(claim, found)
        if self._book.limited and self._held and self._give_way():
            # What was put aside for another gate made room for others.
            found.more = True
        self._held.clear()
        return found

    def _look(self, claim: Claim, found: Found) -> None:
        line = self._lines.get(claim.queue)
        if line is None:
            line = self._lines[claim.queue] = _Line(self._connection, self._sheet, claim.queue)
        if claim.only:
            self._decide_all(line.named(claim.only), claim, found)
            return
        while len(found.started) < claim.limit:
            if found.parked == ROWS_PER_BUNCH:
                found.more = line.has_more()
                break
            runs = line.take(min(claim.limit - len(found.started), ROWS_PER_BUNCH - found.parked))
            if not runs:
                break
            if self._book.gates:
                self._decide_all(runs, claim, found)
            else:
                self._start_all(runs, claim, found)

    def _give_way(self) -> bool:
        """Each run just parked brings back the best run of each limit that it was under and that has room.

        Under a limit nothing of the batches is left on the sheet, so the database knows all that is parked.
        """
        self._write_parks()
        limits = self._book.limits
        carried = {key for run, _ in self._held.values() for key in run.spec.keys}
        room = {key for key in carried if key in limits and self._running[key] < limits[key]}
        has_unparked = False
        for run_id in sorted(self._held):
            for key in self._held[run_id][0].spec.keys:
                if key in room and self._held[run_id][1] != key:
                    unparked, queues = unpark(self._connection, key, 1)
                    self.claimable |= queues
                    has_unparked = has_unparked or bool(unparked)
                    if not unparked:
                        room.discard(key)  # nothing is parked there any more
                    for other in unparked:
                        if other in self._held:
                            self._held[other] = (self._held[other][0], None)
        return has_unparked

    def _write_parks(self) -> None:
        for key, rows in self._sheet.parks.items():
            self._connection.execute(SQL["park"], (key, encode_text(rows)))
        self._sheet.parks.clear()
        self._lines.clear()  # what they have read is no longer so

    def finish(self, found: Found, last: int) -> Claimed:
        """The answer to a claim, once the last EventId of the call is known; its rows get their version."""
        sheet = self._sheet
        for place, run in enumerate(found.started):
            run_id = run.id
            run = structs.replace(run, version=run.version + 1, added=sheet.added[run_id], changed=last)
            found.started[place] = run
            if run_id in sheet.adds:
                sheet.adds[run_id] = run
            else:
                sheet.changes[run_id] = (run, sheet.changes[run_id][1])
        bodies = self._inputs([run for run in found.started if run.spec.inputs])
        runs = tuple([ClaimedRun(run, bodies.get(run.id, ())) for run in found.started])
        return Claimed(runs, found.parked, found.more, tuple(found.refused))

    def _decide_all(self, runs: Sequence[Run], claim: Claim, found: Found) -> None:
        for run in runs:
            if len(found.started) == claim.limit:
                break
            if found.parked == ROWS_PER_BUNCH:
                found.more = True
                break
            answer = verdict(run, self._book.by_key, self._running, self._now_ms)
            if isinstance(answer, Open):
                self._start_all((run,), claim, found)
                self._running.update(run.spec.keys)
            else:
                self._park(run, answer.gate.key)
                found.parked += 1
                if claim.only:
                    found.refused.append((run.id, answer.gate))

    def _start_all(self, runs: Sequence[Run], claim: Claim, found: Found) -> None:
        sheet, now_ms, worker = self._sheet, self._now_ms, claim.worker
        lease_until_ms = now_ms + claim.lease_ms
        for run in runs:
            event = start(run, worker, lease_until_ms, now_ms)
            started = evolve(run, event)
            self._events.append(event)
            found.started.append(started)
            run_id = run.id
            if run_id in sheet.adds:
                sheet.adds[run_id] = started
            elif run_id in sheet.changes:
                sheet.changes[run_id] = (started, sheet.changes[run_id][1])
            else:
                sheet.changes[run_id] = (started, run.version)
                sheet.added[run_id] = run.added
                sheet.before[claim.queue, "ready"] += 1

    def _park(self, run: Run, key: str) -> None:
        sheet = self._sheet
        self._held[run.id] = (run, key)
        if run.id in sheet.adds:
            sheet.adds[run.id] = run.with_(parked=key)
        elif run.id in sheet.changes:
            sheet.changes[run.id] = (run.with_(parked=key), sheet.changes[run.id][1])
        else:
            sheet.parks.setdefault(key, []).append(run.added)
            self._lines[run.spec.queue].parked.add(run.id)

    def _inputs(self, runs: Sequence[Run]) -> dict[str, tuple[Body, ...]]:
        """The bodies that the specs name, in their order, for runs that name any."""
        wanted = [(run.id, reference.key) for run in runs for reference in run.spec.inputs]
        if not wanted:
            return {}
        known = self._sheet.bodies
        found = read_bodies(self._connection, [place for place in wanted if place not in known])
        found.update((place, known[place]) for place in wanted if place in known)
        return {
            run.id: tuple(
                Body(reference.key, found[run.id, reference.key])
                for reference in run.spec.inputs
                if (run.id, reference.key) in found
            )
            for run in runs
        }


class _Line:
    """The claimable runs of one queue, best first: those of the database merged with those of the sheet."""

    def __init__(self, connection: sqlite3.Connection, sheet: Sheet, queue: str) -> None:
        self._connection, self._sheet, self._queue = connection, sheet, queue
        self._fresh = sheet.ready_in(queue)
        self._rows: list[Run] = []
        self._offset = 0  # rows of the index that were read
        self._page = 1
        self._is_read_out = False
        self._was_named = False  # a claim has picked runs by name: some at hand may be gone
        self.parked: set[str] = set()  # rows that a claim of this call has parked

    def take(self, count: int) -> list[Run]:
        """Up to `count` of the best that are left; they are no longer in the line."""
        self._read(count)
        if not self._fresh:
            taken, self._rows = self._rows[:count], self._rows[count:]
            return taken
        # Whom a claim that named it has started or parked meanwhile, is another object by now.
        self._fresh = [run for run in self._fresh if self._on_sheet(run.id) is run]
        taken = sorted((*self._fresh[:count], *self._rows[:count]), key=urgency)[:count]
        gone = {run.id for run in taken}
        self._fresh = [run for run in self._fresh if run.id not in gone]
        self._rows = [run for run in self._rows if run.id not in gone]
        return taken

    def has_more(self) -> bool:
        """Whether anything is left."""
        self._read(1)
        return bool(self._rows) or any(self._on_sheet(run.id) is run for run in self._fresh)

    def named(self, only: Sequence[str]) -> list[Run]:
        """Those of the named runs that are claimable, best first."""
        text = self._connection.execute(SQL["candidates_only"], (encode_text(only), self._queue)).fetchone()[0]
        self._was_named = True
        names = set(only)
        fresh = [run for run in self._sheet.ready_in(self._queue) if run.id in names]
        return sorted((*fresh, *(run for run in runs_of(text) if self._is_as_read(run))), key=urgency)

    def _read(self, wanted: int) -> None:
        """Have as many rows of the database at hand as are wanted, or all there are."""
        if self._was_named:
            self._rows = [run for run in self._rows if self._is_as_read(run)]
            self._was_named = False
        while len(self._rows) < wanted and not self._is_read_out:
            limit = max(wanted - len(self._rows) + self._sheet.stale[self._queue], self._page)
            limit = min(limit, PAGE_RUNS_MAX)
            values = (self._queue, limit, self._offset)
            runs = runs_of(self._connection.execute(SQL["candidates"], values).fetchone()[0])
            self._offset += len(runs)
            self._page = min(max(self._page * 4, PAGE_RUNS_MIN), PAGE_RUNS_MAX)
            self._is_read_out = len(runs) < limit
            self._rows += [run for run in runs if self._is_as_read(run)]

    def _is_as_read(self, run: Run) -> bool:
        """Whether the row in the database is still what counts."""
        sheet = self._sheet
        return not (run.id in sheet.changes or run.id in sheet.drops or run.id in self.parked)

    def _on_sheet(self, run_id: str) -> Run | None:
        sheet = self._sheet
        if run_id in sheet.adds:
            return sheet.adds[run_id]
        return sheet.changes[run_id][0] if run_id in sheet.changes else None


class _Keys(Struct):
    """Of a spec, only the keys."""

    keys: tuple[str, ...] = ()


_decode_keys = msgspec.json.Decoder(list[_Keys]).decode
_decode_names = msgspec.json.Decoder(list[str]).decode
_decode_places = msgspec.json.Decoder(list[tuple[str, str, int]]).decode


def keys_of(text: str) -> Counter[str]:
    """How often each key stands in a list of specs."""
    found: Counter[str] = Counter()
    for spec in _decode_keys(text):
        found.update(spec.keys)
    return found


def running_keys(connection: sqlite3.Connection) -> Counter[str]:
    """How many runs of each key are running."""
    return keys_of(connection.execute(SQL["all_running_specs"]).fetchone()[0])


def unpark(connection: sqlite3.Connection, key: str, limit: int) -> tuple[list[str], set[str]]:
    """Make the best runs parked under a key claimable again; answer them and their queues."""
    rows, queues, run_ids = connection.execute(SQL["best_parked"], (key, limit)).fetchone()
    unparked = _decode_names(run_ids)
    if unparked:
        connection.execute(SQL["unpark"], (rows,))
    return unparked, set(_decode_names(queues))


def read_bodies(connection: sqlite3.Connection, wanted: Sequence[tuple[str, str]]) -> dict[tuple[str, str], bytes]:
    """Bodies by (run, key), in one row: hex digits, since JSON holds no bytes."""
    if not wanted:
        return {}
    places, digits = connection.execute(SQL["bodies"], (encode_text(wanted),)).fetchone()
    data = bytes.fromhex(digits or "")
    found: dict[tuple[str, str], bytes] = {}
    begin = 0
    for run_id, key, size in _decode_places(places):
        found[run_id, key] = data[begin : begin + size]
        begin += size
    return found
