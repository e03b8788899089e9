"""One process tree as the keeper knows it: a root, a deadline, and how far its end has come."""

from __future__ import annotations

import enum

FIRST_PASS_DELAY_MS, LAST_PASS_DELAY_MS = 2, 50


class Phase(enum.Enum):
    """running → (terming) → killing → gone."""

    RUNNING = 1
    TERMING = 2
    KILLING = 3
    GONE = 4


class Tree:
    """Changes in place: it lives in the keeper's single thread, and nobody else ever sees it."""

    __slots__ = (
        "cpu_ms",
        "deadline_ms",
        "delay_ms",
        "due_ms",
        "handle",
        "killed_since_ms",
        "number",
        "passes",
        "phase",
        "root",
        "root_is_reaped",
        "run_id_entry",
        "stuck_said_ms",
        "wait_status",
        "why",
    )

    def __init__(self, *, handle: int, number: int, root: int, deadline_ms: int, run_id_entry: bytes | None) -> None:
        self.handle = handle
        self.number = number
        self.root = root
        self.deadline_ms = deadline_ms
        self.run_id_entry = run_id_entry  # its STELLWERK_RUN_ID=…, evidence of last resort
        self.phase = Phase.RUNNING
        self.why = "exit"
        self.root_is_reaped = False
        self.wait_status = 0
        self.cpu_ms = 0
        self.passes = 0
        self.due_ms = 0  # when to look again: end of the grace, or the next pass
        self.delay_ms = FIRST_PASS_DELAY_MS
        self.killed_since_ms = 0
        self.stuck_said_ms = 0

    def begin_terming(self, until_ms: int) -> None:
        """Ask politely until then."""
        self.phase = Phase.TERMING
        self.why = "stop"
        self.due_ms = until_ms

    def begin_killing(self, now_ms: int, why: str | None = None) -> None:
        """From here on there is only KILL; the first reason stands."""
        if self.phase is Phase.RUNNING and why is not None:
            self.why = why
        self.phase = Phase.KILLING
        self.killed_since_ms = now_ms
        self.stuck_said_ms = now_ms
        self.due_ms = now_ms

    def look_again_at_once(self) -> None:
        """One of its processes was reaped: the next level may have come up."""
        self.due_ms = 0
        self.delay_ms = FIRST_PASS_DELAY_MS

    def look_again_later(self, now_ms: int) -> None:
        """Nothing moved yet."""
        self.due_ms = now_ms + self.delay_ms
        self.delay_ms = min(self.delay_ms * 2, LAST_PASS_DELAY_MS)
