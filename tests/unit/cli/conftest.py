"""A scripted host: real HTTP on a real port, with canned answers, and the command line run against it."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from stellwerk.cli import main

EVENT_STREAM = "text/event-stream"


@dataclass
class Asked:
    """A request as it arrived."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: Any


@dataclass
class Told:
    """An answer: JSON, or chunks of a stream, the connection cut in the middle if `is_cut`."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    chunks: tuple[str, ...] | None = None
    text: str | None = None
    is_cut: bool = False


@dataclass
class ScriptedHost:
    """Answers of one place are given in turn; the last one again and again."""

    server: ThreadingHTTPServer
    asked: list[Asked] = field(default_factory=list)
    script: dict[tuple[str, str], list[Told]] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return self.server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def on(self, method: str, path: str, *told: Told) -> None:
        self.script[method, path] = list(told)

    def requests(self, path: str) -> list[Asked]:
        return [asked for asked in self.asked if asked.path == path]

    def answer(self, asked: Asked) -> Told:
        self.asked.append(asked)
        told = self.script.get((asked.method, asked.path))
        if told is None:
            return Told({"message": f"nothing at {asked.path}", "request_id": "r"}, status=404)
        return told.pop(0) if len(told) > 1 else told[0]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    host: ScriptedHost

    def do(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        content = self.rfile.read(size)
        parts = urlsplit(self.path)
        told = self.host.answer(
            Asked(
                self.command,
                parts.path,
                parse_qs(parts.query),
                {name.lower(): value for name, value in self.headers.items()},
                json.loads(content) if content else None,
            )
        )
        self.close_connection = True
        self.send_response(told.status)
        for name, value in told.headers.items():
            self.send_header(name, value)
        if told.chunks is not None:
            self.send_header("Content-Type", EVENT_STREAM)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for chunk in told.chunks:
                data = chunk.encode()
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                self.wfile.flush()
            if not told.is_cut:
                self.wfile.write(b"0\r\n\r\n")
            return
        content = b"" if told.body is None else json.dumps(told.body).encode()
        if told.text is not None:
            content = told.text.encode()
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content) + (10 if told.is_cut else 0)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = do  # noqa: N815 - the names are the base class's

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
        pass


@pytest.fixture
def host() -> Iterator[ScriptedHost]:
    handler = type("BoundHandler", (Handler,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        scripted = ScriptedHost(server)
        handler.host = scripted  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield scripted
        server.shutdown()
        thread.join()


@dataclass
class Ran:
    exit_code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    @property
    def documents(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


CommandLine = Callable[..., Ran]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty working folder, and nothing of ours in the environment."""
    import os

    for name in [name for name in os.environ if name.startswith("STELLWERK_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def nowhere(alone: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> CommandLine:
    """The command line, told nothing about a host."""

    def run(*arguments: str) -> Ran:
        exit_code = main.run(arguments)
        captured = capsysbinary.readouterr()
        return Ran(exit_code, captured.out.decode(), captured.err.decode())

    return run


@pytest.fixture
def stellwerk(nowhere: CommandLine, host: ScriptedHost, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """The command line with the scripted host in its environment."""
    monkeypatch.setenv("STELLWERK_URL", host.url)
    monkeypatch.setenv("STELLWERK_TOKEN", "swk_test")
    return nowhere


def line(number: int, text: str, stream: str = "stdout", **more: Any) -> dict[str, Any]:
    """A line of a log as the API tells it."""
    return {"line": number, "time": "2026-01-01T00:00:00.000Z", "stream": stream, "text": text, **more}


def sent(name: str, document: Any, event_id: int | None = None) -> str:
    """One server-sent event."""
    head = "" if event_id is None else f"id: {event_id}\n"
    return f"{head}event: {name}\ndata: {json.dumps(document)}\n\n"


def a_run(**more: Any) -> dict[str, Any]:
    """A run as the API tells it."""
    return {
        "id": "r1",
        "scope": "demo",
        "name": "hello",
        "state": "succeeded",
        "attempt": 1,
        "priority": 100,
        "created_at": "2026-01-01T00:00:00.000Z",
        "started_at": "2026-01-01T00:00:01.000Z",
        "ended_at": "2026-01-01T00:00:03.500Z",
        "exit_code": 0,
        "parents": [],
        "labels": {},
        "action": {"type": "command", "argv": ["true"]},
        "event_id": 70,
        **more,
    }
