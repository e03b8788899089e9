"""How fast is the SQLite store, and does depth or history slow it down? `python -m bench.store [--quick]`

Everything is told as a ratio to something measured in the same minute: a shared machine has no absolute figures.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from stellwerk.core.batch import AddRun, Batch, Claim, Claimed, Committed, PutGate, changed
from stellwerk.core.gates import Gate
from stellwerk.core.names import run_keys
from stellwerk.core.queries import RunQuery
from stellwerk.core.run import PythonCall, Run, Spec, State, Succeeded
from stellwerk.core.run_machine import add, evolve, finish
from stellwerk.store.sqlite.store import SqliteStore

CLAIM, PASS_RUNS, CYCLE_CALL = 100, 1_000, 500
NOW_MS = 1_760_000_000_000
SCHEMA = "CREATE TABLE runs (id TEXT PRIMARY KEY, state TEXT, created_ms INTEGER, body TEXT)"
SCHEMA_INDEX = "CREATE INDEX ready ON runs (created_ms, id) WHERE state = 'ready'"


class Bench:
    """A store, a clock that moves with each call, and run ids that rise."""

    def __init__(self, folder: Path) -> None:
        self.store = SqliteStore(folder)
        self.path = folder / "stellwerk.db"
        self.now_ms = NOW_MS
        self.number = 0

    def runs(self, count: int, name: str = "job", priority: int = 100) -> Batch:
        """A batch that adds some runs."""
        adds: list[AddRun] = []
        events = []
        for _ in range(count):
            self.number += 1
            keys = run_keys("default", "bench", name)
            spec = Spec("bench", name, PythonCall("bench:nothing"), self.now_ms, keys=keys)
            run, added = add(
                f"{self.number:016d}", spec, priority=priority, due_ms=None, live_key=None, waits_for=0,
                has_children=False, now_ms=self.now_ms, actor="bench",
            )  # fmt: skip
            adds.append(AddRun(run))
            events += added
        return Batch(adds=tuple(adds), events=tuple(events))

    async def add(self, count: int, name: str = "job", priority: int = 100) -> None:
        for begin in range(0, count, 5_000):
            batch = self.runs(min(5_000, count - begin), name, priority)
            applied = await self.store.apply([batch], [], self.tick())
            assert isinstance(applied.receipts[0], Committed)

    async def claim(self, limit: int) -> Claimed:
        applied = await self.store.apply([], [Claim("default", "worker", limit, 60_000)], self.tick())
        return applied.claimed[0]

    async def finish(self, claimed: Claimed) -> None:
        batches = [self.end(started.run) for started in claimed.runs]
        applied = await self.store.apply(batches, [], self.tick())
        assert all(isinstance(receipt, Committed) for receipt in applied.receipts)

    def end(self, run: Run) -> Batch:
        events = finish(run, run.attempt, "worker", Succeeded(), result=None, now_ms=self.now_ms, chance=0.0)
        ended = run
        for event in events:
            ended = evolve(ended, event)
        return Batch(changes=(changed(ended),), events=tuple(events))

    def tick(self) -> int:
        self.now_ms += 10
        return self.now_ms


async def claims_per_second(bench: Bench) -> tuple[float, float]:
    """Add 1,000 runs, claim 1,000 in claims of 100 (timed), finish them: the depth stays what it was.

    Answers runs a second, and CPU µs a run: a disk that others use as well makes the first one jump.
    """
    await bench.add(PASS_RUNS)
    claimed = []
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(PASS_RUNS // CLAIM):
        claimed.append(await bench.claim(CLAIM))
    taken_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    assert all(len(one.runs) == CLAIM for one in claimed)
    for one in claimed:
        await bench.finish(one)
    return PASS_RUNS / taken_s, cpu_s * 1e6 / PASS_RUNS


async def write_history(bench: Bench, count: int) -> None:
    """A million finished runs, by SQL: one real finished run, multiplied."""
    await bench.add(1)
    await bench.finish(await bench.claim(1))
    last = (await bench.store.find_runs(RunQuery(states=frozenset({State.SUCCEEDED}), limit=1))).runs[0]
    await bench.store.close()
    connection = sqlite3.connect(bench.path)
    columns = [row[1] for row in connection.execute("PRAGMA table_info(runs)")]
    places = {"added": "added - n", "id": "printf('h%015d', n)"}
    chosen = ", ".join(places.get(column, column) for column in columns)
    text = (
        f"WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {count}) "
        f"INSERT INTO runs SELECT {chosen} FROM numbers, runs WHERE added = {last.added} ORDER BY n DESC"
    )
    connection.execute(text)
    connection.execute("UPDATE counters SET n = n + ? WHERE state = 'succeeded'", (count,))
    connection.commit()
    connection.close()
    await bench.store.open()


async def hold_in_front(bench: Bench, count: int) -> str:
    """Runs of a paused job in front of all others, and what it costs to park them, once."""
    await bench.add(count, name="held", priority=900)
    gate = Gate("job:bench/held", "pause", at_ms=NOW_MS)
    await bench.store.apply([Batch(gates=(PutGate(gate),))], [], bench.tick())
    begin, parked, calls = time.perf_counter(), 0, 0
    while True:
        claimed = await bench.claim(CLAIM)
        parked, calls = parked + claimed.parked, calls + 1
        if not claimed.more:
            break
    taken_s = time.perf_counter() - begin
    if claimed.runs:
        await bench.finish(claimed)
    return f"parking {parked:,} once: {taken_s * 1e6 / max(parked, 1):.1f} µs a run, {calls} claims, {taken_s:.2f} s"


async def bench_claims(folder: Path, passes: int, scale: int) -> None:
    benches: dict[str, Bench] = {}
    for name in ("1,000 ready", "200,000 ready", "100,000 paused in front", "1,000,000 finished"):
        bench = benches[name] = Bench(folder / name.replace(" ", "-"))
        await bench.store.open()
        if name.startswith("200"):
            await bench.add(200_000 // scale)
        elif name.startswith("100,"):
            print(await hold_in_front(bench, 100_000 // scale))
        elif name.startswith("1,000,000"):
            await write_history(bench, 1_000_000 // scale)
    rates: dict[str, list[float]] = {name: [] for name in benches}
    costs: dict[str, list[float]] = {name: [] for name in benches}
    for _ in range(passes):
        for name, bench in benches.items():
            rate, cost = await claims_per_second(bench)
            rates[name].append(rate)
            costs[name].append(cost)
    for name in benches:
        rate, cost = statistics.median(rates[name]), statistics.median(costs[name])
        by_time = rate / statistics.median(rates["1,000 ready"])
        by_cpu = statistics.median(costs["1,000 ready"]) / cost
        figures = f"{rate:8,.0f} runs/s, ratio {by_time:.2f}; {cost:5.1f} CPU µs a run, ratio {by_cpu:.2f}"
        print(f"claims of {CLAIM}, {name:25} {figures}")
    for bench in benches.values():
        await bench.store.close()


def bare_loop(folder: Path, count: int) -> float:
    """Insert, claim, finish, a commit each, no journal: what one thread can do. Runs per second."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "bare.db"
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(SCHEMA)
    connection.execute(SCHEMA_INDEX)
    begin = time.perf_counter()
    for number in range(count):
        connection.execute("INSERT INTO runs VALUES (?, 'ready', ?, '{}')", (f"{number:016d}", number))
        found = connection.execute(
            "SELECT id FROM runs WHERE state = 'ready' ORDER BY created_ms, id LIMIT 1"
        ).fetchone()
        connection.execute("UPDATE runs SET state = 'running' WHERE id = ?", found)
        connection.execute("UPDATE runs SET state = 'succeeded' WHERE id = ?", found)
    taken_s = time.perf_counter() - begin
    connection.close()
    return count / taken_s


async def bench_cycle(folder: Path, passes: int) -> None:
    bench = Bench(folder / "cycle")
    await bench.store.open()
    rates: list[float] = []
    ratios: list[float] = []
    costs: dict[str, list[float]] = {"insert": [], "claim": [], "finish": [], "insert and claim in one call": []}
    for _ in range(passes):
        bare = bare_loop(folder, 500)
        claimed: list[Claimed] = []
        batches = [bench.runs(CYCLE_CALL) for _ in range(8)]
        begin = time.perf_counter()

        async def insert(batches: list[Batch] = batches) -> None:
            for batch in batches:
                await bench.store.apply([batch], [], bench.tick())

        async def claim(claimed: list[Claimed] = claimed) -> None:
            for _ in range(8):
                claimed.append(await bench.claim(CYCLE_CALL))

        async def end(claimed: list[Claimed] = claimed) -> None:
            for one in claimed:
                await bench.finish(one)

        await timed(costs["insert"], insert)
        await timed(costs["claim"], claim)
        await timed(costs["finish"], end)
        rates.append(8 * CYCLE_CALL / (time.perf_counter() - begin))
        ratios.append(rates[-1] / bare)
        together = [bench.runs(CYCLE_CALL) for _ in range(8)]
        claimed.clear()

        async def ride(batches: list[Batch] = together, claimed: list[Claimed] = claimed) -> None:
            for batch in batches:
                claims = [Claim("default", "worker", CYCLE_CALL, 60_000)]
                claimed += (await bench.store.apply([batch], claims, bench.tick())).claimed

        await timed(costs["insert and claim in one call"], ride)
        await end(claimed)
    print(f"whole cycle in calls of {CYCLE_CALL}: {statistics.median(rates):,.0f} runs/s, "
          f"{statistics.median(ratios):.1f} times the bare loop")  # fmt: skip
    for name, found in costs.items():
        print(f"  {name:30} {statistics.median(found):6.1f} CPU µs a run")
    await bench.store.close()


async def timed(costs: list[float], act: Callable[[], Awaitable[None]]) -> None:
    begin = time.process_time()
    await act()
    costs.append((time.process_time() - begin) * 1e6 / (8 * CYCLE_CALL))


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the rows")
    parser.add_argument("--passes", type=int, default=7)
    parser.add_argument("--only", choices=("claims", "cycle"))
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    chosen = parser.parse_args(arguments)
    # As the host sets them.
    sys.setswitchinterval(0.0005)
    gc.set_threshold(50_000)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        if chosen.only != "claims":
            asyncio.run(bench_cycle(Path(folder), chosen.passes))
        if chosen.only != "cycle":
            asyncio.run(bench_claims(Path(folder), chosen.passes, 20 if chosen.quick else 1))


if __name__ == "__main__":
    main(sys.argv[1:])
