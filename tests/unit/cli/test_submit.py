"""What `submit` asks of the host, and what it prints."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import CommandLine, ScriptedHost, Told, a_run, line, sent

ADDED = Told({"id": "r1", "event_id": 50}, status=201)
START = ("submit", "--scope", "demo", "--name", "hello")
END = sent("end", {"last": 3, "ended": True, "event_id": 69})


def body(host: ScriptedHost) -> Any:
    (asked,) = host.requests("/api/runs")
    return asked.body


def test_a_command_is_sent_word_by_word_and_its_id_is_printed(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("POST", "/api/runs", ADDED)
    ran = stellwerk(*START, "--", "echo", "--scope", "a b", "--")
    assert (ran.exit_code, ran.out) == (0, "r1\n")
    assert body(host) == {
        "scope": "demo",
        "name": "hello",
        "action": {"type": "command", "argv": ["echo", "--scope", "a b", "--"]},
    }


def test_the_two_dashes_may_be_left_out(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("POST", "/api/runs", ADDED)
    assert stellwerk(*START, "echo", "-n", "x").exit_code == 0
    assert body(host)["action"]["argv"] == ["echo", "-n", "x"]


def test_with_shell_the_rest_is_the_script(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("POST", "/api/runs", ADDED)
    stellwerk(*START, "--shell", "--", "ls | wc -l")
    assert body(host)["action"] == {"type": "shell", "script": "ls | wc -l"}


def test_a_function_gets_its_arguments_as_json(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("POST", "/api/runs", ADDED)
    stellwerk(*START, "--python", "m:f", "--args", '{"a": 1}', "--isolation", "thread")
    assert body(host)["action"] == {
        "type": "python",
        "function": "m:f",
        "args": {"a": 1},
        "isolation": "thread",
    }


def test_every_option_has_its_field(stellwerk: CommandLine, host: ScriptedHost, tmp_path: Path) -> None:
    host.on("POST", "/api/runs", ADDED)
    (tmp_path / "in").write_text("grüß\n")
    options = (
        "--priority 7 --delay 5m --live-key k --parent p1 --parent p2 --when ended --retries 3 --retry-delay 10s "
        "--backoff 2 --jitter 0.5 --timeout PT1M --keep always --env A=1 --env B=x=y --cwd /tmp --label team=data "
        f"--stdin {tmp_path / 'in'} --idempotency-key key-1"
    )
    assert stellwerk(*START, *options.split(), "--", "true").exit_code == 0
    assert body(host) == {
        "scope": "demo",
        "name": "hello",
        "action": {"type": "command", "argv": ["true"]},
        "priority": 7,
        "delay": "5m",
        "live_key": "k",
        "parents": ["p1", "p2"],
        "when": "ended",
        "retry": {"max": 3, "delay": "10s", "backoff": 2.0, "jitter": 0.5},
        "timeout": "PT1M",
        "keep": "always",
        "env": {"A": "1", "B": "x=y"},
        "cwd": "/tmp",
        "labels": {"team": "data"},
        "stdin": "grüß\n",
    }
    assert host.asked[0].headers["idempotency-key"] == "key-1"


def test_no_retries_is_written_down(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("POST", "/api/runs", ADDED)
    stellwerk(*START, "--retries", "0", "--", "true")
    assert body(host)["retry"] == {"max": 0}


def test_a_due_time_keeps_its_moment(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("POST", "/api/runs", ADDED)
    stellwerk(*START, "--due", "2026-03-29T02:00:00+01:00", "--", "true")
    assert body(host)["due"] == "2026-03-29T01:00:00.000Z"


def test_input_that_is_no_text_is_wrong_usage(stellwerk: CommandLine, host: ScriptedHost, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"\xff")
    ran = stellwerk(*START, "--stdin", str(tmp_path / "in"), "--", "true")
    assert (ran.exit_code, host.asked) == (2, [])
    assert "not UTF-8" in ran.err


def test_a_taken_live_key_answers_with_the_live_run(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("POST", "/api/runs", Told({"id": "r0", "event_id": 50}))
    ran = stellwerk(*START, "--live-key", "k", "--", "true")
    assert (ran.exit_code, ran.out) == (0, "r0\n")
    assert "nothing was added" in ran.err


def test_json_is_the_hosts_answer(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("POST", "/api/runs", ADDED)
    ran = stellwerk(*START, "--json", "--", "true")
    assert (ran.document, ran.err) == ({"id": "r1", "event_id": 50}, "")


@pytest.mark.parametrize(("state", "exit_code"), [("succeeded", 0), ("failed", 5), ("cancelled", 5)])
def test_a_followed_run_prints_its_output_and_ends_as_the_run_did(
    stellwerk: CommandLine, host: ScriptedHost, state: str, exit_code: int
) -> None:
    host.on("POST", "/api/runs", ADDED)
    lines = (
        sent("line", line(1, "attempt 1 started", "system"), 1),
        sent("line", line(2, "out"), 2),
        sent("line", line(3, "oops", "stderr"), 3),
    )
    host.on("GET", "/api/runs/r1/logs", Told(chunks=(*lines, END)))
    host.on("GET", "/api/runs/r1", Told(a_run(state=state)))
    ran = stellwerk(*START, "--follow", "--", "true")
    assert (ran.exit_code, ran.out) == (exit_code, "out\n")
    assert ran.err.splitlines()[:3] == ["run r1 added", "attempt 1 started", "oops"]
    assert f"run r1 {state}" in ran.err.splitlines()[3]


def test_a_followed_run_as_json_is_lines_of_json(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("POST", "/api/runs", ADDED)
    host.on("GET", "/api/runs/r1/logs", Told(chunks=(sent("line", line(1, "a\x1b"), 1), END)))
    host.on("GET", "/api/runs/r1", Told(a_run()))
    ran = stellwerk(*START, "--follow", "--json", "--", "true")
    added, first, ended = ran.documents
    assert (added["id"], first["text"], ended["state"], ran.err) == ("r1", "a\x1b", "succeeded", "")


@pytest.mark.parametrize(("kind", "exit_code"), [("RunSucceeded", 0), ("RunFailed", 5), ("RunCancelled", 5)])
def test_a_run_that_keeps_nothing_may_be_gone_and_the_journal_knows_its_end(
    stellwerk: CommandLine, host: ScriptedHost, kind: str, exit_code: int
) -> None:
    host.on("POST", "/api/runs", ADDED)
    event = {"event_id": 60, "type": kind, "time": "t", "run": "r1", "key": "demo/hello"}
    host.on("GET", "/api/events", Told({"type": "NonEmpty", "events": [event], "last_event_id": 60}))
    ran = stellwerk(*START, "--follow", "--keep", "nothing", "--", "true")
    assert ran.exit_code == exit_code
    (asked,) = host.requests("/api/events")
    assert (asked.query["after"], asked.query["run"]) == (["50"], ["r1"])
