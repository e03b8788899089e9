"""The journal over HTTP: read, wait, follow."""

from __future__ import annotations

import asyncio
import typing
from collections.abc import AsyncIterator
from typing import Any

from msgspec import Struct

from stellwerk.core.errors import Refused
from stellwerk.core.events import AnyEvent
from stellwerk.core.names import check_run_id
from stellwerk.kernel.feed import Empty, Feed, Filter, NonEmpty, Torn
from stellwerk.web.answer import Answer, json_bytes
from stellwerk.web.call import Call
from stellwerk.web.params import EVENT_ID_MAX, TIMEOUT, Param, text_param, whole_param, words_param
from stellwerk.web.routes import Route
from stellwerk.web.sse import QUIET_S, EventStream, sse_event, sse_quiet
from stellwerk.web.waiting import Stop, while_there

LIMIT_DEFAULT, LIMIT_MAX = 1_000, 10_000
STREAM_EVENTS = 1_000  # sent in one piece
PREFIX_CHARS_MAX = 300

TYPES = frozenset(event.__name__ for event in typing.get_args(AnyEvent))
LAST_EVENT_ID = Param(
    "Last-Event-ID", "Where a broken stream was; stands before `after`.", {"type": "integer", "minimum": 0}
)

Found = NonEmpty | Empty | Torn


class NonEmptyView(Struct, frozen=True, tag="NonEmpty", tag_field="type"):
    """Go on after `last_event_id`; it may lie past the last event shown, if a filter hid others."""

    events: list[dict[str, Any]]
    last_event_id: int


class EmptyView(Struct, frozen=True, tag="Empty", tag_field="type"):
    last_event_id: int


class TornView(Struct, frozen=True, tag="Torn", tag_field="type"):
    """An event after `after` is no longer kept, or `after` was never reached: read anew, then follow from there.

    Nothing from `oldest` on was forgotten.
    """

    oldest: int
    last_event_id: int


class Events:
    """The handlers, over one feed."""

    def __init__(self, feed: Feed, stop: Stop) -> None:
        self._feed = feed
        self._stop = stop

    def routes(self) -> list[Route]:
        return [
            Route(
                "GET",
                "/api/events",
                self.read,
                role="viewer",
                about="Read the journal after an event, wait for more, or follow it as server-sent events.",
                params=(
                    whole_param("after", "Only events after this EventId.", 0, EVENT_ID_MAX, 0),
                    TIMEOUT,
                    whole_param("limit", "At most so many events.", 1, LIMIT_MAX, LIMIT_DEFAULT),
                    words_param("type", "Only events of these types.", sorted(TYPES)),
                    text_param("run", "Only events of this run.", chars_max=200),
                    text_param("prefix", "Only events whose key begins so.", chars_max=PREFIX_CHARS_MAX),
                ),
                headers=(LAST_EVENT_ID,),
                streams=True,
                answers={200: ("Events, or that there are none.", (NonEmptyView, EmptyView, TornView))},
            )
        ]

    async def read(self, call: Call) -> Answer:
        query = call.query
        after = last_event_id(call.header(b"last-event-id"))
        if after is None:
            after = query.whole("after", 0, 0, EVENT_ID_MAX)
        limit = query.whole("limit", LIMIT_DEFAULT, 1, LIMIT_MAX)
        run, prefix = query.text("run"), query.text("prefix") or ""
        if len(prefix) > PREFIX_CHARS_MAX:
            raise Refused(f"prefix must be at most {PREFIX_CHARS_MAX} characters", "prefix")
        wanted = Filter(query.words("type", TYPES), None if run is None else check_run_id(run, "run"), prefix)
        wait_s = query.poll_s() or 0.0
        if call.wants_stream:
            return EventStream(self._follow(after, wanted), self._stop)
        found = await self._feed.wait_after(after, wanted, limit=limit)
        if isinstance(found, Empty) and wait_s > 0 and not self._stop.is_set():
            waiting = self._feed.wait_after(found.last, wanted, limit=limit, timeout_s=wait_s)
            found = await while_there(call.receive, self._stop, waiting) or found
        return json_bytes(self._encode(found))

    async def _follow(self, after: int, wanted: Filter) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        while not self._stop.is_set():
            asked = loop.time()
            found = await self._feed.wait_after(after, wanted, limit=STREAM_EVENTS, timeout_s=QUIET_S)
            if isinstance(found, Torn):
                # Its id lets a browser that comes back by itself go on from now.
                yield sse_event("Torn", self._encode(found), found.last)
                return
            if isinstance(found, NonEmpty):
                yield b"".join(
                    sse_event(type(stamped.event).__name__, self._feed.encoded(stamped), stamped.event_id)
                    for stamped in found.events
                )
            elif loop.time() - asked < 1.0:
                # The feed would not let us wait: it is closing, or has too many followers.
                await asyncio.sleep(1.0)
                continue
            if isinstance(found, Empty) or found.events[-1].event_id < found.last:
                yield sse_quiet(found.last)
            after = found.last

    def _encode(self, found: Found) -> bytes:
        if isinstance(found, NonEmpty):
            events = b",".join([self._feed.encoded(stamped) for stamped in found.events])
            return b'{"type":"NonEmpty","events":[%s],"last_event_id":%d}' % (events, found.last)
        if isinstance(found, Empty):
            return b'{"type":"Empty","last_event_id":%d}' % found.last
        # The feed tells the last id that was forgotten; who asks after that gets all that is kept.
        return b'{"type":"Torn","oldest":%d,"last_event_id":%d}' % (found.oldest + 1, found.last)


def last_event_id(text: str | None) -> int | None:
    """The header by which a stream is taken up again."""
    if text is None or text == "":
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= EVENT_ID_MAX):
        raise Refused("Last-Event-ID must be a whole number that this host gave out", "Last-Event-ID")
    return int(text)
