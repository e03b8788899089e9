"""Tokens: made once, shown once, checked in constant shape, gone when revoked or expired."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest

from stellwerk.assemble import ADMIN_TOKEN_FILE, admin_token
from stellwerk.core.errors import NotFound, Refused
from stellwerk.core.events import TokenCreated, TokenRevoked
from stellwerk.core.facts import Facts
from stellwerk.kernel.tokens import TOKEN, Role, Token, may
from tests.kernel.rig import ACTOR, Rig, host, settings_in


async def test_a_token_is_known_by_its_secret_and_by_nothing_else(rig: Rig) -> None:
    tokens = rig.parts.tokens
    token, secret, _ = await tokens.create("ci", "operator", None, ACTOR)
    assert tokens.check(secret) == token
    assert secret.startswith(f"swk_{token.id}_")
    parts = (token.id, f"swk_{token.id}_", "swk_", "swk__")
    for wrong in ("", "x", "ü" * 10, secret[:-1], secret + "x", secret.upper(), *parts):
        assert tokens.check(wrong) is None
    assert tokens.check("\ud800" * 5) is None
    assert tokens.check("x" * 100_000) is None


async def test_only_the_digest_of_a_secret_is_kept(rig: Rig, tmp_path: Path) -> None:
    token, secret, _ = await rig.parts.tokens.create("ci", "viewer", None, ACTOR)
    assert token.sha256 == hashlib.sha256(secret.encode()).hexdigest()
    (record,) = (await rig.store.load(Facts(kinds=(TOKEN,)))).records.values()
    tail = secret.rpartition("_")[2].encode()
    assert tail not in record.body
    for path in (tmp_path / "data").rglob("*"):
        if path.is_file():
            assert tail not in path.read_bytes(), path


async def test_secrets_have_256_bits_and_differ(rig: Rig) -> None:
    secrets = {(await rig.parts.tokens.create("t", "viewer", None, ACTOR))[1] for _ in range(10)}
    assert len(secrets) == 10
    assert all(len(secret.split("_", 2)[2]) == 43 for secret in secrets)


async def test_an_expired_token_is_worth_nothing(rig: Rig) -> None:
    now_ms = rig.parts.env.now_ms()
    _, late, _ = await rig.parts.tokens.create("late", "admin", now_ms, ACTOR)
    _, good, _ = await rig.parts.tokens.create("good", "admin", now_ms + 3_600_000, ACTOR)
    assert rig.parts.tokens.check(late) is None
    assert rig.parts.tokens.check(good) is not None


async def test_a_revoked_token_is_worth_nothing_from_then_on(rig: Rig) -> None:
    token, secret, _ = await rig.parts.tokens.create("ci", "operator", None, ACTOR)
    await rig.parts.tokens.revoke(token.id, ACTOR)
    assert rig.parts.tokens.check(secret) is None
    assert rig.parts.tokens.all() == []
    with pytest.raises(NotFound):
        await rig.parts.tokens.revoke(token.id, ACTOR)


async def test_tokens_outlive_a_restart_and_so_does_a_revocation(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    async with host(settings) as rig:
        kept, secret, _ = await rig.parts.tokens.create("ci", "operator", None, ACTOR)
        gone, lost, _ = await rig.parts.tokens.create("old", "operator", None, ACTOR)
        await rig.parts.tokens.revoke(gone.id, ACTOR)
    async with host(settings) as rig:
        assert rig.parts.tokens.check(secret) == kept
        assert rig.parts.tokens.check(lost) is None


async def test_the_making_and_the_end_of_a_token_are_in_the_journal_without_its_secret(rig: Rig) -> None:
    token, secret, event_id = await rig.parts.tokens.create("ci", "operator", None, ACTOR)
    await rig.parts.tokens.revoke(token.id, "token:admin")
    made, ended = [event for event in await rig.journal() if isinstance(event, TokenCreated | TokenRevoked)]
    assert isinstance(made, TokenCreated)
    assert (made.token, made.name, made.role, made.actor) == (token.id, "ci", "operator", ACTOR)
    assert (ended.token, ended.actor) == (token.id, "token:admin")
    assert (await rig.stamped())[0].event_id == event_id
    assert secret.rpartition("_")[2] not in repr(await rig.journal())


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        ("viewer", {"viewer"}),
        ("operator", {"viewer", "operator"}),
        ("admin", {"viewer", "operator", "admin"}),
        ("god", set()),
    ],
)
def test_a_role_includes_those_below_it_and_an_unknown_one_none(role: str, allowed: set[str]) -> None:
    token = Token("id", "name", role, "", 0)  # type: ignore[arg-type]
    roles: tuple[Role, ...] = ("viewer", "operator", "admin")
    assert {wanted for wanted in roles if may(token, wanted)} == allowed


async def test_the_admin_token_lies_in_a_file_for_its_owner_only(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "data" / ADMIN_TOKEN_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    token = rig.parts.tokens.check(path.read_text().strip())
    assert token is not None
    assert (token.id, token.role) == ("admin", "admin")


def test_the_admin_token_is_made_once(tmp_path: Path) -> None:
    first = admin_token(tmp_path)
    assert admin_token(tmp_path) == first
    assert first.startswith("swk_admin_")
    assert not list(tmp_path.glob("*.new"))
    (tmp_path / ADMIN_TOKEN_FILE).write_text("")
    assert admin_token(tmp_path) not in ("", first)


def test_a_token_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / ADMIN_TOKEN_FILE).write_bytes(b"\xff\xfe")
    with pytest.raises(Refused):
        admin_token(tmp_path)


async def test_when_a_token_was_last_used_is_known(rig: Rig) -> None:
    token, secret, _ = await rig.parts.tokens.create("ci", "viewer", None, ACTOR)
    assert token.id not in rig.parts.tokens.last_used_ms
    rig.parts.tokens.check(secret)
    assert rig.parts.tokens.last_used_ms[token.id] >= token.created_ms
