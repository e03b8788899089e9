"""The committer: while one commit is in flight, the next gathers. No timer: idle it adds no delay, busy it batches.

Claims ride on the same transaction: a worker's claim that found nothing stays here, is served again with the next
commit that readies runs in its queue, and so submit and start are one flush. Nothing looks while nothing happens.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from stellwerk.core.batch import Applied, Batch, Claim, Claimed, PutGate, PutRecord, Receipt
from stellwerk.core.errors import StellwerkError, Unavailable
from stellwerk.core.run import State
from stellwerk.dispatch.protocol import JOURNAL, Dispatch, Wake, queue_topic
from stellwerk.kernel.env import Env
from stellwerk.kernel.feed import Feed
from stellwerk.store.protocol import Store

log = logging.getLogger("stellwerk.committer")

ROWS_PER_COMMIT = 20_000  # a longer transaction would make the others wait too long
ROWS_WAITING_MAX = 400_000  # beyond it new work is refused: nothing acknowledged may be dropped
LOOK_AGAIN_S = 1.0  # after the store refused a claim (full disk, lost connection)

Deliver = Callable[[Claimed], None]
Hint = Callable[[int], None]


class _Waiting:
    """Batches of one caller, with one answer for all of them."""

    __slots__ = ("alarm_ms", "answer", "batches", "readied", "rows")

    def __init__(self, batches: Sequence[Batch], answer: asyncio.Future[Sequence[Receipt]]) -> None:
        self.batches = batches
        self.answer = answer
        self.rows = 0
        self.readied: set[str] = set()  # queues in which runs become ready: a claim can ride on the same transaction
        alarms: list[int] = []
        for batch in batches:
            self.rows += len(batch.adds) + len(batch.changes) + 1
            for run in [row.run for row in batch.adds] + [row.run for row in batch.changes]:
                if run.state is State.READY:
                    self.readied.add(run.spec.queue)
                if run.alarm_ms is not None:
                    alarms.append(run.alarm_ms)
            for item in batch.records:
                if isinstance(item, PutRecord) and item.record.alarm_ms is not None:
                    alarms.append(item.record.alarm_ms)
            for put in batch.gates:
                if isinstance(put, PutGate) and put.gate.until_ms is not None:
                    alarms.append(put.gate.until_ms)
        self.alarm_ms = min(alarms, default=None)  # the first moment at which someone must look at any of these


class _Standing:
    """A claim that stands until it is served; `look` says that now is a time to serve it."""

    __slots__ = ("claim", "deliver", "look")

    def __init__(self, claim: Claim, deliver: Deliver, look: bool) -> None:
        self.claim = claim
        self.deliver = deliver
        self.look = look


class Committer:
    """All changes of a host go through here, one transaction at a time."""

    def __init__(self, store: Store, env: Env, feed: Feed, dispatch: Dispatch) -> None:
        self._store = store
        self._env = env
        self._feed = feed
        self._dispatch = dispatch
        self._waiting: deque[_Waiting] = deque()
        self._rows_waiting = 0
        self._standing: dict[str, _Standing] = {}
        self._dry: set[str] = set()  # queues in which the last claim found less than it wanted, and nothing came since
        self._flying: dict[str, bool] = {}  # queues whose claim is in flight → whether it is still wanted
        self._landed = asyncio.Event()  # no claim is in flight
        self._landed.set()
        self._wanted = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._closing = False
        self._unanswered: set[asyncio.Future[Sequence[Receipt]]] = set()
        self._telling: set[asyncio.Task[None]] = set()
        self._catching_up: asyncio.Task[None] | None = None
        self._hint: Hint | None = None
        self._retry: asyncio.TimerHandle | None = None
        self.trouble: str | None = None  # why the last call was refused by the store
        self.commits = 0

    def open(self, hint: Hint) -> None:
        """`hint` is told the alarms of rows that were committed, so that the ticker sleeps no longer than it may."""
        self._hint = hint
        self._pump = asyncio.create_task(self._run(), name="committer")

    async def close(self) -> None:
        """What is gathered is still committed; claims are not served any more."""
        self._standing.clear()
        if self._retry is not None:
            self._retry.cancel()
        if self._catching_up is not None:
            self._catching_up.cancel()
        if self._pump is not None:
            self._closing = True
            await asyncio.gather(*self._unanswered, return_exceptions=True)
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
            self._pump = None

    async def commit(self, batches: Sequence[Batch]) -> Sequence[Receipt]:
        """Hand in decisions; the answer comes when they are durable, or are refused."""
        if self._pump is None or self._closing:
            raise Unavailable("this host is stopping; nothing was acknowledged")
        if self._rows_waiting > ROWS_WAITING_MAX:
            raise Unavailable("too much work is waiting to be written; nothing was acknowledged, try again")
        entry = _Waiting(batches, asyncio.get_running_loop().create_future())
        self._unanswered.add(entry.answer)
        entry.answer.add_done_callback(self._unanswered.discard)
        self._waiting.append(entry)
        self._rows_waiting += entry.rows
        self._wanted.set()
        return await entry.answer

    # -- claims -------------------------------------------------------------------------------------------------------

    def stand(self, claim: Claim, deliver: Deliver) -> None:
        """Let a claim stand (one a queue; a new one replaces the old). It is served when that may find something.

        While one is in flight no second is taken: two would fill the same slots twice.
        """
        if claim.queue in self._flying:
            self._flying[claim.queue] = True
            return
        look = claim.queue not in self._dry
        self._standing[claim.queue] = _Standing(claim, deliver, look)
        if look:
            self._wanted.set()

    def withdraw(self, queue: str) -> None:
        """Claim no more. A claim already in flight is still delivered."""
        self._standing.pop(queue, None)
        if queue in self._flying:
            self._flying[queue] = False

    async def landed(self) -> None:
        """Wait until no claim is in flight: what the last ones found is delivered by then."""
        await self._landed.wait()

    def look(self, queues: Sequence[str] | None = None) -> None:
        """Someone says that runs became claimable (None: anywhere)."""
        self._dry.difference_update(self._dry.copy() if queues is None else queues)
        for queue, standing in self._standing.items():
            if queues is None or queue in queues:
                standing.look = True
                self._wanted.set()

    # -- the pump -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        call: asyncio.Task[Applied] | None = None
        entries: list[_Waiting] = []
        served: list[_Standing] = []
        while True:
            if call is None:
                await self._wanted.wait()
                entries, served, call = self._begin()
                if call is None:
                    self._wanted.clear()
                    continue
            try:
                applied: Applied | Exception = await call
            except asyncio.CancelledError:
                raise
            except Exception as error:
                applied = error
            if isinstance(applied, Exception):
                await self._refuse(entries, served, applied)
                call = None
                continue
            done_entries, done_served = entries, served
            # The next transaction begins before the last one is answered, so that the disk never waits for us.
            entries, served, call = self._begin()
            if call is not None:
                await asyncio.sleep(0)
            self._answer(done_entries, done_served, applied)

    def _begin(self) -> tuple[list[_Waiting], list[_Standing], asyncio.Task[Applied] | None]:
        """Gather what waits into one transaction and start it."""
        entries: list[_Waiting] = []
        rows = 0
        while self._waiting and (not entries or rows + self._waiting[0].rows <= ROWS_PER_COMMIT):
            entry = self._waiting.popleft()
            rows += entry.rows
            if not entry.answer.done():
                entries.append(entry)
        self._rows_waiting -= rows
        batches = [batch for entry in entries for batch in entry.batches]
        readied = set[str]().union(*(entry.readied for entry in entries))
        served = [standing for queue, standing in self._standing.items() if standing.look or queue in readied]
        if not self._waiting:
            self._wanted.clear()
        if not batches and not served:
            return [], [], None
        for standing in served:
            # Taken out while it is in flight: it comes back if it found nothing.
            standing.look = False
            del self._standing[standing.claim.queue]
            self._flying[standing.claim.queue] = True
            self._landed.clear()
        claims = [standing.claim for standing in served]
        call = asyncio.create_task(self._store.apply(batches, claims, self._env.now_ms()))
        return entries, served, call

    def _answer(self, entries: list[_Waiting], served: list[_Standing], applied: Applied) -> None:
        self.commits += 1
        self.trouble = None
        self._tell(applied)
        place = 0
        for entry in entries:
            count = len(entry.batches)
            if not entry.answer.done():
                entry.answer.set_result(applied.receipts[place : place + count])
            place += count
            if entry.alarm_ms is not None and self._hint is not None:
                self._hint(entry.alarm_ms)
        for standing, claimed in zip(served, applied.claimed, strict=True):
            queue = standing.claim.queue
            if len(claimed.runs) < standing.claim.limit and not claimed.more:
                self._dry.add(queue)
            else:
                self._dry.discard(queue)
            wanted = self._flying.pop(queue)
            if claimed.runs:
                try:
                    standing.deliver(claimed)
                except Exception:
                    # The pump serves everyone: a bug of one of them must not stop it.
                    log.exception("%d claimed runs could not be delivered", len(claimed.runs))
            elif wanted:
                self._standing[queue] = standing
            if claimed.more:
                self.look((queue,))
        self._note_landing()
        # A commit that was in flight while a claim came back with nothing may have readied what it looks for.
        in_claims = {standing.claim.queue for standing in served}
        missed = [queue for queue in applied.claimable if queue not in in_claims]
        if missed:
            self.look(missed)

    def _tell(self, applied: Applied) -> None:
        """Feed and wakes: hints for everyone who waits for what was just committed."""
        if not applied.events:
            return
        if self._store.exclusive():
            if self._feed.in_doubt:
                self._catch_up()
            else:
                self._feed.publish(applied.first_event_id, applied.events)
        else:
            wakes = [Wake(JOURNAL), *(Wake(queue_topic(queue)) for queue in applied.claimable)]
            telling = asyncio.create_task(self._dispatch.wake(wakes))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)

    def _catch_up(self) -> None:
        """The feed must read the journal: what is published next may not follow what it has."""
        self._feed.doubt()
        if self._catching_up is None or self._catching_up.done():
            self._catching_up = asyncio.create_task(self._look_until_sure(), name="catching-up")

    async def _look_until_sure(self) -> None:
        while self._feed.in_doubt:
            try:
                await self._feed.look()
            except StellwerkError as error:
                log.warning("the feed cannot be brought up to date yet: %s", error)
                await asyncio.sleep(LOOK_AGAIN_S)

    async def _refuse(self, entries: list[_Waiting], served: list[_Standing], error: Exception) -> None:
        """The store refused the whole call: nobody was acknowledged. Claims stand again and look a little later."""
        self._doubt()
        if not isinstance(error, Unavailable):
            log.error("the store failed", exc_info=error)
            if len(entries) > 1:
                # One bad batch must not spoil the others: each caller alone.
                await self._one_by_one(entries)
                entries = []
        else:
            self.trouble = str(error)
        for entry in entries:
            if not entry.answer.done():
                entry.answer.set_exception(error)
        for standing in served:
            if self._flying.pop(standing.claim.queue):
                self._standing[standing.claim.queue] = standing
        self._note_landing()

    def _doubt(self) -> None:
        """What was refused may have been done all the same, with the answer lost.

        Then what it readied, its alarms and its events are found by looking.
        """
        if self._store.exclusive():
            self._catch_up()
        if self._hint is not None:
            self._hint(self._env.now_ms())
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._look_again)

    async def _one_by_one(self, entries: list[_Waiting]) -> None:
        for entry in entries:
            try:
                applied = await self._store.apply(entry.batches, (), self._env.now_ms())
            except Exception as error:
                self._doubt()
                if not entry.answer.done():
                    entry.answer.set_exception(error)
            else:
                self._answer([entry], [], applied)

    def _note_landing(self) -> None:
        if not self._flying:
            self._landed.set()

    def _look_again(self) -> None:
        self._retry = None
        self.look()
