"""Every command explains itself."""

import pytest

from stellwerk.cli.main import COMMANDS
from tests.unit.cli.conftest import CommandLine


def test_help_names_every_command_with_its_purpose(nowhere: CommandLine) -> None:
    out = nowhere("--help").out
    for name, lazy in COMMANDS.items():
        assert f"  {name} " in out
        assert lazy.purpose in out


@pytest.mark.parametrize("name", [*(name for name in COMMANDS if name != "store"), "store adopt"])
def test_a_command_explains_itself_with_its_purpose_and_an_example(nowhere: CommandLine, name: str) -> None:
    ran = nowhere(*name.split(), "--help")
    assert ran.exit_code == 0
    assert f"stellwerk {name}" in ran.out.partition("Example")[2]
    if name in COMMANDS:
        assert COMMANDS[name].purpose in ran.out


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in {"store", "up"}])
def test_every_command_that_asks_a_host_can_answer_in_json(nowhere: CommandLine, name: str) -> None:
    out = nowhere(name, "-h").out
    for option in ("--json", "--url", "--token-file", "--config", "--data"):
        assert option in out
