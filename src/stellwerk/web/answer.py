"""An answer: status, headers and bytes, ready to be sent. Made by hand, since it is on the hot path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from litestar.types import Receive, Scope, Send

Headers = Sequence[tuple[bytes, bytes]]

_JSON = (b"content-type", b"application/json")
# For every answer: nothing is cached, nothing is guessed, nothing is embedded.
SAFE_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
CLOSED_POLICY = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")
_JSON_HEADERS = (_JSON, *SAFE_HEADERS, CLOSED_POLICY)

_encode = msgspec.json.Encoder().encode


class Answer:
    """What is sent back; an ASGI application of its own."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, body: bytes, headers: Headers) -> None:
        self.status = status
        self.body = body
        self.headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [*self.headers, (b"content-length", b"%d" % len(self.body))]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


class _NoAnswer(Answer):
    """For a client who has left."""

    __slots__ = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return


NO_ANSWER = _NoAnswer(499, b"", ())


def json_bytes(body: bytes, status: int = 200) -> Answer:
    """JSON that is already encoded."""
    return Answer(status, body, _JSON_HEADERS)


def json_answer(document: Any, status: int = 200, headers: Headers = ()) -> Answer:
    """A document as JSON."""
    return Answer(status, _encode(document), (*_JSON_HEADERS, *headers) if headers else _JSON_HEADERS)


def text_answer(body: bytes, content_type: str, *, policy: str | None = None, status: int = 200) -> Answer:
    """Bytes of another type, under the content policy that it needs (none: the closed one)."""
    rule = CLOSED_POLICY if policy is None else (b"content-security-policy", policy.encode())
    return Answer(status, body, ((b"content-type", content_type.encode()), *SAFE_HEADERS, rule))
