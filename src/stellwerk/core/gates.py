"""Gates: may this run start now, and if not, why not?

A gate stands at a key and holds back claims of runs that carry that key. `holding` is the one function that decides;
`verdict` asks it for the claim and `why` for people, so the explanation cannot differ from the decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from stellwerk.core.run import FINAL, WORKERLESS, Check, Nothing, Parent, Run, State
from stellwerk.core.times import show_duration, show_time

GateKind = Literal["pause", "block", "hold", "limit", "missing"]


class Gate(Struct, frozen=True):
    """`floor`: the priority from which runs pass (None: none passes); `limit`: how many may run at once instead."""

    key: str
    kind: GateKind
    version: int = 1
    floor: int | None = None
    limit: int | None = None
    exempt: tuple[str, ...] = ()  # job keys that pass
    until_ms: int | None = None
    reason: str = ""
    actor: str = ""
    at_ms: int = 0


class Open(Struct, frozen=True):
    """Nothing holds it."""


class Shut(Struct, frozen=True):
    """`gate` holds it."""

    gate: Gate


Verdict = Open | Shut
OPEN = Open()


class Reason(Struct, frozen=True, omit_defaults=True):
    """One answer to "why is it not running?" (or not yet, or no more)."""

    type: str
    message: str
    evidence: dict[str, Any]
    until_ms: int | None = None


def by_key(gates: Iterable[Gate]) -> dict[str, list[Gate]]:
    """Gates as the functions below want them."""
    found: dict[str, list[Gate]] = {}
    for gate in gates:
        found.setdefault(gate.key, []).append(gate)
    return found


def in_force(gate: Gate, now_ms: int) -> bool:
    """Whether its time is not over."""
    return gate.until_ms is None or gate.until_ms > now_ms


def holding(run: Run, gates: Mapping[str, Sequence[Gate]], running: Mapping[str, int], now_ms: int) -> list[Gate]:
    """The gates that hold this run back now. `running` counts the running runs of each limited key."""
    found: list[Gate] = []
    for key in run.spec.keys:
        for gate in gates.get(key, ()):
            if not in_force(gate, now_ms) or run.spec.key in gate.exempt:
                continue
            if gate.limit is not None:
                shut = running.get(key, 0) >= gate.limit
            else:
                shut = gate.floor is None or run.priority < gate.floor
            if shut:
                found.append(gate)
    return found


def verdict(run: Run, gates: Mapping[str, Sequence[Gate]], running: Mapping[str, int], now_ms: int) -> Verdict:
    """May it start now?"""
    found = holding(run, gates, running, now_ms)
    return Shut(found[0]) if found else OPEN


class Surroundings(Struct, frozen=True):
    """What `why` looks at beside the run itself."""

    gates: Sequence[Gate] = ()
    running: Mapping[str, int] = {}
    parents: Sequence[tuple[Parent, State | None]] = ()  # None: the parent is no longer known
    slots: int | None = None  # of its queue on this host; None: nobody here works on that queue
    busy: int = 0
    ahead: int = 0  # ready runs of its queue, itself included
    stuck: str | None = None  # what keeps a stopped attempt from ending
    claims_refused: str | None = None  # why this host claims nothing at all


_GATE_WORDS = {"pause": "paused", "block": "blocked", "hold": "held", "limit": "limited", "missing": "no definition"}
_GATE_REASON = {
    "pause": "Paused",
    "block": "Blocked",
    "hold": "Held",
    "limit": "LimitReached",
    "missing": "NoDefinition",
}


def why(run: Run, around: Surroundings, now_ms: int) -> list[Reason]:
    """All reasons why this run is where it is, the decisive ones first."""
    if run.state in FINAL:
        return [_ended(run)]
    if run.state is State.RUNNING:
        return _running(run, around)
    reasons: list[Reason] = []
    if run.waits_for > 0:
        reasons.append(_parents(run, around))
    if run.due_ms is not None and run.due_ms > now_ms:
        reasons.append(_not_due(run, run.due_ms, now_ms))
    if not isinstance(run.spec.action, WORKERLESS):
        # Gates hold claims back; what needs no worker is not claimed.
        reasons.extend(_gate(gate, around) for gate in holding(run, by_key(around.gates), around.running, now_ms))
    if around.claims_refused is not None:
        reasons.append(Reason("NotClaiming", around.claims_refused, {}))
    if not reasons and isinstance(run.spec.action, WORKERLESS):
        reasons.append(_workerless(run))
    if not reasons:
        reasons.append(_queued(run, around))
    return reasons


def _ended(run: Run) -> Reason:
    text = f"it {run.state}" if run.state is not State.CANCELLED else "it was cancelled"
    if run.reason:
        text += f": {run.reason}"
    evidence: dict[str, Any] = {"state": run.state.value, "attempt": run.attempt}
    if run.ended_ms is not None:
        evidence["ended_at"] = show_time(run.ended_ms)
    if run.exit_code is not None:
        evidence["exit_code"] = run.exit_code
    return Reason("Ended", text, evidence)


def _running(run: Run, around: Surroundings) -> list[Reason]:
    evidence: dict[str, Any] = {"attempt": run.attempt, "worker": run.worker}
    if run.started_ms is not None:
        evidence["started_at"] = show_time(run.started_ms)
    if run.alarm_ms is not None:
        evidence["lease_until"] = show_time(run.alarm_ms)
    reasons = [Reason("Running", f"attempt {run.attempt} runs on worker {run.worker}", evidence)]
    if run.stop_asked:
        reasons.append(Reason("Stopping", "its end was asked for; it is cancelled when its processes are gone", {}))
    if around.stuck is not None:
        reasons.append(Reason("Stuck", f"its processes cannot be ended: {around.stuck}", {"processes": around.stuck}))
    return reasons


def _parents(run: Run, around: Surroundings) -> Reason:
    open_parents = [
        {"id": parent.run_id, "when": parent.when, "state": None if state is None else state.value}
        for parent, state in around.parents
        if state is not None and state not in FINAL
    ]
    text = f"it waits for {run.waits_for} of {len(run.spec.parents)} parents"
    return Reason("WaitingForParents", text, {"open": run.waits_for, "parents": open_parents[:100]})


def _not_due(run: Run, due_ms: int, now_ms: int) -> Reason:
    left = show_duration(due_ms - now_ms)
    if run.attempt == 0:
        return Reason("NotDue", f"it is due in {left}", {"due_at": show_time(due_ms)}, due_ms)
    evidence = {"due_at": show_time(due_ms), "attempt": run.attempt, "reason": run.reason, "error": run.error}
    return Reason(
        "RetryDelay", f"attempt {run.attempt} failed ({run.reason}); the next comes in {left}", evidence, due_ms
    )


def _gate(gate: Gate, around: Surroundings) -> Reason:
    if gate.limit is not None:
        count = around.running.get(gate.key, 0)
        text = f"{count} of at most {gate.limit} runs of {gate.key} are running"
    else:
        text = f"{_GATE_WORDS[gate.kind]} at {gate.key}"
        if gate.floor is not None:
            text += f" for priorities below {gate.floor}"
        if gate.reason:
            text += f": {gate.reason}"
    evidence = {"gate": gate.key, "kind": gate.kind, "actor": gate.actor, "since": show_time(gate.at_ms)}
    return Reason(_GATE_REASON[gate.kind], text, evidence, gate.until_ms)


def _workerless(run: Run) -> Reason:
    action = run.spec.action
    if isinstance(action, Nothing):
        return Reason("AboutToStart", "it is about to be settled", {})
    if isinstance(action, Check):
        text = f"its condition ({action.kind} {action.value}) is not met yet"
        return Reason("ConditionNotMet", text, {"kind": action.kind, "value": action.value}, run.alarm_ms)
    return Reason("WaitingForSignal", "someone has to settle it", {})


def _queued(run: Run, around: Surroundings) -> Reason:
    queue = run.spec.queue
    if around.slots is None:
        return Reason("NoWorker", f"no worker of this host serves the queue {queue}", {"queue": queue})
    if around.busy >= around.slots:
        text = f"all {around.slots} slots of the queue {queue} are busy; {around.ahead} runs are ready"
        return Reason("NoFreeSlot", text, {"queue": queue, "slots": around.slots, "ready": around.ahead})
    text = f"it is ready and about to be claimed from the queue {queue}"
    return Reason("AboutToStart", text, {"queue": queue, "slots": around.slots, "busy": around.busy})
