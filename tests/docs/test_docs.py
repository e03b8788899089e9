"""The documentation against the code: whatever can be named is named, links lead somewhere, examples run."""

from __future__ import annotations

import asyncio
import inspect
import re
import shutil
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stellwerk.assemble import Parts
from stellwerk.cli.main import COMMANDS, stellwerk
from stellwerk.core import gates
from stellwerk.core.events import AnyEvent, Event
from stellwerk.core.run_machine import LEGAL_FROM
from stellwerk.doors.native.door import native_routes
from stellwerk.doors.native.metrics import Metrics
from stellwerk.kernel import settings as settings_module
from stellwerk.kernel.settings import Settings
from stellwerk.web.app import build_app
from stellwerk.web.routes import Route
from tests.docs.console import ROOT, host_in, is_as_expected, run_steps, steps_in

DOCS = ROOT / "docs"
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md"))
    if ".stellwerk" not in path.parts
)
EVENT_TYPES: list[type[Event]] = list(typing.get_args(AnyEvent))

_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def sections(text: str, level: str = "#{1,6}") -> dict[str, str]:
    """Heading → what stands below it, up to the next heading."""
    found: dict[str, str] = {}
    parts = re.split(rf"^({level} .+)$", _FENCE.sub("", text) if level == "#{1,6}" else text, flags=re.MULTILINE)
    for heading, body in zip(parts[1::2], parts[2::2], strict=True):
        found[heading.lstrip("#").strip()] = body
    return found


def table_rows(text: str) -> list[list[str]]:
    """The cells of all rows of the tables in a text, without heads and rules."""
    rows = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        is_head = number + 1 < len(lines) and re.fullmatch(r"\|[-| ]+\|", lines[number + 1]) is not None
        if line.startswith("|") and not is_head and not re.fullmatch(r"\|[-| ]+\|", line):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


def has_word(word: str, text: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) is not None


# --- HTTP ----------------------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(Settings(folder=tmp_path, data=tmp_path / "data", store="memory:"))


@pytest.fixture
async def routes(parts: Parts) -> list[Route]:
    told = native_routes(parts.kernel, parts.tokens, parts.settings, parts.health, asyncio.Event())
    return list(build_app(told, parts.tokens, parts.settings.server).routes)


async def test_every_route_has_a_section_and_every_section_a_route(routes: list[Route]) -> None:
    written = {heading.strip("`") for heading in sections(page("reference/http.md")) if heading.startswith("`")}
    assert written == {f"{route.method} {route.path}" for route in routes}


async def test_every_route_names_its_role_parameters_headers_and_statuses(routes: list[Route]) -> None:
    written = sections(page("reference/http.md"))
    missing = []
    for route in routes:
        name = f"{route.method} {route.path}"
        text = written[f"`{name}`"]
        wanted = [f"`{param.name}`" for param in (*route.params, *route.headers)]
        wanted.append("Open to everyone" if route.role == "open" else f"Role {route.role}")
        missing += [f"{name}: {word}" for word in wanted if word not in text]
        missing += [f"{name}: {status}" for status in route.answers if not has_word(str(status), text)]
    assert missing == []


async def test_every_field_of_requests_and_answers_is_named(routes: list[Route]) -> None:
    text = page("reference/http.md")
    missing = set()
    for route in routes:
        kinds = [route.body, *(kind for _, kind in route.answers.values())]
        for struct in {struct for kind in kinds for struct in structs_in(kind)}:
            missing |= {f"{struct.__name__}.{field}" for field in struct.__struct_fields__ if not has_word(field, text)}
    assert missing == set()


def structs_in(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """All struct types that a type is made of."""
    stack, seen = [kind], set[type]()
    while stack:
        one = stack.pop()
        stack.extend(one if isinstance(one, tuple) else typing.get_args(one))
        if isinstance(one, type) and issubclass(one, msgspec.Struct) and one not in seen:
            seen.add(one)
            yield one
            stack.extend(field.type for field in msgspec.structs.fields(one))


async def test_every_metric_is_named(parts: Parts, routes: list[Route]) -> None:
    await parts.store.open()
    text = (await Metrics(parts.kernel).text(routes)).decode()
    names = {family.name for family in text_string_to_metric_families(text) if family.name.startswith("stellwerk_")}
    written = page("operating/metrics.md")
    assert len(names) >= 5
    assert [name for name in sorted(names) if f"`{name}`" not in written and f"`{name}_total`" not in written] == []


# --- the command line ----------------------------------------------------------------------------------


def commands() -> dict[str, click.Command]:
    """Every command by the words that call it."""
    context = click.Context(stellwerk)
    found: dict[str, click.Command] = {}
    for name in COMMANDS:
        command = stellwerk.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            found |= {f"{name} {inner}": one for inner, one in command.commands.items()}
        else:
            found[name] = command
    return found


def test_every_command_has_a_section_and_every_section_a_command() -> None:
    written = {heading for heading in sections(page("reference/cli.md")) if heading.startswith("stellwerk ")}
    assert written == {f"stellwerk {name}" for name in commands()}


def test_every_option_is_named_and_no_other() -> None:
    written = sections(page("reference/cli.md"))
    of_all = options_in(written["Options that all commands but `up` have"])
    of_filters = options_in(written["Filters"])
    for name, command in commands().items():
        text = written[f"stellwerk {name}"]
        told = options_in(text)
        if "[filters](#filters)" in text:
            told |= of_filters
        if name != "up":
            told |= of_all
        real = {opt for param in command.params if isinstance(param, click.Option) for opt in param.opts}
        assert told - {"-h", "--help"} == real, name


def options_in(text: str) -> set[str]:
    """The options in the first column of tables."""
    cells = (row[0] for row in table_rows(text))
    return {option for cell in cells for option in re.findall(r"`(-{1,2}[a-z][a-z-]*)`", cell)}


# --- settings ------------------------------------------------------------------------------------------


def test_every_setting_is_named_with_its_flag_and_variable() -> None:
    reader = settings_module._Reader("stellwerk.yml", {}, {}, {})
    settings_module._settings(reader, ROOT)
    real = {}
    for name in reader._known - {"server.tls"}:
        flag = settings_module._FLAGS.get(name, name)
        variable = settings_module._VARIABLES.get(name, "STELLWERK_" + name.replace(".", "_").upper())
        real[name] = (
            f"`--{flag}`" if f"--{flag}" in up_options() else "",
            "`STELLWERK_ADMIN_TOKEN`" if name == "server.admin_token" else f"`{variable}`",
        )
    rows = [row for row in table_rows(page("reference/settings.md")) if len(row) == 5]
    assert {row[0].strip("`"): (row[1], row[2]) for row in rows} == real


def up_options() -> set[str]:
    return {opt for param in commands()["up"].params for opt in param.opts}


def test_the_example_of_settings_can_be_loaded(tmp_path: Path) -> None:
    found = re.search(r"```yaml\n(.*?)```", page("reference/settings.md"), re.DOTALL)
    assert found is not None
    path = tmp_path / "stellwerk.yml"
    path.write_text(found[1])
    assert settings_module.load_settings(path, {}, {}).workers.slots["default"] == 32


# --- events and the state chart ------------------------------------------------------------------------


def test_every_event_has_a_section() -> None:
    written = set(sections(page("reference/events.md"))) - {"Events", "Runs", "Gates", "Tokens and the store"}
    assert written == {kind.__name__ for kind in EVENT_TYPES}


@pytest.mark.parametrize("kind", EVENT_TYPES, ids=lambda kind: kind.__name__)
def test_every_field_of_an_event_is_named(kind: type[Event]) -> None:
    written = sections(page("reference/events.md"))
    text = written[kind.__name__] + written["Events"] + written["Runs"]
    assert [field for field in kind.__struct_fields__ if f"`{field}`" not in text] == []


def test_the_table_of_the_state_chart_is_the_code() -> None:
    text = sections(page("concepts/runs.md"))["States"]
    rows = {row[0]: row[1] for row in table_rows(text) if len(row) == 3}
    written = {event: set() if "no row" in states else set(states.split(", ")) for event, states in rows.items()}
    assert written == {kind.__name__: {state.value for state in states} for kind, states in LEGAL_FROM.items()}


def test_the_picture_of_the_state_chart_is_the_code() -> None:
    edges = re.findall(r"^    (\w+|\[\*\]) --> (?:\w+|\[\*\]): (\w+)$", page("concepts/runs.md"), re.MULTILINE)
    drawn = {(event, "" if state == "[*]" else state) for state, event in edges}
    silent = {"RunStopAsked", "ResultRejected"}  # they move nothing
    real = {
        (kind.__name__, state.value)
        for kind, states in LEGAL_FROM.items()
        for state in states
        if kind.__name__ not in silent
    }
    # An edit moves a ready run back if it is due later; a waiting one stays where it is.
    assert drawn == (real | {("RunAdded", "")}) - {("RunEdited", "waiting")}


def test_every_reason_that_why_gives_is_explained() -> None:
    types = set(re.findall(r'Reason\("(\w+)"', inspect.getsource(gates))) | set(gates._GATE_REASON.values())
    text = sections(page("concepts/gates.md"))["Why"]
    assert [name for name in sorted(types) if f"`{name}`" not in text] == []


# --- pages ---------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """The names under which the headings of a page can be linked to."""
    found = set()
    for heading in sections(path.read_text(encoding="utf-8")):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-"))
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for link in _LINK.finditer(_FENCE.sub("", path.read_text(encoding="utf-8"))):
        target, _, anchor = link["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        other = (path.parent / target).resolve() if target else path
        if not other.exists() or (anchor and anchor not in anchors(other)):
            broken.append(link["target"])
    assert broken == []


def test_files_that_are_named_exist() -> None:
    names = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|sql|txt|lock|service|toml))`")
    places = (ROOT, ROOT / "src" / "stellwerk", ROOT / "tests", *(ROOT / "tests").iterdir())
    gone = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in PAGES
        for name in names.findall(path.read_text(encoding="utf-8"))
        if not any((place / name).exists() for place in (*places, path.parent)) and not any((ROOT / "src").rglob(name))
    ]
    assert gone == []


def test_every_page_is_linked_from_the_readme_or_its_index() -> None:
    linked = set()
    for path in (ROOT / "README.md", DOCS / "decisions" / "README.md"):
        for link in _LINK.finditer(path.read_text(encoding="utf-8")):
            linked.add((path.parent / link["target"].partition("#")[0]).resolve())
    assert [str(path) for path in PAGES if path not in linked and path != ROOT / "README.md"] == []


@pytest.mark.parametrize("path", sorted((DOCS / "decisions").glob("0*.md")), ids=lambda path: str(path.name)[:4])
def test_a_decision_has_its_parts(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.match(rf"# {path.name[:4]} .+\n\n\d{{4}}-\d\d-\d\d · \w+", text) is not None
    assert list(sections(text, "##")) == ["Context", "Decision", "Consequence"]


def test_pictures_are_well_formed() -> None:
    pictures = list((DOCS / "pictures").glob("*.svg"))
    assert pictures
    for picture in pictures:
        root = ElementTree.parse(picture).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "prefers-color-scheme: dark" in picture.read_text()


# --- examples ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["README.md", "docs/start.md", "examples/first/README.md"])
def test_the_examples_print_what_the_page_says(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    if name.startswith("examples/"):
        shutil.copytree((ROOT / name).parent, folder, ignore=shutil.ignore_patterns(".stellwerk", "__pycache__"))
    else:
        folder.mkdir()
    steps = steps_in((ROOT / name).read_text(encoding="utf-8"))
    if shutil.which("curl") is None:
        steps = [step for step in steps if not step.command.startswith("curl ")]
    assert len(steps) >= 5
    with host_in(folder) as environ:
        printed = run_steps(steps, folder, environ)
    wrong = [
        f"$ {step.command}\n{text}\ninstead of\n" + "\n".join(step.expected)
        for step, text in zip(steps, printed, strict=True)
        if not is_as_expected(text, step.expected)
    ]
    assert wrong == [], "\n\n".join(wrong)


def test_an_example_that_prints_something_else_is_noticed() -> None:
    shown = ["run 1a1deb09dcd00001279027c9c1 succeeded (exit code 0, 16ms)"]
    assert is_as_expected("run 2b2deb09dcd00001279027c9c1 succeeded (exit code 0, 1s)", shown)
    assert not is_as_expected("run 2b2deb09dcd00001279027c9c1 failed (exit, exit code 1, 1s)", shown)
    assert not is_as_expected("", shown)
    assert not is_as_expected("one\ntwo", ["one"])
    assert is_as_expected(
        "1794737481337000  2026-11-15T10:11:21.337Z  a=b c", ["1794737481337001  2027-01-01T00:00:00.000Z …"]
    )
