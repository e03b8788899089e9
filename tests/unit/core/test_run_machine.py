"""The life of a run: the chart as a table, each decision as a table, then what no sequence of them may break."""

from itertools import product
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stellwerk.core.errors import Clash, ImpossibleEvent
from stellwerk.core.events import (
    AnyRunEvent,
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
from stellwerk.core.names import run_keys
from stellwerk.core.retry import RetryPolicy
from stellwerk.core.run import (
    ERROR_CHARS_MAX,
    FINAL,
    KEEP_MS_DEFAULT,
    Action,
    BodyRef,
    Check,
    Command,
    Failed,
    Lost,
    Nothing,
    Outcome,
    Returned,
    Run,
    Signal,
    Spec,
    State,
    Succeeded,
)
from stellwerk.core.run_machine import (
    add,
    added_run,
    cancel,
    drop,
    edit,
    evolve,
    expire,
    expiry_ms,
    finish,
    parent_ended,
    ready,
    settle,
    start,
)

NOW = 1_800_000_000_000
LEASE = 30_000
KEY = "shop/import"
COMMAND = Command(("true",))


def a_spec(action: Action = COMMAND, retry: RetryPolicy | None = None, keep_ms: int | None = KEEP_MS_DEFAULT) -> Spec:
    keys = run_keys("default", "shop", "import")
    return Spec("shop", "import", action, NOW, keys=keys, retry=retry, keep_ms=keep_ms)


def a_run(
    state: State = State.READY,
    action: Action = COMMAND,
    retry: RetryPolicy | None = None,
    keep_ms: int | None = KEEP_MS_DEFAULT,
) -> Run:
    """A run as it stands in a state after an ordinary life."""
    run = Run("r1", 1, state, 100, a_spec(action, retry, keep_ms), live_key=None if state in FINAL else "k")
    if state is State.WAITING:
        return run.with_(due_ms=NOW + 5_000, alarm_ms=NOW + 5_000)
    if state is State.RUNNING:
        return run.with_(attempt=1, worker="w1", started_ms=NOW, alarm_ms=NOW + LEASE)
    if state in FINAL:
        return run.with_(attempt=1, worker="w1", started_ms=NOW, ended_ms=NOW, alarm_ms=NOW + KEEP_MS_DEFAULT)
    return run


def folded(run: Run, events: list[AnyRunEvent]) -> Run:
    for event in events:
        run = evolve(run, event)
    return run


def claimed(run: Run, worker: str = "w1", now_ms: int = NOW) -> Run:
    return evolve(run, start(run, worker, now_ms + LEASE, now_ms))


def finished(run: Run, outcome: Outcome, worker: str = "w1", now_ms: int = NOW) -> list[AnyRunEvent]:
    return finish(run, run.attempt, worker, outcome, result=None, now_ms=now_ms, chance=0.5)


def names(events: list[AnyRunEvent]) -> list[str]:
    return [type(event).__name__ for event in events]


# -- the chart --------------------------------------------------------------------------------------------------------

EVENTS: dict[str, AnyRunEvent] = {
    "RunAdded": RunAdded(KEY, "ada", NOW, "r1", a_spec(), 100, None, "k", 0),
    "RunReadied": RunReadied(KEY, "ada", NOW, "r1"),
    "RunStarted": RunStarted(KEY, "w1", NOW, "r1", 1, "w1", NOW + LEASE),
    "RunPostponed": RunPostponed(KEY, "w1", NOW, "r1", 1, "w1", "exit", "", NOW + 1, "try"),
    "RunSucceeded": RunSucceeded(KEY, "w1", NOW, "r1", 1, "w1"),
    "RunFailed": RunFailed(KEY, "w1", NOW, "r1", 1, "w1", "exit", "", "try"),
    "RunCancelled": RunCancelled(KEY, "ada", NOW, "r1", 1, "enough"),
    "RunSettled": RunSettled(KEY, "ada", NOW, "r1", succeeded=False, reason="no"),
    "RunStopAsked": RunStopAsked(KEY, "ada", NOW, "r1", "enough"),
    "RunEdited": RunEdited(KEY, "ada", NOW, "r1", 7, None),
    "RunDropped": RunDropped(KEY, "host", NOW, "r1"),
    "ResultRejected": ResultRejected(KEY, "w0", NOW, "r1", 1, "w0", "Succeeded"),
}

# Where an event leads from each state; a dot where it does not fit. Written by hand, not read from the machine.
CHART = """
                 waiting    ready      running    succeeded  failed     cancelled
RunAdded         .          .          .          .          .          .
RunReadied       ready      .          .          .          .          .
RunStarted       .          running    .          .          .          .
RunPostponed     .          .          waiting    .          .          .
RunSucceeded     .          .          succeeded  .          .          .
RunFailed        .          .          failed     .          .          .
RunCancelled     cancelled  cancelled  cancelled  .          .          .
RunSettled       failed     failed     .          .          .          .
RunStopAsked     .          .          running    .          .          .
RunEdited        waiting    ready      .          .          .          .
RunDropped       .          .          .          succeeded  failed     cancelled
ResultRejected   waiting    ready      running    succeeded  failed     cancelled
"""
_HEAD, *_ROWS = [line.split() for line in CHART.strip().splitlines()]
PAIRS = [(state, row[0], cell) for row in _ROWS for state, cell in zip(_HEAD, row[1:], strict=True)]


def test_the_chart_names_every_state_and_every_event() -> None:
    assert [state.value for state in State] == _HEAD
    assert {row[0] for row in _ROWS} == set(EVENTS) == {kind.__name__ for kind in get_args(AnyRunEvent)}
    assert all(type(event).__name__ == name for name, event in EVENTS.items())


@pytest.mark.parametrize(("state", "event", "after"), [pair for pair in PAIRS if pair[2] != "."])
def test_an_event_that_fits_leads_where_the_chart_says(state: str, event: str, after: str) -> None:
    assert evolve(a_run(State(state)), EVENTS[event]).state == after


@pytest.mark.parametrize(("state", "event"), [pair[:2] for pair in PAIRS if pair[2] == "."])
def test_an_event_that_does_not_fit_is_impossible(state: str, event: str) -> None:
    with pytest.raises(ImpossibleEvent, match=f"{event} does not fit run r1, which is {state}"):
        evolve(a_run(State(state)), EVENTS[event])


@pytest.mark.parametrize("attempt", [0, 1, 3])
def test_a_start_must_carry_the_next_attempt(attempt: int) -> None:
    run = a_run(State.READY).with_(attempt=1)
    with pytest.raises(ImpossibleEvent, match="does not follow"):
        evolve(run, RunStarted(KEY, "w1", NOW, "r1", attempt, "w1", NOW + LEASE))


def test_a_rejected_result_changes_nothing() -> None:
    for state in State:
        assert evolve(a_run(state), EVENTS["ResultRejected"]) == a_run(state)


def test_evolve_leaves_the_version_to_the_batch() -> None:
    assert evolve(a_run(State.READY), EVENTS["RunStarted"]).version == 1


# -- add and ready ----------------------------------------------------------------------------------------------------


def added(
    action: Action = COMMAND, due_ms: int | None = None, waits_for: int = 0, has_children: bool = False
) -> tuple[Run, list[AnyRunEvent]]:
    return add(
        "r1",
        a_spec(action),
        priority=7,
        due_ms=due_ms,
        live_key="k",
        waits_for=waits_for,
        has_children=has_children,
        now_ms=NOW,
        actor="ada",
    )


@pytest.mark.parametrize(
    ("action", "due_ms", "waits_for", "events", "state", "alarm_ms"),
    [
        (COMMAND, None, 0, ["RunAdded", "RunReadied"], State.READY, None),
        (COMMAND, NOW - 1, 0, ["RunAdded", "RunReadied"], State.READY, None),
        (COMMAND, NOW, 0, ["RunAdded", "RunReadied"], State.READY, None),
        (COMMAND, NOW + 1, 0, ["RunAdded"], State.WAITING, NOW + 1),
        (COMMAND, None, 2, ["RunAdded"], State.WAITING, None),
        (COMMAND, NOW + 1, 2, ["RunAdded"], State.WAITING, None),
        (Nothing(), None, 0, ["RunAdded", "RunReadied", "RunSettled"], State.SUCCEEDED, NOW + KEEP_MS_DEFAULT),
        (Nothing(), NOW + 1, 0, ["RunAdded"], State.WAITING, NOW + 1),
        (Signal(), None, 0, ["RunAdded", "RunReadied"], State.READY, None),
        (Check("file", "/x"), None, 0, ["RunAdded", "RunReadied"], State.READY, NOW),
    ],
)
def test_a_new_run_is_readied_at_once_unless_something_holds_it(
    action: Action, due_ms: int | None, waits_for: int, events: list[str], state: State, alarm_ms: int | None
) -> None:
    run, happened = added(action, due_ms, waits_for)
    assert names(happened) == events
    assert (run.state, run.alarm_ms, run.version, run.attempt) == (state, alarm_ms, 1, 0)


def test_the_events_of_an_add_give_the_run_that_was_added() -> None:
    for due_ms, waits_for in product((None, NOW + 9), (0, 1)):
        run, (first, *more) = added(due_ms=due_ms, waits_for=waits_for)
        assert isinstance(first, RunAdded)
        assert folded(added_run(first), more) == run


def test_a_new_run_remembers_what_was_asked_for() -> None:
    run, (first, *_) = added(due_ms=NOW + 9, has_children=True)
    assert (run.id, run.priority, run.due_ms, run.live_key, run.has_children) == ("r1", 7, NOW + 9, "k", True)
    assert (first.key, first.actor, first.at_ms, first.run) == (KEY, "ada", NOW, "r1")


@pytest.mark.parametrize("state", [state for state in State if state is not State.WAITING])
def test_only_what_waits_is_readied(state: State) -> None:
    assert ready(a_run(state).with_(due_ms=None), NOW, "host") == []


def test_the_due_time_readies_a_run_and_not_a_moment_earlier() -> None:
    waiting = a_run(State.WAITING).with_(due_ms=NOW + 5, alarm_ms=NOW + 5)
    assert ready(waiting, NOW + 4, "host") == []
    assert names(ready(waiting, NOW + 5, "host")) == ["RunReadied"]


def test_the_last_parents_end_sets_the_alarm_to_the_due_time() -> None:
    waiting = a_run(State.WAITING).with_(waits_for=2, due_ms=NOW + 5, alarm_ms=None)
    one_left = parent_ended(waiting)
    assert (one_left.waits_for, one_left.alarm_ms) == (1, None)
    assert (parent_ended(one_left).waits_for, parent_ended(one_left).alarm_ms) == (0, NOW + 5)


# -- start and finish -------------------------------------------------------------------------------------------------


def test_a_start_counts_the_attempt_and_sets_the_lease() -> None:
    run = claimed(a_run(State.READY).with_(attempt=4, parked="*"), "w9")
    assert (run.state, run.attempt, run.worker, run.started_ms) == (State.RUNNING, 5, "w9", NOW)
    assert (run.alarm_ms, run.parked, run.live_key) == (NOW + LEASE, None, "k")


AT_ONCE = RetryPolicy(2)
LATER = RetryPolicy(2, delay_ms=10_000)
NEVER = RetryPolicy(0)
POLICIES = {"none": None, "never": NEVER, "at once": AT_ONCE, "later": LATER}
OUTCOMES: dict[str, Outcome] = {
    "Succeeded": Succeeded(),
    "Failed": Failed("exit", "boom", 3),
    "Lost": Lost("gone"),
    "Returned": Returned("drain"),
}
AGAIN = ["RunPostponed", "RunReadied"]
# (outcome, policy) → the events, and against what a failure or a postponement counts
FINISHES: dict[tuple[str, str], tuple[list[str], str | None]] = {
    ("Succeeded", "none"): (["RunSucceeded"], None),
    ("Succeeded", "never"): (["RunSucceeded"], None),
    ("Succeeded", "at once"): (["RunSucceeded"], None),
    ("Succeeded", "later"): (["RunSucceeded"], None),
    ("Failed", "none"): (["RunFailed"], "try"),
    ("Failed", "never"): (["RunFailed"], "try"),
    ("Failed", "at once"): (AGAIN, "try"),
    ("Failed", "later"): (["RunPostponed"], "try"),
    ("Lost", "none"): (AGAIN, "crash"),
    ("Lost", "never"): (["RunFailed"], "try"),
    ("Lost", "at once"): (AGAIN, "try"),
    ("Lost", "later"): (["RunPostponed"], "try"),
    ("Returned", "none"): (AGAIN, "no"),
    ("Returned", "never"): (AGAIN, "no"),
    ("Returned", "at once"): (AGAIN, "no"),
    ("Returned", "later"): (AGAIN, "no"),
}


def test_the_table_of_ends_is_complete() -> None:
    assert set(FINISHES) == set(product(OUTCOMES, POLICIES))
    assert {type(outcome) for outcome in OUTCOMES.values()} == set(get_args(Outcome))


@pytest.mark.parametrize(("outcome", "policy"), FINISHES)
def test_the_end_of_an_attempt_means_what_outcome_and_policy_say(outcome: str, policy: str) -> None:
    events = finished(a_run(State.RUNNING, retry=POLICIES[policy]), OUTCOMES[outcome])
    wanted, counted = FINISHES[outcome, policy]
    assert names(events) == wanted
    assert getattr(events[0], "counted", None) == counted


@pytest.mark.parametrize(("outcome", "policy"), FINISHES)
def test_an_attempt_asked_to_stop_is_cancelled_unless_it_had_succeeded(outcome: str, policy: str) -> None:
    stopped = evolve(a_run(State.RUNNING, retry=POLICIES[policy]), EVENTS["RunStopAsked"])
    run = folded(stopped, finished(stopped, OUTCOMES[outcome]))
    if outcome == "Succeeded":
        assert (run.state, run.reason) == (State.SUCCEEDED, None)
    else:
        assert (run.state, run.reason) == (State.CANCELLED, "enough")


def test_the_evidence_of_an_end_stands_in_its_event() -> None:
    run = a_run(State.RUNNING)
    result = BodyRef("result", 2, "d")
    events = finish(run, 1, "w1", Succeeded(b"{}", 0), result=result, now_ms=NOW + 1, chance=0.0)
    assert events == [RunSucceeded(KEY, "w1", NOW + 1, "r1", 1, "w1", 0, result)]
    assert folded(run, events).result == result
    failed = finished(run, Failed("exit", "boom", 3))
    assert failed == [RunFailed(KEY, "w1", NOW, "r1", 1, "w1", "exit", "boom", "try", 3)]
    ended = folded(run, failed)
    assert (ended.reason, ended.error, ended.exit_code, ended.tries) == ("exit", "boom", 3, 1)


def test_a_long_error_is_cut() -> None:
    (event,) = finished(a_run(State.RUNNING), Failed("error", "x" * (ERROR_CHARS_MAX + 1)))
    assert isinstance(event, RunFailed)
    assert len(event.error) == ERROR_CHARS_MAX


def test_a_retry_waits_as_long_as_the_policy_says() -> None:
    policy = RetryPolicy(3, delay_ms=1_000, backoff=3.0)
    run = a_run(State.RUNNING, retry=policy)
    waits = []
    for _ in range(3):
        run = folded(run, finished(run, Failed("exit")))
        assert (run.state, run.alarm_ms) == (State.WAITING, run.due_ms)
        waits.append((run.due_ms or 0) - NOW)
        run = claimed(evolve(run, EVENTS["RunReadied"]))
    assert waits == [1_000, 3_000, 9_000]
    assert names(finished(run, Failed("exit"))) == ["RunFailed"]


@pytest.mark.parametrize("retries", [0, 1, 3])
@pytest.mark.parametrize("outcome", [Failed("exit"), Lost()])
def test_written_retries_bound_the_executions_and_a_lost_worker_is_one_of_them(retries: int, outcome: Outcome) -> None:
    run = a_run(State.RUNNING, retry=RetryPolicy(retries))
    for _ in range(retries):
        run = claimed(folded(run, finished(run, outcome)))
    run = folded(run, finished(run, outcome))
    assert (run.state, run.attempt, run.tries, run.crashes) == (State.FAILED, retries + 1, retries + 1, 0)


@pytest.mark.parametrize("by_lease", [True, False])
def test_unwritten_retries_forgive_a_lost_worker_three_times_and_fail_at_the_fourth(by_lease: bool) -> None:
    def lost(run: Run) -> list[AnyRunEvent]:
        return expire(run, NOW + LEASE, 0.5, "host") if by_lease else finished(run, Lost("gone"))

    run = a_run(State.RUNNING)
    for crashes in (1, 2, 3):
        run = folded(run, lost(run))
        assert (run.state, run.crashes, run.tries) == (State.READY, crashes, 0)
        run = claimed(run)
    run = folded(run, lost(run))
    assert (run.state, run.reason, run.attempt, run.crashes) == (State.FAILED, "worker lost", 4, 4)
    assert "lost its worker 4 times" in (run.error or "")


def test_a_returned_attempt_counts_as_nothing() -> None:
    run = a_run(State.RUNNING, retry=NEVER)
    for attempt in range(1, 20):
        assert run.attempt == attempt
        run = claimed(folded(run, finished(run, Returned())))
    assert (run.tries, run.crashes) == (0, 0)


def test_a_lease_is_expired_when_it_is_over_and_not_before() -> None:
    run = a_run(State.RUNNING)
    assert expire(run, NOW + LEASE - 1, 0.5, "host") == []
    assert names(expire(run, NOW + LEASE, 0.5, "host")) == AGAIN


@pytest.mark.parametrize("state", [state for state in State if state is not State.RUNNING])
def test_only_what_runs_can_expire(state: State) -> None:
    assert expire(a_run(state), NOW + 10 * KEEP_MS_DEFAULT, 0.5, "host") == []


def test_a_stopped_run_whose_worker_is_lost_is_cancelled() -> None:
    stopped = evolve(a_run(State.RUNNING), EVENTS["RunStopAsked"])
    events = expire(stopped, NOW + LEASE, 0.5, "host")
    assert events == [RunCancelled(KEY, "host", NOW + LEASE, "r1", 1, "enough", lost=True)]
    late = finish(folded(stopped, events), 1, "w1", Succeeded(), result=None, now_ms=NOW + LEASE, chance=0.5)
    assert names(late) == ["ResultRejected"]


# -- late and repeated words ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", OUTCOMES.values(), ids=OUTCOMES)
@pytest.mark.parametrize("again", ["not", "by another worker", "by the same worker"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_late_end_of_a_lost_attempt_is_rejected(outcome: Outcome, again: str, policy: str) -> None:
    run = a_run(State.RUNNING, retry=POLICIES[policy])
    run = folded(run, expire(run, NOW + LEASE, 0.5, "host"))
    if again != "not" and run.is_live:
        run = evolve(run, EVENTS["RunReadied"]) if run.state is State.WAITING else run
        run = claimed(run, "w1" if again == "by the same worker" else "w2", NOW + LEASE)
    events = finish(run, 1, "w1", outcome, result=None, now_ms=NOW + LEASE, chance=0.5)
    assert events == [ResultRejected(KEY, "w1", NOW + LEASE, "r1", 1, "w1", type(outcome).__name__)]
    assert folded(run, events) == run


@pytest.mark.parametrize(("attempt", "worker"), [(1, "w2"), (0, "w1"), (2, "w1"), (2, "w2")])
def test_the_word_of_a_stranger_is_rejected_as_it_was_given(attempt: int, worker: str) -> None:
    (event,) = finish(a_run(State.RUNNING), attempt, worker, Succeeded(), result=None, now_ms=NOW, chance=0.5)
    assert event == ResultRejected(KEY, worker, NOW, "r1", attempt, worker, "Succeeded")


@pytest.mark.parametrize("stop_asked", [False, True])
@pytest.mark.parametrize(("outcome", "policy"), FINISHES)
def test_a_worker_that_repeats_its_own_word_changes_nothing(outcome: str, policy: str, stop_asked: bool) -> None:
    run = a_run(State.RUNNING, retry=POLICIES[policy]).with_(stop_asked=stop_asked)
    run = folded(run, finished(run, OUTCOMES[outcome]))
    assert finish(run, 1, "w1", OUTCOMES[outcome], result=None, now_ms=NOW, chance=0.5) == []


# -- cancel, edit, settle, drop ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.WAITING, State.READY])
def test_what_has_not_started_is_cancelled_at_once(state: State) -> None:
    assert cancel(a_run(state), "enough", NOW, "ada") == [RunCancelled(KEY, "ada", NOW, "r1", 0, "enough")]


def test_what_runs_is_asked_to_stop_once() -> None:
    run = a_run(State.RUNNING)
    events = cancel(run, "enough", NOW, "ada")
    assert events == [RunStopAsked(KEY, "ada", NOW, "r1", "enough")]
    stopped = folded(run, events)
    assert (stopped.state, stopped.stop_asked, stopped.live_key) == (State.RUNNING, True, "k")
    assert cancel(stopped, "again", NOW, "bob") == []


@pytest.mark.parametrize("state", sorted(FINAL))
def test_what_has_ended_can_be_neither_cancelled_nor_edited_nor_settled(state: State) -> None:
    run = a_run(state, action=Signal())
    with pytest.raises(Clash, match="r1"):
        cancel(run, "enough", NOW, "ada")
    with pytest.raises(Clash, match="r1"):
        edit(run, 7, None, NOW, "ada")
    with pytest.raises(Clash, match="r1"):
        settle(run, True, "", NOW, "ada")


@pytest.mark.parametrize(
    ("state", "priority", "due_ms", "events", "after", "alarm_ms"),
    [
        (State.WAITING, None, None, [], State.WAITING, NOW + 5_000),
        (State.WAITING, 7, None, ["RunEdited"], State.WAITING, NOW + 5_000),
        (State.WAITING, None, NOW + 9, ["RunEdited"], State.WAITING, NOW + 9),
        (State.WAITING, None, NOW, ["RunEdited", "RunReadied"], State.READY, None),
        (State.WAITING, 7, NOW - 9, ["RunEdited", "RunReadied"], State.READY, None),
        (State.READY, None, None, [], State.READY, None),
        (State.READY, 7, None, ["RunEdited"], State.READY, None),
        (State.READY, None, NOW, ["RunEdited"], State.READY, None),
        (State.READY, 7, NOW + 9, ["RunEdited"], State.WAITING, NOW + 9),
    ],
)
def test_an_edit_moves_the_run_to_where_its_due_time_puts_it(
    state: State, priority: int | None, due_ms: int | None, events: list[str], after: State, alarm_ms: int | None
) -> None:
    run = a_run(state)
    happened = edit(run, priority, due_ms, NOW, "ada")
    edited = folded(run, happened)
    assert names(happened) == events
    assert (edited.state, edited.alarm_ms) == (after, alarm_ms)
    assert (edited.priority, edited.due_ms) == (priority or 100, due_ms or run.due_ms)


def test_an_edit_of_a_child_sets_no_alarm_while_its_parents_live() -> None:
    run = a_run(State.WAITING).with_(waits_for=1, due_ms=None, alarm_ms=None)
    for due_ms in (NOW - 9, NOW + 9):
        edited = folded(run, edit(run, None, due_ms, NOW, "ada"))
        assert (edited.state, edited.due_ms, edited.alarm_ms) == (State.WAITING, due_ms, None)


def test_an_edit_that_postpones_a_parked_run_unparks_it() -> None:
    parked = a_run(State.READY).with_(parked="*")
    assert folded(parked, edit(parked, None, NOW + 9, NOW, "ada")).parked is None


def test_what_runs_cannot_be_edited() -> None:
    with pytest.raises(Clash, match="only while it waits"):
        edit(a_run(State.RUNNING), 7, None, NOW, "ada")


@pytest.mark.parametrize("succeeded", [True, False])
@pytest.mark.parametrize("action", [Nothing(), Signal(), Check("file", "/x")])
def test_a_run_without_a_worker_is_settled(action: Action, succeeded: bool) -> None:
    run = a_run(State.READY, action=action)
    settled = folded(run, settle(run, succeeded, "so be it", NOW, "ada"))
    assert settled.state is (State.SUCCEEDED if succeeded else State.FAILED)
    assert settled.reason == (None if succeeded else "so be it")
    assert (settled.live_key, settled.attempt, settled.ended_ms) == (None, 0, NOW)


def test_the_work_of_a_worker_cannot_be_settled() -> None:
    with pytest.raises(Clash, match="work of a worker"):
        settle(a_run(State.READY), True, "", NOW, "ada")


def test_a_child_cannot_be_settled_before_its_parents_have_ended() -> None:
    with pytest.raises(Clash, match="still waits for 2 parents"):
        settle(a_run(State.WAITING, action=Signal()).with_(waits_for=2), True, "", NOW, "ada")


@pytest.mark.parametrize("state", State)
def test_only_what_has_ended_is_dropped(state: State) -> None:
    assert names(drop(a_run(state).with_(alarm_ms=NOW), NOW, "host")) == (["RunDropped"] if state in FINAL else [])


@pytest.mark.parametrize("alarm_ms", [None, NOW + 1])
def test_what_is_kept_is_not_dropped(alarm_ms: int | None) -> None:
    assert drop(a_run(State.SUCCEEDED).with_(alarm_ms=alarm_ms), NOW, "host") == []


@pytest.mark.parametrize(
    ("keep_ms", "state", "expiry"),
    [
        (KEEP_MS_DEFAULT, State.SUCCEEDED, NOW + KEEP_MS_DEFAULT),
        (KEEP_MS_DEFAULT, State.FAILED, NOW + KEEP_MS_DEFAULT),
        (KEEP_MS_DEFAULT, State.CANCELLED, NOW + KEEP_MS_DEFAULT),
        (None, State.SUCCEEDED, None),
        (None, State.FAILED, None),
        (None, State.CANCELLED, None),
        (0, State.SUCCEEDED, NOW),
        (0, State.FAILED, None),
        (0, State.CANCELLED, NOW),
        (1, State.FAILED, NOW + 1),
    ],
)
def test_a_run_is_kept_as_long_as_was_asked_and_a_dead_letter_longer(
    keep_ms: int | None, state: State, expiry: int | None
) -> None:
    assert expiry_ms(a_spec(keep_ms=keep_ms), state, NOW) == expiry


@pytest.mark.parametrize("keep_ms", [None, 0, 60_000])
def test_the_alarm_of_an_ended_run_is_its_expiry(keep_ms: int | None) -> None:
    running = a_run(State.RUNNING, keep_ms=keep_ms)
    for outcome in (Succeeded(), Failed("exit")):
        run = folded(running, finished(running, outcome, now_ms=NOW + 3))
        assert run.alarm_ms == expiry_ms(run.spec, run.state, NOW + 3)


# -- what no sequence may break ---------------------------------------------------------------------------------------

any_outcome = st.sampled_from(list(OUTCOMES.values()))
any_policy = st.none() | st.builds(
    RetryPolicy,
    st.integers(0, 3),
    st.sampled_from([0, 1_000]),
    st.sampled_from([1.0, 2.0]),
    st.sampled_from([0.0, 1.0]),
)
any_action = st.sampled_from([COMMAND, Nothing(), Signal(), Check("port", "80")])
any_step = st.one_of(
    st.tuples(st.just("wait"), st.sampled_from([1, 1_000, LEASE])),
    st.tuples(st.sampled_from(["ready", "claim", "expire", "cancel", "parent", "drop"]), st.just(None)),
    st.tuples(st.just("finish"), st.tuples(any_outcome, st.integers(0, 2), st.sampled_from(["w0", "w1", "w2"]))),
    st.tuples(st.just("report"), any_outcome),
    st.tuples(st.just("edit"), st.tuples(st.none() | st.integers(1, 1_000), st.none() | st.integers(-5_000, 5_000))),
    st.tuples(st.just("settle"), st.booleans()),
)


class Life:
    """One run, driven by steps; what happens at each event is held against what must always be true."""

    def __init__(self, action: Action, policy: RetryPolicy | None, due_in: int | None, waits_for: int) -> None:
        self.now_ms = NOW
        self.run, self.events = add(
            "r1",
            a_spec(action, policy),
            priority=100,
            due_ms=None if due_in is None else NOW + due_in,
            live_key="k",
            waits_for=waits_for,
            has_children=False,
            now_ms=NOW,
            actor="ada",
        )

    def step(self, what: str, how: Any) -> None:
        before = self.run
        try:
            events = self.decide(what, how)
        except Clash:
            assert before.state is not State.READY or what == "settle"
            return
        for event in events:
            self.apply(event)
        run = self.run
        if run.state is State.WAITING:  # someone will look at it again: a parent, or the alarm
            assert run.waits_for > 0 or (run.alarm_ms is not None and run.alarm_ms == run.due_ms)
        if run.state is State.RUNNING:
            assert run.alarm_ms is not None and run.worker is not None
        if run.state is State.READY:
            assert run.waits_for == 0
            assert run.alarm_ms is None or isinstance(run.spec.action, Check)

    def decide(self, what: str, how: Any) -> list[AnyRunEvent]:
        run, now_ms = self.run, self.now_ms
        match what, how:
            case "wait", int(passed_ms):
                self.now_ms += passed_ms
            case "ready", _:
                return ready(run, now_ms, "host")
            case "claim", _ if run.state is State.READY and run.spec.action == COMMAND:
                return [start(run, "w1", now_ms + LEASE, now_ms)]
            case "expire", _:
                return expire(run, now_ms, 0.5, "host")
            case "cancel", _:
                return cancel(run, "enough", now_ms, "ada")
            case "parent", _ if run.waits_for > 0 and run.state is State.WAITING:
                self.run = parent_ended(run)
                return ready(self.run, now_ms, "host")
            case "drop", _:
                return drop(run, now_ms, "host")
            case "finish", (outcome, back, worker):
                return finish(run, run.attempt - back, worker, outcome, result=None, now_ms=now_ms, chance=0.5)
            case "report", _:
                assert isinstance(how, Outcome)
                return finish(run, run.attempt, "w1", how, result=None, now_ms=now_ms, chance=0.5)
            case "edit", (priority, due_in):
                return edit(run, priority, None if due_in is None else now_ms + due_in, now_ms, "ada")
            case "settle", bool(succeeded):
                return settle(run, succeeded, "so be it", now_ms, "ada")
        return []

    def apply(self, event: AnyRunEvent) -> None:
        before, self.run = self.run, evolve(self.run, event)
        self.events.append(event)
        after = self.run
        assert (after.id, after.spec, after.version) == (before.id, before.spec, before.version)
        assert after.live_key == (None if after.state in FINAL else "k")
        assert after.attempt == before.attempt + isinstance(event, RunStarted)
        assert (after.ended_ms is not None) == (after.state in FINAL)
        assert before.tries <= after.tries and before.crashes <= after.crashes
        if before.state in FINAL:
            assert after == before
        if isinstance(event, RunSucceeded | RunFailed | RunPostponed):
            assert event.attempt == before.attempt
            assert event.worker in (before.worker, None)


@given(
    any_action, any_policy, st.none() | st.integers(-5_000, 5_000), st.integers(0, 2), st.lists(any_step, max_size=25)
)
def test_no_sequence_of_steps_breaks_a_run(
    action: Action,
    policy: RetryPolicy | None,
    due_in: int | None,
    waits_for: int,
    steps: list[tuple[str, Any]],
) -> None:
    life = Life(action, policy, due_in, waits_for)
    for what, how in steps:
        life.step(what, how)
    if policy is not None:
        assert life.run.crashes == 0
        assert life.run.tries <= policy.max + 1
    else:
        assert life.run.crashes <= 4
    ends = [event for event in life.events if isinstance(event, RunSucceeded | RunFailed | RunPostponed)]
    assert len({event.attempt for event in ends}) == len(ends), "two ends of one attempt were accepted"


@given(st.sampled_from(list(State)), st.lists(st.sampled_from(list(EVENTS.values())), max_size=12))
def test_whatever_event_comes_an_ended_run_stays_as_it_is_and_holds_no_live_key(
    state: State, events: list[AnyRunEvent]
) -> None:
    run = a_run(state)
    for event in events:
        try:
            after = evolve(run, event)
        except ImpossibleEvent:
            continue
        assert after == run if run.state in FINAL else after.attempt >= run.attempt
        assert after.live_key == (None if after.state in FINAL else "k")
        run = after


@given(any_outcome, any_policy, st.integers(0, 5), st.integers(0, 5), st.floats(0, 1, exclude_max=True))
def test_an_attempt_that_ends_always_leads_somewhere(
    outcome: Outcome, policy: RetryPolicy | None, tries: int, crashes: int, chance: float
) -> None:
    run = a_run(State.RUNNING, retry=policy).with_(tries=tries, crashes=crashes)
    after = folded(run, finish(run, 1, "w1", outcome, result=None, now_ms=NOW, chance=chance))
    assert after.state is not State.RUNNING
    assert after.state is not State.WAITING or (after.alarm_ms or 0) > NOW
