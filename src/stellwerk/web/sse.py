"""Server-sent events: an answer that goes on until its source ends, the client leaves or the host stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from litestar.types import Receive, Scope, Send

from stellwerk.core.errors import Unavailable
from stellwerk.web.answer import CLOSED_POLICY, SAFE_HEADERS, Answer
from stellwerk.web.problem import ClientGone, answer_for
from stellwerk.web.waiting import Stop, while_there

QUIET_S = 15.0  # after so long a silence a comment is sent, so that nobody in between takes the line for dead

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    *SAFE_HEADERS,
    CLOSED_POLICY,
    (b"x-accel-buffering", b"no"),
)


def sse_event(name: str, data: bytes, event_id: int | None = None) -> bytes:
    """One event. The data is one line of JSON, so it needs no splitting."""
    head = b"" if event_id is None else b"id: %d\n" % event_id
    return b"%sevent: %s\ndata: %s\n\n" % (head, name.encode(), data)


def sse_quiet(event_id: int) -> bytes:
    """A sign of life that moves the client's place on past events it did not want."""
    return b": quiet\nid: %d\n\n" % event_id


class EventStream(Answer):
    """Sends what its source yields. A source that waits must yield a sign of life every `QUIET_S`."""

    __slots__ = ("_source", "_stop")

    def __init__(self, source: AsyncIterator[bytes], stop: Stop) -> None:
        super().__init__(200, b"", _HEADERS)
        self._source = source
        self._stop = stop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(self.headers)})
        # The first bytes at once: a client knows that it is connected before the first event.
        await send({"type": "http.response.body", "body": b": here\n\n", "more_body": True})
        try:
            await while_there(receive, self._stop, self._pump(send))
        except ClientGone:
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, send: Send) -> None:
        try:
            async for piece in self._source:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                # A source that always has more must let the others have their turn.
                await asyncio.sleep(0)
        except Unavailable:
            return  # the store went away: the client comes back with Last-Event-ID
        except Exception as error:
            answer_for(error, "GET", "a stream")  # its status is out already; the log hears of it
