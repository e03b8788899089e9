"""The description against a real server: whatever fits or breaks the schema, no 5xx and no status it does not name."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from stellwerk.web.serve import HttpServer
from tests.contract.native.rig import ADMIN, RUN, Host, a_host, at
from tests.contract.native.test_rights import NEEDED

EXAMPLES = 15  # for each route and each kind of data; the whole stays far under 40 s
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
HEADERS = {"Authorization": f"Bearer {ADMIN}", "Accept": "application/json"}


class Server:
    """A host behind a real server, on a loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._folder = tempfile.TemporaryDirectory()
        self.host, self.url = self._wait(self._open())

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _open(self) -> tuple[Host, str]:
        self._opened = a_host(Path(self._folder.name), server=at("127.0.0.1"))
        host = await self._opened.__aenter__()
        await host.ask("POST", "/api/runs", [{**RUN, "name": f"n{n}"} for n in range(5)])
        self._http = HttpServer(host.app, host.settings.server)
        bound = socket.create_server(("127.0.0.1", 0))
        return host, f"http://127.0.0.1:{await self._http.start([bound])}"

    def close(self) -> None:
        async def closed() -> None:
            await self._http.stop()
            await self._opened.__aexit__(None, None, None)

        self._wait(closed())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        self._folder.cleanup()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.fixture(scope="module")
def description(server: Server) -> dict[str, Any]:
    request = urllib.request.Request(f"{server.url}/openapi.json", headers=HEADERS)
    with urllib.request.urlopen(request) as reply:
        return dict(json.load(reply))


def test_every_route_is_described_with_its_role_and_errors(server: Server, description: dict[str, Any]) -> None:
    assert description["openapi"].startswith("3.1")
    for route in server.host.app.routes:
        operation = description["paths"][route.path][route.method.lower()]
        assert operation["x-role"] == route.role
        assert {"400", "421"} <= set(operation["responses"])
        assert (operation["security"] == []) == (route.path == "/health")
    described = {(method.upper(), path) for path, methods in description["paths"].items() for method in methods}
    assert described == {(route.method, route.path) for route in server.host.app.routes}


def test_names_of_operations_differ(description: dict[str, Any]) -> None:
    names = [operation["operationId"] for methods in description["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["fits", "breaks"])
@pytest.mark.parametrize(("method", "path"), NEEDED, ids=[f"{method} {path}" for method, path in NEEDED])
def test_no_data_leads_to_an_answer_that_is_not_described(
    server: Server, description: dict[str, Any], method: str, path: str, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_dict(description)
    operation = schema[path][method]
    if mode is GenerationMode.NEGATIVE and not (operation.query or operation.body or operation.path_parameters):
        return  # there is nothing to break
    run_ids = st.sampled_from([None, *server.host.store._runs])

    @settings(
        max_examples=EXAMPLES,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    @given(case=operation.as_strategy(generation_mode=mode), run_id=run_ids)
    def check(case: Case, run_id: str | None) -> None:
        if isinstance(case.query, dict):
            case.query.pop("timeout", None)  # waiting has tests of its own
        if run_id is not None and mode is GenerationMode.POSITIVE and "id" in (case.path_parameters or {}):
            case.path_parameters["id"] = run_id
        case.call_and_validate(base_url=server.url, checks=CHECKS, headers=HEADERS, timeout=20)

    check()
