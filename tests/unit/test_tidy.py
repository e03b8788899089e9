"""Rules about the code that no other tool reads: sizes, words, dangerous calls, and what a file may name.

Each rule is a function from a source to what is wrong with it, and is tried on a planted mistake as well:
a rule that cannot fail protects nothing.
"""

import ast
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "stellwerk"

FILE_LINES_MAX = 700  # beyond that a file has two subjects
FUNCTION_LINES_MAX = 90  # a screen and a half: the aim is one, a long match may need more
LINE_LENGTH_MAX = 120  # as in ruff's settings; here also for SQL and Lua

# They mean two things each: asyncio's task and a door's, a graph's node and a machine.
BANNED_WORDS = frozenset({"task", "node", "lock", "message", "status", "notification"})
# Where a banned word may be bound all the same, and why.
BANNED_WORDS_ALLOWED: dict[tuple[str, str], str] = {
    ("core/gates.py", "message"): "the text of a reason; what /why answers has this field",
    ("core/errors.py", "message"): "the text of an error; the API's error shape has this field",
}

# Modules that may import by a name they were given, and why. A stored name decides in one place only.
IMPORTS_BY_NAME_ALLOWED: dict[str, str] = {
    "execute/call.py": "finds the user's function, in a warm child or, where the user chose it, in a thread",
    "cli/main.py": "loads the one command that was asked for; the names are its own constants",
}

BANNED_MODULES = frozenset({"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"})
BANNED_CALLS = frozenset({"eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen"})
SQL_METHODS = frozenset({"execute", "executemany", "executescript", "fetch", "fetchrow", "fetchval"})

# The brackets keep the rule from finding itself.
LEFTOVER = re.compile(r"\b(?:TO[D]O|FIX[M]E|XX[X])\b")
# Where homes and checkouts usually lie: such a path is true on one machine only.
MACHINE_PATH = re.compile(r"(?<![\w.~$}*-])/(?:root|work|workspace|home/[a-z]\w*|Users/[A-Za-z]\w*)/\w")
INDEX_HOST = re.compile(
    r"\b(?:(?:test\.)?pypi\.(?:org|python\.org)|pythonhosted\.org|registry\.npmjs\.org|registry\.yarnpkg\.com"
    r"|https?://\S+/simple\b)",
)

SOURCES = sorted(PACKAGE.rglob("*.py"))
NOT_OURS = frozenset({".git", ".tools", ".venv", ".stellwerk", "node_modules", "build", "dist", "__pycache__"})

Rule = Callable[[str, str], list[str]]


# --- the rules on the project --------------------------------------------------------------------------


def test_no_file_has_too_many_lines() -> None:
    lines = {name_of(path): len(read(path).splitlines()) for path in package_texts()}
    assert {name: count for name, count in lines.items() if count > FILE_LINES_MAX} == {}


def test_no_function_has_too_many_lines() -> None:
    assert everywhere(long_functions) == []


def test_no_line_is_too_long() -> None:
    long = [
        f"{name_of(path)}:{number} has {len(line)} characters"
        for path in package_texts()
        for number, line in enumerate(read(path).splitlines(), start=1)
        if len(line) > LINE_LENGTH_MAX
    ]
    assert long == []


def test_nothing_is_left_for_later() -> None:
    assert in_project_files(LEFTOVER) == []


def test_every_module_says_why_it_exists() -> None:
    assert everywhere(missing_docstring) == []


def test_core_and_kernel_use_no_word_with_two_meanings() -> None:
    wrong = []
    for path in SOURCES:
        if path.relative_to(PACKAGE).parts[0] in {"core", "kernel"}:
            wrong += banned_words(name_in_package(path), read(path))
    assert wrong == []


def test_stored_bytes_never_become_code() -> None:
    assert everywhere(unsafe_calls) == []


def test_names_from_outside_are_imported_in_one_place_alone() -> None:
    assert everywhere(imports_by_name) == []


def test_sql_is_never_pasted_together() -> None:
    assert everywhere(pasted_sql) == []


def test_no_file_names_a_path_of_one_machine() -> None:
    assert in_project_files(MACHINE_PATH) == []


def test_no_file_names_a_package_index() -> None:
    assert in_project_files(INDEX_HOST) == []


def test_scripts_can_be_run() -> None:
    scripts = [path for path in project_files() if path.suffix == ".sh" or read(path).startswith("#!")]
    assert ROOT / "dev" in scripts
    assert [name_of(path) for path in scripts if not os.access(path, os.X_OK)] == []


def test_every_folder_with_tests_is_a_package() -> None:
    # Else two files of the same name in two folders hide each other.
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert [name_of(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_every_allowance_is_still_used() -> None:
    for name, word in BANNED_WORDS_ALLOWED:
        assert word in identifiers_bound((PACKAGE / name).read_text()), f"{word} in {name} is allowed for nothing"


# --- the rules on planted mistakes ---------------------------------------------------------------------


def planted(rule: Rule, source: str, name: str = "kernel/planted.py") -> bool:
    return rule(name, source) != []


def test_a_long_function_is_noticed() -> None:
    body = "    x = 1\n" * FUNCTION_LINES_MAX
    assert planted(long_functions, f"def f():\n{body}")
    assert planted(long_functions, f"class A:\n  async def f(self):\n{body}")
    assert not planted(long_functions, "def f():\n    x = 1\n")


def test_a_module_without_a_docstring_is_noticed() -> None:
    assert planted(missing_docstring, "x = 1\n")
    assert not planted(missing_docstring, '"""Why."""\nx = 1\n')
    assert not planted(missing_docstring, "", name="core/__init__.py")


@pytest.mark.parametrize(
    "source",
    [
        "task = 1",
        "def cancel_task(): ...",
        "class TaskGroup: ...",
        "def f(node): ...",
        "self._lock = Lock()",
        "class A:\n    status: int",
        "import x as message",
        "for notifications in (): ...",
        "[nodes for nodes in ()]",
        "with f() as lock: ...",
        "except_ = (task_id := 1)",
        "try: ...\nexcept E as message: ...",
        "match x:\n    case [task]: ...",
    ],
)
def test_a_banned_word_is_noticed(source: str) -> None:
    assert planted(banned_words, source)


@pytest.mark.parametrize(
    "source",
    [
        "running = asyncio.create_task(f())",
        "def f(of: asyncio.Task[None], guard: threading.Lock) -> None: ...",
        "from asyncio import Task, Lock",
        "'a task in a text'",
        "clock = blocked = multitasking = 1",
        "print(error.message)",
    ],
)
def test_a_foreign_name_or_a_text_is_no_banned_word(source: str) -> None:
    assert not planted(banned_words, source)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "import shelve as s",
        "eval('1')",
        "exec('1')",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.CSafeLoader)",
        "from yaml import load",
        "os.system('ls')",
        "subprocess.run('ls', shell=True)",
    ],
)
def test_a_call_that_turns_bytes_into_code_is_noticed(source: str) -> None:
    assert planted(unsafe_calls, source)


def test_calls_that_only_sound_alike_are_allowed() -> None:
    assert not planted(unsafe_calls, "connection.execute('x')\nyaml.safe_load(x)\nself.exec(x)\nrun(x, shell=False)")


def test_an_import_by_name_is_noticed() -> None:
    assert planted(imports_by_name, "importlib.import_module(name)")
    assert planted(imports_by_name, "from importlib import import_module\nimport_module(f'{a}.b')")
    assert planted(imports_by_name, "__import__(name)")
    assert not planted(imports_by_name, "importlib.import_module('stellwerk.cli.commands')")
    assert not planted(imports_by_name, "importlib.import_module(name)", name="execute/call.py")


@pytest.mark.parametrize(
    "statement",
    [
        "f'SELECT {x}'",
        "'SELECT ' + x",
        "'SELECT %s' % x",
        "'SELECT {}'.format(x)",
        "' '.join(parts)",
        "sql=f'{x}'",
    ],
)
def test_pasted_sql_is_noticed(statement: str) -> None:
    assert planted(pasted_sql, f"connection.execute({statement})")


def test_constant_sql_with_bound_values_is_allowed() -> None:
    assert not planted(pasted_sql, "c.execute('SELECT ' 'x', (f'{a}',))\nc.execute(QUERIES['claim'], [a + b])")


def test_paths_and_hosts_are_noticed() -> None:
    slash = "/"
    for place in ("root", "work", "home/ada", "Users/Ada"):
        assert MACHINE_PATH.search(f"see {slash}{place}{slash}stellwerk")
    for harmless in (
        "https://example.org/work/x",
        "a/work/b",
        "./work/x",
        "$HOME/work/x",
        "/api/runs",
        "/home/",
    ):
        assert not MACHINE_PATH.search(harmless)
    for host in ("https://py{}pi.org/x", "files.python{}hosted.org", "https://mirror.example/sim{}ple"):
        assert INDEX_HOST.search(host.format(""))
    for harmless in ("a simple thing", "this/simple thing", "https://example.org/simply"):
        assert not INDEX_HOST.search(harmless)


def test_a_leftover_is_noticed() -> None:
    assert LEFTOVER.search("# TO{}DO later".format(""))
    assert not LEFTOVER.search("TODOS")


# --- the rules themselves ------------------------------------------------------------------------------


def long_functions(name: str, source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                found.append(f"{name}:{node.lineno} {node.name} has {lines} lines")
    return found


def missing_docstring(name: str, source: str) -> list[str]:
    # An empty `__init__.py` only marks a folder as a package.
    if source.strip() == "" and name.endswith("__init__.py"):
        return []
    return [] if ast.get_docstring(ast.parse(source)) else [f"{name} has no docstring"]


def banned_words(name: str, source: str) -> list[str]:
    return [
        f"{name} binds {identifier}"
        for identifier in sorted(identifiers_bound(source))
        if (name, identifier) not in BANNED_WORDS_ALLOWED and words_of(identifier) & BANNED_WORDS
    ]


def identifiers_bound(source: str) -> set[str]:
    """Names that a module makes up itself. What it only uses, `asyncio.Task` say, is not its own choice."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name):
                found.add(name)
            case ast.alias(asname=str(name)):
                found.add(name)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                found.add(name)
            case _:
                pass
    return found


def words_of(identifier: str) -> set[str]:
    """`TaskGroup` → task, group; `_node_ids` → node, ids; plurals also in the singular."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)
    words = {part.lower() for part in parts}
    return words | {word.removesuffix("s") for word in words} | {word.removesuffix("es") for word in words}


def unsafe_calls(name: str, source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=aliases):
                bad = [alias.name for alias in aliases if alias.name.partition(".")[0] in BANNED_MODULES]
            case ast.ImportFrom(module=str(module), names=aliases):
                bad = [module] if module.partition(".")[0] in BANNED_MODULES else []
                bad += [f"{module}.{a.name}" for a in aliases if f"{module}.{a.name}" in BANNED_CALLS]
            case ast.Call(func=function, keywords=keywords):
                bad = [called] if (called := dotted(function)) in BANNED_CALLS else []
                bad += ["shell=True" for k in keywords if k.arg == "shell" and is_true(k.value)]
            case _:
                bad = []
        found += [f"{name}:{getattr(node, 'lineno', 0)} uses {what}" for what in bad]
    return found


def imports_by_name(name: str, source: str) -> list[str]:
    if name in IMPORTS_BY_NAME_ALLOWED:
        return []
    return [
        f"{name}:{node.lineno} imports a module by a name that is not a constant"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and dotted(node.func).rpartition(".")[2] in {"import_module", "__import__"}
        and not (node.args and isinstance(node.args[0], ast.Constant))
    ]


def pasted_sql(name: str, source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SQL_METHODS:
            statements = [*node.args[:1], *(k.value for k in node.keywords if k.arg in {"sql", "query"})]
            found += [f"{name}:{node.lineno} pastes SQL together" for s in statements if is_pasted(s)]
    return found


def is_pasted(expression: ast.expr) -> bool:
    match expression:
        case ast.JoinedStr() | ast.BinOp(op=ast.Add() | ast.Mod()):
            return True
        case ast.Call(func=ast.Attribute(attr="format" | "join" | "replace")):
            return True
        case _:
            return False


def is_true(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Constant) and expression.value is True


def dotted(expression: ast.expr) -> str:
    match expression:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{dotted(value)}.{name}"
        case _:
            return "?"


# --- the files -----------------------------------------------------------------------------------------


def everywhere(rule: Rule) -> list[str]:
    return [wrong for path in SOURCES for wrong in rule(name_in_package(path), read(path))]


def in_project_files(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{name_of(path)}:{number} {match.group()!r}"
        for path in project_files()
        for number, line in enumerate(read(path).splitlines(), start=1)
        for match in pattern.finditer(line)
    ]


def package_texts() -> Iterator[Path]:
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in {".py", ".sql", ".lua"}:
            yield path


def project_files() -> list[Path]:
    """What git tracks or would track; all files of ours where git does not answer, as in an archive."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    except OSError:
        names = []
    files = [ROOT / name for name in names if name]
    if not files:
        for folder, folders, files_here in os.walk(ROOT):
            folders[:] = [name for name in folders if name not in NOT_OURS and not name.endswith("_cache")]
            files += [Path(folder) / name for name in files_here]
    return sorted(path for path in files if path.is_file() and NOT_OURS.isdisjoint(path.relative_to(ROOT).parts))


def read(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def name_in_package(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()
