"""A host frozen past its lease: its keeper ends the trees meanwhile, and the runs start again (P6)."""

from __future__ import annotations

import signal
from datetime import UTC, datetime

import pytest

from tests.crash.conftest import MakeHost
from tests.crash.host_process import wait_for
from tests.execution.survivors import alive, new_token

pytestmark = pytest.mark.crash

SETTINGS = "workers: {default: 4, lease: 4s, drain: 5s, kill_grace: 1s}\n"
# The first attempt sleeps for ever, with an escaped child; later ones end at once. $0 is the token.
SCRIPT = """
[ "$STELLWERK_ATTEMPT" = 1 ] || exit 0
trap '' TERM
setsid bash -c 'echo up; sleep 1000; :' "$TOKEN" &
exec bash -c 'sleep 1000; :' "$TOKEN"
"""
PYTHON = """
import os, subprocess, sys, time

def hang_once(token, run):
    if os.environ["STELLWERK_ATTEMPT"] == "1":
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)", token], start_new_session=True)
        print("up", flush=True)
        time.sleep(1000)
    return int(os.environ["STELLWERK_ATTEMPT"])
"""


def test_a_frozen_host_loses_its_attempts_and_its_trees(new_host: MakeHost) -> None:
    host = new_host(SETTINGS)
    (host.folder / "actions.py").write_text(PYTHON)
    api = host.start()
    token = new_token()
    call = {"type": "python", "function": "actions:hang_once", "args": [token]}
    runs = [api.submit({"type": "shell", "script": SCRIPT}, env={"TOKEN": token}), api.submit(call)]
    for run_id in runs:
        api.wait_line(run_id, "up")
    wait_for(lambda: len(alive(token)) >= 3, "the trees to be complete")
    # By heartbeats alone: the leases that they began with are over.
    begun = api.events(type="RunStarted")
    wait_for(lambda: all(is_past(event["lease_until"]) for event in begun), "the first leases to run out")
    assert {api.run(run_id)["attempt"] for run_id in runs} == {1}

    host.signal(signal.SIGSTOP)
    # Seen from outside: the host cannot have done it.
    wait_for(lambda: not alive(token), "the keeper to end the trees")
    host.signal(signal.SIGCONT)

    for run_id in runs:
        ended = api.wait_ended(run_id)
        assert (ended["state"], ended["attempt"]) == ("succeeded", 2), ended
        events = [event for event in api.events(run=run_id) if event["type"] != "RunAdded"]
        told = [(event["type"], event.get("attempt")) for event in events]
        assert told == [
            ("RunReadied", None),
            ("RunStarted", 1),
            ("RunPostponed", 1),
            ("RunReadied", None),
            ("RunStarted", 2),
            ("RunSucceeded", 2),
        ]
        assert (events[2]["reason"], events[2]["counted"]) == ("worker lost", "crash")
    assert api.run(runs[1])["result"] == 2
    assert not alive(token)
    assert api.get("/health")["state"] == "ok"
    assert host.stop() == 0


def is_past(moment: str) -> bool:
    return datetime.fromisoformat(moment) < datetime.now(UTC)
