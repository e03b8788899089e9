"""The worker of a host: takes ready runs, has them executed, keeps their leases, reports their ends.

Lists in, lists out: no asyncio task, future or callback per run. Runs are claimed ahead of the free slots by the
measured rate of ends, so that a stream of short calls never waits for a flush; for runs of a second it is nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from stellwerk.core.batch import Claim, Claimed
from stellwerk.core.errors import StellwerkError
from stellwerk.core.facts import Facts
from stellwerk.core.logs import Appended, LogChunk
from stellwerk.core.queries import LeaseRef
from stellwerk.core.run import RESULT_BYTES_MAX, Body, Failed, Lost, Outcome, PythonCall, Returned, Run, Succeeded
from stellwerk.execute.protocol import Attempt, Ended, Executor
from stellwerk.kernel.kernel import Kernel, Slots
from stellwerk.kernel.settings import WorkerSettings
from stellwerk.kernel.submit import body_ref
from stellwerk.kernel.turns import Finish

log = logging.getLogger("stellwerk.worker")

AHEAD_S = 0.02  # claim what ends within this time, at the measured rate
AHEAD_MAX = 1_024
HANDED_AHEAD_MAX = 256  # of those, how many wait inside an executor rather than here
RATE_WINDOW_S = 0.01
STREAM_RATE = 2_000  # ends a second from which on they are taken in bunches …
STREAM_PAUSE_S = 0.002  # … of so much time
GIVE_BACK_AFTER_S = 1.0  # a run claimed ahead waits no longer than this behind slow ones
REPORT_AGAIN_S = 1.0
LANDING_S_MAX = 10  # a store that does not answer must not hold a stop up for ever
MARGIN_MS_MAX = 2_000  # the keeper ends a tree so long before anyone else may claim its run


class Logs(Protocol):
    """What the worker needs of the log buffer: chunks out, receipts back."""

    def take(self) -> list[LogChunk]: ...

    def confirm(self, chunks: Sequence[LogChunk]) -> None: ...


MakeExecutor = Callable[[str, str, int], Executor]  # kind ("command", "process", "thread"), queue, slots


class _Held:
    """An attempt that this worker has claimed and whose end is not yet in the store."""

    __slots__ = ("executor", "line", "lost", "returns", "run", "stopped", "waits_since")

    def __init__(self, run: Run, line: _Line, now_s: float) -> None:
        self.run = run
        self.line = line
        self.waits_since = now_s
        self.executor: Executor | None = None  # None: not handed over yet
        self.stopped = False
        self.returns = False  # its end is our doing: put back, nothing counted
        self.lost = False  # its lease is over: whatever ended it, the worker was lost

    @property
    def place(self) -> tuple[str, int]:
        return self.run.id, self.run.attempt


class _Line:
    """The slots of one queue on this host."""

    __slots__ = (
        "active",
        "ends",
        "held",
        "kinds",
        "last_end_s",
        "queue",
        "rate",
        "rate_since",
        "slots",
        "timer",
        "waiting",
    )

    def __init__(self, queue: str, slots: int) -> None:
        self.queue = queue
        self.slots = slots
        self.waiting: deque[tuple[_Held, Sequence[Body]]] = deque()
        self.held = 0
        self.active = 0  # handed over to an executor
        self.kinds: Counter[str] = Counter()  # of those, how many of each kind
        self.last_end_s = 0.0
        self.timer: asyncio.TimerHandle | None = None  # the next look whether some wait too long
        self.ends = 0
        self.rate = 0.0
        self.rate_since = 0.0

    def ended(self, count: int, now_s: float) -> None:
        """Measure how many ends a second there are, smoothed by half."""
        self.ends += count
        self.last_end_s = now_s
        elapsed_s = now_s - self.rate_since
        if elapsed_s >= RATE_WINDOW_S:
            self.rate = (self.rate + self.ends / elapsed_s) / 2
            self.ends, self.rate_since = 0, now_s

    def goal(self) -> int:
        """How many runs to hold at once."""
        return min(self.slots + int(self.rate * AHEAD_S), max(AHEAD_MAX, self.slots))


class Worker:
    """One per host, for all its queues."""

    def __init__(
        self,
        kernel: Kernel,
        settings: WorkerSettings,
        make_executor: MakeExecutor,
        logs: Logs,
        variables: Mapping[str, str],
    ) -> None:
        self._kernel = kernel
        self._settings = settings
        self._make_executor = make_executor
        self._logs = logs
        self._variables = variables
        self._margin_ms = margin_ms(settings.lease_ms)
        self.id = kernel.host_id
        self._lines = {queue: _Line(queue, slots) for queue, slots in settings.slots.items() if slots > 0}
        # By attempt: after a lost lease a host may claim the next attempt while the last is still being ended.
        self._held: dict[tuple[str, int], _Held] = {}
        self._nothing_held = asyncio.Event()
        self._nothing_held.set()
        self._executors: dict[tuple[str, str], Executor] = {}
        self._opening: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._ended: list[tuple[_Held, Outcome]] = []
        self._something = asyncio.Event()
        self._reporting: list[asyncio.Task[None]] = []
        self._heartbeat: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = False
        self._draining = False
        self.lost = 0  # leases lost since start, for /metrics

    # -- lifetime -----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._kernel.slots_of = self.slots_of
        if "default" in self._lines:
            # Warm children import while nobody waits for them yet.
            await self._executor_for("process", self._lines["default"])
        self._reporting = [asyncio.create_task(self._report(), name="worker-report")]
        for line in self._lines.values():
            self._ask(line)

    def wake(self) -> None:
        """An executor or the log buffer has something. Thread-safe, and cheap when called twice."""
        if not self._woken and self._loop is not None:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._look_soon)
            except RuntimeError:
                return  # the loop is closed: nobody is left to report to

    def stop_claiming(self) -> None:
        """Claim no more; what was claimed ahead and has not begun goes back."""
        self._draining = True
        for line in self._lines.values():
            self._kernel.committer.withdraw(line.queue)
            self._give_back(line, older_than_s=0.0)

    async def drain(self, skip: asyncio.Event) -> None:
        """Claim no more, wait for what runs, then end it and put it back. `skip` set: do not wait."""
        self.stop_claiming()
        try:
            # A claim in flight still brings runs; left behind, they would count as lost with their worker.
            async with asyncio.timeout(LANDING_S_MAX):
                await self._kernel.committer.landed()
        except TimeoutError:
            log.warning(
                "a claim has not been answered for %d s; what it finds is left to the next start", LANDING_S_MAX
            )
        if self._settings.drain_ms and not skip.is_set():
            await self._until_empty(self._settings.drain_ms / 1_000, skip)
        for held in list(self._held.values()):
            held.returns = True
            if held.executor is not None and not held.stopped:
                held.stopped = True
                grace_ms = 0 if skip.is_set() else self._settings.kill_grace_ms
                held.executor.stop(held.run.id, held.run.attempt, grace_ms)
        await self._until_empty(self._settings.kill_grace_ms / 1_000 + 10, skip)
        if self._held:
            for held in self._held.values():
                if held.executor is not None:
                    held.executor.stop(held.run.id, held.run.attempt, 0)
            await self._until_empty(10, asyncio.Event())

    async def close(self) -> None:
        """End what still runs; nothing more is reported."""
        self._draining = True
        for timer in (self._heartbeat, *(line.timer for line in self._lines.values())):
            if timer is not None:
                timer.cancel()
        for work in [*self._reporting, *self._opening.values(), *([self._beating] if self._beating else [])]:
            work.cancel()
        await asyncio.gather(*self._reporting, *self._opening.values(), return_exceptions=True)
        for executor in self._executors.values():
            await executor.close()

    async def _until_empty(self, timeout_s: float, skip: asyncio.Event) -> None:
        """Wait until nothing is held any more, or the time is over, or someone is in a hurry."""
        waits = [asyncio.create_task(self._nothing_held.wait()), asyncio.create_task(skip.wait())]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    # -- claiming -----------------------------------------------------------------------------------------------------

    def _ask(self, line: _Line) -> None:
        """Let a claim stand for what this line can take; ask when half of it is used up."""
        if self._draining:
            return
        goal = line.goal()
        if line.held > goal // 2 and line.held >= line.slots:
            self._kernel.committer.withdraw(line.queue)
            return
        claim = Claim(line.queue, self.id, goal - line.held, self._settings.lease_ms)
        self._kernel.committer.stand(claim, self._claimed)

    def _claimed(self, claimed: Claimed) -> None:
        """Runs that are ours now."""
        now_s = self._now_s()
        line = self._lines[claimed.runs[0].run.spec.queue]
        for taken in claimed.runs:
            if taken.run.attempt > 1:
                self._give_up([one for one in self._held.values() if one.run.id == taken.run.id])
            held = _Held(taken.run, line, now_s)
            self._held[held.place] = held
            line.waiting.append((held, taken.bodies))
        line.held += len(claimed.runs)
        self._nothing_held.clear()
        if self._draining:
            self._give_back(line, older_than_s=0.0)
            return
        self._arm_heartbeat()
        self._hand_over(line)
        self._ask(line)

    def _hand_over(self, line: _Line) -> None:
        """Start as many of the waiting runs as the slots allow."""
        starts: dict[Executor, list[Attempt]] = {}
        waiting = line.waiting
        if not waiting:
            return
        boot_ms, now_ms = self._kernel.env.boot_ms(), self._kernel.env.now_ms()
        while waiting:
            held, bodies = waiting[0]
            kind = _kind(held.run)
            executor = self._executors.get(_place(kind, line))
            if executor is None:
                self._open_soon(kind, line)
                break
            # Calls may queue inside their executor, if it runs no more at once than others leave room for; a command
            # needs a slot of its own.
            others = line.active - line.kinds[kind]
            room = line.slots
            if kind != "command" and others < line.slots and executor.narrow(line.slots - others):
                room += HANDED_AHEAD_MAX
            if line.active >= room:
                break
            waiting.popleft()
            held.executor = executor
            line.active += 1
            line.kinds[kind] += 1
            starts.setdefault(executor, []).append(self._attempt(held.run, bodies, boot_ms, now_ms))
        for executor, attempts in starts.items():
            try:
                executor.start(attempts)
            except Exception as error:
                log.exception("an executor could not take %d attempts", len(attempts))
                self._not_started(line, attempts, error)
        self._arm_look_back(line)

    def _arm_look_back(self, line: _Line) -> None:
        waits = line.waiting or line.active > line.slots
        if waits and line.timer is None and self._loop is not None:
            line.timer = self._loop.call_later(GIVE_BACK_AFTER_S, self._look_back, line)

    def _look_back(self, line: _Line) -> None:
        """Runs that were claimed ahead wait no longer behind slow ones: others may have slots, or a gate has shut."""
        line.timer = None
        if self._now_s() - line.last_end_s < GIVE_BACK_AFTER_S:
            self._arm_look_back(line)
            return
        if not line.waiting and line.active <= line.slots:
            return
        line.rate = 0.0
        for kind in ("process", "thread"):
            executor = self._executors.get(_place(kind, line))
            if executor is not None:
                executor.give_back()
        self._give_back(line, GIVE_BACK_AFTER_S)
        self._arm_look_back(line)

    def _not_started(self, line: _Line, attempts: Sequence[Attempt], error: Exception) -> None:
        """An executor that raises has a bug: nobody knows which of these have begun."""
        for attempt in attempts:
            held = self._held[attempt.run_id, attempt.number]
            line.active -= 1
            line.kinds[_kind(held.run)] -= 1
            self._end(held, Lost(f"its executor failed: {error}"))
        self._something.set()

    def _give_back(self, line: _Line, older_than_s: float) -> None:
        """Runs claimed ahead that wait too long behind slow ones go back; nothing is counted."""
        now_s = self._now_s()
        while line.waiting and line.waiting[-1][0].waits_since <= now_s - older_than_s:
            held, _ = line.waiting.pop()
            self._end(held, Returned("put back before it began"))
        if self._ended:
            self._something.set()

    def _attempt(self, run: Run, bodies: Sequence[Body], boot_ms: int, now_ms: int) -> Attempt:
        spec = run.spec
        found = {body.key: body.data for body in bodies}
        return Attempt(
            run_id=run.id,
            number=run.attempt,
            scope=spec.scope,
            name=spec.name,
            action=spec.action,
            env={
                **self._variables,
                **spec.env,
                "STELLWERK_RUN_ID": run.id,
                "STELLWERK_ATTEMPT": str(run.attempt),
                "STELLWERK_SCOPE": spec.scope,
                "STELLWERK_NAME": spec.name,
            },
            labels=spec.labels,
            cwd=spec.cwd,
            args=found.get("args"),
            stdin=found.get("stdin"),
            timeout_ms=spec.timeout_ms,
            # When the keeper must have ended it: what is left of the lease, less a margin.
            lease_deadline_boot_ms=boot_ms + (run.alarm_ms or now_ms) - now_ms - self._margin_ms,
        )

    # -- executors ----------------------------------------------------------------------------------------------------

    def _open_soon(self, kind: str, line: _Line) -> None:
        place = _place(kind, line)
        if place not in self._opening:
            self._opening[place] = asyncio.create_task(self._open_executor(kind, line))

    async def _open_executor(self, kind: str, line: _Line) -> None:
        try:
            await self._executor_for(kind, line)
        except Exception:
            log.exception("the executor for %s of queue %s could not be started", kind, line.queue)
            for held, _ in list(line.waiting):
                if _kind(held.run) == kind:
                    self._end(held, Failed("start", f"the executor for {kind} actions could not be started"))
            line.waiting = deque(item for item in line.waiting if _kind(item[0].run) != kind)
            self._something.set()
        finally:
            self._opening.pop(_place(kind, line), None)
        self._hand_over(line)

    async def _executor_for(self, kind: str, line: _Line) -> Executor:
        place = _place(kind, line)
        executor = self._make_executor(kind, line.queue, line.slots)
        await executor.open()
        self._executors[place] = executor
        return executor

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _look_soon(self) -> None:
        """At once; but in a stream of ends wait a moment for more of them, since each look costs."""
        if self._loop is not None and any(line.rate > STREAM_RATE for line in self._lines.values()):
            self._loop.call_later(STREAM_PAUSE_S, self._look)
        else:
            self._look()

    def _look(self) -> None:
        """Take what the executors have; refill the slots at once; the reporter does the rest."""
        self._woken = False
        now_s = self._now_s()
        counts: dict[_Line, int] = {}
        for executor in self._executors.values():
            for end in executor.take_ended():
                held = self._held.get((end.run_id, end.number))
                if held is None or held.executor is None:
                    continue
                line = held.line
                line.active -= 1
                line.kinds[_kind(held.run)] -= 1
                counts[line] = counts.get(line, 0) + (type(end.outcome) is not Returned)
                self._end(held, _outcome(held, end))
        for line, count in counts.items():
            if count:
                line.ended(count, now_s)
            self._hand_over(line)
            self._ask(line)
        self._something.set()

    def _end(self, held: _Held, outcome: Outcome) -> None:
        held.executor = None
        held.line.held -= 1
        self._ended.append((held, outcome))

    async def _report(self) -> None:
        """Logs first, then ends, all that came since the last time together."""
        while True:
            await self._something.wait()
            self._something.clear()
            while True:
                ended, self._ended = self._ended, []
                await self._write_logs()
                if not ended:
                    break
                await self._finish(ended)

    async def _write_logs(self) -> None:
        while chunks := self._logs.take():
            try:
                answers = await self._kernel.store.append_logs(chunks)
            except Exception as error:
                # Losing output never fails the run, nor holds it up.
                log.warning("output of %d attempts could not be stored: %s", len(chunks), error)
                self._logs.confirm(chunks)
                return
            self._logs.confirm(chunks)
            self._kernel.logs_came(
                [chunk.run_id for chunk, answer in zip(chunks, answers, strict=True) if isinstance(answer, Appended)]
            )

    async def _finish(self, ended: list[tuple[_Held, Outcome]]) -> None:
        """An end is never given up: while the store refuses, it is reported again."""
        turns = [_finish_turn(held.run, outcome, self.id) for held, outcome in ended]
        while True:
            try:
                await self._kernel.turner.turn(turns)
                break
            except asyncio.CancelledError:
                raise
            except Exception as error:
                log.warning("%d ends could not be recorded yet: %s", len(turns), error)
                await asyncio.sleep(REPORT_AGAIN_S)
        for held, _ in ended:
            self._held.pop(held.place, None)
        if not self._held:
            self._nothing_held.set()
        for line in dict.fromkeys(held.line for held, _ in ended):
            self._ask(line)

    # -- leases -------------------------------------------------------------------------------------------------------

    def holds(self, run_id: str, attempt: int) -> bool:
        """Whether an attempt is in this worker's hands: then this host does not expire it."""
        return (run_id, attempt) in self._held

    def _arm_heartbeat(self) -> None:
        if self._heartbeat is None and self._held and self._loop is not None:
            self._heartbeat = self._loop.call_later(self._settings.lease_ms / 3_000, self._beat)

    def _beat(self) -> None:
        self._heartbeat = None
        if self._held:
            self._beating = asyncio.create_task(self._extend(), name="heartbeat")

    async def _extend(self) -> None:
        held = [one for one in self._held.values() if not one.lost]
        leases = [LeaseRef(one.run.id, one.run.attempt, self.id) for one in held]
        asked_boot_ms = self._kernel.env.boot_ms()
        now_ms = self._kernel.env.now_ms()
        lease_ms = self._settings.lease_ms
        try:
            answer = await self._kernel.store.extend(leases, now_ms + lease_ms, now_ms)
        except StellwerkError as error:
            log.warning("the leases of %d runs could not be prolonged: %s", len(leases), error)
        else:
            given_up = await self._stop(held, answer)
            # Counted from before the store was asked: the keeper's clock must not run behind the store's.
            deadline = asked_boot_ms + lease_ms - margin_ms(lease_ms)
            for executor in self._executors.values():
                executor.renew(deadline, given_up)
        finally:
            self._arm_heartbeat()
        for line in self._lines.values():
            if line.waiting:
                self._hand_over(line)

    async def stops_asked(self, run_ids: Sequence[str]) -> None:
        """Someone says that these shall stop: ask the store, and act on what it says."""
        wanted = set(run_ids)
        held = [one for one in self._held.values() if one.run.id in wanted and not one.lost]
        if not held:
            return
        now_ms = self._kernel.env.now_ms()
        leases = [LeaseRef(one.run.id, one.run.attempt, self.id) for one in held]
        await self._stop(held, await self._kernel.store.extend(leases, now_ms + self._settings.lease_ms, now_ms))

    async def _stop(self, held: Sequence[_Held], run_ids: Sequence[str]) -> list[tuple[str, int]]:
        """End attempts that were asked to stop (with grace) or whose lease is lost (at once); answers the lost ones."""
        if not run_ids:
            return []
        rows = (await self._kernel.store.load(Facts(runs=tuple(run_ids)))).runs
        named = set(run_ids)
        lost: list[_Held] = []
        for one in held:
            if one.run.id not in named or one.place not in self._held:
                continue
            row = rows.get(one.run.id)
            if row is None or not row.stop_asked or row.attempt != one.run.attempt:
                lost.append(one)
            elif one.executor is None:
                self._drop_waiting(one)
            elif not one.stopped:
                one.stopped = True
                one.executor.stop(one.run.id, one.run.attempt, self._settings.kill_grace_ms)
        self._give_up(lost)
        return [one.place for one in lost]

    def _give_up(self, lost: Sequence[_Held]) -> None:
        """Their leases are over: end them at once."""
        for held in lost:
            if held.lost:
                continue
            held.lost = held.stopped = True
            self.lost += 1
            if held.executor is None:
                self._drop_waiting(held)
            else:
                held.executor.stop(held.run.id, held.run.attempt, 0)

    def _drop_waiting(self, held: _Held) -> None:
        """It never began: its end is ours to tell."""
        for item in held.line.waiting:
            if item[0] is held:
                held.line.waiting.remove(item)
                self._end(held, Returned("stopped before it began"))
                self._something.set()
                return

    # -- looks --------------------------------------------------------------------------------------------------------

    def slots_of(self, run: Run) -> Slots:
        """For `why`."""
        line = self._lines.get(run.spec.queue)
        stuck = next((text for ex in self._executors.values() if (text := ex.stuck().get(run.id))), None)
        return Slots(None if line is None else line.slots, 0 if line is None else line.held, stuck)

    @property
    def running(self) -> int:
        return len(self._held)

    def slots(self) -> Mapping[str, tuple[int, int]]:
        """queue → (slots, held)."""
        return {line.queue: (line.slots, line.held) for line in self._lines.values()}

    def _now_s(self) -> float:
        return self._loop.time() if self._loop is not None else 0.0


def margin_ms(lease_ms: int) -> int:
    """How long before the end of a lease the keeper ends a tree that was not renewed."""
    return min(MARGIN_MS_MAX, lease_ms // 4)


def _kind(run: Run) -> str:
    action = run.spec.action
    return action.isolation if isinstance(action, PythonCall) else "command"


def _place(kind: str, line: _Line) -> tuple[str, str]:
    """Calls have an executor a queue, since that is what bounds them; commands are bounded here."""
    return kind, "" if kind == "command" else line.queue


def _outcome(held: _Held, end: Ended) -> Outcome:
    if held.returns and not isinstance(end.outcome, Succeeded):
        return Returned("the host was stopped")
    if held.lost and not isinstance(end.outcome, Succeeded):
        return Lost("its lease ran out")
    return end.outcome


def _finish_turn(run: Run, outcome: Outcome, worker: str) -> Finish:
    result = outcome.result if isinstance(outcome, Succeeded) else None
    if result is None:
        return Finish(run, run.attempt, worker, outcome)
    if len(result) > RESULT_BYTES_MAX:
        text = f"the result has {len(result)} bytes; at most {RESULT_BYTES_MAX} are kept"
        return Finish(run, run.attempt, worker, Failed("result", text))
    body = Body("result", result)
    return Finish(run, run.attempt, worker, outcome, body_ref(body), (body,))
