"""From settings to a running host. The only file that knows every concrete class."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stellwerk.core.errors import Refused
from stellwerk.core.queries import Retention
from stellwerk.dispatch.memory import MemoryDispatch
from stellwerk.execute.command import CommandExecutor
from stellwerk.execute.environment import base_environment
from stellwerk.execute.keeper_link import KeeperLink
from stellwerk.execute.log_buffer import LogBuffer
from stellwerk.execute.probes import probe
from stellwerk.execute.protocol import Executor
from stellwerk.kernel.env import Env, SystemEnv
from stellwerk.kernel.host import Host
from stellwerk.kernel.kernel import Kernel
from stellwerk.kernel.settings import Settings
from stellwerk.kernel.ticker import Ticker
from stellwerk.kernel.tokens import PREFIX, Tokens
from stellwerk.kernel.worker import Worker
from stellwerk.store.open_store import open_store
from stellwerk.store.protocol import Store

log = logging.getLogger("stellwerk")

ADMIN_TOKEN_FILE = "admin-token"  # noqa: S105  a file name
GC_THRESHOLD = 50_000


class Parts:
    """One host, made of its real parts; the HTTP server stands apart so that tests and benchmarks can do without."""

    def __init__(self, settings: Settings, *, store: Store | None = None, env: Env | None = None) -> None:
        make_private(settings.data)
        self.settings = settings
        self.env = env if env is not None else SystemEnv()
        self.store = store if store is not None else open_store(settings.store, settings.data)
        dispatch = MemoryDispatch()
        self.link = KeeperLink()
        self.kernel = Kernel(self.store, dispatch, self.env, host_id=f"host-{self.env.new_id()}")
        self._temp = settings.data / "tmp"
        make_private(self._temp)
        self._base_env = base_environment(os.environ)
        self.output = LogBuffer(now_ms=self.env.now_ms, wake=self._wake, folder=self._temp)
        self.worker = Worker(self.kernel, settings.workers, self._executor, self.output, {})
        ticker = Ticker(self.kernel, self.worker.holds, probe, dispatch.poll_ms(), Retention())
        self.host = Host(self.kernel, self.worker, ticker, dispatch)
        self.tokens = Tokens(self.kernel, settings.admin_token or admin_token(settings.data))

    async def open(self) -> None:
        await self.link.open()
        try:
            await self.host.open()
        except BaseException:
            await self.link.close()
            raise
        try:
            await self.tokens.open()
        except BaseException:
            await self.close()
            raise

    async def close(self, skip: asyncio.Event | None = None) -> None:
        try:
            await self.host.close(skip)
        finally:
            await self.link.close()

    def _wake(self) -> None:
        self.worker.wake()

    def _executor(self, kind: str, queue: str, slots: int) -> Executor:
        settings = self.settings
        folder = str(settings.folder)
        if kind == "command":
            return CommandExecutor(
                self.link,
                self.output,
                self._wake,
                base_env=self._base_env,
                default_cwd=folder,
                temp_root=self._temp,
                kill_grace_ms=settings.workers.kill_grace_ms,
            )
        # Imported here: a host that runs commands alone needs neither.
        if kind == "thread":
            from stellwerk.execute.thread_call import ThreadExecutor

            return ThreadExecutor(
                self.output,
                self._wake,
                threads=slots,
                import_paths=[folder],
                allowed_packages=settings.execution.python,
            )
        from stellwerk.execute.python_call import PythonExecutor

        return PythonExecutor(
            self.link,
            self.output,
            self._wake,
            children=slots,
            base_env=self._base_env,
            default_cwd=folder,
            import_paths=[folder],
            temp_root=str(self._temp),
            kill_grace_ms=settings.workers.kill_grace_ms,
            allowed_packages=settings.execution.python,
        )

    def health(self) -> dict[str, Any]:
        """The whole of `/health`."""
        health = self.host.health()
        told = self.link.capabilities().values()
        weaknesses = [text.removeprefix("degraded: ") for text in told if text != "ok"]
        degraded = [*health["degraded"], *weaknesses]
        return {
            **health,
            "state": "degraded" if degraded else "ok",
            "store": self.settings.store.partition(":")[0],
            "degraded": degraded,
        }


def run_host(settings: Settings) -> int:
    """Run a host until it is told to stop; answers the exit code."""
    if sys.platform == "win32":
        raise Refused("Stellwerk does not run on Windows: it cannot end a tree of processes there. Use Linux or WSL.")
    log_as_json_lines()
    for secret in ("STELLWERK_ADMIN_TOKEN", "STELLWERK_TOKEN"):
        os.environ.pop(secret, None)  # the settings have it; what runs in threads of this host must not
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_serve(settings))
    return uvloop.run(_serve(settings))


async def _serve(settings: Settings) -> int:
    from stellwerk.doors.native.door import native_routes
    from stellwerk.web.app import build_app
    from stellwerk.web.serve import HttpServer, bind

    stopping, hurry = asyncio.Event(), asyncio.Event()
    _on_signals(stopping, hurry)
    listening = bind(settings.server)
    parts = Parts(settings)
    try:
        await parts.open()
    except BaseException:
        listening.close()
        raise
    routes = native_routes(parts.kernel, parts.tokens, settings, parts.health, stopping)
    server = HttpServer(build_app(routes, parts.tokens, settings.server), settings.server)
    try:
        port = await server.start([listening])
        _greet(settings, port, parts.store.durability())
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        await stopping.wait()
        log.info("stopping: no more claims; waiting for %d runs", parts.worker.running)
        # The server answers meanwhile: somebody may want to see what it waits for, or to cancel it.
        await parts.worker.drain(hurry)
    finally:
        parts.kernel.feed.close()
        await server.stop()
        await parts.close(hurry)
    return 0


def _on_signals(stopping: asyncio.Event, hurry: asyncio.Event) -> None:
    def stop() -> None:
        if stopping.is_set():
            hurry.set()
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


def _greet(settings: Settings, port: int, durability: str) -> None:
    scheme = "https" if settings.server.tls_cert is not None else "http"
    host = f"[{settings.server.host}]" if ":" in settings.server.host else settings.server.host
    source = "the one from your settings" if settings.admin_token else str(settings.data / ADMIN_TOKEN_FILE)
    print(f"Stellwerk is up:  {scheme}://{host}:{port}   (docs: /docs, health: /health)")
    print(f"Admin token:      {source}")
    print(f"Store:            {settings.store} under {settings.data}, durability {durability}", flush=True)
    if os.geteuid() == 0:
        print("Note:             running as root, so every submitted command does too", file=sys.stderr, flush=True)


def make_private(folder: Path) -> None:
    """A folder that only its owner may look into."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.geteuid():
            folder.chmod(0o700)
    except OSError as error:
        raise Refused(f"the folder {folder} cannot be used: {error.strerror or error}") from None


def admin_token(data: Path) -> str:
    """The admin token of the data folder; made on first start, readable for its owner only."""
    path = data / ADMIN_TOKEN_FILE
    try:
        found = path.read_text("ascii").strip()
        if found:
            return found
    except FileNotFoundError:
        pass
    except (OSError, UnicodeError) as error:
        raise Refused(f"the token file {path} cannot be read: {error}") from None
    secret = f"{PREFIX}admin_{SystemEnv().secret()}"
    # Written aside and renamed, so that a crash leaves no half token behind.
    aside = path.with_suffix(".new")
    aside.unlink(missing_ok=True)
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret + "\n")
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    return secret


class _JsonLines(logging.Formatter):
    """One JSON object a line: text of strangers can neither start a line nor end one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "part": record.name,
            "text": record.getMessage(),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        more: Mapping[str, object] | None = getattr(record, "more", None)
        if more:
            line.update(more)
        return json.dumps(line, default=str)


def log_as_json_lines() -> None:
    """The server's own log, on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
