"""Latency of one run on an idle host, submit to finished. Yardstick: three bare durable commits on an idle host."""

from __future__ import annotations

import asyncio
import time

from bench.bare import cycle, open_bare
from bench.figures import noop, percentile, say, scratch_folder, scratch_host
from stellwerk.core.run import FINAL
from stellwerk.kernel.feed import Filter

ROUNDS = 150
PAUSE_S = 0.02  # an idle core is a cold core: both sides get the same pause


async def main() -> None:
    for isolation in ("thread", "process"):
        bare_ms: list[float] = []
        run_ms: list[float] = []
        with scratch_folder() as folder:
            connection = open_bare(folder)
            async with scratch_host() as parts:
                for number in range(ROUNDS + 10):
                    await asyncio.sleep(PAUSE_S)
                    started = time.perf_counter()
                    cycle(connection, number)
                    bare_ms.append((time.perf_counter() - started) * 1e3)
                    await asyncio.sleep(PAUSE_S)
                    started = time.perf_counter()
                    submitted = await parts.kernel.submit([noop(isolation)], "bench")
                    run_id = submitted.runs[0].id
                    after = submitted.event_id
                    while True:
                        answer = await parts.kernel.feed.wait_after(
                            after, Filter(run=run_id, types=frozenset({"RunSucceeded"})), timeout_s=5
                        )
                        if getattr(answer, "events", ()):
                            break
                    run_ms.append((time.perf_counter() - started) * 1e3)
                seen = await parts.kernel.run(run_id)
                assert seen.run.state in FINAL
            connection.close()
        bare, mine = bare_ms[10:], run_ms[10:]
        p50, p99, bare50 = percentile(mine, 0.5), percentile(mine, 0.99), percentile(bare, 0.5)
        say(
            f"latency, {isolation}",
            f"p50 {p50:.2f} ms, p99 {p99:.2f} ms; three bare commits p50 {bare50:.2f} ms: "
            f"{p50 / bare50:.2f} x (wanted at most 2.5)",
        )


if __name__ == "__main__":
    asyncio.run(main())
