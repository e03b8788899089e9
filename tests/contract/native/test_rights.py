"""Who may do what: every route against every role, by the route table itself. A route without an entry fails."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest

from stellwerk.kernel.tokens import Role
from stellwerk.web.answer import Answer, json_answer
from stellwerk.web.app import build_app
from stellwerk.web.call import Call
from stellwerk.web.routes import Route
from tests.contract.native.rig import ADMIN, RUN, Host, a_host, assert_problem, at

ROLES: tuple[Role, ...] = ("viewer", "operator", "admin")

# What each route needs. Written by hand and not read from the routes, so that a changed role is seen.
NEEDED: dict[tuple[str, str], str] = {
    ("POST", "/api/runs"): "operator",
    ("GET", "/api/runs"): "viewer",
    ("GET", "/api/counts"): "viewer",
    ("POST", "/api/runs/cancel"): "operator",
    ("POST", "/api/runs/rerun"): "operator",
    ("GET", "/api/runs/{id}"): "viewer",
    ("PATCH", "/api/runs/{id}"): "operator",
    ("POST", "/api/runs/{id}/cancel"): "operator",
    ("POST", "/api/runs/{id}/rerun"): "operator",
    ("GET", "/api/runs/{id}/why"): "viewer",
    ("GET", "/api/runs/{id}/logs"): "viewer",
    ("GET", "/api/events"): "viewer",
    ("PUT", "/api/gates"): "operator",
    ("DELETE", "/api/gates"): "operator",
    ("GET", "/api/gates"): "viewer",
    ("POST", "/api/tokens"): "admin",
    ("GET", "/api/tokens"): "admin",
    ("DELETE", "/api/tokens"): "admin",
    ("DELETE", "/api/tokens/{id}"): "admin",
    ("GET", "/health"): "open",
    ("GET", "/metrics"): "viewer",
    ("POST", "/api/store/adopt"): "admin",
    ("GET", "/openapi.json"): "viewer",
    ("GET", "/docs"): "viewer",
}


async def test_the_table_names_every_route(host: Host) -> None:
    assert {(route.method, route.path) for route in host.app.routes} == set(NEEDED)


@pytest.mark.parametrize(("method", "path"), NEEDED)
async def test_a_route_answers_its_role_and_refuses_the_others(host: Host, method: str, path: str) -> None:
    needed = NEEDED[method, path]
    real_path = path.replace("{id}", "x")
    nobody = await host.ask(method, real_path, token=None)
    wrong = await host.ask(method, real_path, token="swk_x_wrong")
    if needed == "open":
        assert nobody.status == wrong.status == 200
        return
    assert_problem(nobody, 401)
    assert_problem(wrong, 401)
    asked_for = "Basic" if path in ("/docs", "/openapi.json") else "Bearer"
    assert nobody.headers["www-authenticate"].startswith(asked_for)
    for role in ROLES:
        reply = await host.ask(method, real_path, token=await host.secret(role))
        if ROLES.index(role) >= ROLES.index(needed):
            assert reply.status not in (401, 403) and reply.status < 500, (role, reply)
        else:
            assert_problem(reply, 403)


@pytest.mark.parametrize(("path", "status"), [("/docs", 200), ("/openapi.json", 200), ("/api/runs", 401)])
async def test_a_browser_may_send_the_token_as_a_password_for_the_description_only(
    host: Host, path: str, status: int
) -> None:
    credentials = base64.b64encode(f"me:{await host.secret('viewer')}".encode()).decode()
    reply = await host.ask("GET", path, token=None, headers={"authorization": f"Basic {credentials}"})
    assert reply.status == status


@pytest.mark.parametrize("credentials", ["", "x", "%%%", "bWU=", "bWU6d3Jvbmc="])
async def test_a_browser_with_a_wrong_password_is_asked_again(host: Host, credentials: str) -> None:
    reply = await host.ask("GET", "/docs", token=None, headers={"authorization": f"Basic {credentials}"})
    assert_problem(reply, 401)
    assert reply.headers["www-authenticate"].startswith("Basic")


async def test_a_refused_request_changes_nothing(host: Host) -> None:
    viewer = await host.secret("viewer")
    last = host.kernel.feed.last
    await host.ask("POST", "/api/runs", RUN, token=viewer)
    await host.ask("POST", "/api/runs", RUN, token=None)
    await host.ask("PUT", "/api/gates", {"kind": "pause"}, token=viewer)
    assert host.kernel.feed.last == last


async def test_unknown_paths_and_methods_are_told_only_to_who_has_a_token(host: Host) -> None:
    for method, path in (("GET", "/"), ("GET", "/api/secret"), ("OPTIONS", "/api/runs"), ("TRACE", "/api/runs/x")):
        assert_problem(await host.ask(method, path, token=None), 401)
    assert_problem(await host.ask("GET", "/api/secret"), 404)
    for method, path in (("OPTIONS", "/api/runs"), ("DELETE", "/api/runs"), ("TRACE", "/api/runs"), ("HEAD", "/docs")):
        reply = await host.ask(method, path)
        assert_problem(reply, 405)
        assert "OPTIONS" not in reply.headers["allow"]
    reply = await host.ask("PUT", "/api/runs/x")
    assert_problem(reply, 405)
    assert set(reply.headers["allow"].split(", ")) == {"GET", "PATCH"}


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_open_means_the_one_route_and_method(host: Host, method: str) -> None:
    reply = await host.ask(method, "/health", token=None)
    assert reply.status == (200 if method == "GET" else 405)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {ADMIN}"},
        {"authorization": f"bearer {ADMIN}"},
        {"x-admin-token": ADMIN},
    ],
)
async def test_a_token_comes_by_either_header(host: Host, headers: dict[str, str]) -> None:
    assert (await host.ask("GET", "/api/counts", token=None, headers=headers)).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": ADMIN},
        {"authorization": f"Basic {ADMIN}"},
        {"authorization": f"Bearer {ADMIN} x"},
        {"authorization": f"Bearer {ADMIN}x"},
        {"authorization": "Bearer " + "a" * 10_000},
        {"authorization": "Bearer \xff\xfe"},
        {"x-admin-token": "wrong"},
        {"x-admin-token": ADMIN, "authorization": "Bearer wrong"},
        {"cookie": f"token={ADMIN}"},
    ],
)
async def test_anything_else_is_no_token(host: Host, headers: dict[str, str]) -> None:
    assert_problem(await host.ask("GET", "/api/counts", token=None, headers=headers), 401)


async def test_a_token_in_the_address_is_no_token(host: Host) -> None:
    assert_problem(await host.ask("GET", f"/api/counts?token={ADMIN}", token=None), 401)


async def test_an_expired_token_is_no_token(host: Host) -> None:
    _, secret, _ = await host.tokens.create("old", "admin", host.env.now_ms() - 1, "test")
    assert_problem(await host.ask("GET", "/api/counts", token=secret), 401)


# -- a route without a right cannot be made ---------------------------------------------------------------------------


async def nothing(call: Call) -> Answer:
    return json_answer({})


def test_a_route_must_name_a_role() -> None:
    fields: dict[str, Any] = {"about": "x", "answers": {200: ("x", None)}}
    with pytest.raises(TypeError):
        Route("GET", "/x", nothing, **fields)
    wrong: tuple[Any, ...] = ("", None, "king", "Viewer")
    for role in wrong:
        with pytest.raises(ValueError, match="role"):
            Route("GET", "/x", nothing, role=role, **fields)
    with pytest.raises(ValueError, match="open"):
        Route("GET", "/x", nothing, role="open", **fields)


async def test_two_routes_of_one_path_and_method_are_refused(host: Host) -> None:
    route = Route("GET", "/x", nothing, role="admin", about="x", answers={200: ("x", None)})
    with pytest.raises(ValueError, match="two routes"):
        build_app([route, route], host.tokens, host.settings.server)


# -- Host and Origin --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["127.0.0.1", "127.0.0.1:8765", "localhost", "LOCALHOST:1", "[::1]:8765", "localhost."]
)
async def test_the_hosts_own_names_are_right(host: Host, name: str) -> None:
    assert (await host.ask("GET", "/health", headers={"host": name})).status == 200


@pytest.mark.parametrize(
    "name",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil:80:80", "[::1", "a" * 300, "\xff", "@"],
)
@pytest.mark.parametrize("path", ["/health", "/api/counts", "/nowhere"])
async def test_a_strangers_name_is_a_421(host: Host, name: str, path: str) -> None:
    assert_problem(await host.ask("GET", path, headers={"host": name}), 421)


async def test_a_missing_host_is_a_400(host: Host) -> None:
    assert_problem(await host.ask("GET", "/health", headers={"host": ""}), 400)


async def test_more_names_come_by_settings(tmp_path: Path) -> None:
    async with a_host(tmp_path, server=at("0.0.0.0", "stellwerk.example", "other.example:8443")) as host:
        for name in ("stellwerk.example", "Stellwerk.Example:443", "other.example", "10.1.2.3:8765", "[fe80::1]"):
            assert (await host.ask("GET", "/health", headers={"host": name})).status == 200, name
        assert_problem(await host.ask("GET", "/health", headers={"host": "evil.example"}), 421)


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "file://"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://127.0.0.1:8765", "sec-fetch-site": "cross-site"},
    ],
)
async def test_a_change_from_another_page_is_a_403(host: Host, headers: dict[str, str]) -> None:
    last = host.kernel.feed.last
    assert_problem(await host.ask("POST", "/api/runs", RUN, headers=headers), 403)
    assert_problem(await host.ask("DELETE", "/api/gates?kind=pause", headers=headers), 403)
    assert host.kernel.feed.last == last
    assert (await host.ask("GET", "/api/runs", headers=headers)).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://127.0.0.1:8765"},
        {"origin": "https://127.0.0.1:8765", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
    ],
)
async def test_a_change_from_our_own_page_is_taken(host: Host, headers: dict[str, str]) -> None:
    assert (await host.ask("POST", "/api/runs", RUN, headers=headers)).status == 201


# -- headers of answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), NEEDED)
async def test_every_answer_forbids_guessing_embedding_and_keeping(host: Host, method: str, path: str) -> None:
    for token in (ADMIN, None):
        reply = await host.ask(method, path.replace("{id}", "x"), token=token)
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["cache-control"] == "no-store"
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]
        assert not any(name.startswith("access-control-") for name in reply.headers)


async def test_the_docs_page_is_readable_and_brings_all_it_needs(host: Host) -> None:
    reply = await host.ask("GET", "/docs")
    page = reply.body.decode()
    assert reply.headers["content-type"].startswith("text/html")
    for _, path in NEEDED:
        assert path in page
    assert "<script" not in page
    assert re.findall(r'(?:src|href)="(?!#)[^"]*"', page) == []
    assert "style-src 'sha256-" in reply.headers["content-security-policy"]
