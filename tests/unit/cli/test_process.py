"""The command as a process: start-up, help, a real terminal, Ctrl-C, a reader that goes away."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import stellwerk as package
from tests.unit.cli.conftest import ScriptedHost, Told, a_run, line, sent

SOURCES = Path(package.__file__).parents[1]
STELLWERK = (sys.executable, "-m", "stellwerk")
HEAVY = {"asyncio", "litestar", "rich", "sqlite3", "pydantic", "yaml", "uvicorn", "http.client", "ssl", "msgspec"}


def environment(host: ScriptedHost | None = None) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("STELLWERK_")}
    environ |= {"PYTHONPATH": str(SOURCES), "TERM": "xterm", "COLUMNS": "200", "PYTHONIOENCODING": "utf-8"}
    if host is not None:
        environ |= {"STELLWERK_URL": host.url, "STELLWERK_TOKEN": "swk_test"}
    return environ


def process(*arguments: str, host: ScriptedHost | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*STELLWERK, *arguments], env=environment(host), capture_output=True, text=True, timeout=30)


def on_terminal(*arguments: str, host: ScriptedHost) -> tuple[int, str]:
    """Run it with a terminal on all three standard streams; answer exit code and all that was shown."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*STELLWERK, *arguments], env=environment(host), stdin=theirs, stdout=theirs, stderr=theirs
    ) as child:
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 65_536)
            except OSError:  # Linux says so when the other side is closed
                break
            if not piece:
                break
            shown += piece
            if b"Go on?" in shown:
                os.write(ours, b"n\n")
                shown = shown.replace(b"Go on?", b"Go on!")
        os.close(ours)
        return child.wait(30), shown.decode()


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("submit", "--help"), ("runs", "--help")])
def test_help_loads_nothing_heavy(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom stellwerk.cli.main import run\n"
        f"assert run({list(arguments)!r}) == 0\nprint('LOADED', *sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    ).stdout
    assert HEAVY & set(out.partition("LOADED")[2].split()) == set()


def test_the_version_is_printed() -> None:
    ran = process("--version")
    assert (ran.returncode, ran.stdout) == (0, f"stellwerk {package.__version__}\n")


def test_on_a_terminal_a_log_line_cannot_drive_it(host: ScriptedHost) -> None:
    lines = [line(1, "red \x1b[31m\tx"), line(2, "gone\x1b[2J", "stderr"), line(3, "started", "system")]
    host.on(
        "GET",
        "/api/runs/r1/logs",
        Told({"lines": lines, "last": 3, "ended": True, "event_id": 1}),
        Told({"lines": [], "last": 3, "ended": True, "event_id": 1}),
    )
    exit_code, shown = on_terminal("logs", "r1", host=host)
    assert exit_code == 0
    assert shown.splitlines() == ["red ␛[31m\tx", "gone␛[2J", "\x1b[2mstarted\x1b[0m"]


def test_raw_is_raw_on_a_terminal_too(host: ScriptedHost) -> None:
    page = {"lines": [line(1, "red \x1b[31m")], "last": 1, "ended": True, "event_id": 1}
    host.on("GET", "/api/runs/r1/logs", Told(page), Told({**page, "lines": []}))
    assert on_terminal("logs", "r1", "--raw", host=host) == (0, "red \x1b[31m\r\n")


def test_on_a_terminal_a_list_is_a_table_and_its_cells_are_no_markup(host: ScriptedHost) -> None:
    runs = [a_run(state="failed", error="[bold]x[/bold] :smile: \x1b[2J")]
    host.on("GET", "/api/runs", Told({"runs": runs, "cursor": None, "event_id": 1}))
    exit_code, shown = on_terminal("runs", host=host)
    assert exit_code == 0
    assert "[bold]x[/bold] :smile: ␛[2J" in shown
    assert "─" in shown
    assert "ago" in shown


def test_on_a_terminal_a_watched_list_is_a_live_table(host: ScriptedHost) -> None:
    host.on(
        "GET",
        "/api/runs",
        Told({"runs": [a_run(state="running", ended_at=None)], "cursor": None, "event_id": 1}),
        Told({"runs": [a_run(id="r2")], "cursor": None, "event_id": 2}),
        Told({"message": "enough"}, status=403),
    )
    host.on("GET", "/api/events", Told({"type": "Empty", "last_event_id": 2}))
    exit_code, shown = on_terminal("runs", "-f", host=host)
    assert exit_code == 4
    assert shown.index("running") < shown.index("r2") < shown.index("enough")


def test_in_bulk_a_terminal_is_asked_and_no_means_no(host: ScriptedHost) -> None:
    host.on("POST", "/api/runs/cancel", Told({"count": 2, "ids": ["r1", "r2"], "event_id": 5}))
    exit_code, shown = on_terminal("cancel", "--scope", "demo", host=host)
    assert exit_code == 1
    assert "2 runs would be cancelled: r1, r2" in shown
    assert "nothing was changed" in shown
    assert len(host.asked) == 1


def test_into_a_pipe_the_bytes_of_a_log_are_kept(host: ScriptedHost) -> None:
    lines = [line(1, "\x1b[31mred\x1b[0m"), line(2, "\ufffd", raw="/w==")]
    page = {"lines": lines, "last": 2, "ended": True, "event_id": 1}
    host.on("GET", "/api/runs/r1/logs", Told(page), Told({**page, "lines": []}))
    ran = subprocess.run([*STELLWERK, "logs", "r1"], env=environment(host), capture_output=True, timeout=30)
    assert ran.stdout == b"\x1b[31mred\x1b[0m\n\xff\n"


def test_ctrl_c_ends_a_follower_quietly(host: ScriptedHost) -> None:
    host.on("GET", "/api/runs/r1", Told(a_run(state="running")))
    host.on("GET", "/api/runs/r1/logs", Told(chunks=(sent("line", line(1, "one"), 1),)))
    command = [*STELLWERK, "logs", "r1", "-f"]
    with subprocess.Popen(command, env=environment(host), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"one\n"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=30)
    assert (child.returncode, out, err.strip()) == (130, b"", b"")


def test_a_reader_that_goes_away_ends_it_quietly(host: ScriptedHost) -> None:
    lines = [line(number, "x" * 1_000) for number in range(1, 2_001)]
    page = {"lines": lines, "last": 2_000, "ended": True, "event_id": 1}
    host.on("GET", "/api/runs/r1/logs", Told(page), Told({**page, "lines": []}))
    with subprocess.Popen(
        [*STELLWERK, "logs", "r1"], env=environment(host), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.read(10)
        child.stdout.close()
        err = child.stderr.read()
        assert (child.wait(30), err) == (141, b"")
