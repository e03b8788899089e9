"""Hostile input at every route: the answer is a refusal in the one shape, never a 5xx and never a trace."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stellwerk.web import strict_json
from tests.contract.native.rig import ADMIN, RUN, Host, assert_problem

WITH_BODY = [("POST", "/api/runs"), ("PATCH", "/api/runs/x"), ("PUT", "/api/gates"), ("POST", "/api/tokens")]
WITHOUT_BODY = [
    ("POST", "/api/runs/cancel?scope=x"),
    ("POST", "/api/runs/rerun?scope=x"),
    ("POST", "/api/runs/x/cancel"),
    ("POST", "/api/runs/x/rerun"),
    ("DELETE", "/api/gates?kind=pause"),
    ("DELETE", "/api/tokens?id=x"),
    ("DELETE", "/api/tokens/x"),
    ("POST", "/api/store/adopt"),
]

BODIES: dict[str, bytes] = {
    "empty": b"",
    "spaces": b"  \n ",
    "cut": b'{"scope": "a"',
    "not JSON": b"scope=a&name=b",
    "trailing comma": b'{"scope": "a",}',
    "trailing text": b"{} {}",
    "comment": b"{/* */}",
    "single quotes": b"{'a': 1}",
    "NaN": b'{"priority": NaN}',
    "Infinity": b'{"delay": Infinity}',
    "minus Infinity": b"-Infinity",
    "great number": b'{"delay": 1e999}',
    "many digits": b'{"priority": ' + b"9" * 10_000 + b"}",
    "null": b"null",
    "true": b"true",
    "number": b"7",
    "text": b'"text"',
    "array of numbers": b"[1, 2, 3]",
    "array of null": b"[null]",
    "array of arrays": b"[[]]",
    "empty array": b"[]",
    "deep array": b"[" * 100_000,
    "deep object": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "deep arguments": json.dumps(
        {**RUN, "action": {"type": "python", "function": "m:f", "args": json.loads("[" * 64 + "]" * 64)}}
    ).encode(),
    "invalid UTF-8": b'{"scope": "\xff\xfe"}',
    "overlong UTF-8": b'{"scope": "\xc0\xaf"}',
    "UTF-16": json.dumps(RUN).encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf" + json.dumps(RUN).encode(),
    "half surrogate": b'{"scope": "\\ud800"}',
    "other half": b'{"scope": "\\udc00", "name": "\\udfff"}',
    "surrogate in a value": b'{"kind": "pause", "name": "x", "role": "viewer", "reason": "\\udc00"}',
    "raw control character": b'{"scope": "a\x01b"}',
    "NUL": b'{"scope": "a\\u0000b"}',
    "prototype": b'{"__proto__": {"admin": true}}',
    "strange key": b'{"\\ud83d\\ude00": 1}',
    "long key": b'{"' + b"k" * 100_000 + b'": 1}',
    "many keys": b"{" + b",".join(b'"k%d":1' % n for n in range(20_000)) + b"}",
    "binary": bytes(range(256)),
    "pickle": b"\x80\x04\x95.",
    "XML": b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><a>&b;</a>',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize(("method", "path"), WITH_BODY)
async def test_a_hostile_body_is_refused(host: Host, method: str, path: str, body: bytes) -> None:
    last = host.kernel.feed.last
    reply = await host.ask(method, path, raw=body)
    assert_problem(reply, 400)
    assert host.kernel.feed.last == last


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_a_hostile_body_where_none_belongs_is_refused_or_ignored(host: Host, body: bytes) -> None:
    for method, path in WITHOUT_BODY:
        reply = await host.ask(method, path, raw=body)
        if body.strip():
            assert_problem(reply, 400)
        else:
            assert reply.status < 500, reply


@pytest.mark.parametrize(("method", "path"), [*WITH_BODY, *WITHOUT_BODY])
async def test_a_body_over_the_limit_is_a_413(host: Host, method: str, path: str) -> None:
    large = 17 if path == "/api/runs" else 2
    assert_problem(await host.ask(method, path, raw=b" " * (large << 20)), 413)
    claimed = {"content-length": str(10**15)}
    assert_problem(await host.ask(method, path, raw=b"{}", headers=claimed), 413)


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "",
        "application/jsonx",
        "application/json; charset=latin-1",
        "application/json/json",
        "text/json",
    ],
)
@pytest.mark.parametrize(("method", "path"), [*WITH_BODY, *WITHOUT_BODY])
async def test_a_body_of_another_type_is_a_415(host: Host, method: str, path: str, kind: str) -> None:
    reply = await host.ask(method, path, RUN, headers={"content-type": kind})
    assert_problem(reply, 415)


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON", "application/json; charset=UTF-8"])
async def test_json_may_say_its_charset(host: Host, kind: str) -> None:
    assert (await host.ask("POST", "/api/runs", RUN, headers={"content-type": kind})).status == 201


IDS = [
    "..",
    "%",
    "a%2fb",
    "a b",
    "a\0b",
    "a\nb",
    "ü",
    "😀",
    "\udcff",
    "a" * 201,
    "'; DROP TABLE runs; --",
    "{id}",
    "<b>",
    "a?b",
    "a#b",
    "%00",
    "a\\b",
]


@pytest.mark.parametrize("run_id", IDS)
async def test_a_hostile_id_is_refused(host: Host, run_id: str) -> None:
    for method, path, body in (
        ("GET", f"/api/runs/{run_id}", None),
        ("PATCH", f"/api/runs/{run_id}", {"priority": 1}),
        ("POST", f"/api/runs/{run_id}/cancel", None),
        ("POST", f"/api/runs/{run_id}/rerun", None),
        ("GET", f"/api/runs/{run_id}/logs", None),
        ("GET", f"/api/runs/{run_id}/why", None),
        ("DELETE", f"/api/tokens/{run_id}", None),
    ):
        try:
            reply = await host.ask(method, path, body)
        except UnicodeEncodeError:
            return  # no server could have been sent this
        assert_problem(reply, (400, 404, 405))


PATHS = [
    "/../../etc/passwd",
    "/api/../api/secret",
    "//",
    "/api//",
    "/api/runs/a/b/c",
    "/api/runs/x/logs/y",
    "/%2e%2e/",
    "/API/RUNS",
    "/api/runs.json",
    "/static/../x",
    "/api/events/1",
    "/docs/x",
    "/openapi.yaml",
]


@pytest.mark.parametrize("path", PATHS)
async def test_a_path_that_is_not_there_is_a_404(host: Host, path: str) -> None:
    assert_problem(await host.ask("GET", path), 404)


QUERIES = [
    "limit=0",
    "limit=10001",
    "limit=-1",
    "limit=1e3",
    "limit=٣",
    "limit=" + "9" * 5_000,
    "cursor=x",
    "cursor=%00",
    "cursor=" + "A" * 300,
    "cursor=LTEuLTE",
    "cursor=MS4",
    "cursor=LjE",
    "cursor=OTk5OTk5OTk5OTk5OTk5OTk5OTkuMQ",
    "state=ready,",
    "state=Ready",
    "state=ready&state=failed",
    "scope=a%20b",
    "name=a/b",
    "label=team",
    "label==x",
    "label=" + "k" * 201 + "=v",
    "since=yesterday",
    "since=2026-01-01",
    "since=2026-01-01T00:00:00",
    "until=9999-99-99T00:00:00Z",
    "until=0000-01-01T00:00:00Z",
    "since=",
    "drop=table",
    "=x",
    "&&=&",
    "limit",
    "limit=1;limit=2",
    "scope=%ff",
    "scope=%u0041",
    "scope=\xff",
    "a[]=1",
    "limit[$gt]=1",
]


@pytest.mark.parametrize("query", QUERIES)
async def test_a_hostile_query_is_refused(host: Host, query: str) -> None:
    query = query.replace("٣", "%D9%A3")
    assert_problem(await host.ask("GET", f"/api/runs?{query}"), 400)
    assert_problem(await host.ask("POST", f"/api/runs/cancel?{query}"), 400)


@pytest.mark.parametrize(
    "path", ["/api/runs/x", "/api/counts", "/api/gates", "/api/tokens", "/health", "/metrics", "/openapi.json", "/docs"]
)
async def test_a_query_where_none_belongs_is_refused(host: Host, path: str) -> None:
    assert_problem(await host.ask("GET", f"{path}?x=1"), 400)


async def test_strange_headers_change_nothing(host: Host) -> None:
    for headers in (
        {"accept": "\xff"},
        {"accept": "*/*, text/event-stream;q=x"},
        {"x-forwarded-for": "127.0.0.1", "x-http-method-override": "DELETE"},
        {"content-length": "x"},
        {"if-none-match": "*"},
        {"range": "bytes=0-"},
    ):
        assert (await host.ask("GET", "/api/counts", headers=headers)).status == 200


async def test_a_header_given_twice_is_refused(host: Host) -> None:
    replies: list[dict[str, Any]] = []
    pair = (b"authorization", f"Bearer {ADMIN}".encode())
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/api/counts",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), pair, pair],
    }

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(event: Any) -> None:
        replies.append(event)

    await host.app(scope, receive, send)  # type: ignore[arg-type]
    assert replies[0]["status"] == 400


async def test_our_own_mistake_is_a_500_with_an_id_and_without_a_trace(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken() -> None:
        raise RuntimeError("secret inside")

    monkeypatch.setattr(host.kernel, "count", broken)
    reply = await host.ask("GET", "/api/counts")
    assert reply.status == 500
    assert "secret inside" not in reply.body.decode()
    assert set(reply.json) == {"message", "request_id"}
    (record,) = caplog.records
    assert record.more["request_id"] == reply.json["request_id"] == reply.headers["x-request-id"]  # type: ignore[attr-defined]
    assert "secret inside" in caplog.text


# -- strict JSON by itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "depth"),
    [
        (b"1", 0),
        (b"[]", 1),
        (b'{"a": [1, {"b": []}]}', 4),
        (b'["[[[", "\\"[[", "\\\\"]', 1),
        (b"[" * 64 + b"]" * 64, 64),
        (b"[[],[],[[]]]", 3),
    ],
)
def test_depth_counts_structure_and_not_text(data: bytes, depth: int) -> None:
    assert strict_json.depth(data) == depth


async def test_64_levels_are_taken_and_65_are_not(host: Host) -> None:
    def wish(levels: int) -> bytes:
        body = json.dumps({**RUN, "action": {"type": "python", "function": "m:f", "args": "?"}})
        return body.replace('"?"', "[" * levels + "]" * levels).encode()

    assert (await host.ask("POST", "/api/runs", raw=wish(62))).status == 201  # two levels stand around it
    assert_problem(await host.ask("POST", "/api/runs", raw=wish(63)), 400)


def test_a_digest_sees_meaning_and_not_spelling() -> None:
    assert strict_json.digest(b'{"a":1, "b":[2]}') == strict_json.digest(b'{ "b": [2],"a":1}')
    assert strict_json.digest(b"[1]") != strict_json.digest(b"1")
    assert strict_json.digest(b"9" * 40) == strict_json.digest(b"9" * 40)
