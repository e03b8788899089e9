"""Routes: a path, a method, the role that it needs, what it does, and how it is described.

A route without a role cannot be made, so none can be open by oversight. The description is not decoration: unknown
query parameters are refused by it, and `/openapi.json` is made of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from litestar.types import Receive, Scope

from stellwerk.kernel.tokens import Token
from stellwerk.web.answer import NO_ANSWER, Answer
from stellwerk.web.auth import OPEN_PATHS, ROLES, SAFE_METHODS, RouteRole, TokenBook, need_role, token_of
from stellwerk.web.call import HEADERS_KEY, Call
from stellwerk.web.params import Param, Query
from stellwerk.web.problem import ClientGone, HttpRefusal, answer_for

Handle = Callable[[Call], Awaitable[Answer]]
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


class Route:
    """`path` has its parts in braces: `/api/runs/{id}`. `answers`: what each status means, and its type (or a tuple of
    types) if it is not an error."""

    def __init__(
        self,
        method: str,
        path: str,
        handle: Handle,
        *,
        role: RouteRole,
        about: str,
        answers: Mapping[int, tuple[str, Any]],
        params: Sequence[Param] = (),
        headers: Sequence[Param] = (),
        body: Any = None,
        streams: bool = False,
        media: str = "application/json",
        body_optional: bool = False,
        for_browsers: bool = False,
    ) -> None:
        if role not in ROLES:
            raise ValueError(f"{method} {path}: {role!r} is no role; a route must say who may use it")
        if role == "open" and path not in OPEN_PATHS:
            raise ValueError(f"{method} {path} must not be open; only {', '.join(OPEN_PATHS)} may")
        if method not in METHODS:
            raise ValueError(f"{method} {path}: no such method")
        if not about or not answers:
            raise ValueError(f"{method} {path}: a route must say what it does and answers")
        self.method = method
        self.path = path
        self.handle = handle
        self.role = role
        self.about = about
        self.answers = answers
        self.params = params
        self.headers = headers
        self.body = body
        self.streams = streams
        self.media = media
        self.body_optional = body_optional
        self.for_browsers = for_browsers
        self.known_params = frozenset(param.name for param in params)
        self.answered: Counter[int] = Counter()  # by status, for /metrics


class Endpoint:
    """All routes of one path: finds the method, proves the right, calls, and turns errors into answers."""

    def __init__(self, path: str, routes: Sequence[Route], book: TokenBook) -> None:
        self.path = path
        self.routes = {route.method: route for route in routes}
        if len(self.routes) != len(routes):
            raise ValueError(f"{path} has two routes for one method")
        self._book = book
        self._is_open = all(route.role == "open" for route in routes)
        self._for_browsers = all(route.for_browsers for route in routes)
        self._allow = ", ".join(self.routes)

    async def answer(self, scope: Scope, receive: Receive) -> Answer:
        """The answer to a request, whatever it is."""
        method: str = scope["method"]  # type: ignore[typeddict-item]  # only HTTP comes here
        route = self.routes.get(method)
        try:
            answer = await self._answer(route, scope, receive)
        except ClientGone:
            return NO_ANSWER
        except Exception as error:
            answer = answer_for(error, method, scope["path"])
        if route is not None:
            route.answered[answer.status] += 1
        return answer

    async def _answer(self, route: Route | None, scope: Scope, receive: Receive) -> Answer:
        headers: dict[bytes, bytes] = scope[HEADERS_KEY]  # type: ignore[literal-required]  # left by the front
        token: Token | None = None
        if not self._is_open:
            token = token_of(headers, self._book, for_browsers=self._for_browsers)
        if route is None:
            raise HttpRefusal(405, f"this path takes {self._allow}", headers={"allow": self._allow})
        if route.role != "open":
            assert token is not None
            need_role(token, route.role)
        query = Query(scope["query_string"], route.known_params)
        call = Call(scope, receive, headers, token, query)
        if route.body is None and route.method not in SAFE_METHODS:
            await call.no_body()
        return await route.handle(call)
