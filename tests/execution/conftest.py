from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from stellwerk.execute.keeper_link import KeeperLink


@pytest.fixture
async def link() -> AsyncIterator[KeeperLink]:
    link = KeeperLink()
    await link.open()
    yield link
    await link.close()
