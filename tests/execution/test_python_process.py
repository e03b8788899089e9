"""What only a warm child process can promise: exact output, nothing left behind, and a kill that is one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from stellwerk.core.run import Failed, Lost, Outcome, Returned, Succeeded
from stellwerk.execute.boot_clock import boot_ms
from tests.execution.python_rig import FUNCTIONS, PATIENCE_S, Rig, exists, process_rig


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with process_rig(tmp_path) as rig:
        yield rig


def result(outcome: Outcome) -> object:
    assert isinstance(outcome, Succeeded), outcome
    assert outcome.result is not None
    return msgspec.json.decode(outcome.result)


async def test_output_of_every_kind_goes_to_its_own_run(rig: Rig) -> None:
    ways = ["p", "r", "e", "pr", "re", "s", "u", "", "prep", "pu", "", "pres"]
    runs = [rig.attempt("write_in_all_ways", [f"t{number}", ways[number % 12]]) for number in range(600)]
    rig.executor.start(runs)
    await rig.ends_of([run.run_id for run in runs])
    for number, run in enumerate(runs):
        token, way = f"t{number}", ways[number % 12]
        # A print and a raw write keep their order: the text stream is flushed at every line.
        expected = [
            f"{token} {word}" for letter, word in [("p", "printed"), ("r", "raw"), ("s", "shell")] if letter in way
        ]
        expected += [f"{token} unfinished"] if "u" in way else []
        errors = [f"{token} {word}" for letter, word in [("e", "error"), ("s", "shell error")] if letter in way]
        assert rig.output.of(run.run_id).splitlines() == expected
        assert rig.output.errors_of(run.run_id).splitlines() == errors


async def test_more_output_than_a_pipe_holds_arrives_complete(rig: Rig) -> None:
    size = 4 * 1024 * 1024
    run_id = rig.begin("write_much", [size])
    assert await rig.end_of(run_id) == Succeeded()
    assert rig.output.of(run_id) == "0123456789abcdef" * (size // 16)


async def test_a_call_finds_environment_folder_output_and_context_as_the_first_one_did(tmp_path: Path) -> None:
    async with process_rig(tmp_path, children=1) as rig:
        await rig.call("disturb", ["/"], env={"OWN": "1"}, cwd="/usr")
        assert isinstance(await rig.call("disturb", ["/"]), Succeeded)
        assert isinstance(await rig.call("wait_for_boot_ms", [boot_ms() + 100]), Succeeded)  # the alarm is gone
        seen_at_ends = []
        for number in (4, 5):
            run_id = rig.begin("look_around", env={"OWN": "2"}, cwd="/usr", number=number)
            seen = msgspec.convert(result(await rig.end_of(run_id)), dict)
            assert seen["env"] == {
                "LEFT_BEHIND": None,
                "HOME": "/home/base",
                "OWN": "2",
                "STELLWERK_RUN_ID": run_id,
                "STELLWERK_ATTEMPT": str(number),
                "STELLWERK_SCOPE": "tests",
                "STELLWERK_NAME": "call",
            }
            assert (seen["cwd"], seen["context"]) == ("/usr", "untouched")
            assert (seen["tmp_mode"], seen["tmp_files"]) == (0o700, 0)
            assert rig.output.of(run_id) == "looked\n"
            seen_at_ends.append(seen["tmp"])
        plain = msgspec.convert(result(await rig.call("look_around")), dict)
        assert (plain["env"]["OWN"], plain["cwd"]) == (None, str(tmp_path))
    assert not list((tmp_path / "temp").glob("*"))


async def test_private_folders_of_a_host_that_is_gone_are_removed(tmp_path: Path) -> None:
    ended = await asyncio.create_subprocess_exec("/bin/true")
    await ended.wait()
    abandoned, in_use = tmp_path / "temp" / f"python-{ended.pid}-aa", tmp_path / "temp" / f"python-{os.getppid()}-bb"
    for folder in (abandoned, in_use):
        (folder / "1").mkdir(parents=True)
    async with process_rig(tmp_path) as rig:
        assert await rig.call("nothing") == Succeeded()
    assert [folder.exists() for folder in (abandoned, in_use)] == [False, True]


async def test_a_folder_or_environment_that_does_not_work_is_the_calls_failure(rig: Rig) -> None:
    gone = await rig.call("nothing", cwd="/no/such/folder")
    assert isinstance(gone, Failed)
    assert "/no/such/folder" in gone.error
    assert isinstance(await rig.call("nothing", env={"A=B": "x\0y"}), Failed)
    assert await rig.call("nothing") == Succeeded()


async def test_only_allowed_packages_are_called(tmp_path: Path) -> None:
    async with process_rig(tmp_path, allowed_packages=["python_functions"]) as rig:
        assert await rig.call("nothing") == Succeeded()
        refused = await rig.call("os:getpid")
        assert isinstance(refused, Failed)
        assert "'os' is not in the packages allowed here (python_functions)" in refused.error


@pytest.mark.parametrize(
    ("function", "text"), [("end_process", "exited with code 7"), ("kill_own_process", "signal 9")]
)
async def test_a_call_that_ends_its_process_is_lost_alone(rig: Rig, tmp_path: Path, function: str, text: str) -> None:
    await rig.ends_of([rig.begin("nothing") for _ in range(50)])
    notes = tmp_path / "notes"
    others = [rig.attempt("note", [str(notes), f"n{number}"]) for number in range(30)]
    fatal = rig.attempt(function)
    rig.executor.start([*others[:10], fatal, *others[10:]])
    assert await rig.ends_of([run.run_id for run in others]) == [Succeeded()] * 30
    end = await rig.end_of(fatal.run_id)
    assert isinstance(end, Lost)
    assert text in end.error
    assert sorted(notes.read_text().split()) == sorted(f"n{number}" for number in range(30))


async def test_a_child_killed_from_outside_loses_its_call_and_keeps_its_output(rig: Rig) -> None:
    pid = result(await rig.call("pid"))
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)
    while exists(pid):  # a call given to it meanwhile might rightly be lost
        await asyncio.sleep(0.01)
    assert isinstance(result(await rig.call("pid")), int)
    run_id = rig.begin("kill_own_process")
    end = await rig.end_of(run_id)
    assert isinstance(end, Lost)
    wrote = rig.begin("write_and_die", ["last words"])
    assert isinstance(await rig.end_of(wrote), Lost)
    assert rig.output.of(wrote) == "last words"


async def test_what_a_call_left_running_is_gone_when_it_ends(rig: Rig, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    run_id = rig.begin("leave_daemons", [str(pids), False])
    assert await rig.end_of(run_id) == Succeeded()
    left = [int(pid) for pid in pids.read_text().split()]
    assert len(left) == 4
    assert not [pid for pid in left if exists(pid)]
    after = rig.begin("print_only", ["mine-not"])
    await rig.end_of(after)
    assert "mine\n" not in rig.output.of(after)


async def test_stopping_a_call_ends_all_it_started(rig: Rig, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    run_id = rig.begin("leave_daemons", [str(pids), True])
    await rig.until_written(run_id, "waiting")
    rig.executor.stop(run_id, 1, 0)
    end = await rig.end_of(run_id)
    assert isinstance(end, Failed)
    assert end.reason == "stopped"
    left = [int(pid) for pid in pids.read_text().split()]
    assert len(left) == 4
    assert not [pid for pid in left if exists(pid)]
    assert await rig.call("nothing") == Succeeded()


async def test_a_call_over_its_time_ends_with_all_it_started(rig: Rig, tmp_path: Path) -> None:
    left: list[int] = []
    timeout_ms = 300
    while len(left) < 4:  # on a slow machine it may not have started them all in that time
        timeout_ms *= 2
        pids = tmp_path / f"pids-{timeout_ms}"
        end = await rig.call("leave_daemons", [str(pids), True], timeout_ms=timeout_ms)
        assert isinstance(end, Failed)
        assert end.reason == "timeout"
        left = [int(pid) for pid in pids.read_text().split()] if pids.exists() else []
        assert not [pid for pid in left if exists(pid)]
    assert await rig.call("nothing") == Succeeded()


@pytest.mark.parametrize("function", ["wait_and_tidy_up", "wait_and_tidy_up_async"])
async def test_a_stop_with_grace_lets_the_function_tidy_up(rig: Rig, tmp_path: Path, function: str) -> None:
    run_id = rig.begin(function, [str(tmp_path / "tidy")])
    await rig.until_written(run_id, "waiting")
    rig.executor.stop(run_id, 1, 30_000)
    end = await rig.end_of(run_id)
    assert isinstance(end, Failed)
    assert end.reason == "stopped"
    assert (tmp_path / "tidy").read_text() == "tidy"
    assert "tidied up" in rig.output.of(run_id)


async def test_calls_taken_back_while_the_child_reads_on_are_neither_lost_nor_mixed_up(rig: Rig) -> None:
    await rig.ends_of([rig.begin("nothing") for _ in range(50)])
    for _ in range(400):
        runs = [rig.attempt("add", [number, 0]) for number in range(15)]
        rig.executor.start(runs)
        rig.executor.stop(runs[-1].run_id, 1, 0)  # which takes back the queue of its child
        ends = await rig.ends_of([run.run_id for run in runs])
        assert [result(end) for end in ends[:-1]] == list(range(14))


async def test_a_fork_that_comes_back_out_of_the_function_answers_nothing(rig: Rig) -> None:
    calls = [rig.begin("return_twice") for _ in range(20)]
    assert [result(end) for end in await rig.ends_of(calls)] == [1] * 20


async def test_a_function_that_writes_into_our_sockets_loses_only_itself(rig: Rig) -> None:
    assert isinstance(await rig.call("write_into_every_descriptor"), Lost)
    assert await rig.call("nothing") == Succeeded()


async def test_after_a_reload_calls_find_the_new_code(tmp_path: Path) -> None:
    module = tmp_path / "python_edited.py"
    module.write_text("def version(): return 1\n")
    async with process_rig(tmp_path, import_paths=[str(tmp_path), FUNCTIONS]) as rig:
        slow = rig.begin("wait_for", [str(tmp_path / "go")])
        await rig.until_written(slow, "waiting")
        assert result(await rig.call("python_edited:version")) == 1
        module.write_text("def version(): return 'two'\n")
        rig.executor.reload()  # type: ignore[attr-defined]
        assert result(await rig.call("python_edited:version")) == "two"
        (tmp_path / "go").touch()
        assert result(await rig.end_of(slow)) == "came"


async def test_when_the_keeper_is_killed_its_calls_are_lost_and_others_find_new_children(rig: Rig) -> None:
    keeper = result(await rig.call("parent_pid"))
    assert isinstance(keeper, int)
    run_id = rig.begin("wait_for_ever")
    await rig.until_written(run_id, "waiting")
    os.kill(keeper, signal.SIGKILL)
    assert isinstance(await rig.end_of(run_id), Lost)
    assert result(await rig.call("parent_pid")) != keeper


async def test_a_host_frozen_past_a_lease_finds_the_call_killed() -> None:
    host = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.execution.python_host", stdout=asyncio.subprocess.PIPE
    )
    assert host.stdout is not None
    child = int(await host.stdout.readline())
    host.send_signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while exists(child):
                await asyncio.sleep(0.01)
    finally:
        host.send_signal(signal.SIGCONT)
    assert b"Lost" in await host.stdout.readline()
    assert await host.wait() == 0


async def test_a_call_that_leaves_a_thread_gets_its_child_replaced(tmp_path: Path) -> None:
    async with process_rig(tmp_path, children=1) as rig:
        first = result(await rig.call("start_a_thread"))
        others = {result(await rig.call("pid")) for _ in range(10)}
        assert first not in others


async def test_many_long_calls_run_side_by_side_up_to_the_limit(tmp_path: Path) -> None:
    async with process_rig(tmp_path, children=6) as rig:
        calls = [rig.begin("wait_for", [str(tmp_path / "go")]) for _ in range(8)]
        await rig.until_written_by(calls, "waiting", 6)
        assert sum("waiting" in rig.output.of(run_id) for run_id in calls) == 6
        (tmp_path / "go").touch()
        assert [result(end) for end in await rig.ends_of(calls)] == ["came"] * 8


async def test_a_call_whose_lease_is_over_does_not_begin(rig: Rig, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    end = await rig.call("note", [str(notes), "x"], lease_deadline_boot_ms=boot_ms() - 1)
    assert isinstance(end, Returned)
    assert not notes.exists()


async def test_a_call_is_killed_when_its_lease_ends_and_the_next_finds_another_child(rig: Rig) -> None:
    await rig.call("nothing")
    end = await rig.call("wait_for_ever", lease_deadline_boot_ms=boot_ms() + 1_000)
    assert isinstance(end, Lost)
    assert "lease" in end.error
    assert await rig.call("nothing") == Succeeded()


async def test_a_renewed_lease_keeps_the_call_alive(rig: Rig) -> None:
    first_deadline = boot_ms() + 1_000
    run_id = rig.begin("wait_for_boot_ms", [first_deadline + 200], lease_deadline_boot_ms=first_deadline)
    rig.executor.renew(first_deadline + 60_000, [])
    assert result(await rig.end_of(run_id)) == "passed"


async def test_an_idle_child_outlives_the_leases_of_its_calls(tmp_path: Path) -> None:
    async with process_rig(tmp_path, children=1) as rig:
        await rig.call("nothing")
        deadline = boot_ms() + 1_000
        pid = result(await rig.call("pid", lease_deadline_boot_ms=deadline))
        while boot_ms() < deadline + 200:
            await asyncio.sleep(0.01)
        assert isinstance(pid, int)
        assert exists(pid)


async def test_calls_fail_with_a_reason_when_no_child_can_be_started(tmp_path: Path) -> None:
    async with process_rig(tmp_path, default_cwd=str(tmp_path / "missing")) as rig:
        end = await rig.call("nothing")
        assert isinstance(end, Failed)
        assert end.reason == "start"
        assert "No such file" in end.error
