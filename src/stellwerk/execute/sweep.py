"""Clean up after a crash of everything: end processes on this machine whose keeper is dead.

Runs before a keeper starts, and from `doctor`. It goes by the tag alone, so it needs no file and no memory.

A process that forks and exits for ever hides from a single scan. But pids rise: while such a chain lives, every
listing of /proc holds a pid not seen before. So the sweep is over when a listing holds none.
"""

from __future__ import annotations

import os
import signal
import time

from stellwerk.execute.process_table import IS_LINUX, read_row
from stellwerk.execute.tag import Tag, read_tag, start_digest

SWEEP_MAX_S = 5.0  # other processes come and go, too; and those of another user, or in state D, do not end
PAUSE_S = 0.002


def sweep() -> int:
    """Kill what dead keepers left, wait until it is gone, and say how many processes that were."""
    if not IS_LINUX:
        return 0
    until = time.monotonic() + SWEEP_MAX_S
    seen: set[int] = set()
    killed: set[int] = set()
    while unseen := {int(name) for name in os.listdir("/proc") if name.isdigit()} - seen:
        killed.update(pid for pid in unseen if _kill_if_left(pid))
        seen |= unseen
        if time.monotonic() > until:
            break
    while any(_lives(pid) for pid in killed) and time.monotonic() < until:
        time.sleep(PAUSE_S)  # nothing reports the death of a process that is not one's child
    return len(killed)


def _kill_if_left(pid: int) -> bool:
    if read_tag(pid) is None:
        return False
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # Read again behind the pidfd: if the number has changed hands meanwhile, the signal meets nobody.
        tag = read_tag(pid)
        if tag is None or not _lives(pid) or not _is_in_our_namespace(pid) or _is_alive(tag):
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return False  # gone meanwhile, or another user's
    finally:
        os.close(pidfd)
    return True


def _lives(pid: int) -> bool:
    row = read_row(pid)
    return row is not None and row.state not in "ZX"


def _is_in_our_namespace(pid: int) -> bool:
    # The tag's pid is a number of the namespace it was made in: a container's live keeper looks dead from outside.
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def _is_alive(tag: Tag) -> bool:
    row = read_row(tag.keeper_pid)
    if row is None:
        return _is_hidden(tag.keeper_pid)
    if row.state in "ZX":
        return False  # a killed keeper may still be a zombie
    return start_digest(row.start_ticks) == tag.start_digest


def _is_hidden(pid: int) -> bool:
    # /proc mounted with hidepid shows nothing of other users; a signal that may not be sent proves the process.
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return False
