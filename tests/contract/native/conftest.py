"""A host for each test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.native.rig import Host, a_host


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with a_host(tmp_path) as opened:
        yield opened
