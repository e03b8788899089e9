"""Waiting for something on behalf of a client who may go away, in a host that may stop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from litestar.types import Receive

from stellwerk.web.problem import ClientGone

Found = TypeVar("Found")


class Stop(Protocol):
    """An event that says that the host is stopping; `asyncio.Event` is one."""

    def is_set(self) -> bool: ...
    async def wait(self) -> Any: ...


async def while_there(receive: Receive, stop: Stop, work: Coroutine[Any, Any, Found]) -> Found | None:
    """What the work finds; None if the host stops first. Raises `ClientGone` when the client leaves."""
    working = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(_gone(receive)), asyncio.ensure_future(stop.wait())]
    try:
        await asyncio.wait([working, *others], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if others[0].done():
            raise ClientGone
        return None
    finally:
        for future in (working, *others):
            future.cancel()
        await asyncio.gather(working, *others, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    """Ends when the client has closed its connection."""
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            return
