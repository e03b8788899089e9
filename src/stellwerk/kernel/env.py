"""The one seam to time, randomness and ids: whoever gives the kernel another `Env` owns all three."""

from __future__ import annotations

import random
import secrets
import time
from typing import Protocol

from stellwerk.execute.boot_clock import boot_ms


class Env(Protocol):
    """The outside world that a decision may depend on. Waiting itself is the event loop's business."""

    def now_ms(self) -> int:
        """Wall clock; names moments, never goes backwards."""

    def boot_ms(self) -> int:
        """A clock that only elapses, also while the machine sleeps: for lease deadlines."""

    def chance(self) -> float:
        """A number in [0, 1)."""

    def new_id(self) -> str:
        """An id that rises with time: random ids would double the cost of an insert."""

    def secret(self) -> str:
        """256 random bits, as text."""


class SystemEnv:
    """The real world."""

    def __init__(self) -> None:
        self._last_ms = 0
        self._id_ms = 0
        self._counter = 0
        self._random = random.Random()  # noqa: S311  jitter and id tails, not secrets

    def now_ms(self) -> int:
        self._last_ms = max(self._last_ms, time.time_ns() // 1_000_000)
        return self._last_ms

    def boot_ms(self) -> int:
        return boot_ms()

    def chance(self) -> float:
        return self._random.random()

    def new_id(self) -> str:
        now_ms = self.now_ms()
        if now_ms != self._id_ms:
            self._id_ms, self._counter = now_ms, 0
        self._counter += 1
        return time_ordered_id(now_ms, self._counter, self._random.getrandbits(40))

    def secret(self) -> str:
        return secrets.token_urlsafe(32)


def time_ordered_id(now_ms: int, counter: int, tail: int) -> str:
    """26 characters of hexadecimal: 11 of milliseconds, 5 of a counter within them, 10 of chance."""
    return f"{now_ms:011x}{counter:05x}{tail:010x}"
