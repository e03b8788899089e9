"""Lists and details: what is asked for, how it is shown, and the host's own JSON."""

import time

import pytest

from stellwerk.cli import follow
from stellwerk.core.times import parse_time
from tests.unit.cli.conftest import CommandLine, ScriptedHost, Told, a_run

RUNS = "/api/runs"


def test_filters_become_query_parameters(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("GET", RUNS, Told({"runs": [], "cursor": None, "event_id": 1}))
    flags = "--state failed --scope demo --name hello --label b=x=y --until 2026-01-01T00:00:00+01:00"
    assert stellwerk("runs", *flags.split()).exit_code == 0
    assert host.asked[0].query == {
        "state": ["failed"],
        "scope": ["demo"],
        "name": ["hello"],
        "label": ["b=x=y"],
        "until": ["2025-12-31T23:00:00.000Z"],
        "limit": ["50"],
    }


def test_a_duration_is_a_moment_back_from_now(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("GET", RUNS, Told({"runs": [], "cursor": None, "event_id": 1}))
    stellwerk("runs", "--since", "2h")
    since_ms = parse_time(host.asked[0].query["since"][0], "since")
    assert abs(time.time() * 1_000 - 7_200_000 - since_ms) < 60_000


def test_without_a_terminal_a_list_is_plain_aligned_text(stellwerk: CommandLine, host: ScriptedHost) -> None:
    runs = [
        a_run(id="long-id", state="failed", reason="exit", error="boom\nsecond \x1b[31mline"),
        a_run(ended_at=None),
    ]
    host.on("GET", RUNS, Told({"runs": runs, "cursor": None, "event_id": 1}))
    assert stellwerk("runs").out == (
        "ID       STATE      JOB         PRIORITY  ATTEMPT  ADDED                     TOOK  REASON\n"
        "long-id  failed     demo/hello  100       1        2026-01-01T00:00:00.000Z  2s    "
        "exit: boom second ␛[31mline\n"
        "r1       succeeded  demo/hello  100       1        2026-01-01T00:00:00.000Z  -     -\n"
    )


def test_more_than_a_page_is_read_by_cursor(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on(
        "GET",
        RUNS,
        Told({"runs": [a_run(id="a")], "cursor": "c1", "event_id": 9}),
        Told({"runs": [a_run(id="b")], "cursor": None, "event_id": 10}),
    )
    document = stellwerk("runs", "--all", "--json").document
    assert ([run["id"] for run in document["runs"]], document["cursor"], document["event_id"]) == (
        ["a", "b"],
        None,
        9,
    )
    assert [asked.query.get("cursor") for asked in host.asked] == [None, ["c1"]]


def test_a_list_stops_at_its_limit_and_says_so(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("GET", RUNS, Told({"runs": [a_run()], "cursor": "c1", "event_id": 9}))
    ran = stellwerk("runs", "--limit", "1")
    assert len(host.asked) == 1
    assert "--all shows more" in ran.err


def test_a_watched_list_shows_what_changed(
    stellwerk: CommandLine, host: ScriptedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "WATCH_PAUSE_S", 0)
    same = a_run(id="same")
    host.on(
        "GET",
        RUNS,
        Told({"runs": [a_run(state="running"), same], "cursor": None, "event_id": 5}),
        Told({"runs": [a_run(), same], "cursor": None, "event_id": 6}),
        Told({"message": "enough"}, status=403),
    )
    host.on("GET", "/api/events", Told({"type": "Empty", "last_event_id": 6}))
    ran = stellwerk("runs", "-f", "--json")
    assert [(run["id"], run["state"]) for run in ran.documents] == [
        ("same", "succeeded"),
        ("r1", "running"),
        ("r1", "succeeded"),
    ]
    assert [asked.query["after"] for asked in host.requests("/api/events")] == [["5"], ["6"]]


def test_one_run_is_shown_field_by_field(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("GET", "/api/runs/a:b", Told(a_run(id="a:b", error="one\ntwo\x07")))
    out = stellwerk("run", "a:b").out
    assert "state       succeeded\n" in out
    assert "error       one\n            two␇\n" in out
    assert "parents" not in out


def test_why_lists_the_reasons(stellwerk: CommandLine, host: ScriptedHost) -> None:
    reason = {"type": "Paused", "message": "paused at scope:demo: disk", "evidence": {}, "until": "soon"}
    host.on("GET", "/api/runs/r1/why", Told({"reasons": [reason], "event_id": 3}))
    assert stellwerk("why", "r1").out == "WHY     UNTIL  BECAUSE\nPaused  soon   paused at scope:demo: disk\n"
    assert stellwerk("why", "r1", "--json").document["reasons"] == [reason]


def test_gates_and_counts_are_tables(stellwerk: CommandLine, host: ScriptedHost) -> None:
    gates = [{"kind": "pause", "scope": "demo", "name": "hello", "reason": "why not"}, {"kind": "block"}]
    host.on("GET", "/api/gates", Told({"gates": gates, "event_id": 3}))
    host.on("GET", "/api/counts", Told({"counts": {"ready": 2, "failed": 0}, "event_id": 3}))
    assert stellwerk("gates").out == (
        "KIND   WHAT        UNTIL  BY  REASON\npause  demo/hello  -      -   why not\nblock  everything  -      -   -\n"
    )
    assert stellwerk("counts").out == "STATE   RUNS\nready   2\nfailed  0\n"


@pytest.mark.parametrize(
    ("arguments", "path", "document"),
    [
        (("run", "r1"), "/api/runs/r1", {"id": "r1", "odd": "\x1b ü \u2028"}),
        (("why", "r1"), "/api/runs/r1/why", {"reasons": []}),
        (("gates",), "/api/gates", {"gates": []}),
        (("counts",), "/api/counts", {"counts": {}}),
        (("health",), "/health", {"state": "ok"}),
        (("events", "--after", "1"), "/api/events", {"type": "Torn", "oldest": 3, "last_event_id": 4}),
    ],
)
def test_json_is_the_hosts_own_document_on_one_line(
    stellwerk: CommandLine, host: ScriptedHost, arguments: tuple[str, ...], path: str, document: object
) -> None:
    host.on("GET", path, Told(document))
    ran = stellwerk(*arguments, "--json")
    assert (ran.exit_code, ran.document, ran.out.count("\n")) == (0, document, 1)
