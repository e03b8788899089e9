"""Many followers and submitters at one host, over real HTTP: all see the same events in the same order (P10, P11)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlencode

from tests.crash.host_process import DEADLINE_S, Api, HostProcess

STREAMS = 150
POLLERS = 150
LATECOMERS = 10  # join in the middle, from the beginning
SUBMITTERS = 4
REQUESTS = 6  # of each
RUNS_PER_REQUEST = 3


class Watcher:
    """One follower's connection and what it has seen."""

    def __init__(self, api: Api, after: int) -> None:
        self._api = api
        self._after = after
        self.seen: list[bytes] = []
        self.joined = asyncio.Event()

    async def stream(self) -> None:
        """By server-sent events, until the mark has come."""
        reader, writer = await self._ask("text/event-stream", after=self._after)
        try:
            async for line in body_lines(reader):
                self.joined.set()
                if line.startswith(b"data: "):
                    self.seen.append(line.removeprefix(b"data: "))
                    if is_mark(self.seen[-1]):
                        return
        finally:
            writer.close()
            await writer.wait_closed()

    async def poll(self) -> None:
        """By one long poll after the other, until the mark has come; each cut short, so that there are many."""
        after = self._after
        reader, writer = await asyncio.open_connection("127.0.0.1", self._api.port)
        try:
            while True:
                self.joined.set()
                query = {"after": after, "timeout": 300, "limit": 7}
                writer.write(self._request("application/json", query))
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200"), head
                size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                page = json.loads(await reader.readexactly(size))
                assert page["type"] == "NonEmpty", page
                self.seen += [json.dumps(event).encode() for event in page["events"]]
                if is_mark(self.seen[-1]):
                    return
                after = page["last_event_id"]
        finally:
            writer.close()
            await writer.wait_closed()

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.seen]

    async def _ask(self, accept: str, **query: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._api.port)
        writer.write(self._request(accept, query))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        return reader, writer

    def _request(self, accept: str, query: dict[str, Any]) -> bytes:
        return (
            f"GET /api/events?{urlencode(query)} HTTP/1.1\r\nHost: 127.0.0.1:{self._api.port}\r\n"
            f"Authorization: Bearer {self._api.token}\r\nAccept: {accept}\r\n\r\n"
        ).encode()


async def body_lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines of an answer that comes in chunks."""
    rest = b""
    while size := int(await reader.readline(), 16):
        rest += await reader.readexactly(size)
        await reader.readexactly(2)
        *lines, rest = rest.split(b"\n")
        for line in lines:
            yield line


def is_mark(text: bytes) -> bool:
    """The last event of the test: a gate of its own is shut."""
    return b'"GateShut"' in text and b"the-mark" in text


async def test_three_hundred_followers_see_the_same_events_in_the_same_order(host: HostProcess) -> None:
    api = host.api
    start = api.get("/api/counts")["event_id"]
    streams = [Watcher(api, start) for _ in range(STREAMS)]
    pollers = [Watcher(api, start) for _ in range(POLLERS)]
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        for watcher in streams:
            group.create_task(watcher.stream())
        for watcher in pollers:
            group.create_task(watcher.poll())
        for watcher in (*streams, *pollers):
            await watcher.joined.wait()
        submitting = [asyncio.to_thread(submit_some, api, number) for number in range(SUBMITTERS)]
        submitted = asyncio.gather(*submitting)
        late = [Watcher(api, start) for _ in range(LATECOMERS)]
        for watcher in late:
            group.create_task(watcher.stream())
        ids = [run_id for some in await submitted for run_id in some]
        for run_id in ids:
            ended = await asyncio.to_thread(api.wait_ended, run_id)
            assert ended["state"] == "succeeded"
        mark = {"kind": "pause", "scope": "the-mark"}
        assert (await asyncio.to_thread(api.ask, "PUT", "/api/gates", mark)).status == 200

    journal = [event for event in api.events() if event["event_id"] > start]
    numbers = [event["event_id"] for event in journal]
    assert numbers == sorted(set(numbers))
    assert {event["run"] for event in journal if "run" in event} == set(ids)
    assert len(ids) == SUBMITTERS * REQUESTS * RUNS_PER_REQUEST
    expected = [event["event_id"] for event in journal]
    for watcher in (*streams, *pollers, *late):
        assert [event["event_id"] for event in watcher.events()] == expected
    # Not only the numbers: one of each kind word by word, and all streams byte by byte.
    assert streams[0].events() == pollers[0].events() == journal
    assert all(watcher.seen == streams[0].seen for watcher in (*streams, *late))
    assert api.get("/health")["state"] == "ok"


def submit_some(api: Api, number: int) -> list[str]:
    ids: list[str] = []
    for place in range(REQUESTS):
        wish = {
            "scope": f"shared{number}",
            "name": f"job{place}",
            "action": {"type": "python", "function": "builtins:abs", "args": [-place], "isolation": "thread"},
        }
        answer = api.ask("POST", "/api/runs", [wish] * RUNS_PER_REQUEST)
        assert answer.status == 201, answer
        ids += [entry["id"] for entry in answer.body["runs"]]
    return ids


async def test_followers_that_leave_and_come_back_miss_nothing(host: HostProcess) -> None:
    """A follower that is cut off again and again and resumes with the last id it saw has the whole story."""
    api = host.api
    start = api.get("/api/counts")["event_id"]
    ids = await asyncio.to_thread(submit_some, api, 9)
    for run_id in ids:
        await asyncio.to_thread(api.wait_ended, run_id)
    last = api.get("/api/counts")["event_id"]
    seen: list[dict[str, Any]] = []
    after = start
    async with asyncio.timeout(DEADLINE_S):
        while after < last:
            watcher = Watcher(api, after)
            following = asyncio.ensure_future(watcher.stream())
            while len(watcher.seen) < 3 and not (watcher.seen and watcher.events()[-1]["event_id"] >= last):
                await asyncio.sleep(0.01)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            some = watcher.events()[:3]  # what came later was on its way when the line was cut
            seen += some
            after = some[-1]["event_id"]
    assert seen == [event for event in api.events() if start < event["event_id"] <= last]
