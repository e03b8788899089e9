"""All trees of one keeper, and how they are ended: peeling.

Whoever has lost its parents is a direct child of the keeper (it is a subreaper). So the keeper kills only its own
direct children, again and again; each death lifts the next level up to it. A direct child's pid cannot be reused
before the keeper reaps it, so plain kill() is exact.

A tree is gone when its root is reaped and the list of direct children shows no stranger of it. That is a proof: the
keeper alone reaps, so nothing leaves the list while it is read, and any living descendant has an ancestor in it.
"""

from __future__ import annotations

import heapq
import os
import signal
import sys

from stellwerk.execute.keeper_frames import Gone, Report, Stuck
from stellwerk.execute.process_table import (
    ChildList,
    ProcessRow,
    descendants,
    environment_of,
    kill_child,
    next_dead_child,
    read_row,
    read_table,
    signal_exactly,
)
from stellwerk.execute.tag import TREE_NUMBER_MAX, read_tag
from stellwerk.execute.tree import Phase, Tree

STUCK_AFTER_MS = 5_000  # said again as often; nobody's strangers stop counting then as well
PASSES_PER_SCAN = 8  # a top in state D does not die, but what is below it can


class Forest:
    """The trees, the strangers among the keeper's children, and the reports that follow from both."""

    def __init__(self) -> None:
        self._by_handle: dict[int, Tree] = {}
        self._by_number: dict[int, Tree] = {}
        self._by_root: dict[int, Tree] = {}
        self._strangers: dict[int, Tree | None] = {}  # attributed once, remembered until reaped
        self._ending: dict[int, Tree] = {}  # terming or killing, by handle
        self._asked_to_term: list[Tree] = []
        self._deadlines: list[tuple[int, int]] = []  # heap of (own deadline, handle); may hold what is over
        self._renewed_ms = 0
        self._number = 0
        self._children = ChildList()
        self.reports: list[Report] = []

    @property
    def is_empty(self) -> bool:
        return not self._by_handle

    @property
    def child_source(self) -> str:
        return self._children.source

    def free_number(self) -> int:
        """A number for the tag of the next tree that no live tree wears."""
        while True:
            self._number = self._number % TREE_NUMBER_MAX + 1
            if self._number not in self._by_number:
                return self._number

    def plant(self, tree: Tree) -> None:
        """Watch a tree that was just started."""
        self._by_handle[tree.handle] = tree
        self._by_number[tree.number] = tree
        self._by_root[tree.root] = tree
        heapq.heappush(self._deadlines, (tree.deadline_ms, tree.handle))

    def next_deadline_ms(self) -> int | None:
        """When the earliest running tree expires."""
        while self._deadlines and self._expiring(self._deadlines[0]) is None:
            heapq.heappop(self._deadlines)
        if not self._deadlines:
            return None
        return max(self._deadlines[0][0], self._renewed_ms)

    def next_look_ms(self) -> int | None:
        """When a tree that is being ended must be looked at again."""
        return min((tree.due_ms for tree in self._ending.values()), default=None)

    def is_past(self, deadline_ms: int, now_ms: int) -> bool:
        """Would a tree with this deadline of its own be expired now?"""
        return max(deadline_ms, self._renewed_ms) <= now_ms

    # ── what is asked of it ──

    def renew(self, deadline_ms: int, now_ms: int) -> None:
        """Prolong all that live. A host thawed before its keeper may say this late: so expire first."""
        self.expire(now_ms)
        self._renewed_ms = max(self._renewed_ms, deadline_ms)

    def move_deadline(self, handle: int, deadline_ms: int, now_ms: int) -> None:
        """Give one tree a new deadline of its own."""
        self.expire(now_ms)
        tree = self._by_handle.get(handle)
        if tree is not None:
            tree.deadline_ms = deadline_ms
            heapq.heappush(self._deadlines, (deadline_ms, handle))

    def expire(self, now_ms: int) -> None:
        """Kill what is past its deadline; there is no grace, the time is used up."""
        if self._renewed_ms > now_ms:
            return
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            tree = self._expiring(heapq.heappop(self._deadlines))
            if tree is not None:
                self._kill(tree, now_ms, "deadline")

    def _expiring(self, entry: tuple[int, int]) -> Tree | None:
        """The tree that this entry of the heap would end; None if it is gone, dying, or has another deadline now."""
        deadline_ms, handle = entry
        tree = self._by_handle.get(handle)
        if tree is None or tree.phase is Phase.KILLING or tree.deadline_ms != deadline_ms:
            return None
        return tree

    def stop(self, handle: int, grace_ms: int, now_ms: int) -> None:
        """TERM then KILL, or KILL at once; never makes an earlier grace longer."""
        tree = self._by_handle.get(handle)
        if tree is None or tree.phase is Phase.KILLING:
            return
        if grace_ms <= 0:
            self._kill(tree, now_ms, "stop")
        elif tree.phase is Phase.TERMING:
            tree.due_ms = min(tree.due_ms, now_ms + grace_ms)
        else:
            tree.begin_terming(now_ms + grace_ms)
            self._ending[handle] = tree
            self._asked_to_term.append(tree)

    def stop_all(self, now_ms: int) -> None:
        """The host is gone, or goes."""
        for handle in list(self._by_handle):
            self.stop(handle, grace_ms=0, now_ms=now_ms)

    def _kill(self, tree: Tree, now_ms: int, why: str | None = None) -> None:
        tree.begin_killing(now_ms, why)
        self._ending[tree.handle] = tree

    # ── what happens ──

    def reap(self, now_ms: int) -> None:
        """Take leave of every dead child; a root's group is killed while its zombie still holds the number."""
        if not sys.platform.startswith("linux"):
            self._reap_without_peeking(now_ms)
            return
        while (pid := next_dead_child()) is not None:
            if pid in self._by_root:
                _kill_group(pid)
            _, status, usage = os.wait4(pid, 0)
            self._reaped(pid, status, int((usage.ru_utime + usage.ru_stime) * 1_000), now_ms)

    def _reap_without_peeking(self, now_ms: int) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._by_root:
                _kill_group(pid)
            self._reaped(pid, status, int((usage.ru_utime + usage.ru_stime) * 1_000), now_ms)

    def _reaped(self, pid: int, status: int, cpu_ms: int, now_ms: int) -> None:
        tree = self._by_root.pop(pid, None)
        if tree is not None:
            tree.root_is_reaped = True
            tree.wait_status = status
            tree.cpu_ms = cpu_ms
            if tree.phase is not Phase.KILLING:
                self._kill(tree, now_ms)
            tree.look_again_at_once()
            return
        owner = self._strangers.pop(pid, None)
        if owner is not None and owner.phase is not Phase.GONE:
            if owner.phase is Phase.KILLING:
                owner.look_again_at_once()
            return
        for ending in self._ending.values():  # nobody's, and everybody waited for it
            if ending.phase is Phase.KILLING:
                ending.look_again_at_once()

    def work(self, now_ms: int) -> None:
        """Ask the polite, kill the due, report who is gone."""
        if self._asked_to_term:
            self._term_politely()
        due = [tree for tree in self._ending.values() if tree.due_ms <= now_ms]
        if not due:
            return
        for tree in due:
            if tree.phase is Phase.TERMING:
                self._kill(tree, now_ms)
        strangers = self._attributed_strangers()
        for tree in due:
            self._peel(tree, strangers, now_ms)

    def _peel(self, tree: Tree, strangers: dict[int, Tree | None], now_ms: int) -> None:
        tree.passes += 1
        lasting_ms = now_ms - tree.killed_since_ms
        own = [pid for pid, owner in strangers.items() if owner is tree]
        nobodys = [pid for pid, owner in strangers.items() if owner is None]
        waits_for_nobodys = bool(nobodys) and lasting_ms < STUCK_AFTER_MS
        if tree.root_is_reaped and not own and not waits_for_nobodys:
            self._fell(tree)
            return
        tops = own if tree.root_is_reaped else [tree.root, *own]
        for pid in (*tops, *nobodys):
            kill_child(pid)
        if tree.passes % PASSES_PER_SCAN == 0:
            for row in descendants(tops, read_table()):
                signal_exactly(row, signal.SIGKILL)
        if now_ms - tree.stuck_said_ms >= STUCK_AFTER_MS:
            tree.stuck_said_ms = now_ms
            self.reports.append(Stuck(tree.handle, _in_words(tops)))
        tree.look_again_later(now_ms)

    def _fell(self, tree: Tree) -> None:
        tree.phase = Phase.GONE
        del self._by_handle[tree.handle], self._by_number[tree.number], self._ending[tree.handle]
        self.reports.append(Gone(tree.handle, tree.wait_status, tree.why, tree.cpu_ms, tree.passes))

    def _term_politely(self) -> None:
        # One scan for all that were asked to stop in this turn: it is the expensive part.
        asked, self._asked_to_term = self._asked_to_term, []
        strangers = self._attributed_strangers()
        table = read_table()
        for tree in asked:
            if tree.phase is not Phase.TERMING:
                continue
            tops = [tree.root, *(pid for pid, owner in strangers.items() if owner is tree)]
            for row in descendants(tops, table):
                signal_exactly(row, signal.SIGTERM, signal.SIGCONT)

    # ── whose is it? ──

    def _attributed_strangers(self) -> dict[int, Tree | None]:
        """Direct children that are no root, with the live tree each belongs to; None: nobody's."""
        found: dict[int, Tree | None] = {}
        for pid in self._children.read(self._by_root):
            if pid in self._by_root:
                continue
            if pid not in self._strangers:
                self._strangers[pid] = self._owner_of(pid)
            owner = self._strangers[pid]
            found[pid] = owner if owner is None or owner.phase is not Phase.GONE else None
        return found

    def _owner_of(self, pid: int) -> Tree | None:
        tag = read_tag(pid)
        if tag is not None and tag.keeper_pid == os.getpid():
            return self._by_number.get(tag.tree_number)
        row = read_row(pid)
        if row is None:
            return None
        if row.session in self._by_root:
            return self._by_root[row.session]
        entries = environment_of(pid).split(b"\0")
        for tree in self._by_handle.values():
            if tree.run_id_entry is not None and tree.run_id_entry in entries:
                return tree
        return None


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass  # nobody left in it


def _in_words(tops: list[int]) -> str:
    table = read_table()
    rows = descendants(tops, table)
    words = ", ".join(_row_in_words(row) for row in rows[:20] if row.state != "Z")
    return f"{len(rows)} processes do not end: {words}" if words else "its processes do not end"


def _row_in_words(row: ProcessRow) -> str:
    try:
        user = os.stat(f"/proc/{row.pid}").st_uid
    except OSError:
        user = -1
    whose = "" if user in (-1, os.geteuid()) else f" of user {user}"
    return f"pid {row.pid}{whose} in state {row.state}"
