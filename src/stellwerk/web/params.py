"""Query parameters: times, durations, comma lists, flags, cursors. What is unknown, repeated or empty is refused.

A parameter is declared once, with its route; the declaration is what is checked and what `/openapi.json` shows.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from msgspec import Struct

from stellwerk.core.errors import Refused
from stellwerk.core.times import SECOND_MS, parse_duration, parse_time

FIELDS_MAX = 64
POLL_S_MAX = 3_600  # who waits longer asks again
EVENT_ID_MAX = 2**53  # what a JSON number holds exactly
CURSOR_CHARS_MAX = 200


class Param(Struct, frozen=True):
    """A query parameter as it is declared."""

    name: str
    about: str
    schema: Mapping[str, Any]
    required: bool = False


def text_param(name: str, about: str, *, required: bool = False, chars_max: int = 500) -> Param:
    return Param(name, about, {"type": "string", "minLength": 1, "maxLength": chars_max}, required)


def whole_param(name: str, about: str, lowest: int, highest: int, default: int | None = None) -> Param:
    schema: dict[str, Any] = {"type": "integer", "minimum": lowest, "maximum": highest}
    if default is not None:
        schema["default"] = default
    return Param(name, about, schema)


def time_param(name: str, about: str) -> Param:
    return Param(name, about, {"type": "string", "format": "date-time"})


def words_param(name: str, about: str, words: Sequence[str]) -> Param:
    told = f"{about} One of, or several with commas: {', '.join(words)}."
    return Param(name, told, {"type": "string", "examples": [words[0]]})


TIMEOUT = Param(
    "timeout",
    "How long to wait for something new: a duration of at most an hour.",
    {"type": "string", "examples": ["30s"]},
)


class Query:
    """The parameters of one request."""

    __slots__ = ("_values",)

    def __init__(self, raw: bytes, known: frozenset[str]) -> None:
        self._values = _parse(raw, known) if raw else {}

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def need(self, name: str) -> str:
        """A parameter that must be there."""
        value = self._values.get(name)
        if value is None:
            raise Refused(f"the parameter {name} is missing", name)
        return value

    def whole(self, name: str, default: int, lowest: int, highest: int) -> int:
        value = self._values.get(name)
        if value is None:
            return default
        if value.isascii() and value.isdigit() and len(value) <= 20:
            if lowest <= int(value) <= highest:
                return int(value)
        raise Refused(f"{name} must be a whole number from {lowest} to {highest}", name)

    def time_ms(self, name: str) -> int | None:
        value = self._values.get(name)
        # An unescaped + of a zone arrives as a space; no time has one in that place.
        return None if value is None else parse_time(value.replace(" ", "+"), name)

    def poll_s(self, name: str = "timeout") -> float | None:
        """How long to wait; None if nothing was said."""
        value = self._values.get(name)
        if value is None:
            return None
        wait_ms = parse_duration(value, name)
        if wait_ms > POLL_S_MAX * SECOND_MS:
            raise Refused(f"{name} must be at most 1 hour; ask again to wait longer", name)
        return wait_ms / SECOND_MS

    def flag(self, name: str) -> bool:
        value = self._values.get(name)
        if value is None:
            return False
        if value not in ("true", "false"):
            raise Refused(f"{name} must be true or false", name)
        return value == "true"

    def words(self, name: str, known: frozenset[str]) -> frozenset[str]:
        """A comma list of known words; empty if nothing was said."""
        value = self._values.get(name)
        if value is None:
            return frozenset()
        words = frozenset(word.strip() for word in value.split(","))
        if not words <= known:
            raise Refused(f"{name} must be one of {', '.join(sorted(known))}, or several with commas", name)
        return words

    def cursor(self, name: str = "cursor") -> tuple[int, int] | None:
        value = self._values.get(name)
        return None if value is None else read_cursor(value, name)


def show_cursor(place: int, stamp: int) -> str:
    """A place in a list and the stamp of its first page, as one opaque word."""
    return base64.urlsafe_b64encode(f"{place}.{stamp}".encode()).decode().rstrip("=")


def read_cursor(text: str, where: str) -> tuple[int, int]:
    refusal = Refused(f"{where} is not one that this host gave out; start again without it", where)
    if len(text) > CURSOR_CHARS_MAX or not text.isascii():
        raise refusal
    try:
        inner = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise refusal from None
    place, _, stamp = inner.partition(".")
    if not (place.isdigit() and stamp.isdigit() and len(inner) <= 40):
        raise refusal
    if int(place) > EVENT_ID_MAX or int(stamp) > EVENT_ID_MAX:
        raise refusal
    return int(place), int(stamp)


def _parse(raw: bytes, known: frozenset[str]) -> dict[str, str]:
    try:
        text = raw.decode("ascii")
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=FIELDS_MAX, errors="strict")
    except UnicodeDecodeError:
        raise Refused("the query is not percent-encoded UTF-8") from None
    except ValueError:
        raise Refused(f"the query has more than {FIELDS_MAX} parameters, or is not well formed") from None
    values: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            allowed = f"; it takes {', '.join(sorted(known))}" if known else "; it takes none"
            raise Refused(f"{name[:100]} is not a parameter of this request{allowed}", name[:100])
        if name in values:
            raise Refused(f"the parameter {name} is given twice", name)
        if not value:
            # An empty filter is more likely a mistake of a script than the wish for everything.
            raise Refused(f"the parameter {name} is empty; leave it out or give it a value", name)
        values[name] = value
    return values
