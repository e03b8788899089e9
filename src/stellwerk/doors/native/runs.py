"""Runs over HTTP: submit, look, list, count, edit, cancel, rerun, and why."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from stellwerk.core.errors import Refused
from stellwerk.core.names import check_run_id
from stellwerk.core.queries import PAGE_ROWS_MAX
from stellwerk.core.run import State
from stellwerk.core.times import show_time
from stellwerk.doors.native.run_filter import FILTERS, run_query
from stellwerk.doors.native.run_view import RunRef, RunView, ref_answer, run_view
from stellwerk.doors.native.run_wish import RunWish, Wishes, new_run
from stellwerk.kernel.kernel import Kernel
from stellwerk.kernel.settings import Settings
from stellwerk.kernel.submit import Idempotency, NewRun, Submitted
from stellwerk.web import strict_json
from stellwerk.web.answer import Answer, json_answer
from stellwerk.web.call import Call
from stellwerk.web.params import Param, show_cursor, text_param, whole_param
from stellwerk.web.problem import HttpRefusal
from stellwerk.web.routes import Route

SUBMIT_BYTES_MAX = 16 * 1024 * 1024
SINGLE_BYTES_MAX = 1024 * 1024  # one run; only an array may be larger
IDEMPOTENCY_KEY_CHARS_MAX = 255
LIST_DEFAULT = 100

_VISIBLE = re.compile(r"[\x21-\x7e]{1,255}")
_FIRST_ENTRY = re.compile(r"\[0\]\.?")

IDEMPOTENCY_HEADER = Param(
    "Idempotency-Key",
    "A repeated key answers the first status and body; with another body it is refused. Kept 24 hours.",
    {"type": "string", "minLength": 1, "maxLength": IDEMPOTENCY_KEY_CHARS_MAX, "pattern": r"^[\x21-\x7e]+$"},
)


class EntryView(Struct, frozen=True, omit_defaults=True):
    """`new` is false where a live run holds the live key; then `id` is that run's."""

    id: str
    new: bool | UnsetType = UNSET


class EntriesView(Struct, frozen=True):
    runs: list[EntryView]
    event_id: int


class RunsPage(Struct, frozen=True):
    """Newest first. `event_id` is the stamp of the first page; `cursor` leads to the next, null at the end."""

    runs: list[RunView]
    cursor: str | None
    event_id: int


class CountsView(Struct, frozen=True):
    counts: dict[str, int]
    event_id: int


class ReasonView(Struct, frozen=True, omit_defaults=True):
    type: str
    message: str
    evidence: dict[str, Any]
    until: str | UnsetType = UNSET


class WhyView(Struct, frozen=True):
    reasons: list[ReasonView]
    event_id: int


_wishes = msgspec.json.Decoder(Wishes)


class Runs:
    """The handlers, over one kernel."""

    def __init__(self, kernel: Kernel, settings: Settings) -> None:
        self._kernel = kernel
        self._settings = settings

    def routes(self) -> list[Route]:
        unknown = ("There is no such run.", None)
        return [
            Route(
                "POST",
                "/api/runs",
                self.submit,
                role="operator",
                about="Submit a run, or an array of up to 10,000, all or nothing.",
                body=Wishes,
                headers=(IDEMPOTENCY_HEADER,),
                answers={
                    201: ("Added.", (RunRef, EntriesView)),
                    200: ("Nothing was added: live runs hold the live keys.", (RunRef, EntriesView)),
                    409: ("The Idempotency-Key was used for another request.", None),
                },
            ),
            Route(
                "GET",
                "/api/runs",
                self.find,
                role="viewer",
                about="List runs, newest first.",
                params=(
                    *FILTERS,
                    whole_param("limit", "Runs per page.", 1, PAGE_ROWS_MAX, LIST_DEFAULT),
                    text_param("cursor", "Where the last page ended.", chars_max=200),
                ),
                answers={200: ("A page.", RunsPage)},
            ),
            Route(
                "GET",
                "/api/counts",
                self.count,
                role="viewer",
                about="Count the runs in each state.",
                answers={200: ("The numbers.", CountsView)},
            ),
            Route(
                "GET",
                "/api/runs/{id}",
                self.look,
                role="viewer",
                about="Show a run with its result.",
                answers={200: ("The run.", RunView), 404: unknown},
            ),
            Route(
                "GET",
                "/api/runs/{id}/why",
                self.why,
                role="viewer",
                about="Explain why a run is where it is.",
                answers={200: ("The reasons, the decisive ones first.", WhyView), 404: unknown},
            ),
        ]

    # -- submit -------------------------------------------------------------------------------------------------------

    async def submit(self, call: Call) -> Answer:
        data = await call.body(SUBMIT_BYTES_MAX)
        if len(data) > SINGLE_BYTES_MAX and data.lstrip()[:1] != b"[":
            raise HttpRefusal(413, "a single run must be at most 1 MiB; only an array may be larger")
        wishes = strict_json.decode(_wishes, data)
        idempotency = _idempotency(call.header(b"idempotency-key"), call.token.id, data)
        now_ms = self._kernel.env.now_ms()
        if isinstance(wishes, RunWish):
            new = new_run(wishes, "", self._settings, now_ms)
            (added,), event_id = await self._submit_one(new, call.actor, idempotency)
            return ref_answer(added.id, event_id, 201 if added.new else 200)
        many = [new_run(wish, f"[{place}].", self._settings, now_ms) for place, wish in enumerate(wishes)]
        done = await self._kernel.submit(many, call.actor, idempotency)
        entries = [EntryView(entry.id, UNSET if entry.new else False) for entry in done.runs]
        status = 201 if any(entry.new for entry in done.runs) else 200
        return json_answer(EntriesView(entries, done.event_id), status)

    async def _submit_one(
        self, new: NewRun, actor: str, idempotency: Idempotency | None
    ) -> tuple[tuple[Any, ...], int]:
        try:
            done: Submitted = await self._kernel.submit((new,), actor, idempotency)
        except Refused as error:
            if error.where is not None:
                error.where = _FIRST_ENTRY.sub("", error.where, count=1) or None
            raise
        return done.runs, done.event_id

    # -- look ---------------------------------------------------------------------------------------------------------

    async def look(self, call: Call) -> Answer:
        seen = await self._kernel.run(check_run_id(call.path("id")))
        return json_answer(run_view(seen.run, seen.event_id, seen.result))

    async def find(self, call: Call) -> Answer:
        limit = call.query.whole("limit", LIST_DEFAULT, 1, PAGE_ROWS_MAX)
        cursor = call.query.cursor()
        query = msgspec.structs.replace(
            run_query(call.query), limit=limit, before=None if cursor is None else cursor[0]
        )
        page = await self._kernel.find_runs(query)
        # A list in several pages is as old as its first: what changed since is told by the events after that.
        stamp = page.event_id if cursor is None else min(cursor[1], page.event_id)
        following = None if page.before is None else show_cursor(page.before, stamp)
        return json_answer(RunsPage([run_view(run) for run in page.runs], following, stamp))

    async def count(self, call: Call) -> Answer:
        counts = await self._kernel.count()
        states = {state.value: counts.states.get(state, 0) for state in State}
        return json_answer(CountsView(states, counts.event_id))

    async def why(self, call: Call) -> Answer:
        reasons, event_id = await self._kernel.why(check_run_id(call.path("id")))
        views = [
            ReasonView(
                reason.type,
                reason.message,
                reason.evidence,
                UNSET if reason.until_ms is None else show_time(reason.until_ms),
            )
            for reason in reasons
        ]
        return json_answer(WhyView(views, event_id))


def _idempotency(key: str | None, token: str, data: bytes) -> Idempotency | None:
    if key is None:
        return None
    if _VISIBLE.fullmatch(key) is None:
        raise Refused("the Idempotency-Key must be 1 to 255 visible ASCII characters", "Idempotency-Key")
    # Each token has keys of its own: nobody is answered with what another asked for.
    return Idempotency(f"{token}/{key}", strict_json.digest(data))
