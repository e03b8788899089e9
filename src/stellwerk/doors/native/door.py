"""All routes of the native door."""

from __future__ import annotations

from stellwerk.doors.native.events import Events
from stellwerk.doors.native.gates import Gates
from stellwerk.doors.native.logs import Logs
from stellwerk.doors.native.run_changes import RunChanges
from stellwerk.doors.native.runs import Runs
from stellwerk.doors.native.system import Health, System
from stellwerk.doors.native.tokens import TokenRoutes
from stellwerk.kernel.kernel import Kernel
from stellwerk.kernel.settings import Settings
from stellwerk.kernel.tokens import Tokens
from stellwerk.web.routes import Route
from stellwerk.web.waiting import Stop


def native_routes(kernel: Kernel, tokens: Tokens, settings: Settings, health: Health, stop: Stop) -> list[Route]:
    """The native door over one host. `stop` is set when the host stops: then who waits is answered."""
    return [
        *Runs(kernel, settings).routes(),
        *RunChanges(kernel).routes(),
        *Logs(kernel, stop).routes(),
        *Events(kernel.feed, stop).routes(),
        *Gates(kernel).routes(),
        *TokenRoutes(kernel, tokens).routes(),
        *System(kernel, health).routes(),
    ]
