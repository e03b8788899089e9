"""The ticker: sleeps until the next alarm, then looks. Due runs, expired leases, chores, gates, retention.

Every host does every chore; versions make the second attempt harmless. With in-process dispatch nothing polls: the
sleep ends at the next alarm known, and a commit that sets an earlier one says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from stellwerk.core.batch import Batch, DropRecord, changed
from stellwerk.core.errors import StellwerkError
from stellwerk.core.facts import Facts
from stellwerk.core.gates import Gate
from stellwerk.core.queries import Due, Retention
from stellwerk.core.run import FINAL, Check, Run, State
from stellwerk.core.times import HOUR_MS, SECOND_MS
from stellwerk.kernel import chores
from stellwerk.kernel.kernel import Kernel, open_gate
from stellwerk.kernel.turns import CHORE, Drop, Expire, Ready, Settle, Turn

log = logging.getLogger("stellwerk.ticker")

ROWS_PER_LOOK = 1_000
SLEEP_S_MAX = 24 * 3_600.0  # timers longer than this are not kept well by every system
TRIM_AFTER_EVENTS = 20_000
AGAIN_AFTER_TROUBLE_S = 1.0
KEPT_FOR_CHILDREN_MS = HOUR_MS  # a run with live children stays; look again then

Probe = Callable[[Check, int], Awaitable[bool]]


class Ticker:
    """`holds` says whether this host's own worker has an attempt: then its lease is not ours to take."""

    def __init__(
        self, kernel: Kernel, holds: Callable[[str, int], bool], probe: Probe, poll_ms: int | None, retention: Retention
    ) -> None:
        self._kernel = kernel
        self._holds = holds
        self._probe = probe
        self._poll_ms = poll_ms
        self._retention = retention
        self._next_ms: int | None = None
        self._changed = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None
        self._trimmed_at = 0
        self.looks = 0

    def open(self) -> None:
        self._next_ms = self._kernel.env.now_ms()
        self._ticking = asyncio.create_task(self._run(), name="ticker")

    async def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)

    def hint(self, alarm_ms: int) -> None:
        """A row with this alarm was committed."""
        if self._kernel.feed.published - self._trimmed_at >= TRIM_AFTER_EVENTS:
            alarm_ms = self._kernel.env.now_ms()
        if self._next_ms is None or alarm_ms < self._next_ms:
            self._next_ms = alarm_ms
            self._changed.set()

    async def _run(self) -> None:
        while True:
            await self._sleep()
            try:
                await self._look()
            except asyncio.CancelledError:
                raise
            except StellwerkError as error:
                log.warning("cannot look after alarms now: %s", error)
                await asyncio.sleep(AGAIN_AFTER_TROUBLE_S)
                self.hint(self._kernel.env.now_ms())
            except Exception:
                log.exception("a look after alarms failed")
                await asyncio.sleep(AGAIN_AFTER_TROUBLE_S)
                self.hint(self._kernel.env.now_ms())

    async def _sleep(self) -> None:
        """Until the next alarm, an earlier one, or (where wakes may be lost) the end of our trust in silence."""
        while True:
            self._changed.clear()
            wait_s = SLEEP_S_MAX
            if self._next_ms is not None:
                wait_s = min(wait_s, (self._next_ms - self._kernel.env.now_ms()) / 1_000)
            if wait_s <= 0:
                return
            polled = self._poll_ms is not None and wait_s > self._poll_ms / 1_000
            if polled and self._poll_ms is not None:
                # Jittered, so that hosts of a cluster do not look in step.
                wait_s = self._poll_ms / 1_000 * (0.75 + 0.5 * self._kernel.env.chance())
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                if polled:
                    return

    async def _look(self) -> None:
        self.looks += 1
        now_ms = self._kernel.env.now_ms()
        self._next_ms = None
        due = await self._kernel.store.due(now_ms, ROWS_PER_LOOK)
        if due.next_ms is not None:
            self.hint(due.next_ms)
        busy = await self._runs(due, now_ms)
        for gate in due.gates:
            await self._open(gate, now_ms)
        dropped = [r for r in due.records if r.kind != CHORE]
        if dropped:
            # What has an alarm and is no chore is kept for a time, and the time is over.
            batches = [Batch(records=(DropRecord(r.kind, r.key, r.version),)) for r in dropped]
            await self._kernel.committer.commit(batches)
        for record in due.records:
            if record.kind == CHORE:
                await chores.do_bunch(self._kernel, record)
        if busy or due.records or due.gates:
            self.hint(self._kernel.env.now_ms())
        await self._trim()

    async def _runs(self, due: Due, now_ms: int) -> bool:
        """Turns for all runs whose alarm has rung; answers whether there may be more."""
        actor = self._kernel.host_id
        turns: list[Turn] = []
        checks: list[Run] = []
        ended: list[Run] = []
        kept = 0
        for run in due.runs:
            if run.state is State.WAITING:
                turns.append(Ready(run, actor))
            elif run.state is State.RUNNING and self._holds(run.id, run.attempt):
                kept += 1
            elif run.state is State.RUNNING:
                turns.append(Expire(run, actor))
            elif run.state in FINAL:
                ended.append(run)
            else:
                checks.append(run)
        turns.extend(await self._settled(checks, now_ms))
        turns.extend(await self._expired(ended, now_ms))
        if turns:
            await self._kernel.turner.turn(turns, give_up=True)
        if kept:
            # Our own worker lives and will prolong or give up: no reason to look at once again.
            self.hint(now_ms + SECOND_MS)
        return bool(turns)

    async def _settled(self, checks: list[Run], now_ms: int) -> list[Turn]:
        """Conditions that are met or given up; the others are looked at again after their interval."""
        turns: list[Turn] = []
        later: list[Batch] = []
        for run in checks:
            action = run.spec.action
            if not isinstance(action, Check):
                continue
            since_ms = now_ms - (run.started_ms or now_ms)
            if await self._probe(action, now_ms):
                turns.append(Settle(run, self._kernel.host_id, True, "the condition is met"))
            elif action.give_up_ms is not None and since_ms >= action.give_up_ms:
                turns.append(Settle(run, self._kernel.host_id, False, "timeout"))
            else:
                later.append(Batch(changes=(changed(run.with_(alarm_ms=now_ms + action.interval_ms)),)))
        if later:
            await self._kernel.committer.commit(later)
        return turns

    async def _expired(self, ended: list[Run], now_ms: int) -> list[Turn]:
        """Runs to forget. One with live children stays, and is looked at again later."""
        parents = tuple(run.id for run in ended if run.has_children)
        live_below: frozenset[str] = frozenset()
        if parents:
            live_below = (await self._kernel.store.load(Facts(live_below=parents))).live_below
        stay = [run for run in ended if run.id in live_below]
        if stay:
            later_ms = now_ms + KEPT_FOR_CHILDREN_MS
            batches = [Batch(changes=(changed(run.with_(alarm_ms=later_ms)),)) for run in stay]
            await self._kernel.committer.commit(batches)
        return [Drop(run, self._kernel.host_id) for run in ended if run.id not in live_below]

    async def _open(self, gate: Gate, now_ms: int) -> None:
        await self._kernel.committer.commit([open_gate(gate, self._kernel.host_id, "its time is over", now_ms)])

    async def _trim(self) -> None:
        """The journal forgets in bounded stretches, and only when enough was written since."""
        if self._kernel.feed.published - self._trimmed_at < TRIM_AFTER_EVENTS:
            return
        self._trimmed_at = self._kernel.feed.published
        while await self._kernel.store.trim_journal(self._retention, self._kernel.env.now_ms()):
            log.debug("a stretch of the journal was forgotten")
