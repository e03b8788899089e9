"""`POST /api/runs`: what is taken, what is refused and where, live keys, idempotency."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stellwerk.core.run import Command, PythonCall, Shell
from stellwerk.core.times import show_time
from tests.contract.native.rig import RUN, Host, a_host, assert_problem, no_shell


async def test_a_single_run_answers_201_with_its_id_and_event_id(host: Host) -> None:
    reply = await host.ask("POST", "/api/runs", RUN)
    assert reply.status == 201
    assert set(reply.json) == {"id", "event_id"}
    assert reply.json["event_id"] == host.kernel.feed.last
    assert (await host.kernel.run(reply.json["id"])).run.spec.action == Command(("true",))


async def test_an_array_answers_201_with_all_ids_in_order(host: Host) -> None:
    reply = await host.ask("POST", "/api/runs", [{**RUN, "name": f"n{n}"} for n in range(3)])
    assert reply.status == 201
    assert set(reply.json) == {"runs", "event_id"}
    names = [(await host.kernel.run(entry["id"])).run.spec.name for entry in reply.json["runs"]]
    assert names == ["n0", "n1", "n2"]
    assert all(set(entry) == {"id"} for entry in reply.json["runs"])


async def test_ten_thousand_runs_go_in_one_request_and_one_more_does_not(host: Host) -> None:
    reply = await host.ask("POST", "/api/runs", [RUN] * 10_000)
    assert reply.status == 201
    assert len({entry["id"] for entry in reply.json["runs"]}) == 10_000
    assert_problem(await host.ask("POST", "/api/runs", [RUN] * 10_001), 400)


async def test_an_array_is_taken_whole_or_not_at_all(host: Host) -> None:
    reply = await host.ask("POST", "/api/runs", [RUN, {**RUN, "name": "no slash/es"}])
    assert assert_problem(reply, 400)["where"] == "[1].name"
    assert sum((await host.ask("GET", "/api/counts")).json["counts"].values()) == 0


async def test_every_field_reaches_the_kernel(host: Host) -> None:
    parent = await host.submit()
    run_id = await host.submit(
        scope="shop/europe",
        action={"type": "python", "function": "shop.jobs:sync", "args": {"n": 1}, "isolation": "thread"},
        priority=1000,
        delay="1h",
        live_key="one at a time",
        parents=[parent],
        when="ended",
        retry={"max": 5, "delay": "10s", "backoff": 2, "jitter": 0.5},
        timeout="PT5M",
        keep="nothing",
        stdin={"base64": "AP8="},
        env={"A": "1"},
        cwd="/tmp",
        labels={"team": "data", "empty": ""},
    )
    run = (await host.kernel.run(run_id)).run
    spec = run.spec
    assert (spec.scope, run.priority, run.live_key) == ("shop/europe", 1000, "one at a time")
    assert spec.action == PythonCall("shop.jobs:sync", "thread")
    assert run.due_ms is not None and 3_590_000 < run.due_ms - spec.created_ms <= 3_600_000
    assert [(edge.run_id, edge.when) for edge in spec.parents] == [(parent, "ended")]
    assert spec.retry is not None
    assert (spec.retry.max, spec.retry.delay_ms, spec.retry.backoff, spec.retry.jitter) == (5, 10_000, 2.0, 0.5)
    assert (spec.timeout_ms, spec.keep_ms) == (300_000, 0)
    assert (spec.env, spec.cwd, spec.labels) == ({"A": "1"}, "/tmp", {"team": "data", "empty": ""})
    (again,) = await host.kernel.again([run])
    assert {body.key: body.data for body in again.bodies} == {"args": b'{"n": 1}', "stdin": b"\x00\xff"}


async def test_defaults_are_those_of_the_contract(host: Host) -> None:
    run = (await host.kernel.run(await host.submit())).run
    assert (run.priority, run.due_ms, run.live_key) == (100, None, None)
    assert (run.spec.retry, run.spec.timeout_ms, run.spec.keep_ms) == (None, None, host.settings.keep_ms)


@pytest.mark.parametrize(
    ("keep", "keep_ms"), [("always", None), ("nothing", 0), ("1d", 86_400_000), (60, 60_000), ("PT5M", 300_000)]
)
async def test_keep_is_nothing_always_or_a_duration(host: Host, keep: Any, keep_ms: int | None) -> None:
    assert (await host.kernel.run(await host.submit(keep=keep))).run.spec.keep_ms == keep_ms


async def test_a_due_time_in_the_future_makes_it_wait(host: Host) -> None:
    due = show_time(host.env.now_ms() + 3_600_000)
    shown = (await host.ask("GET", f"/api/runs/{await host.submit(due=due)}")).json
    assert (shown["state"], shown["due_at"]) == ("waiting", due)


async def test_entries_may_name_each_other_as_parents(host: Host) -> None:
    reply = await host.ask("POST", "/api/runs", [{**RUN, "parents": ["#1"]}, RUN])
    child, parent = (entry["id"] for entry in reply.json["runs"])
    assert (await host.ask("GET", f"/api/runs/{child}")).json["parents"] == [{"id": parent, "when": "succeeded"}]


async def test_a_script_for_bash_is_taken(host: Host) -> None:
    run_id = await host.submit(action={"type": "shell", "script": "echo $A"})
    assert (await host.kernel.run(run_id)).run.spec.action == Shell("echo $A")


async def test_shell_and_foreign_packages_are_refused_where_they_are_switched_off(tmp_path: Path) -> None:
    async with a_host(tmp_path, execution=no_shell()) as host:
        shell = await host.ask("POST", "/api/runs", {**RUN, "action": {"type": "shell", "script": "true"}})
        assert assert_problem(shell, 400)["where"] == "action.type"
        for function in ("os:system", "shopping:f"):
            reply = await host.ask("POST", "/api/runs", {**RUN, "action": {"type": "python", "function": function}})
            assert assert_problem(reply, 400)["where"] == "action.function"
        for function in ("shop:f", "shop.jobs:f"):
            await host.submit(action={"type": "python", "function": function})


# -- live keys --------------------------------------------------------------------------------------------------------


async def test_a_taken_live_key_answers_200_with_the_live_runs_id(host: Host) -> None:
    first = await host.ask("POST", "/api/runs", {**RUN, "live_key": "k"})
    second = await host.ask("POST", "/api/runs", {**RUN, "live_key": "k"})
    assert (first.status, second.status) == (201, 200)
    assert second.json["id"] == first.json["id"]
    assert set(second.json) == {"id", "event_id"}


async def test_in_an_array_a_taken_live_key_is_told_by_new_false(host: Host) -> None:
    live = await host.submit(live_key="k")
    reply = await host.ask("POST", "/api/runs", [{**RUN, "live_key": "k"}, RUN])
    assert reply.status == 201
    assert reply.json["runs"][0] == {"id": live, "new": False}
    assert set(reply.json["runs"][1]) == {"id"}


async def test_an_array_that_adds_nothing_is_a_200(host: Host) -> None:
    live = await host.submit(live_key="k")
    reply = await host.ask("POST", "/api/runs", [{**RUN, "live_key": "k"}])
    assert (reply.status, reply.json["runs"]) == (200, [{"id": live, "new": False}])


# -- idempotency ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [RUN, [RUN, RUN], {**RUN, "delay": 60}])
async def test_a_repeated_key_answers_the_first_status_and_body(host: Host, body: Any) -> None:
    key = {"Idempotency-Key": "once"}
    first = await host.ask("POST", "/api/runs", body, headers=key)
    await host.submit()
    again = await host.ask("POST", "/api/runs", raw=json.dumps(body, indent=3).encode(), headers=key)
    assert (again.status, again.body) == (first.status, first.body)
    assert sum((await host.ask("GET", "/api/counts")).json["counts"].values()) == (3 if isinstance(body, list) else 2)


async def test_a_repeated_key_of_a_request_that_found_its_live_key_taken_answers_the_same(host: Host) -> None:
    live = await host.submit(live_key="k")
    body, key = {**RUN, "live_key": "k"}, {"Idempotency-Key": "once"}
    first = await host.ask("POST", "/api/runs", body, headers=key)
    await host.ask("POST", f"/api/runs/{live}/cancel")
    again = await host.ask("POST", "/api/runs", body, headers=key)
    assert (first.status, again.status) == (200, 200)
    assert again.body == first.body


async def test_a_repeated_key_with_another_body_is_a_409(host: Host) -> None:
    key = {"Idempotency-Key": "once"}
    await host.ask("POST", "/api/runs", RUN, headers=key)
    assert_problem(await host.ask("POST", "/api/runs", {**RUN, "priority": 7}, headers=key), 409)
    assert_problem(await host.ask("POST", "/api/runs", [RUN], headers=key), 409)


@pytest.mark.parametrize("key", ["a" * 256, "with space", "ümlaut", "\x7f", "tab\tinside"])
async def test_a_key_must_be_visible_ascii(host: Host, key: str) -> None:
    reply = await host.ask("POST", "/api/runs", RUN, headers={"Idempotency-Key": key})
    assert assert_problem(reply, 400)["where"] == "Idempotency-Key"


# -- what is refused --------------------------------------------------------------------------------------------------

PYTHON = {"type": "python", "function": "m:f"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"scope": ""}, "scope"),
    ({"scope": "a b"}, "scope"),
    ({"scope": "a" * 101}, "scope"),
    ({"scope": "a\n"}, "scope"),
    ({"scope": 7}, "scope"),
    ({"scope": None}, "scope"),
    ({"scope": "ü"}, "scope"),
    ({"name": "a/b"}, "name"),
    ({"name": "../../etc/passwd"}, "name"),
    ({"priority": 0}, "priority"),
    ({"priority": 1001}, "priority"),
    ({"priority": "high"}, "priority"),
    ({"priority": True}, "priority"),
    ({"priority": 10**30}, "priority"),
    ({"action": {}}, "action"),
    ({"action": "true"}, "action"),
    ({"action": {"type": "rocket"}}, "action.type"),
    ({"action": {"type": "nothing"}}, "action.type"),
    ({"action": {"type": "command"}}, "action"),
    ({"action": {"type": "command", "argv": []}}, "action.argv"),
    ({"action": {"type": "command", "argv": "true"}}, "action.argv"),
    ({"action": {"type": "command", "argv": [1]}}, "action.argv[0]"),
    ({"action": {"type": "command", "argv": [""]}}, "action.argv[0]"),
    ({"action": {"type": "command", "argv": ["a", "b\0"]}}, "action.argv"),
    ({"action": {"type": "command", "argv": ["a"], "shell": True}}, "action"),
    ({"action": {"type": "shell", "script": ""}}, "action.script"),
    ({"action": {"type": "shell", "script": "a\0"}}, "action.script"),
    ({"action": {**PYTHON, "function": "nocolon"}}, "action.function"),
    ({"action": {**PYTHON, "function": "m:f()"}}, "action.function"),
    ({"action": {**PYTHON, "function": "../m:f"}}, "action.function"),
    ({"action": {**PYTHON, "function": "m:f\n"}}, "action.function"),
    ({"action": {**PYTHON, "args": 7}}, "action.args"),
    ({"action": {**PYTHON, "args": "text"}}, "action.args"),
    ({"action": {**PYTHON, "isolation": "moon"}}, "action.isolation"),
    ({"due": "tomorrow"}, "due"),
    ({"due": "2026-01-01T00:00:00"}, "due"),
    ({"due": 7}, "due"),
    ({"due": "2026-01-01T00:00:00Z", "delay": 1}, "delay"),
    ({"delay": -1}, "delay"),
    ({"delay": "1 fortnight"}, "delay"),
    ({"delay": True}, "delay"),
    ({"delay": 10**40}, "delay"),
    ({"live_key": ""}, "live_key"),
    ({"live_key": "a\n"}, "live_key"),
    ({"live_key": "a" * 501}, "live_key"),
    ({"parents": "x"}, "parents"),
    ({"parents": ["no such run"]}, "parents[0]"),
    ({"parents": ["missing"]}, "parents"),
    ({"parents": ["#7"]}, "parents"),
    ({"when": "never"}, "when"),
    ({"retry": {}}, "retry"),
    ({"retry": {"max": -1}}, "retry.max"),
    ({"retry": {"max": 1001}}, "retry.max"),
    ({"retry": {"max": 1, "delay": "31d"}}, "retry.delay"),
    ({"retry": {"max": 1, "backoff": 0.5}}, "retry.backoff"),
    ({"retry": {"max": 1, "backoff": 101}}, "retry.backoff"),
    ({"retry": {"max": 1, "jitter": 2}}, "retry.jitter"),
    ({"retry": {"max": 1, "times": 2}}, "retry"),
    ({"timeout": 0}, "timeout"),
    ({"timeout": "P1M"}, "timeout"),
    ({"keep": "forever"}, "keep"),
    ({"stdin": 7}, "stdin"),
    ({"stdin": {"base64": "*"}}, "stdin.base64"),
    ({"env": {"1A": "x"}}, "env"),
    ({"env": {"A=B": "x"}}, "env"),
    ({"env": {"A": "x\0"}}, "env.A"),
    ({"env": {"STELLWERK_RUN_ID": "x"}}, "env.STELLWERK_RUN_ID"),
    ({"env": {"A": 7}}, "env"),
    ({"cwd": ""}, "cwd"),
    ({"cwd": "a\0b"}, "cwd"),
    ({"labels": {f"k{n}": "v" for n in range(33)}}, "labels"),
    ({"labels": {"a=b": "v"}}, "labels"),
    ({"labels": {"": "v"}}, "labels: the key"),
    ({"labels": {"k": "a\n"}}, "labels.k"),
    ({"labels": {"k": 1}}, "labels"),
]


@pytest.mark.parametrize(("change", "where"), WRONG, ids=[str(n) for n in range(len(WRONG))])
async def test_a_mistake_is_a_400_that_names_its_place(host: Host, change: dict[str, Any], where: str) -> None:
    assert assert_problem(await host.ask("POST", "/api/runs", {**RUN, **change}), 400)["where"] == where
    in_array = assert_problem(await host.ask("POST", "/api/runs", [RUN, {**RUN, **change}]), 400)
    if change.get("parents") != ["#7"]:
        assert in_array["where"] == f"[1].{where}"


async def test_unknown_and_missing_fields_are_refused(host: Host) -> None:
    assert "colour" in assert_problem(await host.ask("POST", "/api/runs", {**RUN, "colour": 1}), 400)["message"]
    assert "action" in assert_problem(await host.ask("POST", "/api/runs", {"scope": "a", "name": "b"}), 400)["message"]
    assert assert_problem(await host.ask("POST", "/api/runs", [RUN, {}]), 400)["where"] == "[1]"


async def test_entries_that_wait_for_each_other_are_refused(host: Host) -> None:
    loop = [{**RUN, "parents": ["#1"]}, {**RUN, "parents": ["#0"]}]
    assert_problem(await host.ask("POST", "/api/runs", loop), 400)
    assert_problem(await host.ask("POST", "/api/runs", {**RUN, "parents": ["#0"]}), 400)


async def test_one_run_may_have_1_mib_and_an_array_16(host: Host) -> None:
    large = {**RUN, "stdin": "x" * 1_000_000}
    assert (await host.ask("POST", "/api/runs", large)).status == 201
    assert (await host.ask("POST", "/api/runs", [large] * 10)).status == 201
    assert_problem(await host.ask("POST", "/api/runs", {**RUN, "stdin": "x" * 1_100_000}), 413)
    assert_problem(await host.ask("POST", "/api/runs", [large] * 17), 413)
