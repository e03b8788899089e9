"""The clock of deadlines: it counts the time a machine is suspended, and nobody can set it."""

from __future__ import annotations

import time

# macOS has no CLOCK_BOOTTIME; its CLOCK_MONOTONIC counts sleep as well.
_BOOT_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_ms() -> int:
    """Milliseconds since the machine started, suspension included."""
    return time.clock_gettime_ns(_BOOT_CLOCK) // 1_000_000
