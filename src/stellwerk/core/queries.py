"""Questions to a store that are answered in pages, and the answers."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from stellwerk.core.batch import Record
from stellwerk.core.events import Stamped
from stellwerk.core.gates import Gate
from stellwerk.core.run import Run, State
from stellwerk.core.times import DAY_MS

PAGE_ROWS_MAX = 10_000


class RunQuery(Struct, frozen=True):
    """Runs, newest first (by `added`, so in commit order). `before` is the `added` of the last run already seen."""

    states: frozenset[State] = frozenset()
    scope: str | None = None
    name: str | None = None
    label: tuple[str, str] | None = None
    since_ms: int | None = None  # created at or after
    until_ms: int | None = None  # created before
    before: int | None = None
    limit: int = 100


class RunPage(Struct, frozen=True):
    """`before` leads to the next page; None at the end."""

    event_id: int
    runs: tuple[Run, ...]
    before: int | None


class Counts(Struct, frozen=True):
    """Numbers of runs by state, and by queue and state, from counters kept with every change."""

    event_id: int
    states: Mapping[State, int]
    queues: Mapping[tuple[str, State], int]


class Due(Struct, frozen=True):
    """Rows whose alarm has rung, earliest first, and the moment of the next one that has not."""

    runs: tuple[Run, ...] = ()
    records: tuple[Record, ...] = ()
    gates: tuple[Gate, ...] = ()  # shut until a moment that has come
    next_ms: int | None = None


class JournalSlice(Struct, frozen=True):
    """Events after an EventId, in order.

    `forgotten` is the last id that was trimmed (0: none); who asks after less than that is torn. `examined` is the
    last id looked at: events hidden by a filter count as seen. `last` is the last id there is.
    """

    events: tuple[Stamped, ...]
    forgotten: int
    examined: int
    last: int


class Retention(Struct, frozen=True):
    """What the journal keeps: `events_min` and `age_ms`, whichever is more, and never more than `events_max`."""

    events_min: int = 100_000
    age_ms: int = DAY_MS
    events_max: int = 5_000_000


class LeaseRef(Struct, frozen=True):
    """A lease as its holder knows it."""

    run_id: str
    attempt: int
    worker: str
