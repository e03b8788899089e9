"""Few file descriptors, another event loop, a host that is small: the keeper stays up and says what is wrong."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys

import pytest

from tests.execution.survivors import ROOT, host_environment

pytestmark = pytest.mark.crash
HOST = shlex.join([sys.executable, str(ROOT / "tests/execution/many_commands.py")])


def outcomes(script: str) -> dict[str, int]:
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        env=host_environment(),
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    return {text: int(number) for number, text in lines}


def test_two_hundred_commands_at_once_run_although_the_keeper_may_open_only_64_files() -> None:
    assert outcomes(f"ulimit -S -n 64; exec {HOST} 200") == {"64": 200, "last": 1}


def test_a_host_without_descriptors_says_so_and_goes_on() -> None:
    found = outcomes(f"ulimit -n 64; exec {HOST} 100")
    assert found.pop("last") == 1
    assert found.pop("64") > 5
    assert [text for text in found if "no file descriptors left" not in text] == []


@pytest.mark.skipif(importlib.util.find_spec("uvloop") is None, reason="uvloop is not installed")
def test_the_link_works_on_uvloop() -> None:
    assert outcomes(f"ulimit -S -n 64; exec {HOST} 100 uvloop") == {"64": 100, "last": 1}
