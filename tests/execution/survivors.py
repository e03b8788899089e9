"""Who is left? Found by a token in argv through /proc, never by the keeper's own lists."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
NASTY = str(Path(__file__).with_name("nasty.py"))
DEADLINE_S = 20.0


def new_token() -> str:
    return f"token-{secrets.token_hex(8)}"


def host_environment(**more: str) -> dict[str, str]:
    """For a host of our own in another process: it finds what we find."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path[1:]]), **more}


def nasty_argv(shape: str, token: str) -> tuple[str, ...]:
    return (sys.executable, "-S", NASTY, shape, token)


def alive(token: str, shape: str | None = None) -> set[int]:
    """Pids of living processes with the token (and the shape) in their argv.

    Several looks, for who forks and exits hides.
    """
    words = {token.encode()} if shape is None else {token.encode(), shape.encode()}
    found: set[int] = set()
    for _ in range(3):
        for name in os.listdir("/proc"):
            if name.isdigit() and _is_meant(name, words):
                found.add(int(name))
    return found


def _is_meant(name: str, words: set[bytes]) -> bool:
    try:
        with open(f"/proc/{name}/cmdline", "rb") as file:  # empty for a zombie
            if not words <= set(file.read().split(b"\0")):
                return False
    except OSError:
        return False
    return int(name) != os.getpid()


def wait_until(is_so: Callable[[], object], what: str) -> None:
    """Look until it is so; a condition with a deadline, not a sleep that hopes."""
    until = time.monotonic() + DEADLINE_S
    while not is_so():
        if time.monotonic() > until:
            raise AssertionError(f"not within {DEADLINE_S} s: {what}")
        time.sleep(0.005)
