"""asyncio on virtual time: the clock jumps to the next timer when nothing can run.

Every callback belongs to a *place* (a host, or nobody), carried by a context variable from whoever scheduled it. A
place can freeze (its callbacks wait until it goes on) and it can die (its callbacks are never run again, with no
clean-up: what kill -9 leaves behind). The same seed gives the same order of callbacks.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from typing import Any, TypeVar, cast

Answer = TypeVar("Answer")

STEPS_WITHOUT_TIME_MAX = 200_000  # so many callbacks at one moment are a loop that never waits


class Place:
    """Where callbacks belong to. `frozen` and `dead` say what happens to them."""

    __slots__ = ("dead", "deferred", "frozen", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.frozen = False
        self.dead = False
        self.deferred: list[Handle] = []


OUTSIDE = Place("outside")  # clients, followers and whoever breaks things
PLACE: ContextVar[Place] = ContextVar("place", default=OUTSIDE)


# The abstract loop raises NotImplementedError for all that is not said below, and that is what we want of it.
_Unimplemented: Any = asyncio.AbstractEventLoop


class Deadlock(Exception):
    """Nothing can run and no timer is set: whoever waits will wait for ever."""


class Spinning(Exception):
    """Very many callbacks ran and the clock stood still."""


class Handle:
    """A callback that will run, unless it is cancelled or its place is gone."""

    __slots__ = ("_cancelled", "args", "at", "callback", "context", "place")

    def __init__(self, at: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context) -> None:
        self.at = at
        self.callback = callback
        self.args = args
        self.context = context
        self.place: Place = context.get(PLACE, OUTSIDE)
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def cancelled(self) -> bool:
        return self._cancelled

    def when(self) -> float:
        return self.at


class VirtualLoop(_Unimplemented):  # type: ignore[misc]  # the signatures there are more than anyone here needs
    """As much of an event loop as code without sockets and threads needs."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._count = 0
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._over = False
        self._tasks: list[asyncio.Task[Any]] = []  # kept, so that no garbage collection ends the tasks of the dead
        self.troubles: list[dict[str, Any]] = []  # what asyncio told its exception handler
        self.steps = 0

    # -- the clock ----------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now_s

    def run_until_complete(self, future: Any) -> Any:
        """Run until this is done; the clock jumps whenever nothing else can be done."""
        asyncio._set_running_loop(self)
        try:
            main = asyncio.ensure_future(future, loop=self)
            while not main.done():
                self._one_moment(main)
            return main.result()
        finally:
            asyncio._set_running_loop(None)

    def _one_moment(self, main: asyncio.Future[Any]) -> None:
        ready = self._ready
        steps = 0
        while ready and not main.done():
            handle = ready.popleft()
            if handle._cancelled:
                continue
            place = handle.place
            if place.dead:
                continue
            if place.frozen:
                place.deferred.append(handle)
                continue
            steps += 1
            if steps > STEPS_WITHOUT_TIME_MAX:
                raise Spinning(f"{steps} callbacks at {self._now_s:.3f} s; the last: {handle.callback!r}")
            handle.context.run(handle.callback, *handle.args)
        self.steps += steps
        if main.done():
            return
        self._jump()

    def _jump(self) -> None:
        timers = self._timers
        while timers and (timers[0][2]._cancelled or timers[0][2].place.dead):
            heapq.heappop(timers)
        if not timers:
            raise Deadlock(f"at {self._now_s:.3f} s nothing can run and no timer is set")
        self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            self._ready.append(heapq.heappop(timers)[2])

    # -- places -------------------------------------------------------------------------------------------------------

    def freeze(self, place: Place) -> None:
        place.frozen = True

    def thaw(self, place: Place) -> None:
        """It goes on: what waited comes first, in the order in which it would have come."""
        place.frozen = False
        deferred, place.deferred = place.deferred, []
        self._ready.extend(deferred)

    def kill(self, place: Place) -> None:
        place.dead = True
        place.deferred = []

    def context_of(self, place: Place) -> Context:
        """A context whose callbacks belong to this place."""
        context = contextvars.copy_context()
        context.run(PLACE.set, place)
        return context

    # -- callbacks ----------------------------------------------------------------------------------------------------

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        handle = Handle(self._now_s, callback, args, context if context is not None else contextvars.copy_context())
        if not self._over:
            self._ready.append(handle)
        return handle

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        return self.call_at(self._now_s + max(0.0, delay), callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        handle = Handle(when, callback, args, context if context is not None else contextvars.copy_context())
        self._count += 1
        if not self._over:
            heapq.heappush(self._timers, (when, self._count, handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: object = None, context: Context | None = None, **_: Any) -> Any:
        task = asyncio.Task(cast(Coroutine[Any, Any, Any], coro), loop=self, name=str(name or "task"), context=context)
        # A host that was killed leaves pending tasks behind, and that is meant.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._tasks.append(task)
        if len(self._tasks) > 5_000:
            self._tasks = [one for one in self._tasks if not one.done()]
        return task

    # -- the rest of what asyncio asks for ----------------------------------------------------------------------------

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.troubles.append(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.troubles.append(context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._over

    def is_closed(self) -> bool:
        return self._over

    def close(self) -> None:
        """Nothing runs any more, and what the leftovers still want to schedule is forgotten."""
        self._over = True
        self._ready.clear()
        self._timers.clear()
        for task in self._tasks:
            if not task.done():
                _end_quietly(task)
        self._tasks.clear()


def _end_quietly(task: asyncio.Task[Any]) -> None:
    """What was left behind is closed now and here, not by some later garbage collection."""
    work = task.get_coro()
    try:
        if work is not None:
            work.close()
    except Exception:
        pass  # its clean-up wants a world that is gone


def run_virtually(main: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
    """Run one coroutine to its end on a clock of its own."""
    loop = VirtualLoop()
    try:
        return cast(Answer, loop.run_until_complete(main()))
    finally:
        loop.close()
