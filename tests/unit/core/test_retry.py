"""Retries: how many, how far apart, and that no policy can make the arithmetic overflow or run long."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stellwerk.core.retry import DELAY_MS_MAX, RETRIES_MAX, RetryPolicy

MIDDLE = 0.5  # the chance that moves nothing


def delays(policy: RetryPolicy, count: int) -> list[int | None]:
    return [policy.next_delay_ms(executions, MIDDLE) for executions in range(1, count + 1)]


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (RetryPolicy(0), [None, None]),
        (RetryPolicy(0, delay_ms=1_000, backoff=2.0, jitter=1.0), [None, None]),
        (RetryPolicy(1), [0, None]),
        (RetryPolicy(2, delay_ms=500), [500, 500, None]),
        (RetryPolicy(4, delay_ms=1_000, backoff=2.0), [1_000, 2_000, 4_000, 8_000, None]),
        (RetryPolicy(3, delay_ms=1_000, backoff=1.5), [1_000, 1_500, 2_250, None]),
        (RetryPolicy(3, delay_ms=1_000, backoff=0.5), [1_000, 500, 250, None]),
        (RetryPolicy(3, delay_ms=1_000, backoff=0.0), [1_000, 0, 0, None]),
        (RetryPolicy(3, delay_ms=0, backoff=10.0), [0, 0, 0, None]),
        (RetryPolicy(2, delay_ms=DELAY_MS_MAX + 1), [DELAY_MS_MAX, DELAY_MS_MAX, None]),
    ],
)
def test_the_waits_are_those_of_the_policy_and_then_there_is_none(
    policy: RetryPolicy, wanted: list[int | None]
) -> None:
    assert delays(policy, len(wanted)) == wanted


@pytest.mark.parametrize(
    ("chance", "wanted"), [(0.0, 800), (0.25, 900), (0.5, 1_000), (0.75, 1_100), (0.999_999, 1_200)]
)
def test_jitter_moves_the_wait_to_both_sides(chance: float, wanted: int) -> None:
    assert RetryPolicy(1, delay_ms=1_000, jitter=0.2).next_delay_ms(1, chance) == wanted


def test_full_jitter_may_take_the_whole_wait_and_never_makes_it_negative() -> None:
    assert RetryPolicy(1, delay_ms=1_000, jitter=1.0).next_delay_ms(1, 0.0) == 0


@pytest.mark.parametrize("backoff", [1.000_001, 2.0, 1e9, 1e300, math.inf])
@pytest.mark.parametrize("delay_ms", [1, 1_000, DELAY_MS_MAX, 10 * DELAY_MS_MAX])
def test_huge_factors_stop_at_the_longest_wait(delay_ms: int, backoff: float) -> None:
    policy = RetryPolicy(RETRIES_MAX, delay_ms=delay_ms, backoff=backoff)
    waits = delays(policy, RETRIES_MAX)
    assert all(wait is not None and 0 <= wait <= DELAY_MS_MAX for wait in waits)
    if backoff >= 2.0:
        assert waits[-1] == DELAY_MS_MAX


any_policy = st.builds(
    RetryPolicy,
    st.integers(0, RETRIES_MAX),
    st.integers(0, 2 * DELAY_MS_MAX),
    st.floats(0, allow_nan=False),
    st.floats(0, 1),
)
any_chance = st.floats(0, 1, exclude_max=True)


@given(any_policy, st.integers(1, RETRIES_MAX + 1), any_chance)
def test_a_wait_exists_exactly_while_retries_are_left(policy: RetryPolicy, executions: int, chance: float) -> None:
    assert (policy.next_delay_ms(executions, chance) is None) is (executions > policy.max)


@given(any_policy, st.integers(1, RETRIES_MAX + 1), any_chance)
def test_jitter_stays_within_its_share_of_the_wait(policy: RetryPolicy, executions: int, chance: float) -> None:
    middle = policy.next_delay_ms(executions, MIDDLE)
    moved = policy.next_delay_ms(executions, chance)
    if middle is None or moved is None:
        assert middle is moved
    else:
        assert 0 <= middle <= DELAY_MS_MAX
        assert abs(moved - middle) <= policy.jitter * middle + 1.5  # both were rounded


@given(st.integers(0, DELAY_MS_MAX), st.floats(1, 1e6), st.integers(2, RETRIES_MAX))
def test_with_a_factor_of_one_or_more_no_wait_is_shorter_than_the_one_before(
    delay_ms: int, backoff: float, executions: int
) -> None:
    policy = RetryPolicy(RETRIES_MAX, delay_ms=delay_ms, backoff=backoff)
    before, after = policy.next_delay_ms(executions - 1, MIDDLE), policy.next_delay_ms(executions, MIDDLE)
    assert before is not None and after is not None
    assert before <= after
