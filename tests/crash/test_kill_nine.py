"""kill -9 of the host at random moments under load, twenty times on one data folder (P1, P2, P3, P4, P5).

Clients submit all the time and write down what was acknowledged. What they wrote down must hold afterwards, and the
journal must tell a story in which nothing happened twice.
"""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stellwerk.core.events import (
    RunAdded,
    RunCancelled,
    RunFailed,
    RunPostponed,
    RunStarted,
    RunSucceeded,
    Stamped,
)
from stellwerk.store.sqlite.store import SqliteStore
from tests.conformance.fold import difference, fold
from tests.crash.conftest import MakeHost
from tests.crash.host_process import FINAL, Answer, Api, Background, HostProcess, Unreachable, wait_for

pytestmark = pytest.mark.crash

ROUNDS = 20
KILLED_WHILE_STARTING = frozenset({3, 8, 14})
SUBMITTERS = 3
REQUESTS_PER_ROUND = 15  # of all submitters together, so that the host can keep up with what it is given
SEED = 20_240_229

SETTINGS = """
workers: {default: 8, lease: 1s, drain: 5s, kill_grace: 1s}
"""
ACTIONS = """
def noop(value=None):
    return value
"""
EFFECTS = "effects"
SHELL = f'echo "$STELLWERK_RUN_ID $STELLWERK_ATTEMPT" >> {EFFECTS}; sleep 0.1'


class Clients:
    """Submitters in threads, over all rounds; a request is repeated with its key until it is acknowledged."""

    def __init__(self, host: HostProcess) -> None:
        self._host = host
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._allowed = 0
        self.acknowledged: dict[str, tuple[object, int, Any]] = {}  # key → what was sent, status, what was answered
        self._threads = [Background(partial(self._submit, number)) for number in range(SUBMITTERS)]

    def allow(self, requests: int) -> None:
        with self._changed:
            self._allowed += requests
            self._changed.notify_all()

    def finish(self) -> None:
        """Every request that was begun is acknowledged, then it is over."""
        self._closing.set()
        self.allow(0)
        for thread in self._threads:
            thread.result()

    def has_acknowledged(self, count: int) -> bool:
        return len(self.acknowledged) >= count

    def ids(self) -> set[str]:
        return {run_id for _, _, body in self.acknowledged.values() for run_id in ids_of(body)}

    def _submit(self, thread: int) -> None:
        chance = random.Random(SEED + thread)
        own: list[str] = []  # for parents
        number = 0
        while self._take():
            number += 1
            key = f"key-{thread}-{number}"
            body = wanted(chance, own)
            answer = self._until_acknowledged(key, body)
            assert answer.status in (200, 201), answer
            self.acknowledged[key] = (body, answer.status, answer.body)
            own += ids_of(answer.body)[:2]
            if chance.random() < 0.2:
                # As a client does that did not hear the answer: perhaps over a crash.
                again = self._until_acknowledged(key, body)
                assert (again.status, again.body) == (answer.status, answer.body)

    def _take(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._allowed > 0 or self._closing.is_set())
            if self._allowed == 0:
                return False
            self._allowed -= 1
            return True

    def _until_acknowledged(self, key: str, body: object) -> Answer:
        def acknowledged() -> Answer | None:
            if self._host.port == 0:
                return None
            try:
                answer = self._host.api.ask("POST", "/api/runs", body, headers={"Idempotency-Key": key})
            except Unreachable:
                return None
            return None if answer.status == 503 else answer

        return wait_for(acknowledged, f"an answer to {key}")


def wanted(chance: random.Random, own: list[str]) -> object:
    """A random request: one run or many, with parents among them or among older ones, with and without a live key."""
    if chance.random() < 0.6:
        one = a_wish(chance)
        if own and chance.random() < 0.3:
            one |= {"parents": [chance.choice(own)], "when": chance.choice(["succeeded", "failed", "ended"])}
        if chance.random() < 0.3:
            one["live_key"] = f"live-{chance.randrange(4)}"
        return one
    many = [a_wish(chance) for _ in range(chance.randrange(2, 30))]
    for place in range(1, len(many)):
        if chance.random() < 0.3:
            many[place] |= {"parents": [f"#{chance.randrange(place)}"], "when": chance.choice(["succeeded", "ended"])}
    return many


def a_wish(chance: random.Random) -> dict[str, Any]:
    kind = chance.random()
    if kind < 0.12:
        action: dict[str, Any] = {"type": "shell", "script": SHELL}
    else:
        isolation = "thread" if kind < 0.6 else "process"
        action = {"type": "python", "function": "actions:noop", "args": [chance.randrange(9)], "isolation": isolation}
    wish: dict[str, Any] = {"scope": "crash", "name": f"job{chance.randrange(3)}", "action": action}
    if chance.random() < 0.2:
        wish["delay"] = round(chance.random(), 3)
    if chance.random() < 0.2:
        wish["retry"] = {"max": chance.randrange(4), "delay": 0.05}
    return wish


def ids_of(body: Any) -> list[str]:
    return [entry["id"] for entry in body["runs"]] if "runs" in body else [body["id"]]


class Aftermath:
    """What was left when all was over: what clients know, what the API says, what the journal and the tables hold."""

    def __init__(self, clients: Clients, runs: dict[str, dict[str, Any]], folder: Path, exit_code: int) -> None:
        self.clients = clients
        self.runs = runs
        self.folder = folder
        self.exit_code = exit_code
        self.events: list[Stamped] = []
        self.differences: list[str] = []

    async def read_store(self) -> None:
        store = SqliteStore(self.folder / "data", inline=True)
        await store.open()
        try:
            after = 0
            while found := (await store.read_journal(after, 10_000)).events:
                self.events += found
                after = found[-1].event_id
            self.differences = await difference(fold(self.events), store)
        finally:
            await store.close()


async def test_twenty_kills_lose_nothing_and_repeat_nothing(new_host: MakeHost) -> None:
    host = new_host(SETTINGS)
    (host.folder / "actions.py").write_text(ACTIONS)
    left = kill_often(host)
    await left.read_store()
    assert left.exit_code == 0
    every_acknowledged_run_exists_and_has_ended(left)
    no_end_was_accepted_twice(left.events)
    no_late_result_was_accepted(left.events)
    no_two_runs_held_a_live_key(left.events)
    event_ids = [stamped.event_id for stamped in left.events]
    assert all(before < after for before, after in pairwise(event_ids))
    assert left.differences == []
    commands_ran_once_an_attempt(left)
    connection = sqlite3.connect(left.folder / "data" / "stellwerk.db")
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()
    # The test itself must have been one: much was done, and kills met runs in their middle.
    counted = Counter(type(stamped.event).__name__ for stamped in left.events)
    assert counted["RunSucceeded"] > 100, counted
    assert any(isinstance(stamped.event, RunPostponed) for stamped in left.events), counted


def kill_often(host: HostProcess) -> Aftermath:
    chance = random.Random(SEED)
    clients = Clients(host)
    for number in range(ROUNDS):
        clients.allow(REQUESTS_PER_ROUND)
        host.spawn()
        if number in KILLED_WHILE_STARTING:
            time.sleep(chance.random())  # the moment is the test's input, not a hope
        else:
            host.wait_up()
            goal = len(clients.acknowledged) + chance.randrange(REQUESTS_PER_ROUND)
            wait_for(partial(clients.has_acknowledged, goal), "requests to be acknowledged")
            time.sleep(chance.random() * 0.3)
        host.kill()
    api = host.start()
    clients.finish()
    wait_for(lambda: is_idle(api), "every run to end")
    every_repeat_gets_the_first_answer(api, clients)
    runs = {run["id"]: run for run in all_runs(api)}
    return Aftermath(clients, runs, host.folder, host.stop())


def is_idle(api: Api) -> bool:
    counts = api.get("/api/counts")["counts"]
    return not any(counts[state] for state in ("waiting", "ready", "running"))


def all_runs(api: Api) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    more: dict[str, object] = {}
    while True:
        page = api.get("/api/runs", limit=1_000, **more)
        found += page["runs"]
        if page["cursor"] is None:
            return found
        more = {"cursor": page["cursor"]}


def every_repeat_gets_the_first_answer(api: Api, clients: Clients) -> None:
    for key, (body, status, told) in clients.acknowledged.items():
        again = api.ask("POST", "/api/runs", body, headers={"Idempotency-Key": key})
        assert (again.status, again.body) == (status, told), key


def every_acknowledged_run_exists_and_has_ended(left: Aftermath) -> None:
    assert len(left.clients.acknowledged) == ROUNDS * REQUESTS_PER_ROUND
    assert left.clients.ids() <= left.runs.keys()
    assert {run["state"] for run in left.runs.values()} <= FINAL
    # Nothing was added that nobody asked for: each request was in the end acknowledged, so every run is known.
    assert left.runs.keys() <= left.clients.ids()


def no_end_was_accepted_twice(events: list[Stamped]) -> None:
    finals: Counter[str] = Counter()
    ends: Counter[tuple[str, int]] = Counter()
    for stamped in events:
        event = stamped.event
        if isinstance(event, RunSucceeded | RunFailed | RunCancelled):
            finals[event.run] += 1
        if isinstance(event, RunSucceeded | RunFailed | RunPostponed):
            ends[event.run, event.attempt] += 1
    assert set(finals.values()) == {1}
    assert set(ends.values()) == {1}


def no_late_result_was_accepted(events: list[Stamped]) -> None:
    """An end counts only as the word of the worker that holds the attempt, and a dead host's word never comes back."""
    holders: dict[str, tuple[int, str]] = {}
    hosts: list[str] = []
    for stamped in events:
        event = stamped.event
        if isinstance(event, RunStarted):
            holders[event.run] = (event.attempt, event.worker)
            if event.worker not in hosts:
                hosts.append(event.worker)
            assert event.worker == hosts[-1], "a host started a run after its successor had"
        elif isinstance(event, RunSucceeded | RunFailed | RunPostponed):
            attempt, worker = holders.pop(event.run)
            assert event.attempt == attempt
            if event.worker is not None:
                assert event.worker == worker == hosts[-1]
    assert holders == {}
    assert len(hosts) > ROUNDS // 2


def no_two_runs_held_a_live_key(events: list[Stamped]) -> None:
    holders: dict[str, str] = {}
    for stamped in events:
        event = stamped.event
        if isinstance(event, RunAdded) and event.live_key is not None:
            assert event.live_key not in holders
            holders[event.live_key] = event.run
        elif isinstance(event, RunSucceeded | RunFailed | RunCancelled):
            holders = {key: run for key, run in holders.items() if run != event.run}
    assert holders == {}


def commands_ran_once_an_attempt(left: Aftermath) -> None:
    lines = (left.folder / EFFECTS).read_text().splitlines()
    assert len(lines) == len(set(lines))
    succeeded = {
        f"{run['id']} {run['attempt']}"
        for run in left.runs.values()
        if run["state"] == "succeeded" and run["action"]["type"] == "shell"
    }
    assert succeeded
    assert succeeded <= set(lines)
