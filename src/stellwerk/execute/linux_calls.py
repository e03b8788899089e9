"""The three kernel calls that Python 3.11 has no name for. Each says False or None where it does not exist."""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_CHILD_SUBREAPER = 36
_CLOCK_BOOTTIME = 7
_TIMER_ABSOLUTE = 1


class _Itimerspec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> bool:
    """From now on orphans below this process become its children."""
    if not sys.platform.startswith("linux"):
        return False
    return bool(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def open_boot_timer() -> int | None:
    """A timer descriptor on CLOCK_BOOTTIME: a poll timeout would stand still while the machine sleeps."""
    if not sys.platform.startswith("linux"):
        return None
    timer = int(_libc.timerfd_create(_CLOCK_BOOTTIME, os.O_NONBLOCK | os.O_CLOEXEC))
    return timer if timer >= 0 else None


def set_boot_timer(timer: int, at_boot_ms: int) -> None:
    """Make the descriptor readable at this moment."""
    seconds, milliseconds = divmod(max(at_boot_ms, 1), 1_000)  # 0 would disarm it
    moment = _Itimerspec(0, 0, seconds, milliseconds * 1_000_000)
    if _libc.timerfd_settime(timer, _TIMER_ABSOLUTE, ctypes.byref(moment), None) != 0:
        raise OSError(ctypes.get_errno(), "timerfd_settime")
