"""Names: what may stand in one, what is refused at the door, and how the keys of gates are spelled."""

import string
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stellwerk.core.errors import Refused
from stellwerk.core.names import (
    EVERYTHING,
    KEYS_PER_RUN_MAX,
    check_name,
    check_path,
    check_run_id,
    check_text,
    gate_key,
    run_keys,
)

NAME_CHARS = string.ascii_letters + string.digits + "_.-"
Checker = Callable[[str, str], str]

# What each kind of name allows beside letters, digits, `_`, `.` and `-`, and how long it may be.
KINDS: list[tuple[Checker, str, int]] = [
    (check_name, "", 100),
    (check_path, "/", 100),
    (check_run_id, ":", 200),
]

HOSTILE = [
    "",
    " ",
    "a b",
    " a",
    "a ",
    "a\n",
    "\na",
    "a\r\n",
    "a\t",
    "a\x00",
    "\x00",
    "a\x7f",
    "a\x85",
    "a\u2028b",
    "a;b",
    "a'b",
    'a"b',
    "a`b",
    "$(id)",
    "${HOME}",
    "a|b",
    "a&b",
    "a<b>",
    "a\\b",
    "a%2fb",
    "a%00",
    "a?b",
    "a#b",
    "a*b",
    "*",
    "[a]",
    "{a}",
    "a,b",
    "a=b",
    "a@b",
    "a+b",
    "~",
    "é",
    "straße",
    "日本",
    "а",  # Cyrillic
    "ａ",  # full width
    "٣",
    "²",
    "Ⅷ",
    "İ",
    "ſ",
    "\u200b",
    "a\u202eb",
    "e\u0301",
    "\ud800",
    "\U0001f600",
]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
@pytest.mark.parametrize("check", [kind[0] for kind in KINDS], ids=lambda check: check.__name__)
def test_a_hostile_name_is_refused_and_the_place_named(check: Checker, text: str) -> None:
    with pytest.raises(Refused) as refused:
        check(text, "runs[3].name")
    assert refused.value.where == "runs[3].name"
    assert refused.value.message.startswith("runs[3].name must be")


@pytest.mark.parametrize("text", ["a", "A", "0", "_", "a.b", "a-b", "-rf", "v1.2.3_final-2", NAME_CHARS])
@pytest.mark.parametrize("check", [kind[0] for kind in KINDS], ids=lambda check: check.__name__)
def test_an_ordinary_name_is_returned_as_it_is(check: Checker, text: str) -> None:
    assert check(text, "name") == text


@pytest.mark.parametrize(("check", "more", "chars_max"), KINDS, ids=[kind[0].__name__ for kind in KINDS])
def test_a_name_may_be_as_long_as_its_kind_allows_and_not_longer(check: Checker, more: str, chars_max: int) -> None:
    assert check("a" * chars_max, "name") == "a" * chars_max
    for length in (chars_max + 1, 1_000_000):
        with pytest.raises(Refused, match=f"1 to {chars_max} characters"):
            check("a" * length, "name")


@pytest.mark.parametrize(("check", "more", "chars_max"), KINDS, ids=[kind[0].__name__ for kind in KINDS])
def test_of_slash_and_colon_each_kind_allows_its_own_only(check: Checker, more: str, chars_max: int) -> None:
    for char in "/:":
        if char in more:
            assert check(f"a{char}b", "name") == f"a{char}b"
        else:
            with pytest.raises(Refused):
                check(f"a{char}b", "name")


def test_the_refusal_never_repeats_what_was_sent() -> None:
    with pytest.raises(Refused) as refused:
        check_name("<script>" * 1_000, "name")
    assert "script" not in refused.value.message


@given(st.text(max_size=20) | st.text(NAME_CHARS + "/:", max_size=20))
def test_exactly_the_texts_of_allowed_characters_and_length_pass(text: str) -> None:
    for check, more, chars_max in KINDS:
        allowed = 1 <= len(text) <= chars_max and set(text) <= set(NAME_CHARS + more)
        try:
            assert check(text, "name") == text
            passed = True
        except Refused:
            passed = False
        assert passed is allowed


# -- free text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a", " ", "a b", "straße 日本", "<b>", "x" * 20])
def test_free_text_may_hold_what_people_write(text: str) -> None:
    assert check_text(text, "label", 20) == text


@pytest.mark.parametrize("text", ["", "x" * 21, "a\nb", "a\x00", "\x1b[31m", "\x7f", "\t"])
def test_free_text_is_refused_if_it_is_empty_too_long_or_holds_control_characters(text: str) -> None:
    with pytest.raises(Refused, match="label must be 1 to 20 characters without control characters") as refused:
        check_text(text, "label", 20)
    assert refused.value.where == "label"


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "name", "wanted"),
    [(None, None, EVERYTHING), ("shop", None, "scope:shop"), ("shop", "import", "job:shop/import")],
)
def test_a_gate_stands_over_everything_a_scope_or_one_job(scope: str | None, name: str | None, wanted: str) -> None:
    assert gate_key(scope, name) == wanted


def test_a_run_carries_the_keys_of_everything_its_queue_its_scope_and_its_job() -> None:
    assert run_keys("default", "shop", "import", ("limit:db",)) == (
        EVERYTHING,
        "queue:default",
        "scope:shop",
        "job:shop/import",
        "limit:db",
    )


def test_a_run_has_a_bounded_number_of_keys() -> None:
    room = KEYS_PER_RUN_MAX - 4
    assert len(run_keys("default", "shop", "import", ("k",) * room)) == KEYS_PER_RUN_MAX
    with pytest.raises(Refused, match="at most 8 keys; 9 were given"):
        run_keys("default", "shop", "import", ("k",) * (room + 1))


any_name = st.text(NAME_CHARS, min_size=1, max_size=5)
any_scope = st.text(NAME_CHARS + "/", min_size=1, max_size=5)


@given(any_scope, any_name, any_scope, any_name)
def test_two_jobs_never_share_a_gate_unless_they_are_the_same(
    scope: str, name: str, other_scope: str, other_name: str
) -> None:
    same = (scope, name) == (other_scope, other_name)
    assert (gate_key(scope, name) == gate_key(other_scope, other_name)) is same
    assert (gate_key(scope, name) in run_keys("default", other_scope, other_name)) is same
    assert (gate_key(scope, None) in run_keys("default", other_scope, other_name)) is (scope == other_scope)
