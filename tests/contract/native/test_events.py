"""The journal: NonEmpty, Empty, Torn; waiting, filters, following."""

from __future__ import annotations

import asyncio
import json
import time

from stellwerk.core.queries import Retention
from stellwerk.core.run import Succeeded
from tests.contract.native.rig import RUN, Host, assert_problem, sse

STREAM = {"Accept": "text/event-stream"}


async def test_events_after_an_id_come_in_order_with_their_evidence(host: Host) -> None:
    run = await host.start(await host.submit())
    await host.finish(run, Succeeded(b"1", 0))
    shown = (await host.ask("GET", "/api/events?after=0")).json
    assert (shown["type"], set(shown)) == ("NonEmpty", {"type", "events", "last_event_id"})
    events = shown["events"]
    assert [event["type"] for event in events] == ["RunAdded", "RunReadied", "RunStarted", "RunSucceeded"]
    assert all({"event_id", "type", "time", "run", "key", "actor"} <= set(event) for event in events)
    assert {(event["run"], event["key"]) for event in events} == {(run.id, "shop/sync")}
    assert events[2]["attempt"] == 1
    assert [event["event_id"] for event in events] == sorted({event["event_id"] for event in events})
    assert shown["last_event_id"] == events[-1]["event_id"] == host.kernel.feed.last


async def test_nothing_new_is_empty(host: Host) -> None:
    await host.submit()
    last = host.kernel.feed.last
    assert (await host.ask("GET", f"/api/events?after={last}")).json == {"type": "Empty", "last_event_id": last}


async def test_limit_cuts_and_last_event_id_goes_on_without_a_gap(host: Host) -> None:
    for _ in range(3):
        await host.submit()
    seen: list[int] = []
    after = 0
    while True:
        shown = (await host.ask("GET", f"/api/events?after={after}&limit=2")).json
        if shown["type"] == "Empty":
            break
        assert len(shown["events"]) <= 2
        seen += [event["event_id"] for event in shown["events"]]
        after = shown["last_event_id"]
    assert len(seen) == 6
    assert seen == sorted(set(seen))


async def test_filters_hide_events_and_move_the_place_on(host: Host) -> None:
    one = await host.submit(name="one")
    await host.submit(scope="other")
    only = (await host.ask("GET", "/api/events?type=RunAdded,GateShut")).json
    assert [event["type"] for event in only["events"]] == ["RunAdded", "RunAdded"]
    assert only["last_event_id"] == host.kernel.feed.last
    assert {event["run"] for event in (await host.ask("GET", f"/api/events?run={one}")).json["events"]} == {one}
    keys = {event["key"] for event in (await host.ask("GET", "/api/events?prefix=other/")).json["events"]}
    assert keys == {"other/sync"}
    nothing = (await host.ask("GET", "/api/events?prefix=nowhere/")).json
    assert nothing == {"type": "Empty", "last_event_id": host.kernel.feed.last}


async def test_torn_only_where_an_event_was_trimmed_or_never_was(host: Host) -> None:
    await host.submit()
    await host.submit()
    await host.store.trim_journal(Retention(events_min=1, age_ms=0, events_max=1), host.env.now_ms() + 10**9)
    host.kernel.feed.ring_after = host.kernel.feed.last  # as after a restart: the ring knows nothing
    torn = (await host.ask("GET", "/api/events?after=0")).json
    assert (torn["type"], set(torn)) == ("Torn", {"type", "oldest", "last_event_id"})
    assert torn["last_event_id"] == host.kernel.feed.last
    # The edge: before the oldest, at it, and one short of it.
    assert (await host.ask("GET", f"/api/events?after={torn['oldest'] - 2}")).json["type"] == "Torn"
    assert (await host.ask("GET", f"/api/events?after={torn['oldest'] - 1}")).json["type"] == "NonEmpty"
    last = host.kernel.feed.last
    assert (await host.ask("GET", f"/api/events?after={last}")).json["type"] == "Empty"
    assert (await host.ask("GET", f"/api/events?after={last + 1}")).json["type"] == "Torn"


async def test_who_waits_gets_the_event_when_it_comes(host: Host) -> None:
    waiting = asyncio.create_task(host.ask("GET", "/api/events?timeout=10&type=RunReadied"))
    await asyncio.sleep(0.05)
    await host.submit()
    shown = (await asyncio.wait_for(waiting, 5)).json
    assert [event["type"] for event in shown["events"]] == ["RunReadied"]


async def test_a_silent_host_answers_within_the_timeout(host: Host) -> None:
    began = time.monotonic()
    shown = (await host.ask("GET", "/api/events?timeout=0.2")).json
    assert shown["type"] == "Empty"
    assert 0.15 < time.monotonic() - began < 1.2


async def test_a_stop_of_the_host_answers_who_waits_and_ends_streams(host: Host) -> None:
    poll = asyncio.create_task(host.ask("GET", "/api/events?timeout=PT1H"))
    stream = asyncio.create_task(host.ask("GET", "/api/events", headers=STREAM))
    await asyncio.sleep(0.05)
    host.stop.set()
    host.kernel.feed.close()
    assert (await asyncio.wait_for(poll, 2)).json["type"] == "Empty"
    assert (await asyncio.wait_for(stream, 2)).status == 200


async def test_a_client_who_leaves_waits_no_more(host: Host) -> None:
    pieces = host.pieces("GET", "/api/events?timeout=3600", headers=STREAM)
    await anext(pieces)
    await asyncio.sleep(0.05)
    assert host.kernel.feed.followers == 1
    await pieces.aclose()  # type: ignore[attr-defined]
    assert host.kernel.feed.followers == 0


async def test_a_stream_gives_each_event_once_with_its_id_and_type(host: Host) -> None:
    await host.submit()
    stream = asyncio.create_task(host.ask("GET", "/api/events", headers=STREAM))
    await asyncio.sleep(0.05)
    await host.submit()
    await asyncio.sleep(0.05)
    host.stop.set()
    reply = await asyncio.wait_for(stream, 2)
    events = sse(reply.body)
    assert [event["event"] for event in events] == ["RunAdded", "RunReadied"] * 2
    assert [int(event["id"]) for event in events] == [json.loads(event["data"])["event_id"] for event in events]


async def test_a_stream_is_taken_up_again_by_last_event_id(host: Host) -> None:
    first = (await host.ask("POST", "/api/runs", RUN)).json["event_id"]
    second = (await host.ask("POST", "/api/runs", RUN)).json["event_id"]
    headers = {**STREAM, "Last-Event-ID": str(first)}
    stream = asyncio.create_task(host.ask("GET", "/api/events?after=0", headers=headers))
    await asyncio.sleep(0.05)
    host.stop.set()
    events = sse((await asyncio.wait_for(stream, 2)).body)
    assert [event["event"] for event in events] == ["RunAdded", "RunReadied"]
    assert int(events[-1]["id"]) == second


async def test_a_torn_stream_says_so_and_ends(host: Host) -> None:
    reply = await asyncio.wait_for(host.ask("GET", "/api/events?after=9007199254740991", headers=STREAM), 2)
    (event,) = sse(reply.body)
    assert event["event"] == "Torn"
    assert json.loads(event["data"])["type"] == "Torn"


async def test_wrong_parameters_are_refused(host: Host) -> None:
    for query in (
        "after=-1",
        "after=1.5",
        "after=99999999999999999999",
        "after=%F0%9F%98%80",
        "limit=0",
        "limit=10001",
        "timeout=61m",
        "timeout=soon",
        "type=RunExploded",
        "type=",
        "run=../x",
        f"prefix={'a' * 301}",
        "colour=blue",
        "after=1&after=2",
        "prefix=%ff",
        "prefix=ü",
        "&".join(f"a{n}=1" for n in range(100)),
    ):
        assert_problem(await host.ask("GET", f"/api/events?{query}"), 400)
