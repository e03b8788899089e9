"""What the system says about processes: who is whose child, and how to signal exactly the one that was meant."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from msgspec import Struct

IS_LINUX = sys.platform.startswith("linux")


class ProcessRow(Struct, frozen=True):
    """One line of the process table."""

    pid: int
    state: str
    parent: int
    session: int
    start_ticks: int


def read_row(pid: int) -> ProcessRow | None:
    """The process now at this pid, or None."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The name in parentheses may itself hold spaces and parentheses; fields count from behind the last one.
    fields = text[text.rindex(b")") + 2 :].split()
    return ProcessRow(
        pid=pid,
        state=fields[0].decode(),
        parent=int(fields[1]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
    )


def read_table() -> dict[int, ProcessRow]:
    """All processes, in one unsynchronised pass: good for politeness and texts, no proof of absence."""
    if not IS_LINUX:
        return _read_table_by_ps()
    rows = (read_row(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {row.pid: row for row in rows if row is not None}


def descendants(tops: Iterable[int], table: Mapping[int, ProcessRow]) -> list[ProcessRow]:
    """The tops themselves and all that descend from them, parents first."""
    children: dict[int, list[int]] = {}
    for row in table.values():
        children.setdefault(row.parent, []).append(row.pid)
    found: dict[int, ProcessRow] = {}
    ahead = list(tops)
    while ahead:
        pid = ahead.pop()
        if pid in found or pid not in table:
            continue
        found[pid] = table[pid]
        ahead.extend(children.get(pid, ()))
    return list(found.values())


def signal_exactly(row: ProcessRow, *signals: signal.Signals) -> None:
    """Signal the process of this row, and never a later user of its pid."""
    if not IS_LINUX:
        for number in signals:
            signal_quietly(row.pid, number)
        return
    try:
        pidfd = os.pidfd_open(row.pid)
    except OSError:
        return
    try:
        now = read_row(row.pid)
        if now is not None and now.start_ticks == row.start_ticks:
            for number in signals:
                signal.pidfd_send_signal(pidfd, number)
    except OSError:
        pass  # ended meanwhile, or another user's: the peeling will say so
    finally:
        os.close(pidfd)


def signal_quietly(pid: int, number: signal.Signals) -> None:
    """Signal a direct child: its pid cannot be reused before it is reaped."""
    try:
        os.kill(pid, number)
    except OSError:
        pass  # ended meanwhile, or another user's


def kill_child(pid: int) -> None:
    """KILL a direct child, and its whole group if it leads one: that is atomic against fork."""
    try:
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass


class ChildList:
    """This process's direct children, zombies included: complete as long as nobody reaps while it is read."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        try:
            self._file: int | None = os.open(f"/proc/{self._pid}/task/{self._pid}/children", os.O_RDONLY)
        except OSError:
            self._file = None  # not Linux, or a kernel without CONFIG_PROC_CHILDREN

    @property
    def source(self) -> str:
        """Where the list comes from, for /health."""
        return "children file" if self._file is not None else "process table"

    def read(self, sessions: Collection[int]) -> list[int]:
        """All direct children. `sessions` are those of the roots, for systems without a subreaper."""
        if self._file is not None:
            return self._read_file(self._file)
        if IS_LINUX:
            # One scan may miss who forks and exits meanwhile; but it leaves a zombie here, and the second sees that.
            both = [*read_table().values(), *read_table().values()]
            return list({row.pid for row in both if row.parent == self._pid})
        return _kin_without_subreaper(self._pid, sessions)

    @staticmethod
    def _read_file(file: int) -> list[int]:
        text = b""
        while piece := os.pread(file, 65_536, len(text)):
            text += piece
        return [int(word) for word in text.split()]


def environment_of(pid: int) -> bytes:
    """The environment a process was started with, as far as it may be read."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def next_dead_child() -> int | None:
    """The pid of a child that has ended, left unreaped where the system can do that; None if there is none."""
    try:
        if IS_LINUX:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return found.si_pid if found is not None else None
    except ChildProcessError:
        pass
    return None


# macOS: no /proc, no subreaper. Best effort, and /health says so.


def _read_table_by_ps() -> dict[int, ProcessRow]:
    with subprocess.Popen(["/bin/ps", "-axo", "pid=,ppid=,stat="], stdout=subprocess.PIPE, text=True) as listing:
        lines = listing.communicate()[0].splitlines()
    table = {}
    for line in lines:
        pid, parent, state = line.split(maxsplit=2)
        try:
            session = os.getsid(int(pid))
        except OSError:
            session = 0
        table[int(pid)] = ProcessRow(pid=int(pid), state=state[:1], parent=int(parent), session=session, start_ticks=0)
    table.pop(listing.pid, None)
    return table


def _kin_without_subreaper(me: int, sessions: Collection[int]) -> list[int]:
    table = read_table()
    below = {row.pid for row in descendants([me], table)} - {me}
    in_sessions = {row.pid for row in table.values() if row.session in sessions}
    return list(below | in_sessions)
