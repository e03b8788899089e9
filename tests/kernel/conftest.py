from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stellwerk.assemble import Parts
from tests.kernel.rig import Latch, Rig, host, settings_in


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """A real host on the SQLite store, with four slots, a real keeper, warm children and threads."""
    async with host(settings_in(tmp_path)) as rig:
        yield rig


@pytest.fixture
async def one_slot(tmp_path: Path) -> AsyncIterator[Rig]:
    """The same with one slot, so that runs start one after another."""
    async with host(settings_in(tmp_path, slots=1)) as rig:
        yield rig


@pytest.fixture
async def parts(rig: Rig) -> Parts:
    return rig.parts


@pytest.fixture
def latch(tmp_path: Path) -> Latch:
    return Latch(tmp_path / "latch")
