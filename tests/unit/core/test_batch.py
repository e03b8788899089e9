"""Batches: which of a call stand, by a table and against a model that simply does what the words say."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stellwerk.core.batch import (
    AddRun,
    AlreadyLive,
    Batch,
    ChangeRun,
    Conflict,
    DropGate,
    DropRecord,
    DropRun,
    PutGate,
    PutRecord,
    Record,
    RowKey,
    RowVersion,
    changed,
    check_batches,
    rows_compared,
)
from stellwerk.core.gates import Gate
from stellwerk.core.run import Command, Run, Spec, State

NOW = 1_800_000_000_000
SPEC = Spec("shop", "import", Command(("true",)), NOW)
Verdict = Conflict | AlreadyLive | None


def a_run(run_id: str, version: int = 1, live_key: str | None = None) -> Run:
    return Run(run_id, version, State.READY, 100, SPEC, live_key=live_key)


def adds(*runs: tuple[str, str | None]) -> Batch:
    return Batch(adds=tuple(AddRun(a_run(run_id, live_key=live_key)) for run_id, live_key in runs))


def change(run_id: str, version: int, live_key: str | None = None, lease_ms: int | None = None) -> Batch:
    """A change decided on `version`."""
    return Batch(changes=(changed(a_run(run_id, version, live_key), lease_ms=lease_ms),))


def drop(run_id: str, version: int) -> Batch:
    return Batch(drops=(DropRun(run_id, version),))


def put(key: str, version: int) -> Batch:
    """A record put over `version` (0: a new one)."""
    return Batch(records=(PutRecord(Record("schedule", key, version + 1, b"")),))


def forget(key: str, version: int) -> Batch:
    return Batch(records=(DropRecord("schedule", key, version),))


def shut(key: str, version: int) -> Batch:
    return Batch(gates=(PutGate(Gate(key, "pause", version + 1)),))


def unshut(key: str, version: int) -> Batch:
    return Batch(gates=(DropGate(key, "pause", version),))


def rely(*rows: tuple[RowKey, int]) -> Batch:
    return Batch(relied=tuple(RowVersion(row, version) for row, version in rows))


# The store before each call of the table.
VERSIONS: dict[RowKey, int] = {
    ("run", "a"): 3,
    ("run", "b"): 1,
    ("record", "schedule", "daily"): 2,
    ("gate", "*", "pause"): 5,
}
HOLDERS = {"busy": "b"}
LEASES = {"a": NOW}
RUN_A, DAILY, PAUSE = ("run", "a"), ("record", "schedule", "daily"), ("gate", "*", "pause")


def checked(batches: Iterable[Batch]) -> list[Verdict]:
    return check_batches(list(batches), lambda row: VERSIONS.get(row, 0), HOLDERS.get, LEASES.get)


@pytest.mark.parametrize(
    ("batches", "verdicts"),
    [
        ([], []),
        ([Batch()], [None]),
        # runs
        ([adds(("n", None))], [None]),
        ([adds(("a", None))], [Conflict(RUN_A)]),
        ([adds(("n", None)), adds(("n", None))], [None, Conflict(("run", "n"))]),
        ([change("a", 3)], [None]),
        ([change("a", 2)], [Conflict(RUN_A)]),
        ([change("a", 4)], [Conflict(RUN_A)]),
        ([change("n", 1)], [Conflict(("run", "n"))]),
        ([change("a", 3), change("a", 3)], [None, Conflict(RUN_A)]),
        ([change("a", 3), change("a", 4), change("a", 5)], [None, None, None]),
        # The second may have been decided on what the first would have written.
        ([change("a", 2), change("a", 3)], [Conflict(RUN_A), Conflict(RUN_A)]),
        ([adds(("n", None)), change("n", 1)], [None, None]),
        ([drop("a", 3)], [None]),
        ([drop("a", 2)], [Conflict(RUN_A)]),
        ([drop("a", 3), drop("a", 3)], [None, Conflict(RUN_A)]),
        ([drop("a", 3), change("a", 4)], [None, Conflict(RUN_A)]),
        ([drop("a", 3), adds(("a", None))], [None, None]),
        # records
        ([put("weekly", 0)], [None]),
        ([put("daily", 0)], [Conflict(DAILY)]),
        ([put("daily", 2), put("daily", 3)], [None, None]),
        ([put("daily", 2), put("daily", 2)], [None, Conflict(DAILY)]),
        ([forget("daily", 2), put("daily", 3)], [None, Conflict(DAILY)]),
        ([forget("daily", 2), put("daily", 0)], [None, None]),
        ([forget("daily", 1)], [Conflict(DAILY)]),
        # gates
        ([shut("scope:shop", 0)], [None]),
        ([shut("*", 0)], [Conflict(PAUSE)]),
        ([shut("*", 5), shut("*", 6)], [None, None]),
        ([unshut("*", 5), shut("*", 0)], [None, None]),
        ([unshut("*", 5), unshut("*", 5)], [None, Conflict(PAUSE)]),
        # rows that were only read
        ([rely((RUN_A, 3), (DAILY, 2), (PAUSE, 5), (("run", "n"), 0))], [None]),
        ([rely((RUN_A, 2))], [Conflict(RUN_A)]),
        ([rely((RUN_A, 0))], [Conflict(RUN_A)]),
        ([rely((("run", "n"), 1))], [Conflict(("run", "n"))]),
        ([rely((RUN_A, 3)), rely((RUN_A, 3)), change("a", 3)], [None, None, None]),
        ([change("a", 3), rely((RUN_A, 3))], [None, Conflict(RUN_A)]),
        ([change("a", 3), rely((RUN_A, 4))], [None, None]),
        ([adds(("n", None)), rely((("run", "n"), 0))], [None, Conflict(("run", "n"))]),
        # live keys
        ([adds(("n", "busy"))], [AlreadyLive("busy", "b")]),
        ([adds(("n", "free"))], [None]),
        ([adds(("n", "free")), adds(("m", "free"))], [None, AlreadyLive("free", "n")]),
        ([adds(("n", "free"), ("m", "free"))], [AlreadyLive("free", "n")]),
        ([adds(("n", "free"), ("m", "busy")), adds(("o", "free"))], [AlreadyLive("busy", "b"), None]),
        ([adds(("n", "free")), change("n", 1, "free"), adds(("m", "free"))], [None, None, AlreadyLive("free", "n")]),
        ([adds(("n", "free")), change("n", 1), adds(("m", "free"))], [None, None, None]),
        ([change("b", 1, "busy"), adds(("n", "busy"))], [None, AlreadyLive("busy", "b")]),
        ([adds(("a", "busy"))], [Conflict(RUN_A)]),  # read again first, the answer may be another
        # leases
        ([change("a", 3, lease_ms=NOW)], [None]),
        ([change("a", 3, lease_ms=NOW - 1)], [Conflict(RUN_A)]),
        ([change("a", 3, lease_ms=NOW + 1)], [Conflict(RUN_A)]),
        ([change("b", 1, lease_ms=NOW)], [Conflict(("run", "b"))]),
        ([change("a", 3, lease_ms=NOW - 1), change("a", 3)], [Conflict(RUN_A), None]),
    ],
)
def test_a_batch_stands_exactly_if_all_it_relied_on_is_unchanged(batches: list[Batch], verdicts: list[Verdict]) -> None:
    assert checked(batches) == verdicts


def test_one_wrong_row_makes_the_whole_batch_fall_and_leave_nothing_behind() -> None:
    whole = Batch(adds=adds(("n", "free")).adds, changes=change("a", 3).changes, records=put("daily", 1).records)
    assert checked([whole, adds(("n", "free")), change("a", 3)]) == [Conflict(DAILY), None, None]


def test_a_change_is_decided_on_the_version_it_carries_and_writes_the_next() -> None:
    run = a_run("a", 3)
    written = changed(run, lease_ms=NOW)
    assert written == ChangeRun(run.with_(version=4), (), NOW)
    assert list(rows_compared(Batch(changes=(written,)))) == [(RUN_A, 3)]


def test_every_row_of_a_batch_is_compared() -> None:
    parts = [
        *(adds(("n", None)), change("a", 3), drop("b", 1), put("new", 0), forget("daily", 2)),
        *(shut("scope:shop", 0), unshut("*", 5), rely((("run", "r"), 9))),
    ]
    batch = Batch(
        **{
            name: tuple(item for part in parts for item in getattr(part, name))
            for name in ("adds", "changes", "drops", "records", "gates", "relied")
        }
    )
    assert list(rows_compared(batch)) == [
        (("run", "n"), 0),
        (RUN_A, 3),
        (("run", "b"), 1),
        (("record", "schedule", "new"), 0),
        (DAILY, 2),
        (("gate", "scope:shop", "pause"), 0),
        (PAUSE, 5),
        (("run", "r"), 9),
    ]


# -- against a model --------------------------------------------------------------------------------------------------


class Model:
    """A store that keeps nothing but what the check is about, and applies a batch row by row to a copy."""

    def __init__(self, versions: dict[RowKey, int], live_keys: dict[str, str], leases: dict[str, int]) -> None:
        self.versions, self.live_keys, self.leases = versions, live_keys, leases  # live key by run
        self.refused: set[tuple[RowKey, int]] = set()  # versions that a refused batch would have written

    def copy(self) -> "Model":
        return Model(dict(self.versions), dict(self.live_keys), dict(self.leases))

    def holder_of(self, live_key: str) -> str | None:
        return next((run_id for run_id, held in self.live_keys.items() if held == live_key), None)

    def refuse(self, batch: Batch) -> None:
        """What a batch behind it may have been decided on is not what is there, even if the number is the same."""
        self.refused |= {(("run", item.run.id), item.run.version) for item in batch.changes}
        puts = [item.record for item in batch.records if isinstance(item, PutRecord)]
        self.refused |= {(("record", record.kind, record.key), record.version) for record in puts}

    def apply(self, batch: Batch) -> tuple[str, object]:
        wrong = {row for row, version in rows_compared(batch) if self.versions.get(row, 0) != version}
        for item in batch.changes:
            if item.lease_ms is not None and self.leases.get(item.run.id) != item.lease_ms:
                wrong.add(("run", item.run.id))
        wrong |= {row for row, version in rows_compared(batch) if (row, version) in self.refused}
        if wrong:
            self.refuse(batch)
            return "conflict", wrong
        after = self.copy()
        for item in batch.changes:
            after.versions["run", item.run.id] = item.run.version
            if item.run.live_key is None:
                after.live_keys.pop(item.run.id, None)
        for gone in batch.drops:
            after.versions["run", gone.run_id] = 0
        for record in batch.records:
            if isinstance(record, PutRecord):
                after.versions["record", record.record.kind, record.record.key] = record.record.version
            else:
                after.versions["record", record.kind, record.key] = 0
        for new in batch.adds:
            live_key = new.run.live_key
            if live_key is not None:
                holder = after.holder_of(live_key)
                if holder is not None:
                    self.refuse(batch)
                    return "live", AlreadyLive(live_key, holder)
                after.live_keys[new.run.id] = live_key
            after.versions["run", new.run.id] = 1
        self.versions, self.live_keys = after.versions, after.live_keys
        return "stands", None


# Runs o… are in the store before the call; their live keys stay theirs. Runs n… may be added by it, and then end.
OLD_RUNS, NEW_RUNS, RECORDS = ["o1", "o2", "o3"], ["n1", "n2", "n3"], ["r1", "r2"]
any_live_key = st.none() | st.sampled_from(["k1", "k2", "k3"])
any_version = st.integers(0, 3)


@st.composite
def any_batch(draw: st.DrawFn, live_keys: dict[str, str], leased: str) -> Batch:
    """Each row stands at most once in a batch. The run `leased` is changed under its lease, if at all."""
    new, old_changes, drops, relied = [], [], [], []
    records: list[PutRecord | DropRecord] = []
    for run_id in draw(st.lists(st.sampled_from(NEW_RUNS + OLD_RUNS + RECORDS), max_size=3, unique=True)):
        version = draw(any_version)
        what = draw(st.sampled_from(["add", "change", "drop", "rely"]))
        if run_id in RECORDS:
            if what == "rely":
                relied.append(RowVersion(("record", "kind", run_id), version))
            elif what == "drop" and version > 0:
                records.append(DropRecord("kind", run_id, version))
            else:
                records.append(PutRecord(Record("kind", run_id, version + 1, b"")))
        elif run_id == leased:
            old_changes.append(changed(a_run(run_id, 1, live_keys.get(run_id)), lease_ms=draw(st.integers(0, 1))))
        elif what == "add":
            new.append(AddRun(a_run(run_id, live_key=draw(any_live_key))))
        elif what == "change":
            live_key = live_keys.get(run_id) if run_id in OLD_RUNS else None
            old_changes.append(changed(a_run(run_id, version, live_key)))
        elif what == "drop" and run_id not in live_keys and version > 0:
            drops.append(DropRun(run_id, version))
        else:
            relied.append(RowVersion(("run", run_id), version))
    return Batch(
        adds=tuple(new), changes=tuple(old_changes), drops=tuple(drops), records=tuple(records), relied=tuple(relied)
    )


@given(st.data())
def test_the_check_agrees_with_a_store_that_applies_batch_after_batch(data: st.DataObject) -> None:
    live_keys = data.draw(st.dictionaries(st.sampled_from(OLD_RUNS), st.just("k1"), max_size=1))
    versions: dict[RowKey, int] = {("run", run_id): data.draw(st.integers(1, 2)) for run_id in OLD_RUNS}
    versions["record", "kind", "r1"] = 1
    model = Model(versions, live_keys, {"o3": 1})
    before = model.copy()
    batches = data.draw(st.lists(any_batch(live_keys, "o3"), max_size=6))
    verdicts = check_batches(batches, lambda row: before.versions.get(row, 0), before.holder_of, before.leases.get)
    assert len(verdicts) == len(batches)
    for batch, verdict in zip(batches, verdicts, strict=True):
        answer, evidence = model.apply(batch)
        if isinstance(verdict, Conflict):
            assert answer == "conflict" and isinstance(evidence, set) and verdict.row in evidence
        elif isinstance(verdict, AlreadyLive):
            assert (answer, evidence) == ("live", verdict)
        else:
            assert answer == "stands"
