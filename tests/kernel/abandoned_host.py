"""A host in a process of its own, to be killed: `python -m tests.kernel.abandoned_host FOLDER LATCH`.

It submits runs that wait for the latch, says their ids as JSON when they run, and waits to be killed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from stellwerk.core.retry import RetryPolicy
from tests.kernel.rig import Latch, Rig, a_run, settings_in


async def main(folder: Path, latch: Latch) -> None:
    rig = Rig(settings_in(folder))
    await rig.parts.open()
    running = await rig.submit(
        latch.command(), latch.call(), latch.command(retry=RetryPolicy(0)), latch.command(retry=RetryPolicy(1))
    )
    for run_id in running:
        await rig.running(run_id)
    ready, waiting = await rig.submit(a_run(), a_run(due_ms=rig.parts.env.now_ms() + 50))
    stopping = running[0]
    print(json.dumps({"running": running, "ready": ready, "waiting": waiting, "first": stopping}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Latch(Path(sys.argv[2]))))
