"""Scripts rely on the exit codes: 0 done, 1 refused, 2 usage, 3 no host, 4 no right, 5 the run failed."""

import pytest

from stellwerk.cli import main
from tests.unit.cli.conftest import CommandLine, ScriptedHost, Told, a_run

ERROR = {"message": "run nope is not known", "request_id": "r7"}


def test_an_answer_is_0(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("GET", "/api/runs/r1", Told(a_run()))
    ran = stellwerk("run", "r1")
    assert ran.exit_code == 0
    assert "demo" in ran.out


@pytest.mark.parametrize("status", [400, 404, 409, 413, 500, 503])
def test_a_refusal_is_1_and_says_what_the_host_said(stellwerk: CommandLine, host: ScriptedHost, status: int) -> None:
    host.on("GET", "/api/runs/nope", Told(ERROR, status=status))
    ran = stellwerk("run", "nope")
    assert (ran.exit_code, ran.out) == (1, "")
    assert "run nope is not known" in ran.err


def test_a_refusal_names_the_place_and_the_time_to_wait(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("GET", "/api/counts", Told({"message": "no", "where": "runs[3].due"}, status=400))
    assert "no (at runs[3].due)" in stellwerk("counts").err
    host.on("GET", "/api/counts", Told({"message": "too busy"}, status=503, headers={"Retry-After": "7"}))
    assert "Nothing was taken; try again in 7 s" in stellwerk("counts").err


@pytest.mark.parametrize(
    "arguments",
    [
        ("frob",),
        ("runs", "--frob"),
        ("runs", "--state", "frob"),
        ("runs", "--since", "yesterday"),
        ("runs", "--label", "team"),
        ("runs", "--watch", "--all"),
        ("run",),
        ("run", "a b"),
        ("run", ""),
        ("logs", "r1", "--stream", "x"),
        ("cancel",),
        ("cancel", "r1", "--scope", "s"),
        ("cancel", "r1", "--dry-run"),
        ("pause", "--name", "n"),
        ("events", "--after", "1", "--since", "1h"),
        ("events", "--limit", "0"),
        ("submit", "--name", "n", "--", "true"),
        ("submit", "--scope", "s", "--name", "n"),
        ("submit", "--scope", "s", "--name", "n", "--shell"),
        ("submit", "--scope", "s", "--name", "n", "--priority", "1001", "--", "true"),
        ("submit", "--scope", "s", "--name", "n", "--delay", "soon", "--", "true"),
        ("submit", "--scope", "s", "--name", "n", "--delay", "1", "--due", "2h", "--", "true"),
        ("submit", "--scope", "s", "--name", "n", "--when", "failed", "--", "true"),
        ("submit", "--scope", "s", "--name", "n", "--backoff", "2", "--", "true"),
        ("submit", "--scope", "s", "--name", "n", "--args", "[]", "--", "true"),
        ("submit", "--scope", "s", "--name", "n", "--python", "m:f", "--", "true"),
        ("submit", "--scope", "s", "--name", "n", "--python", "m:f", "--args", "{"),
        ("submit", "--scope", "s", "--name", "n", "--python", "m:f", "--args", "3"),
        ("submit", "--scope", "s", "--name", "n", "--idempotency-key", "a\nb", "--", "true"),
        ("up", "--port", "x"),
        ("store",),
    ],
)
def test_wrong_usage_is_2_and_asks_no_host(
    stellwerk: CommandLine, host: ScriptedHost, arguments: tuple[str, ...]
) -> None:
    ran = stellwerk(*arguments)
    assert (ran.exit_code, host.asked) == (2, [])
    assert "Usage: stellwerk" in ran.err


def test_no_host_is_3_and_says_how_to_start_one(nowhere: CommandLine) -> None:
    ran = nowhere("runs", "--url", "http://127.0.0.1:1")
    assert ran.exit_code == 3
    assert "no host answers at http://127.0.0.1:1 (connection refused)" in ran.err
    assert "stellwerk up" in ran.err


@pytest.mark.parametrize(
    "told",
    [
        Told(text="<html>"),
        Told(status=302, headers={"Location": "http://elsewhere.example/"}),
        Told(status=502, text="bad gateway"),
        Told({"counts": {}}, is_cut=True),
        Told({"hello": "world"}),
        Told([1]),
    ],
)
def test_something_else_than_a_host_is_3(stellwerk: CommandLine, host: ScriptedHost, told: Told) -> None:
    host.on("GET", "/api/counts", told)
    assert stellwerk("counts").exit_code == 3


def test_a_post_without_an_answer_says_that_its_effect_is_not_known(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("POST", "/api/runs/r1/cancel", Told({"id": "r1"}, is_cut=True))
    ran = stellwerk("cancel", "r1")
    assert ran.exit_code == 3
    assert "not known" in ran.err


@pytest.mark.parametrize("status", [401, 403])
def test_no_right_is_4_and_names_the_token_but_not_its_secret(
    stellwerk: CommandLine, host: ScriptedHost, status: int
) -> None:
    host.on("GET", "/api/counts", Told({"message": "viewers may not do this"}, status=status))
    ran = stellwerk("counts")
    assert ran.exit_code == 4
    assert "STELLWERK_TOKEN" in ran.err
    assert "swk_test" not in ran.err


def test_windows_is_refused_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["runs"], platform="win32") == 1
    assert "does not run on Windows" in capsys.readouterr().err


def test_a_text_of_the_host_cannot_drive_the_terminal(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("GET", "/api/counts", Told({"message": "bad \x1b[2J"}, status=400))
    assert "bad ␛[2J" in stellwerk("counts").err


@pytest.mark.parametrize(
    ("status", "state", "exit_code"), [(200, "ok", 0), (200, "degraded", 0), (503, "foreign store", 1)]
)
def test_health_needs_no_token_and_tells_its_state(
    stellwerk: CommandLine, host: ScriptedHost, status: int, state: str, exit_code: int
) -> None:
    host.on("GET", "/health", Told({"state": state, "durability": "D3", "degraded": []}, status=status))
    ran = stellwerk("health", "--json")
    assert (ran.exit_code, ran.document["state"]) == (exit_code, state)
    assert "authorization" not in host.asked[0].headers
