"""A listener for one tree, and a way to start trees, for tests of the keeper."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

from stellwerk.execute.boot_clock import boot_ms
from stellwerk.execute.environment import base_environment
from stellwerk.execute.keeper_link import KeeperLink, Spawn

WAIT_S = 20.0
LEASE_MS = 60_000


class Heard:
    """Remembers everything the keeper said about one tree."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.handle = 0
        self.output = b""
        self.begun: asyncio.Future[int] = loop.create_future()
        self.over: asyncio.Future[tuple[str, int]] = loop.create_future()
        self.stuck_texts: list[str] = []

    def started(self, pid: int) -> None:
        self.begun.set_result(pid)

    def failed(self, errno: int, text: str) -> None:
        self.over.set_result((f"failed: {text}", errno))

    def ended(self, wait_status: int, why: str, cpu_ms: int) -> None:
        self.over.set_result((why, wait_status))

    def stuck(self, text: str) -> None:
        self.stuck_texts.append(text)

    async def end(self) -> tuple[str, int]:
        return await asyncio.wait_for(self.over, WAIT_S)


def start(
    link: KeeperLink,
    argv: tuple[str, ...],
    *,
    stdout: int | None = None,
    env: Mapping[str, str] | None = None,
    lease_ms: int = LEASE_MS,
) -> Heard:
    """Start a tree with nothing on its other descriptors."""
    heard = Heard()
    devnull = os.open(os.devnull, os.O_RDWR)
    spawn = Spawn(
        argv=argv,
        env=base_environment(os.environ) if env is None else env,
        cwd="/",
        fds=(devnull, devnull if stdout is None else stdout, devnull),
        deadline_boot_ms=boot_ms() + lease_ms,
    )
    heard.handle = link.start(spawn, heard)
    os.close(devnull)
    return heard


async def start_ready(link: KeeperLink, argv: tuple[str, ...], *, lease_ms: int = LEASE_MS) -> Heard:
    """Start a nasty shape and wait until it says that it is complete."""
    read_end, write_end = os.pipe()
    try:
        heard = start(link, argv, stdout=write_end, lease_ms=lease_ms)
        os.close(write_end)
        word = await asyncio.wait_for(asyncio.to_thread(os.read, read_end, 6), WAIT_S)
        assert word == b"ready\n"
    finally:
        os.close(read_end)
    return heard
