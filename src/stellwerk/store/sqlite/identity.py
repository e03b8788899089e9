"""Is this the store that the host knows? The epoch and a mark of how far it had come, in a file beside it (P20)."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct

MARK_NAME = "store-epoch"


class Mark(Struct, frozen=True):
    """The store as the host last saw it."""

    epoch: str
    last: int


def read_mark(folder: Path) -> Mark | None:
    """What the host remembers; None on its first start here, or if the file cannot be understood."""
    try:
        return msgspec.json.decode((folder / MARK_NAME).read_bytes(), type=Mark)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError:
        return Mark("unreadable", 0)


def write_mark(folder: Path, mark: Mark) -> None:
    """Remember the store, whole or not at all."""
    partial = folder / f"{MARK_NAME}.partial"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(mark))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / MARK_NAME)


def why_foreign(known: Mark | None, found: Mark, *, is_new: bool) -> str | None:
    """Why the store is not the one that the host remembers; None if it is, or if it remembers none."""
    if known is None:
        return None
    if is_new:
        return f"the database with epoch {known.epoch} is gone; an empty one was made in its place"
    if known.epoch != found.epoch:
        return f"the database has epoch {found.epoch}, but this host knows {known.epoch}"
    if found.last < known.last:
        return f"the database is an older copy: it ends at event {found.last}, this host has seen {known.last}"
    return None
