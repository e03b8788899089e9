"""Submits by single HTTP posts from 32 connections, beside a no-op POST route of the framework in the same process.

    python -m bench.http [--seconds S] [--rounds N] [--clients N]

The server is a process of its own: SQLite with `synchronous=FULL`, a kernel without workers, our application at one
port and a bare Litestar application with one POST route that reads and does nothing at another, on one event loop.
The load is a lean client on raw keep-alive connections. Rounds alternate, so that both see the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvloop

WISH = {"scope": "bench", "name": "noop", "action": {"type": "command", "argv": ["true"]}}
TOKEN = "swk_admin_of-the-benchmark"
TARGET = 0.4


# --- the server ------------------------------------------------------------------------------------------------------


async def serve(folder: Path) -> None:
    """Both applications on one loop, until standard input is closed."""
    from litestar import Litestar, post

    from stellwerk.dispatch.memory import MemoryDispatch
    from stellwerk.doors.native.door import native_routes
    from stellwerk.kernel.env import SystemEnv
    from stellwerk.kernel.kernel import Kernel
    from stellwerk.kernel.settings import ServerSettings, Settings
    from stellwerk.kernel.tokens import Tokens
    from stellwerk.store.open_store import open_store
    from stellwerk.web.app import build_app
    from stellwerk.web.serve import HttpServer

    settings = Settings(folder=folder, data=folder, server=ServerSettings(port=0))
    store = open_store(settings.store, folder)
    await store.open()
    kernel = Kernel(store, MemoryDispatch(), SystemEnv(), "bench")
    await kernel.feed.open()
    kernel.committer.open(lambda _ms: None)
    tokens = Tokens(kernel, TOKEN)
    health = {"state": "ok", "store": "sqlite", "durability": store.durability(), "degraded": []}
    routes = native_routes(kernel, tokens, settings, lambda: health, asyncio.Event())
    ours = HttpServer(build_app(routes, tokens, settings.server), settings.server)

    @post("/noop")
    async def noop() -> dict[str, str]:
        return {}

    bare: Any = Litestar([noop], openapi_config=None, logging_config=None)
    theirs = HttpServer(bare, settings.server)
    ports = [await ours.start(), await theirs.start()]
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)
    print(json.dumps({"ports": ports, "durability": store.durability()}), flush=True)
    loop = asyncio.get_running_loop()
    while True:
        line = await loop.run_in_executor(None, sys.stdin.readline)
        if not line:
            break
        cpu = time.process_time()
        print(json.dumps({"cpu_s": cpu, "commits": kernel.committer.commits, "last": kernel.feed.last}), flush=True)
    await theirs.stop()
    await ours.stop()
    await kernel.committer.close()
    await store.close()


class Serving:
    """The server's process, and questions to it."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "bench.http", "--serve", str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.told = self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the server did not start")
        return dict(json.loads(line))

    def ask(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("?\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


# --- the load --------------------------------------------------------------------------------------------------------


class Client(asyncio.Protocol):
    """One connection that posts the same request again as soon as the answer is whole."""

    def __init__(self, request: bytes, status: bytes) -> None:
        self._request = request
        self._status = b"HTTP/1.1 " + status
        self._buffer = b""
        self._asked_at = 0.0
        self.latencies_s: list[float] = []
        self.is_stopping = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        self._asked_at = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head = self._buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        start = self._buffer.find(b"content-length: ") + 16
        if start < 16 or start > head:
            raise RuntimeError("an answer without a length")
        end = self._buffer.find(b"\r\n", start)
        if len(self._buffer) < head + 4 + int(self._buffer[start:end]):
            return
        if not self._buffer.startswith(self._status):
            raise RuntimeError(f"not the answer that was expected: {self._buffer[:300]!r}")
        self._buffer = b""
        self.latencies_s.append(time.perf_counter() - self._asked_at)
        if self.is_stopping:
            self._transport.close()
        else:
            self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            if exc is not None or not self.is_stopping:
                self.ended.set_exception(exc or RuntimeError("the server closed the connection"))
            else:
                self.ended.set_result(None)


async def load(port: int, path: str, body: bytes, status: bytes, clients: int, seconds: float) -> list[float]:
    """Post for so long; answers the latency of every post."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    request = head.encode() + body
    protocols = [
        (await loop.create_connection(lambda: Client(request, status), "127.0.0.1", port))[1] for _ in range(clients)
    ]
    await asyncio.sleep(seconds)
    for protocol in protocols:
        protocol.is_stopping = True
    await asyncio.gather(*(protocol.ended for protocol in protocols))
    return [latency for protocol in protocols for latency in protocol.latencies_s]


class Figure:
    """What one kind of request did in all rounds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rates: list[float] = []
        self.latencies_s: list[float] = []
        self.cpu_us: list[float] = []
        self.runs_per_commit: list[float] = []

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def show(self) -> str:
        ordered = sorted(self.latencies_s)
        p50, p99 = (ordered[int(len(ordered) * part)] * 1_000 for part in (0.5, 0.99))
        rounds = " ".join(f"{rate:,.0f}" for rate in self.rates)
        cpu = statistics.median(self.cpu_us)
        times = f"p50 {p50:.2f} ms  p99 {p99:.2f} ms  server CPU {cpu:.0f} us"
        return f"{self.name:<28} {self.rate:>8,.0f}/s   {times}  ({rounds})"


async def measure(clients: int, seconds: float, rounds: int) -> tuple[Figure, Figure]:
    submit, noop = Figure("submit, one run a post"), Figure("no-op POST of the framework")
    wish = json.dumps(WISH).encode()
    async with a_server() as serving:
        ours, theirs = serving.told["ports"]
        kinds: Sequence[tuple[Figure, int, str, bytes]] = (
            (noop, theirs, "/noop", b"201"),
            (submit, ours, "/api/runs", b"201"),
        )
        for _, port, path, status in kinds:  # warm
            await load(port, path, wish, status, clients, min(1.0, seconds))
        for _ in range(rounds):
            for figure, port, path, status in kinds:
                before = serving.ask()
                begun = time.perf_counter()
                latencies = await load(port, path, wish, status, clients, seconds)
                lasted_s = time.perf_counter() - begun
                after = serving.ask()
                figure.rates.append(len(latencies) / lasted_s)
                figure.latencies_s.extend(latencies)
                figure.runs_per_commit.append(len(latencies) / max(1, after["commits"] - before["commits"]))
                figure.cpu_us.append((after["cpu_s"] - before["cpu_s"]) / len(latencies) * 1e6)
    return submit, noop


@contextlib.asynccontextmanager
async def a_server() -> AsyncIterator[Serving]:
    # On the disk of the checkout: a memory file system would flatter the figures.
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as folder:
        serving = Serving(Path(folder))
        try:
            yield serving
        finally:
            serving.close()


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.http")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve is not None:
        uvloop.run(serve(options.serve))
        return
    submit, noop = uvloop.run(measure(options.clients, options.seconds, options.rounds))
    # Neighbours are compared: on a shared machine two rounds minutes apart say little about each other.
    pairs = [ours / theirs for ours, theirs in zip(submit.rates, noop.rates, strict=True)]
    ratio = statistics.median(pairs)
    cpu = statistics.median(noop.cpu_us) / statistics.median(submit.cpu_us)
    print(noop.show())
    print(submit.show())
    print(f"runs per commit: {statistics.median(submit.runs_per_commit):.1f}")
    told = " ".join(f"{pair:.2f}" for pair in pairs)
    print(
        f"ratio {ratio:.2f} (at least {TARGET} is wanted; rounds {told}; by CPU {cpu:.2f}), {options.clients} clients"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
