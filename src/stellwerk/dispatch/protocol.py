"""What carries wake-ups between hosts, and inside one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

JOURNAL, STOP = "journal", "stop"


def queue_topic(queue: str) -> str:
    """The topic of a queue in which runs became claimable."""
    return f"queue:{queue}"


class Wake(Struct, frozen=True):
    """A hint that now is a good time to look. Carries no truth."""

    topic: str
    runs: tuple[str, ...] = ()  # look at these first


class Dispatch(Protocol):
    """One host's end of the wire."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def poll_ms(self) -> int | None:
        """How long a host may trust silence; None if no wake is ever lost, so that nobody need poll."""

    async def wake(self, wakes: Sequence[Wake]) -> None:
        """After a commit. May lose, repeat and reorder; never raises, never blocks for long."""

    async def wait(self, timeout_ms: int | None) -> list[Wake]:
        """Return as soon as something comes, with all that came; an empty list at the timeout."""
