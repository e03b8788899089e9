from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.host_process import HostProcess

SETTINGS = "workers: {default: 8, lease: 20s, drain: 1s, kill_grace: 1s}\n"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostProcess]:
    """One host for all tests of a file: a user has one, too."""
    host = HostProcess(tmp_path_factory.mktemp("host"), SETTINGS)
    host.start()
    yield host
    host.close()
