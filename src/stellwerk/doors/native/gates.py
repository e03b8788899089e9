"""Gates over HTTP: pause and block everything, a scope or a job. An operator pauses, only an admin blocks."""

from __future__ import annotations

from typing import Literal, cast

import msgspec
from msgspec import UNSET, Struct, UnsetType

from stellwerk.core.errors import Refused
from stellwerk.core.gates import Gate
from stellwerk.core.names import check_name, check_path, check_text, gate_key
from stellwerk.core.times import parse_time, show_time
from stellwerk.doors.native.run_wish import Moment, Name, Path
from stellwerk.kernel.kernel import Kernel
from stellwerk.web.answer import Answer, json_answer
from stellwerk.web.auth import need_role
from stellwerk.web.call import Call
from stellwerk.web.params import Param, text_param
from stellwerk.web.routes import Route

REASON_CHARS_MAX = 500
Kind = Literal["pause", "block"]
KINDS = frozenset({"pause", "block"})


class GateWish(Struct, frozen=True, forbid_unknown_fields=True):
    """No scope: everything."""

    kind: Kind
    scope: Path | UnsetType = UNSET
    name: Name | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    until: Moment | UnsetType = UNSET


class GateView(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`floor`: priorities from which runs pass; `limit`: how many may run at once instead."""

    kind: str
    key: str
    scope: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    until: str | UnsetType = UNSET
    floor: int | UnsetType = UNSET
    limit: int | UnsetType = UNSET
    actor: str
    since: str
    event_id: int | UnsetType = UNSET


class GatesView(Struct, frozen=True):
    gates: list[GateView]
    event_id: int


class GateGone(Struct, frozen=True):
    event_id: int


_wishes = msgspec.json.Decoder(GateWish)


class Gates:
    """The handlers, over one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def routes(self) -> list[Route]:
        return [
            Route(
                "PUT",
                "/api/gates",
                self.shut,
                role="operator",
                about="Pause or block: no further run starts. What runs goes on. A block needs the role admin.",
                body=GateWish,
                answers={200: ("The gate as it stands now.", GateView)},
            ),
            Route(
                "DELETE",
                "/api/gates",
                self.open,
                role="operator",
                about="Take a pause or block away. A block needs the role admin.",
                params=(
                    Param("kind", "Which one.", {"type": "string", "enum": sorted(KINDS)}, required=True),
                    text_param("scope", "The one of this scope; without it the one over everything.", chars_max=100),
                    text_param("name", "The one of this job of the scope.", chars_max=100),
                ),
                answers={200: ("It is gone.", GateGone), 404: ("There is no such gate.", None)},
            ),
            Route(
                "GET",
                "/api/gates",
                self.list,
                role="viewer",
                about="List all that holds runs back.",
                answers={200: ("The gates.", GatesView)},
            ),
        ]

    async def shut(self, call: Call) -> Answer:
        wish = await call.json(_wishes)
        _need_right(call, wish.kind)
        scope = None if wish.scope is UNSET else wish.scope
        name = None if wish.name is UNSET else wish.name
        until_ms = None if wish.until is UNSET else parse_time(wish.until, "until")
        if until_ms is not None and until_ms <= self._kernel.env.now_ms():
            raise Refused("until lies in the past", "until")
        reason = "" if wish.reason is UNSET or not wish.reason else check_text(wish.reason, "reason", REASON_CHARS_MAX)
        gate = Gate(_key(scope, name), wish.kind, until_ms=until_ms, reason=reason, actor=call.actor)
        put, event_id = await self._kernel.shut(gate)
        return json_answer(gate_view(put, event_id))

    async def open(self, call: Call) -> Answer:
        kind = call.query.need("kind")
        if kind not in KINDS:
            raise Refused("kind must be pause or block", "kind")
        _need_right(call, kind)
        key = _key(call.query.text("scope"), call.query.text("name"))
        return json_answer(GateGone(await self._kernel.unshut(key, cast(Kind, kind), call.actor)))

    async def list(self, call: Call) -> Answer:
        gates, event_id = await self._kernel.gates()
        return json_answer(GatesView([gate_view(gate) for gate in gates], event_id))


def gate_view(gate: Gate, event_id: int | None = None) -> GateView:
    """A gate as the API shows it; `scope` and `name` where it stands at a scope or a job."""
    kind, _, rest = gate.key.partition(":")
    scope: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    if kind == "scope":
        scope = rest
    elif kind == "job":
        scope, _, name = rest.rpartition("/")
    return GateView(
        kind=gate.kind,
        key=gate.key,
        scope=scope,
        name=name,
        reason=gate.reason or UNSET,
        until=UNSET if gate.until_ms is None else show_time(gate.until_ms),
        floor=UNSET if gate.floor is None else gate.floor,
        limit=UNSET if gate.limit is None else gate.limit,
        actor=gate.actor,
        since=show_time(gate.at_ms),
        event_id=UNSET if event_id is None else event_id,
    )


def _key(scope: str | None, name: str | None) -> str:
    if scope is not None:
        check_path(scope, "scope")
    if name is not None:
        check_name(name, "name")
        if scope is None:
            raise Refused("name needs scope: a job is named by both", "name")
    return gate_key(scope, name)


def _need_right(call: Call, kind: str) -> None:
    if kind == "block":
        need_role(call.token, "admin")
