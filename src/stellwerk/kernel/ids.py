"""Rising whole numbers as ids, for doors whose clients expect them: one sequence for all, in order of commit.

A number is drawn in the same breath as its batch joins the committer's line, so on one host the order of numbers is the
order of commits. Blocks are reserved in the store ahead of use: a crash leaves a gap, never a number given twice.
"""

from __future__ import annotations

import asyncio

import msgspec

from stellwerk.core.batch import Batch, Committed, PutRecord, Record
from stellwerk.core.errors import Unavailable
from stellwerk.core.facts import Facts
from stellwerk.kernel.committer import Committer
from stellwerk.store.protocol import Store

SEQUENCE = "sequence"
BLOCK = 10_000


class Numbers:
    """`reserve` may wait for the store; `draw` never does."""

    def __init__(self, store: Store, committer: Committer) -> None:
        self._store = store
        self._committer = committer
        self._next = 1
        self._end = 1  # the first number that is not ours
        self._reserving = asyncio.Lock()

    async def reserve(self, count: int) -> None:
        """See that `count` numbers can be drawn."""
        while self._end - self._next < count:
            async with self._reserving:
                if self._end - self._next < count:
                    await self._reserve(max(BLOCK, count))

    def draw(self) -> str:
        """The next number."""
        if self._next >= self._end:
            raise Unavailable("no numbers are reserved; try again")
        number = self._next
        self._next += 1
        return str(number)

    async def _reserve(self, count: int) -> None:
        loaded = await self._store.load(Facts(records=((SEQUENCE, "runs"),)))
        record = loaded.records.get((SEQUENCE, "runs"))
        first = 1 if record is None else msgspec.json.decode(record.body, type=int)
        version = 0 if record is None else record.version
        put = Record(SEQUENCE, "runs", version + 1, msgspec.json.encode(first + count))
        (receipt,) = await self._committer.commit([Batch(records=(PutRecord(put),))])
        if not isinstance(receipt, Committed):
            return  # another host was faster; the caller looks again
        if first != self._end:
            self._next = first  # others have drawn between: what was left of our block is behind them now
        self._end = first + count
