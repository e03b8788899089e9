"""The feed: one tail of the journal per host, and everyone who follows waits at it.

On an exclusive store the committer hands over what it committed; else a wake makes the feed read the store. Events are
kept in chunks as they were committed, and encoded only if somebody asks, once for all who ask.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from stellwerk.core.errors import Unavailable
from stellwerk.core.events import AnyEvent, RunEvent, Stamped, shown, type_name
from stellwerk.store.protocol import Store

RING_EVENTS_MAX = 50_000  # some seconds of a busy host; who is further behind reads the store
STORE_PAGE_EVENTS = 5_000
FOLLOWERS_MAX = 20_000  # waiting at once; each costs some KiB


class Filter(Struct, frozen=True):
    """Which events a follower wants; empty means all."""

    types: frozenset[str] = frozenset()
    run: str | None = None
    prefix: str = ""

    def wants(self, event: AnyEvent) -> bool:
        if self.run is not None and (not isinstance(event, RunEvent) or event.run != self.run):
            return False
        if self.prefix and not event.key.startswith(self.prefix):
            return False
        return not self.types or type_name(event) in self.types


EVERYTHING = Filter()


class NonEmpty(Struct, frozen=True):
    """Events after the one asked for, in order; `last` is the last id examined: go on from there."""

    events: tuple[Stamped, ...]
    last: int


class Empty(Struct, frozen=True):
    """Nothing for this follower up to `last`: go on from there."""

    last: int


class Torn(Struct, frozen=True):
    """What was asked for is not kept, or never was: read a snapshot and follow from its stamp."""

    oldest: int
    last: int


class Chunk:
    """The events of one commit, with their JSON once somebody wanted it."""

    __slots__ = ("_encoded", "events", "first_id")

    def __init__(self, first_id: int, events: Sequence[AnyEvent]) -> None:
        self.first_id = first_id
        self.events = events
        self._encoded: list[bytes | None] | None = None

    @property
    def last_id(self) -> int:
        return self.first_id + len(self.events) - 1

    def encoded(self, event_id: int) -> bytes:
        """The event as the API shows it, as JSON."""
        if self._encoded is None:
            self._encoded = [None] * len(self.events)
        place = event_id - self.first_id
        found = self._encoded[place]
        if found is None:
            found = encode(Stamped(event_id, self.events[place]))
            self._encoded[place] = found
        return found


def encode(stamped: Stamped) -> bytes:
    """JSON of an event as the API shows it."""
    return msgspec.json.encode(shown(stamped))


class Feed:
    """Follow with `wait_after`; `publish` and `look` are the two ways in which events come."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._chunks: list[Chunk] = []
        self._ring_events = 0
        self._looking = asyncio.Lock()
        self._waiting: set[asyncio.Future[None]] = set()
        self._waiting_by_run: dict[str, set[asyncio.Future[None]]] = {}
        self.closed = False
        self._doubts = 0
        self.published = 0  # events since the start
        self.last = 0
        self.ring_after = 0  # the ring holds everything after this id

    async def open(self) -> None:
        self.last = (await self._store.count()).event_id
        self.ring_after = self.last

    def close(self) -> None:
        """Answer everyone who waits, now."""
        self.closed = True
        for waiter in [*self._waiting, *(w for waiters in self._waiting_by_run.values() for w in waiters)]:
            if not waiter.done():
                waiter.set_result(None)

    @property
    def followers(self) -> int:
        return len(self._waiting) + sum(map(len, self._waiting_by_run.values()))

    # -- events come --------------------------------------------------------------------------------------------------

    def publish(self, first_id: int, events: Sequence[AnyEvent]) -> None:
        """Events of one commit, in order of commit."""
        if not events or first_id <= self.last:
            return
        chunk = Chunk(first_id, events)
        self._chunks.append(chunk)
        self._ring_events += len(events)
        self.published += len(events)
        self.last = chunk.last_id
        while self._ring_events > RING_EVENTS_MAX and len(self._chunks) > 1:
            gone = self._chunks.pop(0)
            self._ring_events -= len(gone.events)
            self.ring_after = gone.last_id
        self._wake(events)

    def doubt(self) -> None:
        """Something may have been committed that nobody will publish: `look` before anything else is published."""
        self._doubts += 1

    @property
    def in_doubt(self) -> bool:
        return self._doubts > 0

    async def look(self) -> None:
        """Read what others committed. Several calls at once are one."""
        async with self._looking:
            while True:
                doubts = self._doubts
                found = await self._store.read_journal(self.last, STORE_PAGE_EVENTS)
                if found.forgotten > self.last:
                    # We slept through a trimming: the ring starts afresh behind the gap.
                    self._chunks.clear()
                    self._ring_events = 0
                    self.last = self.ring_after = found.forgotten
                    continue
                if not found.events:
                    if self._doubts == doubts:
                        self._doubts = 0  # nothing came up while we read: what we know is all there was
                    return
                for first_id, events in _stretches(found.events):
                    self.publish(first_id, events)

    def _wake(self, events: Sequence[AnyEvent]) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        if self._waiting_by_run:
            for run_id in {event.run for event in events if isinstance(event, RunEvent)}:
                for waiter in self._waiting_by_run.get(run_id, ()):
                    if not waiter.done():
                        waiter.set_result(None)

    # -- followers ----------------------------------------------------------------------------------------------------

    async def wait_after(
        self, after: int, wanted: Filter = EVERYTHING, *, limit: int = 1_000, timeout_s: float = 0.0
    ) -> NonEmpty | Empty | Torn:
        """Events after an EventId: at once if there are any, else the first that come within the timeout."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            answer = await self._find(after, wanted, limit)
            if not isinstance(answer, Empty):
                return answer
            after = answer.last
            left_s = deadline - loop.time()
            if left_s <= 0 or self.closed:
                return answer
            if self.followers >= FOLLOWERS_MAX:
                raise Unavailable(f"{FOLLOWERS_MAX} followers already wait at this host; try again, or another host", 5)
            if after == self.last:
                await self._sleep(wanted.run, left_s)

    async def _find(self, after: int, wanted: Filter, limit: int) -> NonEmpty | Empty | Torn:
        if after > self.last:
            # Another host may have committed what this one has not heard of yet.
            await self.look()
            if after > self.last:
                return await self._torn()
        if after >= self.ring_after:
            return self._in_ring(after, wanted, limit)
        found = await self._store.read_journal(after, min(limit, STORE_PAGE_EVENTS), wanted.run)
        if after < found.forgotten:
            return Torn(found.forgotten, found.last)
        events = tuple(stamped for stamped in found.events if wanted.wants(stamped.event))
        if events:
            return NonEmpty(events, found.examined)
        if found.examined <= after:
            return Empty(after)
        return Empty(found.examined)

    async def _torn(self) -> Torn:
        found = await self._store.read_journal(self.last, 1)
        return Torn(found.forgotten, found.last)

    def _in_ring(self, after: int, wanted: Filter, limit: int) -> NonEmpty | Empty:
        place = bisect_right(self._chunks, after, key=lambda chunk: chunk.last_id)
        found: list[Stamped] = []
        for chunk in self._chunks[place:]:
            for event_id, event in enumerate(chunk.events, chunk.first_id):
                if event_id > after and wanted.wants(event):
                    found.append(Stamped(event_id, event))
                    if len(found) == limit:
                        return NonEmpty(tuple(found), event_id)
        return NonEmpty(tuple(found), self.last) if found else Empty(self.last)

    def encoded(self, stamped: Stamped) -> bytes:
        """JSON of an event; from the ring if it is there, so that thousands of followers cost one encoding."""
        place = bisect_right(self._chunks, stamped.event_id - 1, key=lambda chunk: chunk.last_id)
        if place < len(self._chunks) and self._chunks[place].first_id <= stamped.event_id:
            return self._chunks[place].encoded(stamped.event_id)
        return encode(stamped)

    async def _sleep(self, run: str | None, timeout_s: float) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting if run is None else self._waiting_by_run.setdefault(run, set())
        waiting.add(waiter)
        try:
            await _within(waiter, timeout_s)
        finally:
            waiting.discard(waiter)
            if run is not None and not waiting:
                self._waiting_by_run.pop(run, None)


async def _within(waiter: asyncio.Future[None], timeout_s: float) -> None:
    """Wait for a future, at most so long; cheaper than `asyncio.timeout` for thousands who wait."""
    loop = asyncio.get_running_loop()
    timer = loop.call_later(timeout_s, _finish, waiter)
    try:
        await waiter
    finally:
        timer.cancel()


def _finish(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _stretches(events: Sequence[Stamped]) -> list[tuple[int, list[AnyEvent]]]:
    """Runs of consecutive ids, as they are published."""
    stretches: list[tuple[int, list[AnyEvent]]] = []
    for stamped in events:
        if stretches and stretches[-1][0] + len(stretches[-1][1]) == stamped.event_id:
            stretches[-1][1].append(stamped.event)
        else:
            stretches.append((stamped.event_id, [stamped.event]))
    return stretches
