"""Text from outside made harmless."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stellwerk.cli.plain import as_json, neutral, one_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", "␛[2J"),
        ("a\tb", "a\tb"),
        ("a\rb\n", "a␍b␊"),
        ("\x7f\x9b31m", "␡\\x9b31m"),
        ("a\u202eb", "a\\u202eb"),
        ("grüße 日本 🚂", "grüße 日本 🚂"),
        ("\ud800", "\\ud800"),
    ],
)
def test_control_characters_are_shown_not_obeyed(text: str, shown: str) -> None:
    assert neutral(text) == shown


@given(st.text(st.characters()))
def test_nothing_that_drives_a_terminal_comes_through(text: str) -> None:
    shown = neutral(text)
    assert not any(ord(char) < 0x20 and char != "\t" for char in shown)
    assert not any(0x7F <= ord(char) < 0xA0 for char in shown)


@given(st.text(st.characters()))
def test_a_cell_is_one_line_without_blanks_at_its_ends(text: str) -> None:
    cell = one_line(text)
    assert len(cell.splitlines()) <= 1
    assert cell == cell.strip()


@given(st.text(st.characters()))
def test_json_keeps_every_character_and_can_be_printed(text: str) -> None:
    shown = as_json({"text": text})
    assert json.loads(shown) == {"text": text}
    shown.encode()
    assert not any(ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 for char in shown)
