"""Answers for people: tables and details, coloured on a terminal, plain aligned text elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from stellwerk.cli.options import now_ms
from stellwerk.cli.plain import as_json, neutral, one_line
from stellwerk.core.errors import Refused
from stellwerk.core.times import parse_time, show_duration

if TYPE_CHECKING:
    from rich.table import Table

CELL_CHARS_MAX = 200  # an error may be long; `stellwerk run ID` shows all of it
STYLES = {
    "waiting": "yellow",
    "ready": "cyan",
    "running": "bold blue",
    "succeeded": "green",
    "failed": "bold red",
    "cancelled": "magenta",
    "ok": "green",
    "degraded": "yellow",
}
RUN_COLUMNS = ("ID", "STATE", "JOB", "PRIORITY", "ATTEMPT", "ADDED", "TOOK", "REASON")


def print_json(document: object) -> None:
    """One document on one line, at once: a follower's reader waits for it."""
    sys.stdout.write(as_json(document) + "\n")
    sys.stdout.flush()


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty()


def dim(text: str, stream: TextIO) -> str:
    """The text in a quiet tone, where the stream is a terminal that can do so."""
    if not is_terminal(stream) or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[2m{text}\x1b[0m"


def note(text: str) -> None:
    """A remark beside the answer, on standard error: it never disturbs a script that reads the answer."""
    lines = "\n".join(neutral(line) for line in text.splitlines())
    sys.stdout.flush()
    sys.stderr.write(dim(lines, sys.stderr) + "\n")
    sys.stderr.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table; the last column may be long."""
    cells = [[_cell(value) for value in row] for row in rows]
    if is_terminal(sys.stdout):
        from rich.console import Console

        Console(highlight=False, markup=False, emoji=False).print(rich_table(columns, cells))
        return
    for line in aligned([list(columns), *cells]):
        sys.stdout.write(line + "\n")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines whose columns stand below each other. An empty cell is a dash: tools split at blanks."""
    shown = [[cell or "-" for cell in row] for row in rows]
    widths = [max(len(row[index]) for row in shown) for index in range(len(shown[0]))]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)), row[-1]])
        for row in shown
    ]


def rich_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """The same for a terminal. Cells are `Text`: what is in them is never read as markup."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        is_last = index == len(columns) - 1
        table.add_column(column, no_wrap=index == 0, overflow="fold" if index == 0 or is_last else "ellipsis")
    for row in rows:
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    return table


def run_row(run: Mapping[str, Any], *, is_for_terminal: bool) -> list[str]:
    """One run as the cells of `RUN_COLUMNS`. On a terminal times are ages, elsewhere they are exact."""
    added = run.get("created_at")
    cells = [
        run.get("id"),
        run.get("state"),
        f"{run.get('scope', '')}/{run.get('name', '')}",
        run.get("priority"),
        run.get("attempt"),
        age(added) if is_for_terminal else added,
        took(run),
        _reason(run),
    ]
    return [_cell(cell) for cell in cells]


def print_runs(runs: Sequence[Mapping[str, Any]]) -> None:
    is_for_terminal = is_terminal(sys.stdout)
    print_table(RUN_COLUMNS, [run_row(run, is_for_terminal=is_for_terminal) for run in runs])


def print_details(document: Mapping[str, Any]) -> None:
    """One thing, a line for each of its fields; what is empty is left out."""
    shown = {name: value for name, value in document.items() if value not in (None, "", [], {})}
    width = max((len(name) for name in shown), default=0)
    for name, value in shown.items():
        text = value if isinstance(value, str) else as_json(value)
        first, *more = [neutral(line) for line in text.split("\n")]
        sys.stdout.write(f"{dim(neutral(name).ljust(width), sys.stdout)}  {first}\n")
        for line in more:
            sys.stdout.write(" " * (width + 2) + line + "\n")


def age(text: object) -> str:
    """How long ago a moment was: `12s ago`."""
    moment_ms = _moment_ms(text)
    if moment_ms is None:
        return ""
    distance_ms = now_ms() - moment_ms
    if distance_ms < 0:
        return f"in {show_duration(-distance_ms)}"
    return f"{show_duration(distance_ms // 1_000 * 1_000)} ago" if distance_ms >= 1_000 else "now"


def took(run: Mapping[str, Any]) -> str:
    """How long the last attempt ran, or has run so far."""
    started_ms, ended_ms = _moment_ms(run.get("started_at")), _moment_ms(run.get("ended_at"))
    if started_ms is None:
        return ""
    if ended_ms is None:
        if run.get("state") != "running":
            return ""
        ended_ms = now_ms()
    return show_duration(max(0, ended_ms - started_ms))


def ended_text(run: Mapping[str, Any]) -> str:
    """How a followed run ended, in a line."""
    text = f"run {run.get('id')} {run.get('state')}"
    details = [str(run["reason"])] if run.get("reason") else []
    if run.get("exit_code") is not None:
        details.append(f"exit code {run['exit_code']}")
    if isinstance(run.get("attempt"), int) and run["attempt"] > 1:
        details.append(f"attempt {run['attempt']}")
    if took(run):
        details.append(took(run))
    return text + (f" ({', '.join(details)})" if details else "")


def _reason(run: Mapping[str, Any]) -> str:
    reason, error = run.get("reason") or "", run.get("error") or ""
    if run.get("state") == "waiting" and run.get("due_at") and not reason:
        return f"due {run['due_at']}"
    return f"{reason}: {error}" if reason and error else str(reason or error)


def _cell(value: object) -> str:
    if value is None:
        return ""
    text = one_line(value if isinstance(value, str) else as_json(value))
    return text if len(text) <= CELL_CHARS_MAX else text[: CELL_CHARS_MAX - 1] + "…"


def _moment_ms(text: object) -> int | None:
    try:
        return parse_time(text, "time")
    except Refused:
        return None
