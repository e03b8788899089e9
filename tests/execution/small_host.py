"""A real host process to be killed: `NASTY_TOKEN=… python small_host.py LEASE_MS`.

It says what it hears as JSON lines on stdout.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from stellwerk.execute.boot_clock import boot_ms
from stellwerk.execute.keeper_link import KeeperLink, Spawn
from tests.execution.survivors import nasty_argv

SHAPES = ("three_sessions", "cleared", "ignores_signals", "runner", "stopped", "zombies")


def say(**words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


class Talker:
    def __init__(self, shape: str) -> None:
        self._shape = shape

    def started(self, pid: int) -> None:
        pass

    def failed(self, errno: int, text: str) -> None:
        say(failed=self._shape, text=text)

    def ended(self, wait_status: int, why: str, cpu_ms: int) -> None:
        say(ended=self._shape, why=why)

    def stuck(self, text: str) -> None:
        say(stuck=self._shape)


def fork_and_hold_everything() -> int:
    pid = os.fork()
    while pid == 0:
        signal.pause()
    return pid


async def main(token: str, lease_ms: int) -> None:
    link = KeeperLink(ping_every_s=0.5)
    await link.open()
    devnull = os.open(os.devnull, os.O_RDWR)

    async def run(shape: str, argv: tuple[str, ...]) -> None:
        read_end, write_end = os.pipe()
        link.start(
            Spawn(
                argv=argv,
                env={"PATH": os.environ["PATH"]},
                cwd="/",
                fds=(devnull, write_end, devnull),
                deadline_boot_ms=boot_ms() + lease_ms,
            ),
            Talker(shape),
        )
        os.close(write_end)
        await asyncio.to_thread(os.read, read_end, 6)

    await asyncio.gather(*(run(shape, nasty_argv(shape, token)) for shape in SHAPES))
    pair = link._pair
    assert pair is not None
    say(keeper=pair._keeper_pid, guard=pair._guard_pid)
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line == "health\n":
            say(**link.capabilities())
        if line == "fork\n":
            say(forked=fork_and_hold_everything())
        if line == "one more\n":
            await run("later", nasty_argv("three_sessions", token + "-later"))
            say(later="runs")
    await link.close()
    say(closed=True)


if __name__ == "__main__":
    asyncio.run(main(os.environ["NASTY_TOKEN"], int(sys.argv[1])))
