"""What every Python call keeps, in a warm child as in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from stellwerk.core.run import Failed, Outcome, Returned, Succeeded
from tests.execution.python_rig import PATIENCE_S, Rig, process_rig, thread_rig


@pytest.fixture(params=["process", "thread"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    if request.param == "process":
        async with process_rig(tmp_path) as rig:
            yield rig
    else:
        async with thread_rig() as rig:
            yield rig


def result(outcome: Outcome) -> object:
    assert isinstance(outcome, Succeeded), outcome
    assert outcome.result is not None
    return msgspec.json.decode(outcome.result)


def failure(outcome: Outcome) -> Failed:
    assert isinstance(outcome, Failed), outcome
    return outcome


async def test_an_array_gives_positional_arguments_and_an_object_keywords(rig: Rig) -> None:
    assert result(await rig.call("add", [1, 2])) == 3
    assert result(await rig.call("add", {"b": 5, "a": 1})) == 6


async def test_a_function_that_returns_nothing_has_no_result(rig: Rig) -> None:
    assert await rig.call("nothing") == Succeeded(result=None)


async def test_arguments_that_are_neither_array_nor_object_are_refused(rig: Rig) -> None:
    assert "JSON array or object" in failure(await rig.call("add", "text")).error


async def test_wrong_arguments_are_the_calls_failure(rig: Rig) -> None:
    end = failure(await rig.call("add", [1]))
    assert end.error == "TypeError: add() missing 1 required positional argument: 'b'"


async def test_a_parameter_named_run_gets_the_run_wherever_it_stands(rig: Rig) -> None:
    described = result(await rig.call("describe", {"loud": True}, labels={"team": "a"}, number=3, run_id="mine"))
    assert described == {
        "id": "mine",
        "attempt": 3,
        "scope": "tests",
        "name": "call",
        "labels": {"team": "a"},
        "loud": True,
    }
    assert result(await rig.call("run_in_the_middle", [1, 2], run_id="r1")) == [1, "r1", 2]
    assert result(await rig.call("run_in_the_middle", {"a": 1, "b": 2}, run_id="r2")) == [1, "r2", 2]
    assert result(await rig.call("run_last", [1], run_id="r3")) == [1, "r3"]
    assert "given by Stellwerk" in failure(await rig.call("run_last", {"a": 1, "run": 2})).error


async def test_async_functions_are_awaited(rig: Rig) -> None:
    assert result(await rig.call("add_later", [1, 2])) == 3


async def test_a_coroutine_that_leaves_tasks_or_threads_or_exits_spoils_nothing_for_the_next(rig: Rig) -> None:
    assert isinstance(await rig.call("leave_a_task"), Succeeded)
    assert isinstance(await rig.call("run_in_a_thread"), Succeeded)
    assert failure(await rig.call("exit_in_a_coroutine")).error.endswith("SystemExit: 3")
    assert result(await rig.call("add_later", [1, 2])) == 3


async def test_the_error_is_a_traceback_without_our_frames(rig: Rig) -> None:
    end = failure(await rig.call("fail"))
    assert end.reason == "error"
    lines = end.error.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "python_functions.py" in lines[1]
    assert lines[-1] == "ValueError: no such luck"
    assert "stellwerk" not in "".join(line for line in lines if line.startswith("  File")).replace(str(Path.cwd()), "")


@pytest.mark.parametrize(
    ("function", "last"), [("exit_with_code", "SystemExit: 3"), ("interrupt", "KeyboardInterrupt")]
)
async def test_what_would_end_a_process_is_a_failure_only(rig: Rig, function: str, last: str) -> None:
    assert failure(await rig.call(function)).error.endswith(last)
    assert result(await rig.call("add", [1, 2])) == 3


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("python_functions:no_such_function", "has no 'no_such_function'"),
        ("python_functions:CONTEXT", "not a function"),
        (":f", "module:function"),
    ],
)
async def test_a_function_that_cannot_be_found_is_the_calls_failure(rig: Rig, function: str, text: str) -> None:
    end = failure(await rig.call(function))
    assert (end.reason, text in end.error) == ("error", True), end
    assert result(await rig.call("add", [1, 2])) == 3


async def test_a_module_that_fails_to_import_shows_its_own_traceback(rig: Rig) -> None:
    end = failure(await rig.call("python_broken:f"))
    assert "python_broken.py" in end.error
    assert end.error.endswith("RuntimeError: broken on purpose")
    assert "importlib" not in end.error


async def test_a_result_that_is_no_json_names_its_type(rig: Rig) -> None:
    end = failure(await rig.call("return_object"))
    assert (end.reason, "lock" in end.error) == ("result", True), end


async def test_a_result_that_is_too_large_names_its_size(rig: Rig) -> None:
    end = failure(await rig.call("return_much"))
    assert (end.reason, "70002 bytes" in end.error) == ("result", True), end


async def test_arguments_may_be_larger_than_a_frame(rig: Rig) -> None:
    calls = [rig.begin("length", ["x" * 300_000]) for _ in range(20)]
    assert [result(end) for end in await rig.ends_of(calls)] == [300_000] * 20


async def test_prints_of_many_calls_go_to_their_own_run(rig: Rig) -> None:
    runs = [rig.attempt("print_only", [f"token{number}"]) for number in range(300)]
    rig.executor.start(runs)
    await rig.ends_of([run.run_id for run in runs])
    for number, run in enumerate(runs):
        token = f"token{number}"
        assert sorted(rig.output.of(run.run_id).splitlines()) == [
            f"{token} 0",
            f"{token} 1",
            f"{token} 2",
            f"{token} bytes",
        ]
        assert rig.output.errors_of(run.run_id) == f"{token} error\n"


async def test_output_is_heard_while_the_call_runs(rig: Rig, tmp_path: Path) -> None:
    run_id = rig.begin("wait_for", [str(tmp_path / "go")])
    await rig.until_written(run_id, "waiting\n")
    assert run_id not in rig.outcomes
    (tmp_path / "go").touch()
    assert result(await rig.end_of(run_id)) == "came"


async def test_a_flood_waits_while_the_output_has_no_room_and_arrives_complete(rig: Rig) -> None:
    rig.output.is_full = True
    run_id = rig.begin("print_lines", [50_000])
    async with asyncio.timeout(PATIENCE_S):
        while not rig.output.asked.is_set():
            rig.remember(rig.executor.take_ended())
            await asyncio.sleep(0.001)
    assert run_id not in rig.outcomes
    rig.output.is_full = False
    assert await rig.end_of(run_id) == Succeeded()
    assert rig.output.of(run_id).split() == [str(number) for number in range(50_000)]


async def test_two_thousand_calls_end_two_thousand_times(rig: Rig) -> None:
    runs = [rig.attempt("nothing") for _ in range(2_000)]
    rig.executor.start(runs)
    assert await rig.ends_of([run.run_id for run in runs]) == [Succeeded()] * 2_000
    assert rig.output.closed == {run.run_id for run in runs}


async def test_a_slow_call_holds_up_no_other(rig: Rig, tmp_path: Path) -> None:
    await rig.ends_of([rig.begin("nothing") for _ in range(50)])  # now the children are trusted with queues
    slow = rig.attempt("wait_for", [str(tmp_path / "go")])
    others = [rig.attempt("add", [1, number]) for number in range(60)]
    rig.executor.start([*others[:5], slow, *others[5:]])
    ends = await rig.ends_of([run.run_id for run in others])
    assert [result(end) for end in ends] == [1 + number for number in range(60)]
    assert slow.run_id not in rig.outcomes
    (tmp_path / "go").touch()
    assert result(await rig.end_of(slow.run_id)) == "came"


async def test_a_call_over_its_time_fails_and_others_go_on(rig: Rig) -> None:
    run_id = rig.begin("wait_for_ever", timeout_ms=50)
    end = failure(await rig.end_of(run_id))
    assert (end.reason, end.error) == ("timeout", "not done within 50 ms")
    assert result(await rig.call("add", [1, 2])) == 3


@pytest.mark.parametrize("function", ["wait_for_ever", "wait_for_ever_async"])
async def test_a_running_call_can_be_stopped(rig: Rig, function: str) -> None:
    run_id = rig.begin(function)
    await rig.until_written(run_id, "waiting")
    rig.executor.stop(run_id, 1, 0)
    assert failure(await rig.end_of(run_id)).reason == "stopped"
    calls = [rig.begin("add", [1, 2]) for _ in range(8)]
    assert [result(end) for end in await rig.ends_of(calls)] == [3] * 8


async def test_a_call_given_up_by_the_store_is_stopped(rig: Rig) -> None:
    run_id = rig.begin("wait_for_ever")
    await rig.until_written(run_id, "waiting")
    rig.executor.renew(rig.attempt("nothing").lease_deadline_boot_ms, [(run_id, 1)])
    assert failure(await rig.end_of(run_id)).reason == "stopped"


@pytest.mark.parametrize("kind", ["process", "thread"])
async def test_stopping_one_waiting_call_loses_and_doubles_no_other(kind: str, tmp_path: Path) -> None:
    async with process_rig(tmp_path, children=1) if kind == "process" else thread_rig(threads=1) as rig:
        await rig.ends_of([rig.begin("nothing") for _ in range(50)])  # now calls are queued in the child itself
        for turn in range(12):
            notes, go = tmp_path / f"notes-{turn}", tmp_path / f"go-{turn}"
            first = rig.attempt("note_and_wait", [str(notes), "first", str(go)])
            queued = [rig.attempt("note", [str(notes), f"queued{number}"]) for number in range(12)]
            rig.executor.start([first, *queued])
            rig.executor.stop(queued[turn].run_id, 1, 0)
            assert failure(await rig.end_of(queued[turn].run_id)).reason == "stopped"
            go.touch()
            rest = [run.run_id for run in [first, *queued] if run is not queued[turn]]
            assert await rig.ends_of(rest) == [Succeeded()] * 12
            expected = ["first", *(f"queued{number}" for number in range(12) if number != turn)]
            assert notes.read_text().split() == expected


async def test_closing_returns_what_waits_and_what_runs(rig: Rig) -> None:
    running = [rig.begin("wait_for_ever") for _ in range(4)]
    for run_id in running:
        await rig.until_written(run_id, "waiting")
    waiting = [rig.begin("wait_for_ever") for _ in range(6)]
    await rig.executor.close()
    rig.remember(rig.executor.take_ended())
    assert {type(rig.outcomes[run_id]) for run_id in [*running, *waiting]} == {Returned}
    late = rig.begin("nothing")
    assert isinstance(await rig.end_of(late), Returned)
