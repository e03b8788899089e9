"""Commands that look: runs, one run, its log, why it waits, the journal, gates, counts, health."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from stellwerk.cli import exits
from stellwerk.cli.options import PAST, RUN_ID, connect, filter_options, host_options, now_ms, run_filter

if TYPE_CHECKING:
    from stellwerk.cli.http_client import Client, Query

RUNS_LIMIT = 50
RUNS_PER_PAGE = 1_000
EVENTS_LIMIT = 1_000
EVENTS_SINCE_MS = 3_600_000  # without --after and --since: the last hour
EVENT_HEAD = ("event_id", "time", "type", "key")


@click.command()
@filter_options
@click.option("--limit", type=click.IntRange(1), default=RUNS_LIMIT, show_default=True, help="At most so many.")
@click.option("--all", "is_all", is_flag=True, help="All of them, however many.")
@click.option("-f", "--watch", "--follow", "is_watched", is_flag=True, help="Keep showing what changes.")
@host_options
def runs(*, as_json: bool, limit: int, is_all: bool, is_watched: bool, **options: Any) -> None:
    """List runs, newest first, or watch them.

    \b
    Examples:
      stellwerk runs --state failed --since 1d
      stellwerk runs --scope nightly --label team=data --json
      stellwerk runs -f
    """
    from stellwerk.cli import follow, show

    query = run_filter(options)
    client = connect(options)
    if is_watched:
        if is_all:
            raise click.UsageError("--watch shows the newest runs; it does not go with --all.")
        follow.watch_runs(client, query, as_json=as_json, limit=limit)
        return
    document = _read_runs(client, query, None if is_all else limit)
    if as_json:
        show.print_json(document)
        return
    if not document["runs"]:
        show.note("no runs match" if query else "no runs yet; add one with `stellwerk submit`")
        return
    show.print_runs(document["runs"])
    if document.get("cursor"):
        show.note(f"the newest {len(document['runs'])} are shown; --limit or --all shows more")


def _read_runs(client: Client, query: Query, limit: int | None) -> dict[str, Any]:
    """The first page with what later pages hold added to it: one document, true at the first page's stamp."""
    found: list[Any] = []
    first: dict[str, Any] | None = None
    cursor: str | None = None
    while True:
        left = RUNS_PER_PAGE if limit is None else min(RUNS_PER_PAGE, limit - len(found))
        page = client.get("/api/runs", {**query, "limit": left, "cursor": cursor})
        first = first or page
        found += page["runs"]
        cursor = page.get("cursor")
        if cursor is None or not page["runs"] or (limit is not None and len(found) >= limit):
            return {**first, "runs": found, "cursor": cursor}


@click.command()
@click.argument("run_id", metavar="ID", type=RUN_ID)
@host_options
def run(*, run_id: str, as_json: bool, **options: Any) -> None:
    """Show one run.

    \b
    Example:
      stellwerk run ID --json
    """
    from stellwerk.cli import show
    from stellwerk.cli.http_client import path_of

    document = connect(options).get(path_of("api", "runs", run_id))
    if as_json:
        show.print_json(document)
    else:
        show.print_details(document)


@click.command()
@click.argument("run_id", metavar="ID", type=RUN_ID)
@click.option("-f", "--follow", "is_followed", is_flag=True, help="Go on until the run has ended.")
@click.option("--stream", type=click.Choice(("stdout", "stderr", "system")), help="Only this stream.")
@click.option("--after", type=click.IntRange(0), default=0, metavar="LINE", help="Only what comes after this line.")
@click.option("--raw", "is_raw", is_flag=True, help="Bytes as the run wrote them, on a terminal too.")
@host_options
def logs(
    *,
    run_id: str,
    is_followed: bool,
    stream: str | None,
    after: int,
    is_raw: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Print what a run wrote, or follow it.

    Its standard output goes to standard output, its standard error and the lines of the system to standard
    error. With -f the exit code is 0 if the run succeeded and 5 if it did not.

    \b
    Examples:
      stellwerk logs ID -f
      stellwerk logs ID --stream stdout > out.txt
    """
    from stellwerk.cli import follow, show
    from stellwerk.cli.http_client import path_of

    client = connect(options)
    query: Query = {"stream": stream}
    printer = follow.LogPrinter(as_json=as_json, is_raw=is_raw)
    if is_followed:
        found = client.get(path_of("api", "runs", run_id))
        return follow.follow_run(client, run_id, found["event_id"], query, after, printer)
    if as_json:
        show.print_json(follow.log_document(client, run_id, query, after))
        return exits.DONE
    for line in follow.read_log(client, run_id, query, after):
        printer(line)
    printer.flush()
    return exits.DONE


@click.command()
@click.argument("run_id", metavar="ID", type=RUN_ID)
@host_options
def why(*, run_id: str, as_json: bool, **options: Any) -> None:
    """Explain why a run is where it is.

    \b
    Example:
      stellwerk why ID
    """
    from stellwerk.cli import show
    from stellwerk.cli.http_client import path_of

    document = connect(options).get(path_of("api", "runs", run_id, "why"))
    if as_json:
        show.print_json(document)
        return
    rows = [(reason.get("type"), reason.get("until"), reason.get("message")) for reason in document["reasons"]]
    show.print_table(("WHY", "UNTIL", "BECAUSE"), rows)


@click.command()
@click.option("-f", "--follow", "is_followed", is_flag=True, help="Go on with every new event, until Ctrl-C.")
@click.option("--after", type=click.IntRange(0), metavar="EVENT_ID", help="Only what comes after this event.")
@click.option("--since", type=PAST, help="Only what came since: ISO 8601, or 2h for two hours ago.")
@click.option("--type", "types", multiple=True, help="Only these types: RunStarted or RunStarted,RunFailed.")
@click.option("--run", "run_id", type=RUN_ID, metavar="ID", help="Only events of this run.")
@click.option("--prefix", help="Only keys (scope/name) that begin so.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=EVENTS_LIMIT, show_default=True, help="At most so many."
)
@host_options
def events(
    *,
    is_followed: bool,
    after: int | None,
    since: str | None,
    types: tuple[str, ...],
    run_id: str | None,
    prefix: str | None,
    limit: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Read the journal, or follow it.

    Without --after and --since: the last hour; with -f: from now on; of one run (--run): all of it.

    \b
    Examples:
      stellwerk events -f --type RunFailed --json
      stellwerk events --run ID
    """
    from stellwerk.cli import follow, show

    if after is not None and since is not None:
        raise click.UsageError("--after and --since are two answers to one question; give one of them.")
    client = connect(options)
    query: Query = {"type": ",".join(types) or None, "run": run_id, "prefix": prefix}
    start = _start(after, since)
    if start is None:
        if run_id is not None:
            start = 0
        elif is_followed:
            start = client.get("/api/counts")["event_id"]
        else:
            start = (now_ms() - EVENTS_SINCE_MS) * 1_000
    if after is None:
        # Nobody asked for this very number, so the nearest one that can be answered is meant.
        start = follow.reachable(client, query, start)
    if is_followed:
        follow.follow_events(client, query, start, show.print_json if as_json else _print_event)
    document = client.get("/api/events", {**query, "after": start, "limit": limit})
    if as_json:
        show.print_json(document)
        return
    if document["type"] == "Torn":
        raise exits.Quit(_torn_text(document))
    for event in document.get("events") or []:
        _print_event(event)
    if not document.get("events"):
        show.note("no events; --since 1d or --after 0 looks further back")


def _start(after: int | None, since: str | None) -> int | None:
    if since is None:
        return after
    from stellwerk.core.times import parse_time

    # An EventId is the microsecond of its commit, so a moment is as good as a number.
    return parse_time(since, "--since") * 1_000


def _torn_text(torn: Mapping[str, Any]) -> str:
    return (
        f"the journal is torn there: it goes from {torn.get('oldest')} to {torn.get('last_event_id')}. "
        f"Read the runs anew, then go on with --after {torn.get('last_event_id')}."
    )


def _print_event(event: Mapping[str, Any]) -> None:
    from stellwerk.cli import show
    from stellwerk.cli.plain import as_json, neutral, one_line

    if event.get("type") == "Torn":
        show.note(_torn_text(event))
        return
    head = [event.get("event_id"), event.get("time"), f"{event.get('type')!s:<14}", event.get("key")]
    told = [
        f"{name}={value if isinstance(value, str) else as_json(value)}"
        for name, value in event.items()
        if name not in EVENT_HEAD
    ]
    tail = one_line(" ".join(told))
    if len(tail) > show.CELL_CHARS_MAX:
        tail = tail[: show.CELL_CHARS_MAX - 1] + "…"
    sys.stdout.write("  ".join([*(neutral(str(part)) for part in head), tail]).rstrip() + "\n")
    sys.stdout.flush()


@click.command()
@host_options
def counts(*, as_json: bool, **options: Any) -> None:
    """Count the runs in each state.

    \b
    Example:
      stellwerk counts
    """
    from stellwerk.cli import show

    document = connect(options).get("/api/counts")
    if as_json:
        show.print_json(document)
    else:
        show.print_table(("STATE", "RUNS"), document["counts"].items())


@click.command()
@host_options
def gates(*, as_json: bool, **options: Any) -> None:
    """List what holds runs back: pauses and blocks.

    \b
    Example:
      stellwerk gates
    """
    from stellwerk.cli import show

    document = connect(options).get("/api/gates")
    if as_json:
        show.print_json(document)
    elif not document["gates"]:
        show.note("nothing is paused or blocked")
    else:
        rows = [
            (gate.get("kind"), _gate_place(gate), gate.get("until"), gate.get("actor"), gate.get("reason"))
            for gate in document["gates"]
        ]
        show.print_table(("KIND", "WHAT", "UNTIL", "BY", "REASON"), rows)


def _gate_place(gate: Mapping[str, Any]) -> str:
    if gate.get("scope"):
        return "/".join(str(gate[part]) for part in ("scope", "name") if gate.get(part))
    return str(gate.get("key") or "everything").replace("*", "everything")


@click.command()
@host_options
def health(*, as_json: bool, **options: Any) -> int:
    """Ask the host how it is; needs no token.

    The exit code is 0 if it is ok or degraded, 1 if it cannot work now, 3 if there is none.

    \b
    Example:
      stellwerk health --url http://127.0.0.1:8765
    """
    from stellwerk.cli import show

    document = connect(options, needs_token=False).get("/health", also=frozenset({503}))
    if not isinstance(document, dict) or "state" not in document:
        raise exits.Quit("what answers is no Stellwerk host: /health does not name its state", exits.NO_HOST)
    if as_json:
        show.print_json(document)
    else:
        show.print_details(document)
    return exits.DONE if document["state"] in {"ok", "degraded"} else exits.REFUSED
