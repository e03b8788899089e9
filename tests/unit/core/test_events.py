"""Events: what is stored comes back as it was, and what is shown is plain JSON in the words of the API."""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stellwerk.core.events import (
    AnyEvent,
    AnyRunEvent,
    Event,
    GateOpened,
    GateShut,
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
    Stamped,
    StoreAdopted,
    TokenCreated,
    TokenRevoked,
    shown,
    type_name,
)
from stellwerk.core.retry import RetryPolicy
from stellwerk.core.run import (
    BodyRef,
    Check,
    Command,
    Nothing,
    Parent,
    PythonCall,
    Shell,
    Signal,
    Spec,
)
from stellwerk.core.times import parse_time

NOW = 1_800_000_000_000
NOW_SHOWN = "2027-01-15T08:00:00.000Z"
EVENT_ID = NOW * 1_000 + 7
RUN = ("shop/import", "ada", NOW, "r1")
GATE = ("*", "ada", NOW)

PLAIN_SPEC = Spec("shop", "import", Command(("true",)), NOW)
FULL_SPEC = Spec(
    "shop/eu",
    "import",
    PythonCall("shop.jobs:load", "thread"),
    NOW,
    queue="sync",
    door="nodes",
    keys=("*", "queue:sync"),
    retry=RetryPolicy(3, 1_500, 2.0, 0.1),
    timeout_ms=90_000,
    keep_ms=None,
    labels={"team": "Köln"},
    env={"PASSWORD": "hunter2"},
    cwd="/srv",
    inputs=(BodyRef("args", 2, "d"),),
    parents=(Parent("p1"), Parent("p2", "ended")),
    rerun_of="r0",
)

EXAMPLES: list[AnyEvent] = [
    RunAdded(*RUN, PLAIN_SPEC, 100, None, None, 0),
    RunAdded(*RUN, FULL_SPEC, 1, NOW + 1, "shop", 2),
    RunReadied(*RUN),
    RunStarted(*RUN, 1, "w1", NOW + 30_000),
    RunPostponed(*RUN, 1, "w1", "exit", "boom\n", NOW + 1_000, "try", 3),
    RunPostponed(*RUN, 1, None, "worker lost", "", NOW, "crash"),
    RunSucceeded(*RUN, 2, "w1"),
    RunSucceeded(*RUN, 2, "w1", 0, BodyRef("result", 2, "d")),
    RunFailed(*RUN, 2, "w1", "timeout", "", "try"),
    RunFailed(*RUN, 2, None, "worker lost", "gone", "crash", -9),
    RunCancelled(*RUN, 0, "enough"),
    RunSettled(*RUN, succeeded=True, reason="nothing to do"),
    RunStopAsked(*RUN, "enough"),
    RunEdited(*RUN, None, None),
    RunEdited(*RUN, 7, NOW + 1),
    RunDropped(*RUN),
    ResultRejected(*RUN, 1, "w0", "Succeeded"),
    GateShut(*GATE, "*", "pause", ""),
    GateShut(*GATE, "limit:db", "limit", "small", 500, 2, NOW + 1, ("a/b",)),
    GateOpened(*GATE, "*", "pause", "done"),
    TokenCreated(*GATE, "t1", "ci", "operator"),
    TokenRevoked(*GATE, "t1", "ci"),
    StoreAdopted(*GATE, "epoch-1"),
]
IDS = [f"{type_name(event)}-{number}" for number, event in enumerate(EXAMPLES)]

# Stored journals are arrays: these fields stand in this order for ever. New ones follow them, with a default.
STORED_FIELDS = {
    "RunAdded": "key actor at_ms run spec priority due_ms live_key waits_for",
    "RunReadied": "key actor at_ms run",
    "RunStarted": "key actor at_ms run attempt worker lease_until_ms",
    "RunPostponed": "key actor at_ms run attempt worker reason error due_ms counted exit_code",
    "RunSucceeded": "key actor at_ms run attempt worker exit_code result",
    "RunFailed": "key actor at_ms run attempt worker reason error counted exit_code",
    "RunCancelled": "key actor at_ms run attempt reason",
    "RunSettled": "key actor at_ms run succeeded reason",
    "RunStopAsked": "key actor at_ms run reason",
    "RunEdited": "key actor at_ms run priority due_ms",
    "RunDropped": "key actor at_ms run",
    "ResultRejected": "key actor at_ms run attempt worker outcome",
    "GateShut": "key actor at_ms gate kind reason floor limit until_ms exempt",
    "GateOpened": "key actor at_ms gate kind reason",
    "TokenCreated": "key actor at_ms token name role",
    "TokenRevoked": "key actor at_ms token name",
    "StoreAdopted": "key actor at_ms epoch",
}
KERNEL_TYPES = [kind for kind in get_args(AnyEvent) if kind.__name__ in STORED_FIELDS]


def stored(event: AnyEvent) -> AnyEvent:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=AnyEvent)


def told(event: AnyEvent) -> dict[str, Any]:
    """The event as a client of the API gets it."""
    answer = msgspec.json.decode(msgspec.json.encode(shown(Stamped(EVENT_ID, event))))
    assert isinstance(answer, dict)
    return answer


def all_keys(value: object) -> set[str]:
    """The names of all fields in a JSON value, however deep."""
    if isinstance(value, dict):
        return set(value) | {key for inner in value.values() for key in all_keys(inner)}
    if isinstance(value, list):
        return {key for inner in value for key in all_keys(inner)}
    return set()


# -- stored -----------------------------------------------------------------------------------------------------------


def test_every_event_of_the_kernel_has_an_example_and_a_stored_shape() -> None:
    assert set(STORED_FIELDS) == {type_name(event) for event in EXAMPLES}
    assert {kind.__name__ for kind in get_args(AnyRunEvent)} <= set(STORED_FIELDS)
    assert len(KERNEL_TYPES) == len(STORED_FIELDS)


@pytest.mark.parametrize("event", EXAMPLES, ids=IDS)
def test_a_stored_event_comes_back_as_it_was(event: AnyEvent) -> None:
    assert stored(event) == event
    assert type(stored(event)) is type(event)


@pytest.mark.parametrize("event", EXAMPLES, ids=IDS)
def test_a_stored_event_is_an_array_that_begins_with_its_type(event: AnyEvent) -> None:
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(event))
    assert raw[:4] == [type_name(event), event.key, event.actor, event.at_ms]


@pytest.mark.parametrize("kind", KERNEL_TYPES, ids=lambda kind: kind.__name__)
def test_the_stored_fields_of_an_event_never_change_their_order(kind: type[Event]) -> None:
    fields = STORED_FIELDS[kind.__name__].split()
    assert list(kind.__struct_fields__[: len(fields)]) == fields
    without_default = len(kind.__struct_fields__) - len(kind.__struct_defaults__)
    assert without_default <= len(fields), "an appended field needs a default"


def test_an_event_of_an_older_version_gets_the_defaults_of_what_it_did_not_know() -> None:
    old = msgspec.msgpack.encode(["RunSucceeded", *RUN, 1, "w1"])
    assert msgspec.msgpack.decode(old, type=AnyEvent) == RunSucceeded(*RUN, 1, "w1", None, None)


def test_an_unknown_event_is_noticed() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(["RunTeleported", *RUN]), type=AnyEvent)


any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
any_ms = st.integers(0, 2**53 // 1_000)
any_action = st.one_of(
    st.builds(Command, st.lists(any_text, max_size=3).map(tuple)),
    st.builds(Shell, any_text),
    st.builds(PythonCall, any_text, st.sampled_from(["process", "thread"])),
    st.builds(
        Check, st.sampled_from(["file", "port"]), any_text, st.integers(1, 10**9), st.none() | st.integers(0, 10**9)
    ),
    st.sampled_from([Nothing(), Signal()]),
)
any_spec = st.builds(
    Spec,
    any_text,
    any_text,
    any_action,
    any_ms,
    retry=st.none() | st.builds(RetryPolicy, st.integers(0, 9), any_ms, st.floats(0, 9), st.floats(0, 1)),
    timeout_ms=st.none() | any_ms,
    keep_ms=st.none() | any_ms,
    labels=st.dictionaries(any_text, any_text, max_size=2),
    env=st.dictionaries(any_text, any_text, max_size=2),
    parents=st.lists(st.builds(Parent, any_text, st.sampled_from(["succeeded", "failed", "ended"])), max_size=2).map(
        tuple
    ),
    rerun_of=st.none() | any_text,
)
any_event = st.one_of(
    st.builds(
        RunAdded,
        *(any_text, any_text, any_ms, any_text, any_spec),
        *(st.integers(1, 1_000), st.none() | any_ms, st.none() | any_text, st.integers(0, 9)),
    ),
    st.builds(
        RunPostponed,
        *(any_text, any_text, any_ms, any_text, st.integers(0, 9), st.none() | any_text, any_text, any_text, any_ms),
        *(st.sampled_from(["try", "crash", "no"]), st.none() | st.integers(-64, 255)),
    ),
    st.sampled_from(EXAMPLES),
)


@given(any_event)
def test_whatever_an_event_holds_it_is_stored_and_shown_whole(event: AnyEvent) -> None:
    assert stored(event) == event
    assert set(told(event)) == set(shown(Stamped(EVENT_ID, event)))


# -- shown ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", EXAMPLES, ids=IDS)
def test_a_shown_event_has_the_fields_of_the_api(event: AnyEvent) -> None:
    answer = told(event)
    assert (answer["event_id"], answer["type"], answer["key"]) == (EVENT_ID, type_name(event), event.key)
    assert (answer["time"], answer["actor"]) == (NOW_SHOWN, "ada")
    assert answer.get("run") == getattr(event, "run", None)
    assert answer.get("attempt") == getattr(event, "attempt", None)


@pytest.mark.parametrize("event", EXAMPLES, ids=IDS)
def test_a_shown_event_has_no_empty_fields(event: AnyEvent) -> None:
    assert None not in told(event).values()


@pytest.mark.parametrize("event", EXAMPLES, ids=IDS)
def test_no_shown_event_tells_times_or_durations_in_milliseconds(event: AnyEvent) -> None:
    assert not [name for name in all_keys(told(event)) if name.endswith("_ms")]


@pytest.mark.parametrize(
    ("event", "name", "time_ms"),
    [
        (RunAdded(*RUN, PLAIN_SPEC, 1, NOW + 1, None, 0), "due_at", NOW + 1),
        (RunEdited(*RUN, None, NOW + 1), "due_at", NOW + 1),
        (RunPostponed(*RUN, 1, "w1", "exit", "", NOW + 1, "try"), "due_at", NOW + 1),
        (RunStarted(*RUN, 1, "w1", NOW + 30_000), "lease_until", NOW + 30_000),
        (GateShut(*GATE, "*", "pause", "", until_ms=NOW + 1), "until", NOW + 1),
    ],
)
def test_the_times_of_an_event_are_shown_under_the_names_of_the_api(event: AnyEvent, name: str, time_ms: int) -> None:
    assert parse_time(told(event)[name], name) == time_ms


def test_the_time_of_a_shown_event_is_that_of_its_commit() -> None:
    assert shown(Stamped((NOW + 1_000) * 1_000, RunReadied(*RUN)))["time"] == "2027-01-15T08:00:01.000Z"


def test_a_plain_run_is_shown_as_it_was_asked_for() -> None:
    assert told(RunAdded(*RUN, PLAIN_SPEC, 100, None, None, 0))["spec"] == {
        "scope": "shop",
        "name": "import",
        "action": {"type": "command", "argv": ["true"]},
        "queue": "default",
        "door": "native",
        "created_at": NOW_SHOWN,
        "labels": {},
        "parents": [],
        "keep": 2_592_000,
    }


def test_a_run_with_everything_is_shown_in_the_words_of_the_request_without_its_environment() -> None:
    assert told(RunAdded(*RUN, FULL_SPEC, 100, None, None, 2))["spec"] == {
        "scope": "shop/eu",
        "name": "import",
        "action": {"type": "python", "function": "shop.jobs:load", "isolation": "thread"},
        "queue": "sync",
        "door": "nodes",
        "created_at": NOW_SHOWN,
        "labels": {"team": "Köln"},
        "parents": [{"id": "p1", "when": "succeeded"}, {"id": "p2", "when": "ended"}],
        "keep": "always",
        "retry": {"max": 3, "delay": 1.5, "backoff": 2.0, "jitter": 0.1},
        "timeout": 90,
        "cwd": "/srv",
        "rerun_of": "r0",
    }


def test_a_result_is_shown_with_names() -> None:
    answer = told(RunSucceeded(*RUN, 2, "w1", 0, BodyRef("result", 2, "d")))
    assert answer["result"] == {"key": "result", "size_bytes": 2, "digest": "d"}


def test_a_check_is_shown_in_seconds() -> None:
    spec = Spec("shop", "import", Check("port", "80", 2_500, 60_000), NOW, keep_ms=0)
    answer = told(RunAdded(*RUN, spec, 100, None, None, 0))["spec"]
    assert answer["action"] == {"type": "check", "kind": "port", "value": "80", "interval": 2.5, "give_up": 60}
    assert answer["keep"] == "nothing"
