"""Errors as answers: one shape, `{"message", "where"?, "request_id"}`, whoever refused.

What the caller did wrong is said in words. What we did wrong is said to the log, under the request id that the caller
gets; a client never sees a trace.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from http import HTTPStatus

import msgspec

from stellwerk.core.errors import Clash, NoRight, NotFound, Refused, Unavailable
from stellwerk.web.answer import Answer, json_answer

log = logging.getLogger("stellwerk.web")

TEXT_CHARS_MAX = 2_000  # a message may quote what was sent; more of it helps nobody
PATH_CHARS_MAX = 500


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """The one error shape."""

    message: str
    request_id: str
    where: str | msgspec.UnsetType = msgspec.UNSET


class HttpRefusal(Exception):
    """A refusal that only HTTP knows: no token, wrong content type, too large."""

    def __init__(
        self, status: int, message: str, *, where: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.where = where
        self.headers = headers or {}


class ClientGone(Exception):
    """The connection was closed before the request was complete: there is nobody to answer."""


def problem(status: int, message: str, where: str | None = None, headers: Mapping[str, str] | None = None) -> Answer:
    """An error as an answer."""
    return _answer(status, message, where, headers or {}, new_request_id())


def answer_for(error: Exception, method: str, path: str) -> Answer:
    """The answer to a request that ended in this error."""
    if isinstance(error, HttpRefusal):
        return problem(error.status, error.message, error.where, error.headers)
    if isinstance(error, Refused):
        return problem(_status_of(error), error.message, error.where)
    if isinstance(error, Unavailable):
        return problem(503, error.message, headers={"retry-after": str(max(1, error.retry_after_s))})
    return _unexpected(error, method, path)


def framework_problem(status: int, headers: Mapping[str, str] | None = None) -> Answer:
    """An error of the framework, in our words: its own may name its inside."""
    texts = {404: "there is nothing at this path; /openapi.json lists what there is", 400: "this is no valid request"}
    return problem(status, texts.get(status, HTTPStatus(status).phrase.lower()), headers=headers)


def _status_of(error: Refused) -> int:
    if isinstance(error, NotFound):
        return 404
    if isinstance(error, Clash):
        return 409
    if isinstance(error, NoRight):
        return 403
    return 400


def _unexpected(error: Exception, method: str, path: str) -> Answer:
    request_id = new_request_id()
    # `more` are fields of the JSON line that the host's log writes: escaped there, so that no line can be forged.
    more = {"request_id": request_id, "method": method[:20], "path": _clean(path)[:PATH_CHARS_MAX]}
    log.error("a request failed in a way it should not", exc_info=error, extra={"more": more})
    return _answer(500, "this is a mistake of the host; its log says more under this request id", None, {}, request_id)


def _answer(status: int, message: str, where: str | None, headers: Mapping[str, str], request_id: str) -> Answer:
    shown = Problem(
        _clean(message)[:TEXT_CHARS_MAX], request_id, msgspec.UNSET if where is None else _clean(where)[:PATH_CHARS_MAX]
    )
    more = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items())
    return json_answer(shown, status, (*more, (b"x-request-id", request_id.encode())))


def _clean(text: str) -> str:
    """Text that can be encoded, whatever was in it."""
    return text.encode("utf-8", "replace").decode()


def new_request_id() -> str:
    return secrets.token_hex(8)
