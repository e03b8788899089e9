"""Commands and shell scripts: what they find, what they write, how they end."""

from __future__ import annotations

import asyncio
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stellwerk.core.logs import STDERR, STDOUT, SYSTEM
from stellwerk.core.run import Command, Failed, Lost, PythonCall, Returned, Shell, Succeeded
from stellwerk.execute.command import base_environment
from stellwerk.execute.keeper_link import KeeperLink
from stellwerk.execute.log_buffer import LogLimits
from stellwerk.execute.protocol import Executor, Output
from tests.execution.command_rig import Rig, as_bytes
from tests.execution.survivors import alive, nasty_argv, new_token

pytestmark = pytest.mark.crash


def test_the_contracts_are_kept(rig: Rig) -> None:
    executor: Executor = rig.executor
    output: Output = rig.buffer
    assert executor.take_ended() == []
    assert output.write("run-0", 1, STDOUT, b"")


# ── how they end ──


async def test_exit_0_is_a_success(rig: Rig) -> None:
    assert await rig.command("true") == Succeeded(exit_code=0)


async def test_another_exit_code_is_a_failure_that_names_it(rig: Rig) -> None:
    assert await rig.shell("exit 3") == Failed(reason="exit", exit_code=3, error="exit code 3")


async def test_a_signal_is_a_failure_that_names_it(rig: Rig) -> None:
    outcome = await rig.shell("kill -SEGV $$")
    assert outcome == Failed(reason="signal", exit_code=128 + signal.SIGSEGV, error="ended by signal SIGSEGV")


async def test_a_stop_ends_with_stopped(rig: Rig) -> None:
    run_id = rig.start(Shell("echo up; sleep 1000"))
    await rig.line(run_id, b"up")
    rig.executor.stop(run_id, 1, 5_000)
    outcome = await rig.end(run_id)
    assert isinstance(outcome, Failed)
    assert outcome.reason == "stopped"


async def test_a_stop_right_behind_the_start_is_not_lost(rig: Rig) -> None:
    run_id = rig.start(Command(("sleep", "1000")))
    rig.executor.stop(run_id, 1, 0)
    outcome = await rig.end(run_id)
    assert isinstance(outcome, Failed)
    assert outcome.reason == "stopped"


async def test_a_command_that_ignores_term_is_killed_after_its_timeout_and_grace(rig: Rig) -> None:
    token = new_token()
    outcome = await rig.command(*nasty_argv("ignores_signals", token), timeout_ms=300)
    assert outcome == Failed(reason="timeout", exit_code=137, error="still running after 300 ms")
    assert alive(token) == set()


async def test_a_passed_lease_is_a_lost_attempt(rig: Rig) -> None:
    assert await rig.command("sleep", "1000", lease_ms=300) == Lost("lease deadline passed")


async def test_a_start_after_its_lease_is_returned(rig: Rig) -> None:
    assert isinstance(await rig.command("true", lease_ms=-1), Returned)


async def test_a_given_up_run_is_ended_and_the_others_are_not(rig: Rig) -> None:
    given_up = rig.start(Command(("sleep", "1000")))
    kept = rig.start(Shell("echo up; read -t 0.3 < /dev/zero; exit 0"))
    await rig.line(kept, b"up")
    rig.executor.renew(2**50, [(given_up, 1), ("unknown", 4)])
    assert isinstance(await rig.end(given_up), Failed)
    assert isinstance(await rig.end(kept), Succeeded)


async def test_a_background_child_of_a_finished_command_is_killed(rig: Rig) -> None:
    token = new_token()
    words = shlex.join(nasty_argv("three_sessions", token))
    outcome = await rig.shell(f"{words} > up & until grep -q ready up; do sleep 0.01; done; exit 0")
    assert outcome == Succeeded(exit_code=0)
    assert alive(token) == set()


async def test_a_command_that_kills_its_keeper_is_lost_and_the_next_one_runs(rig: Rig) -> None:
    assert isinstance(await rig.shell("kill -9 $PPID; sleep 1000"), Lost)
    assert await rig.command("true") == Succeeded(exit_code=0)


async def test_closing_ends_what_still_runs(link: KeeperLink, tmp_path: Path) -> None:
    rig = Rig(link, tmp_path)
    await rig.executor.open()
    token = new_token()
    rig.start(Command(nasty_argv("bomb", token)))
    await rig.executor.close()
    assert alive(token) == set()
    assert isinstance(rig.executor.take_ended()[0].outcome, Failed)
    assert list(rig.temp_root.iterdir()) == []


async def test_who_holds_the_output_from_outside_the_tree_does_not_hold_the_end(rig: Rig, tmp_path: Path) -> None:
    program = "import sys; f = open(input(), 'wb'); print('got it', flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    os.mkfifo(tmp_path / "go")
    run_id = rig.last = rig.start(Shell("echo /proc/$$/fd/1; read -r < go; exit 0"))
    try:
        async with asyncio.timeout(20):
            while not rig.lines[run_id]:
                await rig._turn()
        holder.stdin.write(rig.lines[run_id][0].data.decode() + "\n")
        holder.stdin.flush()
        assert await asyncio.to_thread(holder.stdout.readline) == "got it\n"
        await asyncio.to_thread((tmp_path / "go").write_text, "\n")
        assert await rig.end(run_id) == Succeeded(exit_code=0)
        assert b"outside the tree" in rig.system()
    finally:
        holder.communicate()


# ── what cannot start ──


async def test_a_missing_program_is_named(rig: Rig) -> None:
    outcome = await rig.command("no-such-program-here")
    assert isinstance(outcome, Failed)
    assert outcome.reason == "start"
    assert "no-such-program-here" in outcome.error
    assert "PATH" in outcome.error


async def test_a_missing_folder_is_named(rig: Rig) -> None:
    outcome = await rig.command("true", cwd="/no/such/folder")
    assert isinstance(outcome, Failed)
    assert "/no/such/folder" in outcome.error


async def test_a_file_that_is_no_program_is_refused(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "text").chmod(0o755)
    (tmp_path / "plain").write_text("hello")
    no_program = await rig.command(str(tmp_path / "text"))
    not_executable = await rig.command(str(tmp_path / "plain"))
    assert isinstance(no_program, Failed)
    assert "#!/bin/sh" in no_program.error
    assert isinstance(not_executable, Failed)
    assert "permissions" in not_executable.error


@pytest.mark.parametrize(
    "argv", [("echo", "x" * 200_000), ("echo", "a\0b"), (), ("",), ("echo", "\ud800")], ids=lambda argv: str(argv)[:12]
)
async def test_arguments_the_system_cannot_take_are_refused(rig: Rig, argv: tuple[str, ...]) -> None:
    outcome = await rig.command(*argv)
    assert isinstance(outcome, Failed)
    assert outcome.reason == "start"


async def test_a_variable_the_system_cannot_take_is_refused(rig: Rig) -> None:
    outcome = await rig.command("true", env={"A=B": "c"})
    assert isinstance(outcome, Failed)
    assert outcome.reason == "start"


async def test_an_action_of_another_kind_is_refused(rig: Rig) -> None:
    outcome = await rig.end(rig.start(PythonCall("a:b")))
    assert isinstance(outcome, Failed)


async def test_a_script_longer_than_an_argument_may_be_runs(rig: Rig) -> None:
    script = "# " + "x" * 300_000 + "\necho fine\n"
    assert await rig.shell(script) == Succeeded(exit_code=0)
    assert rig.stdout() == b"fine\n"


# ── what they find ──


async def test_a_command_sees_only_its_three_descriptors(rig: Rig) -> None:
    inheritable = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(inheritable, True)
    await rig.command(sys.executable, "-S", "-c", "import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))")
    os.close(inheritable)
    assert rig.stdout() == b"[0, 1, 2, 3]\n"  # 3 is the listing's own


async def test_a_command_finds_nothing_of_the_hosts_environment_but_the_list(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    os_environ = {"PATH": "/bin", "HOME": "/home/x", "LC_ALL": "C.UTF-8", "AWS_SECRET": "s", "STELLWERK_DB": "s"}
    assert base_environment(os_environ) == {"PATH": "/bin", "HOME": "/home/x", "LC_ALL": "C.UTF-8"}
    await rig.command("/usr/bin/env", "-0", env={"MINE": "1", "HOME": "/mine"})
    found = dict(line.split("=", 1) for line in rig.stdout().decode().split("\0") if "=" in line)
    assert found.pop("STELLWERK_TMP").startswith(str(rig.temp_root))
    assert found == {**base_environment(os.environ), "MINE": "1", "HOME": "/mine"}


async def test_a_program_is_searched_in_the_path_and_folder_of_the_run(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "only-here"
    program.write_text("#!/bin/sh\necho found\n")
    program.chmod(0o755)
    for more in ({"env": {"PATH": str(tmp_path / "bin")}}, {"env": {"PATH": "bin"}, "cwd": str(tmp_path)}):
        assert await rig.command("only-here", **more) == Succeeded(exit_code=0)
        assert rig.stdout() == b"found\n"


async def test_a_command_stands_in_its_folder_with_a_private_mask_and_usual_signals(rig: Rig, tmp_path: Path) -> None:
    await rig.shell(
        "pwd; umask; grep SigIgn /proc/self/status; grep SigBlk /proc/self/status; cut -d' ' -f6 /proc/$$/stat; echo $$"
    )
    folder, mask, ignored, blocked, session, pid = rig.stdout().decode().split("\n")[:6]
    assert (folder, mask) == (str(tmp_path), "0077")
    ordinary = (1 << 31) - 1  # the C library keeps 32 and 33 for itself
    assert int(ignored.split()[1], 16) & ordinary == int(blocked.split()[1], 16) == 0
    assert session.strip() == pid.strip()


async def test_the_private_folder_is_private_and_removed(rig: Rig) -> None:
    await rig.shell('cd "$STELLWERK_TMP"; pwd; stat -c %a .; mkdir -p a/b; touch a/c')
    folder, mode = rig.stdout().decode().split()
    assert mode == "700"
    async with asyncio.timeout(20):
        while Path(folder).exists():
            await asyncio.sleep(0.01)


async def test_stdin_is_the_given_content_or_nothing(rig: Rig) -> None:
    content = random.Random(1).randbytes(300_000)
    await rig.command("cat", stdin=content)
    assert rig.stdout() == content
    assert await rig.command("cat") == Succeeded(exit_code=0)
    assert rig.stdout() == b""


async def test_commands_keep_the_limit_of_open_files_the_host_began_with(link: KeeperLink, rig: Rig) -> None:
    from stellwerk.execute.keeper_pair import first_open_files_soft

    await rig.shell("ulimit -n")
    assert rig.stdout().decode().strip() == str(first_open_files_soft())


# ── what they write ──


async def test_a_megabyte_of_random_bytes_comes_back_identical(rig: Rig, tmp_path: Path) -> None:
    content = random.Random(2).randbytes(1_000_000)
    (tmp_path / "random").write_bytes(content)
    assert await rig.shell("cat random; cat random >&2") == Succeeded(exit_code=0)
    assert rig.stdout() == content
    assert rig.stderr() == content


async def test_lines_of_one_stream_keep_their_order(rig: Rig) -> None:
    await rig.shell("for i in {1..5000}; do echo $i; done")
    assert rig.stdout() == b"".join(b"%d\n" % number for number in range(1, 5_001))


async def test_output_is_seen_while_the_command_runs(rig: Rig) -> None:
    run_id = rig.start(Shell("echo one; sleep 1000"))
    await rig.line(run_id, b"one")
    rig.executor.stop(run_id, 1, 0)
    await rig.end(run_id)


async def test_a_flood_beyond_the_cap_keeps_head_and_tail_and_says_what_is_missing(
    link: KeeperLink, tmp_path: Path
) -> None:
    rig = Rig(link, tmp_path, LogLimits(head_bytes=100_000, tail_bytes=50_000))
    await rig.executor.open()
    await rig.command("seq", "1", "200000")
    await rig.executor.close()
    total = b"".join(b"%d\n" % number for number in range(1, 200_001))
    pieces = rig.lines[rig.last]
    marker = next(at for at, piece in enumerate(pieces) if piece.stream == SYSTEM)
    head, tail = as_bytes(pieces[:marker], STDOUT), as_bytes(pieces[marker + 1 :], STDOUT)
    assert total.startswith(head)
    assert total.endswith(tail)
    missing = int(pieces[marker].data.split()[0][1:])
    assert missing == len(total) - len(head) - len(tail)


async def test_a_slow_log_store_slows_the_command_down_and_loses_nothing(link: KeeperLink, tmp_path: Path) -> None:
    rig = Rig(link, tmp_path, LogLimits(waiting_bytes=100_000, waiting_bytes_max=500_000))
    await rig.executor.open()
    rig.takes_lines = False
    run_id = rig.last = rig.start(Command(("seq", "1", "300000")))
    begin = time.monotonic()
    while time.monotonic() - begin < 0.3:
        await asyncio.sleep(0.01)
    assert rig.executor.take_ended() == []
    rig.takes_lines = True
    rig._woken.set()
    assert await rig.end(run_id) == Succeeded(exit_code=0)
    await rig.executor.close()
    assert rig.stdout() == b"".join(b"%d\n" % number for number in range(1, 300_001))
    assert rig.system() == b""


async def test_a_dead_log_store_does_not_hold_the_command_for_ever(
    link: KeeperLink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stellwerk.execute.attempt_pipes.PAUSE_MAX_S", 0.2)
    rig = Rig(link, tmp_path, LogLimits(waiting_bytes=50_000, waiting_bytes_max=100_000))
    await rig.executor.open()
    rig.takes_lines = False
    run_id = rig.last = rig.start(Command(("seq", "1", "300000")))
    async with asyncio.timeout(20):
        while run_id not in rig.outcomes:
            await rig._turn()
    assert rig.outcomes[run_id] == Succeeded(exit_code=0)
    rig.takes_lines = True
    rig._woken.set()
    await rig.end(run_id)
    await rig.executor.close()
    assert b"the log store was too slow" in rig.system()
    assert as_bytes(rig.lines[run_id], STDERR) == b""
