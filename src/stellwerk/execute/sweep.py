"""Clean up after a crash of everything: end processes on this machine whose keeper is dead.

Runs before a keeper starts, and from `doctor`. It goes by the tag alone, so it needs no file and no memory.
"""

from __future__ import annotations

import os
import signal
import time

from stellwerk.execute.process_table import IS_LINUX, ProcessRow, read_row, read_table, signal_exactly
from stellwerk.execute.tag import Tag, read_tag, start_digest

ROUNDS_MAX = 200  # processes of another user, or in state D, cannot be ended from here
PAUSE_S = 0.01


def sweep() -> int:
    """Kill until a scan finds none; says how many processes were met."""
    if not IS_LINUX:
        return 0
    met: set[tuple[int, int]] = set()
    for _ in range(ROUNDS_MAX):
        leftovers = [row for row in read_table().values() if _is_leftover(row)]
        if not leftovers:
            break
        met.update((row.pid, row.start_ticks) for row in leftovers)
        for row in leftovers:
            signal_exactly(row, signal.SIGKILL)
        time.sleep(PAUSE_S)  # a killed process needs a moment to leave; nothing reports that to a stranger
    return len(met)


def _is_leftover(row: ProcessRow) -> bool:
    if row.state in "ZX" or row.pid == os.getpid():
        return False
    tag = read_tag(row.pid)
    if tag is None or not _is_in_our_namespace(row.pid):
        return False
    return not _is_alive(tag)


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
