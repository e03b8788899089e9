"""Text from outside made harmless: a log line or a name must not be able to drive the user's terminal."""

from __future__ import annotations

import json
import re

# Control characters, and the ones that reorder or hide the text around them. A tab may stay.
_DANGEROUS = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_BREAKS_A_CELL = re.compile(r"\s+")
# What JSON leaves unescaped, although terminals act on it or encodings lack it.
_LOOSE_IN_JSON = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def neutral(text: str) -> str:
    """The text with control characters as pictures (ESC is ␛) or by number; tabs stay."""
    return _DANGEROUS.sub(_picture, text)


def one_line(text: str) -> str:
    """The text for a cell of a table: any white space is one blank, nothing else can break the row."""
    return neutral(_BREAKS_A_CELL.sub(" ", text).strip())


def as_json(document: object) -> str:
    """One line of JSON; what a terminal would act on is escaped, which changes nothing for a reader of JSON."""
    text = json.dumps(document, ensure_ascii=False, separators=(", ", ": "))
    return _LOOSE_IN_JSON.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def _picture(found: re.Match[str]) -> str:
    code = ord(found.group())
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
