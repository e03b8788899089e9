"""Bugs on purpose: a simulation that does not find these would not find others.

Each is a small change of the real code, the kind of mistake that schedulers really had, and names the checkers of
which one must catch it. Several are bugs that this simulation found in our own code and that are mended now.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import Struct, structs

from stellwerk.core import dag, run_machine
from stellwerk.core.batch import Batch, ChangeRun, Committed, Receipt
from stellwerk.core.events import AnyEvent, RunPostponed, Stamped
from stellwerk.core.gates import OPEN, verdict
from stellwerk.core.run import FINAL, Run, State
from stellwerk.kernel import chores, submit, ticker, turns, worker
from stellwerk.kernel import kernel as kernel_module
from stellwerk.kernel.committer import Committer
from stellwerk.kernel.feed import Feed
from stellwerk.kernel.worker import Worker
from stellwerk.store import memory
from stellwerk.store.memory import MemoryStore
from tests.simulation import checkers
from tests.simulation.faults import Rates
from tests.simulation.world import Failure, simulate

SEEDS_MAX = 100


class Bug(Struct, frozen=True):
    """`caught_by`: the sentences of which one must be found untrue; `store`: the kind of world that can show it."""

    name: str
    caught_by: tuple[str, ...]
    plant: Callable[[], contextlib.AbstractContextManager[None]]
    store: str | None = None
    rates: Rates | None = None  # other faults than chance would have, where it is too rarely cruel enough


class Caught(Struct, frozen=True):
    seeds: int
    checker: str
    text: str


def hunt(bug: Bug, seeds_max: int = SEEDS_MAX) -> Caught | None:
    """Simulate with the bug planted until a checker finds it. None: it got away."""
    for seed in range(seeds_max):
        try:
            with bug.plant():
                simulate(seed, bug.store, None if bug.rates is None else structs.replace(bug.rates))
        except Failure as failure:
            return Caught(seed + 1, failure.checker, failure.text)
    return None


@contextlib.contextmanager
def swapped(owner: Any, name: str, new: object) -> Iterator[None]:
    """Another value under a name, for a while."""
    old = owner[name] if isinstance(owner, dict) else getattr(owner, name)
    _put(owner, name, new)
    try:
        yield
    finally:
        _put(owner, name, old)


def _put(owner: Any, name: Any, value: object) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


@contextlib.contextmanager
def all_of(*plants: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for plant in plants:
            stack.enter_context(plant)
        yield


# -- the bugs ---------------------------------------------------------------------------------------------------------


def _no_fencing() -> contextlib.AbstractContextManager[None]:
    real = run_machine.finish

    def finish(run: Run, attempt: int, who: str, outcome: Any, **more: Any) -> Any:
        if run.state is State.RUNNING:
            run = run.with_(attempt=attempt, worker=who)
        return real(run, attempt, who, outcome, **more)

    return swapped(run_machine, "finish", finish)


def _lease_not_compared() -> contextlib.AbstractContextManager[None]:
    def changed(run: Run, *, bodies: Any = (), lease_ms: int | None = None) -> ChangeRun:
        return ChangeRun(structs.replace(run, version=run.version + 1), bodies, None)

    return all_of(swapped(turns, "changed", changed), swapped(submit, "changed", changed))


def _ids_by_the_callers_clock() -> contextlib.AbstractContextManager[None]:
    def write_events(self: Any, events: Sequence[AnyEvent], first: int) -> None:
        self._journal.extend(Stamped(first + place, event) for place, event in enumerate(events))
        self._chunks.append(len(events))
        self._last = first + len(events) - 1

    return all_of(
        swapped(memory, "next_event_id", lambda last, now_ms: now_ms * 1_000),
        swapped(MemoryStore, "_write_events", write_events),
    )


def _retry_not_counted() -> contextlib.AbstractContextManager[None]:
    real: Any = run_machine._EVOLVE[RunPostponed]
    return swapped(run_machine._EVOLVE, RunPostponed, lambda run, event: real(run, event).with_(tries=run.tries))  # type: ignore[arg-type]


def _live_key_lost_between_tries() -> contextlib.AbstractContextManager[None]:
    real: Any = run_machine._EVOLVE[RunPostponed]
    return swapped(run_machine._EVOLVE, RunPostponed, lambda run, event: real(run, event).with_(live_key=None))  # type: ignore[arg-type]


def _gates_not_looked_at() -> contextlib.AbstractContextManager[None]:
    return swapped(memory, "verdict", lambda *_: OPEN)


def _limits_not_counted() -> contextlib.AbstractContextManager[None]:
    real = verdict
    return swapped(memory, "verdict", lambda run, gates, running, now_ms: real(run, gates, {}, now_ms))


def _child_released_whatever_happened() -> contextlib.AbstractContextManager[None]:
    return swapped(dag, "satisfied", lambda when, state: True if state in FINAL else None)


def _answer_before_commit() -> contextlib.AbstractContextManager[None]:
    real = Committer.commit
    going: set[asyncio.Task[Sequence[Receipt]]] = set()

    async def commit(self: Committer, batches: Sequence[Batch]) -> Sequence[Receipt]:
        task = asyncio.create_task(real(self, batches))
        going.add(task)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.sleep(0)
        return [Committed(2**52) for _ in batches]

    return swapped(Committer, "commit", commit)


def _parked_runs_not_brought_back() -> contextlib.AbstractContextManager[None]:
    real = kernel_module.open_gate

    def open_gate(*given: Any) -> Batch:
        return structs.replace(real(*given), records=())

    return all_of(swapped(kernel_module, "open_gate", open_gate), swapped(ticker, "open_gate", open_gate))


def _lost_wake_never_made_up() -> contextlib.AbstractContextManager[None]:
    real = Committer.look

    def look(self: Committer, queues: Sequence[str] | None = None) -> None:
        if queues is not None:
            real(self, queues)

    return swapped(Committer, "look", look)


def _claim_misses_a_commit_in_flight() -> contextlib.AbstractContextManager[None]:
    real = Committer.look

    def look(self: Committer, queues: Sequence[str] | None = None) -> None:
        if queues is None:
            real(self, queues)

    return swapped(Committer, "look", look)


def _idempotency_not_in_the_batch() -> contextlib.AbstractContextManager[None]:
    real = submit.decide

    def decide(*given: Any) -> Any:
        batch, answers = real(*given)
        return structs.replace(batch, records=()), answers

    return swapped(submit, "decide", decide)


def _host_expires_its_own_work() -> contextlib.AbstractContextManager[None]:
    return swapped(Worker, "holds", lambda self, run_id, attempt: False)


def _counters_not_moved() -> contextlib.AbstractContextManager[None]:
    real = MemoryStore._take_out

    def take_out(self: Any, run_id: str, call: Any) -> None:
        old = self._runs.get(run_id)
        real(self, run_id, call)
        if old is not None and old.state is State.WAITING:
            self._counts[old.spec.queue, old.state] += 1

    return swapped(MemoryStore, "_take_out", take_out)


def _feed_skips_what_was_done_unanswered() -> contextlib.AbstractContextManager[None]:
    return swapped(Committer, "_catch_up", lambda self: None)


def _lost_lease_counts_as_failure() -> contextlib.AbstractContextManager[None]:
    return swapped(worker, "_outcome", lambda held, end: end.outcome)


def _crashes_forgiven_for_ever() -> contextlib.AbstractContextManager[None]:
    return swapped(run_machine, "CRASHES_MAX", 10**6)


def _children_of_a_chore_told_twice() -> contextlib.AbstractContextManager[None]:
    real = chores._shorter

    def shorter(record: Any, chore: Any, now_ms: int) -> Any:
        if isinstance(chore, turns.ChildrenOwed):
            chore = structs.replace(chore, after="")
        return real(record, chore, now_ms)

    return swapped(chores, "_shorter", shorter)


def _follower_told_to_skip() -> contextlib.AbstractContextManager[None]:
    real: Any = Feed._in_ring

    def in_ring(self: Feed, after: int, wanted: Any, limit: int) -> Any:
        answer = real(self, after, wanted, limit)
        return structs.replace(answer, last=self.last)

    return swapped(Feed, "_in_ring", in_ring)


STUCK = (checkers.NOTHING_FORGOTTEN, checkers.HEALED)
FREEZING = Rates(host_freezes=0.3, attempt_hangs=0.5, keeper_fails=1.0)
DEAF = Rates(wake_lost=1.0, commit_fails=0.4)
SLOW = Rates(commit_slow=0.4, read_fails=0.1, attempt_hangs=0.5)

BUGS = (
    Bug("no fencing by attempt", (checkers.ONE_END,), _no_fencing, rates=FREEZING),
    Bug("a lease is taken without comparing its end", (checkers.NO_THEFT,), _lease_not_compared, rates=SLOW),
    Bug("events are numbered by the caller's clock", (checkers.IDS_RISE,), _ids_by_the_callers_clock),
    Bug("a retry is not counted", (checkers.RETRIES,), _retry_not_counted),
    Bug("a live key is given up between two tries", (checkers.LIVE_KEYS,), _live_key_lost_between_tries),
    Bug("gates are not looked at on claim", (checkers.GATES, checkers.LIMITS), _gates_not_looked_at),
    Bug("a limit does not count what runs", (checkers.LIMITS,), _limits_not_counted),
    Bug("a child is released however its parent ended", (checkers.EDGES,), _child_released_whatever_happened),
    Bug("an answer is given before the commit", (checkers.ACKS,), _answer_before_commit),
    Bug("parked runs are not brought back", STUCK, _parked_runs_not_brought_back),
    Bug("a lost wake is never made up for", STUCK, _lost_wake_never_made_up, rates=DEAF),
    Bug(
        "a standing claim misses a commit in flight",
        STUCK,
        _claim_misses_a_commit_in_flight,
        "memory",
    ),
    Bug("the idempotency record is not in the batch", (checkers.REPEATS,), _idempotency_not_in_the_batch),
    Bug("a host expires its own living worker", (checkers.NO_THEFT,), _host_expires_its_own_work, rates=FREEZING),
    Bug("counters are not moved", (checkers.COUNTERS,), _counters_not_moved),
    Bug(
        "the feed skips what was done and not answered",
        (checkers.FOLLOWED,),
        _feed_skips_what_was_done_unanswered,
        "memory",
    ),
    Bug("a lost lease counts as a failure", (checkers.RETRIES,), _lost_lease_counts_as_failure, rates=FREEZING),
    Bug(
        "lost workers are forgiven for ever",
        (checkers.RETRIES,),
        _crashes_forgiven_for_ever,
        rates=Rates(attempt_lost=0.8, host_dies=0.05),
    ),
    Bug("a chore tells the same children twice", (checkers.EDGES, checkers.FOLDS), _children_of_a_chore_told_twice),
    Bug("a follower is told to go on from too far", (checkers.FOLLOWED,), _follower_told_to_skip),
)
