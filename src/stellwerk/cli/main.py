"""The command `stellwerk`: its tree of commands, and how errors become exit codes.

A command's module is loaded when that command is asked for, and the one-line purposes stand here, so that
`stellwerk --help` and shell completion load nothing but click.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click

from stellwerk import __version__
from stellwerk.cli import exits


class Lazy(NamedTuple):
    """Where a command lives, and what it is for."""

    module: str
    attribute: str
    purpose: str


COMMANDS: Mapping[str, Lazy] = {
    "up": Lazy("stellwerk.cli.serve", "up", "Start a host on this machine."),
    "submit": Lazy("stellwerk.cli.submit", "submit", "Add a run, and follow it if asked to."),
    "runs": Lazy("stellwerk.cli.looks", "runs", "List runs, newest first, or watch them."),
    "run": Lazy("stellwerk.cli.looks", "run", "Show one run."),
    "logs": Lazy("stellwerk.cli.looks", "logs", "Print what a run wrote, or follow it."),
    "why": Lazy("stellwerk.cli.looks", "why", "Explain why a run is where it is."),
    "events": Lazy("stellwerk.cli.looks", "events", "Read the journal, or follow it."),
    "counts": Lazy("stellwerk.cli.looks", "counts", "Count the runs in each state."),
    "gates": Lazy("stellwerk.cli.looks", "gates", "List what holds runs back: pauses and blocks."),
    "health": Lazy("stellwerk.cli.looks", "health", "Ask the host how it is; needs no token."),
    "cancel": Lazy("stellwerk.cli.commands", "cancel", "Cancel runs, by id or by filter."),
    "rerun": Lazy("stellwerk.cli.commands", "rerun", "Run ended runs again, by id or by filter."),
    "pause": Lazy("stellwerk.cli.commands", "pause", "Let no further run start: all, a scope or a job."),
    "unpause": Lazy("stellwerk.cli.commands", "unpause", "Take a pause (or a block) away."),
    "store": Lazy("stellwerk.cli.commands", "store", "Care for the host's store."),
}

WINDOWS_REFUSED = (
    "Stellwerk does not run on Windows: it needs the sessions, signals and file locks of a Unix system. "
    "Use Linux (WSL 2 and containers will do) or macOS."
)


class LazyGroup(click.Group):
    """A group that knows its commands by name and loads one when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        lazy = COMMANDS.get(cmd_name)
        if lazy is None:
            return None
        found = getattr(importlib.import_module(lazy.module), lazy.attribute)
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.purpose) for name, lazy in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        # click would make exit code 1 of it, which says "refused" here.
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise click.exceptions.Exit(exits.PIPE_CLOSED) from None


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", prog_name="stellwerk", message="%(prog)s %(version)s")
def stellwerk() -> None:
    """Stellwerk runs things: durably, in order of priority, and it can say why.

    \b
    A first run:
      stellwerk up                                            in one terminal
      stellwerk submit --scope demo --name hello --follow -- echo hello
      stellwerk runs

    Commands find their host by --url or STELLWERK_URL, else by the port in stellwerk.yml, else at
    127.0.0.1:8765; their token by --token-file or STELLWERK_TOKEN, else STELLWERK_ADMIN_TOKEN, else the file
    admin-token in the data folder.

    Exit codes: 0 done, 1 refused or not found, 2 usage, 3 no host, 4 no right, 5 the followed run failed.
    """


def main() -> None:
    """Entry point of the installed command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str], platform: str = sys.platform) -> int:
    """Run one command line; answer its exit code. What went wrong stands on standard error."""
    if platform in {"win32", "cygwin"}:
        complain(WINDOWS_REFUSED)
        return exits.REFUSED
    never_fail_to_print()
    try:
        answer = stellwerk.main(list(arguments), prog_name="stellwerk", standalone_mode=False)
        exit_code = answer if isinstance(answer, int) else exits.DONE
        sys.stdout.flush()
    except exits.Quit as quit_:
        complain(quit_.text)
        exit_code = quit_.exit_code
    except click.Abort as abort:
        # The end of the input instead of an answer is a refusal, Ctrl-C is the user's own wish.
        exit_code = exits.REFUSED if isinstance(abort.__cause__, EOFError) else exits.INTERRUPTED
    except click.ClickException as error:
        error.show()
        exit_code = error.exit_code
    except BrokenPipeError:
        exit_code = exits.PIPE_CLOSED
    except KeyboardInterrupt:
        exit_code = exits.INTERRUPTED
    if exit_code == exits.PIPE_CLOSED:
        # Whatever is still buffered has no reader; without this Python complains when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return exit_code


def complain(text: str) -> None:
    """Say on standard error what went wrong. The text may come from a host: it must not drive the terminal."""
    from stellwerk.cli.plain import neutral

    lines = "\n".join(neutral(line) for line in text.splitlines())
    # What names a line of a file begins with it: editors and people look for it there.
    click.echo(lines if exits.AT_A_LINE.match(lines) else f"stellwerk: {lines}", err=True)


def never_fail_to_print() -> None:
    """A character that the terminal's encoding lacks is shown by its number."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
