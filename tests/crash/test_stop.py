"""How a host stops, and which starts it refuses."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from typing import Any

import pytest

from tests.crash.conftest import MakeHost
from tests.crash.host_process import Api, HostProcess, clean_environment, parse_stream
from tests.execution.survivors import alive, new_token

pytestmark = pytest.mark.crash

SETTINGS = "workers: {default: 1, lease: 20s, drain: %s, kill_grace: 1s}\n"
UNTIL_TOLD = "echo up; until [ -e go ]; do sleep 0.05; done"


def shell(script: str) -> dict[str, str]:
    return {"type": "shell", "script": script}


def told(api: Api, run_id: str) -> list[tuple[str, Any]]:
    """The story of a run after it was added."""
    events = [event for event in api.events(run=run_id) if event["type"] != "RunAdded"]
    return [(event["type"], event.get("counted")) for event in events]


# -- stopping -----------------------------------------------------------------------------------------------------


def test_a_stopping_host_waits_for_what_runs_and_claims_nothing_more(new_host: MakeHost) -> None:
    host = new_host(SETTINGS % "600s")
    api = host.start()
    first, second = api.submit(shell(UNTIL_TOLD)), api.submit(shell("true"))
    api.wait_line(first, "up")
    host.signal(signal.SIGTERM)
    host.wait_said("no more claims")
    assert host.running.poll() is None
    (host.folder / "go").touch()
    assert host.wait() == 0

    rows = read_runs(host)
    assert (rows[first]["state"], rows[first]["attempt"]) == ("succeeded", 1)
    assert (rows[second]["state"], rows[second]["attempt"]) == ("ready", 0)


def test_what_does_not_end_in_time_is_ended_and_put_back_uncounted(new_host: MakeHost) -> None:
    host, token = new_host(SETTINGS % "1s"), new_token()
    api = host.start()
    script = f"trap '' TERM; [ -e go ] && exit 0; setsid bash -c 'sleep 1000; :' {token} & echo up; sleep 1000; :"
    run_id = api.submit(shell(script), retry={"max": 0})  # one execution; a counted one would be the last
    api.wait_line(run_id, "up")
    assert host.stop() == 0
    assert not alive(token)
    row = read_runs(host)[run_id]
    assert row["state"] in ("waiting", "ready")
    assert (row["attempt"], row["tries"], row["crashes"]) == (1, 0, 0)

    (host.folder / "go").touch()
    api = host.start()
    ended = api.wait_ended(run_id)
    assert (ended["state"], ended["attempt"]) == ("succeeded", 2)
    assert told(api, run_id) == [
        ("RunReadied", None),
        ("RunStarted", None),
        ("RunPostponed", "no"),
        ("RunReadied", None),
        ("RunStarted", None),
        ("RunSucceeded", None),
    ]


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_skips_the_wait(new_host: MakeHost, second: int) -> None:
    host, token = new_host(SETTINGS % "600s"), new_token()
    api = host.start()
    run_id = api.submit(shell(f"echo up; bash -c 'sleep 1000; :' {token}"))
    api.wait_line(run_id, "up")
    host.signal(signal.SIGTERM)
    host.wait_said("no more claims")
    host.signal(second)
    assert host.wait() == 0
    assert not alive(token)
    row = read_runs(host)[run_id]
    assert row["state"] in ("waiting", "ready")
    assert (row["attempt"], row["tries"], row["crashes"]) == (1, 0, 0)


def test_who_waits_is_answered_when_the_host_stops(new_host: MakeHost) -> None:
    host = new_host(SETTINGS % "600s")
    api = host.start()
    run_id = api.submit(shell(UNTIL_TOLD))
    api.wait_line(run_id, "up")
    after = api.get("/api/counts")["event_id"]
    logs, stream = f"/api/runs/{run_id}/logs", "text/event-stream"
    waiting = [
        api.begin("/api/events", after=after, timeout=600),
        api.begin(logs, after=1, timeout=600),
        api.begin("/api/events", stream, after=after),
        api.begin(logs, stream, after=1),
    ]
    for _ in range(3):
        api.get("/health")  # what was sent before has been read by now
    host.signal(signal.SIGTERM)
    # All are answered while the run still holds the host up: it is not its end that answers them.
    answers = [connection.getresponse() for connection in waiting]
    assert [answer.status for answer in answers] == [200] * 4
    assert json.loads(answers[0].read()) == {"type": "Empty", "last_event_id": after}
    assert json.loads(answers[1].read())["lines"] == []
    # A stream that is cut off would raise: these end in order.
    assert [list(parse_stream(answer.read())) for answer in answers[2:]] == [[], []]
    assert host.running.poll() is None
    for connection in waiting:
        connection.close()
    (host.folder / "go").touch()
    assert host.wait() == 0


# -- refused starts -----------------------------------------------------------------------------------------------


def refused(host: HostProcess, port: int = 0) -> str:
    """What a start says that is refused with exit code 1."""
    host.spawn(port=port)
    assert host.wait() == 1, host.errors()
    assert "Traceback" not in host.errors()
    return host.errors()


def test_a_second_host_on_the_same_folder_is_refused(new_host: MakeHost) -> None:
    host, second = new_host(), new_host()
    api = host.start()
    second.data = host.data
    text = refused(second)
    assert f"is in use by process {host.pid}" in text
    assert str(host.data) in text
    assert api.get("/health")["state"] == "ok"
    run_id = api.submit(shell("true"))
    assert api.wait_ended(run_id)["state"] == "succeeded"


def test_a_port_in_use_is_said_plainly_and_costs_no_run_anything(new_host: MakeHost) -> None:
    host = new_host("workers: {default: 0}\n")
    run_id = host.start().submit(shell("true"), retry={"max": 0})  # a start that counted would be its last
    assert host.stop() == 0
    host.config.write_text(SETTINGS % "5s")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = refused(host, port)
    assert f"127.0.0.1:{port}" in text
    assert "in use" in text.lower()
    assert host.start().wait_ended(run_id)["state"] == "succeeded"


def test_a_newer_store_is_refused_and_left_as_it_is(new_host: MakeHost) -> None:
    host = new_host()
    host.start()
    assert host.stop() == 0
    with sqlite3.connect(host.data / "stellwerk.db") as connection:
        connection.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    connection.close()
    assert "newer Stellwerk (schema 99" in refused(host)
    with sqlite3.connect(host.data / "stellwerk.db") as connection:
        assert connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone() == ("99",)
        connection.execute("UPDATE meta SET value = '1' WHERE key = 'schema'")
    connection.close()
    host.start()


# -- a store that is not ours -------------------------------------------------------------------------------------


def test_a_foreign_store_is_not_worked_on_until_it_is_adopted(new_host: MakeHost) -> None:
    ours, other = new_host(), new_host("workers: {default: 0}\n")
    run_id = other.start().submit(shell("echo it ran > ran"))
    assert other.stop() == 0
    ours.start()
    assert ours.stop() == 0
    for name in ("stellwerk.db-wal", "stellwerk.db-shm"):
        (ours.data / name).unlink(missing_ok=True)
    shutil.copy(other.data / "stellwerk.db", ours.data / "stellwerk.db")

    api = ours.start()
    health = api.get("/health")
    assert health["state"] == "degraded"
    assert "store adopt" in health["degraded"][0]
    answer = api.ask("POST", "/api/runs", {"scope": "crash", "name": "no", "action": shell("true")})
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) > 0
    (reason, *_) = api.get(f"/api/runs/{run_id}/why")["reasons"]
    assert "epoch" in str(reason)
    # Twice: what is claimed at all is claimed at the start.
    assert ours.stop() == 0
    api = ours.start()
    assert (api.run(run_id)["state"], api.run(run_id)["attempt"]) == ("ready", 0)
    assert not (ours.folder / "ran").exists()

    adopted = stellwerk(ours, "store", "adopt", "--yes", "--json")
    assert adopted.returncode == 0, adopted.stderr
    ended = api.wait_ended(run_id)
    assert (ended["state"], ended["attempt"]) == ("succeeded", 1)
    assert (ours.folder / "ran").exists()
    assert api.get("/health")["state"] == "ok"
    assert api.get("/api/events", after=0)["type"] == "Torn"
    assert stellwerk(ours, "store", "adopt", "--yes").returncode == 1
    # The next start knows it.
    assert ours.stop() == 0
    assert ours.start().get("/health")["state"] == "ok"


def stellwerk(host: HostProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stellwerk", *arguments],
        cwd=host.folder,
        env=clean_environment(STELLWERK_URL=f"http://127.0.0.1:{host.port}", STELLWERK_DATA=str(host.data)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def read_runs(host: HostProcess) -> dict[str, dict[str, Any]]:
    """The rows of a stopped host."""
    connection = sqlite3.connect(host.data / "stellwerk.db")
    connection.row_factory = sqlite3.Row
    try:
        return {row["id"]: dict(row) for row in connection.execute("SELECT * FROM runs")}
    finally:
        connection.close()
