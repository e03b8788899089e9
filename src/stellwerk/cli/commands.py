"""Commands that change something: cancel, rerun, pause, unpause, and the store's adoption."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from stellwerk.cli import exits
from stellwerk.cli.options import FUTURE, RUN_ID, connect, filter_options, host_options, run_filter

if TYPE_CHECKING:
    from stellwerk.cli.http_client import Client, Query

IDS_SHOWN_MAX = 10


@click.command()
@click.argument("run_ids", metavar="[ID]...", type=RUN_ID, nargs=-1)
@filter_options
@click.option("--dry-run", is_flag=True, help="Only say which runs it would be.")
@click.option("--yes", "is_sure", is_flag=True, help="Do not ask back.")
@host_options
def cancel(*, as_json: bool, **options: Any) -> int:
    """Cancel runs, by id or by filter.

    A running one is ended: its processes get TERM, then KILL.

    \b
    Examples:
      stellwerk cancel ID ID
      stellwerk cancel --scope nightly --state waiting --dry-run
    """
    return _for_runs("cancel", "cancelled", options, as_json=as_json)


@click.command()
@click.argument("run_ids", metavar="[ID]...", type=RUN_ID, nargs=-1)
@filter_options
@click.option("--dry-run", is_flag=True, help="Only say which runs it would be.")
@click.option("--yes", "is_sure", is_flag=True, help="Do not ask back.")
@host_options
def rerun(*, as_json: bool, **options: Any) -> int:
    """Run ended runs again, by id or by filter.

    Each becomes a new run that names the old one; by id, the new ids are printed.

    \b
    Examples:
      stellwerk rerun ID
      stellwerk rerun --scope nightly --state failed --since 1d --yes
    """
    return _for_runs("rerun", "run again", options, as_json=as_json)


def _for_runs(verb: str, done: str, options: dict[str, Any], *, as_json: bool) -> int:
    run_ids, is_dry, is_sure = options.pop("run_ids"), options.pop("dry_run"), options.pop("is_sure")
    query = run_filter(options)
    if run_ids and query:
        raise click.UsageError("give ids or filters, not both.")
    if not run_ids and not query:
        raise click.UsageError("say which runs: ids, or a filter such as --scope S or --state failed.")
    if run_ids and is_dry:
        raise click.UsageError("--dry-run belongs to filters; ids say already which runs it would be.")
    client = connect(options)
    if run_ids:
        return _one_by_one(client, verb, done, run_ids, as_json=as_json)
    return _in_bulk(client, verb, done, query, is_dry=is_dry, is_sure=is_sure, as_json=as_json)


def _one_by_one(client: Client, verb: str, done: str, run_ids: tuple[str, ...], *, as_json: bool) -> int:
    """Each for itself: one that is refused does not keep the others back."""
    from stellwerk.cli import show
    from stellwerk.cli.http_client import path_of

    exit_code = exits.DONE
    answers: list[dict[str, Any]] = []
    for run_id in run_ids:
        try:
            answer = client.ask("POST", path_of("api", "runs", run_id, verb)).body
        except exits.Quit as quit_:
            if quit_.exit_code != exits.REFUSED or len(run_ids) == 1:
                raise
            show.note(f"{run_id}: {quit_.text}")
            answers.append({"id": run_id, "message": quit_.text})
            exit_code = exits.REFUSED
            continue
        answers.append(answer)
        if not as_json:
            sys.stdout.write(f"{answer['id']}\n" if verb == "rerun" else f"{run_id} {done}\n")
            sys.stdout.flush()
    if as_json:
        show.print_json(answers[0] if len(run_ids) == 1 else {"runs": answers})
    return exit_code


def _in_bulk(client: Client, verb: str, done: str, query: Query, *, is_dry: bool, is_sure: bool, as_json: bool) -> int:
    from stellwerk.cli import show

    path = f"/api/runs/{verb}"
    if is_dry or not is_sure:
        preview = client.ask("POST", path, {**query, "dry_run": True}).body
        if is_dry and as_json:
            show.print_json(preview)
            return exits.DONE
        count = preview["count"]
        text = f"{count} run{'' if count == 1 else 's'} would be {done}"
        if is_dry:
            sys.stdout.write("".join(f"{run_id}\n" for run_id in preview["ids"]))
            show.note(text)
            return exits.DONE
        if count == 0:
            show.note("no run matches; nothing was changed")
            if as_json:
                show.print_json(preview)
            return exits.DONE
        some = ", ".join(preview["ids"][:IDS_SHOWN_MAX]) + (", …" if count > IDS_SHOWN_MAX else "")
        _make_sure(f"{text}: {some}")
    document = client.ask("POST", path, query).body
    if as_json:
        show.print_json(document)
        return exits.DONE
    count = document["count"]
    sys.stdout.write(f"{count} run{'' if count == 1 else 's'} {done}\n")
    if document.get("chore"):
        show.note("there are many; the rest is done in the background")
    return exits.DONE


def _make_sure(text: str) -> None:
    """Ask back; without someone to ask, or without a yes, nothing is done."""
    from stellwerk.cli import show

    show.note(text)
    if not sys.stdin.isatty():
        raise click.UsageError("nobody is there to confirm it; nothing was changed. Add --yes if it is meant.")
    if not click.confirm("Go on?", err=True):
        raise exits.Quit("nothing was changed")


def _gate_query(scope: str | None, name: str | None, *, is_block: bool) -> dict[str, str]:
    if name is not None and scope is None:
        raise click.UsageError("--name needs --scope: a job is named by both.")
    query = {"kind": "block" if is_block else "pause", "scope": scope, "name": name}
    return {key: value for key, value in query.items() if value is not None}


def _gate_place(query: dict[str, str]) -> str:
    if "scope" not in query:
        return "everything"
    return f"job {query['scope']}/{query['name']}" if "name" in query else f"scope {query['scope']}"


@click.command()
@click.option("--scope", help="Only runs of this scope.  [default: everything]")
@click.option("--name", help="Only this job of the scope.")
@click.option("--reason", help="Why; `stellwerk why` repeats it.")
@click.option("--until", type=FUTURE, help="Ends by itself then: ISO 8601, or 30m for half an hour from now.")
@click.option("--block", "is_block", is_flag=True, help="An admin's block: operators cannot take it away.")
@host_options
def pause(*, as_json: bool, is_block: bool, reason: str | None, until: str | None, **options: Any) -> None:
    """Let no further run start: all, a scope or a job.

    What runs already goes on; what is added waits. `stellwerk unpause` ends it.

    \b
    Examples:
      stellwerk pause --scope nightly --reason "disk is being replaced" --until 2h
      stellwerk pause
    """
    from stellwerk.cli import show

    query = _gate_query(options.pop("scope"), options.pop("name"), is_block=is_block)
    body = {**query, **({"reason": reason} if reason else {}), **({"until": until} if until else {})}
    document = connect(options).ask("PUT", "/api/gates", body=body).body
    if as_json:
        show.print_json(document)
    else:
        end = f" until {until}" if until else ""
        sys.stdout.write(f"{_gate_place(query)} {'blocked' if is_block else 'paused'}{end}\n")


@click.command()
@click.option("--scope", help="The pause of this scope.  [default: the one over everything]")
@click.option("--name", help="The pause of this job of the scope.")
@click.option("--block", "is_block", is_flag=True, help="An admin's block instead of a pause.")
@host_options
def unpause(*, as_json: bool, is_block: bool, **options: Any) -> None:
    """Take a pause (or a block) away.

    It takes away the one at exactly this place; `stellwerk gates` lists them.

    \b
    Example:
      stellwerk unpause --scope nightly
    """
    from stellwerk.cli import show

    query = _gate_query(options.pop("scope"), options.pop("name"), is_block=is_block)
    document = connect(options).ask("DELETE", "/api/gates", query).body
    if as_json:
        show.print_json(document)
    else:
        sys.stdout.write(f"{_gate_place(query)} {'unblocked' if is_block else 'unpaused'}\n")


@click.group()
def store() -> None:
    """Care for the host's store."""


@store.command()
@click.option("--yes", "is_sure", is_flag=True, help="Do not ask back.")
@host_options
def adopt(*, as_json: bool, is_sure: bool, **options: Any) -> None:
    """Confirm a store that its host does not know: a restored backup, or another one in its place.

    Until then the host claims nothing and answers 503, so that runs that were done already are not done
    again by mistake. Followers of the journal have to read anew afterwards.

    \b
    Example:
      stellwerk store adopt
    """
    from stellwerk.cli import show

    client = connect(options)
    if not is_sure:
        _make_sure(
            f"the host at {client.address.url} will take its store as it is now for the true one and go on from there: "
            "runs that ended after a backup was made may run again"
        )
    document = client.ask("POST", "/api/store/adopt").body
    if as_json:
        show.print_json(document)
    else:
        sys.stdout.write(f"the store is adopted; its epoch is {document['epoch']}\n")
