"""The real server: limits of size and time, our shape for its errors, and an orderly stop."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator

import pytest
from msgspec import structs

from stellwerk.core.errors import Refused
from stellwerk.web import serve
from stellwerk.web.serve import HttpServer
from tests.contract.native.rig import ADMIN, RUN, Host, at

HEAD = f"Host: localhost\r\nAuthorization: Bearer {ADMIN}\r\n"


class Line:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, text: str | bytes) -> None:
        self.writer.write(text.encode() if isinstance(text, str) else text)

    async def reply(self) -> tuple[int, dict[str, str], bytes]:
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 5)).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return int(first.split()[1]), headers, body

    async def ended(self) -> bool:
        try:
            return await asyncio.wait_for(self.reader.read(), 5) == b""
        except ConnectionResetError:
            return True


class Real:
    """A host behind its real server."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.server = HttpServer(host.app, host.settings.server)
        self.port = 0
        self.lines: list[Line] = []

    async def start(self) -> None:
        self.port = await self.server.start([socket.create_server(("127.0.0.1", 0))])

    async def line(self) -> Line:
        line = Line(*await asyncio.open_connection("127.0.0.1", self.port))
        self.lines.append(line)
        return line

    async def close(self) -> None:
        self.host.stop.set()
        self.host.kernel.feed.close()
        await self.server.stop()
        for line in self.lines:
            line.writer.close()


@pytest.fixture
async def real(host: Host) -> AsyncIterator[Real]:
    running = Real(host)
    await running.start()
    yield running
    await running.close()


def shape(body: bytes) -> None:
    assert set(json.loads(body)) == {"message", "request_id"}


async def test_one_connection_serves_many_requests(real: Real) -> None:
    line = await real.line()
    body = json.dumps(RUN)
    for _ in range(3):
        line.send(f"POST /api/runs HTTP/1.1\r\n{HEAD}Content-Type: application/json\r\n")
        line.send(f"Content-Length: {len(body)}\r\n\r\n{body}")
        status, headers, _ = await line.reply()
        assert status == 201
        assert "date" in headers and "server" not in headers


async def test_a_body_may_come_in_pieces(real: Real) -> None:
    line = await real.line()
    line.send(f"POST /api/runs HTTP/1.1\r\n{HEAD}Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
    for piece in (json.dumps(RUN)[:10], json.dumps(RUN)[10:]):
        line.send(f"{len(piece):x}\r\n{piece}\r\n")
        await asyncio.sleep(0.02)
    line.send("0\r\n\r\n")
    assert (await line.reply())[0] == 201


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"HELLO there\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"POST /api/runs HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_a_400_in_our_shape(real: Real, data: bytes) -> None:
    line = await real.line()
    line.send(data)
    status, headers, body = await line.reply()
    assert (status, headers["content-type"], headers["connection"]) == (400, "application/json", "close")
    shape(body)
    assert await line.ended()


@pytest.mark.parametrize("pieces", [1, 40])
async def test_headers_over_32_kb_are_a_431(real: Real, pieces: int) -> None:
    line = await real.line()
    line.send(f"GET /health HTTP/1.1\r\n{HEAD}")
    line.send("".join(f"X-{n}: {'a' * (40_000 // pieces)}\r\n" for n in range(pieces)) + "\r\n")
    status, _, body = await line.reply()
    assert status == 431
    shape(body)


async def test_endless_headers_are_a_431(real: Real) -> None:
    line = await real.line()
    line.send("GET /health HTTP/1.1\r\nX: ")
    for _ in range(2):
        line.send("a" * 20_000)
        await asyncio.sleep(0.02)
    assert (await line.reply())[0] == 431


async def test_slow_headers_are_a_408_and_silence_is_closed(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "HEADER_S_MAX", 0.2)
    slow, silent, late = await real.line(), await real.line(), await real.line()
    slow.send("GET /health HTTP/1.1\r\nHost: local")
    late.send(f"GET /health HTTP/1.1\r\n{HEAD}\r\n")
    assert (await late.reply())[0] == 200
    late.send("GET /hea")  # the second request of a connection is watched as the first
    assert (await slow.reply())[0] == 408
    assert (await late.reply())[0] == 408
    assert await silent.ended()


async def test_a_slow_body_is_a_408(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "BODY_S_MAX", 0.2)
    line = await real.line()
    line.send(f"POST /api/runs HTTP/1.1\r\n{HEAD}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{")
    status, _, body = await line.reply()
    assert status == 408
    shape(body)
    assert await line.ended()
    assert real.host.kernel.feed.last == 0


async def test_a_body_that_is_announced_too_large_is_refused_at_once(real: Real) -> None:
    line = await real.line()
    line.send(f"PUT /api/gates HTTP/1.1\r\n{HEAD}Content-Length: 2000000\r\n\r\n")
    status, headers, body = await line.reply()
    assert (status, headers["connection"]) == (413, "close")
    shape(body)


async def test_web_sockets_are_not_spoken(real: Real) -> None:
    line = await real.line()
    line.send(f"GET /api/events HTTP/1.1\r\n{HEAD}Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    assert (await line.reply())[0] == 200


async def test_a_stop_answers_who_waits_and_is_quick(real: Real) -> None:
    poll, stream = await real.line(), await real.line()
    poll.send(f"GET /api/events?timeout=1h HTTP/1.1\r\n{HEAD}\r\n")
    stream.send(f"GET /api/events HTTP/1.1\r\n{HEAD}Accept: text/event-stream\r\n\r\n")
    idle = await real.line()
    await asyncio.sleep(0.1)
    began = time.monotonic()
    real.host.stop.set()
    real.host.kernel.feed.close()
    await real.server.stop()
    assert time.monotonic() - began < 2
    status, _, body = await poll.reply()
    assert (status, json.loads(body)["type"]) == (200, "Empty")
    assert await poll.ended()
    assert await idle.ended()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", real.port)


async def test_a_client_who_leaves_a_poll_frees_its_place(real: Real) -> None:
    line = await real.line()
    line.send(f"GET /api/events?timeout=1h HTTP/1.1\r\n{HEAD}\r\n")
    await asyncio.sleep(0.1)
    assert real.host.kernel.feed.followers == 1
    line.writer.close()
    await asyncio.sleep(0.1)
    assert real.host.kernel.feed.followers == 0


async def test_a_port_that_is_taken_is_refused_in_words(real: Real) -> None:
    settings = structs.replace(at("127.0.0.1"), port=real.port)
    with pytest.raises(Refused, match=str(real.port)):
        await HttpServer(real.host.app, settings).start()
