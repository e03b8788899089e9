"""A host of its own that runs one endless call under a short lease, so that a test can freeze it."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from stellwerk.execute.boot_clock import boot_ms
from tests.execution.python_rig import process_rig


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with process_rig(Path(folder)) as rig:
            await rig.call("nothing")
            run_id = rig.begin("say_pid_and_wait", lease_deadline_boot_ms=boot_ms() + 2_000)
            await rig.until_written(run_id, "\n")
            print(rig.output.of(run_id).strip(), flush=True)
            print(await rig.end_of(run_id), flush=True)


asyncio.run(main())
