from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stellwerk.execute.keeper_link import KeeperLink
from tests.execution.command_rig import Rig


@pytest.fixture
async def link() -> AsyncIterator[KeeperLink]:
    link = KeeperLink()
    await link.open()
    yield link
    await link.close()


@pytest.fixture
async def rig(link: KeeperLink, tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(link, tmp_path)
    await rig.executor.open()
    yield rig
    await rig.executor.close()
