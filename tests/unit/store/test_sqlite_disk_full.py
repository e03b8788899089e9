"""A full disk: refused before the ack, nothing acknowledged is lost, and no restart is needed when there is room."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
UNSHARE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]


def can_mount(folder: Path) -> bool:
    """Whether a small disk of our own can be had here."""
    command = [*UNSHARE, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except OSError:
        return False


def tell(kind: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.unit.store.disk_full_child", kind, str(folder)]
    if kind == "tmpfs":
        command = [*UNSHARE, *command]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module", params=["tmpfs", "limit"])
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("disk")
    # Where nobody may mount, the limit on file sizes stands in for the small disk as well: writes really fail.
    kind = request.param if request.param == "limit" or can_mount(folder) else "limit"
    return {"kind": kind, **tell(kind, folder)}


def test_a_full_disk_refuses_before_the_ack(told: dict[str, Any]) -> None:
    assert told["acknowledged"] > 20
    assert "nothing was acknowledged" in told["refusals"][0]


def test_what_was_acknowledged_is_there_and_nothing_else(told: dict[str, Any]) -> None:
    assert told["kept_exactly"]


def test_the_ballast_is_thrown_off(told: dict[str, Any]) -> None:
    assert told["had_ballast"]
    assert told["threw_ballast_off"]


def test_new_runs_are_refused_while_the_disk_is_low(told: dict[str, Any]) -> None:
    assert "no new runs are taken" in told["refusals"][-1] or told["kind"] == "limit"


def test_a_run_can_be_ended_in_the_room_of_the_ballast(told: dict[str, Any]) -> None:
    # A limit on file sizes is not lifted by deleting another file: there the end is refused too, and said so.
    assert told["cancelled"] == "yes" or told["kind"] == "limit"


def test_all_is_well_without_a_restart_when_there_is_room(told: dict[str, Any]) -> None:
    assert told["still"] is None
    assert told["later"] == 50
    assert told["has_ballast"]
    assert told["after_exactly"]
    assert told["check"] == "ok"
