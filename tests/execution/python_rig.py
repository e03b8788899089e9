"""An executor with what it needs around it, for tests: an output that remembers, and waiting for ends."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from stellwerk.core.logs import STDERR, STDOUT
from stellwerk.core.run import Outcome, PythonCall
from stellwerk.execute.boot_clock import boot_ms
from stellwerk.execute.keeper_link import KeeperLink
from stellwerk.execute.protocol import Attempt, Ended, Executor
from stellwerk.execute.python_call import PythonExecutor
from stellwerk.execute.thread_call import ThreadExecutor

FUNCTIONS = str(Path(__file__).parent)
PATIENCE_S = 60.0  # only a test that fails waits so long
LEASE_MS = 60_000


class Remembered:
    """An Output that keeps all."""

    def __init__(self) -> None:
        self.text: dict[tuple[str, int], bytes] = {}
        self.closed: set[str] = set()
        self.written = asyncio.Event()
        self.is_full = False  # a test says so; then bytes are still kept, but the writer is asked to pause
        self.asked = asyncio.Event()  # for room, while full

    def write(self, run_id: str, number: int, stream: int, data: bytes) -> bool:
        assert run_id not in self.closed
        if self.is_full and not data:
            self.asked.set()
            return False
        self.text[run_id, stream] = self.text.get((run_id, stream), b"") + data
        self.written.set()
        return not self.is_full

    def system(self, run_id: str, number: int, text: str) -> None: ...

    def close(self, run_id: str, number: int) -> None:
        assert run_id not in self.closed
        self.closed.add(run_id)

    def of(self, run_id: str) -> str:
        return self.text.get((run_id, STDOUT), b"").decode()

    def errors_of(self, run_id: str) -> str:
        return self.text.get((run_id, STDERR), b"").decode()


class Rig:
    """Starts calls of `python_functions` and gathers their ends."""

    def __init__(self) -> None:
        self.output = Remembered()
        self.outcomes: dict[str, Outcome] = {}
        self.executor: Executor
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._numbers = itertools.count(1)

    def wake(self) -> None:
        self._loop.call_soon_threadsafe(self._woken.set)

    def attempt(self, function: str, args: Any = None, **changes: Any) -> Attempt:
        values: dict[str, Any] = {
            "run_id": f"run-{next(self._numbers)}",
            "number": 1,
            "scope": "tests",
            "name": "call",
            "action": PythonCall(function if ":" in function else f"python_functions:{function}"),
            "env": {},
            "labels": {},
            "cwd": None,
            "args": None if args is None else msgspec.json.encode(args),
            "stdin": None,
            "timeout_ms": None,
            "lease_deadline_boot_ms": boot_ms() + LEASE_MS,
        }
        return Attempt(**(values | changes))

    def begin(self, function: str, args: Any = None, **changes: Any) -> str:
        attempt = self.attempt(function, args, **changes)
        self.executor.start([attempt])
        return attempt.run_id

    async def call(self, function: str, args: Any = None, **changes: Any) -> Outcome:
        return await self.end_of(self.begin(function, args, **changes))

    async def end_of(self, run_id: str) -> Outcome:
        await self.until(lambda: run_id in self.outcomes)
        return self.outcomes[run_id]

    async def ends_of(self, run_ids: Sequence[str]) -> list[Outcome]:
        await self.until(lambda: all(run_id in self.outcomes for run_id in run_ids))
        return [self.outcomes[run_id] for run_id in run_ids]

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                self.remember(self.executor.take_ended())
                if is_so():
                    return
                self._woken.clear()
                await self._woken.wait()

    async def until_written(self, run_id: str, text: str) -> None:
        await self.until_written_by([run_id], text, 1)

    async def until_written_by(self, run_ids: Sequence[str], text: str, count: int) -> None:
        """Until so many of these runs have written the text."""
        async with asyncio.timeout(PATIENCE_S):
            while sum(text in self.output.of(run_id) for run_id in run_ids) < count:
                self.output.written.clear()
                waits = [asyncio.ensure_future(event.wait()) for event in (self.output.written, self._woken)]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
                self._woken.clear()
                self.remember(self.executor.take_ended())

    def remember(self, ended: Sequence[Ended]) -> None:
        for end in ended:
            assert end.run_id not in self.outcomes, "an attempt ends once"
            self.outcomes[end.run_id] = end.outcome


@asynccontextmanager
async def process_rig(folder: Path, **changes: Any) -> AsyncIterator[Rig]:
    rig = Rig()
    link = KeeperLink()
    await link.open()
    values: dict[str, Any] = {
        "children": 4,
        "base_env": {"PATH": os.environ["PATH"], "HOME": "/home/base"},
        "default_cwd": str(folder),
        "import_paths": [FUNCTIONS],
        "temp_root": str(folder / "temp"),
        "kill_grace_ms": 500,
        "allowed_packages": None,
    }
    rig.executor = PythonExecutor(link, rig.output, rig.wake, **(values | changes))
    await rig.executor.open()
    try:
        yield rig
    finally:
        await rig.executor.close()
        await link.close()


@asynccontextmanager
async def thread_rig(**changes: Any) -> AsyncIterator[Rig]:
    rig = Rig()
    values: dict[str, Any] = {"threads": 4, "import_paths": [FUNCTIONS], "allowed_packages": None}
    rig.executor = ThreadExecutor(rig.output, rig.wake, **(values | changes))
    await rig.executor.open()
    try:
        yield rig
    finally:
        await rig.executor.close()


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
