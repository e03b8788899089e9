"""Commands and shell scripts: asks the keeper for a process tree, reads its two pipes, says how it ended.

An attempt is over when the keeper has said that its whole tree is gone and both pipes are at their end; or a second
after the former, when somebody outside the tree holds a pipe open. The link belongs to whoever made it, and must be
open before this is, and closed after.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stellwerk.core.run import Outcome
from stellwerk.execute.attempt_folders import AttemptFolders
from stellwerk.execute.attempt_pipes import LateReading
from stellwerk.execute.environment import base_environment
from stellwerk.execute.keeper_link import KeeperLink
from stellwerk.execute.protocol import Attempt, Ended, Output
from stellwerk.execute.running_command import RunningCommand, Surroundings

__all__ = ["CommandExecutor", "base_environment"]


class CommandExecutor:
    """Implements `Executor` for `Command` and `Shell`."""

    def __init__(
        self,
        link: KeeperLink,
        output: Output,
        wake: Callable[[], None],
        *,
        base_env: Mapping[str, str],
        default_cwd: str,
        temp_root: Path,
        kill_grace_ms: int = 10_000,
    ) -> None:
        self._link = link
        self._output = output
        self._wake = wake
        self._base_env = dict(base_env)
        self._default_cwd = default_cwd
        self._kill_grace_ms = kill_grace_ms
        self._folders = AttemptFolders(temp_root)
        self._running: dict[tuple[str, int], RunningCommand] = {}
        self._ended: list[Ended] = []
        self._stuck: dict[str, str] = {}
        self._all_over: asyncio.Future[None] | None = None

    async def open(self) -> None:
        """Get ready to start commands."""
        loop = asyncio.get_running_loop()
        self._folders.open()
        self._shared = Surroundings(
            loop=loop,
            link=self._link,
            output=self._output,
            folders=self._folders,
            late_reading=LateReading(loop),
            base_env=self._base_env,
            default_cwd=self._default_cwd,
            kill_grace_ms=self._kill_grace_ms,
            devnull=os.open(os.devnull, os.O_RDONLY),
        )

    async def close(self) -> None:
        """Kill what still runs, wait for its end, remove what it left."""
        for command in list(self._running.values()):
            command.stop("stopped", 0)
        if self._running:
            self._all_over = self._shared.loop.create_future()
            await self._all_over
        os.close(self._shared.devnull)
        await self._folders.close()

    def start(self, attempts: Sequence[Attempt]) -> None:
        """Begin these."""
        for attempt in attempts:
            command = RunningCommand(self._shared, attempt, self)
            self._running[attempt.run_id, attempt.number] = command
            command.begin()

    def stop(self, run_id: str, number: int, grace_ms: int) -> None:
        """TERM, then KILL after the grace."""
        command = self._running.get((run_id, number))
        if command is not None:
            command.stop("stopped", grace_ms)

    def narrow(self, width: int) -> bool:
        """Commands are counted where they are started."""
        return False

    def give_back(self) -> None:
        """Commands begin at once: none waits here."""

    def renew(self, deadline_boot_ms: int, given_up: Sequence[tuple[str, int]]) -> None:
        """Tell the keeper the new deadline of all but those given up."""
        commands = (self._running.get(key) for key in given_up)
        self._link.renew(deadline_boot_ms, [command.handle for command in commands if command is not None])

    def take_ended(self) -> list[Ended]:
        """All ends since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def stuck(self) -> Mapping[str, str]:
        """run_id → what holds its end up."""
        return self._stuck

    # ── what its commands tell (CommandOwner) ──

    def command_over(self, command: RunningCommand, outcome: Outcome) -> None:
        """Keep the end for `take_ended`."""
        run_id, number = command.attempt.run_id, command.attempt.number
        del self._running[run_id, number]
        self._stuck.pop(run_id, None)
        self._ended.append(Ended(run_id, number, outcome))
        self._wake()
        if self._all_over is not None and not self._running:
            self._all_over.set_result(None)

    def command_stuck(self, command: RunningCommand, text: str) -> None:
        """Keep the text for `why`."""
        self._stuck[command.attempt.run_id] = text
