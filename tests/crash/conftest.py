from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.crash.host_process import HostProcess

MakeHost = Callable[..., HostProcess]


@pytest.fixture
def new_host(tmp_path: Path) -> Iterator[MakeHost]:
    """Hosts in folders of their own; none outlives the test."""
    hosts: list[HostProcess] = []

    def make(settings: str = "", wrapper: Sequence[str] = ()) -> HostProcess:
        folder = tmp_path / f"host{len(hosts)}"
        folder.mkdir()
        host = HostProcess(folder, settings, wrapper)
        hosts.append(host)
        return host

    yield make
    for host in hosts:
        host.close()
