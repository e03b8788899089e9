"""One run, from submit to its end: every kind of action, every way to end, and what is left of it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from stellwerk.core.errors import Clash, NotFound, Refused
from stellwerk.core.events import RunPostponed, RunStarted
from stellwerk.core.facts import Facts
from stellwerk.core.gates import Gate
from stellwerk.core.logs import LogQuery
from stellwerk.core.retry import RetryPolicy
from stellwerk.core.run import Body, Check, Nothing, Run, Signal, State
from stellwerk.kernel.submit import NewRun
from tests.kernel.rig import ACTOR, Latch, Rig, a_call, a_command, a_run, a_script, within

WEEK_MS = 7 * 24 * 3_600_000


# -- actions ----------------------------------------------------------------------------------------------------------


async def test_a_command_runs_and_its_output_is_kept(rig: Rig) -> None:
    run = await rig.run(a_command("/bin/echo", "hello  world", "$HOME"))
    assert (run.state, run.exit_code, run.attempt, run.tries) == (State.SUCCEEDED, 0, 1, 1)
    assert await rig.output(run.id) == ["hello  world $HOME"]
    assert await rig.story(run.id) == ["RunAdded", "RunReadied", "RunStarted", "RunSucceeded"]


async def test_an_exit_code_makes_a_run_fail_with_its_reason(rig: Rig) -> None:
    run = await rig.run(a_script("echo out; echo err >&2; exit 3"))
    assert (run.state, run.reason, run.exit_code, run.tries) == (State.FAILED, "exit", 3, 1)
    assert sorted(await rig.output(run.id)) == ["err", "out"]


async def test_a_signal_makes_a_run_fail_with_its_reason(rig: Rig) -> None:
    run = await rig.run(a_script("kill -TERM $$"))
    assert (run.state, run.reason) == (State.FAILED, "signal")


async def test_a_program_that_is_not_there_makes_the_run_fail(rig: Rig) -> None:
    run = await rig.run(a_command("/no/such/program"))
    assert run.state is State.FAILED
    assert run.error is not None
    assert "/no/such/program" in run.error


async def test_a_shell_script_is_for_bash(rig: Rig) -> None:
    run = await rig.run(a_script('words=(a b c); echo "${#words[@]}"'))
    assert await rig.output(run.id) == ["3"]


@pytest.mark.parametrize("isolation", ["process", "thread"])
@pytest.mark.parametrize("function", ["add", "add_later"])
async def test_a_function_is_called_and_its_result_kept(rig: Rig, isolation: str, function: str) -> None:
    run = await rig.run(a_call(function, [2, 40], isolation=isolation))
    assert run.state is State.SUCCEEDED, run
    assert await rig.result(run.id) == 42
    by_name = await rig.run(a_call(function, {"a": 1, "b": 2}, isolation=isolation))
    assert await rig.result(by_name.id) == 3


@pytest.mark.parametrize("isolation", ["process", "thread"])
async def test_a_parameter_named_run_gets_the_run(rig: Rig, isolation: str) -> None:
    run = await rig.run(
        a_call("describe", {"loud": True}, isolation=isolation, scope="a/b", name="c", labels={"team": "blue"})
    )
    assert await rig.result(run.id) == {
        "id": run.id,
        "attempt": 1,
        "scope": "a/b",
        "name": "c",
        "labels": {"team": "blue"},
        "loud": True,
    }


@pytest.mark.parametrize("isolation", ["process", "thread"])
async def test_an_exception_makes_a_run_fail_and_says_what_it_was(rig: Rig, isolation: str) -> None:
    run = await rig.run(a_call("fail", isolation=isolation))
    assert (run.state, run.exit_code) == (State.FAILED, None)
    assert run.error is not None
    assert "no such luck" in run.error


@pytest.mark.parametrize("isolation", ["process", "thread"])
async def test_a_result_may_have_64_kib_and_not_a_byte_more(rig: Rig, isolation: str) -> None:
    most = 64 * 1024 - 2  # the quotes of JSON
    fits = await rig.run(a_call("letters", [most], isolation=isolation))
    assert fits.state is State.SUCCEEDED
    assert await rig.result(fits.id) == "x" * most
    larger = await rig.run(a_call("letters", [most + 1], isolation=isolation))
    assert (larger.state, larger.result) == (State.FAILED, None)
    assert larger.reason == "result"


async def test_a_function_that_is_not_there_makes_the_run_fail(rig: Rig) -> None:
    run = await rig.run(a_call("no_such_function"))
    assert run.state is State.FAILED
    assert run.error is not None
    assert "no_such_function" in run.error


# -- surroundings -----------------------------------------------------------------------------------------------------


async def test_a_command_reads_the_stdin_it_was_given_and_else_nothing(rig: Rig) -> None:
    given = await rig.run(a_command("/bin/cat", bodies=(Body("stdin", b"one\ntwo\n"),)))
    assert await rig.output(given.id) == ["one", "two"]
    none = await rig.run(a_command("/bin/cat"))
    assert (none.state, await rig.output(none.id)) == (State.SUCCEEDED, [])


async def test_a_command_sees_its_own_variables_and_those_of_the_run_and_no_secret(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STELLWERK_TOKEN", "swk_secret")
    run = await rig.run(a_command("/usr/bin/env", env={"COLOUR": "red"}, scope="a/b", name="c"))
    found = dict(line.split("=", 1) for line in await rig.output(run.id) if "=" in line)
    assert found["COLOUR"] == "red"
    assert found["STELLWERK_RUN_ID"] == run.id
    assert (found["STELLWERK_ATTEMPT"], found["STELLWERK_SCOPE"], found["STELLWERK_NAME"]) == ("1", "a/b", "c")
    assert "STELLWERK_TOKEN" not in found
    assert "PYTEST_CURRENT_TEST" not in found


async def test_a_run_cannot_forge_the_variables_that_say_which_run_it_is(rig: Rig) -> None:
    run = await rig.run(a_script("echo $STELLWERK_ATTEMPT", env={"STELLWERK_ATTEMPT": "99"}))
    assert await rig.output(run.id) == ["1"]


async def test_the_attempt_in_the_environment_is_the_fencing_token(rig: Rig) -> None:
    run = await rig.run(a_script("echo $STELLWERK_ATTEMPT; exit 1", retry=RetryPolicy(2)))
    assert run.attempt == 3
    assert await rig.output(run.id) == ["1", "2", "3"]


async def test_the_working_folder_is_that_of_the_config_file_unless_cwd_says_otherwise(
    rig: Rig, tmp_path: Path
) -> None:
    by_default = await rig.run(a_command("/bin/pwd"))
    given = await rig.run(a_command("/bin/pwd", cwd=str(tmp_path)))
    function = await rig.run(a_call("where"))
    assert await rig.output(by_default.id) == [str(rig.folder)]
    assert await rig.output(given.id) == [str(tmp_path)]
    assert await rig.result(function.id) == str(rig.folder)


async def test_labels_are_kept_with_the_run(rig: Rig) -> None:
    run = await rig.run(a_run(labels={"team": "blue", "größe": "XL"}))
    assert dict(run.spec.labels) == {"team": "blue", "größe": "XL"}


# -- timeouts and retries ---------------------------------------------------------------------------------------------


async def test_a_command_that_takes_too_long_fails_with_the_reason_timeout(rig: Rig) -> None:
    run = await rig.run(a_command("/bin/sleep", "1000", timeout_ms=200))
    assert (run.state, run.reason, run.tries) == (State.FAILED, "timeout", 1)


async def test_a_function_that_takes_too_long_fails_with_the_reason_timeout(rig: Rig) -> None:
    run = await rig.run(a_call("wait_for", ["/never/there"], timeout_ms=200))
    assert (run.state, run.reason) == (State.FAILED, "timeout")


async def test_a_timeout_is_retried_if_a_policy_is_written(rig: Rig) -> None:
    run = await rig.run(a_command("/bin/sleep", "1000", timeout_ms=100, retry=RetryPolicy(1)))
    assert (run.state, run.reason, run.attempt, run.tries) == (State.FAILED, "timeout", 2, 2)


async def test_a_failure_without_a_policy_is_not_retried(rig: Rig) -> None:
    run = await rig.run(a_script("exit 1"))
    assert (run.attempt, run.tries, run.crashes) == (1, 1, 0)


async def test_a_failure_is_retried_after_a_delay_that_grows(rig: Rig) -> None:
    run = await rig.run(a_script("exit 1", retry=RetryPolicy(3, delay_ms=20, backoff=3.0)))
    assert (run.state, run.attempt, run.tries) == (State.FAILED, 4, 4)
    postponed = [event for event in await rig.journal(run.id) if isinstance(event, RunPostponed)]
    assert [event.due_ms - event.at_ms for event in postponed] == [20, 60, 180]
    started = [event.at_ms for event in await rig.journal(run.id) if isinstance(event, RunStarted)]
    assert all(start >= event.due_ms for start, event in zip(started[1:], postponed, strict=True))


async def test_a_run_that_waits_for_its_next_try_says_so(rig: Rig) -> None:
    (run_id,) = await rig.submit(a_script("exit 7", retry=RetryPolicy(1, delay_ms=WEEK_MS)))
    run = await rig.until(run_id, lambda run: run.tries == 1, "postponed")
    (reason,) = await rig.why(run_id)
    assert (run.state, reason.type, reason.until_ms) == (State.WAITING, "RetryDelay", run.due_ms)
    assert reason.evidence["attempt"] == 1
    assert (run.reason, run.exit_code) == ("exit", 7)


async def test_a_retry_that_succeeds_leaves_no_error_behind(rig: Rig, tmp_path: Path) -> None:
    run = await rig.run(a_script(f"mkdir {tmp_path}/once && exit 1; echo fine", retry=RetryPolicy(5)))
    assert (run.state, run.attempt, run.tries, run.reason, run.error, run.exit_code) == (
        State.SUCCEEDED,
        2,
        2,
        None,
        None,
        0,
    )


async def test_a_run_that_waits_for_its_next_try_can_be_hurried_by_an_edit(rig: Rig) -> None:
    (run_id,) = await rig.submit(a_script("exit 7", retry=RetryPolicy(1, delay_ms=WEEK_MS)))
    await rig.until(run_id, lambda run: run.tries == 1, "postponed")
    await rig.kernel.edit(run_id, ACTOR, None, rig.parts.env.now_ms())
    assert (await rig.end_of(run_id)).attempt == 2


# -- order and time ---------------------------------------------------------------------------------------------------


async def test_with_one_slot_runs_start_by_priority_then_by_age(one_slot: Rig, latch: Latch) -> None:
    rig = one_slot
    (first,) = await rig.submit(latch.command())
    await rig.running(first)
    wanted: list[tuple[int, str]] = []
    for priority in (100, 1, 1000, 100, 500, 1000):
        (run_id,) = await rig.submit(a_run(priority=priority))
        wanted.append((-priority, run_id))
    latch.open()
    await rig.ends_of([run_id for _, run_id in wanted])
    order = [run_id for _, run_id in sorted(wanted, key=lambda pair: pair[0])]
    assert await rig.starts() == [first, *order]


async def test_runs_of_one_request_start_in_the_order_of_the_request(one_slot: Rig, latch: Latch) -> None:
    (first,) = await one_slot.submit(latch.command())
    await one_slot.running(first)
    ids = await one_slot.submit(*[a_run() for _ in range(30)])
    latch.open()
    await one_slot.ends_of(ids)
    assert await one_slot.starts() == [first, *ids]


async def test_never_more_runs_than_slots_are_running_at_once(rig: Rig) -> None:
    ids = await rig.submit(*[a_command("/bin/sleep", "0.02") for _ in range(40)])
    await rig.ends_of(ids)
    # Runs may be claimed a little ahead, so what counts is what executes: each command notes begin and end.
    log = rig.folder / "log"
    script = f"echo + >> {log}; sleep 0.01; echo - >> {log}"
    await rig.ends_of(await rig.submit(*[a_script(script) for _ in range(40)]))
    level = most = 0
    for line in log.read_text().split():
        level += 1 if line == "+" else -1
        most = max(most, level)
    assert 1 <= most <= 4


async def test_a_run_does_not_start_before_its_due_time(rig: Rig) -> None:
    due_ms = rig.parts.env.now_ms() + 300
    (run_id,) = await rig.submit(a_run(due_ms=due_ms))
    before = await rig.row(run_id)
    assert (before.state, before.alarm_ms) == (State.WAITING, due_ms)
    run = await rig.end_of(run_id)
    assert run.started_ms is not None
    assert run.started_ms >= due_ms


async def test_a_due_time_that_has_passed_is_no_due_time(rig: Rig) -> None:
    run = await rig.run(a_run(due_ms=1))
    assert run.state is State.SUCCEEDED


async def test_a_waiting_run_can_be_made_due_earlier_and_later(rig: Rig) -> None:
    now_ms = rig.parts.env.now_ms()
    early, late = await rig.submit(a_run(due_ms=now_ms + WEEK_MS), a_run(due_ms=now_ms + 3_000_000))
    await rig.kernel.edit(late, ACTOR, None, now_ms + WEEK_MS)
    await rig.kernel.edit(early, ACTOR, None, now_ms)
    assert (await rig.end_of(early)).state is State.SUCCEEDED
    row = await rig.row(late)
    assert (row.state, row.due_ms, row.alarm_ms) == (State.WAITING, now_ms + WEEK_MS, now_ms + WEEK_MS)


async def test_a_ready_run_can_be_put_off(one_slot: Rig, latch: Latch) -> None:
    rig = one_slot
    (first,) = await rig.submit(latch.command())
    await rig.running(first)
    (run_id,) = await rig.submit(a_run())
    await rig.kernel.edit(run_id, ACTOR, None, rig.parts.env.now_ms() + WEEK_MS)
    latch.open()
    await rig.end_of(first)
    assert (await rig.row(run_id)).state is State.WAITING
    assert await rig.reasons(run_id) == ["NotDue"]


async def test_a_higher_priority_given_while_waiting_counts_at_the_next_claim(one_slot: Rig, latch: Latch) -> None:
    rig = one_slot
    (first,) = await rig.submit(latch.command())
    await rig.running(first)
    a, b = await rig.submit(a_run(), a_run())
    await rig.kernel.edit(b, ACTOR, 900, None)
    latch.open()
    await rig.ends_of([a, b])
    assert await rig.starts() == [first, b, a]


async def test_a_run_that_runs_or_has_ended_cannot_be_edited(rig: Rig, latch: Latch) -> None:
    (run_id,) = await rig.submit(latch.command())
    await rig.running(run_id)
    with pytest.raises(Clash):
        await rig.kernel.edit(run_id, ACTOR, 5, None)
    latch.open()
    await rig.end_of(run_id)
    with pytest.raises(Clash):
        await rig.kernel.edit(run_id, ACTOR, 5, None)


# -- cancel -----------------------------------------------------------------------------------------------------------


async def test_a_waiting_run_is_cancelled_at_once(rig: Rig) -> None:
    (run_id,) = await rig.submit(a_run(due_ms=rig.parts.env.now_ms() + WEEK_MS))
    await rig.kernel.cancel(run_id, ACTOR, "not wanted")
    run = await rig.row(run_id)
    assert (run.state, run.reason, run.attempt) == (State.CANCELLED, "not wanted", 0)


async def test_a_ready_run_is_cancelled_at_once_and_never_starts(one_slot: Rig, latch: Latch) -> None:
    rig = one_slot
    (first,) = await rig.submit(latch.command())
    await rig.running(first)
    run_id, neighbour = await rig.submit(a_run(), a_run())
    await rig.kernel.cancel(run_id, ACTOR)
    latch.open()
    await rig.end_of(neighbour)
    assert (await rig.row(run_id)).state is State.CANCELLED
    assert run_id not in await rig.starts()


@pytest.mark.parametrize("kind", ["command", "call"])
async def test_a_running_run_is_cancelled_when_its_processes_are_gone(rig: Rig, latch: Latch, kind: str) -> None:
    (run_id,) = await rig.submit(latch.command() if kind == "command" else latch.call())
    await rig.running(run_id)
    await rig.kernel.cancel(run_id, ACTOR, "not wanted")
    run = await rig.end_of(run_id)
    assert (run.state, run.reason) == (State.CANCELLED, "not wanted")
    assert await rig.story(run_id) == ["RunAdded", "RunReadied", "RunStarted", "RunStopAsked", "RunCancelled"]


async def test_a_cancelled_run_is_not_retried(rig: Rig, latch: Latch) -> None:
    (run_id,) = await rig.submit(latch.command(retry=RetryPolicy(10)))
    await rig.running(run_id)
    await rig.kernel.cancel(run_id, ACTOR)
    assert (await rig.end_of(run_id)).state is State.CANCELLED


async def test_a_run_between_two_tries_is_cancelled_at_once(rig: Rig) -> None:
    (run_id,) = await rig.submit(a_script("exit 1", retry=RetryPolicy(1, delay_ms=WEEK_MS)))
    await rig.until(run_id, lambda run: run.tries == 1, "postponed")
    await rig.kernel.cancel(run_id, ACTOR)
    run = await rig.row(run_id)
    assert (run.state, run.attempt) == (State.CANCELLED, 1)


async def test_what_has_ended_or_never_was_cannot_be_cancelled(rig: Rig) -> None:
    run = await rig.run(a_run())
    with pytest.raises(Clash):
        await rig.kernel.cancel(run.id, ACTOR)
    with pytest.raises(NotFound):
        await rig.kernel.cancel("nobody", ACTOR)


async def test_cancelling_twice_is_the_same_as_once(rig: Rig, latch: Latch) -> None:
    (run_id,) = await rig.submit(latch.command())
    await rig.running(run_id)
    await asyncio.gather(*(rig.kernel.cancel(run_id, ACTOR) for _ in range(5)), return_exceptions=True)
    await rig.end_of(run_id)
    story = await rig.story(run_id)
    assert story.count("RunStopAsked") == 1
    assert story.count("RunCancelled") == 1


async def test_when_cancel_and_completion_race_exactly_one_of_them_wins(rig: Rig) -> None:
    async def race(wanted: NewRun) -> Run:
        (run_id,) = await rig.submit(wanted)
        await rig.running(run_id)
        try:
            await rig.kernel.cancel(run_id, ACTOR)
        except Clash:
            assert (await rig.row(run_id)).state is State.SUCCEEDED
        return await rig.end_of(run_id)

    wishes = [a_command("/bin/sleep", f"0.00{place % 10}") for place in range(40)] + [a_call("nothing")] * 20
    ends = await asyncio.gather(*map(race, wishes))
    for run in ends:
        story = await rig.story(run.id)
        assert len({"RunSucceeded", "RunCancelled"} & set(story)) == 1
        assert sum(name in ("RunSucceeded", "RunCancelled", "RunFailed") for name in story) == 1, story
        assert run.state in (State.SUCCEEDED, State.CANCELLED)


async def test_a_cancelled_tree_leaves_no_process_behind(rig: Rig, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"echo $$ > {pids}.a; setsid bash -c 'echo $$ > {pids}.b; sleep 1000' & mv {pids}.a {pids}; sleep 1000"
    (run_id,) = await rig.submit(a_script(script))
    await rig.running(run_id)

    async def written() -> None:
        while not (pids.exists() and Path(f"{pids}.b").exists() and Path(f"{pids}.b").read_text().strip()):
            await asyncio.sleep(0.01)

    await within(written(), "the script writes its pids")
    await rig.kernel.cancel(run_id, ACTOR)
    await rig.end_of(run_id)
    for path in (pids, Path(f"{pids}.b")):
        assert not os.path.exists(f"/proc/{path.read_text().strip()}")


# -- rerun ------------------------------------------------------------------------------------------------------------


async def test_a_rerun_is_a_new_run_with_the_same_work_linked_to_the_old(rig: Rig) -> None:
    old = await rig.run(
        a_command("/bin/cat", bodies=(Body("stdin", b"same"),), labels={"a": "b"}, priority=7, env={"X": "y"})
    )
    (added,) = (await rig.kernel.rerun(old.id, ACTOR)).runs
    new = await rig.end_of(added.id)
    assert (new.spec.rerun_of, new.priority, dict(new.spec.labels)) == (old.id, 7, {"a": "b"})
    assert dict(new.spec.env) == {"X": "y"}
    assert await rig.output(new.id) == ["same"]
    assert (await rig.row(old.id)) == old


async def test_a_rerun_of_a_call_gets_the_same_arguments(rig: Rig) -> None:
    old = await rig.run(a_call("add", [1, 2]))
    (added,) = (await rig.kernel.rerun(old.id, ACTOR)).runs
    await rig.end_of(added.id)
    assert await rig.result(added.id) == 3


async def test_a_live_run_cannot_be_rerun(rig: Rig, latch: Latch) -> None:
    (run_id,) = await rig.submit(latch.command())
    with pytest.raises(Clash):
        await rig.kernel.rerun(run_id, ACTOR)
    with pytest.raises(NotFound):
        await rig.kernel.rerun("nobody", ACTOR)


# -- runs without a worker --------------------------------------------------------------------------------------------


async def test_nothing_succeeds_with_the_request_that_adds_it(rig: Rig) -> None:
    (run_id,) = await rig.submit(a_run(Nothing()))
    run = await rig.row(run_id)
    assert (run.state, run.attempt, run.started_ms) == (State.SUCCEEDED, 0, None)


async def test_nothing_with_a_due_time_succeeds_then(rig: Rig) -> None:
    due_ms = rig.parts.env.now_ms() + 200
    run = await rig.run(a_run(Nothing(), due_ms=due_ms))
    assert run.state is State.SUCCEEDED
    assert run.ended_ms is not None
    assert run.ended_ms >= due_ms


@pytest.mark.parametrize(("succeeded", "state"), [(True, State.SUCCEEDED), (False, State.FAILED)])
async def test_a_signal_waits_until_someone_settles_it(rig: Rig, succeeded: bool, state: State) -> None:
    (run_id,) = await rig.submit(a_run(Signal()))
    assert await rig.reasons(run_id) == ["WaitingForSignal"]
    await rig.kernel.settle(run_id, ACTOR, succeeded, "by hand")
    assert (await rig.row(run_id)).state is state
    with pytest.raises(Clash):
        await rig.kernel.settle(run_id, ACTOR, True, "again")


async def test_the_work_of_a_worker_cannot_be_settled(rig: Rig, latch: Latch) -> None:
    (run_id,) = await rig.submit(latch.command())
    with pytest.raises(Clash):
        await rig.kernel.settle(run_id, ACTOR, True, "no")


async def test_a_signal_that_waits_can_be_cancelled(rig: Rig) -> None:
    (run_id,) = await rig.submit(a_run(Signal()))
    await rig.kernel.cancel(run_id, ACTOR)
    assert (await rig.row(run_id)).state is State.CANCELLED


async def test_a_check_holds_until_its_condition_is_met(rig: Rig, latch: Latch) -> None:
    (run_id,) = await rig.submit(a_run(Check("file", str(latch.path), interval_ms=10)))

    async def looked_at() -> None:
        while (await rig.row(run_id)).version <= 3:
            await asyncio.sleep(0.01)  # a look that finds nothing is not an event

    await within(looked_at(), "the condition is looked at several times")
    assert await rig.reasons(run_id) == ["ConditionNotMet"]
    latch.open()
    assert (await rig.end_of(run_id)).state is State.SUCCEEDED


async def test_a_check_that_is_given_up_has_failed_with_the_reason_timeout(rig: Rig, latch: Latch) -> None:
    run = await rig.run(a_run(Check("file", str(latch.path), interval_ms=10, give_up_ms=50)))
    assert (run.state, run.reason) == (State.FAILED, "timeout")


# -- keeping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_ms", [0, 30])
async def test_when_the_time_of_keeping_is_over_the_run_its_logs_and_its_bodies_go(rig: Rig, keep_ms: int) -> None:
    (run_id,) = await rig.submit(a_call("add", [1, 2], keep_ms=keep_ms))
    await rig.dropped(run_id)
    with pytest.raises(NotFound):
        await rig.kernel.run(run_id)
    loaded = await rig.store.load(Facts(bodies=((run_id, "args"), (run_id, "result"))))
    assert not loaded.bodies
    assert (await rig.store.read_logs(LogQuery(run_id))).last_line == 0
    assert (await rig.story(run_id))[-1] == "RunDropped"


async def test_the_logs_of_a_run_that_is_not_kept_go_with_it(rig: Rig) -> None:
    (run_id,) = await rig.submit(a_command("/bin/echo", "hello", keep_ms=0))
    await rig.dropped(run_id)
    assert (await rig.store.read_logs(LogQuery(run_id))).last_line == 0


async def test_a_failure_under_keep_nothing_is_a_dead_letter_and_stays(rig: Rig) -> None:
    run = await rig.run(a_script("exit 1", keep_ms=0))
    assert (run.state, run.alarm_ms) == (State.FAILED, None)


async def test_a_run_kept_always_has_no_alarm_and_one_kept_for_a_time_has_it(rig: Rig) -> None:
    always = await rig.run(a_run(keep_ms=None))
    a_week = await rig.run(a_run(keep_ms=WEEK_MS))
    assert always.alarm_ms is None
    assert a_week.ended_ms is not None
    assert a_week.alarm_ms == a_week.ended_ms + WEEK_MS


async def test_a_run_with_a_live_child_stays_until_the_child_has_ended(rig: Rig) -> None:
    parent, _, child = await rig.submit(a_run(keep_ms=1), a_run(Signal()), a_run(parents=(0, 1)))
    # The ticker looks at the parent, finds the child, and moves the alarm on.
    await _later(rig, parent)
    assert await rig.exists(parent)
    assert (await rig.row(child)).state is State.WAITING


async def test_a_run_whose_child_is_running_stays_too(rig: Rig, latch: Latch) -> None:
    parent, child = await rig.submit(a_run(keep_ms=1), latch.command(parents=(0,)))
    await rig.running(child)
    await _later(rig, parent)
    assert await rig.exists(parent)
    latch.open()
    await rig.end_of(child)


async def _later(rig: Rig, run_id: str) -> None:
    async def looked_at() -> None:
        while True:
            run = await rig.row(run_id)
            if run.ended_ms is not None and run.alarm_ms is not None and run.alarm_ms > run.ended_ms + 1_000:
                return
            await asyncio.sleep(0.01)  # an alarm that moves is not an event

    await within(looked_at(), "the ticker looks at a run that has a live child")


async def test_a_run_id_that_is_taken_is_refused(rig: Rig) -> None:
    await rig.submit(a_run(run_id="mine"))
    with pytest.raises(Clash):
        await rig.submit(a_run(run_id="mine"))
    with pytest.raises(Clash):
        await rig.submit(a_run(run_id="mine", live_key="k"))


async def test_all_or_nothing_a_request_with_one_bad_entry_adds_none(rig: Rig) -> None:
    with pytest.raises(Refused):
        await rig.submit(a_run(run_id="good"), a_run(parents=("nobody",)))
    assert not await rig.exists("good")


async def test_a_gate_over_everything_leaves_what_needs_no_worker_alone(rig: Rig) -> None:
    await rig.kernel.shut(Gate("*", "pause", actor=ACTOR))
    run = await rig.run(a_run(Nothing()))
    assert run.state is State.SUCCEEDED


async def test_a_result_is_json_as_the_function_returned_it(rig: Rig) -> None:
    run = await rig.run(a_call("describe", {}))
    seen = await rig.kernel.run(run.id)
    assert seen.result is not None
    assert msgspec.json.decode(seen.result)["id"] == run.id
    assert run.result is not None
    assert run.result.size_bytes == len(seen.result)
