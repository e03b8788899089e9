"""The life of a run: what a request means (decide), and what an event makes of a row (evolve).

`LEGAL_FROM` is the state chart. An event that does not fit is a bug and raises; a decision that finds nothing to do
answers with no event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from stellwerk.core.errors import Clash, ImpossibleEvent
from stellwerk.core.events import (
    AnyRunEvent,
    Counted,
    ResultRejected,
    RunAdded,
    RunCancelled,
    RunDropped,
    RunEdited,
    RunFailed,
    RunPostponed,
    RunReadied,
    RunSettled,
    RunStarted,
    RunStopAsked,
    RunSucceeded,
)
from stellwerk.core.retry import CRASHES_MAX
from stellwerk.core.run import (
    ERROR_CHARS_MAX,
    FINAL,
    WORKERLESS,
    BodyRef,
    Check,
    Failed,
    Lost,
    Nothing,
    Outcome,
    Returned,
    Run,
    Spec,
    State,
    Succeeded,
)

# -- decide -----------------------------------------------------------------------------------------------------------


def add(
    run_id: str,
    spec: Spec,
    *,
    priority: int,
    due_ms: int | None,
    live_key: str | None,
    waits_for: int,
    has_children: bool,
    now_ms: int,
    actor: str,
) -> tuple[Run, list[AnyRunEvent]]:
    """A new run and the events that made it: added, and at once readied if nothing holds it."""
    added = RunAdded(spec.key, actor, now_ms, run_id, spec, priority, due_ms, live_key, waits_for)
    run = added_run(added)
    if has_children:
        run = run.with_(has_children=True)
    events: list[AnyRunEvent] = [added]
    more = ready(run, now_ms, actor)
    for event in more:
        run = evolve(run, event)
    events.extend(more)
    return run, events


def ready(run: Run, now_ms: int, actor: str) -> list[AnyRunEvent]:
    """Ready it if its parents have ended as wanted and its due time has come."""
    if run.state is not State.WAITING or run.waits_for > 0:
        return []
    if run.due_ms is not None and run.due_ms > now_ms:
        return []
    events: list[AnyRunEvent] = [RunReadied(run.spec.key, actor, now_ms, run.id)]
    if isinstance(run.spec.action, Nothing):
        events.append(RunSettled(run.spec.key, actor, now_ms, run.id, succeeded=True, reason="nothing to do"))
    return events


def start(run: Run, worker: str, lease_until_ms: int, now_ms: int) -> RunStarted:
    """The claim of a ready run by a worker."""
    return RunStarted(run.spec.key, worker, now_ms, run.id, run.attempt + 1, worker, lease_until_ms)


def finish(
    run: Run, attempt: int, worker: str, outcome: Outcome, *, result: BodyRef | None, now_ms: int, chance: float
) -> list[AnyRunEvent]:
    """Decide what the end of an attempt means for its run.

    An attempt that is no longer the current one has lost its lease: its word does not count and is kept as a
    rejection. A worker that repeats its own word (the answer to the first was lost) changes nothing.
    """
    key = run.spec.key
    if run.state is not State.RUNNING or run.attempt != attempt or run.worker != worker:
        if run.attempt == attempt and run.worker == worker:
            return []  # its own word again
        return [ResultRejected(key, worker, now_ms, run.id, attempt, worker, type(outcome).__name__)]
    if isinstance(outcome, Succeeded):
        return [RunSucceeded(key, worker, now_ms, run.id, attempt, worker, outcome.exit_code, result)]
    if run.stop_asked:
        return [RunCancelled(key, worker, now_ms, run.id, attempt, run.reason or "cancelled")]
    if isinstance(outcome, Returned):
        return _again(run, worker, outcome.reason, "", now_ms, now_ms, "no", worker)
    if isinstance(outcome, Lost):
        return _lose(run, worker, outcome.error, now_ms, chance, actor=worker)
    return _fail(run, worker, outcome.reason, outcome, now_ms, chance, actor=worker)


def expire(run: Run, now_ms: int, chance: float, actor: str) -> list[AnyRunEvent]:
    """The lease is over: nobody has heard of the worker for too long."""
    if run.state is not State.RUNNING or run.alarm_ms is None or run.alarm_ms > now_ms:
        return []
    if run.stop_asked:
        return [RunCancelled(run.spec.key, actor, now_ms, run.id, run.attempt, run.reason or "cancelled", lost=True)]
    return _lose(run, None, f"the lease of worker {run.worker} ran out", now_ms, chance, actor)


def _lose(run: Run, worker: str | None, error: str, now_ms: int, chance: float, actor: str) -> list[AnyRunEvent]:
    """A worker was lost in mid-run: one of the executions where retries are written, else forgiven three times."""
    error = error[:ERROR_CHARS_MAX]
    if run.spec.retry is not None:
        return _fail(run, worker, "worker lost", Failed("worker lost", error), now_ms, chance, actor)
    if run.crashes >= CRASHES_MAX:
        text = f"lost its worker {run.crashes + 1} times; the last time: {error}"[:ERROR_CHARS_MAX]
        return [RunFailed(run.spec.key, actor, now_ms, run.id, run.attempt, worker, "worker lost", text, "crash")]
    return _again(run, worker, "worker lost", error, now_ms, now_ms, "crash", actor)


def _fail(
    run: Run, worker: str | None, reason: str, failed: Failed, now_ms: int, chance: float, actor: str
) -> list[AnyRunEvent]:
    error = failed.error[:ERROR_CHARS_MAX]
    delay_ms = None if run.spec.retry is None else run.spec.retry.next_delay_ms(run.tries + 1, chance)
    if delay_ms is None:
        key = run.spec.key
        return [RunFailed(key, actor, now_ms, run.id, run.attempt, worker, reason, error, "try", failed.exit_code)]
    return _again(run, worker, reason, error, now_ms + delay_ms, now_ms, "try", actor, failed.exit_code)


def _again(
    run: Run,
    worker: str | None,
    reason: str,
    error: str,
    due_ms: int,
    now_ms: int,
    counted: Counted,
    actor: str,
    exit_code: int | None = None,
) -> list[AnyRunEvent]:
    key = run.spec.key
    events: list[AnyRunEvent] = [
        RunPostponed(key, actor, now_ms, run.id, run.attempt, worker, reason, error, due_ms, counted, exit_code)
    ]
    if due_ms <= now_ms:
        events.append(RunReadied(key, actor, now_ms, run.id))
    return events


def cancel(run: Run, reason: str, now_ms: int, actor: str) -> list[AnyRunEvent]:
    """End a run that has not started; ask for the end of one that has. One that has ended cannot be cancelled."""
    if run.state in FINAL:
        raise Clash(f"run {run.id} is {run.state} already; what has ended cannot be cancelled")
    if run.state is not State.RUNNING:
        return [RunCancelled(run.spec.key, actor, now_ms, run.id, run.attempt, reason)]
    if run.stop_asked:
        return []
    return [RunStopAsked(run.spec.key, actor, now_ms, run.id, reason)]


def edit(run: Run, priority: int | None, due_ms: int | None, now_ms: int, actor: str) -> list[AnyRunEvent]:
    """Change when or how urgently a run starts, while it has not."""
    if run.state not in (State.WAITING, State.READY):
        raise Clash(f"run {run.id} is {run.state}; its priority and due time can be changed only while it waits")
    if priority is None and due_ms is None:
        return []
    edited = RunEdited(run.spec.key, actor, now_ms, run.id, priority, due_ms)
    return [edited, *ready(evolve(run, edited), now_ms, actor)]


def settle(run: Run, succeeded: bool, reason: str, now_ms: int, actor: str) -> list[AnyRunEvent]:
    """End a run that needs no worker."""
    if not isinstance(run.spec.action, WORKERLESS):
        raise Clash(f"run {run.id} is the work of a worker; only runs without one can be settled")
    if run.state in FINAL:
        raise Clash(f"run {run.id} is {run.state} already")
    if run.waits_for > 0:
        raise Clash(f"run {run.id} still waits for {run.waits_for} parents")
    return [RunSettled(run.spec.key, actor, now_ms, run.id, succeeded, reason)]


def drop(run: Run, now_ms: int, actor: str) -> list[AnyRunEvent]:
    """Forget a run whose time of keeping is over."""
    if run.state not in FINAL or run.alarm_ms is None or run.alarm_ms > now_ms:
        return []
    return [RunDropped(run.spec.key, actor, now_ms, run.id)]


# -- evolve -----------------------------------------------------------------------------------------------------------

_LIVE_UNSTARTED = frozenset({State.WAITING, State.READY})
_ANY = frozenset(State)

LEGAL_FROM: dict[type[AnyRunEvent], frozenset[State]] = {
    RunAdded: frozenset(),  # makes the row; see added_run
    RunReadied: frozenset({State.WAITING}),
    RunStarted: frozenset({State.READY}),
    RunPostponed: frozenset({State.RUNNING}),
    RunSucceeded: frozenset({State.RUNNING}),
    RunFailed: frozenset({State.RUNNING}),
    RunCancelled: frozenset({State.WAITING, State.READY, State.RUNNING}),
    RunSettled: _LIVE_UNSTARTED,
    RunStopAsked: frozenset({State.RUNNING}),
    RunEdited: _LIVE_UNSTARTED,
    RunDropped: FINAL,
    ResultRejected: _ANY,
}


def evolve(run: Run, event: AnyRunEvent) -> Run:
    """Apply one event. The version rises with the batch (see batch.change), not with each event."""
    if run.state not in LEGAL_FROM[type(event)]:
        raise ImpossibleEvent(f"{type(event).__name__} does not fit run {run.id}, which is {run.state}")
    return _EVOLVE[type(event)](run, event)


def added_run(event: RunAdded) -> Run:
    """The row that RunAdded makes."""
    return Run(
        id=event.run,
        version=1,
        state=State.WAITING,
        priority=event.priority,
        spec=event.spec,
        due_ms=event.due_ms,
        alarm_ms=event.due_ms if event.waits_for == 0 else None,
        live_key=event.live_key,
        waits_for=event.waits_for,
    )


def parent_ended(run: Run) -> Run:
    """One parent fewer to wait for. Not an event: the parent's own end says it."""
    waits_for = run.waits_for - 1
    return run.with_(waits_for=waits_for, alarm_ms=run.due_ms if waits_for == 0 else None)


def _readied(run: Run, event: RunReadied) -> Run:
    if isinstance(run.spec.action, Check):
        # The first look at its condition is now, and the time to give it up counts from now.
        return run.with_(state=State.READY, alarm_ms=event.at_ms, started_ms=event.at_ms)
    return run.with_(state=State.READY, alarm_ms=None)


def _started(run: Run, event: RunStarted) -> Run:
    if event.attempt != run.attempt + 1:
        raise ImpossibleEvent(f"run {run.id} was started {run.attempt} times; attempt {event.attempt} does not follow")
    return run.with_(
        state=State.RUNNING,
        attempt=event.attempt,
        worker=event.worker,
        started_ms=event.at_ms,
        alarm_ms=event.lease_until_ms,
        parked=None,
        reason=None,
        error=None,
        exit_code=None,
    )


def _postponed(run: Run, event: RunPostponed) -> Run:
    return run.with_(
        state=State.WAITING,
        worker=event.worker,
        due_ms=event.due_ms,
        alarm_ms=event.due_ms,
        reason=event.reason,
        error=event.error or None,
        exit_code=event.exit_code,
        tries=run.tries + (event.counted == "try"),
        crashes=run.crashes + (event.counted == "crash"),
    )


def _succeeded(run: Run, event: RunSucceeded) -> Run:
    return _ended(
        run,
        State.SUCCEEDED,
        event.at_ms,
        None,
        error=None,
        exit_code=event.exit_code,
        tries=run.tries + 1,
        result=event.result,
    )


def _failed(run: Run, event: RunFailed) -> Run:
    return _ended(
        run,
        State.FAILED,
        event.at_ms,
        event.reason,
        worker=event.worker,
        error=event.error or None,
        exit_code=event.exit_code,
        tries=run.tries + (event.counted == "try"),
        crashes=run.crashes + (event.counted == "crash"),
    )


def _cancelled(run: Run, event: RunCancelled) -> Run:
    # A worker that was given up has no word any more; one that ended itself may repeat it.
    return _ended(run, State.CANCELLED, event.at_ms, event.reason, worker=None if event.lost else run.worker)


def _settled(run: Run, event: RunSettled) -> Run:
    state = State.SUCCEEDED if event.succeeded else State.FAILED
    return _ended(run, state, event.at_ms, None if event.succeeded else event.reason)


def _ended(run: Run, state: State, at_ms: int, reason: str | None, **more: Any) -> Run:
    return run.with_(
        state=state,
        ended_ms=at_ms,
        alarm_ms=expiry_ms(run.spec, state, at_ms),
        live_key=None,
        reason=reason,
        parked=None,
        **more,
    )


def expiry_ms(spec: Spec, state: State, ended_ms: int) -> int | None:
    """When a run that ended now may be forgotten. What failed under `keep: nothing` is a dead letter and stays."""
    if spec.keep_ms is None or (spec.keep_ms == 0 and state is State.FAILED):
        return None
    return ended_ms + spec.keep_ms


def _stop_asked(run: Run, event: RunStopAsked) -> Run:
    return run.with_(stop_asked=True, reason=event.reason)


def _edited(run: Run, event: RunEdited) -> Run:
    changes: dict[str, Any] = {}
    if event.priority is not None:
        changes["priority"] = event.priority
        changes["parked"] = None  # a hold lets higher priorities through; the next claim looks again
    if event.due_ms is not None:
        changes["due_ms"] = event.due_ms
        if event.due_ms > event.at_ms:
            changes["state"] = State.WAITING
            changes["parked"] = None
            changes["alarm_ms"] = event.due_ms if run.waits_for == 0 else None
    return run.with_(**changes)


def _unchanged(run: Run, event: AnyRunEvent) -> Run:
    return run


_EVOLVE = cast(
    dict[type[AnyRunEvent], Callable[[Run, AnyRunEvent], Run]],  # each function takes the type it stands under
    {
        RunReadied: _readied,
        RunStarted: _started,
        RunPostponed: _postponed,
        RunSucceeded: _succeeded,
        RunFailed: _failed,
        RunCancelled: _cancelled,
        RunSettled: _settled,
        RunStopAsked: _stop_asked,
        RunEdited: _edited,
        RunDropped: _unchanged,
        ResultRejected: _unchanged,
    },
)
