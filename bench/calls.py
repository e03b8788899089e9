"""Calls of functions that do nothing: how many a second, and what each costs the host. `python -m bench.calls`

Without kernel, store and logs: only the executor, fed as a worker feeds it, with so many calls open at a time. Beside
each figure stands its yardstick, taken in the same second: one byte to a bare process and back, a call at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from stellwerk.core.run import PythonCall, Succeeded
from stellwerk.execute.boot_clock import boot_ms
from stellwerk.execute.keeper_link import KeeperLink
from stellwerk.execute.protocol import Attempt, Executor
from stellwerk.execute.python_call import PythonExecutor
from stellwerk.execute.thread_call import ThreadExecutor

CALLS = 20_000
ROUNDS = 3
MODULE = """
def nothing(): pass
def hello(): print("hello")
async def later(): pass
"""


class Discarded:
    """An Output that keeps nothing."""

    def write(self, run_id: str, number: int, stream: int, data: bytes) -> bool:
        return True

    def system(self, run_id: str, number: int, text: str) -> None: ...

    def close(self, run_id: str, number: int) -> None: ...


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "bench_functions.py").write_text(MODULE)
        print(f"{'executor':9}{'function':9}{'open':>6}{'calls/s':>10}{'host CPU µs':>13}{'× bare':>8}")
        for kind in ("thread", "process"):
            for function in ("nothing", "hello", "later"):
                for open_calls in (1, 16, 256):
                    await measure(kind, function, open_calls, folder)


async def measure(kind: str, function: str, open_calls: int, folder: str) -> None:
    count = CALLS // 10 if open_calls == 1 else CALLS
    async with opened(kind, folder) as (executor, woken):
        await drive(executor, woken, function, open_calls, 500)  # until children are warm and trusted
        figures = []
        for _ in range(ROUNDS):
            bare = bare_round_trips()
            began, cpu = time.perf_counter(), own_cpu_s()
            await drive(executor, woken, function, open_calls, count)
            per_second = count / (time.perf_counter() - began)
            figures.append((per_second, (own_cpu_s() - cpu) / count * 1e6, per_second / bare))
    per_second, cpu_us, ratio = sorted(figures)[ROUNDS // 2]
    print(f"{kind:9}{function:9}{open_calls:6}{per_second:10,.0f}{cpu_us:13.1f}{ratio:8.2f}", flush=True)


async def drive(executor: Executor, woken: asyncio.Event, function: str, open_calls: int, count: int) -> None:
    """Keep so many calls open until all have ended."""
    deadline = boot_ms() + 600_000
    action = PythonCall(f"bench_functions:{function}")
    attempts = [
        Attempt(
            run_id=f"run-{number}",
            number=1,
            scope="bench",
            name="call",
            action=action,
            env={},
            labels={},
            cwd=None,
            args=None,
            stdin=None,
            timeout_ms=None,
            lease_deadline_boot_ms=deadline,
        )
        for number in range(count)
    ]
    begun = ended = 0
    while ended < count:
        room = open_calls - (begun - ended)
        if room and begun < count:
            executor.start(attempts[begun : begun + room])
            begun = min(count, begun + room)
        await woken.wait()
        woken.clear()
        ends = executor.take_ended()
        assert all(isinstance(end.outcome, Succeeded) for end in ends)
        ended += len(ends)


@contextlib.asynccontextmanager
async def opened(kind: str, folder: str) -> AsyncIterator[tuple[Executor, asyncio.Event]]:
    loop, woken, output = asyncio.get_running_loop(), asyncio.Event(), Discarded()
    executor: Executor

    def wake() -> None:
        loop.call_soon_threadsafe(woken.set)

    if kind == "thread":
        executor = ThreadExecutor(
            output,
            wake,
            threads=4,
            import_paths=[folder],
            allowed_packages=None,
        )
        await executor.open()
        yield executor, woken
        await executor.close()
        return
    link = KeeperLink()
    await link.open()
    executor = PythonExecutor(
        link,
        output,
        woken.set,
        children=2,
        base_env=dict(os.environ),
        default_cwd=folder,
        import_paths=[folder],
        temp_root=f"{folder}/temp",
        kill_grace_ms=0,
        allowed_packages=None,
    )
    await executor.open()
    yield executor, woken
    await executor.close()
    await link.close()


def bare_round_trips() -> float:
    """One byte to another process and back, per second."""
    here, there = socket.socketpair()
    child = os.posix_spawn(
        sys.executable,
        [sys.executable, "-S", "-c", "import os\nwhile (x := os.read(0, 1)): os.write(0, x)"],
        {},
        file_actions=[(os.POSIX_SPAWN_DUP2, there.fileno(), 0)],
    )
    there.close()
    here.send(b"x")
    here.recv(1)
    count = 2_000
    began = time.perf_counter()
    for _ in range(count):
        here.send(b"x")
        here.recv(1)
    per_second = count / (time.perf_counter() - began)
    here.close()
    os.waitpid(child, 0)
    return per_second


def own_cpu_s() -> float:
    """CPU of this process, all threads, user and system."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    asyncio.run(main())
