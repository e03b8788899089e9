"""The log of a run over HTTP: lines by number, waited for or followed."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator

import msgspec
from msgspec import UNSET, Struct, UnsetType

from stellwerk.core.logs import STREAM_NAMES, LogLine, LogPage, LogQuery
from stellwerk.core.names import check_run_id
from stellwerk.core.run import FINAL
from stellwerk.core.times import show_time
from stellwerk.doors.native.events import LAST_EVENT_ID, last_event_id
from stellwerk.kernel.kernel import Kernel, RunSeen
from stellwerk.web.answer import Answer, json_answer
from stellwerk.web.call import Call
from stellwerk.web.params import EVENT_ID_MAX, TIMEOUT, whole_param, words_param
from stellwerk.web.routes import Route
from stellwerk.web.sse import QUIET_S, EventStream, sse_event, sse_quiet
from stellwerk.web.waiting import Stop, while_there

LINES_DEFAULT, LINES_MAX = 1_000, 10_000
STREAM_LINES = 200  # sent in one piece; a line has up to 64 KiB

_STREAMS = {name: number for number, name in STREAM_NAMES.items()}
_encode = msgspec.json.Encoder().encode


class LineView(Struct, frozen=True, omit_defaults=True):
    """`raw` is there when the line is not UTF-8: its bytes, of which `text` is what can be read."""

    line: int
    time: str
    stream: str
    text: str
    attempt: int
    raw: str | UnsetType = UNSET


class LogView(Struct, frozen=True):
    """`last` is the last line looked at: go on after it. `ended`: the run has ended and no line is left."""

    lines: list[LineView]
    last: int
    ended: bool
    event_id: int


class EndView(Struct, frozen=True):
    last: int
    ended: bool
    event_id: int


class Logs:
    """The handlers, over one kernel."""

    def __init__(self, kernel: Kernel, stop: Stop) -> None:
        self._kernel = kernel
        self._stop = stop

    def routes(self) -> list[Route]:
        return [
            Route(
                "GET",
                "/api/runs/{id}/logs",
                self.read,
                role="viewer",
                about="Read the log of a run, wait for more, or follow it as server-sent events to the run's end.",
                params=(
                    whole_param("after", "Only lines after this one.", 0, EVENT_ID_MAX, 0),
                    words_param("stream", "Only lines of these streams.", sorted(_STREAMS)),
                    TIMEOUT,
                    whole_param("limit", "At most so many lines.", 1, LINES_MAX, LINES_DEFAULT),
                ),
                headers=(LAST_EVENT_ID,),
                streams=True,
                answers={200: ("Lines.", LogView), 404: ("There is no such run.", None)},
            )
        ]

    async def read(self, call: Call) -> Answer:
        query = call.query
        after = last_event_id(call.header(b"last-event-id"))
        if after is None:
            after = query.whole("after", 0, 0, EVENT_ID_MAX)
        streams = frozenset(_STREAMS[name] for name in query.words("stream", frozenset(_STREAMS)))
        limit = query.whole("limit", LINES_DEFAULT, 1, LINES_MAX)
        wait_s = query.poll_s() or 0.0
        wanted = LogQuery(check_run_id(call.path("id")), after, limit, streams)
        page, seen = await self._kernel.logs_after(wanted, 0.0)
        if call.wants_stream:
            return EventStream(self._follow(msgspec.structs.replace(wanted, limit=STREAM_LINES)), self._stop)
        if not page.lines and seen.run.state not in FINAL and wait_s > 0 and not self._stop.is_set():
            wanted = msgspec.structs.replace(wanted, after_line=max(after, page.examined))
            found = await while_there(call.receive, self._stop, self._kernel.logs_after(wanted, wait_s))
            page, seen = found or (page, seen)
        lines = [line_view(line) for line in page.lines]
        return json_answer(LogView(lines, max(after, page.examined), _is_done(page, seen), seen.event_id))

    async def _follow(self, wanted: LogQuery) -> AsyncIterator[bytes]:
        after = wanted.after_line
        while not self._stop.is_set():
            page, seen = await self._kernel.logs_after(msgspec.structs.replace(wanted, after_line=after), QUIET_S)
            after = max(after, page.examined)
            if page.lines:
                yield b"".join(sse_event("line", _encode(line_view(line)), line.line) for line in page.lines)
            elif _is_done(page, seen):
                end = EndView(after, True, seen.event_id)
                yield sse_event("end", _encode(end), after)
                return
            else:
                yield sse_quiet(after)


def line_view(line: LogLine) -> LineView:
    """A line with text that can be shown, and its bytes where they are something else."""
    piece = line.piece
    raw: str | UnsetType = UNSET
    try:
        text = piece.data.decode()
    except UnicodeDecodeError:
        text = piece.data.decode("utf-8", "replace")
        raw = base64.b64encode(piece.data).decode()
    return LineView(line.line, show_time(piece.at_ms), STREAM_NAMES[piece.stream], text, line.attempt, raw)


def _is_done(page: LogPage, seen: RunSeen) -> bool:
    return seen.run.state in FINAL and page.examined >= page.last_line
