"""Who is left? Found by a token in argv through /proc, never by the keeper's own lists."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path

NASTY = str(Path(__file__).with_name("nasty.py"))
DEADLINE_S = 20.0


def new_token() -> str:
    return f"token-{secrets.token_hex(8)}"


def nasty_argv(shape: str, token: str) -> tuple[str, ...]:
    return (sys.executable, "-S", NASTY, shape, token)


def alive(token: str) -> set[int]:
    """Pids of living processes with the token in their argv; several looks, for who forks and exits hides."""
    found: set[int] = set()
    for _ in range(3):
        for name in os.listdir("/proc"):
            if name.isdigit() and _is_meant(name, token.encode()):
                found.add(int(name))
    return found


def _is_meant(name: str, token: bytes) -> bool:
    try:
        with open(f"/proc/{name}/cmdline", "rb") as file:  # empty for a zombie
            if token not in file.read().split(b"\0"):
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
