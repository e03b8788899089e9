"""The writer thread: one queue, one connection, one flush for all requests that wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from stellwerk.store.sqlite.session import Failure, Session, Work

REQUESTS_PER_TRANSACTION = 64  # so that a flood of small requests cannot keep the first one waiting

_Waiting = tuple[Work, asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class WriterThread:
    """Takes requests from the event loop, and answers them there after the commit."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._queue: SimpleQueue[_Waiting | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="stellwerk-sqlite-writer", daemon=True)
        self._thread.start()

    def request(self, work: Work) -> Awaitable[Any]:
        """Ask for some work; the answer comes after its commit."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._queue.put((work, loop, future))
        return future

    def stop(self) -> None:
        """End the thread after what was asked for before."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (requests := self._next_requests()) is not None:
            works = [work for work, _, _ in requests]
            try:
                outcomes = self._session.execute(works)
            except BaseException as error:
                # A bug; whoever waits must not wait for ever.
                outcomes = [Failure(error) for _ in works]
            _answer(requests, outcomes)

    def _next_requests(self) -> list[_Waiting] | None:
        """All that wait; None when the thread shall end."""
        first = self._queue.get()
        if first is None:
            return None
        requests = [first]
        while len(requests) < REQUESTS_PER_TRANSACTION:
            try:
                further = self._queue.get_nowait()
            except Empty:
                break
            if further is None:
                self._queue.put(None)
                break
            requests.append(further)
        return requests


class InlineWriter:
    """The same in the caller's thread: for virtual time, where nothing may depend on the scheduling of threads."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def request(self, work: Work) -> Any:
        outcome = self._session.execute([work])[0]
        if isinstance(outcome, Failure):
            raise outcome.error
        return outcome

    def stop(self) -> None:
        """Nothing to end."""


def _answer(requests: Sequence[_Waiting], outcomes: Sequence[Any]) -> None:
    """Wake each loop once for all that it waits for; there is one in all but tests."""
    loops = {loop for _, loop, _ in requests}
    for loop in loops:
        answers = [
            (future, outcome)
            for (_, asked_by, future), outcome in zip(requests, outcomes, strict=True)
            if asked_by is loop
        ]
        try:
            loop.call_soon_threadsafe(_settle, answers)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more


def _settle(answers: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, outcome in answers:
        if future.done():
            continue  # cancelled: whoever asked must read to know
        if isinstance(outcome, Failure):
            future.set_exception(outcome.error)
        else:
            future.set_result(outcome)


Writer = WriterThread | InlineWriter
