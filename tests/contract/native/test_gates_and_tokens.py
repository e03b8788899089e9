"""Gates, tokens, health, metrics, and the adoption of a store."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stellwerk.core.times import show_time
from tests.contract.native.rig import ADMIN, RUN, Host, assert_problem

# -- gates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "key"),
    [({}, "*"), ({"scope": "a/b"}, "scope:a/b"), ({"scope": "a/b", "name": "c"}, "job:a/b/c")],
)
async def test_a_gate_is_put_listed_and_taken_away(host: Host, place: dict[str, str], key: str) -> None:
    until = show_time(host.env.now_ms() + 60_000)
    put = await host.ask("PUT", "/api/gates", {"kind": "pause", "reason": "because", "until": until, **place})
    assert put.status == 200
    assert put.json["event_id"] == host.kernel.feed.last
    (shown,) = (await host.ask("GET", "/api/gates")).json["gates"]
    expected = {"kind": "pause", "key": key, "reason": "because", "until": until, **place}
    assert expected.items() <= shown.items()
    assert shown["actor"] == "token:admin"
    query = "&".join(f"{name}={value}" for name, value in {"kind": "pause", **place}.items())
    gone = await host.ask("DELETE", f"/api/gates?{query}")
    assert (gone.status, gone.json) == (200, {"event_id": host.kernel.feed.last})
    assert (await host.ask("GET", "/api/gates")).json == {"gates": [], "event_id": host.kernel.feed.last}
    assert_problem(await host.ask("DELETE", f"/api/gates?{query}"), 404)


async def test_a_gate_is_told_in_the_journal(host: Host) -> None:
    await host.ask("PUT", "/api/gates", {"kind": "block", "scope": "shop"})
    await host.ask("DELETE", "/api/gates?kind=block&scope=shop")
    events = (await host.ask("GET", "/api/events")).json["events"]
    assert [(event["type"], event["kind"]) for event in events] == [("GateShut", "block"), ("GateOpened", "block")]


async def test_an_operator_pauses_and_only_an_admin_blocks(host: Host) -> None:
    operator = await host.secret("operator")
    assert (await host.ask("PUT", "/api/gates", {"kind": "pause"}, token=operator)).status == 200
    assert_problem(await host.ask("PUT", "/api/gates", {"kind": "block"}, token=operator), 403)
    assert (await host.ask("PUT", "/api/gates", {"kind": "block"})).status == 200
    assert_problem(await host.ask("DELETE", "/api/gates?kind=block", token=operator), 403)
    assert (await host.ask("DELETE", "/api/gates?kind=pause", token=operator)).status == 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"kind": "hold"},
        {"kind": "pause", "name": "x"},
        {"kind": "pause", "scope": "a b"},
        {"kind": "pause", "scope": "a", "name": "b/c"},
        {"kind": "pause", "until": "soon"},
        {"kind": "pause", "until": "2001-01-01T00:00:00Z"},
        {"kind": "pause", "reason": "a\nb"},
        {"kind": "pause", "reason": "a" * 501},
        {"kind": "pause", "floor": 7},
        [],
        "pause",
        None,
    ],
)
async def test_a_wrong_gate_is_refused(host: Host, body: Any) -> None:
    assert_problem(await host.ask("PUT", "/api/gates", raw=json.dumps(body).encode()), 400)


@pytest.mark.parametrize("query", ["", "kind=hold", "kind=pause&name=x", "kind=pause&scope=%00", "kind=pause&x=1"])
async def test_a_wrong_opening_is_refused(host: Host, query: str) -> None:
    assert_problem(await host.ask("DELETE", f"/api/gates?{query}"), 400)


# -- tokens -----------------------------------------------------------------------------------------------------------


async def test_a_token_is_shown_once_works_and_can_be_revoked(host: Host) -> None:
    made = await host.ask("POST", "/api/tokens", {"name": "page", "role": "viewer"})
    assert made.status == 201
    secret = made.json["token"]
    assert secret.startswith("swk_")
    assert (await host.ask("GET", "/api/runs", token=secret)).status == 200
    listed = await host.ask("GET", "/api/tokens")
    assert secret not in listed.body.decode()
    (shown,) = listed.json["tokens"]
    assert (shown["name"], shown["role"]) == ("page", "viewer")
    assert shown["last_used_at"]
    gone = await host.ask("DELETE", f"/api/tokens?id={shown['id']}")
    assert (gone.status, set(gone.json)) == (200, {"event_id"})
    assert_problem(await host.ask("GET", "/api/runs", token=secret), 401)
    assert_problem(await host.ask("DELETE", f"/api/tokens/{shown['id']}"), 404)


async def test_a_token_may_be_revoked_by_path_and_may_expire(host: Host) -> None:
    expires = show_time(host.env.now_ms() + 3_600_000)
    made = (await host.ask("POST", "/api/tokens", {"name": "x", "role": "admin", "expires": expires})).json
    assert made["expires_at"] == expires
    assert (await host.ask("DELETE", f"/api/tokens/{made['id']}")).status == 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": "x"},
        {"name": "x", "role": "king"},
        {"name": "", "role": "viewer"},
        {"name": "a\x00", "role": "viewer"},
        {"name": "x", "role": "viewer", "expires": "2001-01-01T00:00:00Z"},
        {"name": "x", "role": "viewer", "sha256": "x"},
    ],
)
async def test_a_wrong_token_is_refused(host: Host, body: Any) -> None:
    assert_problem(await host.ask("POST", "/api/tokens", body), 400)


async def test_the_hosts_own_token_cannot_be_revoked(host: Host) -> None:
    assert_problem(await host.ask("DELETE", "/api/tokens/admin"), 404)
    assert (await host.ask("GET", "/api/runs", token=ADMIN)).status == 200


# -- the host ---------------------------------------------------------------------------------------------------------


async def test_health_is_open_and_says_503_when_the_host_cannot_work(host: Host) -> None:
    reply = await host.ask("GET", "/health", token=None)
    assert (reply.status, reply.json) == (200, host.health)
    host.health = {**host.health, "state": "degraded", "degraded": ["no keeper"]}
    assert (await host.ask("GET", "/health", token=None)).status == 200
    host.health = {**host.health, "state": "stopping"}
    reply = await host.ask("GET", "/health", token=None)
    assert (reply.status, reply.headers["retry-after"]) == (503, "5")


async def test_metrics_tell_runs_and_requests(host: Host) -> None:
    await host.submit()
    reply = await host.ask("GET", "/metrics", token=await host.secret("viewer"))
    assert reply.headers["content-type"].startswith("text/plain")
    text = reply.body.decode()
    assert 'stellwerk_runs{state="ready"} 1.0' in text
    assert 'stellwerk_queue_runs{queue="default",state="ready"} 1.0' in text
    assert 'stellwerk_http_requests_total{method="POST",path="/api/runs",status="201"} 1.0' in text
    assert "process_cpu_seconds_total" in text


async def test_a_foreign_store_answers_503_until_it_is_adopted(host: Host) -> None:
    assert_problem(await host.ask("POST", "/api/store/adopt"), 409)
    host.store.pretend_foreign("another epoch")
    refused = await host.ask("POST", "/api/runs", RUN)
    assert_problem(refused, 503)
    assert int(refused.headers["retry-after"]) >= 1
    adopted = await host.ask("POST", "/api/store/adopt")
    assert adopted.status == 200
    assert set(adopted.json) == {"epoch", "event_id"}
    assert (await host.ask("POST", "/api/runs", RUN)).status == 201
