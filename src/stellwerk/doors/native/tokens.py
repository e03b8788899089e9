"""Tokens over HTTP: make, list, revoke. The secret is in the answer to its making and nowhere else."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Struct, UnsetType

from stellwerk.core.errors import Refused
from stellwerk.core.names import NAME_CHARS_MAX, check_run_id, check_text
from stellwerk.core.times import parse_time, show_time
from stellwerk.doors.native.run_wish import Moment
from stellwerk.kernel.kernel import Kernel
from stellwerk.kernel.tokens import Role, Token, Tokens
from stellwerk.web.answer import Answer, json_answer
from stellwerk.web.call import Call
from stellwerk.web.params import text_param
from stellwerk.web.routes import Route


class TokenWish(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    role: Role
    expires: Moment | UnsetType = UNSET


class TokenView(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`token` is the secret: shown once, when it is made."""

    id: str
    name: str
    role: str
    created_at: str
    expires_at: str | UnsetType = UNSET
    last_used_at: str | UnsetType = UNSET
    token: str | UnsetType = UNSET
    event_id: int | UnsetType = UNSET


class TokensView(Struct, frozen=True):
    tokens: list[TokenView]
    event_id: int


class TokenGone(Struct, frozen=True):
    event_id: int


_wishes = msgspec.json.Decoder(TokenWish)


class TokenRoutes:
    """The handlers, over one book of tokens."""

    def __init__(self, kernel: Kernel, tokens: Tokens) -> None:
        self._kernel = kernel
        self._tokens = tokens

    def routes(self) -> list[Route]:
        gone = {200: ("It is worth nothing from now on.", TokenGone), 404: ("There is no such token.", None)}
        return [
            Route(
                "POST",
                "/api/tokens",
                self.create,
                role="admin",
                about="Make a token. Its secret is shown in this answer and never again.",
                body=TokenWish,
                answers={201: ("The token with its secret.", TokenView)},
            ),
            Route(
                "GET",
                "/api/tokens",
                self.list,
                role="admin",
                about="List the tokens, without their secrets.",
                answers={200: ("The tokens.", TokensView)},
            ),
            Route(
                "DELETE",
                "/api/tokens",
                self.revoke,
                role="admin",
                about="Revoke a token, named by the parameter `id`.",
                params=(text_param("id", "Which token.", required=True, chars_max=200),),
                answers=gone,
            ),
            Route(
                "DELETE",
                "/api/tokens/{id}",
                self.revoke_by_path,
                role="admin",
                about="Revoke a token, named by the path.",
                answers=gone,
            ),
        ]

    async def create(self, call: Call) -> Answer:
        wish = await call.json(_wishes)
        check_text(wish.name, "name", NAME_CHARS_MAX)
        expires_ms = None if wish.expires is UNSET else parse_time(wish.expires, "expires")
        if expires_ms is not None and expires_ms <= self._kernel.env.now_ms():
            raise Refused("expires lies in the past", "expires")
        token, secret, event_id = await self._tokens.create(wish.name, wish.role, expires_ms, call.actor)
        return json_answer(self._view(token, secret=secret, event_id=event_id), 201)

    async def list(self, call: Call) -> Answer:
        stamp = self._kernel.feed.last
        return json_answer(TokensView([self._view(token) for token in self._tokens.all()], stamp))

    async def revoke(self, call: Call) -> Answer:
        return await self._revoke(call.query.need("id"), call)

    async def revoke_by_path(self, call: Call) -> Answer:
        return await self._revoke(call.path("id"), call)

    async def _revoke(self, token_id: str, call: Call) -> Answer:
        return json_answer(TokenGone(await self._tokens.revoke(check_run_id(token_id), call.actor)))

    def _view(self, token: Token, secret: str | None = None, event_id: int | None = None) -> TokenView:
        used_ms = self._tokens.last_used_ms.get(token.id)
        return TokenView(
            id=token.id,
            name=token.name,
            role=token.role,
            created_at=show_time(token.created_ms),
            expires_at=UNSET if token.expires_ms is None else show_time(token.expires_ms),
            last_used_at=UNSET if used_ms is None else show_time(used_ms),
            token=UNSET if secret is None else secret,
            event_id=UNSET if event_id is None else event_id,
        )
