"""EventIds: numbers that rise strictly, are given at commit, and tell the time of the event to a millisecond.

53 bits are enough until the year 2255, so that JavaScript and JSON numbers hold them exactly.
"""

from __future__ import annotations

EVENTS_PER_MS = 1_000


def next_event_id(last: int, now_ms: int) -> int:
    """The id of the next event. A clock that stands still or goes back costs nothing but the date's exactness."""
    return max(last + 1, now_ms * EVENTS_PER_MS)


def event_id_ms(event_id: int) -> int:
    """When the event was committed."""
    return event_id // EVENTS_PER_MS
