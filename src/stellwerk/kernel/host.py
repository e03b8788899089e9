"""A host: the parts of one Stellwerk process, opened in order and stopped in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from stellwerk.dispatch.protocol import JOURNAL, STOP, Dispatch
from stellwerk.kernel.kernel import Kernel
from stellwerk.kernel.ticker import Ticker
from stellwerk.kernel.worker import Worker

log = logging.getLogger("stellwerk.host")


class Host:
    """Everything is made elsewhere; this knows only the order."""

    def __init__(self, kernel: Kernel, worker: Worker, ticker: Ticker, dispatch: Dispatch) -> None:
        self.kernel = kernel
        self.worker = worker
        self.ticker = ticker
        self._dispatch = dispatch
        self._listening: asyncio.Task[None] | None = None
        self._opened = contextlib.AsyncExitStack()

    async def open(self) -> None:
        """Each part registers its own end, so there is no order of stopping to get wrong."""
        try:
            await self._open()
        except BaseException:
            await self._opened.aclose()
            raise

    async def _open(self) -> None:
        await self.kernel.store.open()
        self._opened.push_async_callback(self.kernel.store.close)
        await self._dispatch.open()
        self._opened.push_async_callback(self._dispatch.close)
        await self.kernel.feed.open()
        self._opened.callback(self.kernel.feed.close)
        self.kernel.committer.open(self.ticker.hint)
        self._opened.push_async_callback(self.kernel.committer.close)
        self._listening = asyncio.create_task(self._listen(), name="listener")
        self._opened.push_async_callback(self._stop_listening)
        self._opened.push_async_callback(self.worker.close)
        await self.worker.open()
        self.ticker.open()
        self._opened.push_async_callback(self.ticker.close)

    async def close(self, skip: asyncio.Event | None = None) -> None:
        """Stop claiming, wait for what runs, put back what does not end in time. `skip` set: do not wait."""
        await self.worker.drain(skip if skip is not None else asyncio.Event())
        await self._opened.aclose()

    async def _listen(self) -> None:
        """Wake-ups, from this host and others. Each only says where to look.

        Where wakes may be lost, it looks everywhere once a poll, also if other wakes keep coming.
        """
        loop = asyncio.get_running_loop()
        poll_ms = self._dispatch.poll_ms()
        looked_s = loop.time()
        while True:
            wakes = await self._dispatch.wait(poll_ms)
            is_time = not wakes or (poll_ms is not None and loop.time() - looked_s >= poll_ms / 1_000)
            try:
                queues = [wake.topic.removeprefix("queue:") for wake in wakes if wake.topic.startswith("queue:")]
                if is_time:
                    looked_s = loop.time()
                    self.kernel.committer.look()
                elif queues:
                    self.kernel.committer.look(queues)
                if is_time or any(wake.topic == JOURNAL for wake in wakes):
                    await self.kernel.feed.look()
                stops = [run_id for wake in wakes if wake.topic == STOP for run_id in wake.runs]
                if stops:
                    await self.worker.stops_asked(stops)
            except Exception as error:
                # A missed hint costs time, never work: the next heartbeat, alarm or poll makes up for it.
                log.warning("a wake-up could not be followed: %s", error)

    async def _stop_listening(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)

    def health(self) -> dict[str, Any]:
        """What `/health` says of the kernel: what is degraded, and how durable the store is."""
        degraded: list[str] = []
        foreign = self.kernel.store.foreign()
        if foreign is not None:
            degraded.append(f"the store is not the one this host knows: {foreign}; see `stellwerk store adopt`")
        elif self.kernel.committer.trouble is not None:
            degraded.append(self.kernel.committer.trouble)
        low = self.kernel.store.low()
        if low is not None:
            degraded.append(low)
        if self.kernel.turner.contended:
            degraded.append(f"{self.kernel.turner.contended} changes meet conflicts again and again")
        return {
            "state": "degraded" if degraded else "ok",
            "durability": self.kernel.store.durability(),
            "degraded": degraded,
        }
