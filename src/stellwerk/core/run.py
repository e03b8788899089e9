"""A run: one piece of work, done once. The only thing that moves.

A Run is a small changing head and an immutable `Spec`. What never changes after the add stands in the spec, is
encoded once and never rewritten.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct, structs

from stellwerk.core.retry import RetryPolicy
from stellwerk.core.times import DAY_MS

PRIORITY_MIN, PRIORITY_MAX, PRIORITY_DEFAULT = 1, 1_000, 100  # a Redis score stays exact up to 1,000
KEEP_MS_DEFAULT = 30 * DAY_MS
RESULT_BYTES_MAX = 64 * 1024  # a result is an answer, not a data set
ERROR_CHARS_MAX = 8_000
NO_QUEUE = "-"  # the queue of runs that need no worker; nobody claims from it

When = Literal["succeeded", "failed", "ended"]


class State(enum.StrEnum):
    """Where a run is in its life. The first three are live, the others final."""

    WAITING = "waiting"
    READY = "ready"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


LIVE = frozenset({State.WAITING, State.READY, State.RUNNING})
FINAL = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})


class Command(Struct, frozen=True, tag="command", tag_field="type"):
    """A program with its arguments; no shell looks at them."""

    argv: tuple[str, ...]


class Shell(Struct, frozen=True, tag="shell", tag_field="type"):
    """A script for bash: the author's constant text. Values reach it by environment or stdin only."""

    script: str


class PythonCall(Struct, frozen=True, tag="python", tag_field="type", omit_defaults=True):
    """A function `module:name`, called in a warm child process, or in a thread of the host if it is trusted.

    Its arguments are the run's body `args`: a JSON array or object.
    """

    function: str
    isolation: Literal["process", "thread"] = "process"


class Nothing(Struct, frozen=True, tag="nothing", tag_field="type"):
    """Succeeds as soon as it may start."""


class Signal(Struct, frozen=True, tag="signal", tag_field="type"):
    """Waits until someone settles it: an approval."""


class Check(Struct, frozen=True, tag="check", tag_field="type", omit_defaults=True):
    """Holds its children back until the system is as asked; looked at every `interval_ms`."""

    kind: Literal["until", "file", "port", "load_below", "memory_above"]
    value: str
    interval_ms: int = 1_000
    give_up_ms: int | None = None


Action = Command | Shell | PythonCall | Nothing | Signal | Check
WORKERLESS = (Nothing, Signal, Check)


class BodyRef(Struct, frozen=True, array_like=True):
    """What the journal and the row know of a body: bulky bytes stand once, apart from both."""

    key: str
    size_bytes: int
    digest: str


class Body(Struct, frozen=True):
    """The bytes themselves: `args`, `stdin` or `result` of a run."""

    key: str
    data: bytes


class Parent(Struct, frozen=True, array_like=True):
    """An edge seen from the child: it waits until `run_id` has ended as `when` says."""

    run_id: str
    when: When = "succeeded"


class Spec(Struct, frozen=True, omit_defaults=True):
    """What never changes after the add."""

    scope: str
    name: str
    action: Action
    created_ms: int
    queue: str = "default"
    door: str = "native"
    keys: tuple[str, ...] = ()
    retry: RetryPolicy | None = None  # None: nothing was written about retries (see run_machine.lose)
    timeout_ms: int | None = None
    keep_ms: int | None = KEEP_MS_DEFAULT  # None: always; 0: dropped with its success or cancellation
    labels: Mapping[str, str] = {}
    env: Mapping[str, str] = {}
    cwd: str | None = None
    inputs: tuple[BodyRef, ...] = ()
    parents: tuple[Parent, ...] = ()
    rerun_of: str | None = None
    live_key: str | None = None  # as asked for; the head's own is given up at the end

    @property
    def key(self) -> str:
        """`scope/name`, as events and filters spell it."""
        return f"{self.scope}/{self.name}"


class Run(Struct, frozen=True):
    """A row of the table `runs`.

    `version` rises with every change but a heartbeat, a parking and a lease's prolongation. `added` and `changed`
    are EventIds and, like `parked`, are written by the store. `alarm_ms` is the one moment at which someone must
    look again: due time while waiting, lease end while running, expiry once final.
    """

    id: str
    version: int
    state: State
    priority: int
    spec: Spec
    attempt: int = 0  # how often it was started: the fencing token
    tries: int = 0  # executions that count against the retry policy
    crashes: int = 0  # workers lost where no policy was written
    due_ms: int | None = None
    alarm_ms: int | None = None
    live_key: str | None = None  # given up at the end
    worker: str | None = None
    started_ms: int | None = None
    ended_ms: int | None = None
    reason: str | None = None
    error: str | None = None
    exit_code: int | None = None
    waits_for: int = 0  # parents that have not yet ended as wanted
    has_children: bool = False
    stop_asked: bool = False
    result: BodyRef | None = None
    parked: str | None = None
    added: int = 0
    changed: int = 0

    def with_(self, **changes: Any) -> Run:
        """A copy with some fields changed."""
        return structs.replace(self, **changes)

    @property
    def is_live(self) -> bool:
        return self.state in LIVE


class Succeeded(Struct, frozen=True, tag=True):
    """The attempt did what it should; `result` is JSON, `exit_code` that of a command."""

    result: bytes | None = None
    exit_code: int | None = None


class Failed(Struct, frozen=True, tag=True):
    """The attempt ended badly: `reason` is a short word (`exit`, `signal`, `timeout`, `error`, …)."""

    reason: str
    error: str = ""
    exit_code: int | None = None


class Lost(Struct, frozen=True, tag=True):
    """The worker, or the process that ran the attempt, is gone; nobody knows how far it came."""

    error: str = "the worker was lost"


class Returned(Struct, frozen=True, tag=True):
    """The attempt never began, or was ended by an orderly stop of its host: put back, nothing counted."""

    reason: str = "returned"


Outcome = Succeeded | Failed | Lost | Returned
