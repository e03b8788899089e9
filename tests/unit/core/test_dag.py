"""Edges: what the end of a parent makes of its child, and which requests cannot be put in order."""

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stellwerk.core.dag import child_after, find_cycle, impossible_reason, satisfied
from stellwerk.core.events import RunCancelled, RunReadied, RunSettled
from stellwerk.core.run import FINAL, Action, Command, Nothing, Parent, Run, Spec, State, When

NOW = 1_800_000_000_000
COMMAND = Command(("true",))
WHENS: tuple[When, ...] = get_args(When)

SATISFIED = """
            waiting  ready  running  succeeded  failed  cancelled
succeeded   None     None   None     True       False   False
failed      None     None   None     False      True    False
ended       None     None   None     True       True    True
"""
_HEAD, *_ROWS = [line.split() for line in SATISFIED.strip().splitlines()]
CELLS = [(row[0], state, cell) for row in _ROWS for state, cell in zip(_HEAD, row[1:], strict=True)]


def a_parent(state: State, run_id: str = "p1") -> Run:
    return Run(run_id, 3, state, 100, Spec("shop", "parent", COMMAND, NOW))


def a_child(waits_for: int = 1, due_ms: int | None = None, action: Action = COMMAND) -> Run:
    parents = tuple(Parent(f"p{number}") for number in range(1, waits_for + 1))
    spec = Spec("shop", "child", action, NOW, parents=parents)
    return Run("c1", 1, State.WAITING, 100, spec, due_ms=due_ms, live_key="k", waits_for=waits_for)


# -- satisfied --------------------------------------------------------------------------------------------------------


def test_the_table_of_edges_is_complete() -> None:
    assert {row[0] for row in _ROWS} == set(WHENS)
    assert [state.value for state in State] == _HEAD


@pytest.mark.parametrize(("when", "state", "answer"), CELLS)
def test_an_edge_is_satisfied_as_the_table_says(when: When, state: str, answer: str) -> None:
    assert str(satisfied(when, State(state))) == answer


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (State.SUCCEEDED, "parent p1 succeeded"),
        (State.FAILED, "parent p1 failed"),
        (State.CANCELLED, "parent p1 was cancelled"),
    ],
)
def test_a_child_that_can_never_start_is_told_which_parent_is_to_blame(state: State, text: str) -> None:
    assert impossible_reason("p1", state) == text


# -- child_after ------------------------------------------------------------------------------------------------------


def test_the_end_of_the_last_parent_readies_the_child() -> None:
    answer = child_after(a_parent(State.SUCCEEDED), a_child(), "succeeded", NOW, "host")
    assert answer is not None
    child, events = answer
    assert (child.state, child.waits_for, child.live_key) == (State.READY, 0, "k")
    assert events == [RunReadied("shop/child", "host", NOW, "c1")]


def test_the_end_of_one_of_several_parents_leaves_the_child_waiting() -> None:
    answer = child_after(a_parent(State.SUCCEEDED), a_child(waits_for=3), "succeeded", NOW, "host")
    assert answer == (a_child(waits_for=3).with_(waits_for=2), [])


def test_a_child_that_is_not_due_waits_for_its_time_after_its_last_parent() -> None:
    answer = child_after(a_parent(State.FAILED), a_child(due_ms=NOW + 9), "failed", NOW, "host")
    assert answer is not None
    child, events = answer
    assert (child.state, child.waits_for, child.alarm_ms, events) == (State.WAITING, 0, NOW + 9, [])


def test_a_child_without_work_ends_with_its_last_parent() -> None:
    answer = child_after(a_parent(State.SUCCEEDED), a_child(action=Nothing()), "succeeded", NOW, "host")
    assert answer is not None
    child, events = answer
    assert child.state is State.SUCCEEDED
    assert [type(event) for event in events] == [RunReadied, RunSettled]


@pytest.mark.parametrize("waits_for", [1, 5])
@pytest.mark.parametrize(
    ("when", "state"), [(when, State(state)) for when, state, answer in CELLS if answer == "False"]
)
def test_a_child_is_cancelled_when_a_parent_ends_otherwise_than_wanted(
    when: When, state: State, waits_for: int
) -> None:
    answer = child_after(a_parent(state), a_child(waits_for), when, NOW, "host")
    assert answer is not None
    child, events = answer
    reason = impossible_reason("p1", state)
    assert events == [RunCancelled("shop/child", "host", NOW, "c1", 0, reason)]
    assert (child.state, child.reason, child.live_key) == (State.CANCELLED, reason, None)


@pytest.mark.parametrize("state", [state for state in State if state is not State.WAITING])
def test_nothing_happens_to_a_child_that_no_longer_waits(state: State) -> None:
    child = a_child().with_(state=state)
    assert child_after(a_parent(State.FAILED), child, "succeeded", NOW, "host") is None


def test_nothing_happens_to_a_child_that_waits_for_its_time_only() -> None:
    assert child_after(a_parent(State.FAILED), a_child(waits_for=0), "succeeded", NOW, "host") is None


@given(st.data(), st.lists(st.sampled_from(WHENS), min_size=1, max_size=6))
def test_in_whatever_order_the_parents_end_the_child_starts_exactly_if_all_end_as_wanted(
    data: st.DataObject, whens: list[When]
) -> None:
    ends = data.draw(st.lists(st.sampled_from(sorted(FINAL)), min_size=len(whens), max_size=len(whens)))
    order = data.draw(st.permutations(range(len(whens))))
    child = a_child(waits_for=len(whens))
    for number in order:
        answer = child_after(a_parent(ends[number], f"p{number}"), child, whens[number], NOW, "host")
        if answer is not None:
            child = answer[0]
    all_as_wanted = all(satisfied(when, end) for when, end in zip(whens, ends, strict=True))
    assert child.state is (State.READY if all_as_wanted else State.CANCELLED)


# -- find_cycle -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parents_of", "cycle"),
    [
        ({}, None),
        ({0: []}, None),
        ({0: [], 1: [0], 2: [0, 1]}, None),
        ({0: [1], 1: []}, None),  # a parent may stand behind its child
        ({0: [], 1: [0, 0]}, None),  # the same parent twice is odd, not a cycle
        ({0: [0]}, [0]),
        ({0: [1], 1: [0]}, [0, 1]),
        ({0: [2], 1: [0], 2: [1], 3: []}, [0, 1, 2]),
        ({0: [], 1: [0, 2], 2: [1], 3: [2]}, [1, 2, 3]),  # 3 hangs on the cycle
    ],
)
def test_the_entries_that_cannot_be_put_in_order_are_named(
    parents_of: dict[int, list[int]], cycle: list[int] | None
) -> None:
    assert find_cycle(parents_of) == cycle


def test_a_very_long_chain_costs_no_stack() -> None:
    chain: dict[int, Sequence[int]] = {0: ()}
    chain.update({number: (number - 1,) for number in range(1, 20_000)})
    assert find_cycle(chain) is None
    assert find_cycle({**chain, 0: (19_999,)}) == list(range(20_000))


any_graph = st.integers(1, 8).flatmap(
    lambda size: st.fixed_dictionaries({entry: st.lists(st.integers(0, size - 1), max_size=3) for entry in range(size)})
)


@given(any_graph)
def test_a_cycle_is_found_exactly_when_there_is_one(parents_of: Mapping[int, Sequence[int]]) -> None:
    try:
        TopologicalSorter(parents_of).prepare()
        has_cycle = False
    except CycleError:
        has_cycle = True
    assert (find_cycle(parents_of) is not None) is has_cycle


@given(any_graph)
def test_exactly_the_entries_before_which_a_cycle_stands_are_left(parents_of: Mapping[int, Sequence[int]]) -> None:
    placed: set[int] = set()
    for _ in parents_of:
        placed |= {entry for entry, parents in parents_of.items() if placed.issuperset(parents)}
    assert set(find_cycle(parents_of) or ()) == set(parents_of) - placed
