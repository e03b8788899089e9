"""From the setting `store` to a store: which one, and where it lies."""

from __future__ import annotations

from pathlib import Path

from stellwerk.core.errors import Refused
from stellwerk.store.protocol import Store


def open_store(url: str, data_folder: Path) -> Store:
    """The store that a setting names, not yet opened: `memory:`, `sqlite:` or `sqlite:FOLDER`."""
    scheme, colon, rest = url.partition(":")
    if colon:
        # Imported late: a host that keeps nothing needs no database.
        if scheme == "memory" and not rest:
            from stellwerk.store.memory import MemoryStore

            return MemoryStore()
        if scheme == "sqlite":
            from stellwerk.store.sqlite.store import SqliteStore

            return SqliteStore(data_folder / rest.removeprefix("//") if rest else data_folder)
    raise Refused(f"store {url!r} is not known; possible are memory:, sqlite: and sqlite:FOLDER", "store")
