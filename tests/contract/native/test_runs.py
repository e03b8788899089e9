"""Runs: look, list, count, edit, cancel, rerun, in bulk, and why."""

from __future__ import annotations

from typing import Any

import pytest

from stellwerk.core.run import Failed, Succeeded
from stellwerk.core.times import show_time
from tests.contract.native.rig import RUN, Host, assert_problem

ALWAYS = {"id", "scope", "name", "state", "attempt", "priority", "created_at", "parents", "labels", "action", "changed"}


async def test_a_new_run_shows_what_was_asked_for_and_nothing_that_is_absent(host: Host) -> None:
    run_id = await host.submit(labels={"team": "data"})
    reply = await host.ask("GET", f"/api/runs/{run_id}")
    assert reply.status == 200
    shown = reply.json
    assert set(shown) == {*ALWAYS, "event_id"}
    assert (shown["id"], shown["scope"], shown["name"], shown["state"]) == (run_id, "shop", "sync", "ready")
    assert (shown["attempt"], shown["priority"], shown["parents"]) == (0, 100, [])
    assert shown["labels"] == {"team": "data"}
    assert shown["action"] == {"type": "command", "argv": ["true"]}
    assert shown["created_at"].endswith("Z")
    assert shown["event_id"] == host.kernel.feed.last


async def test_a_python_action_shows_its_function_and_isolation_but_no_arguments(host: Host) -> None:
    run_id = await host.submit(action={"type": "python", "function": "m:f", "args": ["secret"]})
    shown = (await host.ask("GET", f"/api/runs/{run_id}")).json
    assert shown["action"] == {"type": "python", "function": "m:f", "isolation": "process"}


@pytest.mark.parametrize(("result", "value"), [(b"null", None), (b'{"a":[1,2.5,"\\u00e4"]}', {"a": [1, 2.5, "ä"]})])
async def test_a_succeeded_run_shows_its_result_as_json(host: Host, result: bytes, value: Any) -> None:
    run = await host.start(await host.submit())
    await host.finish(run, Succeeded(result, 0))
    shown = (await host.ask("GET", f"/api/runs/{run.id}")).json
    assert (shown["state"], shown["result"], shown["exit_code"], shown["attempt"]) == ("succeeded", value, 0, 1)
    assert shown["started_at"] <= shown["ended_at"]
    assert "error" not in shown


async def test_a_timeout_is_failed_with_reason_timeout(host: Host) -> None:
    run = await host.start(await host.submit())
    await host.finish(run, Failed("timeout", "it took longer than 1s"))
    shown = (await host.ask("GET", f"/api/runs/{run.id}")).json
    assert (shown["state"], shown["reason"], shown["error"]) == ("failed", "timeout", "it took longer than 1s")


async def test_a_child_that_can_never_start_is_cancelled_with_a_reason(host: Host) -> None:
    parent = await host.submit()
    child = await host.submit(parents=[parent])
    await host.ask("POST", f"/api/runs/{parent}/cancel")
    shown = (await host.ask("GET", f"/api/runs/{child}")).json
    assert shown["state"] == "cancelled"
    assert parent in shown["reason"]


async def test_an_unknown_run_is_a_404_everywhere(host: Host) -> None:
    for method, path in (
        ("GET", "/api/runs/nobody"),
        ("GET", "/api/runs/nobody/logs"),
        ("GET", "/api/runs/nobody/why"),
        ("POST", "/api/runs/nobody/cancel"),
        ("POST", "/api/runs/nobody/rerun"),
    ):
        assert_problem(await host.ask(method, path), 404)
    assert_problem(await host.ask("PATCH", "/api/runs/nobody", {"priority": 1}), 404)
    stream = await host.ask("GET", "/api/runs/nobody/logs", headers={"Accept": "text/event-stream"})
    assert_problem(stream, 404)


# -- lists ------------------------------------------------------------------------------------------------------------


async def test_a_list_is_newest_first_and_comes_in_pages(host: Host) -> None:
    ids = [await host.submit() for _ in range(5)]
    first = (await host.ask("GET", "/api/runs?limit=2")).json
    assert set(first) == {"runs", "cursor", "event_id"}
    assert [run["id"] for run in first["runs"]] == ids[:2:-1]
    await host.submit()  # a run that comes meanwhile does not move the pages
    second = (await host.ask("GET", f"/api/runs?limit=2&cursor={first['cursor']}")).json
    third = (await host.ask("GET", f"/api/runs?limit=2&cursor={second['cursor']}")).json
    assert [run["id"] for run in second["runs"] + third["runs"]] == ids[2::-1]
    assert third["cursor"] is None
    # All pages are true at the stamp of the first, with the events after it.
    assert first["event_id"] == second["event_id"] == third["event_id"] < host.kernel.feed.last
    assert all(set(run) == ALWAYS for run in first["runs"])


async def test_filters_choose(host: Host) -> None:
    before = show_time(host.env.now_ms() - 1_000)
    one = await host.submit(name="one", labels={"team": "a=b"})
    two = await host.submit(scope="other/place", delay="1h")
    later = show_time(host.env.now_ms() + 1_000).replace("Z", "+00:00")

    async def ids(query: str) -> list[str]:
        reply = await host.ask("GET", f"/api/runs?{query}")
        assert reply.status == 200, reply
        return [run["id"] for run in reply.json["runs"]]

    assert await ids("scope=other/place") == [two]
    assert await ids("name=one") == [one]
    assert await ids("state=waiting") == [two]
    assert await ids("state=waiting,ready") == [two, one]
    assert await ids("label=team=a=b") == [one]
    assert await ids("label=team=other") == []
    assert await ids(f"since={before}&until={later}") == [two, one]
    assert await ids(f"until={before}") == []


async def test_counts_name_every_state(host: Host) -> None:
    await host.submit()
    reply = (await host.ask("GET", "/api/counts")).json
    expected = {"waiting": 0, "ready": 1, "running": 0, "succeeded": 0, "failed": 0, "cancelled": 0}
    assert reply == {"counts": expected, "event_id": host.kernel.feed.last}


# -- changes ----------------------------------------------------------------------------------------------------------


async def test_priority_and_due_time_can_be_changed_while_it_waits(host: Host) -> None:
    run_id = await host.submit()
    due = show_time(host.env.now_ms() + 60_000)
    reply = await host.ask("PATCH", f"/api/runs/{run_id}", {"priority": 7, "due": due})
    assert (reply.status, reply.json) == (200, {"id": run_id, "event_id": host.kernel.feed.last})
    shown = (await host.ask("GET", f"/api/runs/{run_id}")).json
    assert (shown["priority"], shown["due_at"], shown["state"]) == (7, due, "waiting")


async def test_a_running_run_cannot_be_edited_and_an_edit_must_say_something(host: Host) -> None:
    run = await host.start(await host.submit())
    assert_problem(await host.ask("PATCH", f"/api/runs/{run.id}", {"priority": 7}), 409)
    assert_problem(await host.ask("PATCH", f"/api/runs/{run.id}", {}), 400)
    assert_problem(await host.ask("PATCH", f"/api/runs/{run.id}", {"name": "x"}), 400)
    assert_problem(await host.ask("PATCH", f"/api/runs/{run.id}", {"priority": 0}), 400)


async def test_cancel_ends_a_waiting_run_and_refuses_an_ended_one(host: Host) -> None:
    run_id = await host.submit()
    reply = await host.ask("POST", f"/api/runs/{run_id}/cancel")
    assert (reply.status, reply.json["id"]) == (200, run_id)
    assert (await host.ask("GET", f"/api/runs/{run_id}")).json["state"] == "cancelled"
    assert_problem(await host.ask("POST", f"/api/runs/{run_id}/cancel"), 409)


async def test_cancel_of_a_running_run_asks_for_its_end(host: Host) -> None:
    run = await host.start(await host.submit())
    assert (await host.ask("POST", f"/api/runs/{run.id}/cancel")).status == 200
    assert (await host.ask("POST", f"/api/runs/{run.id}/cancel")).status == 200
    types = [reason["type"] for reason in (await host.ask("GET", f"/api/runs/{run.id}/why")).json["reasons"]]
    assert types == ["Running", "Stopping"]


async def test_the_actor_of_an_event_is_the_token(host: Host) -> None:
    secret = await host.secret("operator")
    run_id = (await host.ask("POST", "/api/runs", RUN, token=secret)).json["id"]
    events = (await host.ask("GET", f"/api/events?run={run_id}")).json["events"]
    token = next(token for token in host.tokens.all() if token.role == "operator")
    assert events[0]["actor"] == f"token:{token.id}"


async def test_rerun_is_a_new_run_that_names_the_old_one(host: Host) -> None:
    run = await host.start(await host.submit(priority=7))
    assert_problem(await host.ask("POST", f"/api/runs/{run.id}/rerun"), 409)
    await host.finish(run, Failed("exit", exit_code=3))
    reply = await host.ask("POST", f"/api/runs/{run.id}/rerun")
    assert reply.status == 201
    shown = (await host.ask("GET", f"/api/runs/{reply.json['id']}")).json
    assert (shown["rerun_of"], shown["priority"], shown["state"]) == (run.id, 7, "ready")


async def test_rerun_of_a_run_whose_live_key_is_taken_answers_200_with_the_live_run(host: Host) -> None:
    run = await host.start(await host.submit(live_key="k"))
    await host.finish(run, Failed("exit"))
    live = await host.submit(live_key="k")
    reply = await host.ask("POST", f"/api/runs/{run.id}/rerun")
    assert (reply.status, reply.json["id"]) == (200, live)


async def test_an_empty_object_is_as_good_as_no_body_and_anything_else_is_refused(host: Host) -> None:
    run_id = await host.submit()
    assert_problem(await host.ask("POST", f"/api/runs/{run_id}/cancel", {"reason": "x"}), 400)
    assert (await host.ask("POST", f"/api/runs/{run_id}/cancel", {})).status == 200


# -- many -------------------------------------------------------------------------------------------------------------


async def test_a_bulk_verb_without_a_filter_is_refused(host: Host) -> None:
    for path in ("/api/runs/cancel", "/api/runs/cancel?dry_run=true", "/api/runs/rerun"):
        assert_problem(await host.ask("POST", path), 400)
    assert_problem(await host.ask("POST", "/api/runs/cancel?scope="), 400)


async def test_a_dry_run_says_what_would_be_done_and_does_nothing(host: Host) -> None:
    ids = [await host.submit() for _ in range(2)]
    await host.submit(scope="other")
    reply = await host.ask("POST", "/api/runs/cancel?scope=shop&dry_run=true")
    assert reply.status == 200
    assert (reply.json["count"], sorted(reply.json["ids"])) == (2, sorted(ids))
    assert set(reply.json) == {"count", "ids", "event_id"}
    assert (await host.ask("GET", "/api/counts")).json["counts"]["cancelled"] == 0


async def test_bulk_cancel_and_rerun_do_what_the_filters_say(host: Host) -> None:
    ids = [await host.submit() for _ in range(3)]
    other = await host.submit(scope="other")
    reply = (await host.ask("POST", "/api/runs/cancel?scope=shop&dry_run=false")).json
    assert (reply["count"], sorted(reply["ids"])) == (3, sorted(ids))
    assert (await host.ask("GET", f"/api/runs/{other}")).json["state"] == "ready"
    again = (await host.ask("POST", "/api/runs/rerun?state=cancelled")).json
    assert (again["count"], sorted(again["ids"])) == (3, sorted(ids))
    assert (await host.ask("GET", "/api/counts")).json["counts"]["ready"] == 4


async def test_more_than_a_thousand_runs_are_a_chore(host: Host) -> None:
    await host.ask("POST", "/api/runs", [RUN] * 1_500)
    reply = (await host.ask("POST", "/api/runs/cancel?state=ready")).json
    assert (reply["count"], len(reply["ids"])) == (1_500, 1_000)
    assert isinstance(reply["chore"], str)


# -- why --------------------------------------------------------------------------------------------------------------


async def test_why_answers_typed_reasons_with_evidence_and_time(host: Host) -> None:
    due = show_time(host.env.now_ms() + 60_000)
    parent = await host.submit()
    run_id = await host.submit(parents=[parent], due=due)
    await host.ask("PUT", "/api/gates", {"kind": "pause", "scope": "shop", "reason": "moving house"})
    reply = await host.ask("GET", f"/api/runs/{run_id}/why")
    assert set(reply.json) == {"reasons", "event_id"}
    found = {reason["type"]: reason for reason in reply.json["reasons"]}
    assert set(found) == {"WaitingForParents", "NotDue", "Paused"}
    assert found["NotDue"]["until"] == due
    assert "moving house" in found["Paused"]["message"]
    assert found["WaitingForParents"]["evidence"]["parents"][0]["id"] == parent
    assert all({"type", "message", "evidence"} <= set(reason) for reason in found.values())


async def test_why_of_an_ended_run_says_so(host: Host) -> None:
    run_id = await host.submit()
    await host.ask("POST", f"/api/runs/{run_id}/cancel")
    reasons = (await host.ask("GET", f"/api/runs/{run_id}/why")).json["reasons"]
    assert [reason["type"] for reason in reasons] == ["Ended"]
