"""Every test here runs on every store: the contract is one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from stellwerk.store.memory import MemoryStore
from stellwerk.store.protocol import Store

SQLITE = "stellwerk.store.sqlite.store"
# Imported late: a store that does not load must not keep the others from being tested.
STORES = ["memory", "sqlite"] if find_spec(SQLITE) is not None else ["memory"]


def make_store(kind: str, folder: Path) -> Store:
    """A new store in an empty folder, not yet open."""
    store: Store = MemoryStore() if kind == "memory" else import_module(SQLITE).SqliteStore(folder)
    return store


@pytest.fixture(params=STORES)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    made = make_store(request.param, tmp_path)
    await made.open()
    yield made
    await made.close()
