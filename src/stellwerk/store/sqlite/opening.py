"""Opening the file: may we, is it ours, is it of our age?

One process at a time, on a local disk; an older schema is migrated after a copy, a newer one is refused.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sqlite3
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

from stellwerk.core.errors import BrokenStore, Refused
from stellwerk.store.protocol import SCHEMA_VERSION
from stellwerk.store.sqlite.rows import SQL

DATABASE_NAME = "stellwerk.db"
HOLD_NAME = "stellwerk.pid"  # held by flock as long as the process lives; a crash lets go of it

Migration = Callable[[sqlite3.Connection], None]  # from version n to n + 1, inside a transaction
MIGRATIONS: Sequence[Migration] = ()  # the first one leads from version 1 to version 2

# Their locks or their shared memory do not hold what WAL needs of them.
NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "afs", "9p", "ceph", "lustre", "beegfs", "gpfs",
        "glusterfs", "davfs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.rclone", "fuse.davfs2",
        "fuse.gcsfuse", "fuse.mfs", "fuse.juicefs",
    }
)  # fmt: skip
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})


class Folder:
    """The data folder, held for this process alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def take(self) -> None:
        """Create the folder if need be and hold it; refuse one that is in use or on a network disk."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        kind = self.file_system()
        if kind in NETWORK_FILE_SYSTEMS:
            raise Refused(
                f"{self.path} is on a network file system ({kind}); SQLite is safe on a local disk only. "
                "Choose another data folder, or a PostgreSQL store."
            )
        descriptor = os.open(self.path / HOLD_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 100).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise Refused(
                f"{self.path} is in use by process {holder}; one data folder serves one process at a time"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Let others have it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def file_system(self) -> str:
        """The kind of file system it lies on; empty where the system does not say."""
        try:
            mounts = Path("/proc/self/mounts").read_text(errors="surrogateescape")
        except OSError:
            return ""
        return file_system_of(self.path.resolve(), mounts)


def file_system_of(path: Path, mounts: str) -> str:
    """The kind of file system of a path, by a table of mounts: the longest mount point above it, the last such."""
    found, kind = -1, ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(_unescape(fields[1]))
        if path.is_relative_to(point) and len(point.parts) >= found:
            found, kind = len(point.parts), fields[2]
    return kind


def _unescape(text: str) -> str:
    """Mount tables write space, tab, newline and backslash as octal numbers."""
    for code, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, plain)
    return text


def connect_writer(
    path: Path, *, version: int = SCHEMA_VERSION, migrations: Sequence[Migration] = MIGRATIONS
) -> sqlite3.Connection:
    """The one connection that writes; creates or migrates the file."""
    is_new = not path.exists() or path.stat().st_size == 0
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=512)
    try:
        set_up(connection, "new_file" if is_new else "known_file", "any_connection", "writing_connection")
        _bring_to_version(connection, path, version, migrations)
    except sqlite3.DatabaseError as error:
        connection.close()
        if isinstance(error, sqlite3.OperationalError):
            raise
        raise BrokenStore(f"{path} is not a database of Stellwerk, or is damaged: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def connect_reader(path: Path) -> sqlite3.Connection:
    """A connection that cannot write."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
    )
    set_up(connection, "any_connection", "reading_connection")
    return connection


def set_up(connection: sqlite3.Connection, *names: str) -> None:
    """Set what is to hold for a connection, by the names of lists of pragmas."""
    for name in names:
        for pragma in SQL[name].split(";"):
            connection.execute(pragma)


def _bring_to_version(
    connection: sqlite3.Connection, path: Path, version: int, migrations: Sequence[Migration]
) -> None:
    found = read_version(connection)
    if found is None:
        connection.execute(SQL["begin_writing"])
        for statement in _schema_statements():
            connection.execute(statement)
        connection.execute(SQL["put_meta"], ("schema", str(version)))
        connection.execute(SQL["put_meta"], ("epoch", secrets.token_hex(8)))
        connection.execute(SQL["commit"])
        return
    if found > version:
        raise Refused(
            f"{path} was written by a newer Stellwerk (schema {found}, this one knows {version}); "
            f"install that version, or restore the copy made before its first start"
        )
    if found < version:
        _keep_copy(connection, path.with_name(f"{path.name}.before-v{version}"))
        for number in range(found, version):
            connection.execute(SQL["begin_writing"])
            try:
                migrations[number - 1](connection)
                connection.execute(SQL["put_meta"], ("schema", str(number + 1)))
                connection.execute(SQL["commit"])
            except BaseException:
                connection.execute(SQL["roll_back"])
                raise


def read_version(connection: sqlite3.Connection) -> int | None:
    """The schema version of the file; None for an empty one."""
    tables = connection.execute(SQL["count_tables"]).fetchone()[0]
    if tables == 0:
        return None
    try:
        return int(connection.execute(SQL["get_meta"], ("schema",)).fetchone()[0])
    except (sqlite3.OperationalError, TypeError, ValueError) as error:
        raise BrokenStore(f"the file holds tables, but no schema version of Stellwerk: {error}") from error


def _keep_copy(connection: sqlite3.Connection, path: Path) -> None:
    """A copy of the whole file, WAL included, as it was."""
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    copy = sqlite3.connect(partial)
    try:
        connection.backup(copy)
    finally:
        copy.close()
    partial.replace(path)


def _schema_statements() -> list[str]:
    text = files("stellwerk.store.sqlite").joinpath("schema.sql").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("--")]
    return [statement for statement in "\n".join(lines).split(";") if statement.strip()]
