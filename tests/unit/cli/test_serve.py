"""`stellwerk up`: which flags reach the settings, and what a refusal at the start exits with.

The host itself is stood in for: these tests are about the command. Real hosts are started elsewhere.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stellwerk.core.errors import Refused, Unavailable
from tests.unit.cli.conftest import CommandLine

StandIn = Callable[..., list[Any]]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    def install(*, loading: Exception | None = None, running: Exception | None = None, code: int = 0) -> list[Any]:
        seen: list[Any] = []

        def load_settings(config: Any, environ: Any, flags: Any) -> object:
            seen.append((config, flags))
            if loading is not None:
                raise loading
            return "settings"

        def run_host(settings: object) -> int:
            assert settings == "settings"
            if running is not None:
                raise running
            return code

        for name, function in (("kernel.settings", load_settings), ("assemble", run_host)):
            module = ModuleType(f"stellwerk.{name}")
            setattr(module, function.__name__, function)
            monkeypatch.setitem(sys.modules, f"stellwerk.{name}", module)
        return seen

    return install


def test_only_flags_that_were_given_are_handed_on(nowhere: CommandLine, stand_in: StandIn) -> None:
    seen = stand_in()
    assert nowhere("up").exit_code == 0
    flags = "--config c.yml --data d --store sqlite:x --host ::1 --port 0 --workers 4"
    assert nowhere("up", *flags.split()).exit_code == 0
    assert seen == [
        (None, {}),
        (Path("c.yml"), {"data": Path("d"), "store": "sqlite:x", "host": "::1", "port": 0, "workers": 4}),
    ]


def test_the_hosts_exit_code_is_ours(nowhere: CommandLine, stand_in: StandIn) -> None:
    stand_in(code=1)
    assert nowhere("up").exit_code == 1


@pytest.mark.parametrize(
    ("where", "error", "exit_code"),
    [
        ("loading", Refused("stellwerk.yml:3:7: workers.lease must be at least 1s"), 2),
        ("loading", Refused("there is no file c.yml"), 2),
        ("running", Refused("stellwerk.yml:3:7: no such queue"), 2),
        ("running", Refused("another host uses the store in .stellwerk; stop it first"), 1),
        ("running", Unavailable("the disk is full"), 1),
    ],
)
def test_a_refusal_at_the_start_is_said_and_has_its_exit_code(
    nowhere: CommandLine, stand_in: StandIn, where: str, error: Exception, exit_code: int
) -> None:
    stand_in(**{where: error})
    ran = nowhere("up")
    assert ran.exit_code == exit_code
    # What names a line of a file stands first, for editors; anything else says who speaks.
    assert ran.err == (f"{error}\n" if ":3:7:" in str(error) else f"stellwerk: {error}\n")
