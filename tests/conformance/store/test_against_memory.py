"""Random operations on a store and on the reference: all answers must be equal.

A failure names its seed; `play` with that seed alone repeats it.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from stellwerk.core.facts import Facts, Loaded
from stellwerk.core.logs import LogQuery
from stellwerk.core.queries import Counts, RunQuery
from stellwerk.core.run import State
from stellwerk.store.memory import MemoryStore
from stellwerk.store.protocol import Store
from tests.conformance.operations import EXTRA_KEYS, KINDS, LIVE_KEYS, SCOPES, Operations
from tests.conformance.store.conftest import STORES, make_store

GROUPS, SEQUENCES, STEPS = 10, 20, 40  # 200 sequences for each store
READS_EVERY = 5  # steps; reading all after each step would cost more than the steps


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("group", range(GROUPS))
async def test_all_answers_are_those_of_the_reference(kind: str, group: int) -> None:
    for seed in range(group * SEQUENCES, (group + 1) * SEQUENCES):
        with TemporaryDirectory() as folder:
            await play(seed, make_store(kind, Path(folder)))


async def play(seed: int, store: Store) -> None:
    """One sequence on a new store and on a new reference."""
    await store.open()
    try:
        reference = MemoryStore(await store.epoch())
        pair = Pair(seed, reference, store)
        for step in range(STEPS):
            await pair.step()
            if step % READS_EVERY == 0:
                await pair.compare_some()
        await pair.compare_all()
    finally:
        await store.close()


class Pair:
    """The reference and the store that is compared with it."""

    def __init__(self, seed: int, reference: MemoryStore, store: Store) -> None:
        self.seed = seed
        self.both: tuple[Store, Store] = (reference, store)
        self.reference = reference
        self.operations = Operations(seed)
        self.random = self.operations.random
        self.last_act = ""

    def equal(self, what: str, wanted: object, found: object) -> None:
        assert found == wanted, f"seed {self.seed}, after {self.last_act}: {what}"

    async def step(self) -> None:
        """One operation on both."""
        self.operations.tick()
        act = self.random.choices(
            (self.apply, self.extend, self.append_logs, self.trim, self.adopt), (80, 6, 10, 3, 1)
        )[0]
        self.last_act = act.__name__
        await act()

    async def apply(self) -> None:
        batches, claims = await self.operations.call(self.reference)
        self.last_act = f"apply({batches}, {claims}, {self.operations.now_ms})"
        wanted, found = [await store.apply(batches, claims, self.operations.now_ms) for store in self.both]
        self.equal("receipts", wanted.receipts, found.receipts)
        self.equal("claimed", wanted.claimed, found.claimed)
        self.equal("applied", wanted, found)

    async def extend(self) -> None:
        leases = await self.operations.leases(self.reference)
        until_ms = self.operations.now_ms + self.random.choice((100, 3_000))
        wanted, found = [await store.extend(leases, until_ms, self.operations.now_ms) for store in self.both]
        self.equal("given up", wanted, found)

    async def append_logs(self) -> None:
        chunks = await self.operations.chunks(self.reference)
        wanted, found = [await store.append_logs(chunks) for store in self.both]
        self.equal("appended", wanted, found)

    async def trim(self) -> None:
        keep = self.operations.retention()
        wanted, found = [await store.trim_journal(keep, self.operations.now_ms) for store in self.both]
        self.equal("trimmed", wanted, found)

    async def adopt(self) -> None:
        for store in self.both:
            await store.adopt(self.operations.now_ms, "ada")

    async def compare_some(self) -> None:
        """Some questions, chosen by chance."""
        await self.compare_runs(self.query())
        await self.compare_looks()
        await self.compare_journal()

    async def compare_all(self) -> None:
        """All rows, all bodies, all lines, all events."""
        await self.compare_runs(RunQuery(limit=10_000))
        await self.compare_looks()
        ids = tuple(run.id for run in (await self.reference.find_runs(RunQuery(limit=10_000))).runs)
        everything = Facts(
            runs=ids,
            live_keys=LIVE_KEYS,
            children_of=ids,
            kinds=KINDS,
            bodies=tuple((run_id, key) for run_id in ids for key in ("args", "stdin", "result")),
            gates=True,
            running=True,
            children_max=self.random.choice((0, 1, 1_000)),
        )
        wanted, found = [await store.load(everything) for store in self.both]
        self.equal("loaded", told(wanted), told(found))
        for run_id in ids:
            query = LogQuery(run_id, self.random.choice((0, 0, 2)), streams=self.random.choice(STREAMS))
            wanted_lines, found_lines = [await lines(store, query) for store in self.both]
            self.equal(f"lines of {run_id}", wanted_lines, found_lines)
            wanted_events, found_events = [await events_of(store, run_id) for store in self.both]
            self.equal(f"events of {run_id}", wanted_events, found_events)
        wanted_slice, found_slice = [await store.read_journal(after=0, limit=5_000) for store in self.both]
        self.equal("journal", wanted_slice, found_slice)

    async def compare_runs(self, query: RunQuery) -> None:
        wanted, found = [await store.find_runs(query) for store in self.both]
        self.equal(str(query), wanted, found)

    async def compare_looks(self) -> None:
        now_ms = self.operations.now_ms + self.random.choice((-100, 0, 0, 1_000))
        next_ms = (await self.reference.due(now_ms, 1)).next_ms
        if next_ms is not None and self.random.random() < 0.5:
            now_ms = next_ms + self.random.choice((-1, 0))  # just before an alarm, or at it
        limit = self.random.choice((1, 3, 100))
        wanted_due, found_due = [await store.due(now_ms, limit) for store in self.both]
        self.equal(f"due at {now_ms}", wanted_due, found_due)
        wanted, found = [counted(await store.count()) for store in self.both]
        self.equal("counts", wanted, found)

    async def compare_journal(self) -> None:
        whole = await self.reference.read_journal(after=0, limit=5_000)
        places = [0, whole.forgotten, max(0, whole.forgotten - 1), whole.forgotten + 1, whole.last]
        after = min(whole.last, self.random.choice([*places, *(stamped.event_id for stamped in whole.events)]))
        limit = self.random.choice((1, 2, 7, 1_000))
        wanted, found = [await store.read_journal(after=after, limit=limit) for store in self.both]
        self.equal(f"journal after {after}", wanted, found)

    def query(self) -> RunQuery:
        random = self.random
        now_ms = self.operations.now_ms
        return RunQuery(
            states=frozenset(random.sample(list(State), random.choice((0, 0, 1, 3)))),
            scope=random.choice((None, *SCOPES)),
            name=random.choice((None, None, "x")),
            label=random.choice((None, None, ("team", "red"))),
            since_ms=random.choice((None, None, now_ms - 3_000)),
            until_ms=random.choice((None, None, now_ms - 500)),
            before=random.choice((None, None, (now_ms - 1_000) * 1_000)),
            limit=random.choice((1, 3, 100)),
        )


STREAMS: tuple[frozenset[int], ...] = (frozenset(), frozenset({1}), frozenset({2, 3}))


async def events_of(store: Store, run_id: str) -> list[object]:
    """All events of one run: how far one reading looks is a store's own affair."""
    seen: list[object] = []
    after, last = 0, 1
    while after < last:
        found = await store.read_journal(after=after, limit=3, run=run_id)
        assert found.examined > after
        seen.extend(found.events)
        after, last = found.examined, found.last
    return seen


async def lines(store: Store, query: LogQuery) -> list[object]:
    """All lines of one run, as far as a query wants them."""
    seen: list[object] = []
    after, last = query.after_line, query.after_line + 1
    while after < last:
        page = await store.read_logs(LogQuery(query.run_id, after, 2, query.streams))
        assert page.examined > after or page.last_line <= after
        seen.extend(page.lines)
        after, last = page.examined, page.last_line
    return [*seen, last]


def counted(counts: Counts) -> tuple[object, ...]:
    """Whether a zero is told or left out is a store's own affair."""
    states = {state: number for state, number in counts.states.items() if number}
    queues = {place: number for place, number in counts.queues.items() if number}
    return counts.event_id, states, queues


def told(loaded: Loaded) -> tuple[object, ...]:
    running = {key: number for key, number in loaded.running.items() if number}
    children = {parent: found for parent, found in loaded.children.items() if found}
    rest = (loaded.runs, loaded.holders, loaded.records, loaded.bodies, loaded.gates)
    return loaded.event_id, running, children, *(dict(part) if isinstance(part, dict) else part for part in rest)


async def test_the_operations_reach_the_interesting_places() -> None:
    """What random operations never meet, they do not test."""
    seen: dict[str, int] = {}
    for seed in range(60):
        store, operations = MemoryStore(), Operations(seed)
        for _ in range(STEPS):
            operations.tick()
            batches, claims = await operations.call(store)
            applied = await store.apply(batches, claims, operations.now_ms)
            names = [type(receipt).__name__ for receipt in applied.receipts]
            names += [type(event).__name__ for event in applied.events]
            names += ["parked" for claimed in applied.claimed if claimed.parked]
            names += ["refused" for claimed in applied.claimed if claimed.refused]
            names += ["unparked" for receipt in applied.receipts if getattr(receipt, "unparked", 0)]
            limited = (await store.load(Facts(running=True))).running
            names += [f"limit at {key}" for key in EXTRA_KEYS if limited.get(key)]
            for name in names:
                seen[name] = seen.get(name, 0) + 1
    wanted = ["Committed", "Conflict", "AlreadyLive", "parked", "refused", "unparked"]
    wanted += ["RunPostponed", "RunSettled", "RunStopAsked", "RunDropped", "ResultRejected", "RunFailed"]
    assert [name for name in wanted if seen.get(name, 0) < 5] == [], seen
