"""The application: routes given, a guarded ASGI application out. Litestar finds the route, the rest is ours.

front (Host, Origin) ──▶ Litestar (path → endpoint) ──▶ endpoint (token, role, query) ──▶ handler of a door
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from litestar import Litestar, Request, Response
from litestar.exceptions import HTTPException
from litestar.handlers import ASGIRouteHandler, HTTPRouteHandler
from litestar.types import ASGIApp, Method, Receive, Scope, Send

from stellwerk import __version__
from stellwerk.kernel.settings import ServerSettings
from stellwerk.web.answer import Answer
from stellwerk.web.auth import Hosts, TokenBook, checked_headers, token_of
from stellwerk.web.call import HEADERS_KEY, ROUTES_KEY
from stellwerk.web.openapi import description_routes
from stellwerk.web.problem import HttpRefusal, answer_for, framework_problem
from stellwerk.web.routes import Endpoint, Route


def build_app(routes: Sequence[Route], book: TokenBook, settings: ServerSettings) -> Front:
    """One application out of the routes of all doors."""
    routes = [*routes, *description_routes(routes, __version__)]
    by_path: dict[str, list[Route]] = {}
    for route in routes:
        by_path.setdefault(route.path, []).append(route)
    endpoints = [Endpoint(path, group, book) for path, group in by_path.items()]
    app = Litestar(
        route_handlers=[_handler(endpoint) for endpoint in endpoints],
        exception_handlers={Exception: _Exceptions(book)},
        openapi_config=None,  # ours is made of the routes' own words
        logging_config=None,
        debug=False,
    )
    app.state[ROUTES_KEY] = routes
    return Front(app, Hosts(settings), routes)


class Front:
    """What every request meets first, also one for a path that does not exist."""

    def __init__(self, app: ASGIApp, hosts: Hosts, routes: Sequence[Route]) -> None:
        self._app = app
        self._hosts = hosts
        self.routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = cast(dict[str, Any], scope)
        kind = request["type"]
        if kind == "http":
            try:
                request[HEADERS_KEY] = checked_headers(request["headers"], request["method"], self._hosts)
            except HttpRefusal as error:
                await answer_for(error, request["method"], request["path"])(scope, receive, send)
                return
        elif kind != "lifespan":
            return  # nothing else is spoken here; the server closes what is not answered
        await self._app(scope, receive, send)


def _handler(endpoint: Endpoint) -> ASGIRouteHandler | HTTPRouteHandler:
    """The shortest way through the framework; for paths with parts in them it has only the longer one."""
    if "{" in endpoint.path:
        return _http_handler(endpoint)

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        answer = await endpoint.answer(scope, receive)
        await answer(scope, receive, send)

    return ASGIRouteHandler(endpoint.path, name=endpoint.path, copy_scope=False)(handle)


def _http_handler(endpoint: Endpoint) -> HTTPRouteHandler:
    async def handle(request: Request[Any, Any, Any]) -> ASGIApp:
        return await endpoint.answer(request.scope, request.receive)

    # OPTIONS too, or the framework would answer it to anyone.
    methods = cast("list[Method]", [*endpoint.routes, "OPTIONS"])
    path = endpoint.path.replace("}", ":str}")
    made = HTTPRouteHandler(path, http_method=methods, name=endpoint.path, status_code=200, include_in_schema=False)
    return made(handle)


class _Exceptions:
    """Errors of the framework, in the one shape; who has no token does not learn which paths there are."""

    def __init__(self, book: TokenBook) -> None:
        self._book = book

    def __call__(self, request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
        answer = self._answer(request, error)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in answer.headers}
        media_type = headers.pop("content-type")
        return Response(answer.body, status_code=answer.status, headers=headers, media_type=media_type)

    def _answer(self, request: Request[Any, Any, Any], error: Exception) -> Answer:
        try:
            token_of(dict(request.scope["headers"]), self._book)
        except HttpRefusal as refusal:
            return answer_for(refusal, request.method, request.scope["path"])
        if isinstance(error, HTTPException) and error.status_code < 500:
            headers = error.headers or {}
            allowed = [word for word in headers.get("allow", "").split(", ") if word not in ("", "OPTIONS")]
            return framework_problem(error.status_code, {"allow": ", ".join(allowed)} if allowed else None)
        return answer_for(error, request.method, request.scope["path"])
