"""Following a log and the journal: order, the end, and going on after the connection broke."""

import base64
from typing import Any

import pytest

from stellwerk.cli import exits, follow, http_client
from stellwerk.cli.address import Address
from tests.unit.cli.conftest import CommandLine, ScriptedHost, Told, a_run, line, sent

LOGS = "/api/runs/r1/logs"
END = sent("end", {"last": 9, "ended": True, "event_id": 69})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "PAUSE_S_FIRST", 0.001)


def client(host: ScriptedHost) -> http_client.Client:
    return http_client.Client(Address(False, "127.0.0.1", host.port, "", "t", "here"), sleep=lambda seconds: None)


def log_page(*lines: dict[str, Any], last: int) -> Told:
    return Told({"lines": list(lines), "last": last, "ended": True, "event_id": 1})


def test_a_broken_stream_goes_on_after_the_last_line(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("GET", "/api/runs/r1", Told(a_run()))
    host.on(
        "GET",
        LOGS,
        Told(chunks=(sent("line", line(1, "one"), 1), sent("line", line(2, "two"), 2)), is_cut=True),
        Told({"message": "restarting"}, status=503),
        Told(chunks=(sent("line", line(2, "two"), 2), sent("line", line(3, "three"), 3))),
        Told(chunks=(END,)),
    )
    ran = stellwerk("logs", "r1", "-f")
    assert (ran.exit_code, ran.out) == (0, "one\ntwo\nthree\n")
    assert [asked.headers.get("last-event-id") for asked in host.requests(LOGS)] == [None, "2", "2", "3"]
    assert all(asked.headers["accept"] == "text/event-stream" for asked in host.requests(LOGS))


def test_following_a_run_that_failed_is_5(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("GET", "/api/runs/r1", Told(a_run(state="failed", reason="exit", exit_code=3)))
    host.on("GET", LOGS, Told(chunks=(END,)))
    ran = stellwerk("logs", "r1", "-f")
    assert ran.exit_code == 5
    assert "run r1 failed (exit, exit code 3, 2s)" in ran.err


def test_following_an_unknown_run_is_1(stellwerk: CommandLine, host: ScriptedHost) -> None:
    assert stellwerk("logs", "nope", "-f").exit_code == 1


def test_a_host_that_stays_away_is_3_in_the_end(host: ScriptedHost) -> None:
    host.on("GET", "/api/events", Told(chunks=(sent("RunAdded", {"event_id": 5}, 5),), is_cut=True))
    seen: list[int] = []
    stream = client(host).stream("/api/events", {}, 4)
    seen.append(int(next(stream).id))
    host.on("GET", "/api/events", Told({"message": "away"}, status=503))
    with pytest.raises(exits.Quit) as caught:
        seen += [int(event.id) for event in stream]
    assert (seen, caught.value.exit_code) == ([5], 3)
    assert len(host.asked) > 5


def test_a_longer_loss_is_told_once(host: ScriptedHost) -> None:
    away = Told({"message": "away"}, status=503)
    host.on("GET", "/api/events", *[away] * 13, Told(chunks=(sent("RunAdded", {"event_id": 5}, 5),)))
    said: list[str] = []
    address = Address(False, "127.0.0.1", host.port, "", "t", "here")
    stream = http_client.Client(address, sleep=lambda seconds: None, say=said.append).stream("/api/events", {}, 4)
    assert next(stream).id == "5"
    assert len(said) == 1
    assert "trying again" in said[0]


def test_a_stream_that_is_refused_is_not_asked_for_again(host: ScriptedHost) -> None:
    host.on("GET", "/api/events", Told({"message": "no"}, status=403))
    with pytest.raises(exits.Quit) as caught:
        next(client(host).stream("/api/events", {}, None))
    assert (caught.value.exit_code, len(host.asked)) == (4, 1)


def test_an_answer_that_is_no_stream_is_no_host(host: ScriptedHost) -> None:
    host.on("GET", "/api/events", Told({"type": "Empty"}))
    with pytest.raises(exits.Quit) as caught:
        next(client(host).stream("/api/events", {}, None))
    assert caught.value.exit_code == 3


class Pieces:
    """Bytes as they come from a socket: cut anywhere."""

    def __init__(self, data: bytes, size: int) -> None:
        self.pieces = [data[at : at + size] for at in range(0, len(data), size)]

    def read1(self, n: int = -1, /) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""


@pytest.mark.parametrize("size", [1, 2, 7, 1_000])
def test_events_are_read_however_they_are_cut(size: int) -> None:
    text = (
        ": a comment\r\n\r\n"
        "id: 7\nevent: Grüße\ndata: a\ndata:b\n\n"
        "id: 8\n\n"  # no data: no event, and the id does not count
        "data: c\nretry: 5\n\n"
        "id: 9\ndata: cut off\n"
    )
    found = list(http_client.parse_events(Pieces(text.encode(), size), "6"))
    assert found == [("7", "Grüße", "a\nb"), ("8", "message", "c")]


def test_a_log_is_read_page_by_page_to_its_end(stellwerk: CommandLine, host: ScriptedHost) -> None:
    pages = [log_page(line(1, "a"), line(2, "b"), last=5), log_page(last=4), log_page(line(5, "c"), last=5)]
    host.on("GET", LOGS, *pages, log_page(last=5))
    ran = stellwerk("logs", "r1", "--stream", "stdout")
    assert (ran.exit_code, ran.out) == (0, "a\nb\nc\n")
    assert [asked.query["after"] for asked in host.requests(LOGS)] == [["0"], ["2"], ["4"], ["5"]]
    assert host.asked[0].query["stream"] == ["stdout"]


def test_a_log_as_json_is_one_document(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("GET", LOGS, log_page(line(1, "a"), last=1), log_page(last=1))
    document = stellwerk("logs", "r1", "--json").document
    assert ([found["text"] for found in document["lines"]], document["ended"]) == (["a"], True)


def test_into_a_file_the_bytes_are_the_runs_own() -> None:
    odd = b"\xff\x1b[31m\r"
    told = {"stream": "stdout", "text": "�", "raw": base64.b64encode(odd).decode()}
    assert follow._bytes_of(told) == odd
    assert follow._bytes_of({"text": "tab\t\x1b[0m"}) == b"tab\t\x1b[0m"


EVENTS = "/api/events"


def event(number: int, kind: str = "RunAdded") -> dict[str, Any]:
    return {"event_id": number, "type": kind, "time": "t", "run": "r1", "key": "demo/hello"}


def page(*events: dict[str, Any]) -> Told:
    last = events[-1]["event_id"] if events else 9
    return Told({"type": "NonEmpty" if events else "Empty", "events": list(events), "last_event_id": last})


def test_events_are_a_page_of_the_journal(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("GET", EVENTS, page(event(7)))
    flags = ("--after", "3", "--type", "RunAdded", "--type", "RunFailed", "--run", "r1", "--prefix", "demo/")
    ran = stellwerk("events", *flags, "--limit", "5")
    assert ran.out == "7  t  RunAdded        demo/hello  run=r1\n"
    assert host.asked[0].query == {
        "after": ["3"],
        "type": ["RunAdded,RunFailed"],
        "run": ["r1"],
        "prefix": ["demo/"],
        "limit": ["5"],
    }


def test_a_torn_journal_is_1_for_the_one_who_named_the_number(stellwerk: CommandLine, host: ScriptedHost) -> None:
    torn = Told({"type": "Torn", "oldest": 100, "last_event_id": 200})
    host.on("GET", EVENTS, torn)
    ran = stellwerk("events", "--after", "3")
    assert ran.exit_code == 1
    assert "from 100 to 200" in ran.err


def test_without_a_number_the_nearest_that_is_kept_is_meant(stellwerk: CommandLine, host: ScriptedHost) -> None:
    host.on("GET", EVENTS, Told({"type": "Torn", "oldest": 100, "last_event_id": 200}), page(event(100)))
    assert stellwerk("events", "--run", "r1").exit_code == 0
    assert [asked.query["after"] for asked in host.asked] == [["0"], ["99"]]


class Enough(Exception):
    pass


def followed(host: ScriptedHost, after: int, count: int) -> list[int | str]:
    seen: list[int | str] = []

    def see(found: Any) -> None:
        seen.append("Torn" if found["type"] == "Torn" else found["event_id"])
        if len(seen) == count:
            raise Enough

    with pytest.raises(Enough):
        follow.follow_events(client(host), {}, after, see)
    return seen


def test_followed_events_come_once_each_over_a_broken_connection(host: ScriptedHost) -> None:
    host.on(
        "GET",
        EVENTS,
        Told(chunks=(sent("RunAdded", event(5), 5),), is_cut=True),
        Told(chunks=(sent("RunAdded", event(5), 5), sent("RunStarted", event(6, "RunStarted"), 6))),
    )
    assert followed(host, 4, 2) == [5, 6]
    assert [asked.headers["last-event-id"] for asked in host.asked] == ["4", "5"]


def test_a_follower_is_told_of_a_torn_journal_and_goes_on_with_what_is_kept(host: ScriptedHost) -> None:
    torn = {"type": "Torn", "oldest": 100, "last_event_id": 200}
    host.on("GET", EVENTS, Told(chunks=(sent("Torn", torn),)), Told(chunks=(sent("RunAdded", event(100), 100),)))
    assert followed(host, 4, 2) == ["Torn", 100]
    assert [asked.headers["last-event-id"] for asked in host.asked] == ["4", "99"]
