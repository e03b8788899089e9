"""The host of test_sqlite_disk_full: fills a disk that is really too small, and tells what it saw as JSON.

disk_full_child.py tmpfs FOLDER    in a mount namespace of its own: a small disk in memory
disk_full_child.py limit FOLDER    a limit on the size of files: for systems that let nobody mount
"""

from __future__ import annotations

import asyncio
import json
import resource
import sqlite3
import subprocess
import sys
from pathlib import Path

from stellwerk.core.batch import Committed
from stellwerk.core.errors import Unavailable
from stellwerk.core.queries import RunQuery
from stellwerk.core.run import Body
from stellwerk.store.protocol import Store
from stellwerk.store.sqlite.store import SqliteStore
from tests.builders import NOW_MS, a_cancel, a_spec, an_add, row

BODY = Body("args", b"x" * 8_000)
ATTEMPTS_MAX = 100


async def fill(store: Store, begin: int, count: int) -> tuple[list[str], str | None]:
    """Add runs one by one until the store refuses; answer the acknowledged ones and the refusal."""
    acknowledged: list[str] = []
    for number in range(begin, begin + count):
        batch = an_add(f"r{number:06d}", a_spec(bodies=(BODY,)), bodies=(BODY,))
        try:
            applied = await store.apply([batch], [], NOW_MS)
        except Unavailable as refusal:
            return acknowledged, refusal.message
        assert isinstance(applied.receipts[0], Committed)
        acknowledged.append(f"r{number:06d}")
    return acknowledged, None


async def ids(store: Store) -> list[str]:
    return sorted(run.id for run in (await store.find_runs(RunQuery(limit=10_000))).runs)


async def tell(kind: str, folder: Path) -> dict[str, object]:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if kind == "tmpfs":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=True)
        # Somebody else's file takes most of the room, and makes room by going: not everyone may resize a mount.
        (folder / "in-the-way").write_bytes(bytes(56 * 1024 * 1024))
    store = SqliteStore(folder)
    await store.open()
    had_ballast = (folder / "ballast").exists()
    if kind == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, hard))
    # A full disk first gives back the room of the WAL and of the ballast; then it is full for good.
    acknowledged: list[str] = []
    refusals: list[str] = []
    for attempt in range(ATTEMPTS_MAX):
        more, refusal = await fill(store, attempt * 10_000, 10_000)
        acknowledged += more
        refusals.append(refusal or "none")
        if not more:
            break
    kept = await ids(store)
    threw_ballast_off = not (folder / "ballast").exists()
    try:
        await store.apply([a_cancel(await row(store, acknowledged[0]))], [], NOW_MS)
        cancelled = "yes"
    except Unavailable as error:
        cancelled = error.message
    if kind == "tmpfs":
        (folder / "in-the-way").unlink()
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    later, still = await fill(store, ATTEMPTS_MAX * 10_000, 50)
    has_ballast = (folder / "ballast").exists()
    after = await ids(store)
    await store.close()
    connection = sqlite3.connect(folder / "stellwerk.db")
    check = connection.execute("PRAGMA integrity_check").fetchone()[0]
    connection.close()
    return {
        "had_ballast": had_ballast,
        "acknowledged": len(acknowledged),
        "refusals": refusals,
        "kept_exactly": kept == acknowledged,
        "threw_ballast_off": threw_ballast_off,
        "cancelled": cancelled,
        "later": len(later),
        "still": still,
        "has_ballast": has_ballast,
        "after_exactly": after == acknowledged + later,
        "check": check,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(tell(sys.argv[1], Path(sys.argv[2])))))
