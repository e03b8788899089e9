"""Runs as the API shows them. What is absent is left out; bodies stay where they are, but for the result."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType, to_builtins

from stellwerk.core.run import Action, Run, State, When
from stellwerk.core.times import SECOND_MS, show_time
from stellwerk.web.answer import Answer, json_bytes


class RunRef(Struct, frozen=True):
    id: str
    event_id: int


class ParentView(Struct, frozen=True):
    id: str
    when: When


class RunView(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run. `changed` is the EventId of its last change: a mirror ignores events that are not newer."""

    id: str
    scope: str
    name: str
    state: State
    attempt: int
    priority: int
    created_at: str
    parents: list[ParentView]
    labels: dict[str, str]
    action: dict[str, Any]
    changed: int
    reason: str | UnsetType = UNSET
    due_at: str | UnsetType = UNSET
    started_at: str | UnsetType = UNSET
    ended_at: str | UnsetType = UNSET
    exit_code: int | UnsetType = UNSET
    result: Any = UNSET
    error: str | UnsetType = UNSET
    rerun_of: str | UnsetType = UNSET
    event_id: int | UnsetType = UNSET


def run_view(run: Run, event_id: int | None = None, result: bytes | None = None) -> RunView:
    """A run with its result, if it is at hand, and the stamp, unless the list around it has one."""
    spec = run.spec
    return RunView(
        id=run.id,
        scope=spec.scope,
        name=spec.name,
        state=run.state,
        attempt=run.attempt,
        priority=run.priority,
        created_at=show_time(spec.created_ms),
        parents=[ParentView(parent.run_id, parent.when) for parent in spec.parents],
        labels=dict(spec.labels),
        action=action_view(spec.action),
        changed=run.changed,
        reason=_given(run.reason),
        due_at=_moment(run.due_ms),
        started_at=_moment(run.started_ms),
        ended_at=_moment(run.ended_ms),
        exit_code=UNSET if run.exit_code is None else run.exit_code,
        result=UNSET if result is None else msgspec.Raw(result),
        error=_given(run.error),
        rerun_of=_given(spec.rerun_of),
        event_id=UNSET if event_id is None else event_id,
    )


def action_view(action: Action) -> dict[str, Any]:
    """The action in the words of the request; durations in seconds."""
    fields: dict[str, Any] = {"type": to_builtins(action)["type"]}
    for name in action.__struct_fields__:
        value = getattr(action, name)
        if value is None:
            continue
        if name.endswith("_ms"):
            fields[name.removesuffix("_ms")] = value / SECOND_MS
        else:
            fields[name] = value
    return fields


def _given(text: str | None) -> str | UnsetType:
    return UNSET if text is None else text


def _moment(time_ms: int | None) -> str | UnsetType:
    return UNSET if time_ms is None else show_time(time_ms)


def ref_answer(run_id: str, event_id: int, status: int) -> Answer:
    """A run's id and a stamp, on the hot path made by hand."""
    # Ids are of plain characters, so they need no escaping.
    return json_bytes(b'{"id":"%s","event_id":%d}' % (run_id.encode(), event_id), status)
