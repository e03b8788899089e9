"""A disk that is really full: refused before the ack, nothing acknowledged is lost, and no restart is needed (P1, P18).

The host gets a small disk of its own, in a mount namespace of its own. Where nobody may mount, and besides, a limit on
the size of its files makes its writes fail for real.
"""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.crash.conftest import MakeHost
from tests.crash.host_process import Answer, Api, HostProcess, wait_for

pytestmark = pytest.mark.crash

SETTINGS = "workers: {default: 4, lease: 20s, drain: 5s, kill_grace: 1s}\n"
DISK_BYTES = 24 * 1024 * 1024
FILES_BYTES_MAX = 6 * 1024 * 1024
UNSHARE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
MOUNT = 'mkdir "$2" && mount -t tmpfs -o size="$1",mode=700 tmpfs "$2" && shift 2 && exec "$@"'
UNTIL_TOLD = "echo up; until [ -e go ]; do sleep 0.05; done"
BALLAST_OF_A_RUN = "x" * 200_000


class SmallDisk:
    """The data folder of the host is a small disk that nobody else sees; it is filled through the host's own root."""

    def __init__(self, new_host: MakeHost) -> None:
        self.host = new_host(SETTINGS, [*UNSHARE, "sh", "-c", MOUNT, "sh", str(DISK_BYTES), "{data}"])
        self.host.spawn()
        wait_for((self.data / "admin-token").exists, "the host to make its token")
        self.token = (self.data / "admin-token").read_text().strip()
        self.api = wait_up(self.host, self.token)

    @property
    def data(self) -> Path:
        return Path(f"/proc/{self.host.pid}/root{self.host.data}")

    def fill(self) -> None:
        with (self.data / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"\0" * 65_536)
            except OSError:
                pass  # full

    def free(self) -> None:
        (self.data / "filler").unlink()


class SmallFiles:
    """The host may not let a file grow beyond a limit, which is lowered and raised from outside."""

    def __init__(self, new_host: MakeHost) -> None:
        self.host = new_host(SETTINGS)
        self.api = self.host.start()
        self.data = self.host.data
        self._limits = resource.prlimit(self.host.pid, resource.RLIMIT_FSIZE)

    def fill(self) -> None:
        resource.prlimit(self.host.pid, resource.RLIMIT_FSIZE, (FILES_BYTES_MAX, self._limits[1]))

    def free(self) -> None:
        resource.prlimit(self.host.pid, resource.RLIMIT_FSIZE, self._limits)


def wait_up(host: HostProcess, token: str) -> Api:
    """As `HostProcess.wait_up`, with the token that only the host's own root shows."""

    def port() -> int:
        assert host.running.poll() is None, host.errors()
        text = host.path("out").read_text()
        return int(text.partition("127.0.0.1:")[2].split()[0]) if "Store:" in text else 0

    return Api(wait_for(port, "the host to be up"), token)


def can_mount(folder: Path) -> bool:
    command = [*UNSHARE, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except OSError:
        return False


@pytest.fixture(params=["disk", "files"])
def small(request: pytest.FixtureRequest, new_host: MakeHost, tmp_path: Path) -> SmallDisk | SmallFiles:
    if request.param == "disk" and can_mount(tmp_path):
        return SmallDisk(new_host)
    return SmallFiles(new_host)


def test_a_full_disk_refuses_before_the_ack_and_recovers_without_a_restart(small: SmallDisk | SmallFiles) -> None:
    api, host = small.api, small.host
    running = api.submit({"type": "shell", "script": UNTIL_TOLD})
    api.wait_line(running, "up")

    small.fill()
    acknowledged, refusal = submit_until_refused(api)
    assert refusal.status == 503
    assert int(refusal.headers["retry-after"]) > 0
    assert refusal.body["message"]
    wait_for(lambda: api.get("/health")["state"] == "degraded", "the host to say so")
    assert any("full" in text or "written" in text for text in api.get("/health")["degraded"])
    # What is there can still be read, and a key that was refused is not used up.
    assert api.run(running)["state"] == "running"
    assert {run_id for run_id in acknowledged if api.run(run_id)["state"] == "waiting"} == set(acknowledged)
    refused = wait_for(lambda: refuse_with_key(api), "another refusal")
    # What runs may end meanwhile: its end is recorded in the room of the ballast, or when there is room, but not lost.
    (host.folder / "go").touch()
    if isinstance(small, SmallDisk):
        assert api.wait_ended(running)["state"] == "succeeded"
        # That this one could be written does not make the disk any larger.
        assert api.get("/health")["state"] == "degraded"

    small.free()
    added = wait_for(lambda: submit_with_key(api), "the host to take runs again")
    assert added.status == 201, (added, refused)
    ended = api.wait_ended(running)
    assert (ended["state"], ended["attempt"]) == ("succeeded", 1)
    wait_for(lambda: api.get("/health")["state"] == "ok", "the host to be well")
    after = api.submit({"type": "command", "argv": ["true"]})
    assert api.wait_ended(after)["state"] == "succeeded"
    listed = {run["id"] for run in api.get("/api/runs", limit=10_000)["runs"]}
    assert listed == {running, *acknowledged, added.body["id"], after}
    assert integrity(small.data) == "ok"
    assert host.stop() == 0


def submit_until_refused(api: Api) -> tuple[list[str], Answer]:
    """Add large runs that nobody starts until two refusals follow each other: the first one throws the ballast off."""
    acknowledged: list[str] = []
    refusals: list[Answer] = []
    until = time.monotonic() + 120
    while len(refusals) < 2:
        assert time.monotonic() < until, f"{len(acknowledged)} runs were taken, and no end"
        answer = api.ask("POST", "/api/runs", large_run())
        if answer.status == 201:
            acknowledged.append(answer.body["id"])
            refusals.clear()
        else:
            refusals.append(answer)
    return acknowledged, refusals[-1]


def large_run() -> dict[str, Any]:
    action = {"type": "command", "argv": ["true"]}
    return {"scope": "crash", "name": "large", "action": action, "stdin": BALLAST_OF_A_RUN, "delay": "1d"}


def submit_with_key(api: Api) -> Answer | None:
    answer = api.ask("POST", "/api/runs", large_run(), headers={"Idempotency-Key": "once"})
    return None if answer.status == 503 else answer


def refuse_with_key(api: Api) -> bool:
    return submit_with_key(api) is None


def integrity(data: Path) -> str:
    connection = sqlite3.connect(data / "stellwerk.db")
    try:
        return str(connection.execute("PRAGMA integrity_check").fetchone()[0])
    finally:
        connection.close()
