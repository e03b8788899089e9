"""The log of a run: lines, waiting, following."""

from __future__ import annotations

import asyncio
import base64
import json
import time

from stellwerk.core.logs import STDERR, SYSTEM
from stellwerk.core.run import Failed, Returned, Run, Succeeded
from tests.contract.native.rig import Host, assert_problem, sse

STREAM = {"Accept": "text/event-stream"}


async def a_running_run(host: Host) -> Run:
    return await host.start(await host.submit())


async def test_lines_are_numbered_from_one_and_name_their_stream(host: Host) -> None:
    run = await a_running_run(host)
    await host.write(run, b"one")
    await host.write(run, b"two", stream=STDERR, sequence=2)
    await host.write(run, b"three", stream=SYSTEM, sequence=3)
    shown = (await host.ask("GET", f"/api/runs/{run.id}/logs")).json
    assert set(shown) == {"lines", "last", "ended", "event_id"}
    assert [(line["line"], line["stream"], line["text"]) for line in shown["lines"]] == [
        (1, "stdout", "one"),
        (2, "stderr", "two"),
        (3, "system", "three"),
    ]
    assert (shown["last"], shown["ended"]) == (3, False)
    assert all(line["time"].endswith("Z") and "raw" not in line for line in shown["lines"])


async def test_bytes_that_are_not_utf8_are_given_raw_as_well(host: Host) -> None:
    run = await a_running_run(host)
    await host.write(run, b"\xff\x00\xfe", "ä".encode())
    first, second = (await host.ask("GET", f"/api/runs/{run.id}/logs")).json["lines"]
    assert base64.b64decode(first["raw"]) == b"\xff\x00\xfe"
    assert first["text"] == "\ufffd\x00\ufffd"
    assert (second["text"], "raw" in second) == ("ä", False)


async def test_lines_count_over_all_attempts(host: Host) -> None:
    run = await a_running_run(host)
    await host.write(run, b"first")
    await host.finish(run, Returned())
    again = await host.start(run.id)
    await host.write(again, b"second")
    lines = (await host.ask("GET", f"/api/runs/{run.id}/logs")).json["lines"]
    assert [(line["line"], line["attempt"]) for line in lines] == [(1, 1), (2, 2)]


async def test_after_and_stream_and_limit_choose(host: Host) -> None:
    run = await a_running_run(host)
    await host.write(run, b"1", b"2", b"3")
    await host.write(run, b"4", stream=STDERR, sequence=2)
    path = f"/api/runs/{run.id}/logs"
    assert [line["text"] for line in (await host.ask("GET", f"{path}?after=2")).json["lines"]] == ["3", "4"]
    assert [line["text"] for line in (await host.ask("GET", f"{path}?stream=stderr")).json["lines"]] == ["4"]
    both = (await host.ask("GET", f"{path}?stream=stderr,stdout&limit=2")).json
    assert ([line["text"] for line in both["lines"]], both["last"]) == (["1", "2"], 2)
    hidden = (await host.ask("GET", f"{path}?stream=system")).json
    assert (hidden["lines"], hidden["last"]) == ([], 4)


async def test_ended_means_that_no_line_is_left(host: Host) -> None:
    run = await a_running_run(host)
    await host.write(run, b"1", b"2")
    await host.finish(run, Succeeded())
    path = f"/api/runs/{run.id}/logs"
    assert (await host.ask("GET", f"{path}?limit=1")).json["ended"] is False
    assert (await host.ask("GET", path)).json["ended"] is True
    assert (await host.ask("GET", f"{path}?after=2&timeout=60")).json == {
        "lines": [],
        "last": 2,
        "ended": True,
        "event_id": host.kernel.feed.last,
    }


async def test_who_waits_gets_the_line_when_it_comes(host: Host) -> None:
    run = await a_running_run(host)
    waiting = asyncio.create_task(host.ask("GET", f"/api/runs/{run.id}/logs?timeout=10"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await host.write(run, b"now")
    assert [line["text"] for line in (await waiting).json["lines"]] == ["now"]


async def test_who_waits_is_answered_in_time_or_when_the_run_ends(host: Host) -> None:
    run = await a_running_run(host)
    began = time.monotonic()
    quiet = (await host.ask("GET", f"/api/runs/{run.id}/logs?timeout=100ms")).json
    assert (quiet["lines"], quiet["ended"]) == ([], False)
    assert 0.09 < time.monotonic() - began < 1
    waiting = asyncio.create_task(host.ask("GET", f"/api/runs/{run.id}/logs?timeout=10"))
    await asyncio.sleep(0.05)
    await host.finish(run, Succeeded())
    assert (await waiting).json["ended"] is True


async def test_a_stop_of_the_host_answers_who_waits(host: Host) -> None:
    run = await a_running_run(host)
    waiting = asyncio.create_task(host.ask("GET", f"/api/runs/{run.id}/logs?timeout=1h"))
    await asyncio.sleep(0.05)
    host.stop.set()
    host.kernel.feed.close()
    assert (await asyncio.wait_for(waiting, 2)).status == 200


async def test_a_stream_gives_lines_by_number_and_ends_with_the_run(host: Host) -> None:
    run = await a_running_run(host)
    await host.write(run, b"one")
    following = asyncio.create_task(host.ask("GET", f"/api/runs/{run.id}/logs", headers=STREAM))
    await asyncio.sleep(0.05)
    await host.write(run, b"two\r", b"\xff", sequence=2)
    await asyncio.sleep(0.05)
    await host.finish(run, Failed("exit", exit_code=1))
    reply = await asyncio.wait_for(following, 5)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = sse(reply.body)
    assert [(event["event"], event["id"]) for event in events] == [
        ("line", "1"),
        ("line", "2"),
        ("line", "3"),
        ("end", "3"),
    ]
    assert json.loads(events[1]["data"])["text"] == "two\r"
    end = json.loads(events[-1]["data"])
    assert end == {"last": 3, "ended": True, "event_id": host.kernel.feed.last}


async def test_a_stream_is_taken_up_again_by_last_event_id(host: Host) -> None:
    run = await a_running_run(host)
    await host.write(run, b"1", b"2", b"3")
    await host.finish(run, Succeeded())
    reply = await host.ask("GET", f"/api/runs/{run.id}/logs?after=0", headers={**STREAM, "Last-Event-ID": "2"})
    assert [event["id"] for event in sse(reply.body)] == ["3", "3"]


async def test_wrong_parameters_are_refused(host: Host) -> None:
    run_id = await host.submit()
    for query in (
        "after=-1",
        "after=x",
        "stream=stdin",
        "stream=",
        "timeout=2h",
        "timeout=-1",
        "limit=0",
        "limit=10001",
        "follow=1",
        "after=99999999999999999999",
    ):
        assert_problem(await host.ask("GET", f"/api/runs/{run_id}/logs?{query}"), 400)
    bad = await host.ask("GET", f"/api/runs/{run_id}/logs", headers={**STREAM, "Last-Event-ID": "-7"})
    assert_problem(bad, 400)
