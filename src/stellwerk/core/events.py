"""Every fact that the journal knows, in the past tense, as one tagged union.

Events carry the evidence as it was given (worker, attempt), not as it was stored: a checker that sees only the journal
must be able to tell that a stranger's word was accepted. They are stored as arrays; fields may be appended with
defaults, never removed, renamed or reordered.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, structs, to_builtins

from stellwerk.core.event_ids import event_id_ms
from stellwerk.core.run import BodyRef, Spec
from stellwerk.core.times import SECOND_MS, show_time

Counted = Literal["try", "crash", "no"]  # against what a postponed attempt counts


class Event(Struct, frozen=True, array_like=True, tag=True):
    """`key` is what filters compare with (`scope/name` for runs), `actor` who caused it, `at_ms` when that was."""

    key: str
    actor: str
    at_ms: int


class RunEvent(Event, frozen=True, array_like=True):
    run: str


class RunAdded(RunEvent, frozen=True, array_like=True):
    spec: Spec
    priority: int
    due_ms: int | None
    live_key: str | None
    waits_for: int


class RunReadied(RunEvent, frozen=True, array_like=True):
    pass


class RunStarted(RunEvent, frozen=True, array_like=True):
    attempt: int
    worker: str
    lease_until_ms: int


class RunPostponed(RunEvent, frozen=True, array_like=True):
    """The attempt is over and another will follow, not before `due_ms`."""

    attempt: int
    worker: str | None  # None: a rescue, the worker itself said nothing
    reason: str
    error: str
    due_ms: int
    counted: Counted
    exit_code: int | None = None


class RunSucceeded(RunEvent, frozen=True, array_like=True):
    attempt: int
    worker: str
    exit_code: int | None = None
    result: BodyRef | None = None


class RunFailed(RunEvent, frozen=True, array_like=True):
    attempt: int
    worker: str | None
    reason: str
    error: str
    counted: Counted
    exit_code: int | None = None


class RunCancelled(RunEvent, frozen=True, array_like=True):
    attempt: int
    reason: str
    lost: bool = False  # its worker was not heard of any more


class RunSettled(RunEvent, frozen=True, array_like=True):
    """A run that needs no worker has ended."""

    succeeded: bool
    reason: str


class RunStopAsked(RunEvent, frozen=True, array_like=True):
    """Someone wants a running attempt ended; it is cancelled when it has."""

    reason: str


class RunEdited(RunEvent, frozen=True, array_like=True):
    """Fields that are None were left as they are."""

    priority: int | None
    due_ms: int | None


class RunDropped(RunEvent, frozen=True, array_like=True):
    """Its time of keeping is over; the row, its bodies and its logs are gone."""


class ResultRejected(RunEvent, frozen=True, array_like=True):
    """A worker reported the end of an attempt that was no longer its own."""

    attempt: int
    worker: str
    outcome: str


class GateShut(Event, frozen=True, array_like=True):
    gate: str  # the key at which it stands
    kind: str
    reason: str
    floor: int | None = None
    limit: int | None = None
    until_ms: int | None = None
    exempt: tuple[str, ...] = ()


class GateOpened(Event, frozen=True, array_like=True):
    gate: str
    kind: str
    reason: str


class TokenCreated(Event, frozen=True, array_like=True):
    token: str
    name: str
    role: str


class TokenRevoked(Event, frozen=True, array_like=True):
    token: str
    name: str


class StoreAdopted(Event, frozen=True, array_like=True):
    """An operator confirmed a store that its host did not know. Followers must read afresh."""

    epoch: str


AnyRunEvent = (
    RunAdded
    | RunReadied
    | RunStarted
    | RunPostponed
    | RunSucceeded
    | RunFailed
    | RunCancelled
    | RunSettled
    | RunStopAsked
    | RunEdited
    | RunDropped
    | ResultRejected
)
AnyEvent = AnyRunEvent | GateShut | GateOpened | TokenCreated | TokenRevoked | StoreAdopted


class Stamped(Struct, frozen=True):
    """An event with the number that it got at commit."""

    event_id: int
    event: AnyEvent


def type_name(event: Event) -> str:
    """The name under which followers know it."""
    return type(event).__name__


_TIMES_SHOWN_AS = {"due_ms": "due_at", "lease_until_ms": "lease_until", "until_ms": "until"}


def shown(stamped: Stamped) -> dict[str, Any]:
    """The event as the API shows it: times as ISO text, absent fields left out."""
    event = stamped.event
    told: dict[str, Any] = {
        "event_id": stamped.event_id,
        "type": type_name(event),
        "time": show_time(event_id_ms(stamped.event_id)),
    }
    for name, value in structs.asdict(event).items():
        if value is None or name == "at_ms":
            continue
        if name in _TIMES_SHOWN_AS:
            told[_TIMES_SHOWN_AS[name]] = show_time(value)
        else:
            told[name] = _shown_value(value)
    return told


def _shown_value(value: Any) -> Any:
    if isinstance(value, Spec):
        return _shown_spec(value)
    if isinstance(value, BodyRef):
        return structs.asdict(value)  # stored as an array, but people want names
    return to_builtins(value)


def _shown_spec(spec: Spec) -> dict[str, Any]:
    """What was asked for, in the words of the request. The environment may hold secrets and stays out."""
    told: dict[str, Any] = {
        "scope": spec.scope,
        "name": spec.name,
        "action": _in_seconds(to_builtins(spec.action)),
        "queue": spec.queue,
        "door": spec.door,
        "created_at": show_time(spec.created_ms),
        "labels": dict(spec.labels),
        "parents": [{"id": parent.run_id, "when": parent.when} for parent in spec.parents],
        "keep": "always" if spec.keep_ms is None else _seconds(spec.keep_ms) or "nothing",
    }
    if spec.retry is not None:
        told["retry"] = _in_seconds(structs.asdict(spec.retry))
    if spec.timeout_ms is not None:
        told["timeout"] = _seconds(spec.timeout_ms)
    if spec.cwd is not None:
        told["cwd"] = spec.cwd
    if spec.rerun_of is not None:
        told["rerun_of"] = spec.rerun_of
    return told


def _in_seconds(fields: dict[str, Any]) -> dict[str, Any]:
    """The same fields, with durations `…_ms` as seconds under the name that requests use."""
    return {
        name.removesuffix("_ms"): _seconds(value) if name.endswith("_ms") and value is not None else value
        for name, value in fields.items()
    }


def _seconds(duration_ms: int) -> int | float:
    whole, rest_ms = divmod(duration_ms, SECOND_MS)
    return duration_ms / SECOND_MS if rest_ms else whole
