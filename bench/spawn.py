"""How fast commands start: the keeper against a bare asyncio loop, in the same run, rounds alternating.

    PYTHONPATH=src python -m bench.spawn

Both sides give each /bin/true a session of its own and two pipes, read both to their end, and wait for the exit.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path

from bench.figures import say, scratch_host, until_succeeded
from stellwerk.core.run import Command, Succeeded
from stellwerk.execute.boot_clock import boot_ms
from stellwerk.execute.command import CommandExecutor, base_environment
from stellwerk.execute.keeper_link import KeeperLink
from stellwerk.execute.log_buffer import LogBuffer
from stellwerk.execute.protocol import Attempt
from stellwerk.kernel.settings import WorkerSettings
from stellwerk.kernel.submit import NewRun

RUNS = 2_000
ROUNDS = 3
IN_FLIGHT = (1, 10, 100)
PROGRAM = "/bin/true"
TRUE = NewRun("bench", "true", Command((PROGRAM,)))


async def bare(runs: int, in_flight: int) -> float:
    """The loop everybody would write first."""
    numbers = iter(range(runs))

    async def one_after_the_other() -> None:
        for _ in numbers:
            process = await asyncio.create_subprocess_exec(
                PROGRAM,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            assert process.stdout is not None
            assert process.stderr is not None
            await asyncio.gather(process.stdout.read(), process.stderr.read())
            assert await process.wait() == 0

    begin = time.perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(in_flight)))
    return time.perf_counter() - begin


class KeeperSide:
    """A link and an executor, fed like the worker feeds them: ends come out as lists, starts go in as lists."""

    def __init__(self, folder: Path) -> None:
        self._ids = itertools.count()
        self._woken = asyncio.Event()
        self._output = LogBuffer(now_ms=lambda: time.time_ns() // 1_000_000, wake=lambda: None, folder=folder)
        self._link = KeeperLink()
        self._executor = CommandExecutor(
            self._link,
            self._output,
            self._woken.set,
            base_env=base_environment(os.environ),
            default_cwd="/",
            temp_root=folder,
        )

    async def open(self) -> None:
        await self._link.open()
        await self._executor.open()

    async def close(self) -> None:
        await self._executor.close()
        await self._link.close()

    async def run(self, runs: int, in_flight: int) -> float:
        begin = time.perf_counter()
        ended = asked = 0
        while ended < runs:
            free = min(in_flight - (asked - ended), runs - asked)
            self._executor.start([self._attempt() for _ in range(free)])
            asked += free
            await self._woken.wait()
            self._woken.clear()
            for end in self._executor.take_ended():
                assert isinstance(end.outcome, Succeeded), end
                ended += 1
        return time.perf_counter() - begin

    def _attempt(self) -> Attempt:
        return Attempt(
            run_id=f"r{next(self._ids)}",
            number=1,
            scope="bench",
            name="true",
            action=Command((PROGRAM,)),
            env={},
            labels={},
            cwd=None,
            args=None,
            stdin=None,
            timeout_ms=None,
            lease_deadline_boot_ms=boot_ms() + 30_000,
        )


def _watch_by_pidfd() -> None:
    # From 3.12 on the pidfd watcher is the default; before, the default starts a thread per process.
    if sys.version_info < (3, 12):
        watcher = asyncio.PidfdChildWatcher()
        watcher.attach_loop(asyncio.get_running_loop())
        asyncio.set_child_watcher(watcher)


async def product(runs: int, in_flight: int) -> float:
    """The whole product: submitted in bulk, claimed, run, finished, each durable."""
    workers = WorkerSettings(slots={"default": in_flight})
    async with scratch_host(workers) as parts:
        await parts.kernel.submit([TRUE] * 20, "bench")
        await until_succeeded(parts, 20)
        begin = time.perf_counter()
        for _ in range(runs // 1_000):
            await parts.kernel.submit([TRUE] * 1_000, "bench")
        await until_succeeded(parts, 20 + runs)
        return time.perf_counter() - begin


async def main() -> None:
    """Print two lines per number in flight: the whole product, and the executor alone."""
    _watch_by_pidfd()
    for in_flight in IN_FLIGHT:
        bare_s = []
        product_s = []
        for _ in range(ROUNDS):
            gc.collect()
            bare_s.append(await bare(RUNS, in_flight))
            product_s.append(await product(RUNS, in_flight))
        _say("whole product", in_flight, bare_s, product_s, "; wanted at most 1.3")
    with tempfile.TemporaryDirectory() as folder:
        side = KeeperSide(Path(folder))
        await side.open()
        for in_flight in IN_FLIGHT:
            bare_s = []
            keeper_s = []
            for _ in range(ROUNDS):
                gc.collect()
                bare_s.append(await bare(RUNS, in_flight))
                keeper_s.append(await side.run(RUNS, in_flight))
            _say("executor alone", in_flight, bare_s, keeper_s, "")
        await side.close()


def _say(what: str, in_flight: int, bare_s: list[float], ours_s: list[float], wanted: str) -> None:
    ratios = " ".join(f"{ours / theirs:.2f}" for ours, theirs in zip(ours_s, bare_s, strict=True))
    say(
        f"/bin/true, {in_flight} in flight, {what}",
        f"{RUNS / min(ours_s):,.0f}/s, bare asyncio {RUNS / min(bare_s):,.0f}/s: "
        f"wall time {sum(ours_s) / sum(bare_s):.2f} x (rounds {ratios}{wanted})",
    )


if __name__ == "__main__":
    asyncio.run(main())
