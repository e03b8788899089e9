"""Names of things: what may stand in an id, a scope, a name, and how keys for gates are spelled.

A name is refused at the door, so that no later layer has to quote, escape or truncate it.
"""

from __future__ import annotations

import functools
import re

from stellwerk.core.errors import Refused

NAME_CHARS_MAX = 100
KEYS_PER_RUN_MAX = 8
LABELS_MAX = 32
LABEL_CHARS_MAX = 200
LIVE_KEY_CHARS_MAX = 500

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,100}")
_PATH = re.compile(r"[A-Za-z0-9_.\-/]{1,100}")
_RUN_ID = re.compile(r"[A-Za-z0-9_.\-:]{1,200}")
_PRINTABLE = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]*")

EVERYTHING = "*"  # the key that every run carries


def check_name(text: str, where: str) -> str:
    """Return `text` if it is a valid name, else refuse it."""
    if _NAME.fullmatch(text) is None:
        raise Refused(f"{where} must be 1 to 100 characters of A-Z a-z 0-9 _ . -", where)
    return text


def check_path(text: str, where: str) -> str:
    """Return `text` if it is a valid scope or path (a name that may contain slashes), else refuse it."""
    if _PATH.fullmatch(text) is None:
        raise Refused(f"{where} must be 1 to 100 characters of A-Z a-z 0-9 _ . - /", where)
    return text


def check_run_id(text: str, where: str = "id") -> str:
    """Return `text` if it could be the id of a run, else refuse it."""
    if _RUN_ID.fullmatch(text) is None:
        raise Refused(f"{where} must be 1 to 200 characters of A-Z a-z 0-9 _ . : -", where)
    return text


def check_text(text: str, where: str, chars_max: int) -> str:
    """Return `text` if it is not empty, not too long and free of control characters, else refuse it."""
    if not text or len(text) > chars_max or _PRINTABLE.fullmatch(text) is None:
        raise Refused(f"{where} must be 1 to {chars_max} characters without control characters", where)
    return text


def gate_key(scope: str | None, name: str | None) -> str:
    """The key at which a gate over everything, a scope or one job stands."""
    if scope is None:
        if name is not None:
            raise Refused("a gate over a job needs its scope too; without a scope it stands over everything", "name")
        return EVERYTHING
    if name is None:
        return f"scope:{scope}"
    return f"job:{scope}/{name}"


@functools.lru_cache(maxsize=4_096)  # a job has many runs, and each wants its keys
def run_keys(queue: str, scope: str, name: str, more: tuple[str, ...] = ()) -> tuple[str, ...]:
    """All keys at which a gate or a limit may hold this run back, widest first."""
    keys = (EVERYTHING, f"queue:{queue}", f"scope:{scope}", f"job:{scope}/{name}", *more)
    if len(keys) > KEYS_PER_RUN_MAX:
        raise Refused(f"a run has at most {KEYS_PER_RUN_MAX} keys; {len(keys)} were given")
    return keys
