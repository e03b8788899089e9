"""Retries: how often a run is tried again after a failure, and how long it waits before each try."""

from __future__ import annotations

from msgspec import Struct

from stellwerk.core.times import DAY_MS

RETRIES_MAX = 1_000
DELAY_MS_MAX = 30 * DAY_MS  # a back-off that doubles for ever must stop somewhere
CRASHES_MAX = 3  # lost workers forgiven where no policy is written: a run that kills its worker must end


class RetryPolicy(Struct, frozen=True, omit_defaults=True):
    """`max` retries after the first try, the n-th after `delay_ms * backoff ** (n - 1)`, spread by `jitter`."""

    max: int
    delay_ms: int = 0
    backoff: float = 1.0
    jitter: float = 0.0

    def next_delay_ms(self, executions: int, chance: float) -> int | None:
        """The wait before the next try after `executions` tries that counted, or None if none is left.

        `chance` in [0, 1) is the caller's randomness: the delay is moved by up to ± jitter of itself.
        """
        if executions > self.max:
            return None
        delay_ms: float = self.delay_ms
        if self.backoff != 1.0 and delay_ms:
            # Logarithms would do, but a bounded loop cannot overflow: the factor stops at the bound.
            for _ in range(executions - 1):
                delay_ms *= self.backoff
                if not 1 <= delay_ms < DELAY_MS_MAX:
                    break
        delay_ms = min(delay_ms, DELAY_MS_MAX)
        return min(max(0, round(delay_ms * (1 + self.jitter * (2 * chance - 1)))), DELAY_MS_MAX)
