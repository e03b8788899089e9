"""One request as a handler sees it: headers, query, body, and who asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
from litestar.types import Receive, Scope

from stellwerk.core.errors import Refused
from stellwerk.kernel.tokens import Token
from stellwerk.web import strict_json
from stellwerk.web.params import Query
from stellwerk.web.problem import ClientGone, HttpRefusal

if TYPE_CHECKING:
    from stellwerk.web.routes import Route

BODY_BYTES_MAX = 1024 * 1024
HEADERS_KEY = "stellwerk.headers"  # where the front leaves the headers it has checked
ROUTES_KEY = "routes"  # where the application keeps all its routes

Kind = TypeVar("Kind")


class Call:
    """A request whose sender is known and may ask it."""

    __slots__ = ("_token", "headers", "query", "receive", "scope")

    def __init__(
        self, scope: Scope, receive: Receive, headers: dict[bytes, bytes], token: Token | None, query: Query
    ) -> None:
        self.scope = scope
        self.receive = receive
        self.headers = headers
        self.query = query
        self._token = token

    @property
    def token(self) -> Token:
        """Who asks. Only open routes have nobody, and they must not want to know."""
        assert self._token is not None
        return self._token

    @property
    def actor(self) -> str:
        return self.token.actor

    @property
    def routes(self) -> Sequence[Route]:
        """All routes of the application, for those who describe or count them."""
        return cast("Sequence[Route]", self.scope["litestar_app"].state[ROUTES_KEY])

    def path(self, name: str) -> str:
        """A part of the path."""
        return cast(str, cast(dict[str, Any], self.scope["path_params"])[name])

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1").strip()

    @property
    def wants_stream(self) -> bool:
        """Whether server-sent events are asked for."""
        return b"text/event-stream" in self.headers.get(b"accept", b"").lower()

    async def body(self, bytes_max: int = BODY_BYTES_MAX) -> bytes:
        """The whole body, within its limit of size; JSON by its type, if there is any. The server limits its time."""
        length = self.headers.get(b"content-length")
        if length is not None and length.isdigit() and int(length[:20]) > bytes_max:
            raise _too_large(bytes_max)
        data = await _read(self.receive, bytes_max)
        if data:
            self._check_type()
        return data

    async def json(self, decoder: msgspec.json.Decoder[Kind], bytes_max: int = BODY_BYTES_MAX) -> Kind:
        """The body as the type that the decoder knows."""
        return strict_json.decode(decoder, await self.body(bytes_max))

    async def no_body(self) -> None:
        """For requests that say all in their path: an empty object is as good as nothing."""
        data = await self.body()
        if data.strip() not in (b"", b"{}"):
            raise Refused("this request takes no body")

    def _check_type(self) -> None:
        given = self.headers.get(b"content-type", b"").lower()
        if given == b"application/json":
            return
        kind, _, rest = given.partition(b";")
        charset = rest.strip().replace(b'"', b"")
        if kind.strip() != b"application/json" or charset not in (b"", b"charset=utf-8"):
            raise HttpRefusal(415, "the body must be JSON, with the header Content-Type: application/json")


async def _read(receive: Receive, bytes_max: int) -> bytes:
    event = cast(dict[str, Any], await receive())
    if event["type"] == "http.request" and not event.get("more_body"):
        data = cast(bytes, event.get("body", b""))
        if len(data) > bytes_max:
            raise _too_large(bytes_max)
        return data
    parts: list[bytes] = []
    size_bytes = 0
    while True:
        if event["type"] == "http.disconnect":
            raise ClientGone
        part = cast(bytes, event.get("body", b""))
        size_bytes += len(part)
        if size_bytes > bytes_max:
            raise _too_large(bytes_max)
        parts.append(part)
        if not event.get("more_body"):
            return b"".join(parts)
        event = cast(dict[str, Any], await receive())


def _too_large(bytes_max: int) -> HttpRefusal:
    return HttpRefusal(413, f"the body is larger than {bytes_max >> 20} MiB", headers={"connection": "close"})
