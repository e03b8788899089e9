"""One command from its start to its outcome: a listener of the keeper's, with pipes, a folder and a timeout."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from stellwerk.core.run import Command, Outcome, Shell
from stellwerk.execute.attempt_folders import AttemptFolders
from stellwerk.execute.attempt_pipes import AttemptPipes, LateReading
from stellwerk.execute.command_outcome import outcome_of_end, outcome_of_failed_start
from stellwerk.execute.keeper_link import KeeperLink, Spawn
from stellwerk.execute.nameless_file import nameless_file
from stellwerk.execute.protocol import Attempt, Output

PIPE_HELD_S = 1.0
SCRIPT_NAME = "script"


class Surroundings(Struct, frozen=True):
    """What all commands of one executor share."""

    loop: asyncio.AbstractEventLoop
    link: KeeperLink
    output: Output
    folders: AttemptFolders
    late_reading: LateReading
    base_env: Mapping[str, str]
    default_cwd: str
    kill_grace_ms: int
    devnull: int


class CommandOwner(Protocol):
    """Who wants to know what became of it."""

    def command_over(self, command: RunningCommand, outcome: Outcome) -> None: ...

    def command_stuck(self, command: RunningCommand, text: str) -> None: ...


class RunningCommand:
    """Implements `SpawnListener`."""

    def __init__(self, shared: Surroundings, attempt: Attempt, owner: CommandOwner) -> None:
        self.attempt = attempt
        self.handle = 0
        self._shared = shared
        self._owner = owner
        self._asked: str | None = None  # why we stopped it: stopped or timeout
        self._timeout: asyncio.TimerHandle | None = None
        self._pipe_timer: asyncio.TimerHandle | None = None
        self._outcome: Outcome | None = None
        self._folder: str | None = None
        self._script: str | None = None
        self._pipes: AttemptPipes | None = None

    def begin(self) -> None:
        """Ask the keeper; what goes wrong before that comes back as an outcome, too."""
        try:
            self._begin()
        except (OSError, ValueError) as error:  # no descriptors, no disk, or text that the system cannot take
            self._outcome = outcome_of_failed_start(
                self._program(), getattr(error, "errno", None), getattr(error, "strerror", None) or str(error)
            )
            self._shared.loop.call_soon(self._finish)

    def stop(self, reason: str, grace_ms: int) -> None:
        """The first reason stands; a later stop can only shorten the grace."""
        if self._asked is None:
            self._asked = reason
        self._shared.link.stop(self.handle, grace_ms)

    # ── what the keeper tells ──

    def started(self, pid: int) -> None:
        assert self._pipes is not None
        self._shared.late_reading.add(self._pipes)
        if self.attempt.timeout_ms is not None:
            self._timeout = self._shared.loop.call_later(self.attempt.timeout_ms / 1_000, self._time_is_up)

    def failed(self, errno: int, text: str) -> None:
        self._outcome = outcome_of_failed_start(self._program(), errno, text)
        self._finish()

    def ended(self, wait_status: int, why: str, cpu_ms: int) -> None:
        assert self._pipes is not None
        if self._timeout is not None:
            self._timeout.cancel()
        self._outcome = outcome_of_end(wait_status, why, asked=self._asked, timeout_ms=self.attempt.timeout_ms)
        if self._pipes.read_rest():
            self._finish()
            return
        self._pipes.begin_reading()
        self._pipe_timer = self._shared.loop.call_later(PIPE_HELD_S, self._pipe_is_held)

    def stuck(self, text: str) -> None:
        self._owner.command_stuck(self, text)

    # ── the way there ──

    def _begin(self) -> None:
        attempt, shared = self.attempt, self._shared
        self._folder = shared.folders.make()
        argv = self._argv(self._folder)
        stdin = shared.devnull if attempt.stdin is None else nameless_file(attempt.stdin, self._folder)
        try:
            self._pipes = AttemptPipes(
                shared.loop, shared.output, run_id=attempt.run_id, number=attempt.number, ended=self._pipes_ended
            )
            self.handle = shared.link.start(
                Spawn(
                    argv=argv,
                    env={**shared.base_env, **attempt.env, "STELLWERK_TMP": self._folder},
                    cwd=attempt.cwd if attempt.cwd is not None else shared.default_cwd,
                    fds=(stdin, *self._pipes.write_ends),
                    deadline_boot_ms=attempt.lease_deadline_boot_ms,
                ),
                self,
            )
            self._pipes.given()
        finally:
            if stdin != shared.devnull:
                os.close(stdin)

    def _argv(self, folder: str) -> tuple[str, ...]:
        match self.attempt.action:
            case Command(argv):
                return argv
            case Shell(script):
                # A file, not `bash -c`: one argument may not be longer than 128 KiB.
                self._script = f"{folder}/{SCRIPT_NAME}"
                with open(self._script, "xb") as file:
                    file.write(script.encode())
                return ("bash", self._script)
            case other:
                raise ValueError(f"a {type(other).__name__} is not for the command executor")

    def _program(self) -> str:
        action = self.attempt.action
        if isinstance(action, Command) and action.argv:
            return action.argv[0]
        return "bash"

    # ── the way out ──

    def _time_is_up(self) -> None:
        self.stop("timeout", self._shared.kill_grace_ms)

    def _pipes_ended(self) -> None:
        if self._outcome is not None:
            self._finish()

    def _pipe_is_held(self) -> None:
        self._shared.output.system(
            self.attempt.run_id,
            self.attempt.number,
            "[a process outside the tree of this run still holds its output open; reading has stopped]",
        )
        self._finish()

    def _finish(self) -> None:
        assert self._outcome is not None
        for timer in (self._timeout, self._pipe_timer):
            if timer is not None:
                timer.cancel()
        if self._pipes is not None:
            self._pipes.close()
        self._shared.output.close(self.attempt.run_id, self.attempt.number)
        if self._folder is not None:
            self._shared.folders.remove(self._folder, self._script)
        self._owner.command_over(self, self._outcome)
