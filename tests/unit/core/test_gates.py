"""Gates: who is held by what, and that the explanation never differs from the decision."""

from collections.abc import Mapping, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stellwerk.core.gates import (
    OPEN,
    Gate,
    Reason,
    Shut,
    Surroundings,
    by_key,
    holding,
    in_force,
    verdict,
    why,
)
from stellwerk.core.names import gate_key, run_keys
from stellwerk.core.run import (
    FINAL,
    PRIORITY_MAX,
    Action,
    Check,
    Command,
    Parent,
    PythonCall,
    Run,
    Signal,
    Spec,
    State,
)

NOW = 1_800_000_000_000
JOB = "job:shop/import"
GATE_REASONS = {"Paused", "Blocked", "Held", "LimitReached", "NoDefinition"}
COMMAND = Command(("true",))


def a_run(
    state: State = State.READY,
    priority: int = 100,
    action: Action = COMMAND,
    parents: tuple[Parent, ...] = (),
    more: tuple[str, ...] = ("limit:db",),
) -> Run:
    keys = run_keys("default", "shop", "import", more)
    return Run("r1", 1, state, priority, Spec("shop", "import", action, NOW, keys=keys, parents=parents))


def held_by(gates: Sequence[Gate], run: Run | None = None, running: Mapping[str, int] | None = None) -> list[Gate]:
    return holding(run or a_run(), by_key(gates), running or {}, NOW)


# -- who is held ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pause", "block", "hold", "missing"])
@pytest.mark.parametrize("key", ["*", "queue:default", "scope:shop", JOB, "limit:db"])
def test_a_gate_without_a_floor_holds_every_run_that_carries_its_key(kind: str, key: str) -> None:
    gate = msgspec.convert({"key": key, "kind": kind}, Gate)
    assert held_by([gate]) == [gate]
    assert held_by([gate], a_run(priority=PRIORITY_MAX)) == [gate]
    assert verdict(a_run(), by_key([gate]), {}, NOW) == Shut(gate)


@pytest.mark.parametrize("key", ["queue:sync", "scope:sho", "scope:shop/import", "job:shop/imports", "limit:dbs", ""])
def test_a_gate_at_another_key_holds_nobody_here(key: str) -> None:
    assert held_by([Gate(key, "block")]) == []
    assert verdict(a_run(), by_key([Gate(key, "block")]), {}, NOW) == OPEN


@pytest.mark.parametrize(
    ("priority", "floor", "is_held"), [(1, 1, False), (99, 100, True), (100, 100, False), (101, 100, False)]
)
def test_a_floor_lets_its_own_priority_and_all_above_pass(priority: int, floor: int, is_held: bool) -> None:
    assert bool(held_by([Gate("*", "hold", floor=floor)], a_run(priority=priority))) is is_held


@pytest.mark.parametrize(
    ("limit", "running", "is_held"),
    [
        (1, {}, False),
        (1, {JOB: 1}, True),
        (2, {JOB: 1}, False),
        (2, {JOB: 3}, True),
        (0, {}, True),
        (1, {"*": 9}, False),
    ],
)
def test_a_limit_holds_when_that_many_runs_of_its_key_are_running(
    limit: int, running: dict[str, int], is_held: bool
) -> None:
    assert bool(held_by([Gate(JOB, "limit", limit=limit)], running=running)) is is_held


@pytest.mark.parametrize(
    ("exempt", "is_held"),
    [((), True), (("shop/import",), False), (("a/b", "shop/import"), False), ((JOB,), True), (("shop",), True)],
)
def test_an_exempt_job_passes_every_kind_of_gate(exempt: tuple[str, ...], is_held: bool) -> None:
    gates = [Gate("*", "pause", exempt=exempt), Gate("*", "limit", limit=0, exempt=exempt)]
    assert held_by(gates) == (gates if is_held else [])


@pytest.mark.parametrize(("until_ms", "stands"), [(None, True), (NOW + 1, True), (NOW, False), (NOW - 1, False)])
def test_a_gate_stands_until_its_moment_comes(until_ms: int | None, stands: bool) -> None:
    gate = Gate("*", "pause", until_ms=until_ms)
    assert in_force(gate, NOW) is stands
    assert bool(held_by([gate])) is stands


def test_all_holding_gates_are_named_the_widest_first() -> None:
    gates = [Gate(JOB, "pause"), Gate("scope:shop", "block"), Gate("*", "hold", floor=500), Gate("*", "block")]
    assert held_by(gates) == [gates[2], gates[3], gates[1], gates[0]]
    assert verdict(a_run(), by_key(gates), {}, NOW) == Shut(gates[2])


def test_a_block_survives_the_opening_of_a_pause_at_the_same_key() -> None:
    pause, block = Gate("*", "pause"), Gate("*", "block")
    assert held_by([pause, block]) == [pause, block]
    assert held_by([block]) == [block]


def test_the_keys_of_gates_are_keys_that_runs_carry() -> None:
    carried = a_run().spec.keys
    assert gate_key(None, None) in carried
    assert gate_key("shop", None) in carried
    assert gate_key("shop", "import") in carried


# -- why --------------------------------------------------------------------------------------------------------------

PARENTS = (Parent("p1"), Parent("p2", "ended"), Parent("p3", "failed"))
RUNNING = a_run(State.RUNNING).with_(attempt=2, worker="w1", started_ms=NOW - 9, alarm_ms=NOW + 9)
FREE = Surroundings(slots=4)

# every type of reason: the run, what is around it, and the types that are answered
REASONS: list[tuple[list[str], Run, Surroundings]] = [
    (["Ended"], a_run(State.SUCCEEDED).with_(attempt=1, ended_ms=NOW, exit_code=0), FREE),
    (["Ended"], a_run(State.FAILED).with_(attempt=1, ended_ms=NOW, reason="timeout"), FREE),
    (["Ended"], a_run(State.CANCELLED).with_(reason="parent p1 failed"), FREE),
    (["Running"], RUNNING, FREE),
    (["Running", "Stopping"], RUNNING.with_(stop_asked=True, reason="enough"), FREE),
    (["Running", "Stopping", "Stuck"], RUNNING.with_(stop_asked=True), Surroundings(stuck="pid 77 (D)")),
    (["WaitingForParents"], a_run(State.WAITING, parents=PARENTS).with_(waits_for=2), FREE),
    (["NotDue"], a_run(State.WAITING).with_(due_ms=NOW + 90_000), FREE),
    (["RetryDelay"], a_run(State.WAITING).with_(due_ms=NOW + 1, attempt=2, reason="exit", error="boom"), FREE),
    (["Paused"], a_run(), Surroundings(gates=[Gate("*", "pause", reason="release")])),
    (["Blocked"], a_run(), Surroundings(gates=[Gate("scope:shop", "block", until_ms=NOW + 5)])),
    (["Held"], a_run(), Surroundings(gates=[Gate(JOB, "hold", floor=200)])),
    (["LimitReached"], a_run(), Surroundings(gates=[Gate("limit:db", "limit", limit=2)], running={"limit:db": 2})),
    (["NoDefinition"], a_run(), Surroundings(gates=[Gate(JOB, "missing")])),
    (["NotClaiming"], a_run(), Surroundings(claims_refused="the clock is unsure")),
    (["ConditionNotMet"], a_run(action=Check("port", "80")).with_(alarm_ms=NOW + 1_000), FREE),
    (["WaitingForSignal"], a_run(action=Signal()), FREE),
    (["NoWorker"], a_run(), Surroundings()),
    (["NoFreeSlot"], a_run(), Surroundings(slots=4, busy=4, ahead=17)),
    (["AboutToStart"], a_run(), Surroundings(slots=4, busy=3)),
    (
        ["WaitingForParents", "NotDue", "Paused", "Blocked", "NotClaiming"],
        a_run(State.WAITING, parents=PARENTS).with_(waits_for=1, due_ms=NOW + 1),
        Surroundings(gates=[Gate("*", "pause"), Gate("*", "block")], claims_refused="draining"),
    ),
]


@pytest.mark.parametrize(("types", "run", "around"), REASONS, ids=["+".join(case[0]) for case in REASONS])
def test_why_answers_with_typed_reasons_and_sentences(types: list[str], run: Run, around: Surroundings) -> None:
    reasons = why(run, around, NOW)
    assert [reason.type for reason in reasons] == types
    assert all(reason.message for reason in reasons)
    assert msgspec.json.decode(msgspec.json.encode(reasons), type=list[Reason]) == reasons


def the_reason(type_: str, number: int = 0) -> Reason:
    run, around = [(run, around) for types, run, around in REASONS if types == [type_]][number]
    return why(run, around, NOW)[0]


def test_the_end_of_a_run_is_told_with_its_reason() -> None:
    assert the_reason("Ended", 0).message == "it succeeded"
    assert the_reason("Ended", 0).evidence["exit_code"] == 0
    assert the_reason("Ended", 1).message == "it failed: timeout"
    assert the_reason("Ended", 2).message == "it was cancelled: parent p1 failed"


def test_a_running_attempt_is_told_with_worker_and_lease() -> None:
    evidence = the_reason("Running").evidence
    assert (evidence["attempt"], evidence["worker"]) == (2, "w1")
    assert evidence["lease_until"] == "2027-01-15T08:00:00.009Z"


def test_open_parents_are_named_and_ended_or_forgotten_ones_are_not() -> None:
    run = a_run(State.WAITING, parents=PARENTS).with_(waits_for=1)
    states = (State.SUCCEEDED, State.RUNNING, None)
    (reason,) = why(run, Surroundings(parents=tuple(zip(PARENTS, states, strict=True))), NOW)
    assert reason.evidence == {"open": 1, "parents": [{"id": "p2", "when": "ended", "state": "running"}]}
    assert reason.message == "it waits for 1 of 3 parents"


def test_of_very_many_open_parents_only_some_are_listed() -> None:
    parents = tuple(Parent(f"p{number}") for number in range(5_000))
    run = a_run(State.WAITING, parents=parents).with_(waits_for=5_000)
    (reason,) = why(run, Surroundings(parents=[(parent, State.READY) for parent in parents]), NOW)
    assert reason.evidence["open"] == 5_000
    assert len(reason.evidence["parents"]) == 100


@pytest.mark.parametrize(
    ("type_", "until_ms"),
    [
        ("NotDue", NOW + 90_000),
        ("RetryDelay", NOW + 1),
        ("Blocked", NOW + 5),
        ("ConditionNotMet", NOW + 1_000),
        ("Paused", None),
        ("LimitReached", None),
        ("NoFreeSlot", None),
    ],
)
def test_a_reason_says_when_it_will_pass_where_that_is_known(type_: str, until_ms: int | None) -> None:
    assert the_reason(type_).until_ms == until_ms


def test_a_gate_is_told_with_what_its_author_said() -> None:
    gate = Gate("*", "hold", floor=200, reason="month end", actor="ada", at_ms=NOW)
    (reason,) = why(a_run(), Surroundings(gates=[gate]), NOW)
    assert reason.message == "held at * for priorities below 200: month end"
    assert reason.evidence == {"gate": "*", "kind": "hold", "actor": "ada", "since": "2027-01-15T08:00:00.000Z"}


def test_what_needs_no_worker_is_not_held_by_a_gate() -> None:
    gate = Gate("*", "pause", at_ms=NOW)
    (reason,) = why(a_run(State.READY, 100, Signal()), Surroundings(gates=[gate]), NOW)
    assert reason.type == "WaitingForSignal"


# -- the explanation is the decision ----------------------------------------------------------------------------------

KEYS = ["*", "queue:default", "scope:shop", JOB, "limit:db", "scope:other"]
any_gate = st.builds(
    Gate,
    st.sampled_from(KEYS),
    st.sampled_from(["pause", "block", "hold", "limit", "missing"]),
    floor=st.none() | st.integers(1, 1_000),
    limit=st.none() | st.integers(0, 3),
    exempt=st.sampled_from([(), ("shop/import",), ("a/b",)]),
    until_ms=st.none() | st.integers(NOW - 2, NOW + 2),
)
any_running = st.dictionaries(st.sampled_from(KEYS), st.integers(0, 3))
any_waiting_run = st.builds(
    lambda state, priority, due_in, waits_for, action: a_run(state, priority, action).with_(
        due_ms=None if due_in is None else NOW + due_in, waits_for=waits_for
    ),
    st.sampled_from([State.WAITING, State.READY]),
    st.integers(1, 1_000),
    st.none() | st.integers(-2, 2),
    st.integers(0, 2),
    st.sampled_from([COMMAND, PythonCall("shop:load")]),
)


@given(any_waiting_run, st.lists(any_gate, max_size=6), any_running)
def test_why_names_a_gate_exactly_when_the_claim_is_shut(run: Run, gates: list[Gate], running: dict[str, int]) -> None:
    reasons = why(run, Surroundings(gates=gates, running=running), NOW)
    decided = verdict(run, by_key(gates), running, NOW)
    named = [reason for reason in reasons if reason.type in GATE_REASONS]
    assert bool(named) is isinstance(decided, Shut)
    if isinstance(decided, Shut):
        assert named[0].evidence["gate"] == decided.gate.key
    assert len(named) == len(holding(run, by_key(gates), running, NOW))
    assert reasons, "there is always a reason"


@given(any_waiting_run, st.lists(any_gate, max_size=6), any_running)
def test_a_run_is_shut_out_exactly_when_one_gate_alone_would_shut_it_out(
    run: Run, gates: list[Gate], running: dict[str, int]
) -> None:
    alone = [isinstance(verdict(run, by_key([gate]), running, NOW), Shut) for gate in gates]
    assert isinstance(verdict(run, by_key(gates), running, NOW), Shut) is any(alone)
    assert len(holding(run, by_key(gates), running, NOW)) == sum(alone)


@given(st.sampled_from([*sorted(FINAL), State.RUNNING]), st.lists(any_gate, max_size=3))
def test_no_gate_explains_a_run_that_runs_or_has_ended(state: State, gates: list[Gate]) -> None:
    reasons = why(a_run(state), Surroundings(gates=gates), NOW)
    assert not GATE_REASONS & {reason.type for reason in reasons}
