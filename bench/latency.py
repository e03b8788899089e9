"""Latency of one run on an idle host, submit to finished. Yardstick: three bare durable commits on an idle host."""

from __future__ import annotations

import asyncio
import http.client
import json
import sqlite3
import time
from typing import Any

from bench.bare import cycle, open_bare
from bench.figures import ACTIONS, host_process, noop, percentile, say, scratch_folder, scratch_host
from stellwerk.assemble import Parts
from stellwerk.kernel.feed import Filter, NonEmpty

ROUNDS = 150
WARM_UP = 10
PAUSE_S = 0.02  # an idle core is a cold core: both sides get the same pause
SUCCEEDED = frozenset({"RunSucceeded"})


async def main() -> None:
    for isolation in ("thread", "process"):
        await _inside(isolation)
    _over_http("process")


async def _inside(isolation: str) -> None:
    bare_ms: list[float] = []
    run_ms: list[float] = []
    with scratch_folder() as folder:
        connection = open_bare(folder)
        async with scratch_host() as parts:
            for number in range(ROUNDS + WARM_UP):
                await asyncio.sleep(PAUSE_S)
                bare_ms.append(_bare_ms(connection, number))
                await asyncio.sleep(PAUSE_S)
                run_ms.append(await _run_ms(parts, isolation))
        connection.close()
    _say(f"latency inside the process, {isolation}", bare_ms, run_ms, "; wanted at most 2.5")


async def _run_ms(parts: Parts, isolation: str) -> float:
    started = time.perf_counter()
    submitted = await parts.kernel.submit([noop(isolation)], "bench")
    wanted = Filter(run=submitted.runs[0].id, types=SUCCEEDED)
    answer = await parts.kernel.feed.wait_after(submitted.event_id, wanted, timeout_s=10)
    assert isinstance(answer, NonEmpty)
    return (time.perf_counter() - started) * 1e3


def _over_http(isolation: str) -> None:
    """A real host, one connection, a post and a long poll a run."""
    bare_ms: list[float] = []
    run_ms: list[float] = []
    with scratch_folder() as folder:
        (folder / "bench_actions.py").write_text(ACTIONS)
        bare = open_bare(folder)
        with host_process(folder) as (port, token):
            connection = http.client.HTTPConnection("127.0.0.1", port)
            for number in range(ROUNDS + WARM_UP):
                time.sleep(PAUSE_S)
                bare_ms.append(_bare_ms(bare, number))
                time.sleep(PAUSE_S)
                started = time.perf_counter()
                action = {"type": "python", "function": "bench_actions:noop", "isolation": isolation}
                wish = {"scope": "bench", "name": "noop", "action": action}
                added = _ask(connection, token, "POST", "/api/runs", wish)
                query = f"after={added['event_id']}&run={added['id']}&type=RunSucceeded&timeout=10"
                answer = _ask(connection, token, "GET", f"/api/events?{query}")
                assert answer["type"] == "NonEmpty", answer
                run_ms.append((time.perf_counter() - started) * 1e3)
            connection.close()
        bare.close()
    _say(f"latency over HTTP, {isolation}", bare_ms, run_ms, "")


def _ask(connection: http.client.HTTPConnection, token: str, method: str, path: str, body: object = None) -> Any:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    found = json.loads(answer.read())
    assert answer.status < 300, found
    return found


def _bare_ms(connection: sqlite3.Connection, number: int) -> float:
    started = time.perf_counter()
    cycle(connection, number)
    return (time.perf_counter() - started) * 1e3


def _say(name: str, bare_ms: list[float], run_ms: list[float], wanted: str) -> None:
    bare, mine = bare_ms[WARM_UP:], run_ms[WARM_UP:]
    p50, p99, bare50 = percentile(mine, 0.5), percentile(mine, 0.99), percentile(bare, 0.5)
    text = f"p50 {p50:.2f} ms, p99 {p99:.2f} ms; three bare commits p50 {bare50:.2f} ms: {p50 / bare50:.2f} x"
    say(name, text + wanted)


if __name__ == "__main__":
    asyncio.run(main())
