"""What must hold, each a sentence and a function, watched from outside: from the events, the store and the clients.

`Watch` sees every event at the moment it is committed and asks all checkers of an event at once. It keeps a story of
each run that it writes itself, by none of the code under test. The sentences are constants: a planted bug names the
one that must catch it.
"""

from __future__ import annotations

import asyncio
import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from stellwerk.core.batch import Applied, Batch, Claim, Committed
from stellwerk.core.errors import ImpossibleEvent, StellwerkError
from stellwerk.core.events import (
    AnyEvent,
    GateOpened,
    GateShut,
    ResultRejected,
    RunAdded,
    RunCancelled,
    RunDropped,
    RunEdited,
    RunEvent,
    RunFailed,
    RunPostponed,
    RunReadied,
    RunSettled,
    RunStarted,
    RunStopAsked,
    RunSucceeded,
    Stamped,
)
from stellwerk.core.facts import Facts
from stellwerk.core.gates import Gate, by_key, holding
from stellwerk.core.logs import LogQuery
from stellwerk.core.queries import PAGE_ROWS_MAX, LeaseRef, RunQuery
from stellwerk.core.run import FINAL, LIVE, NO_QUEUE, Check, Outcome, Run, Spec, State, Succeeded
from stellwerk.store.memory import MemoryStore
from tests.conformance.fold import difference, fold

if TYPE_CHECKING:
    from tests.simulation.world import SimHost, World

IDS_RISE = "EventIds rise strictly"
FOLLOWED = "a follower sees every event once, in order, or is told that it is torn"
FOLDS = "folding the journal gives the tables"
ONE_END = "an attempt has one end, told by the worker that held it, or by a rescuer after its lease"
NO_THEFT = "a lease is not taken from a living worker"
ONE_TRY = "an attempt is executed once, by the worker that claimed it, and its end is what the executor said"
LIVE_KEYS = "a live key is held by at most one live run"
EDGES = "no child is readied before its edges allow, nor a run before it is due"
GATES = "no run starts under a gate that was shut before"
LIMITS = "no more runs than a limit allows are running"
ACKS = "what was acknowledged is there"
REPEATS = "a repeated request with the same idempotency key gets the same answer and adds nothing"
FINAL_IS_FINAL = "what has ended does not change"
ATTEMPTS = "attempts rise by one"
RETRIES = "a run is tried as often as its policy says, and lost workers are forgiven three times"
READS = "a read is true at its stamp"
HEALED = "after healing everything comes to an end"
NOTHING_FORGOTTEN = "nobody waits for nothing: what is claimable is claimed, what is held is held by something"
FREE = "after the end nothing is held: no slot, lease, live key, chore or parked run"
COUNTERS = "counters equal the tables"
LOG_LINES = "log lines are numbered without gaps, each once and in order"
TASKS_LIVE = "the parts of a living host are alive"

# The chore that brings parked runs back takes the best of the key again and again, with no cursor: behind a bunch that
# another gate of the same key still holds, one that this gate exempts is not reached. False, once it has a cursor.
EXEMPT_RUNS_STAY_PARKED = True

LASTING_TASKS = {"committer", "ticker", "listener", "worker-report"}
CRASHES_FORGIVEN = 3
HELD_FOR_MS = 100  # so long before a rescue the attempt must have been in the rescuer's own hands to be called theft
QUIET_MS = 5_000  # so long after its moment nobody may still have looked


class Violation(Exception):
    """A sentence that did not hold."""

    def __init__(self, checker: str, text: str) -> None:
        super().__init__(f"not true that {checker}: {text}")
        self.checker = checker
        self.text = text


class Story(Struct):
    """What the events told of one run so far."""

    run: str
    spec: Spec
    added: int
    state: State
    priority: int
    due_ms: int | None
    live_key: str | None
    attempt: int = 0
    worker: str | None = None
    lease_ms: int = 0
    tries: int = 0
    crashes: int = 0
    stop_asked: bool = False
    dropped: bool = False
    moments: list[int] = []  # EventIds, and what was true from each on
    shown: list[tuple[State, int, int]] = []  # state, attempt, priority

    def at(self, event_id: int) -> tuple[State, int, int] | None:
        place = bisect_right(self.moments, event_id)
        return self.shown[place - 1] if place else None


class Watch:
    """Stands beside the store and hears all that it does."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.violations: list[Violation] = []
        self.events: list[Stamped] = []
        self.stories: dict[str, Story] = {}
        self.gates: dict[tuple[str, str], GateShut] = {}
        self.gate_moments: list[tuple[int, frozenset[tuple[str, str]]]] = [(0, frozenset())]
        self.last = 0
        self._holders: dict[str, str] = {}
        self._second_holders: list[str] = []
        self._running: Counter[str] = Counter()
        self._ends: set[tuple[str, int]] = set()
        self._began: dict[tuple[str, int], tuple[str, int]] = {}
        self._executed: dict[tuple[str, int], tuple[str, Outcome]] = {}
        self._digest = hashlib.blake2b(digest_size=8)
        self._look: dict[type[Any], Callable[[Story, Any, int], None]] = {
            RunReadied: self._readied,
            RunStarted: self._started,
            RunPostponed: self._postponed,
            RunSucceeded: self._succeeded,
            RunFailed: self._failed,
            RunCancelled: self._cancelled,
            RunSettled: self._settled,
            RunStopAsked: self._stop_asked,
            RunEdited: self._edited,
            RunDropped: self._dropped,
        }

    def wrong(self, checker: str, text: str) -> None:
        """A sentence does not hold. Kept, since whoever called us may be ready for every error."""
        self.violations.append(Violation(checker, text))
        self._world.note(f"VIOLATION: {checker}: {text}")

    def raise_first(self) -> None:
        if self.violations:
            raise self.violations[0]

    def digest(self) -> str:
        return self._digest.hexdigest()

    # -- the store did something --------------------------------------------------------------------------------------

    def applied(self, batches: Sequence[Batch], claims: Sequence[Claim], now_ms: int, applied: Applied) -> None:
        committed = [receipt for receipt in applied.receipts if isinstance(receipt, Committed)]
        told = sum(
            len(batch.events)
            for batch, receipt in zip(batches, applied.receipts, strict=True)
            if isinstance(receipt, Committed)
        )
        started = sum(len(claimed.runs) for claimed in applied.claimed)
        if told + started != len(applied.events):
            text = f"{told} events handed in and {started} runs started, but {len(applied.events)} journaled"
            self.wrong(FOLDS, text)
        for receipt in committed:
            if receipt.event_id > applied.first_event_id + len(applied.events) - 1 and applied.events:
                self.wrong(IDS_RISE, f"a receipt of {receipt.event_id} is beyond the call's last event")
        for event_id, event in enumerate(applied.events, applied.first_event_id):
            self._hear(event_id, event)
        for run_id in self._second_holders:
            story = self.stories[run_id]
            if story.state in LIVE:
                self.wrong(LIVE_KEYS, f"{story.live_key} is held by {self._holders} and was given to {run_id}")
        self._second_holders.clear()

    def _hear(self, event_id: int, event: AnyEvent) -> None:
        if event_id <= self.last:
            self.wrong(IDS_RISE, f"event {event_id} was committed after {self.last}")
        self.last = event_id
        self.events.append(Stamped(event_id, event))
        self._digest.update(f"{event_id}{type(event).__name__}{event.key}{event.actor}".encode())
        self._world.note(f"{event_id} {_told(event)}")
        if isinstance(event, RunAdded):
            self._added(event, event_id)
        elif isinstance(event, RunEvent):
            story = self.stories.get(event.run)
            if story is None:
                self.wrong(FOLDS, f"{type(event).__name__} of run {event.run}, which was never added")
            elif isinstance(event, ResultRejected):
                pass
            elif story.dropped or (story.state in FINAL and not isinstance(event, RunDropped)):
                self.wrong(FINAL_IS_FINAL, f"{type(event).__name__} of run {event.run}, which has {story.state}")
            else:
                self._look[type(event)](story, event, event_id)
                story.moments.append(event_id)
                story.shown.append((story.state, story.attempt, story.priority))
        elif isinstance(event, GateShut):
            self.gates[event.gate, event.kind] = event
            self.gate_moments.append((event_id, frozenset(self.gates)))
        elif isinstance(event, GateOpened):
            self.gates.pop((event.gate, event.kind), None)
            self.gate_moments.append((event_id, frozenset(self.gates)))

    def extended(self, leases: Sequence[LeaseRef], until_ms: int, now_ms: int, answer: list[str]) -> None:
        for lease in leases:
            story = self.stories.get(lease.run_id)
            if story is None or story.state is not State.RUNNING:
                continue
            if (story.attempt, story.worker) == (lease.attempt, lease.worker) and story.lease_ms > now_ms:
                story.lease_ms = max(story.lease_ms, until_ms)

    def leases_ended(self) -> None:
        """An exclusive store was opened anew: nobody lives who could hold a lease."""
        for story in self.stories.values():
            story.lease_ms = 0

    # -- the life of a run --------------------------------------------------------------------------------------------

    def _added(self, event: RunAdded, event_id: int) -> None:
        if event.run in self.stories:
            self.wrong(FINAL_IS_FINAL, f"run {event.run} was added twice")
        story = Story(event.run, event.spec, event_id, State.WAITING, event.priority, event.due_ms, event.live_key)
        self.stories[event.run] = story
        story.moments.append(event_id)
        story.shown.append((story.state, 0, story.priority))
        if event.live_key is not None:
            if event.live_key in self._holders:
                self._second_holders.append(event.run)  # allowed only if it ends in the same call
            else:
                self._holders[event.live_key] = event.run

    def _from(self, story: Story, event: RunEvent, *states: State) -> None:
        if story.state not in states:
            self.wrong(FOLDS, f"{type(event).__name__} of run {story.run}, which is {story.state}")

    def _readied(self, story: Story, event: RunReadied, event_id: int) -> None:
        self._from(story, event, State.WAITING)
        self._check_edges(story, "readied")
        if story.due_ms is not None and story.due_ms > event.at_ms:
            self.wrong(EDGES, f"run {story.run} was readied {story.due_ms - event.at_ms} ms before it is due")
        story.state = State.READY

    def _check_edges(self, story: Story, what: str) -> None:
        for parent in story.spec.parents:
            found = self.stories[parent.run_id]
            if found.state not in FINAL or parent.when not in ("ended", found.state.value):
                text = f"run {story.run} was {what}; its parent {parent.run_id} is {found.state}, wanted: {parent.when}"
                self.wrong(EDGES, text)

    def _started(self, story: Story, event: RunStarted, event_id: int) -> None:
        self._from(story, event, State.READY)
        if event.attempt != story.attempt + 1:
            self.wrong(ATTEMPTS, f"run {story.run} had {story.attempt} attempts and started as attempt {event.attempt}")
        self._check_edges(story, "started")
        for key in story.spec.keys:
            for kind in ("pause", "block", "hold", "limit"):
                gate = self.gates.get((key, kind))
                if gate is not None:
                    self._check_gate(story, gate, key, event.at_ms)
        story.state = State.RUNNING
        story.attempt, story.worker, story.lease_ms = event.attempt, event.worker, event.lease_until_ms
        self._running.update(story.spec.keys)

    def _check_gate(self, story: Story, gate: GateShut, key: str, now_ms: int) -> None:
        if gate.until_ms is not None and gate.until_ms <= now_ms:
            return
        if story.spec.key in gate.exempt:
            return
        if gate.limit is not None:
            if self._running[key] >= gate.limit:
                self.wrong(LIMITS, f"run {story.run} started beside {self._running[key]} of {key}, limit {gate.limit}")
        elif gate.floor is None or story.priority < gate.floor:
            self.wrong(GATES, f"run {story.run} started under the {gate.kind} at {key}")

    def _attempt_ends(self, story: Story, event: RunEvent, attempt: int, worker: str | None) -> None:
        """Checker 3: by the evidence in the event."""
        self._from(story, event, State.RUNNING)
        name = type(event).__name__
        if attempt != story.attempt or (story.run, attempt) in self._ends:
            self.wrong(ONE_END, f"{name} of attempt {attempt} of run {story.run}, which is at attempt {story.attempt}")
        self._ends.add((story.run, attempt))
        if worker is not None and worker != story.worker:
            self.wrong(ONE_END, f"{name} of run {story.run} by {worker}, but {story.worker} holds it")
        if worker is None:
            self._check_rescue(story, event)
        self._running.subtract(story.spec.keys)

    def _check_rescue(self, story: Story, event: RunEvent) -> None:
        if event.at_ms < story.lease_ms:
            left_ms = story.lease_ms - event.at_ms
            self.wrong(NO_THEFT, f"run {story.run} was taken {left_ms} ms before the lease of {story.worker} ended")
        began = self._began.get((story.run, story.attempt))
        if event.actor == story.worker and began is not None and event.at_ms - began[1] >= HELD_FOR_MS:
            if (story.run, story.attempt) not in self._executed:
                self.wrong(NO_THEFT, f"{event.actor} took run {story.run} from its own worker, which has it in hand")

    def _postponed(self, story: Story, event: RunPostponed, event_id: int) -> None:
        self._attempt_ends(story, event, event.attempt, event.worker)
        self._check_outcome(story, event.attempt, event.worker, event.reason)
        self._count(story, event.counted, goes_on=True, rescue=event.worker is None)
        story.state, story.due_ms = State.WAITING, event.due_ms

    def _succeeded(self, story: Story, event: RunSucceeded, event_id: int) -> None:
        self._attempt_ends(story, event, event.attempt, event.worker)
        executed = self._executed.get((story.run, event.attempt))
        if executed is None or executed[0] != event.worker or not isinstance(executed[1], Succeeded):
            self.wrong(ONE_TRY, f"run {story.run} succeeded by {event.worker}, but the executor said {executed}")
        self._end(story, State.SUCCEEDED)

    def _failed(self, story: Story, event: RunFailed, event_id: int) -> None:
        self._attempt_ends(story, event, event.attempt, event.worker)
        self._check_outcome(story, event.attempt, event.worker, event.reason)
        self._count(story, event.counted, goes_on=False, rescue=event.worker is None)
        self._end(story, State.FAILED)

    def _check_outcome(self, story: Story, attempt: int, worker: str | None, reason: str) -> None:
        executed = self._executed.get((story.run, attempt))
        if worker is None or reason == "worker lost" or executed is None:
            return
        said = getattr(executed[1], "reason", "")
        if isinstance(executed[1], Succeeded):
            self.wrong(ONE_TRY, f"attempt {attempt} of run {story.run} succeeded and was recorded as {reason}")
        if reason == "stopped" and said == "stopped" and not story.stop_asked:
            self.wrong(RETRIES, f"run {story.run} failed as stopped, but nobody asked for that: its worker was lost")

    def _count(self, story: Story, counted: str, *, goes_on: bool, rescue: bool) -> None:
        """Checker 7: by the policy, and by nothing but the events."""
        policy = story.spec.retry
        if counted == "try":
            left = policy is not None and story.tries < policy.max
            if left != goes_on:
                text = f"after {story.tries + 1} tries run {story.run} {'goes on' if goes_on else 'failed'}; {policy}"
                self.wrong(RETRIES, text)
            story.tries += 1
        elif counted == "crash":
            left = story.crashes < CRASHES_FORGIVEN
            if policy is not None or left != goes_on:
                text = f"after {story.crashes + 1} lost workers run {story.run} {'goes on' if goes_on else 'failed'}"
                self.wrong(RETRIES, text)
            story.crashes += 1
        elif rescue or not goes_on:
            self.wrong(RETRIES, f"the end of an attempt of run {story.run} was not counted")

    def _cancelled(self, story: Story, event: RunCancelled, event_id: int) -> None:
        if story.state is State.RUNNING:
            if not story.stop_asked:
                self.wrong(ONE_END, f"run {story.run} was cancelled while it ran, and nobody had asked for it")
            told_by = event.actor if event.actor == story.worker else None
            if told_by is not None and (story.run, story.attempt) not in self._executed:
                told_by = None if self._began.get((story.run, story.attempt)) else told_by
            self._attempt_ends(story, event, event.attempt, told_by)
        if event.reason.startswith("parent "):
            states = [(parent, self.stories[parent.run_id].state) for parent in story.spec.parents]
            if not any(state in FINAL and parent.when not in ("ended", state.value) for parent, state in states):
                self.wrong(EDGES, f"run {story.run} was cancelled because of its parents, but they are {states}")
        self._end(story, State.CANCELLED)

    def _settled(self, story: Story, event: RunSettled, event_id: int) -> None:
        self._from(story, event, State.WAITING, State.READY)
        self._check_edges(story, "settled")
        if story.spec.queue != NO_QUEUE:
            self.wrong(ONE_END, f"run {story.run} is the work of a worker and was settled")
        self._end(story, State.SUCCEEDED if event.succeeded else State.FAILED)

    def _stop_asked(self, story: Story, event: RunStopAsked, event_id: int) -> None:
        self._from(story, event, State.RUNNING)
        story.stop_asked = True

    def _edited(self, story: Story, event: RunEdited, event_id: int) -> None:
        self._from(story, event, State.WAITING, State.READY)
        if event.priority is not None:
            story.priority = event.priority
        if event.due_ms is not None:
            story.due_ms = event.due_ms
            if event.due_ms > event.at_ms:
                story.state = State.WAITING

    def _dropped(self, story: Story, event: RunDropped, event_id: int) -> None:
        self._from(story, event, *FINAL)
        story.dropped = True

    def _end(self, story: Story, state: State) -> None:
        story.state = state
        if story.live_key is not None and self._holders.get(story.live_key) == story.run:
            del self._holders[story.live_key]

    # -- executors ----------------------------------------------------------------------------------------------------

    def began(self, place: tuple[str, int], worker: str, now_ms: int) -> None:
        if place in self._began:
            self.wrong(ONE_TRY, f"attempt {place} was begun by {self._began[place][0]} and by {worker}")
        story = self.stories.get(place[0])
        if story is None or story.attempt < place[1]:
            self.wrong(ONE_TRY, f"attempt {place} was begun by {worker} before it was claimed")
        elif story.attempt == place[1] and story.worker is not None and story.worker != worker:
            self.wrong(ONE_TRY, f"attempt {place} was begun by {worker}, but {story.worker} claimed it")
        self._began[place] = (worker, now_ms)

    def executed(self, place: tuple[str, int], worker: str, outcome: Outcome) -> None:
        self._executed[place] = (worker, outcome)
        self._world.note(f"{worker} executed {place[0][-6:]} attempt {place[1]}: {outcome}")

    def stopped_in_order(self, worker: str) -> None:
        """What an orderly stop leaves behind is nothing."""
        held = [story.run for story in self.stories.values() if story.state is State.RUNNING and story.worker == worker]
        began = [run for run in held if (run, self.stories[run].attempt) in self._began]
        if began and not self._world.faults.on:
            self.wrong(FREE, f"{worker} stopped in order and still holds {began}")

    # -- clients ------------------------------------------------------------------------------------------------------

    def acknowledged(self, run_ids: Sequence[str], event_id: int) -> None:
        """Checker 6: an answer was given for these."""
        for run_id in run_ids:
            story = self.stories.get(run_id)
            if story is None:
                self.wrong(ACKS, f"run {run_id} was acknowledged and does not exist")
            elif story.added > event_id:
                self.wrong(ACKS, f"run {run_id} was acknowledged at {event_id} and added at {story.added}")

    def read(self, run: Run, stamp: int) -> None:
        """A row that a client read, and the EventId at which it is said to be true."""
        story = self.stories.get(run.id)
        shown = None if story is None else story.at(stamp)
        if shown is None:
            self.wrong(READS, f"run {run.id} was read at {stamp}, but was not there")
        elif shown != (run.state, run.attempt, run.priority):
            text = f"run {run.id} was read as {run.state}, attempt {run.attempt}, priority {run.priority} at {stamp}"
            self.wrong(READS, f"{text}; by the journal it is {shown}")

    def counted(self, states: dict[State, int], stamp: int) -> None:
        there = (story.at(stamp) for story in self.stories.values() if not story.dropped)
        counts = Counter(shown[0] for shown in there if shown is not None)
        for state in LIVE:
            if states.get(state, 0) != counts[state]:
                text = f"{states.get(state, 0)} runs {state} were counted at {stamp}; {counts[state]} are"
                self.wrong(COUNTERS, text)

    def gates_read(self, gates: Sequence[Gate], stamp: int) -> None:
        place = bisect_right(self.gate_moments, stamp, key=lambda one: one[0])
        wanted = self.gate_moments[place - 1][1]
        found = {(gate.key, str(gate.kind)) for gate in gates}
        if found != wanted:
            self.wrong(READS, f"gates {sorted(found)} were read at {stamp}; by the journal {sorted(wanted)}")

    def look_at_clients(self, workload: Any) -> None:
        for follower in workload.followers:
            check_follower(self, follower)

    # -- tables -------------------------------------------------------------------------------------------------------

    async def compare_tables(self) -> None:
        """Checker 2."""
        self.raise_first()
        try:
            tables = fold(self.events)
        except ImpossibleEvent as error:
            raise Violation(FOLDS, str(error)) from None
        differences = [text for text in await difference(tables, self._world.store) if not self._is_later_look(text)]
        if differences:
            raise Violation(FOLDS, "; ".join(differences[:5]))

    def _is_later_look(self, text: str) -> bool:
        """When a condition is looked at again, and for how long children keep their parent, is not journaled.

        Nor is how many parents a child had not heard of when it was cancelled: a chore may still have owed it the news,
        and of several ends in one batch it needs only one.
        """
        run_id, _, rest = text.removeprefix("run ").partition(":")
        story = self.stories.get(run_id)
        if story is None:
            return False
        if rest.startswith(" waits_for"):
            return story.state is State.CANCELLED
        return rest.startswith(" alarm_ms") and (story.state in FINAL or isinstance(story.spec.action, Check))


def _told(event: AnyEvent) -> str:
    name = type(event).__name__
    run = getattr(event, "run", "")
    more = [
        f"{field}={getattr(event, field)!r}"
        for field in ("attempt", "worker", "reason", "counted", "due_ms", "gate", "kind", "limit", "outcome")
        if hasattr(event, field)
    ]
    if isinstance(event, RunAdded):
        parents = [f"{parent.run_id[-6:]}:{parent.when}" for parent in event.spec.parents]
        more.append(f"live={event.live_key} parents={parents} retry={event.spec.retry}")
    return f"{name:14} {run[-6:]:6} {event.key} by {event.actor} {' '.join(more)}"


def check_follower(watch: Watch, follower: Any) -> None:
    """Checker 1: what a follower was given is what was journaled, between the places where it was torn."""
    for begin, end, seen in follower.stretches:
        stretch = [one for one in watch.events if begin < one.event_id <= end]
        wanted = [one.event_id for one in stretch if follower.wanted.wants(one.event)]
        if seen != wanted:
            missing = sorted(set(wanted) - set(seen))[:5]
            extra = sorted(set(seen) - set(wanted))[:5]
            text = f"{follower.name} was to see {len(wanted)} events in ({begin}, {end}] and saw {len(seen)}"
            watch.wrong(FOLLOWED, f"{text}; missing {missing}, too many {extra}, in order: {seen == sorted(seen)}")


async def all_runs(world: World) -> list[Run]:
    found: list[Run] = []
    before: int | None = None
    while True:
        page = await world.store.find_runs(RunQuery(before=before, limit=PAGE_ROWS_MAX))
        found.extend(page.runs)
        before = page.before
        if before is None:
            return found


# -- after healing ----------------------------------------------------------------------------------------------------


def now_ms(world: World) -> int:
    return world.hosts[0].kernel.env.now_ms()


async def check_nothing_forgotten(world: World) -> None:
    """All is quiet and some gates are still shut: is everyone who waits waiting for something?"""
    world.watch.raise_first()
    loaded = await world.store.load(Facts(gates=True, running=True, kinds=("chore",)))
    if loaded.records:
        raise Violation(NOTHING_FORGOTTEN, f"chores are left: {sorted(key for _, key in loaded.records)}")
    at_ms = now_ms(world)
    gates = by_key(loaded.gates)
    runs = await all_runs(world)
    busy = Counter(run.spec.queue for run in runs if run.state is State.RUNNING)
    for run in runs:
        text = _forgotten(run, gates, loaded.running, busy, world, at_ms)
        if text is not None:
            raise Violation(NOTHING_FORGOTTEN, f"run {run.id} {text}")


def _forgotten(
    run: Run, gates: dict[str, list[Gate]], running: Any, busy: Counter[str], world: World, at_ms: int
) -> str | None:
    if run.state is State.READY and run.spec.queue != NO_QUEUE:
        held_by = holding(run, gates, running, at_ms)
        if run.parked is not None and not held_by and not _is_known_gap(run, gates):
            return f"is parked under {run.parked}, and nothing holds it"
        if run.parked is None and not held_by:
            free = [host for host in world.hosts if host.worker.slots()[run.spec.queue][1] < _slots(world, run)]
            if free and busy[run.spec.queue] < _slots(world, run):
                return f"is claimable, and {free[0].name} has a free slot"
    if run.state is State.WAITING:
        if run.waits_for == 0 and run.alarm_ms is not None and run.alarm_ms < at_ms - QUIET_MS:
            return f"was due {at_ms - run.alarm_ms} ms ago and still waits"
        parents = [world.watch.stories[parent.run_id].state for parent in run.spec.parents]
        if run.waits_for > 0 and all(state in FINAL for state in parents):
            return f"waits for {run.waits_for} parents, and all have ended: {parents}"
    if run.state is State.RUNNING and run.alarm_ms is not None and run.alarm_ms < at_ms - QUIET_MS:
        return f"is running under a lease that ended {at_ms - run.alarm_ms} ms ago"
    return None


def _is_known_gap(run: Run, gates: dict[str, list[Gate]]) -> bool:
    """See `EXEMPT_RUNS_STAY_PARKED`."""
    return EXEMPT_RUNS_STAY_PARKED and any(run.spec.key in gate.exempt for gate in gates.get(run.parked or "", ()))


def _slots(world: World, run: Run) -> int:
    return world.hosts[0].worker.slots()[run.spec.queue][0]


async def report_stuck(world: World) -> None:
    """Healing took too long: say what is stuck."""
    runs = [run for run in await all_runs(world) if run.is_live]
    if not runs:
        states = (await world.store.count()).states
        raise Violation(COUNTERS, f"all runs have ended, but by the counters {dict(states)}")
    told = [
        f"{run.id} {run.state} attempt={run.attempt} worker={run.worker} parked={run.parked} waits_for={run.waits_for}"
        f" alarm={run.alarm_ms} due={run.due_ms} queue={run.spec.queue} stop={run.stop_asked}"
        for run in runs[:5]
    ]
    raise Violation(HEALED, f"{len(runs)} runs have not ended at {now_ms(world)}: {'; '.join(told)}")


async def check_healed(world: World, workload: Any) -> None:
    """Everything has ended. What is left over?"""
    world.watch.raise_first()
    await _check_free(world)
    await _check_counters(world)
    _check_parts(world)
    _check_troubles(world)
    await workload.finish_following()
    world.watch.look_at_clients(workload)
    workload.check_repeats()
    await _check_results(world)
    await world.watch.compare_tables()


async def _check_free(world: World) -> None:
    loaded = await world.store.load(Facts(kinds=("chore",), gates=True))
    if loaded.records:
        raise Violation(FREE, f"chores are left: {sorted(key for _, key in loaded.records)}")
    if loaded.gates:
        raise Violation(FREE, f"gates are left: {[(gate.key, gate.kind) for gate in loaded.gates]}")
    for run in await all_runs(world):
        if run.is_live:
            raise Violation(HEALED, f"run {run.id} is {run.state}")
        if run.parked is not None or run.live_key is not None:
            raise Violation(FREE, f"run {run.id} has ended; parked {run.parked}, live key {run.live_key}")
    keys = tuple({story.live_key for story in world.watch.stories.values() if story.live_key is not None})
    holders = (await world.store.load(Facts(live_keys=keys))).holders
    if holders:
        raise Violation(FREE, f"live keys are still held: {dict(holders)}")


async def _check_counters(world: World) -> None:
    counts = await world.store.count()
    runs = await all_runs(world)
    queues = Counter((run.spec.queue, run.state) for run in runs)
    states = Counter(run.state for run in runs)
    if {key: n for key, n in counts.queues.items() if n} != dict(queues):
        raise Violation(COUNTERS, f"{dict(counts.queues)} by the counters, {dict(queues)} in the tables")
    if {key: n for key, n in counts.states.items() if n} != dict(states):
        raise Violation(COUNTERS, f"{dict(counts.states)} by the counters, {dict(states)} in the tables")
    if isinstance(world.store, MemoryStore):
        running = {key: n for key, n in world.store._running.items() if n}
        if running:
            raise Violation(COUNTERS, f"nothing is running, but by the counters of keys {running}")


def _check_parts(world: World) -> None:
    for host in world.hosts:
        worker: Any = host.worker
        for queue, (_, held) in worker.slots().items():
            line = worker._lines[queue]
            if held or line.active or any(line.kinds.values()) or line.waiting:
                text = f"{host.name} {queue}: held {held}, active {line.active}, commands {line.kinds}"
                raise Violation(FREE, f"{text}, waiting {len(line.waiting)}, and nothing is running")
        if worker.running:
            raise Violation(FREE, f"{host.name} holds {worker.running} runs, and nothing is running")
        if any(executor.busy for executor in host.executors):
            raise Violation(FREE, f"an executor of {host.name} is busy, and nothing is running")
        alive = {task.get_name() for task in _tasks_of(host) if not task.done()}
        if not alive >= LASTING_TASKS:
            raise Violation(TASKS_LIVE, f"{host.name} has lost {sorted(LASTING_TASKS - alive)}")


def _tasks_of(host: SimHost) -> list[asyncio.Task[Any]]:
    """The asyncio tasks that the parts of a host hold on to."""
    found: list[asyncio.Task[Any]] = []
    for part in (host.kernel.committer, host.ticker, host.host, host.worker):
        for value in vars(part).values():
            several = value if isinstance(value, list) else [value]
            found.extend(one for one in several if isinstance(one, asyncio.Task))
    return found


def _check_troubles(world: World) -> None:
    for trouble in world.loop.troubles:
        error = trouble.get("exception")
        if "task" not in trouble or error is None or isinstance(error, (StellwerkError, OSError)):
            continue  # an answer that nobody waits for any more
        raise Violation(TASKS_LIVE, f"{trouble.get('message')}: {error!r}")


async def _check_results(world: World) -> None:
    """A result is that of the attempt that was accepted; log lines are in order."""
    for story in world.watch.stories.values():
        if story.dropped:
            continue
        if story.state is State.SUCCEEDED and story.spec.queue != NO_QUEUE:
            bodies = (await world.store.load(Facts(bodies=((story.run, "result"),)))).bodies
            wanted = f'"{story.run}/{story.attempt}"'.encode()
            if bodies.get((story.run, "result")) != wanted:
                raise Violation(ONE_END, f"the result of run {story.run} is {bodies}, of attempt {story.attempt}")
        page = await world.store.read_logs(LogQuery(story.run))
        numbers = [line.line for line in page.lines]
        texts = [tuple(map(int, line.piece.data.split(b"/"))) for line in page.lines]
        if numbers != list(range(1, len(numbers) + 1)) or texts != sorted(set(texts)):
            raise Violation(LOG_LINES, f"run {story.run}: {numbers} {texts}")
