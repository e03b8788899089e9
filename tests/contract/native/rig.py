"""A host without workers: a real kernel on the memory store behind the real application, and a client by hand.

The client speaks ASGI itself, so that a test can send what no library would.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from stellwerk.core.batch import Claim, Claimed
from stellwerk.core.logs import STDOUT, LogChunk, LogPiece
from stellwerk.core.run import Body, Outcome, Run, Succeeded
from stellwerk.dispatch.memory import MemoryDispatch
from stellwerk.doors.native.door import native_routes
from stellwerk.kernel.env import SystemEnv
from stellwerk.kernel.kernel import Kernel
from stellwerk.kernel.settings import ExecutionSettings, ServerSettings, Settings
from stellwerk.kernel.submit import body_ref
from stellwerk.kernel.tokens import Role, Tokens
from stellwerk.kernel.turns import Finish
from stellwerk.store.memory import MemoryStore
from stellwerk.web.app import Front, build_app

ADMIN = "swk_admin_test-secret"
WORKER = "worker-1"
HOST = "127.0.0.1:8765"
RUN = {"scope": "shop", "name": "sync", "action": {"type": "command", "argv": ["true"]}}


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Host:
    """Everything of one test."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.store = MemoryStore()
        self.env = SystemEnv()
        self.kernel = Kernel(self.store, MemoryDispatch(), self.env, "host-1")
        self.tokens = Tokens(self.kernel, ADMIN)
        self.stop = asyncio.Event()
        self.health: dict[str, Any] = {"state": "ok", "store": "memory", "durability": "D0", "degraded": []}
        routes = native_routes(self.kernel, self.tokens, settings, lambda: self.health, self.stop)
        self.app: Front = build_app(routes, self.tokens, settings.server)
        self.secrets: dict[str, str] = {"admin": ADMIN}

    async def open(self) -> None:
        await self.kernel.feed.open()
        self.kernel.committer.open(lambda _ms: None)
        await self.tokens.open()

    async def close(self) -> None:
        self.stop.set()
        self.kernel.feed.close()
        await self.kernel.committer.close()

    async def secret(self, role: Role) -> str:
        if role not in self.secrets:
            _, self.secrets[role], _ = await self.tokens.create(f"a {role}", role, None, "test")
        return self.secrets[role]

    # -- requests -----------------------------------------------------------------------------------------------------

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        token: str | None = ADMIN,
    ) -> Reply:
        """One request, whole; `raw` sends bytes as they are."""
        pieces = [piece async for piece in self.pieces(method, path, body, raw=raw, headers=headers, token=token)]
        start = pieces[0]
        data = b"".join(piece.get("body", b"") for piece in pieces[1:])
        found = {name.decode(): value.decode("latin-1") for name, value in start["headers"]}
        return Reply(start["status"], found, data)

    async def pieces(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        token: str | None = ADMIN,
    ) -> AsyncIterator[dict[str, Any]]:
        """The pieces of an answer as they are sent. Who stops asking has left."""
        data = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        path, _, query = path.partition("?")
        sent = {"host": HOST, **({"content-type": "application/json"} if data else {})}
        if token is not None:
            sent["authorization"] = f"Bearer {token}"
        sent.update({name.lower(): value for name, value in (headers or {}).items()})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode("utf-8", "surrogateescape"),
            "query_string": query.encode("latin-1"),
            "root_path": "",
            "scheme": "http",
            "server": ("127.0.0.1", 8765),
            "client": ("127.0.0.1", 50_000),
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in sent.items() if value],
            "state": {},
        }
        came: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        left = asyncio.Event()
        todo = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if todo:
                return todo.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(event: dict[str, Any]) -> None:
            await came.put(event)

        async def run() -> None:
            try:
                await self.app(scope, receive, send)  # type: ignore[arg-type]
            finally:
                await came.put(None)

        running = asyncio.create_task(run())
        try:
            while (piece := await came.get()) is not None:
                yield piece
        finally:
            left.set()
            await asyncio.wait_for(running, 5)

    async def submit(self, **fields: Any) -> str:
        """A run's id."""
        reply = await self.ask("POST", "/api/runs", {**RUN, **fields})
        assert reply.status in (200, 201), reply
        return str(reply.json["id"])

    # -- what a worker would do ---------------------------------------------------------------------------------------

    async def start(self, run_id: str) -> Run:
        """Claim a run, as a worker would."""
        claimed: asyncio.Future[Claimed] = asyncio.get_running_loop().create_future()
        self.kernel.committer.stand(Claim("default", WORKER, 1, 30_000, (run_id,)), claimed.set_result)
        return (await asyncio.wait_for(claimed, 5)).runs[0].run

    async def finish(self, run: Run, outcome: Outcome) -> None:
        result = None
        bodies: tuple[Body, ...] = ()
        if isinstance(outcome, Succeeded) and outcome.result is not None:
            bodies = (Body("result", outcome.result),)
            result = body_ref(bodies[0])
        await self.kernel.turner.turn([Finish(run, run.attempt, WORKER, outcome, result, bodies)])

    async def write(self, run: Run, *lines: bytes, stream: int = STDOUT, sequence: int = 1) -> None:
        pieces = tuple(LogPiece(stream, self.env.now_ms(), line) for line in lines)
        await self.store.append_logs([LogChunk(run.id, run.attempt, sequence, pieces)])
        self.kernel.logs_came([run.id])


@asynccontextmanager
async def a_host(folder: Path, **changes: Any) -> AsyncIterator[Host]:
    """An open host; `changes` are settings."""
    settings = structs.replace(Settings(folder=folder, data=folder), **changes)
    host = Host(settings)
    await host.open()
    try:
        yield host
    finally:
        await host.close()


def no_shell() -> ExecutionSettings:
    return ExecutionSettings(shell=False, python=("shop",))


def at(host: str, *allowed: str) -> ServerSettings:
    return ServerSettings(host=host, allowed_hosts=allowed)


def assert_problem(reply: Reply, status: int | tuple[int, ...] = ()) -> Any:
    """The one error shape."""
    if status:
        assert reply.status in (status if isinstance(status, tuple) else (status,)), reply
    assert 400 <= reply.status < 500 or reply.status == 503, reply
    assert reply.headers["content-type"] == "application/json"
    shown = reply.json
    assert set(shown) <= {"message", "where", "request_id"}, shown
    assert isinstance(shown["message"], str) and shown["message"]
    assert isinstance(shown["request_id"], str) and shown["request_id"]
    assert "Traceback" not in shown["message"]
    return shown


def sse(data: bytes) -> list[dict[str, str]]:
    """The events of a stream; comments and signs of life left out."""
    found = []
    for block in data.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        event = {name: value for name, _, value in (line.partition(": ") for line in lines)}
        if "data" in event:
            found.append(event)
    return found
