"""Who may import whom, read from the imports themselves.

    cli, sdk ──▶ assemble ──▶ doors ──▶ definitions ──▶ kernel ──▶ store │ dispatch │ execute ──▶ core
                                └────▶ web

An import may go right, never left, and never sideways between store, dispatch and execute, nor between two
doors. A door sees the kernel and the web tools, never a store. The core sees the standard library and
msgspec, and of the standard library nothing that reads a clock, a file, a socket or a random number.

One module stands apart from its folder: `sdk/inside.py` is what a user's function sees while it runs, so the
executor hands it in. It lies right of the executor and sees the core alone.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "stellwerk"

MAY_IMPORT: dict[str, frozenset[str]] = {
    "core": frozenset(),
    "store": frozenset({"core"}),
    "dispatch": frozenset({"core"}),
    "execute": frozenset({"sdk.inside", "core"}),
    "sdk.inside": frozenset({"core"}),
    "kernel": frozenset({"store", "dispatch", "execute", "core"}),
    # The web tools check tokens and read parameters, so they see the kernel; they know no door.
    "web": frozenset({"kernel", "core"}),
    "definitions": frozenset({"kernel", "core"}),
    "doors": frozenset({"web", "definitions", "kernel", "core"}),
    "assemble": frozenset(
        {"doors", "web", "definitions", "kernel", "store", "dispatch", "execute", "core"},
    ),
    "sdk": frozenset(
        {
            "sdk.inside",
            "assemble",
            "doors",
            "web",
            "definitions",
            "kernel",
            "store",
            "dispatch",
            "execute",
            "core",
        },
    ),
    # The command line is a client too, so it may use the client of the sdk; never the other way round.
    "cli": frozenset(
        {"sdk", "assemble", "doors", "web", "definitions", "kernel", "store", "dispatch", "execute", "core"},
    ),
    # `stellwerk/__init__.py` hands out the public names, `stellwerk/__main__.py` is the command.
    "": frozenset({"sdk", "sdk.inside", "core"}),
    "__main__": frozenset({"cli"}),
}

# What the core may use of the standard library. `datetime` and `zoneinfo` are here for calendar arithmetic;
# the calls of `datetime` that read the clock are refused below, and zone rules count as constants.
# fmt: off
CORE_LIBRARY = frozenset(
    {
        "__future__", "abc", "base64", "binascii", "bisect", "calendar", "collections", "contextlib",
        "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "graphlib",
        "hashlib", "heapq", "hmac", "ipaddress", "itertools", "json", "keyword", "math", "numbers",
        "operator", "re", "string", "struct", "textwrap", "types", "typing", "unicodedata",
        "urllib.parse", "zlib", "zoneinfo",
    },
)
# fmt: on
CORE_THIRD_PARTY = frozenset({"msgspec"})
CORE_BANNED_CALLS = frozenset({"open", "input", "print", "__import__", "eval", "exec", "compile", "breakpoint"})
CORE_BANNED_METHODS = frozenset({"now", "utcnow", "today"})


def test_every_import_goes_to_the_right() -> None:
    wrong: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        wrong += violations(module_of(path), path.read_text(), is_package=path.name == "__init__.py")
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("stellwerk.core.run", "from stellwerk.store.protocol import Store"),
        ("stellwerk.core.run", "import time"),
        ("stellwerk.core.run", "from random import randint"),
        ("stellwerk.core.run", "import os.path"),
        ("stellwerk.core.run", "from urllib import request"),
        ("stellwerk.core.run", "import litestar"),
        ("stellwerk.core.run", "def f():\n    import socket"),
        ("stellwerk.core.run", "from datetime import datetime\ndatetime.now()"),
        ("stellwerk.core.run", "import datetime as d\nclock = d.date.today"),
        ("stellwerk.core.run", "open('x')"),
        ("stellwerk.core.run", "from stellwerk import sdk"),
        ("stellwerk.store.memory", "from stellwerk.kernel.clock import Clock"),
        ("stellwerk.store.memory", "import stellwerk.dispatch.protocol"),
        ("stellwerk.dispatch.memory", "from stellwerk.execute import protocol"),
        ("stellwerk.execute.command", "from ..store.protocol import Store"),
        ("stellwerk.execute.command", "from .. import store"),
        ("stellwerk.kernel.worker", "if TYPE_CHECKING:\n    from stellwerk.doors.native import runs"),
        ("stellwerk.kernel.worker", "from stellwerk import assemble"),
        ("stellwerk.definitions.book", "from stellwerk.web.params import read_time"),
        ("stellwerk.doors.native.runs", "from stellwerk.store.protocol import Store"),
        ("stellwerk.doors.native.runs", "from stellwerk.doors.sync_tasks.door import Door"),
        ("stellwerk.doors.native.runs", "from ..sync_tasks import door"),
        ("stellwerk.doors.native.runs", "from stellwerk.assemble import build"),
        ("stellwerk.web.auth", "from stellwerk.doors import native"),
        ("stellwerk.sdk.inside", "from stellwerk.sdk.client import Client"),
        ("stellwerk.execute.call", "from stellwerk.sdk.client import Client"),
        ("stellwerk.store.memory", "from stellwerk.sdk.inside import run"),
        ("stellwerk.sdk.client", "from stellwerk.cli.main import main"),
        ("stellwerk.assemble", "from stellwerk.cli import main"),
        ("stellwerk.newcomer", "from stellwerk.core.run import Run"),
    ],
)
def test_an_import_to_the_left_or_sideways_is_refused(module: str, source: str) -> None:
    assert violations(module, source) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("stellwerk.core.run", "import msgspec\nfrom collections.abc import Sequence\nfrom enum import Enum"),
        ("stellwerk.core.run", "from stellwerk.core.names import RunId"),
        ("stellwerk.core.times", "from datetime import UTC, datetime\ndatetime.fromtimestamp(0, UTC)"),
        ("stellwerk.core.names", "from urllib.parse import quote"),
        ("stellwerk.store.sqlite.store", "import sqlite3\nfrom stellwerk.store.protocol import Store"),
        ("stellwerk.kernel.worker", "from stellwerk.execute.protocol import Executor\nimport time"),
        ("stellwerk.execute.call", "from stellwerk.sdk.inside import RunView"),
        ("stellwerk.sdk.client", "from stellwerk.sdk.inside import RunView"),
        ("stellwerk.doors.native.runs", "from stellwerk.doors.native.system import health"),
        ("stellwerk.doors.native.runs", "from stellwerk.web.params import x\nfrom stellwerk.kernel import y"),
        ("stellwerk.cli.main", "from stellwerk import __version__\nfrom stellwerk.assemble import build"),
        ("stellwerk.assemble", "from stellwerk.doors.native import runs\nfrom stellwerk.store import memory"),
    ],
)
def test_an_import_to_the_right_is_allowed(module: str, source: str) -> None:
    assert violations(module, source) == []


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """What a module of the package does against the rule, one line each."""
    tree = ast.parse(source)
    own_part = part_of(module)
    if own_part not in MAY_IMPORT:
        return [f"{module} belongs to no layer: give {own_part!r} a place in MAY_IMPORT"]
    found = [
        f"{module}:{line} imports {target}"
        for line, target in imports(tree, module, is_package=is_package)
        if not is_allowed(module, target)
    ]
    if own_part == "core":
        found += [f"{module}:{line} uses {what}" for line, what in impure_uses(tree)]
    return found


def is_allowed(module: str, target: str) -> bool:
    own_part = part_of(module)
    if target.partition(".")[0] != "stellwerk":
        return own_part != "core" or is_pure(target)
    if target == "stellwerk.__version__":
        return True
    part = part_of(target)
    if part == own_part == "doors":
        return door_of(target) == door_of(module)
    return part == own_part or part in MAY_IMPORT[own_part]


def is_pure(target: str) -> bool:
    if target.partition(".")[0] in CORE_THIRD_PARTY:
        return True
    # `from a.b import c` arrives as `a.b.c`, where c may be a name inside of the module a.b.
    parts = target.split(".")
    return any(".".join(parts[:count]) in CORE_LIBRARY for count in range(1, len(parts) + 1))


def imports(tree: ast.Module, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Every import wherever it stands: one in a function or for types alone ties two parts as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level > 0:
                up = node.level - 1 if is_package else node.level
                parents = module.split(".")
                origin = ".".join([*parents[: len(parents) - up], *filter(None, [node.module])])
            for alias in node.names:
                yield node.lineno, f"{origin}.{alias.name}"


def impure_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in CORE_BANNED_CALLS:
                yield node.lineno, f"{name}()"
            case ast.Attribute(attr=name, value=ast.Name() | ast.Attribute()) if name in CORE_BANNED_METHODS:
                yield node.lineno, f".{name}, which reads the clock"
            case _:
                pass


def part_of(module: str) -> str:
    """`stellwerk.store.sqlite.store` → `store`; the package itself → the empty string."""
    parts = module.split(".")[1:]
    if parts[:2] == ["sdk", "inside"]:
        return "sdk.inside"
    return ".".join(parts[:1])


def door_of(module: str) -> str:
    return ".".join(module.split(".")[2:3])


def module_of(path: Path) -> str:
    parts = ["stellwerk", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
