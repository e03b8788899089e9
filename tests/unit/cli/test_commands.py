"""Commands that change something: by id, in bulk with a question first, gates, and the store."""

from tests.unit.cli.conftest import CommandLine, ScriptedHost, Told

CLASH = Told({"message": "run r2 has ended"}, status=409)


def test_runs_are_cancelled_one_by_one(stellwerk: CommandLine, host: ScriptedHost) -> None:
    for run_id in ("r1", "r2"):
        host.on("POST", f"/api/runs/{run_id}/cancel", Told({"id": run_id, "event_id": 1}))
    ran = stellwerk("cancel", "r1", "r2")
    assert (ran.exit_code, ran.out) == (0, "r1 cancelled\nr2 cancelled\n")


def test_one_that_is_refused_does_not_keep_the_others_back(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("POST", "/api/runs/r2/cancel", CLASH)
    host.on("POST", "/api/runs/r3/cancel", Told(status=202))
    ran = stellwerk("cancel", "r2", "r3")
    assert (ran.exit_code, ran.out) == (1, "r3 cancelled\n")
    assert "r2: run r2 has ended" in ran.err


def test_a_rerun_prints_the_new_id(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("POST", "/api/runs/r1/rerun", Told({"id": "r9"}, status=201))
    assert stellwerk("rerun", "r1").out == "r9\n"
    assert stellwerk("rerun", "r1", "--json").document == {"id": "r9"}


BULK = Told({"count": 2, "ids": ["r1", "r2"], "event_id": 5})


def test_a_dry_run_only_says_which(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("POST", "/api/runs/cancel", BULK)
    ran = stellwerk("cancel", "--scope", "demo", "--dry-run")
    assert (ran.exit_code, ran.out) == (0, "r1\nr2\n")
    assert [asked.query for asked in host.asked] == [{"scope": ["demo"], "dry_run": ["true"]}]


def test_in_bulk_nothing_is_done_without_a_yes(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("POST", "/api/runs/cancel", BULK)
    ran = stellwerk("cancel", "--scope", "demo")
    assert ran.exit_code == 2
    assert "--yes" in ran.err
    assert [asked.query.get("dry_run") for asked in host.asked] == [["true"]]


def test_with_yes_it_is_done_at_once(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("POST", "/api/runs/rerun", BULK)
    ran = stellwerk("rerun", "--state", "failed", "--yes")
    assert (ran.exit_code, ran.out) == (0, "2 runs run again\n")
    assert [asked.query for asked in host.asked] == [{"state": ["failed"]}]


def test_a_pause_is_put_and_taken_away_at_its_place(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("PUT", "/api/gates", Told({"event_id": 5}))
    host.on("DELETE", "/api/gates", Told(status=204))
    until = "2030-01-01T00:00:00.000Z"
    ran = stellwerk("pause", "--scope", "demo", "--name", "hello", "--reason", "disk", "--until", until)
    assert ran.out == f"job demo/hello paused until {until}\n"
    assert host.asked[0].body == {
        "kind": "pause",
        "scope": "demo",
        "name": "hello",
        "reason": "disk",
        "until": until,
    }
    assert stellwerk("unpause", "--scope", "demo").out == "scope demo unpaused\n"
    assert host.asked[1].query == {"kind": ["pause"], "scope": ["demo"]}


def test_a_block_is_a_gate_of_its_own(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("PUT", "/api/gates", Told({"event_id": 5}))
    assert stellwerk("pause", "--block").out == "everything blocked\n"
    assert host.asked[0].body == {"kind": "block"}


def test_a_store_is_adopted_only_on_purpose(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("POST", "/api/store/adopt", Told({"epoch": "e1", "event_id": 5}))
    assert (stellwerk("store", "adopt").exit_code, host.asked) == (2, [])
    ran = stellwerk("store", "adopt", "--yes")
    assert (ran.exit_code, ran.out) == (0, "the store is adopted; its epoch is e1\n")
