"""Facts: what a decision must read. Loaded: what was read, in one transaction, with one stamp."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from stellwerk.core.batch import ROWS_PER_BUNCH, Record
from stellwerk.core.gates import Gate
from stellwerk.core.run import Run, When


class Facts(Struct, frozen=True):
    """Names of what to read. `children_of` answers at most `children_max` + 1 edges a parent, so that more is seen."""

    runs: tuple[str, ...] = ()
    live_keys: tuple[str, ...] = ()
    children_of: tuple[str, ...] = ()
    live_below: tuple[str, ...] = ()  # parents of which it matters whether any child is still live
    records: tuple[tuple[str, str], ...] = ()  # (kind, key)
    kinds: tuple[str, ...] = ()  # all records of these kinds
    bodies: tuple[tuple[str, str], ...] = ()  # (run, key)
    gates: bool = False
    running: bool = False  # how many runs are running, by each key that a limit stands at
    children_max: int = ROWS_PER_BUNCH
    children_after: str = ""  # only children whose id is greater: how a long list is worked off in bunches


class Child(Struct, frozen=True):
    """An edge seen from the parent."""

    run: Run
    when: When


class Loaded(Struct, frozen=True):
    """What `Facts` asked for and exists. `event_id` is the stamp: the last event when it was true."""

    event_id: int
    runs: Mapping[str, Run] = {}
    holders: Mapping[str, str] = {}  # live key → run id
    children: Mapping[str, tuple[Child, ...]] = {}  # ordered by child id; only children that still wait
    live_below: frozenset[str] = frozenset()  # those that have a live child
    records: Mapping[tuple[str, str], Record] = {}
    bodies: Mapping[tuple[str, str], bytes] = {}
    gates: tuple[Gate, ...] = ()
    running: Mapping[str, int] = {}
