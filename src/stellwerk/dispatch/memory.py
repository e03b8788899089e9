"""Wake-ups inside one process: nothing is lost, so nothing polls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from stellwerk.dispatch.protocol import Wake


class Hub:
    """What the hosts of one process share."""

    def __init__(self) -> None:
        self.ends: list[MemoryDispatch] = []


class MemoryDispatch:
    """One host's end: a list of wakes that came, and an event that says so."""

    def __init__(self, hub: Hub | None = None) -> None:
        self._hub = hub or Hub()
        self._came: list[Wake] = []
        self._something = asyncio.Event()

    async def open(self) -> None:
        self._hub.ends.append(self)

    async def close(self) -> None:
        self._hub.ends.remove(self)

    def poll_ms(self) -> int | None:
        return None

    async def wake(self, wakes: Sequence[Wake]) -> None:
        for end in self._hub.ends:
            end.take(wakes)

    def take(self, wakes: Sequence[Wake]) -> None:
        """Called by whoever wakes; wakes that nobody has read yet are kept together."""
        self._came.extend(wakes)
        self._something.set()

    async def wait(self, timeout_ms: int | None) -> list[Wake]:
        if not self._came:
            try:
                async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1_000):
                    await self._something.wait()
            except TimeoutError:
                return []
        self._something.clear()
        came, self._came = self._came, []
        return came
