"""The command `submit`: options become the body of `POST /api/runs`."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import click

from stellwerk.cli import exits
from stellwerk.cli.options import DURATION, FUTURE, PAIR, RUN_ID, connect, host_options

STDIN_BYTES_MAX = 16 * 1024 * 1024  # the host's own limit is tighter; this one only bounds what is read here
_HEADER_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")


# After the first word that is no option all belongs to the command, so `--` may be left out.
@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--scope", required=True, help="The scope: what the job belongs to.")
@click.option("--name", required=True, help="The name of the job in its scope.")
@click.option("--shell", "is_shell", is_flag=True, help="The rest is a script for bash.")
@click.option("--python", "function", metavar="MODULE:FUNCTION", help="Call this function instead of a command.")
@click.option("--args", "arguments", metavar="JSON", help="Its arguments: a JSON array or object.")
@click.option("--isolation", type=click.Choice(("process", "thread")), help="Where the function runs.")
@click.option("--priority", type=click.IntRange(1, 1_000), help="The higher the sooner.  [default: 100]")
@click.option("--delay", type=DURATION, help="Not before this has passed: 10s, 5m, PT5M.")
@click.option("--due", type=FUTURE, help="Not before: ISO 8601 with a zone.")
@click.option("--live-key", metavar="KEY", help="At most one live run has this key.")
@click.option("--parent", "parents", type=RUN_ID, multiple=True, help="Wait for this run; may be repeated.")
@click.option("--when", type=click.Choice(("succeeded", "failed", "ended")), help="How the parents must end.")
@click.option("--retries", type=click.IntRange(0), help="Tries after the first one.")
@click.option("--retry-delay", type=DURATION, help="The wait before the first retry.")
@click.option("--backoff", type=click.FloatRange(1), help="The factor from one wait to the next.  [default: 1]")
@click.option("--jitter", type=click.FloatRange(0, 1), help="How far a wait may vary, as a part of itself.")
@click.option("--timeout", type=DURATION, help="End an attempt that runs longer.")
@click.option("--keep", metavar="nothing|always|DURATION", help="How long the ended run is kept.  [default: 30d]")
@click.option("--env", type=PAIR, multiple=True, help="A variable for the run; may be repeated.")
@click.option("--cwd", metavar="DIR", help="The working directory, on the host.")
@click.option("--label", "labels", type=PAIR, multiple=True, help="A label to find it by; may be repeated.")
@click.option("--stdin", type=click.File("rb"), metavar="FILE", help="Its standard input; - is ours.")
@click.option("--idempotency-key", metavar="KEY", help="A repeated submit with this key adds nothing.")
@click.option("-f", "--follow", "is_followed", is_flag=True, help="Print its output; exit 0 or 5 as it ends.")
@click.argument("argv", metavar="-- ARGV...", nargs=-1, type=click.UNPROCESSED)
@host_options
def submit(*, as_json: bool, is_followed: bool, idempotency_key: str | None, **options: Any) -> int:
    """Add a run, and follow it if asked to.

    The run's id is printed. With --follow its output is printed instead, and the exit code is 0 if it
    succeeded, 5 if it failed or was cancelled. Ctrl-C ends the following, not the run.

    \b
    Examples:
      stellwerk submit --scope demo --name hello --follow -- echo hello
      stellwerk submit --scope demo --name count --shell -- 'ls | wc -l'
      stellwerk submit --scope demo --name sum --python mymodule:add --args '[1, 2]'
      stellwerk submit --scope demo --name fetch --retries 5 --retry-delay 10s --backoff 2 -- ./fetch
    """
    from stellwerk.cli import follow, show

    headers = {}
    if idempotency_key is not None:
        if _HEADER_VALUE.fullmatch(idempotency_key) is None:
            raise click.BadParameter("it may hold visible ASCII characters only.", param_hint="--idempotency-key")
        headers["Idempotency-Key"] = idempotency_key
    client = connect(options)
    answer = client.ask("POST", "/api/runs", body=run_body(options), headers=headers)
    added = answer.body
    run_id = added["id"]
    is_new = answer.status == 201
    if not is_followed:
        if as_json:
            show.print_json(added)
        else:
            sys.stdout.write(f"{run_id}\n")
            if not is_new:
                show.note("nothing was added: a live run holds this live key already")
        return exits.DONE
    if as_json:
        show.print_json(added)
    else:
        show.note(f"run {run_id} added" if is_new else f"run {run_id} holds this live key already; following it")
    # A live run found by its key may have been added long ago; its end lies after its stamp all the same.
    printer = follow.LogPrinter(as_json=as_json)
    return follow.follow_run(client, run_id, added["event_id"], {}, 0, printer)


def run_body(options: dict[str, Any]) -> dict[str, Any]:
    """The body of the request. What was not given is left out: its default is the host's matter."""
    if options["delay"] is not None and options["due"] is not None:
        raise click.UsageError("--delay and --due are two answers to one question; give one of them.")
    if options["when"] is not None and not options["parents"]:
        raise click.UsageError("--when says how parents must end; name them with --parent.")
    body: dict[str, Any] = {"scope": options["scope"], "name": options["name"], "action": _action(options)}
    for name in ("priority", "due", "delay", "live_key", "when", "timeout", "keep", "cwd"):
        if options[name] is not None:
            body[name] = options[name]
    if options["parents"]:
        body["parents"] = list(options["parents"])
    retry = _retry(options)
    if retry:
        body["retry"] = retry
    for name in ("env", "labels"):
        if options[name]:
            body[name] = dict(pair.split("=", 1) for pair in options[name])
    if options["stdin"] is not None:
        body["stdin"] = _stdin(options["stdin"].read(STDIN_BYTES_MAX + 1))
    return body


def _action(options: dict[str, Any]) -> dict[str, Any]:
    argv, function = list(options["argv"]), options["function"]
    if function is None:
        if options["arguments"] is not None or options["isolation"] is not None:
            raise click.UsageError("--args and --isolation belong to --python MODULE:FUNCTION.")
        if not argv:
            what = "the script" if options["is_shell"] else "the command"
            raise click.UsageError(f"{what} is missing; write it after `--`, as in: … -- echo hello")
        if options["is_shell"]:
            return {"type": "shell", "script": " ".join(argv)}
        return {"type": "command", "argv": argv}
    if argv or options["is_shell"]:
        raise click.UsageError("--python calls a function; it takes neither --shell nor a command.")
    action: dict[str, Any] = {"type": "python", "function": function}
    if options["arguments"] is not None:
        try:
            action["args"] = json.loads(options["arguments"])
        except (ValueError, RecursionError) as error:
            raise click.BadParameter(f"it is not JSON: {error}.", param_hint="--args") from None
        if not isinstance(action["args"], list | dict):
            raise click.BadParameter("it must be a JSON array or object.", param_hint="--args")
    if options["isolation"] is not None:
        action["isolation"] = options["isolation"]
    return action


def _retry(options: dict[str, Any]) -> dict[str, Any]:
    given = {"delay": options["retry_delay"], "backoff": options["backoff"], "jitter": options["jitter"]}
    retry = {name: value for name, value in given.items() if value is not None}
    if options["retries"] is None:
        if retry:
            raise click.UsageError("--retry-delay, --backoff and --jitter need --retries N.")
        return {}
    return {"max": options["retries"], **retry}


def _stdin(data: bytes) -> str:
    if len(data) > STDIN_BYTES_MAX:
        raise click.BadParameter(f"it is larger than {STDIN_BYTES_MAX >> 20} MiB.", param_hint="--stdin")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        text = f"it is not UTF-8 (byte {error.start}); hand bytes over in a file on the host."
        raise click.BadParameter(text, param_hint="--stdin") from None
