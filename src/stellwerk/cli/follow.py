"""Following: a run's output until its end, the journal, and a list of runs that changes."""

from __future__ import annotations

import base64
import binascii
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from stellwerk.cli import exits, show
from stellwerk.cli.http_client import Client, Query, path_of
from stellwerk.cli.plain import neutral

WATCH_WAIT_S = 25  # one long poll; then the list is asked for again, since ages move on
WATCH_PAUSE_S = 0.5  # a busy host changes faster than people read
ENDS = {"RunSucceeded": "succeeded", "RunFailed": "failed", "RunCancelled": "cancelled"}
ENDINGS = ",".join([*ENDS, "RunSettled"])


# --- output of a run -----------------------------------------------------------------------------------


class LogPrinter:
    """Prints log lines: standard output to ours, standard error to ours, what the system says dim beside it.

    On a terminal control characters are shown, not obeyed. Elsewhere, and with `is_raw`, the bytes are the run's.
    """

    def __init__(self, *, as_json: bool = False, is_raw: bool = False) -> None:
        self._as_json = as_json
        self._is_raw = is_raw
        self._last: TextIO | None = None

    def __call__(self, line: Mapping[str, Any]) -> None:
        if self._as_json:
            show.print_json(line)
            return
        kind = line.get("stream")
        stream = sys.stdout if kind == "stdout" else sys.stderr
        if self._last is not None and self._last is not stream:
            self._last.flush()
        self._last = stream
        if show.is_terminal(stream) and not self._is_raw:
            text = neutral(str(line.get("text", "")))
            stream.write((show.dim(text, stream) if kind == "system" else text) + "\n")
        else:
            stream.flush()
            stream.buffer.write(_bytes_of(line) + b"\n")

    def end(self, run: Mapping[str, Any]) -> None:
        """Say how the run ended."""
        self.flush()
        if self._as_json:
            show.print_json(run)
        else:
            show.note(show.ended_text(run))

    def flush(self) -> None:
        if self._last is not None:
            self._last.flush()


def _bytes_of(line: Mapping[str, Any]) -> bytes:
    raw = line.get("raw")
    if isinstance(raw, str):
        try:
            return base64.b64decode(raw, validate=True)
        except binascii.Error:
            pass  # the text is then the best there is
    return str(line.get("text", "")).encode("utf-8", "replace")


def read_log(client: Client, run_id: str, query: Query, after: int) -> Iterator[Mapping[str, Any]]:
    """All lines of the log there are now, page by page."""
    for page in _log_pages(client, run_id, query, after):
        yield from page["lines"]


def log_document(client: Client, run_id: str, query: Query, after: int) -> Mapping[str, Any]:
    """The same as one document of the API's shape, true at the last page's stamp."""
    lines: list[Mapping[str, Any]] = []
    page: Mapping[str, Any] = {}
    for page in _log_pages(client, run_id, query, after):
        lines += page["lines"]
    return {**page, "lines": lines}


def _log_pages(client: Client, run_id: str, query: Query, after: int) -> Iterator[Mapping[str, Any]]:
    while True:
        page = client.get(path_of("api", "runs", run_id, "logs"), {**query, "after": after})
        yield page
        # A filter may hide all of a page; then `last` says how far the host has looked.
        lines = page["lines"]
        reached = lines[-1]["line"] if lines else page.get("last") or 0
        if reached <= after:
            return
        after = reached


def follow_log(client: Client, run_id: str, query: Query, after: int, printer: LogPrinter) -> None:
    """Print the log as it grows until the run has ended."""
    last = after
    for event in client.stream(path_of("api", "runs", run_id, "logs"), query, after or None):
        if event.name == "end":
            return
        document = _load(event.data)
        if isinstance(document.get("line"), int) and document["line"] > last:  # a stream opened again may repeat
            last = document["line"]
            printer(document)
            printer.flush()


def follow_run(client: Client, run_id: str, event_id: int, query: Query, after: int, printer: LogPrinter) -> int:
    """Follow a run to its end; the exit code says how it ended. `event_id` is from before the end."""
    try:
        follow_log(client, run_id, query, after, printer)
    except exits.Quit as quit_:
        # A run that keeps nothing may be gone before its log was asked for; then the journal knows its end.
        ended = None if quit_.exit_code != exits.REFUSED else _end_by_journal(client, run_id, event_id)
        if ended is None:
            raise
    else:
        ended = how_it_ended(client, run_id, event_id)
    printer.end(ended)
    return exits.DONE if ended.get("state") == "succeeded" else exits.RUN_FAILED


def how_it_ended(client: Client, run_id: str, event_id: int) -> Mapping[str, Any]:
    """The run as it ended; of a run that is no longer kept, what the journal knows."""
    answer = client.ask("GET", path_of("api", "runs", run_id), also=frozenset({404}))
    if answer.status != 404:
        found: Mapping[str, Any] = answer.body
        return found
    ended = _end_by_journal(client, run_id, event_id)
    if ended is None:
        raise exits.Quit(f"run {run_id} is no longer kept, and the journal no longer knows how it ended")
    return ended


def _end_by_journal(client: Client, run_id: str, event_id: int) -> Mapping[str, Any] | None:
    page = client.get("/api/events", {"after": event_id, "run": run_id, "type": ENDINGS, "limit": 1})
    for event in page.get("events") or []:
        state = ENDS.get(event.get("type"))
        if state is None:
            state = "succeeded" if event.get("succeeded") else "failed"
        return {"id": run_id, "state": state, **{k: event.get(k) for k in ("reason", "exit_code", "attempt")}}
    return None


# --- the journal ---------------------------------------------------------------------------------------


def follow_events(client: Client, query: Query, after: int, on_event: Callable[[Mapping[str, Any]], None]) -> None:
    """Hand on every event after `after`, for ever."""
    while True:
        torn = _follow_until_torn(client, query, after, on_event)
        after = after_torn(torn, after)


def _follow_until_torn(
    client: Client, query: Query, after: int, on_event: Callable[[Mapping[str, Any]], None]
) -> Mapping[str, Any]:
    last = after
    for event in client.stream("/api/events", {**query, "after": after}, after):
        document = _load(event.data)
        if event.name == "Torn" or document.get("type") == "Torn":
            on_event({**document, "type": "Torn"})
            return document
        event_id = document.get("event_id")
        if isinstance(event_id, int) and event_id > last:
            last = event_id
            on_event(document)
    raise AssertionError("a stream of events has no end of its own")


def reachable(client: Client, query: Query, after: int) -> int:
    """The nearest start to `after` that the journal can answer."""
    page = client.get("/api/events", {**query, "after": after, "limit": 1})
    return after_torn(page, after) if page["type"] == "Torn" else after


def after_torn(torn: Mapping[str, Any], after: int) -> int:
    """Where to go on when `after` is out of reach: before the oldest event kept, or at the last there is."""
    oldest, last = torn.get("oldest"), torn.get("last_event_id")
    if isinstance(oldest, int) and after < oldest:
        return oldest - 1
    return last if isinstance(last, int) else 0


# --- a list of runs that changes -----------------------------------------------------------------------


def watch_runs(client: Client, query: Query, *, as_json: bool, limit: int) -> None:
    """Show the newest runs and show them again when something happens, until Ctrl-C."""
    pages = _pages(client, {**query, "limit": limit})
    if show.is_terminal(sys.stdout) and not as_json:
        _watch_on_terminal(pages)
        return
    known: dict[str, Mapping[str, Any]] = {}
    for runs in pages:
        changed = [run for run in reversed(runs) if known.get(run["id"]) != run]
        known = {run["id"]: run for run in runs}
        for run in changed:
            if as_json:
                show.print_json(run)
            else:
                sys.stdout.write("  ".join(cell or "-" for cell in show.run_row(run, is_for_terminal=False)) + "\n")
        sys.stdout.flush()


def _watch_on_terminal(pages: Iterator[Sequence[Mapping[str, Any]]]) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, markup=False, emoji=False)
    with Live(console=console, auto_refresh=False, screen=False, vertical_overflow="crop") as live:
        for runs in pages:
            rows = [show.run_row(run, is_for_terminal=True) for run in runs[: max(1, console.height - 4)]]
            live.update(show.rich_table(show.RUN_COLUMNS, rows), refresh=True)


def _pages(client: Client, query: Query) -> Iterator[Sequence[Mapping[str, Any]]]:
    while True:
        page = client.get("/api/runs", query)
        yield page["runs"]
        wait = {"after": page["event_id"], "timeout": WATCH_WAIT_S, "limit": 1}
        client.ask("GET", "/api/events", wait, wait_s=WATCH_WAIT_S)
        time.sleep(WATCH_PAUSE_S)


def _load(data: str) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
