"""Whatever a run started is gone when it has ended, whoever ended it (P14). Survivors are found by a token in argv."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

import pytest

from tests.crash.conftest import MakeHost
from tests.crash.host_process import Api, HostProcess, wait_for
from tests.execution.survivors import alive, nasty_argv, new_token

pytestmark = pytest.mark.crash

SETTINGS = "workers: {default: 16, lease: 20s, drain: 1s, kill_grace: 1s}\n"
SHAPES = ("ignores_signals", "three_sessions", "double_fork", "cleared", "stopped", "runner", "zombies", "untagged")
STAYING = ("ignores_signals", "double_fork", "cleared")  # few and quiet: for tests about who dies


def submit_shapes(api: Api, token: str, shapes: Iterable[str], **more: object) -> dict[str, str]:
    """A run for each shape; the name of the shape → the run's id."""
    return {shape: api.submit({"type": "command", "argv": nasty_argv(shape, token)}, **more) for shape in shapes}


def wait_ready(api: Api, runs: Iterable[str], attempt: int = 1) -> None:
    for run_id in runs:
        api.wait_line(run_id, "ready", attempt)


@pytest.fixture
def host(new_host: MakeHost) -> HostProcess:
    host = new_host(SETTINGS)
    host.start()
    return host


def test_a_cancelled_run_is_cancelled_when_nobody_of_it_is_left(host: HostProcess) -> None:
    api, token, other = host.api, new_token(), new_token()
    bystander = submit_shapes(api, other, ["cleared"])
    runs = submit_shapes(api, token, SHAPES)
    wait_ready(api, [*runs.values(), *bystander.values()])
    spared = alive(other)
    for run_id in runs.values():
        assert api.ask("POST", f"/api/runs/{run_id}/cancel").status == 200
    for shape, run_id in runs.items():
        assert api.wait_ended(run_id)["state"] == "cancelled"
        assert not alive(token, shape), shape
    assert not alive(token)
    assert alive(other) == spared


def test_background_children_of_a_finished_command_are_gone(host: HostProcess) -> None:
    api, token = host.api, new_token()
    runs = submit_shapes(api, token, ["holder", "leaves_a_cleared_daemon"])
    script = f"setsid bash -c 'sleep 1000; :' {token} & bash -c 'sleep 1000; :' {token} & echo done"
    runs["shell"] = api.submit({"type": "shell", "script": script})
    for run_id in runs.values():
        assert api.wait_ended(run_id)["state"] == "succeeded"
    assert not alive(token)


def test_a_timeout_ends_the_whole_tree(host: HostProcess) -> None:
    api, token = host.api, new_token()
    runs = submit_shapes(api, token, SHAPES, timeout=3)
    for run_id in runs.values():
        ended = api.wait_ended(run_id)
        assert (ended["state"], ended["reason"]) == ("failed", "timeout")
    assert not alive(token)


def test_no_process_survives_a_killed_host_and_its_runs_start_again(host: HostProcess) -> None:
    api, token = host.api, new_token()
    runs = submit_shapes(api, token, SHAPES)
    wait_ready(api, runs.values())
    keeper, guard = host.keeper(), host.guard()
    host.kill()
    wait_for(lambda: not alive(token), "the keeper to end everything")
    wait_for(lambda: not is_living(keeper) and not is_living(guard), "keeper and guard to go as well")

    api = host.start()
    wait_ready(api, runs.values(), attempt=2)
    assert {api.run(run_id)["state"] for run_id in runs.values()} == {"running"}
    assert api.ask("POST", "/api/runs/cancel", scope="crash").body["count"] == len(runs)
    for run_id in runs.values():
        assert api.wait_ended(run_id)["state"] == "cancelled"
    assert not alive(token)
    assert host.stop() == 0


def test_runs_of_a_killed_keeper_start_again_and_nothing_is_left_of_the_first(host: HostProcess) -> None:
    api, token = host.api, new_token()
    runs = submit_shapes(api, token, STAYING)
    wait_ready(api, runs.values())
    first = alive(token)
    os.kill(host.keeper(), signal.SIGKILL)
    wait_ready(api, runs.values(), attempt=2)
    assert not first & alive(token)
    postponed = api.events(type="RunPostponed")
    assert sorted(event["run"] for event in postponed) == sorted(runs.values())
    assert {event["counted"] for event in postponed} == {"crash"}
    end_all(api, runs, token)


def test_runs_of_a_killed_guard_go_on_and_the_host_says_so(host: HostProcess) -> None:
    api, token = host.api, new_token()
    runs = submit_shapes(api, token, STAYING)
    wait_ready(api, runs.values())
    first = alive(token)
    os.kill(host.guard(), signal.SIGKILL)
    wait_for(lambda: api.get("/health")["state"] == "degraded", "the host to notice")
    assert "unguarded" in api.get("/health")["degraded"][0]
    assert alive(token) == first
    later = submit_shapes(api, token, ["double_fork"])
    wait_ready(api, later.values())
    assert {api.run(run_id)["attempt"] for run_id in runs.values()} == {1}
    end_all(api, runs | {"later": later["double_fork"]}, token)


def test_runs_of_a_killed_guard_and_keeper_start_again_and_nothing_is_left_of_the_first(host: HostProcess) -> None:
    api, token = host.api, new_token()
    runs = submit_shapes(api, token, STAYING)
    wait_ready(api, runs.values())
    first = alive(token)
    guard, keeper = host.guard(), host.keeper()
    os.kill(guard, signal.SIGKILL)
    os.kill(keeper, signal.SIGKILL)
    wait_ready(api, runs.values(), attempt=2)
    assert not first & alive(token)
    end_all(api, runs, token)


def end_all(api: Api, runs: dict[str, str], token: str) -> None:
    for run_id in runs.values():
        api.ask("POST", f"/api/runs/{run_id}/cancel")
    for run_id in runs.values():
        assert api.wait_ended(run_id)["state"] == "cancelled"
    assert not alive(token)


def is_living(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
