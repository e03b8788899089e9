"""Whole cycles a second: 20,000 no-op Python runs, submitted in bulk, on the embedded store.

Yardstick: a bare single-threaded SQLite loop that makes the same three durable steps with a commit each. Then the same
with one computing function in a slot, and where the CPU time of a run goes.
"""

from __future__ import annotations

import asyncio
import cProfile
import gc
import os
import pstats
import subprocess
import sys
import threading
import time
from collections import defaultdict
from typing import Any

import msgspec

from bench.bare import cycles_per_second
from bench.figures import noop, say, scratch_folder, scratch_host, until_succeeded
from stellwerk.assemble import Parts, admin_token
from stellwerk.core.gates import Gate
from stellwerk.core.names import EVERYTHING
from stellwerk.core.run import PythonCall
from stellwerk.doors.native.door import native_routes
from stellwerk.kernel.submit import NewRun
from stellwerk.web.app import build_app

RUNS = 20_000
BULK = 1_000


def main() -> None:
    """Each way in a process of its own, so that none inherits the state of another."""
    for isolation in ("thread", "process"):
        for computing in ("idle", "computing"):
            subprocess.run([sys.executable, "-m", "bench.cycle", isolation, computing], check=True)


async def _cycles(isolation: str, computing: bool) -> None:
    with scratch_folder() as folder:
        bare = cycles_per_second(folder, 1.0)
    async with scratch_host() as parts:
        # Warm: children up, statements prepared.
        await parts.kernel.submit([noop(isolation)] * 200, "bench")
        await until_succeeded(parts, 200)
        if computing:
            action = PythonCall("bench_actions:compute", "thread")
            await parts.kernel.submit([NewRun("bench", "compute", action)], "bench")
            await asyncio.sleep(0.2)
        threads = _thread_clocks()
        cpu = _cpu_s(threads)
        profile = None if computing else cProfile.Profile(time.thread_time)
        rate = await _run(parts, isolation)
        spent = {name: (now - cpu.get(name, 0.0)) / RUNS * 1e6 for name, now in _cpu_s(threads).items()}
        children_us = _children_cpu_s() / RUNS * 1e6
        name = f"{isolation}{' + computing function' if computing else ''}"
        target = 4 if computing else 8
        say(name, f"{rate:,.0f} runs/s = {rate / bare:.1f} x bare ({bare:,.0f}; wanted {target})")
        if profile is not None:
            shares = await _shares(parts, isolation, profile)
            _say_parts(spent, shares, children_us, await _http_us(parts))


async def _run(parts: Parts, isolation: str, runs: int = RUNS) -> float:
    counts = await parts.kernel.count()
    before = sum(n for state, n in counts.states.items() if state == "succeeded")
    started = time.perf_counter()
    for _ in range(runs // BULK):
        await parts.kernel.submit([noop(isolation)] * BULK, "bench")
    await until_succeeded(parts, before + runs)
    return runs / (time.perf_counter() - started)


def _thread_clocks() -> dict[str, int]:
    """CPU clocks of the threads of this process, by what they do."""
    clocks: dict[str, int] = {}
    for thread in threading.enumerate():
        if thread.ident is not None:
            clocks[thread.name] = time.pthread_getcpuclockid(thread.ident)
    return clocks


def _cpu_s(clocks: dict[str, int]) -> dict[str, float]:
    return {name: time.clock_gettime(clock) for name, clock in clocks.items()}


def _children_cpu_s() -> float:
    """Not exact: the keeper reaps the children, so only what the kernel shows of living ones is counted."""
    ticks = os.sysconf("SC_CLK_TCK")
    total = 0.0
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="ascii", errors="replace") as stat:
                fields = stat.read().rpartition(")")[2].split()
            with open(f"/proc/{entry}/cmdline", "rb") as command:
                words = command.read()
        except OSError:
            continue
        if b"stellwerk.execute.child" in words:
            total += (int(fields[11]) + int(fields[12])) / ticks
    return total


async def _shares(parts: Parts, isolation: str, profile: cProfile.Profile) -> dict[str, float]:
    """How the loop's own time is spread over the layers, from a profiled pass (its overhead falls on all alike)."""
    profile.enable()
    await _run(parts, isolation, 5_000)
    profile.disable()
    found: dict[str, float] = defaultdict(float)
    for (file, _, _), (_, _, own_s, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if file != "~":
            found[_part(file)] += own_s
            continue
        # A built-in belongs to whoever called it.
        for (caller, _, _), (_, _, caller_s, _) in callers.items():
            found[_part(caller)] += caller_s
    total = sum(found.values()) or 1.0
    return {part: own_s / total for part, own_s in found.items()}


def _part(file: str) -> str:
    for part, marks in {
        "core": ("stellwerk/core/",),
        "committer": ("kernel/committer", "kernel/feed"),
        "worker": ("kernel/worker", "stellwerk/execute/"),
        "kernel": ("stellwerk/kernel/",),
        "sqlite": ("stellwerk/store/",),
    }.items():
        if any(mark in file for mark in marks):
            return part
    return "asyncio and rest"


async def _http_us(parts: Parts) -> float:
    """What a bulk post of 1,000 runs costs on top of the same submit without HTTP, a run."""
    await parts.kernel.shut(Gate(EVERYTHING, "pause"))
    routes = native_routes(parts.kernel, parts.tokens, parts.settings, parts.health, asyncio.Event())
    app = build_app(routes, parts.tokens, parts.settings.server)
    token = parts.settings.admin_token or admin_token(parts.settings.data)
    wish = {"scope": "bench", "name": "noop", "action": {"type": "python", "function": "bench_actions:noop"}}
    body = msgspec.json.encode([wish] * BULK)
    headers = {"host": "localhost", "authorization": f"Bearer {token}", "content-type": "application/json"}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/api/runs",
        "raw_path": b"/api/runs",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    spent_s = [0.0, 0.0]
    for _ in range(5):
        started = time.thread_time()
        await _post(app, scope, body)
        spent_s[0] += time.thread_time() - started
        started = time.thread_time()
        await parts.kernel.submit([noop("process")] * BULK, "bench")
        spent_s[1] += time.thread_time() - started
    return (spent_s[0] - spent_s[1]) / (5 * BULK) * 1e6


async def _post(app: Any, scope: dict[str, Any], body: bytes) -> None:
    status = 0

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(piece: Any) -> None:
        nonlocal status
        status = piece.get("status", status)

    await app(dict(scope), receive, send)
    assert status == 201, status


def _say_parts(spent: dict[str, float], shares: dict[str, float], children_us: float, http_us: float) -> None:
    loop_us = spent.pop("MainThread", 0.0)
    writer_us = sum(value for name, value in spent.items() if "writer" in name)
    slots_us = sum(value for name, value in spent.items() if "writer" not in name)
    loop = ", ".join(f"{part} {share * loop_us:.1f}" for part, share in sorted(shares.items(), key=lambda s: -s[1]))
    say(
        "  CPU us a run",
        f"loop {loop_us:.1f} ({loop}), SQLite writer {writer_us:.1f}, slots {slots_us:.1f}, "
        f"children {children_us:.1f}; HTTP on top, in bulk: {http_us:.1f}",
    )


if __name__ == "__main__":
    gc.set_threshold(50_000)
    asyncio.run(_cycles(sys.argv[1], sys.argv[2] == "computing"))
