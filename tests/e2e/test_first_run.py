"""The command line against a real host, as a new user would meet it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.crash.host_process import DEADLINE_S, HostProcess, clean_environment, wait_for

DONE, REFUSED, USAGE, NO_HOST, NO_RIGHT, RUN_FAILED = range(6)
UNKNOWN_ID = "0123456789abcdef0123456789"

Done = subprocess.CompletedProcess[str]


class Terminal:
    """A user's shell in a folder of its own, with the host's address and data folder in its environment."""

    def __init__(self, host: HostProcess, folder: Path) -> None:
        self.host = host
        self.folder = folder

    def __call__(self, *arguments: str, exit_code: int = DONE, **environment: str) -> Done:
        """Run a command; its exit code must be as wanted, and nobody ever sees a trace."""
        done = subprocess.run(
            [sys.executable, "-m", "stellwerk", *arguments],
            cwd=self.folder,
            env=self.environment(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == exit_code, (arguments, done)
        assert "Traceback" not in done.stderr
        return done

    def json(self, *arguments: str, exit_code: int = DONE) -> Any:
        """What a command prints with --json."""
        return json.loads(self(*arguments, "--json", exit_code=exit_code).stdout)

    def lines(self, *arguments: str, exit_code: int = DONE, rest: tuple[str, ...] = ()) -> list[Any]:
        """The same for commands that print a document a line; `rest` comes after all options."""
        done = self(*arguments, "--json", *rest, exit_code=exit_code)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "stellwerk", *arguments],
            cwd=self.folder,
            env=self.environment({}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )

    def submit(self, *words: str, name: str = "hello") -> str:
        return self("submit", "--scope", "first", "--name", name, *words).stdout.strip()

    def ended(self, run_id: str) -> dict[str, Any]:
        return self.host.api.wait_ended(run_id)

    def environment(self, more: dict[str, str]) -> dict[str, str]:
        known = {"STELLWERK_URL": f"http://127.0.0.1:{self.host.port}", "STELLWERK_DATA": str(self.host.data)}
        given = {**known, **more}
        return clean_environment(**{name: value for name, value in given.items() if value})


@pytest.fixture
def terminal(host: HostProcess, tmp_path: Path) -> Terminal:
    return Terminal(host, tmp_path)


# -- submit and follow --------------------------------------------------------------------------------------------


def test_a_followed_run_prints_its_output_and_ends_with_0(terminal: Terminal) -> None:
    done = terminal(
        "submit", "--scope", "first", "--name", "hello", "--follow", "--", "sh", "-c", "echo hi; echo no >&2"
    )
    assert done.stdout == "hi\n"
    assert "no\n" in done.stderr
    assert "succeeded" in done.stderr


def test_a_followed_run_that_fails_ends_with_5(terminal: Terminal) -> None:
    words = ("submit", "--scope", "first", "--name", "fails", "--shell", "--follow", "--", "echo out; exit 3")
    done = terminal(*words, exit_code=RUN_FAILED)
    assert done.stdout == "out\n"
    assert "exit code 3" in done.stderr
    added, *lines, ended = terminal.lines(*words[:-2], exit_code=RUN_FAILED, rest=words[-2:])
    assert lines[0]["text"] == "out"
    assert (ended["id"], ended["state"], ended["exit_code"]) == (added["id"], "failed", 3)


def test_a_submitted_run_is_found_by_its_id_and_in_the_list(terminal: Terminal) -> None:
    run_id = terminal.submit("--label", "who=new", "--", "echo", "hello")
    terminal.ended(run_id)
    shown = terminal("run", run_id).stdout
    assert run_id in shown
    assert "succeeded" in shown
    document = terminal.json("run", run_id)
    assert (document["state"], document["exit_code"], document["labels"]) == ("succeeded", 0, {"who": "new"})
    assert run_id in terminal("runs", "--scope", "first").stdout
    page = terminal.json("runs", "--label", "who=new", "--state", "succeeded")
    assert [run["id"] for run in page["runs"]] == [run_id]
    assert page["event_id"] >= document["changed"]


def test_a_python_function_hands_back_its_result(terminal: Terminal) -> None:
    words = ("submit", "--scope", "first", "--name", "max", "--python", "builtins:max", "--args", "[1, 3, 2]")
    assert terminal.lines(*words, "--follow")[-1]["result"] == 3
    failed = terminal.lines(
        "submit", "--scope", "first", "--name", "bad", "--python", "builtins:int", "--args", '["x"]', "--follow",
        exit_code=RUN_FAILED,
    )[-1]  # fmt: skip
    assert "invalid literal" in failed["error"]


def test_a_repeated_idempotency_key_answers_the_first_id(terminal: Terminal) -> None:
    words = ("--idempotency-key", terminal.folder.name, "--", "true")
    assert terminal.submit(*words) == terminal.submit(*words)
    other = ("submit", "--scope", "first", "--name", "other", *words)
    assert "Idempotency-Key" in terminal(*other, exit_code=REFUSED).stderr


def test_a_live_key_that_is_taken_answers_the_live_run(terminal: Terminal) -> None:
    words = ("--live-key", terminal.folder.name, "--delay", "1h", "--", "true")
    run_id = terminal.submit(*words)
    again = terminal("submit", "--scope", "first", "--name", "hello", *words)
    assert again.stdout.strip() == run_id
    assert "live key" in again.stderr


# -- logs ---------------------------------------------------------------------------------------------------------


def test_logs_are_printed_and_followed_to_the_end(terminal: Terminal) -> None:
    script = "echo one; echo two >&2; until [ -e go ]; do sleep 0.05; done; echo three"
    run_id = terminal.submit("--cwd", str(terminal.folder), "--shell", "--", script)
    following = terminal.begin("logs", run_id, "-f")
    assert following.stdout is not None
    assert following.stdout.readline() == "one\n"  # while it runs
    (terminal.folder / "go").touch()
    assert following.stdout.read() == "three\n"
    assert following.wait(DEADLINE_S) == DONE
    following.stdout.close()
    assert terminal("logs", run_id, "--stream", "stderr").stderr == "two\n"
    document = terminal.json("logs", run_id)
    assert document["ended"] is True
    assert {line["text"] for line in document["lines"]} >= {"one", "two", "three"}
    assert [line["text"] for line in terminal.json("logs", run_id, "--after", "2")["lines"]] == ["three"]
    followed = terminal.lines("logs", run_id, "-f", "--stream", "stdout")
    assert [line.get("text") for line in followed][:2] == ["one", "three"]


def test_bytes_that_are_no_text_come_out_as_they_went_in(terminal: Terminal) -> None:
    run_id = terminal.submit("--shell", "--", r"printf 'a\377b\n'")
    terminal.ended(run_id)
    done = subprocess.run(
        [sys.executable, "-m", "stellwerk", "logs", run_id],
        cwd=terminal.folder, env=terminal.environment({}), capture_output=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.stdout == b"a\xffb\n"


# -- why, cancel, rerun -------------------------------------------------------------------------------------------


def test_why_cancel_and_rerun(terminal: Terminal) -> None:
    run_id = terminal.submit("--delay", "1h", "--", "true")
    assert "NotDue" in terminal("why", run_id).stdout
    (reason,) = terminal.json("why", run_id)["reasons"]
    assert reason["type"] == "NotDue"
    assert reason["until"]
    assert f"{run_id} cancelled" in terminal("cancel", run_id).stdout
    assert terminal.json("run", run_id)["state"] == "cancelled"
    assert terminal.json("why", run_id)["reasons"][0]["type"] == "Ended"
    assert "cancelled already" in terminal("cancel", run_id, exit_code=REFUSED).stderr
    new_id = terminal.json("rerun", run_id)["id"]
    assert terminal.ended(new_id)["state"] == "succeeded"
    assert terminal.json("run", new_id)["rerun_of"] == run_id


def test_a_running_command_is_cancelled_and_its_follower_ends_with_5(terminal: Terminal) -> None:
    following = terminal.begin(
        "submit", "--scope", "first", "--name", "long", "-f", "--shell", "--json", "--", "sleep 1000"
    )
    assert following.stdout is not None
    run_id = json.loads(following.stdout.readline())["id"]
    terminal("cancel", run_id)
    assert json.loads(following.stdout.read().splitlines()[-1])["state"] == "cancelled"
    assert following.wait(DEADLINE_S) == RUN_FAILED
    following.stdout.close()


def test_many_are_cancelled_and_rerun_by_filter(terminal: Terminal) -> None:
    label = f"bulk={terminal.folder.name}"
    ids = [terminal.submit("--label", label, "--delay", "1h", "--", "true") for _ in range(2)]
    preview = terminal.json("cancel", "--label", label, "--dry-run")
    assert (preview["count"], set(preview["ids"])) == (2, set(ids))
    assert "--yes" in terminal("cancel", "--label", label, exit_code=USAGE).stderr
    assert terminal.json("cancel", "--label", label, "--yes")["count"] == 2
    assert {terminal.host.api.run(run_id)["state"] for run_id in ids} == {"cancelled"}
    assert "2 runs run again" in terminal("rerun", "--label", label, "--state", "cancelled", "--yes").stdout
    wait_for(lambda: len(terminal.host.api.get("/api/runs", label=label, state="succeeded")["runs"]) == 2, "both")


# -- gates --------------------------------------------------------------------------------------------------------


def test_a_paused_scope_holds_its_runs_until_it_is_unpaused(terminal: Terminal) -> None:
    scope = terminal.folder.name.replace("[", "_").replace("]", "_")
    assert "paused" in terminal("pause", "--scope", scope, "--reason", "new disk").stdout
    run_id = terminal("submit", "--scope", scope, "--name", "held", "--", "true").stdout.strip()
    assert scope in terminal("gates").stdout
    gates = [gate for gate in terminal.json("gates")["gates"] if gate.get("scope") == scope]
    assert [(gate["kind"], gate["reason"]) for gate in gates] == [("pause", "new disk")]
    reasons = terminal.json("why", run_id)["reasons"]
    assert "Paused" in {reason["type"] for reason in reasons}
    assert "new disk" in terminal("why", run_id).stdout
    assert terminal.json("run", run_id)["attempt"] == 0
    assert terminal.json("unpause", "--scope", scope)["event_id"] > 0
    assert terminal.ended(run_id)["state"] == "succeeded"
    terminal("unpause", "--scope", scope, exit_code=REFUSED)


# -- events, counts, health ---------------------------------------------------------------------------------------


def test_events_are_read_and_followed(terminal: Terminal) -> None:
    scope = terminal.folder.name.replace("[", "_").replace("]", "_")
    start = str(terminal.json("counts")["event_id"])
    following = terminal.begin("events", "-f", "--after", start, "--prefix", f"{scope}/", "--json")
    assert following.stdout is not None
    run_id = terminal("submit", "--scope", scope, "--name", "seen", "--follow", "--json", "--", "true").stdout
    run_id = json.loads(run_id.splitlines()[0])["id"]
    types = ["RunAdded", "RunReadied", "RunStarted", "RunSucceeded"]
    followed = [json.loads(following.stdout.readline()) for _ in types]
    following.terminate()
    following.wait(DEADLINE_S)
    following.stdout.close()
    assert [event["type"] for event in followed] == types
    assert terminal.json("events", "--run", run_id)["events"] == followed
    assert terminal.json("events", "--run", run_id, "--type", "RunStarted")["events"] == [followed[2]]
    assert "RunSucceeded" in terminal("events", "--run", run_id).stdout


def test_counts_and_health(terminal: Terminal) -> None:
    terminal.ended(terminal.submit("--", "true"))
    counts = terminal.json("counts")["counts"]
    assert counts["succeeded"] >= 1
    assert set(counts) == {"waiting", "ready", "running", "succeeded", "failed", "cancelled"}
    assert "succeeded" in terminal("counts").stdout
    health = terminal.json("health")
    assert (health["state"], health["store"], health["degraded"]) == ("ok", "sqlite", [])
    assert "ok" in terminal("health", STELLWERK_DATA="").stdout  # needs no token


# -- exit codes, tokens, settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "why", "logs", "cancel", "rerun"])
def test_an_unknown_run_is_1(terminal: Terminal, command: str) -> None:
    done = terminal(command, UNKNOWN_ID, exit_code=REFUSED)
    assert UNKNOWN_ID in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "words",
    [
        ("submit", "--scope", "first", "--name", "nothing"),
        ("submit", "--name", "noscope", "--", "true"),
        ("runs", "--state", "odd"),
        ("cancel",),
        ("nonsense",),
        ("run", "not an id"),
    ],
)
def test_wrong_usage_is_2(terminal: Terminal, words: tuple[str, ...]) -> None:
    assert terminal(*words, exit_code=USAGE).stderr


def test_a_name_that_the_host_refuses_is_1(terminal: Terminal) -> None:
    done = terminal("submit", "--scope", "first", "--name", "not/a/name", "--", "true", exit_code=REFUSED)
    assert "name" in done.stderr


def test_no_host_is_3(terminal: Terminal) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        for words in (("runs",), ("health",), ("submit", "--scope", "a", "--name", "b", "--", "true")):
            assert "stellwerk up" in terminal(*words, exit_code=NO_HOST, STELLWERK_URL=url).stderr


def test_a_viewer_may_look_and_nothing_else(terminal: Terminal) -> None:
    made = terminal.host.api.ask("POST", "/api/tokens", {"name": "eyes", "role": "viewer"})
    assert made.status == 201
    token: str = made.body["token"]
    terminal("runs", STELLWERK_TOKEN=token)
    for words in (("submit", "--scope", "a", "--name", "b", "--", "true"), ("pause",), ("store", "adopt", "--yes")):
        assert terminal(*words, exit_code=NO_RIGHT, STELLWERK_TOKEN=token).stderr
    # The file named on the command line stands before the environment.
    file = terminal.folder / "token"
    file.write_text(f"{token}\n")
    terminal("pause", "--token-file", str(file), exit_code=NO_RIGHT, STELLWERK_TOKEN=terminal.host.token)
    terminal.host.api.ask("DELETE", "/api/tokens", id=made.body["id"])
    terminal("runs", exit_code=NO_RIGHT, STELLWERK_TOKEN=token)


def test_a_token_is_found_in_the_environment_and_in_files(terminal: Terminal) -> None:
    token = terminal.host.token
    file = terminal.folder / "token"
    file.write_text(token)
    terminal("runs", STELLWERK_DATA="", STELLWERK_TOKEN=token)
    terminal("runs", STELLWERK_DATA="", STELLWERK_ADMIN_TOKEN=token)
    terminal("runs", "--token-file", str(file), STELLWERK_DATA="")
    terminal("runs", "--data", str(terminal.host.data), STELLWERK_DATA="")
    assert "token" in terminal("runs", STELLWERK_DATA="", exit_code=NO_RIGHT).stderr
    terminal("runs", STELLWERK_TOKEN="swk_wrong", exit_code=NO_RIGHT)
    assert oct((terminal.host.data / "admin-token").stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("workers:\n  default: many\n", "2:12"),
        ("server:\n  host: 5\n", "2:9"),
        ("workers: {lease: 10ms}\n", "1:18"),
        ("colour: blue\n", "1:1"),
        ("workers: [\n", "2:1"),
        ("workers: {default: 1}\nworkers: {default: 2}\n", "2:1"),
    ],
)
def test_a_broken_file_of_settings_is_2_and_names_its_place(tmp_path: Path, text: str, place: str) -> None:
    (tmp_path / "stellwerk.yml").write_text(text)
    done = up(tmp_path)
    assert done.returncode == USAGE, done
    assert done.stderr.startswith(f"stellwerk.yml:{place}: "), done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["stellwerk.yml"]  # nothing was begun


def test_a_file_of_settings_that_is_not_there_is_2(tmp_path: Path) -> None:
    done = up(tmp_path, "--config", "missing.yml")
    assert (done.returncode, "missing.yml" in done.stderr) == (USAGE, True)


def up(folder: Path, *more: str) -> Done:
    return subprocess.run(
        [sys.executable, "-m", "stellwerk", "up", "--port", "0", *more],
        cwd=folder, env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=DEADLINE_S,
    )  # fmt: skip


def test_commands_find_the_host_by_the_file_of_settings(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """The whole first minute: a file, `up` in one terminal, a command in another, no option anywhere."""
    (tmp_path / "stellwerk.yml").write_text(f"server: {{port: {free_port()}}}\n")
    host = subprocess.Popen(
        [sys.executable, "-m", "stellwerk", "up"],
        cwd=tmp_path, env=clean_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert host.stdout is not None
        assert "Stellwerk is up:" in host.stdout.readline()
        assert str(tmp_path / ".stellwerk" / "admin-token") in host.stdout.readline()
        done = subprocess.run(
            [sys.executable, "-m", "stellwerk", "submit", "--scope", "demo", "--name", "hi", "-f", "--", "pwd"],
            cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=DEADLINE_S,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (DONE, f"{tmp_path.resolve()}\n"), done
    finally:
        host.terminate()
        assert host.wait(DEADLINE_S) == 0
        host.communicate()


@pytest.fixture
def free_port() -> Callable[[], int]:
    def find() -> int:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            return int(found.getsockname()[1])

    return find
