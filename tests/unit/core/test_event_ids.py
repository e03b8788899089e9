"""EventIds rise strictly whatever the clock does, tell the time, and fit into a JSON number."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stellwerk.core.event_ids import event_id_ms, next_event_id
from stellwerk.core.times import parse_time

NOW = 1_800_000_000_000


@pytest.mark.parametrize(
    ("last", "now_ms", "wanted"),
    [
        (0, 0, 1),
        (0, NOW, NOW * 1_000),
        (NOW * 1_000 - 1, NOW, NOW * 1_000),
        (NOW * 1_000, NOW, NOW * 1_000 + 1),
        (NOW * 1_000 + 999, NOW, NOW * 1_000 + 1_000),  # more events than a millisecond has room for
        (NOW * 1_000 + 5_000_000, NOW, NOW * 1_000 + 5_000_001),  # the clock went back
        (0, -NOW, 1),
    ],
)
def test_the_next_id_is_the_time_or_one_more_than_the_last(last: int, now_ms: int, wanted: int) -> None:
    assert next_event_id(last, now_ms) == wanted


@pytest.mark.parametrize(
    ("event_id", "time_ms"), [(NOW * 1_000, NOW), (NOW * 1_000 + 999, NOW), (NOW * 1_000 + 1_000, NOW + 1)]
)
def test_an_id_tells_the_millisecond_of_its_event(event_id: int, time_ms: int) -> None:
    assert event_id_ms(event_id) == time_ms


def test_an_id_of_the_year_2255_is_still_an_exact_json_number() -> None:
    event_id = next_event_id(0, parse_time("2255-01-01T00:00:00Z", "then"))
    assert event_id < 2**53
    assert int(float(event_id)) == event_id


@given(st.integers(0, 2**53), st.lists(st.integers(-NOW, 2 * NOW), max_size=30))
def test_ids_rise_strictly_whatever_the_clock_does(last: int, clock: list[int]) -> None:
    for now_ms in clock:
        event_id = next_event_id(last, now_ms)
        assert event_id > last
        assert event_id_ms(event_id) >= now_ms
        last = event_id


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30))
def test_a_clock_that_goes_forward_is_told_exactly(pauses: list[int]) -> None:
    last, now_ms = 0, NOW
    for pause_ms in pauses:
        now_ms += pause_ms
        last = next_event_id(last, now_ms)
        assert event_id_ms(last) == now_ms
