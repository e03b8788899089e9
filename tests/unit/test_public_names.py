"""The public names of the package: all that is promised is there, and nothing else leaks out."""

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import stellwerk

ROOT = Path(__file__).resolve().parents[2]
INIT = ROOT / "src" / "stellwerk" / "__init__.py"

# Loaded by `import stellwerk` they would slow down every warm child and every `stellwerk --help`.
HEAVY = {"asyncio", "litestar", "pydantic", "rich", "sqlite3", "uvicorn", "yaml"}


def test_every_public_name_can_be_imported() -> None:
    missing = [name for name in stellwerk.__all__ if not hasattr(stellwerk, name)]
    assert missing == []


def test_the_public_names_are_sorted_and_named_once() -> None:
    assert list(stellwerk.__all__) == sorted(set(stellwerk.__all__))


def test_every_name_bound_without_an_underscore_is_public() -> None:
    assert names_bound(INIT.read_text()) - set(stellwerk.__all__) == set()


def test_a_name_that_was_forgotten_is_noticed() -> None:
    source = "from stellwerk.sdk.client import Client\nlimit: int = 3\n_hidden = 1\ndef emit(): ...\n"
    assert names_bound(source) == {"Client", "limit", "emit"}


def test_the_version_is_the_same_everywhere() -> None:
    written = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert stellwerk.__version__ == written
    assert importlib.metadata.version("stellwerk") == written


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, stellwerk; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert HEAVY & set(loaded.split()) == set()


def names_bound(source: str) -> set[str]:
    """The names without a leading underscore that a module binds at its top level."""
    names: set[str] = set()
    for statement in ast.parse(source).body:
        match statement:
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case _:
                pass
    # A lazy module imports what its `__getattr__` needs; these are tools, not promises.
    return {name for name in names if not name.startswith("_")} - {"TYPE_CHECKING", "annotations"}
