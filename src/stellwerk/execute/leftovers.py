"""Ending the processes that a call left behind, so that none outlives its run or writes into the next one's output.

The child is a subreaper: whoever lost its parents is its direct child. It kills its direct children again and again,
until the kernel says that there are none; each death lifts the next level up.
"""

from __future__ import annotations

import os
import time

LOOK_AGAIN_S = 0.001  # a process that forks while the list is read shows up a moment later


def end_leftovers() -> None:
    """Return when this process has no child, not even a zombie. One that cannot die holds its run up, as it must."""
    while _has_children():
        for pid in _direct_children():
            _kill(pid)
        if not _reap_dead():
            time.sleep(LOOK_AGAIN_S)


def _has_children() -> bool:
    try:
        if hasattr(os, "waitid"):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        else:
            os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False  # the usual case, and a proof, at the price of one system call
    return True


def _direct_children() -> list[int]:
    # A file per thread: a child belongs to the thread that forked it.
    pids: list[int] = []
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children", "rb") as file:
                pids += map(int, file.read().split())
    except OSError:
        pids = _children_by_scan()
    return pids


def _children_by_scan() -> list[int]:
    from stellwerk.execute.process_table import read_table  # only where the kernel has no children file

    me = os.getpid()
    return [row.pid for row in read_table().values() if row.parent == me]


def _kill(pid: int) -> None:
    from stellwerk.execute.process_table import kill_child  # a call that leaves nothing does not pay for it

    kill_child(pid)


def _reap_dead() -> bool:
    """Reap all that are dead; True if there was one, so that the next look is worth it at once."""
    reaped = False
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            reaped = True
    except ChildProcessError:
        reaped = True
    return reaped
