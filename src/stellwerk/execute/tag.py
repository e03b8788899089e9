"""The tag: a number that every process of a tree inherits and that names its keeper and its tree.

It stands in the soft RLIMIT_RTTIME, which means something only for real-time processes. Limits are inherited through
fork, exec, setsid, double fork and a cleared environment, and others can read them, even of a zombie.

    magic 10 bits | keeper's pid 22 | digest of the keeper's start time 8 | tree number 22
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from msgspec import Struct

if sys.platform.startswith("linux"):
    import resource

TREE_NUMBER_MAX = (1 << 22) - 1
_MAGIC = 0x2D7


class Tag(Struct, frozen=True):
    """Which keeper started the tree, and which of its trees it is."""

    keeper_pid: int
    start_digest: int
    tree_number: int


def start_digest(start_ticks: int) -> int:
    """Eight bits of a process's start time: enough to tell a keeper from a later user of its pid."""
    return (start_ticks * 2_654_435_761 >> 16) & 0xFF


def wear_tag(tag: Tag) -> bool:
    """Set the tag on this process, for the children it starts next; False where that cannot be done."""
    if not sys.platform.startswith("linux"):
        return False
    number = _MAGIC << 52 | tag.keeper_pid << 30 | tag.start_digest << 22 | tag.tree_number
    return _set_soft_limit(number)


def worn_limit() -> int:
    """The soft limit this process has now, to be put back after the spawn."""
    if not sys.platform.startswith("linux"):
        return -1
    return resource.getrlimit(resource.RLIMIT_RTTIME)[0]


def put_back(limit: int) -> None:
    """Take the tag off again: a keeper inside another keeper's tree must keep that one's tag."""
    _set_soft_limit(limit)


def read_tag(pid: int) -> Tag | None:
    """The tag of a process, or None if it has none or is gone."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        number = resource.prlimit(pid, resource.RLIMIT_RTTIME)[0]
    except PermissionError:
        number = _soft_limit_from_proc(pid)
    except OSError:
        return None
    if number < 0 or number >> 52 != _MAGIC:
        return None
    return Tag(
        keeper_pid=number >> 30 & 0x3FFFFF, start_digest=number >> 22 & 0xFF, tree_number=number & TREE_NUMBER_MAX
    )


def _set_soft_limit(number: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        resource.setrlimit(resource.RLIMIT_RTTIME, (number, _hard_limit()))
    except (OSError, ValueError):
        return False  # someone set a hard limit below: then trees are known by session and environment only
    return True


@cache
def _hard_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_RTTIME)[1] if sys.platform.startswith("linux") else -1


def _soft_limit_from_proc(pid: int) -> int:
    # prlimit() asks for the same user; this file is open to everyone.
    try:
        lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    except OSError:
        return -1
    for line in lines:
        if line.startswith("Max realtime timeout"):
            soft = line.split()[3]
            return int(soft) if soft.isdigit() else -1
    return -1
