"""Strict JSON: no NaN, no invalid UTF-8, no half surrogate, bounded depth; every mistake names its place.

msgspec refuses what JSON does not know. What is left to us is depth, surrogates, and words for people. Of two fields
of the same name the last one counts, as everywhere: telling them apart would cost a second parser.
"""

from __future__ import annotations

import hashlib
import re
from typing import TypeVar

import msgspec

from stellwerk.core.errors import Refused

DEPTH_MAX = 64

Kind = TypeVar("Kind")

_PLACE = re.compile(r"(?P<text>.*) - at `(?P<key>key in )?\$(?P<path>[^`]*)`", re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89abAB-F]")
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_STRING = re.compile(rb'"[^"]*"')
_NOT_STRUCTURE = bytes(code for code in range(256) if code not in b'[]{}"')


def decode(decoder: msgspec.json.Decoder[Kind], data: bytes) -> Kind:
    """What the bytes say, checked against the decoder's type."""
    check_text(data)
    try:
        found = decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except msgspec.DecodeError as error:
        text = "the body is empty" if not data.strip() else f"the body is not JSON: {error}"
        raise Refused(text) from None
    except (UnicodeError, RecursionError, ValueError) as error:
        raise Refused(f"the body is not JSON: {error}") from None
    return found


def check_text(data: bytes) -> None:
    """Refuse what no decoder sees in time, or sees too late: invalid UTF-8, half surrogates, great depth."""
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise Refused(f"the body is not UTF-8 (byte {error.start})") from None
    if _SURROGATE.search(data) is not None:
        _check_surrogates(data)
    # Brackets inside of strings are counted too; only who has many is looked at closely.
    if data.count(b"[") + data.count(b"{") > DEPTH_MAX:
        if depth(data) > DEPTH_MAX:
            raise Refused(f"the body is nested more than {DEPTH_MAX} levels deep")


def depth(data: bytes) -> int:
    """How deep arrays and objects are nested."""
    if b"\\" in data:
        data = _ESCAPE.sub(b"", data)
    structure = _STRING.sub(b"", data.translate(None, _NOT_STRUCTURE))
    deepest = level = 0
    for code in structure:
        if code in b"[{":
            level += 1
            deepest = max(deepest, level)
        else:
            level -= 1
    return deepest


def digest(data: bytes) -> str:
    """A digest of what the body means: spaces and the order of fields make no difference."""
    try:
        data = msgspec.json.encode(msgspec.json.decode(data), order="sorted")
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        pass  # numbers beyond 64 bits: then the bytes themselves have to do
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def place(path: str) -> str:
    """A place as people write it: `[3].action.argv`, not `$[3].action.argv`."""
    return path.removeprefix(".").replace("[...]", "")


def _check_surrogates(data: bytes) -> None:
    try:
        msgspec.json.encode(msgspec.json.decode(data))
    except UnicodeEncodeError:
        raise Refused("the body holds half of a surrogate pair, which is no character") from None
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        pass  # the real decoder says what is wrong


def _refusal(text: str) -> Refused:
    """msgspec's words and place as ours."""
    found = _PLACE.fullmatch(text)
    if found is None:
        return Refused(text[0].lower() + text[1:])
    where = place(found["path"])
    told = found["text"]
    return Refused(f"{where}: {told[0].lower()}{told[1:]}" if where else told, where or None)
