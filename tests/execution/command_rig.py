"""A command executor with a log buffer, and the worker's half of the conversation."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path

from stellwerk.core.logs import STDERR, STDOUT, SYSTEM, LogPiece
from stellwerk.core.run import Action, Command, Outcome, Shell
from stellwerk.execute.boot_clock import boot_ms
from stellwerk.execute.command import CommandExecutor, base_environment
from stellwerk.execute.keeper_link import KeeperLink
from stellwerk.execute.log_buffer import LogBuffer, LogLimits
from stellwerk.execute.protocol import Attempt

WAIT_S = 20.0


def as_bytes(pieces: list[LogPiece], stream: int) -> bytes:
    """The bytes as the command wrote them."""
    return b"".join(p.data if p.cut else p.data + b"\n" for p in pieces if p.stream == stream)


class Rig:
    """Takes ends and lines as the worker would, and remembers them."""

    def __init__(self, link: KeeperLink, folder: Path, limits: LogLimits | None = None) -> None:
        self._ids = itertools.count(1)
        self._woken = asyncio.Event()
        self.link = link
        self.temp_root = folder / "temp"
        self.takes_lines = True
        self.buffer = LogBuffer(
            now_ms=lambda: time.time_ns() // 1_000_000, wake=self._woken.set, folder=folder, limits=limits
        )
        self.executor = CommandExecutor(
            link,
            self.buffer,
            self._woken.set,
            base_env=base_environment(os.environ),
            default_cwd=str(folder),
            temp_root=self.temp_root,
            kill_grace_ms=100,
        )
        self.lines: dict[str, list[LogPiece]] = {}
        self.outcomes: dict[str, Outcome] = {}

    def start(
        self,
        action: Action,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
        timeout_ms: int | None = None,
        lease_ms: int = 60_000,
    ) -> str:
        run_id = f"run-{next(self._ids)}"
        self.lines[run_id] = []
        self.executor.start(
            [
                Attempt(
                    run_id=run_id,
                    number=1,
                    scope="test",
                    name="command",
                    action=action,
                    env={} if env is None else env,
                    labels={},
                    cwd=cwd,
                    args=None,
                    stdin=stdin,
                    timeout_ms=timeout_ms,
                    lease_deadline_boot_ms=boot_ms() + lease_ms,
                )
            ]
        )
        return run_id

    async def end(self, run_id: str) -> Outcome:
        """Wait for the end of this run and for all its lines."""
        async with asyncio.timeout(WAIT_S):
            while run_id not in self.outcomes or not self.buffer.is_drained(run_id, 1):
                await self._turn()
        return self.outcomes[run_id]

    async def line(self, run_id: str, wanted: bytes) -> None:
        """Wait until it has written this line."""
        async with asyncio.timeout(WAIT_S):
            while wanted not in [piece.data for piece in self.lines[run_id]]:
                await self._turn()

    async def _turn(self) -> None:
        await self._woken.wait()
        self._woken.clear()
        for ended in self.executor.take_ended():
            self.outcomes[ended.run_id] = ended.outcome
        while self.takes_lines and (chunks := self.buffer.take()):
            for chunk in chunks:
                self.lines[chunk.run_id].extend(chunk.lines)
            self.buffer.confirm(chunks)

    async def shell(self, script: str, **more: object) -> Outcome:
        self.last = self.start(Shell(script), **more)  # type: ignore[arg-type]
        return await self.end(self.last)

    async def command(self, *argv: str, **more: object) -> Outcome:
        self.last = self.start(Command(argv), **more)  # type: ignore[arg-type]
        return await self.end(self.last)

    def stdout(self) -> bytes:
        return as_bytes(self.lines[self.last], STDOUT)

    def stderr(self) -> bytes:
        return as_bytes(self.lines[self.last], STDERR)

    def system(self) -> bytes:
        return as_bytes(self.lines[self.last], SYSTEM)
