"""What the worker asks of whatever executes attempts, and what it hears back.

No asyncio task, future or callback per attempt: starts go in as lists, ends come out as lists, and `wake` (given at
construction, thread-safe, cheap when called twice) tells the worker that there is something to take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from stellwerk.core.run import Action, Outcome


class Attempt(Struct, frozen=True):
    """All that an executor may know of one try of a run.

    `env` is the run's own part of the environment (its `env`, the STELLWERK_ variables and what a door adds); the
    executor lays it over its allow-listed base. Deadlines are CLOCK_BOOTTIME milliseconds.
    """

    run_id: str
    number: int
    scope: str
    name: str
    action: Action
    env: Mapping[str, str]
    labels: Mapping[str, str]
    cwd: str | None
    args: bytes | None  # JSON array or object, for PythonCall
    stdin: bytes | None
    timeout_ms: int | None
    lease_deadline_boot_ms: int


class Ended(Struct, frozen=True):
    """The end of an attempt; sent only when its whole process tree is gone and its output handed over."""

    run_id: str
    number: int
    outcome: Outcome


class Output(Protocol):
    """Where an executor puts the bytes that an attempt writes. Implemented by `log_buffer.LogBuffer`."""

    def write(self, run_id: str, number: int, stream: int, data: bytes) -> bool:
        """Take bytes as they came; False asks the caller to stop reading this attempt.

        Asked again with no bytes it says whether there is room now. A caller may go on after some seconds: what does
        not fit then is dropped and counted.
        """

    def system(self, run_id: str, number: int, text: str) -> None:
        """A line of our own beside the attempt's output."""

    def close(self, run_id: str, number: int) -> None:
        """No more output of this attempt comes."""


class Executor(Protocol):
    """Runs attempts of some kinds of action."""

    async def open(self) -> None: ...

    async def close(self) -> None:
        """End everything that still runs, trees included, and free all resources."""

    def start(self, attempts: Sequence[Attempt]) -> None:
        """Begin these; never blocks. What cannot be started comes back as an end with `Failed`."""

    def stop(self, run_id: str, number: int, grace_ms: int) -> None:
        """TERM, then KILL after the grace (0: KILL at once). The end comes through `take_ended`."""

    def narrow(self, width: int) -> bool:
        """Run at most so many at once from now on, beside others of the same queue; False if it cannot do that."""

    def give_back(self) -> None:
        """End with `Returned` whatever has been started here and has not begun: it waits behind something slow."""

    def renew(self, deadline_boot_ms: int, given_up: Sequence[tuple[str, int]]) -> None:
        """The store prolonged all leases but those given up: their new deadline for the keeper."""

    def take_ended(self) -> list[Ended]:
        """All ends since the last call."""

    def stuck(self) -> Mapping[str, str]:
        """run_id → what holds its end up (pids in state D, of another user, …), for `why`."""
