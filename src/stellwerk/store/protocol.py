"""The contract of a store, method by method. `memory.py` is the same contract as the plainest code.

All times are given by the caller, so that a test can own them. Order, limits and refusals are part of the contract and
are pinned by tests/conformance/store. Plural arguments only. Expected results are values; a store that cannot answer
now (full disk, lost connection, foreign epoch) raises `Unavailable`, and then nothing of the call was done, or the
caller must read to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stellwerk.core.batch import Applied, Batch, Claim
from stellwerk.core.facts import Facts, Loaded
from stellwerk.core.logs import Appended, Fenced, LogChunk, LogPage, LogQuery
from stellwerk.core.queries import Counts, Due, JournalSlice, LeaseRef, Retention, RunPage, RunQuery

SCHEMA_VERSION = 1


class Store(Protocol):
    """Truth. One call of `apply` is one transaction and one flush, whatever the number of batches and claims."""

    # -- lifetime -----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Ready to answer. Raises `Refused` for a store that must not be used: newer schema, in use, network disk."""

    async def close(self) -> None: ...

    def durability(self) -> str:
        """The class D0 … D3 that probing found, as in "D3"."""

    def exclusive(self) -> bool:
        """Whether nobody but this process can write: then all leases of earlier starts are over at `open`."""

    def foreign(self) -> str | None:
        """Why the store is not the one that this host knows (another epoch, an older copy); None if it is.

        While it is foreign, `apply` refuses batches and claims with `Unavailable`.
        """

    def low(self) -> str | None:
        """Why new runs are refused although the store answers (its disk is nearly full); None if they are not."""

    async def adopt(self, now_ms: int, actor: str) -> None:
        """An operator says that the foreign store is right. Writes StoreAdopted; followers from before are torn."""

    async def epoch(self) -> str:
        """The random name that the store got at its creation."""

    # -- change -------------------------------------------------------------------------------------------------------

    async def apply(self, batches: Sequence[Batch], claims: Sequence[Claim], now_ms: int) -> Applied:
        """Apply each batch whole or not at all, then serve the claims, which see them.

        A batch applies when every row in it, and every row it relied on, still has the version it was decided on; a
        later batch may build on what an earlier one of the call wrote. Events get consecutive EventIds in order.
        `added` of a new run or record is the id of its RunAdded event (of the batch's last event, for a record);
        `changed` of every run written is the last EventId of the call.

        A claim moves up to `limit` ready, unparked runs of its queue to running, best first: priority, higher first,
        then created, oldest first, then id. Each candidate is decided by `gates.verdict`; held ones are parked under
        the key of the gate that holds them, at most 1,000 a claim. A run that was running or claimable and is neither
        any more gives way: of each limit that it was under and that has room, the best run parked there becomes
        claimable again (not of the key it is itself parked under).
        """

    async def extend(self, leases: Sequence[LeaseRef], until_ms: int, now_ms: int) -> list[str]:
        """Prolong leases that are not over; answer the runs to give up or to stop: lost, or asked to stop.

        Raises no version. A lease already over at `now_ms` is lost, even if nobody has taken it yet.
        """

    # -- look ---------------------------------------------------------------------------------------------------------

    async def load(self, facts: Facts) -> Loaded:
        """All that a decision needs, in one transaction and with one stamp."""

    async def find_runs(self, query: RunQuery) -> RunPage: ...

    async def count(self) -> Counts: ...

    async def due(self, now_ms: int, limit: int) -> Due:
        """Rows whose alarm is at or before `now_ms` (at most `limit` runs, records and gates each)."""

    # -- journal ------------------------------------------------------------------------------------------------------

    async def read_journal(self, after: int, limit: int, run: str | None = None) -> JournalSlice:
        """Events after an EventId, at most `limit`; with `run`, those of one run only.

        One call examines a bounded stretch: with a filter it may answer fewer events and an `examined` below `last`.
        """

    async def trim_journal(self, keep: Retention, now_ms: int) -> int:
        """Forget what need not be kept, in a bounded stretch; answer how many events. The last event always stays."""

    # -- logs: bulky, not journaled -----------------------------------------------------------------------------------

    async def append_logs(self, chunks: Sequence[LogChunk]) -> list[Appended | Fenced]:
        """Number the lines of each run, take each (attempt, sequence) once, refuse an attempt that is not running."""

    async def read_logs(self, query: LogQuery) -> LogPage: ...
