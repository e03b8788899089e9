"""Tokens: who may do what. Only a SHA-256 of each is kept; the secret itself is shown once, at its making.

A token reads `swk_<id>_<secret>`: the prefix lets scanners find leaked ones, the id lets us find the record.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal

import msgspec
from msgspec import Struct

from stellwerk.core.batch import Batch, DropRecord, PutRecord, Record
from stellwerk.core.errors import NotFound
from stellwerk.core.events import TokenCreated, TokenRevoked
from stellwerk.core.facts import Facts, Loaded
from stellwerk.kernel.kernel import Kernel

Role = Literal["viewer", "operator", "admin"]
RANK: dict[str, int] = {"viewer": 1, "operator": 2, "admin": 3}
TOKEN = "token"  # noqa: S105  the kind of the records, not a secret
PREFIX = "swk_"
TOKEN_CHARS_MAX = 256


class Token(Struct, frozen=True):
    """What is kept of a token."""

    id: str
    name: str
    role: Role
    sha256: str
    created_ms: int
    expires_ms: int | None = None

    @property
    def actor(self) -> str:
        return f"token:{self.id}"


class Tokens:
    """All tokens of the installation, in memory as they are in the store."""

    def __init__(self, kernel: Kernel, admin_secret: str) -> None:
        self._kernel = kernel
        self._admin = Token("admin", "admin token of this host", "admin", _sha256(admin_secret), 0)
        self._tokens: dict[str, Token] = {}
        self.last_used_ms: dict[str, int] = {}

    async def open(self) -> None:
        loaded = await self._kernel.store.load(Facts(kinds=(TOKEN,)))
        found = [msgspec.json.decode(record.body, type=Token) for record in loaded.records.values()]
        self._tokens = {token.id: token for token in found}

    def check(self, secret: str) -> Token | None:
        """The token with this secret, unless it is unknown, revoked or expired."""
        if not secret or len(secret) > TOKEN_CHARS_MAX:
            return None
        digest = _sha256(secret)
        token = self._tokens.get(_id_in(secret), self._admin)
        if not hmac.compare_digest(token.sha256, digest):
            # A token of the host's own settings may look like any other.
            if token is self._admin or not hmac.compare_digest(self._admin.sha256, digest):
                return None
            token = self._admin
        now_ms = self._kernel.env.now_ms()
        if token.expires_ms is not None and token.expires_ms <= now_ms:
            return None
        self.last_used_ms[token.id] = now_ms
        return token

    def all(self) -> list[Token]:
        return sorted(self._tokens.values(), key=lambda token: token.created_ms)

    async def create(self, name: str, role: Role, expires_ms: int | None, actor: str) -> tuple[Token, str, int]:
        """A new token, its secret, and the EventId of its making."""
        token_id = self._kernel.env.new_id()
        secret = f"{PREFIX}{token_id}_{self._kernel.env.secret()}"
        token = Token(token_id, name, role, _sha256(secret), self._kernel.env.now_ms(), expires_ms)

        def decide(_loaded: Loaded, now_ms: int) -> tuple[Batch, None]:
            record = Record(TOKEN, token_id, 1, msgspec.json.encode(token), role)
            event = TokenCreated(f"token/{token_id}", actor, now_ms, token_id, name, role)
            return Batch(records=(PutRecord(record),), events=(event,)), None

        _, event_id = await self._kernel.change(Facts(), decide)
        self._tokens[token_id] = token
        return token, secret, event_id

    async def revoke(self, token_id: str, actor: str) -> int:
        """It is worth nothing from now on."""

        def decide(loaded: Loaded, now_ms: int) -> tuple[Batch, None]:
            record = loaded.records.get((TOKEN, token_id))
            if record is None:
                raise NotFound(f"there is no token {token_id}")
            name = msgspec.json.decode(record.body, type=Token).name
            event = TokenRevoked(f"token/{token_id}", actor, now_ms, token_id, name)
            return Batch(records=(DropRecord(TOKEN, token_id, record.version),), events=(event,)), None

        _, event_id = await self._kernel.change(Facts(records=((TOKEN, token_id),)), decide)
        self._tokens.pop(token_id, None)
        return event_id


def may(token: Token, role: Role) -> bool:
    """Whether a token's role includes another. An unknown role includes nothing."""
    return RANK.get(token.role, 0) >= RANK[role]


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _id_in(secret: str) -> str:
    if not secret.startswith(PREFIX):
        return ""
    return secret[len(PREFIX) :].partition("_")[0]
