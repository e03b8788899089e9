"""Examples in the documentation, as a reader would type them: found in a page, run against a real host, compared.

A block of `console` below the mark `<!-- tested -->` is run. What differs from one time to the next (ids, times,
durations) is compared by its shape; `…` stands for the rest of a line.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "http://127.0.0.1:8765"  # as the pages have it
START_S, PAGE_S, STOP_S = 60, 120, 60  # a loaded machine is slow; the usual is a second

_BLOCK = re.compile(r"^<!-- tested -->\n```console\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_SHAPES = (
    (re.compile(r"\b[0-9a-f]{26}\b"), "<id>"),
    (re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"), "<time>"),
    (re.compile(r"\b\d{16}\b"), "<event>"),
    (re.compile(r"\b\d+(?:ms|s|m|h|d)\b(?: \d+(?:s|m|h)\b)?"), "<duration>"),
    (re.compile(r"[ \t]+"), " "),
)


class Step(NamedTuple):
    """A command and what it should print."""

    command: str
    expected: list[str]


def steps_in(text: str) -> list[Step]:
    """All tested steps of a page, in order."""
    steps: list[Step] = []
    for block in _BLOCK.finditer(text):
        for line in block["text"].splitlines():
            if line.startswith("$ "):
                steps.append(Step(line[2:], []))
            else:
                steps[-1].expected.append(line)
    return steps


@contextmanager
def host_in(folder: Path, *arguments: str) -> Iterator[dict[str, str]]:
    """A host that was started in a folder; hands out the environment in which its commands are to be run."""
    shims = folder.parent / "shims"
    shims.mkdir()
    shim = shims / "stellwerk"
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m stellwerk "$@"\n')
    shim.chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("STELLWERK_")}
    environ["PATH"] = f"{shims}:{environ.get('PATH', os.defpath)}"
    environ["PYTHONPATH"] = str(ROOT / "src")
    with (folder.parent / "host.log").open("wb") as log:
        process = subprocess.Popen(
            ["stellwerk", "up", "--port", "0", *arguments],
            cwd=folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            executable=str(shim),
        )
    try:
        assert process.stdout is not None
        greeting = process.stdout.readline()
        found = re.search(r"http://\S+", greeting)
        assert found is not None, (folder.parent / "host.log").read_text()
        yield {**environ, "STELLWERK_URL": found[0]}
    finally:
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=STOP_S)
    assert process.returncode == 0, rest


def run_steps(steps: list[Step], folder: Path, environ: dict[str, str]) -> list[str]:
    """What each step printed, all in one shell."""
    mark = secrets.token_hex(8)
    script = []
    for step in steps:
        # Printing the mark must not hide the exit code of the command before it.
        script += [f"__code=$?; printf '\\n{mark}\\n'; (exit $__code)", step.command]
    text = "\n".join(script).replace(ADDRESS, environ["STELLWERK_URL"])
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=PAGE_S,
    )
    return [part.strip("\n") for part in done.stdout.split(f"\n{mark}\n")[1:]]


def is_as_expected(printed: str, expected: list[str]) -> bool:
    """Whether the output has the shape that the page shows."""
    lines = printed.splitlines()
    return len(lines) == len(expected) and all(map(_fits, lines, expected))


def _fits(line: str, wanted: str) -> bool:
    pattern = ".*".join(re.escape(part) for part in _shape(wanted).split("…"))
    return re.fullmatch(pattern, _shape(line)) is not None


def _shape(line: str) -> str:
    for pattern, name in _SHAPES:
        line = pattern.sub(name, line)
    return line.strip()
