"""A host process that starts COUNT commands at once and prints their outcomes, for tests with few descriptors."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import Counter
from pathlib import Path

from stellwerk.core.run import Failed, Shell
from stellwerk.execute.keeper_link import KeeperLink
from tests.execution.command_rig import Rig


async def main(count: int) -> None:
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        link = KeeperLink()
        await link.open()
        rig = Rig(link, Path(folder))
        await rig.executor.open()
        for run_id in [rig.start(Shell("ulimit -n")) for _ in range(count)]:
            outcome = await rig.end(run_id)
            text = outcome.error if isinstance(outcome, Failed) else rig.lines[run_id][0].data.decode()
            outcomes[text] += 1
        await rig.shell("echo last")
        outcomes[rig.stdout().decode().strip()] += 1
        await rig.executor.close()
        await link.close()
    for text, number in outcomes.items():
        sys.stdout.write(f"{number} {text}\n")


def run() -> None:
    if sys.argv[2:] == ["uvloop"]:
        import uvloop

        uvloop.run(main(int(sys.argv[1])))
    else:
        asyncio.run(main(int(sys.argv[1])))


if __name__ == "__main__":
    run()
