"""Times and durations as text. Everywhere else a time is an integer of milliseconds, named `…_ms`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from stellwerk.core.errors import Refused

SECOND_MS = 1_000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS

DURATION_MS_MAX = 100 * 366 * DAY_MS  # longer than anyone waits; keeps sums inside 53 bits
TIME_MS_MAX = 253_402_300_799_000  # the last second of the year 9999

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SHORT = re.compile(r"(\d{1,12})(?:\.(\d{1,3}))?(ms|s|m|h|d|w)?", re.ASCII)
_ISO = re.compile(
    r"P(?:(\d{1,9})W)?(?:(\d{1,9})D)?(?:T(?:(\d{1,9})H)?(?:(\d{1,9})M)?(?:(\d{1,9})(?:\.(\d{1,3}))?S)?)?",
    re.ASCII,
)
_TIME = re.compile(r"\d{4}-?\d\d-?\d\d[Tt ]\d\d:?\d\d(?::?\d\d(?:\.\d{1,9})?)?(?:[Zz]|[+-]\d\d(?::?\d\d)?)?", re.ASCII)
_UNIT_MS = {"ms": 1, "s": SECOND_MS, "m": MINUTE_MS, "h": HOUR_MS, "d": DAY_MS, "w": 7 * DAY_MS, None: SECOND_MS}


def parse_duration(value: object, where: str) -> int:
    """Milliseconds of a duration: seconds (`60`, `1.5`), `"10s" "5m" "2h" "1d"`, or ISO 8601 (`"PT5M"`).

    Months and years are refused: their length is not known.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise Refused(f'{where} must be a duration such as 60, "10s", "5m" or "PT5M"', where)
    if isinstance(value, int | float):
        # The comparison also refuses NaN and infinity.
        if not 0 <= value <= DURATION_MS_MAX / SECOND_MS:
            raise Refused(f"{where} must be between 0 seconds and 100 years", where)
        return round(value * SECOND_MS)
    text = value.strip() if len(value) <= 64 else ""
    duration_ms = _short_ms(text)
    if duration_ms is None:
        duration_ms = _iso_ms(text)
    if duration_ms is None:
        raise Refused(
            f'{where} is not a duration; write seconds (60), "10s", "5m", "2h", "1d" or ISO 8601 ("PT5M")', where
        )
    if duration_ms > DURATION_MS_MAX:
        raise Refused(f"{where} must be at most 100 years", where)
    return duration_ms


def _short_ms(text: str) -> int | None:
    found = _SHORT.fullmatch(text)
    if found is None:
        return None
    whole, fraction, unit = found.groups()
    unit_ms = _UNIT_MS[unit]
    return int(whole) * unit_ms + int((fraction or "0").ljust(3, "0")) * unit_ms // 1_000


def _iso_ms(text: str) -> int | None:
    found = _ISO.fullmatch(text)
    if found is None or text[-1] in "PT":
        return None
    weeks, days, hours, minutes, seconds, fraction = found.groups()
    total_ms = int(weeks or 0) * 7 * DAY_MS + int(days or 0) * DAY_MS
    total_ms += int(hours or 0) * HOUR_MS + int(minutes or 0) * MINUTE_MS
    return total_ms + int(seconds or 0) * SECOND_MS + int((fraction or "0").ljust(3, "0"))


def parse_time(text: object, where: str) -> int:
    """Milliseconds since 1970 of an ISO 8601 time that names its zone."""
    if not isinstance(text, str) or len(text) > 64:
        raise Refused(f"{where} must be an ISO 8601 time with a zone, such as 2026-03-29T02:00:00+01:00", where)
    try:
        if _TIME.fullmatch(text) is None:
            raise ValueError
        moment = datetime.fromisoformat(text.upper())
    except ValueError:
        raise Refused(f"{where} is not an ISO 8601 time: write it as 2026-03-29T02:00:00+01:00", where) from None
    if moment.tzinfo is None:
        raise Refused(f"{where} has no zone; end it with Z or an offset such as +01:00", where)
    try:
        since = moment - _EPOCH
    except OverflowError:
        raise Refused(f"{where} is outside the years 1970 to 9999", where) from None
    time_ms = since // timedelta(milliseconds=1)
    if not 0 <= time_ms <= TIME_MS_MAX:
        raise Refused(f"{where} is outside the years 1970 to 9999", where)
    return time_ms


def show_time(time_ms: int) -> str:
    """ISO 8601 in UTC with milliseconds, as in `2026-03-29T01:00:00.000Z`."""
    moment = _EPOCH + timedelta(milliseconds=time_ms)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{time_ms % 1_000:03d}Z"


def show_duration(duration_ms: int) -> str:
    """A duration for people: `350ms`, `12s`, `5m`, `2h 30m`, `3d 4h`."""
    if duration_ms < SECOND_MS:
        return f"{duration_ms}ms"
    parts: list[str] = []
    rest_ms = duration_ms
    for unit, unit_ms in (("d", DAY_MS), ("h", HOUR_MS), ("m", MINUTE_MS), ("s", SECOND_MS)):
        count, rest_ms = divmod(rest_ms, unit_ms)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])
