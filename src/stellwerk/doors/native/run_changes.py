"""Changes to runs over HTTP: edit, cancel, rerun; one by one and in bulk."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Struct, UnsetType

from stellwerk.core.errors import Refused
from stellwerk.core.names import check_run_id
from stellwerk.core.times import parse_time
from stellwerk.doors.native.run_filter import FILTERS, has_filter, run_query
from stellwerk.doors.native.run_view import RunRef, ref_answer
from stellwerk.doors.native.run_wish import Moment, Priority
from stellwerk.kernel.kernel import Kernel
from stellwerk.web.answer import Answer, json_answer
from stellwerk.web.call import Call
from stellwerk.web.params import Param
from stellwerk.web.routes import Route

DRY_RUN = Param("dry_run", "Only say which runs it would be.", {"type": "boolean", "default": False})


class EditWish(Struct, frozen=True, forbid_unknown_fields=True):
    priority: Priority | UnsetType = UNSET
    due: Moment | UnsetType = UNSET


class BulkView(Struct, frozen=True, omit_defaults=True):
    """`ids` are the first 1,000; `chore` is work that goes on in the background."""

    count: int
    ids: list[str]
    event_id: int
    chore: str | UnsetType = UNSET


_edits = msgspec.json.Decoder(EditWish)


class RunChanges:
    """The handlers, over one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def routes(self) -> list[Route]:
        conflict = ("The state of the run does not allow it.", None)
        unknown = ("There is no such run.", None)
        ref = ("Done.", RunRef)
        return [
            Route(
                "POST",
                "/api/runs/cancel",
                self.cancel_many,
                role="operator",
                about="Cancel all live runs that the filters find. Without a filter it is refused.",
                params=(*FILTERS, DRY_RUN),
                answers={200: ("Done, or begun.", BulkView)},
            ),
            Route(
                "POST",
                "/api/runs/rerun",
                self.rerun_many,
                role="operator",
                about="Run all ended runs again that the filters find. Without a filter it is refused.",
                params=(*FILTERS, DRY_RUN),
                answers={200: ("Done, or begun.", BulkView)},
            ),
            Route(
                "PATCH",
                "/api/runs/{id}",
                self.edit,
                role="operator",
                about="Change priority or due time while it waits.",
                body=EditWish,
                answers={200: ref, 404: unknown, 409: conflict},
            ),
            Route(
                "POST",
                "/api/runs/{id}/cancel",
                self.cancel,
                role="operator",
                about="Cancel a run; a running one is ended first.",
                answers={200: ref, 404: unknown, 409: conflict},
            ),
            Route(
                "POST",
                "/api/runs/{id}/rerun",
                self.rerun,
                role="operator",
                about="Run an ended run again, as a new run that names the old one.",
                answers={
                    201: ("The new run.", RunRef),
                    200: ("A live run holds its live key.", RunRef),
                    404: unknown,
                    409: conflict,
                },
            ),
        ]

    async def edit(self, call: Call) -> Answer:
        run_id = check_run_id(call.path("id"))
        wish = await call.json(_edits)
        if wish.priority is UNSET and wish.due is UNSET:
            raise Refused("say what to change: priority, due or both")
        priority = None if wish.priority is UNSET else wish.priority
        due_ms = None if wish.due is UNSET else parse_time(wish.due, "due")
        return ref_answer(run_id, await self._kernel.edit(run_id, call.actor, priority, due_ms), 200)

    async def cancel(self, call: Call) -> Answer:
        run_id = check_run_id(call.path("id"))
        return ref_answer(run_id, await self._kernel.cancel(run_id, call.actor), 200)

    async def rerun(self, call: Call) -> Answer:
        done = await self._kernel.rerun(check_run_id(call.path("id")), call.actor)
        (added,) = done.runs
        return ref_answer(added.id, done.event_id, 201 if added.new else 200)

    async def cancel_many(self, call: Call) -> Answer:
        return await self._bulk("cancel", call)

    async def rerun_many(self, call: Call) -> Answer:
        return await self._bulk("rerun", call)

    async def _bulk(self, verb: str, call: Call) -> Answer:
        if not has_filter(call.query):
            raise Refused(f"say which runs to {verb} by a filter such as scope= or state=; all at once is refused")
        reason = "cancelled by request" if verb == "cancel" else ""
        done = await self._kernel.bulk(
            verb, run_query(call.query), call.actor, dry_run=call.query.flag("dry_run"), reason=reason
        )
        chore = UNSET if done.chore is None else done.chore
        return json_answer(BulkView(done.count, list(done.ids), done.event_id, chore))
