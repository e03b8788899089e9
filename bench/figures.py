"""What the benchmarks share: a scratch host, percentiles, lines of output."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from stellwerk.assemble import ADMIN_TOKEN_FILE, Parts
from stellwerk.core.run import Action, PythonCall, State
from stellwerk.kernel.settings import Settings, WorkerSettings
from stellwerk.kernel.submit import NewRun

ACTIONS = """
def noop():
    return None

def compute():
    number = 0
    while True:
        number = (number * 31 + 7) % 1_000_003
"""


@contextlib.asynccontextmanager
async def scratch_host(workers: WorkerSettings | None = None) -> AsyncIterator[Parts]:
    """A host on the embedded store in a scratch folder on the disk of the checkout."""
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=Path.cwd()))
    (folder / "bench_actions.py").write_text(ACTIONS)
    parts = Parts(Settings(folder=folder, data=folder / "data", workers=workers or WorkerSettings()))
    await parts.open()
    try:
        yield parts
    finally:
        hurry = asyncio.Event()
        hurry.set()
        await parts.close(hurry)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder on the disk of the checkout: a memory file system would flatter every figure."""
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=Path.cwd()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def host_process(folder: Path) -> Iterator[tuple[int, str]]:
    """A real host over the folder: its port and its admin token."""
    command = [sys.executable, "-m", "stellwerk", "up", "--data", str(folder / "data"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=folder) as host:
        try:
            assert host.stdout is not None
            found = re.search(r":(\d+) ", host.stdout.readline())
            assert found is not None
            yield int(found[1]), (folder / "data" / ADMIN_TOKEN_FILE).read_text().strip()
        finally:
            host.terminate()


def noop(isolation: str) -> NewRun:
    action: Action = PythonCall("bench_actions:noop", "thread" if isolation == "thread" else "process")
    return NewRun("bench", "noop", action)


async def until_succeeded(parts: Parts, count: int) -> None:
    """Wait until so many runs have succeeded, asking the store seldom: it has other things to do."""
    while True:
        missing = count - (await parts.kernel.count()).states.get(State.SUCCEEDED, 0)
        if missing <= 0:
            return
        await asyncio.sleep(min(0.1, 0.002 + missing / 100_000))


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def say(name: str, text: str) -> None:
    print(f"{name:<46} {text}", flush=True)
