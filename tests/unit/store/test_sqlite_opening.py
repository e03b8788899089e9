"""Opening the SQLite store: one process, a local disk, a known schema, and the store that the host knows."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from stellwerk.core.errors import BrokenStore, Refused, Unavailable
from stellwerk.core.events import StoreAdopted
from stellwerk.core.run import State
from stellwerk.store.memory import MemoryStore
from stellwerk.store.open_store import open_store
from stellwerk.store.sql_file import Bulk, parse_statements
from stellwerk.store.sqlite.identity import read_mark
from stellwerk.store.sqlite.opening import NETWORK_FILE_SYSTEMS, connect_writer, file_system_of, read_version
from stellwerk.store.sqlite.store import SqliteStore
from tests.builders import NOW_MS, an_add, claim, do, row

MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
tmpfs /run tmpfs rw 0 0
server:/export /mnt/share nfs4 rw,vers=4.2 0 0
//server/files /mnt/two\\040words cifs rw 0 0
host: /mnt/share/local/far fuse.sshfs rw 0 0
/dev/sdb1 /mnt/share/local ext4 rw 0 0
"""


async def opened(folder: Path, *, inline: bool = True) -> SqliteStore:
    store = SqliteStore(folder, inline=inline)
    await store.open()
    return store


# -- one process ------------------------------------------------------------------------------------------------------


async def test_a_second_store_on_the_same_folder_is_refused_by_the_number_of_the_process(tmp_path: Path) -> None:
    first = await opened(tmp_path)
    with pytest.raises(Refused, match=f"in use by process {os.getpid()}"):
        await SqliteStore(tmp_path).open()
    await first.close()


async def test_a_second_process_is_refused(tmp_path: Path) -> None:
    first = await opened(tmp_path)
    program = (
        "import asyncio, sys, pathlib\n"
        "from stellwerk.store.sqlite.store import SqliteStore\n"
        "asyncio.run(SqliteStore(pathlib.Path(sys.argv[1])).open())\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert f"in use by process {os.getpid()}" in done.stderr
    await first.close()


async def test_a_closed_store_can_be_opened_again(tmp_path: Path) -> None:
    store = await opened(tmp_path, inline=False)
    await do(store, an_add("a"))
    await store.close()
    await store.open()
    assert (await row(store, "a")).state is State.READY
    await store.close()


async def test_a_refused_store_lets_go_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "stellwerk.db").write_text("this is no database, but long enough to be looked at " * 10)
    for _ in range(2):
        with pytest.raises(BrokenStore, match="not a database"):
            await SqliteStore(tmp_path).open()


async def test_a_store_that_is_not_open_answers_nothing(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="not open"):
        await SqliteStore(tmp_path).count()


# -- the disk ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/x", "ext4"),
        ("/run/x", "tmpfs"),
        ("/running/x", "ext4"),
        ("/mnt/share", "nfs4"),
        ("/mnt/share/x/y", "nfs4"),
        ("/mnt/share/local/x", "ext4"),
        ("/mnt/share/local/far/x", "fuse.sshfs"),
        ("/mnt/two words/x", "cifs"),
    ],
)
def test_the_file_system_is_that_of_the_nearest_mount(path: str, kind: str) -> None:
    assert file_system_of(Path(path), MOUNTS) == kind


def test_the_last_mount_at_a_place_counts() -> None:
    assert file_system_of(Path("/data/x"), "a /data ext4 rw\nb /data nfs rw\n") == "nfs"


async def test_a_network_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stellwerk.store.sqlite.opening.file_system_of", lambda path, mounts: "nfs4")
    with pytest.raises(Refused, match="network file system"):
        await SqliteStore(tmp_path).open()
    assert {"nfs", "cifs", "9p", "fuse.sshfs"} <= NETWORK_FILE_SYSTEMS


async def test_a_disk_in_memory_survives_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stellwerk.store.sqlite.opening.file_system_of", lambda path, mounts: "tmpfs")
    store = await opened(tmp_path)
    assert store.durability() == "D0"
    await store.close()


async def test_folder_and_files_are_for_their_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "data"
    store = await opened(folder)
    await do(store, an_add("a"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert {"stellwerk.db", "stellwerk.db-wal", "store-epoch", "ballast"} <= set(modes)
    assert set(modes.values()) == {0o600}
    await store.close()


async def test_the_file_is_flushed_with_every_commit_and_can_shrink(tmp_path: Path) -> None:
    connection = connect_writer(tmp_path / "stellwerk.db")
    names = ("journal_mode", "synchronous", "auto_vacuum")
    found = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names]
    assert found == ["wal", 2, 2]
    connection.close()


# -- the schema -------------------------------------------------------------------------------------------------------


async def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    await (await opened(tmp_path)).close()
    connection = sqlite3.connect(tmp_path / "stellwerk.db")
    connection.execute("UPDATE meta SET value = '7' WHERE key = 'schema'")
    connection.commit()
    connection.close()
    with pytest.raises(Refused, match=r"newer Stellwerk \(schema 7, this one knows 1"):
        await SqliteStore(tmp_path).open()


async def test_an_older_schema_is_migrated_step_by_step_after_a_copy(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await do(store, an_add("a"))
    await store.close()
    path = tmp_path / "stellwerk.db"
    steps = [
        lambda connection: connection.execute("ALTER TABLE runs ADD COLUMN colour TEXT"),
        lambda connection: connection.execute("UPDATE runs SET colour = 'red'"),
    ]
    migrated = connect_writer(path, version=3, migrations=steps)
    assert read_version(migrated) == 3
    assert migrated.execute("SELECT id, colour FROM runs").fetchall() == [("a", "red")]
    migrated.close()
    copy = sqlite3.connect(tmp_path / "stellwerk.db.before-v3")
    assert read_version(copy) == 1
    assert copy.execute("SELECT id FROM runs").fetchall() == [("a",)]
    copy.close()


async def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    await (await opened(tmp_path)).close()

    def fail(connection: sqlite3.Connection) -> None:
        connection.execute("DROP TABLE runs")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        connect_writer(tmp_path / "stellwerk.db", version=2, migrations=[fail])
    store = await opened(tmp_path)
    assert (await store.count()).states == {}
    await store.close()


async def test_a_file_of_someone_else_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "stellwerk.db")
    connection.execute("CREATE TABLE books (title TEXT)")
    connection.close()
    with pytest.raises(BrokenStore, match="no schema version"):
        await SqliteStore(tmp_path).open()


# -- identity ---------------------------------------------------------------------------------------------------------


async def test_a_store_is_known_again(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    epoch = await store.epoch()
    await do(store, an_add("a"))
    await store.close()
    again = await opened(tmp_path)
    assert again.foreign() is None
    assert await again.epoch() == epoch
    await again.close()


async def test_two_stores_have_two_epochs(tmp_path: Path) -> None:
    stores = [await opened(tmp_path / name) for name in ("one", "two")]
    assert len({await store.epoch() for store in stores}) == 2
    for store in stores:
        await store.close()


async def swapped(folder: Path, other: Path) -> SqliteStore:
    """The store of `folder`, opened over the database file of `other`."""
    shutil.copy(other / "stellwerk.db", folder / "stellwerk.db")
    return await opened(folder)


async def test_a_database_from_elsewhere_is_foreign(tmp_path: Path) -> None:
    for name in ("one", "two"):
        await (await opened(tmp_path / name)).close()
    store = await swapped(tmp_path / "one", tmp_path / "two")
    assert "but this host knows" in (store.foreign() or "")
    with pytest.raises(Unavailable, match="foreign"):
        await store.apply([an_add("a")], [], NOW_MS)
    await store.close()


async def test_an_older_copy_is_foreign(tmp_path: Path) -> None:
    store = await opened(tmp_path / "one")
    await do(store, an_add("a"))
    await store.close()
    shutil.copytree(tmp_path / "one", tmp_path / "backup")
    await store.open()
    await do(store, an_add("b"))
    await store.close()
    restored = await swapped(tmp_path / "one", tmp_path / "backup")
    assert "older copy" in (restored.foreign() or "")
    await restored.close()


async def test_an_older_copy_is_foreign_also_after_a_crash(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.apply([an_add("a")], [], NOW_MS)
    later_ms = NOW_MS + 11_000
    applied = await store.apply([an_add("b")], [], later_ms)
    mark = read_mark(tmp_path)  # as a killed host leaves it
    await store.close()
    assert mark is not None
    assert mark.last == applied.first_event_id + len(applied.events) - 1


async def test_a_database_that_vanished_is_foreign_and_stays_so(tmp_path: Path) -> None:
    await (await opened(tmp_path)).close()
    (tmp_path / "stellwerk.db").unlink()
    store = await opened(tmp_path)
    assert "is gone" in (store.foreign() or "")
    await store.close()
    again = await opened(tmp_path)
    assert again.foreign() is not None
    await again.close()


async def test_an_adopted_store_is_ours_again_and_its_followers_are_torn(tmp_path: Path) -> None:
    store = await opened(tmp_path / "one")
    await do(store, an_add("a"))
    await store.close()
    shutil.copytree(tmp_path / "one", tmp_path / "backup")
    await store.open()
    await do(store, an_add("b"))
    last = (await store.count()).event_id
    await store.close()
    restored = await swapped(tmp_path / "one", tmp_path / "backup")
    await restored.adopt(NOW_MS, "ada")
    assert restored.foreign() is None
    found = await restored.read_journal(after=last, limit=10)
    assert found.forgotten > last, "who has seen the last event of the lost future must not be served"
    assert [stamped.event for stamped in found.events] == [StoreAdopted("store", "ada", NOW_MS, await restored.epoch())]
    await do(restored, an_add("c"))
    await restored.close()
    again = await opened(tmp_path / "one")
    assert again.foreign() is None
    await again.close()


async def test_leases_of_an_earlier_start_are_over(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await do(store, an_add("a"))
    await claim(store)
    version = (await row(store, "a")).version
    await store.close()
    again = await opened(tmp_path)
    due = await again.due(NOW_MS, 10)
    assert [(run.id, run.version) for run in due.runs] == [("a", version)]
    await again.close()


# -- settings and statements ------------------------------------------------------------------------------------------


def test_a_setting_names_its_store(tmp_path: Path) -> None:
    assert isinstance(open_store("memory:", tmp_path), MemoryStore)
    assert isinstance(open_store("sqlite:", tmp_path), SqliteStore)
    assert isinstance(open_store("sqlite:elsewhere", tmp_path), SqliteStore)


@pytest.mark.parametrize("url", ["", "sqlite", "redis://x", "memory:x"])
def test_an_unknown_store_is_refused_with_what_is_possible(url: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="possible are memory:, sqlite:"):
        open_store(url, tmp_path)


def test_the_memory_store_needs_no_database() -> None:
    program = (
        "import sys, pathlib\nfrom stellwerk.store.open_store import open_store\n"
        "open_store('memory:', pathlib.Path('.'))\nprint('sqlite3' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_a_statement_needs_a_name_and_a_purpose() -> None:
    assert parse_statements("-- name: a\n-- Why.\nSELECT 1;\n") == {"a": "SELECT 1"}
    with pytest.raises(ValueError, match="line of purpose"):
        parse_statements("-- name: a\nSELECT 1")


def test_a_bulk_statement_takes_any_number_of_rows_in_few_sizes() -> None:
    pieces = list(Bulk("INSERT INTO t VALUES :rows(2)").pieces(list(range(2 * 261))))
    assert [text.count("(?,?)") for text, _ in pieces] == [128, 128, 4, 1]
    assert [value for _, share in pieces for value in share] == list(range(2 * 261))
