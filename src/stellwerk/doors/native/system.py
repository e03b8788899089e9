"""The host itself over HTTP: health, metrics, and the adoption of its store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from stellwerk.doors.native.metrics import CONTENT_TYPE, Metrics
from stellwerk.kernel.kernel import Kernel
from stellwerk.web.answer import Answer, json_answer, text_answer
from stellwerk.web.call import Call
from stellwerk.web.routes import Route

WORKING = frozenset({"ok", "degraded"})
RETRY_AFTER = (b"retry-after", b"5")

Health = Callable[[], Mapping[str, Any]]


class HealthView(Struct, frozen=True):
    """`durability` is the class that probing found; `degraded` says in words what is not as it should be."""

    state: str
    store: Any
    durability: str
    degraded: list[Any]


class AdoptedView(Struct, frozen=True):
    epoch: str
    event_id: int


class System:
    """The handlers, over one host."""

    def __init__(self, kernel: Kernel, health: Health) -> None:
        self._kernel = kernel
        self._health = health
        self._metrics = Metrics(kernel)

    def routes(self) -> list[Route]:
        return [
            Route(
                "GET",
                "/health",
                self.health,
                role="open",
                about="How the host is. Needs no token.",
                answers={200: ("It works, perhaps degraded.", HealthView), 503: ("It cannot work now.", HealthView)},
            ),
            Route(
                "GET",
                "/metrics",
                self.metrics,
                role="viewer",
                about="Numbers for Prometheus.",
                media="text/plain",
                answers={200: ("Metrics in the text format.", str)},
            ),
            Route(
                "POST",
                "/api/store/adopt",
                self.adopt,
                role="admin",
                about="Confirm a store that the host does not know, such as a restored backup.",
                answers={200: ("It is adopted.", AdoptedView), 409: ("There is nothing to adopt.", None)},
            ),
        ]

    async def health(self, call: Call) -> Answer:
        shown = self._health()
        if shown.get("state") in WORKING:
            return json_answer(shown)
        return json_answer(shown, 503, (RETRY_AFTER,))

    async def metrics(self, call: Call) -> Answer:
        return text_answer(await self._metrics.text(call.routes), CONTENT_TYPE)

    async def adopt(self, call: Call) -> Answer:
        epoch, event_id = await self._kernel.adopt(call.actor)
        return json_answer(AdoptedView(epoch, event_id))
