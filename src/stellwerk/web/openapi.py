"""The description of all routes: `/openapi.json`, made of what the routes say of themselves, and `/docs`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stellwerk.web.answer import Answer, json_bytes, text_answer
from stellwerk.web.auth import SAFE_METHODS
from stellwerk.web.call import Call
from stellwerk.web.docs_page import POLICY, docs_page
from stellwerk.web.params import Param
from stellwerk.web.problem import Problem
from stellwerk.web.routes import Route

TITLE = "Stellwerk"
_PART = re.compile(r"\{(\w+)\}")
_ID = {"type": "string", "minLength": 1, "maxLength": 200, "pattern": r"^[A-Za-z0-9_.\-:]+$"}

# What any route may answer, and when.
_COMMON = {
    400: "Something in the request is wrong; `where` says what.",
    401: "The token is missing or not valid.",
    403: "The token's role is not enough, or a page of another site asks.",
    405: "The path takes other methods.",
    421: "The host does not go by the name in the Host header.",
    503: "Not now: overload, a full disk or a lost store. Nothing was acknowledged.",
}
_WITH_BODY = {
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON by its Content-Type.",
}


def description_routes(routes: Sequence[Route], version: str) -> list[Route]:
    """The two routes that describe all others and themselves."""
    pages = _Pages(version)
    own = [
        Route(
            "GET",
            "/openapi.json",
            pages.json,
            role="viewer",
            about="This description, as OpenAPI.",
            answers={200: ("The description.", dict[str, Any])},
            for_browsers=True,
        ),
        Route(
            "GET",
            "/docs",
            pages.html,
            role="viewer",
            about="This description, for people.",
            media="text/html",
            answers={200: ("A page.", str)},
            for_browsers=True,
        ),
    ]
    pages.describe([*routes, *own])
    return own


class _Pages:
    """Both forms, made when they are first asked for and kept."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._routes: Sequence[Route] = ()
        self._document: dict[str, Any] | None = None

    def describe(self, routes: Sequence[Route]) -> None:
        self._routes = routes

    async def json(self, call: Call) -> Answer:
        return json_bytes(msgspec.json.encode(self._made()))

    async def html(self, call: Call) -> Answer:
        return text_answer(docs_page(self._made()).encode(), "text/html; charset=utf-8", policy=POLICY)

    def _made(self) -> dict[str, Any]:
        if self._document is None:
            self._document = document(self._routes, self._version)
        return self._document


def document(routes: Sequence[Route], version: str) -> dict[str, Any]:
    """The OpenAPI document."""
    types = [kind for route in routes for kind in _types(route)] + [Problem]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(map(_type_key, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": TITLE,
            "version": version,
            "description": "Every route but /health needs a token: `Authorization: Bearer T` or `X-Admin-Token: T`.",
        },
        "paths": paths,
        "components": {
            "schemas": dict(components),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "admin_token": {"type": "apiKey", "in": "header", "name": "X-Admin-Token"},
            },
        },
    }


def _operation(route: Route, schema_of: Mapping[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "operationId": _operation_id(route),
        "summary": route.about,
        "description": f"Needs the role {route.role}." if route.role != "open" else "Open to everyone.",
        "x-role": route.role,
        "parameters": [
            *({"name": name, "in": "path", "required": True, "schema": _ID} for name in _PART.findall(route.path)),
            *(_parameter(param, "query") for param in route.params),
            *(_parameter(param, "header") for param in route.headers),
        ],
        "responses": _responses(route, schema_of),
        "security": [] if route.role == "open" else [{"bearer": []}, {"admin_token": []}],
    }
    if route.body is not None:
        told["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema_of[_type_key(route.body)]}},
        }
    return told


def _responses(route: Route, schema_of: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for status, (about, kind) in route.answers.items():
        content: dict[str, Any] = {}
        if kind is not None:
            found_schemas = [schema_of[_type_key(one)] for one in _several(kind)]
            content[route.media] = {"schema": found_schemas[0] if len(found_schemas) == 1 else {"anyOf": found_schemas}}
            if route.streams and status == 200:
                content["text/event-stream"] = {"schema": {"type": "string"}}
        else:
            content["application/json"] = {"schema": schema_of[_type_key(Problem)]}
        found[str(status)] = {"description": about, "content": content}
    common = {**_COMMON, **(_WITH_BODY if route.method not in SAFE_METHODS else {})}
    if route.role == "open":
        common = {status: about for status, about in common.items() if status not in (401, 403)}
    problem = {"application/json": {"schema": schema_of[_type_key(Problem)]}}
    for status, about in common.items():
        found.setdefault(str(status), {"description": about, "content": problem})
    if _PART.search(route.path):
        found.setdefault("404", {"description": "There is no such thing.", "content": problem})
    return dict(sorted(found.items()))


def _parameter(param: Param, place: str) -> dict[str, Any]:
    return {
        "name": param.name,
        "in": place,
        "required": param.required,
        "description": param.about,
        "schema": dict(param.schema),
    }


def _types(route: Route) -> list[Any]:
    kinds = [one for _, kind in route.answers.values() if kind is not None for one in _several(kind)]
    return kinds if route.body is None else [*kinds, route.body]


def _several(kind: Any) -> tuple[Any, ...]:
    """An answer may be of one type or of several."""
    return kind if isinstance(kind, tuple) else (kind,)


def _type_key(kind: Any) -> str:
    return repr(kind)


def _operation_id(route: Route) -> str:
    words = re.findall(r"\w+", route.path.replace("/api/", "/"))
    return "_".join([route.method.lower(), *words])
