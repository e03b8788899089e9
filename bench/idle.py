"""An idle host: CPU, queries to its store, memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

from bench.figures import say, scratch_folder

WATCHED_S = 10.0


async def main() -> None:
    with scratch_folder() as folder:
        host = subprocess.Popen(
            [sys.executable, "-m", "stellwerk", "up", "--data", str(folder / "data"), "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=folder,
        )
        try:
            assert host.stdout is not None
            host.stdout.readline()
            await asyncio.sleep(2)
            family = [host.pid, *_descendants(host.pid)]
            cpu, switches = sum(map(_cpu_s, family)), sum(map(_wakeups, family))
            started = time.perf_counter()
            await asyncio.sleep(WATCHED_S)
            elapsed = time.perf_counter() - started
            share = (sum(map(_cpu_s, family)) - cpu) / elapsed
            woken = sum(map(_wakeups, family)) - switches
            say(
                "idle host",
                f"CPU {share * 100:.2f} % of a core (wanted under 1), {woken} wake-ups in {elapsed:.0f} s, "
                f"memory {_rss_mb(host.pid):.0f} MB (wanted under 90), with keeper, guard and warm children "
                f"{sum(map(_rss_mb, family)):.0f} MB",
            )
        finally:
            host.terminate()
            host.wait(30)


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", encoding="ascii", errors="replace") as stat:
                    parents.setdefault(int(stat.read().rpartition(")")[2].split()[1]), []).append(int(entry))
            except OSError:
                continue
    found: list[int] = []
    todo = [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found.extend(children)
        todo.extend(children)
    return found


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wakeups(pid: int) -> int:
    """Voluntary switches of all threads: each is somebody who woke up and went back to sleep."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/status", encoding="ascii", errors="replace") as status:
            total += next(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt"))
    return total


def _rss_mb(pid: int) -> float:
    with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    asyncio.run(main())
