"""Functions that the tests of Python calls call, in warm children and in threads."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

CONTEXT: contextvars.ContextVar[str] = contextvars.ContextVar("CONTEXT", default="untouched")


def nothing() -> None:
    pass


def add(a: int, b: int) -> int:
    return a + b


def length(text: str) -> int:
    return len(text)


def describe(run: Any, *, loud: bool = False) -> dict[str, Any]:
    return {
        "id": run.id,
        "attempt": run.attempt,
        "scope": run.scope,
        "name": run.name,
        "labels": dict(run.labels),
        "loud": loud,
    }


def run_in_the_middle(a: int, run: Any, b: int) -> list[Any]:
    return [a, run.id, b]


def run_last(a: int, *, run: Any) -> list[Any]:
    return [a, run.id]


async def add_later(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


async def leave_a_task() -> None:
    asyncio.get_running_loop().create_task(asyncio.sleep(1_000))


async def run_in_a_thread() -> int:
    return await asyncio.to_thread(os.getpid)


async def exit_in_a_coroutine() -> None:
    sys.exit(3)


def fail() -> None:
    raise ValueError("no such luck")


def exit_with_code() -> None:
    sys.exit(3)


def interrupt() -> None:
    raise KeyboardInterrupt


def end_process() -> None:
    os._exit(7)


def kill_own_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write_and_die(text: str) -> None:
    os.write(1, text.encode())
    os._exit(1)


def return_object() -> object:
    return threading.Lock()


def return_much() -> str:
    return "x" * 70_000


def pid() -> int:
    return os.getpid()


def start_a_thread() -> int:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


def disturb(path: str) -> None:
    os.environ["LEFT_BEHIND"] = "yes"
    os.environ.pop("HOME", None)
    os.chdir(path)
    CONTEXT.set("touched")
    sys.stdout = None
    os.close(1)
    (Path(os.environ["STELLWERK_TMP"]) / "file").write_text("x")
    signal.setitimer(signal.ITIMER_REAL, 0.05)


def look_around() -> dict[str, Any]:
    print("looked")
    names = ["LEFT_BEHIND", "HOME", "OWN", "STELLWERK_RUN_ID", "STELLWERK_ATTEMPT", "STELLWERK_SCOPE", "STELLWERK_NAME"]
    folder = Path(os.environ["STELLWERK_TMP"])
    return {
        "env": {name: os.environ.get(name) for name in names},
        "cwd": os.getcwd(),
        "context": CONTEXT.get(),
        "tmp": str(folder),
        "tmp_mode": folder.stat().st_mode & 0o777,
        "tmp_files": len(list(folder.iterdir())),
    }


def write_in_all_ways(token: str, ways: str) -> None:
    if "p" in ways:
        print(f"{token} printed")
    if "r" in ways:
        os.write(1, f"{token} raw\n".encode())
    if "e" in ways:
        print(f"{token} error", file=sys.stderr)
    if "s" in ways:
        subprocess.run(["/bin/sh", "-c", f"echo {token} shell; echo {token} shell error >&2"], check=True)
    if "u" in ways:
        print(f"{token} unfinished", end="")


def print_only(token: str) -> None:
    for number in range(3):
        print(token, number)
    print(token, "error", file=sys.stderr)
    sys.stdout.buffer.write(f"{token} bytes\n".encode())


def print_lines(count: int) -> None:
    for number in range(count):
        print(number)


def write_much(size: int) -> None:
    data = b"0123456789abcdef" * (size // 16)
    while data:
        data = data[os.write(1, data) :]


def note(path: str, token: str) -> None:
    with open(path, "a") as file:
        file.write(f"{token}\n")


def note_and_wait(path: str, token: str, until: str) -> None:
    note(path, token)
    wait_for(until)


def wait_for(path: str) -> str:
    print("waiting", flush=True)
    while not os.path.exists(path):
        time.sleep(0.002)
    return "came"


def say_pid_and_wait() -> None:
    print(os.getpid(), flush=True)
    while True:
        time.sleep(0.002)


def wait_for_boot_ms(moment: int) -> str:
    while time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000 < moment:
        time.sleep(0.002)
    return "passed"


def wait_for_ever() -> None:
    print("waiting", flush=True)
    while True:
        time.sleep(0.002)


async def wait_for_ever_async() -> None:
    print("waiting", flush=True)
    await asyncio.sleep(1_000)


def wait_and_tidy_up(path: str) -> None:
    try:
        wait_for_ever()
    finally:
        Path(path).write_text("tidy")
        print("tidied up")


async def wait_and_tidy_up_async(path: str) -> None:
    try:
        await wait_for_ever_async()
    finally:
        Path(path).write_text("tidy")
        print("tidied up")


def return_twice() -> int:
    return 1 if os.fork() else 2


def write_into_every_descriptor() -> None:
    for fd in range(3, 20):
        try:
            os.write(fd, b"nonsense" * 10)
        except OSError:
            pass
    wait_for_ever()


def parent_pid() -> int:
    return os.getppid()


def leave_daemons(pids: str, then_wait: bool) -> None:
    """Four processes, each a session of its own, orphaned, without environment; two of them write for ever."""
    asleep = f"setsid sh -c 'echo $$ >> {pids}; exec sleep 1000'"
    writing = f"setsid sh -c 'echo $$ >> {pids}; while :; do echo mine; done'"
    for _ in range(2):
        subprocess.run(["/bin/sh", "-c", f"{asleep} & {writing} & exit"], check=True, env={"PATH": os.environ["PATH"]})
    while not Path(pids).exists() or len(Path(pids).read_text().split()) < 4:
        time.sleep(0.002)
    if then_wait:
        wait_for_ever()
