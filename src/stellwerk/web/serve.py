"""The server: uvicorn with httptools, started and stopped by the host, with the time and size limits that it lacks.

Signals are the host's business, and nothing ticks while nobody asks: uvicorn's own main loop is not run.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

from litestar.types import Receive, Scope, Send
from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stellwerk.core.errors import Refused
from stellwerk.kernel.settings import ServerSettings
from stellwerk.web.app import Front
from stellwerk.web.problem import new_request_id

HEADER_BYTES_MAX = 32 * 1024
HEADER_S_MAX = 10.0
BODY_S_MAX = 30.0
KEEP_ALIVE_S = 75
GRACE_S = 5.0
BACKLOG = 2_048
CONNECTIONS_MAX = 30_000  # beyond it the answer is 503; the limit of open files comes first on most machines

_PLAIN_400 = "this is no HTTP request that can be understood"


class HttpServer:
    """One listening server. `start` answers the port; `stop` lets what is being answered finish."""

    def __init__(self, app: Front, settings: ServerSettings) -> None:
        self._settings = settings
        config = Config(
            app=_asgi(app),
            http=_Protocol,
            ws="none",
            lifespan="off",
            loop="none",  # the host runs the loop already
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(GRACE_S),
            backlog=BACKLOG,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
        self._server = Server(config)
        self._sockets: list[socket.socket] = []

    async def start(self, sockets: list[socket.socket] | None = None) -> int:
        """Listen at the settings' address, or at sockets that someone else has bound."""
        self._sockets = [bind(self._settings)] if sockets is None else sockets
        config = self._server.config
        config.load()
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # bad requests are answered, not news
        self._server.lifespan = config.lifespan_class(config)
        await self._server.startup(sockets=self._sockets)
        return int(self._sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Accept nothing new, and let running answers finish within the grace. Those who wait must be woken before."""
        if not self._server.started:
            return
        self._server.started = False
        shutdown = asyncio.ensure_future(self._server.shutdown(sockets=self._sockets))
        done, _ = await asyncio.wait([shutdown], timeout=GRACE_S + 1)
        if not done:
            shutdown.cancel()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        await asyncio.gather(shutdown, return_exceptions=True)


def _asgi(app: Front) -> Any:
    # uvicorn wants to tell an ASGI callable by its signature; a function leaves no doubt.
    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)

    return call


def bind(settings: ServerSettings) -> socket.socket:
    """The address of the settings, taken: who comes second is refused here, before anything else was done."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise Refused(f"cannot listen at {settings.host}: {error.strerror or error}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        text = f"cannot listen at {settings.host}:{settings.port}: {error.strerror or error}"
        raise Refused(text) from None
    return bound


class _Protocol(HttpToolsProtocol):
    """One connection, with limits on the time of head and body and the size of the head, and our shape for its errors.

    A request that comes in one piece, as nearly all do, starts no timer.
    """

    _header_bytes = 0
    _in_headers = False
    _timer: asyncio.TimerHandle | None = None
    _in_body = False
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_headers = True
        self._arm(HEADER_S_MAX)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._in_headers and not self._refused:
            # A whole head in one piece is the rule; only who sends it in bits is watched.
            self._header_bytes += len(data)
            if self._header_bytes > HEADER_BYTES_MAX:
                self._refuse(431, "the headers are larger than 32 kB")
            elif self._timer is None:
                self._arm(HEADER_S_MAX)
        elif self._in_body and self._timer is None and not self._refused:
            self._arm(BODY_S_MAX)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._header_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value) + 4

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._in_body = True
        self._disarm()
        if self._refused:
            return
        if self._header_bytes + len(self.url) > HEADER_BYTES_MAX:
            self._refuse(431, "the headers are larger than 32 kB")
            return
        if len(self.connections) > CONNECTIONS_MAX:
            self._refuse(503, "too many connections are open; nothing was done, try again", b"retry-after: 5\r\n")
            return
        self._header_bytes = 0
        self.server_state.default_headers = _date_header()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._disarm()
        if not self._refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if not self._refused:
            self._refuse(400, _PLAIN_400)

    def _refuse(self, status: int, text: str, more: bytes = b"") -> None:
        """Answer by hand and close: the request cannot be handed to the application."""
        self._refused = True
        self._disarm()
        body = b'{"message":"%s","request_id":"%s"}' % (text.encode(), new_request_id().encode())
        reason = HTTPStatus(status).phrase.encode()
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\nx-content-type-options: nosniff\r\n"
            b"cache-control: no-store\r\n%scontent-length: %d\r\nconnection: close\r\n\r\n%s"
            % (status, reason, more, len(body), body)
        )
        self.transport.close()

    def _arm(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._too_slow)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._in_body and not self.cycle.response_started:
            self._refuse(408, "the body did not arrive within 30 s")
        elif self._header_bytes:
            self._refuse(408, "the headers did not arrive within 10 s")
        else:
            self.transport.close()  # connected and said nothing


_date: tuple[int, list[tuple[bytes, bytes]]] = (0, [])


def _date_header() -> list[tuple[bytes, bytes]]:
    """The Date header, made anew once a second and only while someone asks."""
    global _date  # noqa: PLW0603  the one clock of all connections
    now = int(time.time())
    if _date[0] != now:
        _date = (now, [(b"date", formatdate(now, usegmt=True).encode())])
    return _date[1]
