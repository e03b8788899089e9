"""A real host in a folder of its own: started by the command line, talked to over HTTP, stopped or killed from outside.

Nothing here waits for a guessed time: every wait is for a condition, with a deadline that only a hang can reach.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlencode

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0
LOOK_AGAIN_S = 0.02
FINAL = frozenset({"succeeded", "failed", "cancelled"})

_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")

T = TypeVar("T")


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: Any


class Unreachable(Exception):
    """No answer: whether the request took effect is not known."""


def wait_for(look: Callable[[], T | None], what: str, deadline_s: float = DEADLINE_S) -> T:
    """What the look finds, as soon as it finds something true."""
    until = time.monotonic() + deadline_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > until:
            raise AssertionError(f"not within {deadline_s:.0f} s: {what}")
        time.sleep(LOOK_AGAIN_S)


def clean_environment(**more: str) -> dict[str, str]:
    """Ours without what would lead a host or a command astray, and with the sources under test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STELLWERK_")}
    paths = [str(ROOT / "src"), *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), **more}


class Api:
    """`/api` of one host, a connection a request."""

    def __init__(self, port: int, token: str | None) -> None:
        self.port = port
        self.token = token

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = DEADLINE_S,
        **query: Any,
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            self._send(connection, method, path, body, headers, query)
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{method} {path}: {error!r}") from error
        finally:
            connection.close()
        told = {name.lower(): value for name, value in response.getheaders()}
        is_json = told.get("content-type", "").startswith("application/json")
        return Answer(response.status, told, json.loads(content) if is_json else content)

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: object,
        headers: Mapping[str, str] | None,
        query: Mapping[str, object],
    ) -> None:
        sent = {"Content-Type": "application/json"} if body is not None else {}
        if self.token is not None:
            sent["Authorization"] = f"Bearer {self.token}"
        data = None if body is None else json.dumps(body).encode()
        place = path + ("?" + urlencode(query) if query else "")
        connection.request(method, place, data, {**sent, **(headers or {})})

    def begin(self, path: str, accept: str = "application/json", **query: Any) -> http.client.HTTPConnection:
        """Send a request whose answer is read later, by `getresponse`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        self._send(connection, "GET", path, None, {"Accept": accept}, query)
        return connection

    def get(self, path: str, **query: Any) -> Any:
        answer = self.ask("GET", path, **query)
        assert answer.status == 200, answer
        return answer.body

    def submit(self, action: Mapping[str, object], **more: object) -> str:
        body = {"scope": "crash", "name": "test", "action": action, **more}
        answer = self.ask("POST", "/api/runs", body)
        assert answer.status == 201, answer
        run_id: str = answer.body["id"]
        return run_id

    def run(self, run_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"/api/runs/{run_id}")
        return found

    def wait_ended(self, run_id: str) -> dict[str, Any]:
        def ended() -> dict[str, Any] | None:
            found = self.run(run_id)
            return found if found["state"] in FINAL else None

        return wait_for(ended, f"the end of run {run_id}")

    def wait_line(self, run_id: str, text: str, attempt: int = 1) -> None:
        """Until the attempt has printed this line."""

        def printed() -> bool:
            lines = self.get(f"/api/runs/{run_id}/logs", limit=10_000)["lines"]
            return any(line["text"] == text and line["attempt"] == attempt for line in lines)

        wait_for(printed, f"line {text!r} of attempt {attempt} of run {run_id}")

    def events(self, **query: Any) -> list[dict[str, Any]]:
        """The whole journal, as far as it is wanted."""
        found: list[dict[str, Any]] = []
        after = 0
        while True:
            page = self.get("/api/events", after=after, limit=10_000, **query)
            assert page["type"] != "Torn", page
            found += page.get("events", [])
            if page["type"] == "Empty":
                return found
            after = page["last_event_id"]


def parse_stream(content: bytes) -> Iterator[tuple[str, Any]]:
    """Server-sent events, as (name, data), out of a whole answer."""
    name, data = "", ""
    for line in content.decode().split("\n"):
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data = line.removeprefix("data: ")
        elif not line and data:
            yield name, json.loads(data)
            name, data = "", ""


class HostProcess:
    """One data folder and the host that has it, if one runs. {data} in a wrapper's words is the data folder."""

    def __init__(self, folder: Path, settings: str = "", wrapper: Sequence[str] = ()) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.config = folder / "stellwerk.yml"
        self.config.write_text(settings)
        # Somebody else's may be writable for all, and then is refused.
        self.config.chmod(0o600)
        self._wrapper = [word.replace("{data}", str(self.data)) for word in wrapper]
        self._starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0

    # -- life and death -----------------------------------------------------------------------------------------------

    def spawn(self, *more: str, port: int = 0) -> subprocess.Popen[bytes]:
        """Start the process and do not wait for it."""
        self._starts += 1
        self.port = 0
        command = [sys.executable, "-m", "stellwerk", "up", "--config", str(self.config), "--data", str(self.data)]
        with self.path("out").open("wb") as out, self.path("err").open("wb") as err:
            self.process = subprocess.Popen(
                [*self._wrapper, *command, "--port", str(port), *more],
                cwd=self.folder,
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        return self.process

    def start(self) -> Api:
        """Start and wait until it listens."""
        self.spawn()
        return self.wait_up()

    def wait_up(self) -> Api:
        def listens() -> bool:
            assert self.running.poll() is None, f"the host ended with {self.running.returncode}: {self.errors()}"
            found = _ADDRESS.search(self.path("out").read_text())
            if found is not None:
                self.port = int(found[1])
            return found is not None

        wait_for(listens, "the host to be up")
        return self.api

    def kill(self) -> None:
        """kill -9, of the host alone."""
        self.running.kill()
        self.running.wait(DEADLINE_S)

    def signal(self, number: int) -> None:
        self.running.send_signal(number)

    def wait(self) -> int:
        return self.running.wait(DEADLINE_S)

    def stop(self) -> int:
        """An orderly stop; answers the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def close(self) -> None:
        """For the end of a test, however it ended."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
            self.kill()

    # -- looks --------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None
        return self.process

    @property
    def pid(self) -> int:
        return self.running.pid

    @property
    def api(self) -> Api:
        return Api(self.port, self.token)

    @property
    def token(self) -> str:
        return (self.data / "admin-token").read_text().strip()

    def path(self, stream: str) -> Path:
        return self.folder / f"host-{self._starts}.{stream}"

    def errors(self) -> str:
        return self.path("err").read_text(errors="replace")

    def wait_said(self, text: str) -> None:
        """Until the host's own log says this."""
        wait_for(lambda: text in self.errors(), f"the host to say {text!r}")

    def guard(self) -> int:
        return wait_for(lambda: _child_named(self.pid, b"stellwerk.execute.guard"), "the guard")

    def keeper(self) -> int:
        guard = self.guard()
        return wait_for(lambda: _child_named(guard, b"stellwerk.execute.guard"), "the keeper")


def _child_named(parent: int, word: bytes) -> int:
    """The first child with the word in its argv; 0 if there is none."""
    for name in sorted(filter(str.isdigit, os.listdir("/proc")), key=int):
        try:
            stat = Path(f"/proc/{name}/stat").read_text()
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) == parent and word in words:
            return int(name)
    return 0


class Background(threading.Thread):
    """A thread whose answer, or failure, is had by `result`."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._answer: Any = None
        self._failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._answer = self._work()
        except BaseException as failure:
            self._failure = failure

    def result(self) -> Any:
        self.join(DEADLINE_S)
        assert not self.is_alive(), "it is still at work"
        if self._failure is not None:
            raise self._failure
        return self._answer
