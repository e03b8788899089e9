"""Times and durations as text: what is understood, what is refused, and that nothing hostile does anything else."""

import math
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stellwerk.core.errors import Refused
from stellwerk.core.times import (
    DAY_MS,
    DURATION_MS_MAX,
    HOUR_MS,
    MINUTE_MS,
    SECOND_MS,
    TIME_MS_MAX,
    parse_duration,
    parse_time,
    show_duration,
    show_time,
)

# -- durations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (0, 0),
        (60, MINUTE_MS),
        (1.5, 1_500),
        (0.001, 1),
        (1e-9, 0),
        (-0.0, 0),
        (DURATION_MS_MAX // 1_000, DURATION_MS_MAX),
        ("0", 0),
        ("60", MINUTE_MS),
        ("1.5", 1_500),
        ("007", 7_000),
        (" 5s ", 5_000),
        ("250ms", 250),
        ("10s", 10_000),
        ("5m", 5 * MINUTE_MS),
        ("2h", 2 * HOUR_MS),
        ("1d", DAY_MS),
        ("1w", 7 * DAY_MS),
        ("0.5h", 30 * MINUTE_MS),
        ("1.25s", 1_250),
        ("PT0S", 0),
        ("PT5M", 5 * MINUTE_MS),
        ("PT1.5S", 1_500),
        ("PT0.007S", 7),
        ("P1D", DAY_MS),
        ("P2W", 14 * DAY_MS),
        ("P1DT2H3M4S", DAY_MS + 2 * HOUR_MS + 3 * MINUTE_MS + 4 * SECOND_MS),
        ("PT90M", 90 * MINUTE_MS),
        ("P36600D", DURATION_MS_MAX),
    ],
)
def test_a_duration_is_understood(value: object, wanted: int) -> None:
    assert parse_duration(value, "delay") == wanted


@pytest.mark.parametrize(
    "value",
    [
        # not a duration at all
        None,
        True,
        False,
        [],
        {},
        b"5s",
        timedelta(seconds=5),
        # numbers out of bounds
        -1,
        -0.001,
        math.nan,
        math.inf,
        -math.inf,
        1e308,
        10**400,
        -(10**400),
        DURATION_MS_MAX // 1_000 + 1,
        # text that looks like one
        "",
        " ",
        "s",
        "m5",
        "5 s",
        "5S",
        "5x",
        "5ss",
        "5m30s",
        ".5s",
        "5.",
        "5.s",
        "1,5",
        "-5s",
        "+5s",
        "1e3",
        "0x10",
        "1_000",
        "NaN",
        "inf",
        "5\x00s",
        "5s\n5s",
        "five",
        # ISO 8601 without a length, or with one that is not known
        "P",
        "PT",
        "T",
        "P1DT",
        "P1Y",
        "P1M",
        "P1Y2M3D",
        "P0001-00-00T00:00:00",
        "PT5",
        "P5S",
        "PT1D",
        "PT1S1M",
        "pt5m",
        "P-1D",
        "-P1D",
        "PT-5M",
        "PPT5M",
        "PT5M PT5M",
        # digits that only look like digits
        "٥s",
        "５s",
        "5\u00b2",
        "PT٥M",
        "P１D",
        # too much of everything
        "9" * 12,
        "999999999999w",
        "P999999999W",
        "PT999999999H",
        "9" * 13 + "s",
        "9" * 10_000,
        "P" + "9" * 10_000 + "D",
        "0" * 1_000_000,
        " " * 1_000_000 + "5s",
        "5s\ud800",
    ],
    ids=lambda value: repr(value)[:24].encode("ascii", "backslashreplace").decode(),
)
def test_what_is_no_duration_is_refused_and_the_place_named(value: object) -> None:
    with pytest.raises(Refused) as refused:
        parse_duration(value, "retry.delay")
    assert refused.value.where == "retry.delay"
    assert refused.value.message.startswith("retry.delay ")
    assert len(refused.value.message) < 200


@given(st.text(max_size=80) | st.text("PTWDHMSmshdw0123456789.-+ ", max_size=20))
def test_any_text_is_a_bounded_duration_or_refused(text: str) -> None:
    try:
        assert 0 <= parse_duration(text, "delay") <= DURATION_MS_MAX
    except Refused:
        pass


@given(st.integers() | st.floats())
def test_any_number_is_a_bounded_duration_or_refused(value: float) -> None:
    try:
        duration_ms = parse_duration(value, "delay")
    except Refused:
        assert not 0 <= value <= DURATION_MS_MAX / 1_000
    else:
        assert 0 <= duration_ms <= DURATION_MS_MAX
        assert duration_ms == pytest.approx(value * 1_000, abs=0.5)


@given(st.integers(0, DURATION_MS_MAX))
def test_the_same_duration_is_understood_in_every_spelling(duration_ms: int) -> None:
    seconds, rest_ms = divmod(duration_ms, 1_000)
    spellings = [duration_ms / 1_000, f"{seconds}.{rest_ms:03d}", f"{seconds}.{rest_ms:03d}s"]
    spellings += [f"PT{seconds}.{rest_ms:03d}S"] if seconds < 10**9 else []
    spellings += [f"{duration_ms}ms"] if duration_ms < 10**12 else []
    spellings += [f"P{seconds // 86_400}DT{seconds % 86_400}.{rest_ms:03d}S"]
    assert {parse_duration(spelling, "delay") for spelling in spellings} == {duration_ms}


@pytest.mark.parametrize(
    ("duration_ms", "wanted"),
    [
        (0, "0ms"),
        (350, "350ms"),
        (999, "999ms"),
        (12_000, "12s"),
        (5 * MINUTE_MS, "5m"),
        (2 * HOUR_MS + 30 * MINUTE_MS, "2h 30m"),
        (3 * DAY_MS + 4 * HOUR_MS + 5 * MINUTE_MS, "3d 4h"),
        (DURATION_MS_MAX, "36600d"),
    ],
)
def test_a_duration_is_shown_to_people_in_at_most_two_units(duration_ms: int, wanted: str) -> None:
    assert show_duration(duration_ms) == wanted


@given(st.integers(0, DURATION_MS_MAX))
def test_a_shown_duration_is_never_too_long_and_says_most_of_it(duration_ms: int) -> None:
    parts = [parse_duration(part, "shown") for part in show_duration(duration_ms).split()]
    assert 1 <= len(parts) <= 2
    assert duration_ms / 2 <= sum(parts) <= duration_ms


# -- times ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("1970-01-01T00:00:00Z", "1970-01-01T00:00:00.000Z"),
        ("2026-03-29T02:00:00Z", "2026-03-29T02:00:00.000Z"),
        ("2026-03-29T02:00:00+01:00", "2026-03-29T01:00:00.000Z"),
        ("2026-03-29T02:00:00+0100", "2026-03-29T01:00:00.000Z"),
        ("2026-03-29T02:00:00-11:30", "2026-03-29T13:30:00.000Z"),
        ("2026-03-29T02:00:00-00:00", "2026-03-29T02:00:00.000Z"),
        ("2026-03-29 02:00:00Z", "2026-03-29T02:00:00.000Z"),
        ("2026-03-29T02:00Z", "2026-03-29T02:00:00.000Z"),
        ("20260329T020000Z", "2026-03-29T02:00:00.000Z"),
        ("2026-03-29T02:00:00.5Z", "2026-03-29T02:00:00.500Z"),
        ("2026-03-29T02:00:00.123999Z", "2026-03-29T02:00:00.123Z"),
        ("2024-02-29T00:00:00Z", "2024-02-29T00:00:00.000Z"),
        ("9999-12-31T23:59:59Z", "9999-12-31T23:59:59.000Z"),
    ],
)
def test_a_time_with_a_zone_is_understood_and_shown_in_utc(text: str, wanted: str) -> None:
    assert show_time(parse_time(text, "due")) == wanted


@pytest.mark.parametrize(
    "text",
    [
        None,
        True,
        0,
        1_800_000_000,
        1.5,
        math.nan,
        [],
        b"2026-03-29T02:00:00Z",
        datetime(2026, 3, 29, tzinfo=UTC),
        "",
        " ",
        "now",
        "tomorrow",
        "NaN",
        "1800000000",
        "2026",
        "2026-03",
        "2026-03-29",
        "02:00:00Z",
        "2026-03-29T02:00:00",  # no zone
        "2026-03-29T02:00:00 Europe/Berlin",
        "2026-03-29T02:00:00+24:00",
        "2026-03-29T02:00:00+1",
        "2026-02-30T00:00:00Z",
        "2025-02-29T00:00:00Z",
        "2026-13-01T00:00:00Z",
        "2026-00-01T00:00:00Z",
        "2026-03-29T25:00:00Z",
        "2026-03-29T02:60:00Z",
        "2026-03-29T02:00:61Z",
        "29.03.2026 02:00",
        "03/29/2026",
        "٢٠٢٦-03-29T02:00:00Z",
        "２０２６-03-29T02:00:00Z",
        "2026-03-29T02:00:00+٠١:00",
        "1969-12-31T23:59:59Z",
        "1970-01-01T00:00:00+00:01",
        "0001-01-01T00:00:00+14:00",
        "0000-01-01T00:00:00Z",
        "9999-12-31T23:59:59-01:00",
        "9999-12-31T23:59:59-23:59",
        "10000-01-01T00:00:00Z",
        "-2026-03-29T02:00:00Z",
        "9" * 10_000,
        "2026-03-29T02:00:00." + "1" * 10_000 + "Z",
        " " * 1_000_000,
    ],
    ids=lambda value: repr(value)[:32].encode("ascii", "backslashreplace").decode(),
)
def test_what_is_no_time_is_refused_and_the_place_named(text: object) -> None:
    with pytest.raises(Refused) as refused:
        parse_time(text, "runs[3].due")
    assert refused.value.where == "runs[3].due"
    assert refused.value.message.startswith("runs[3].due ")
    assert len(refused.value.message) < 200


@given(st.text(max_size=80) | st.text("0123456789-:TZ+.W ", max_size=40))
def test_any_text_is_a_bounded_time_or_refused(text: str) -> None:
    try:
        assert 0 <= parse_time(text, "due") <= TIME_MS_MAX
    except Refused:
        pass


@given(st.integers(0, TIME_MS_MAX))
def test_a_shown_time_is_understood_as_the_same_time(time_ms: int) -> None:
    text = show_time(time_ms)
    assert parse_time(text, "due") == time_ms
    assert len(text) == len("2026-03-29T01:00:00.000Z")


@given(st.lists(st.integers(0, TIME_MS_MAX), max_size=5))
def test_shown_times_sort_as_the_times_do(times_ms: list[int]) -> None:
    assert sorted(map(show_time, times_ms)) == [show_time(time_ms) for time_ms in sorted(times_ms)]


@given(st.datetimes(datetime(1980, 1, 1), datetime(9000, 1, 1)), st.integers(-1_439, 1_439))
def test_a_zone_moves_a_time_by_its_offset(local: datetime, offset_minutes: int) -> None:
    zoned = local.replace(tzinfo=timezone(timedelta(minutes=offset_minutes)))
    in_utc = parse_time(local.replace(tzinfo=UTC).isoformat(), "due")
    assert parse_time(zoned.isoformat(), "due") == in_utc - offset_minutes * MINUTE_MS
