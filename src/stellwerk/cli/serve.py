"""The command `up`: settings from flags, environment and file, then a host until it is told to stop."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import click

from stellwerk.cli import exits
from stellwerk.core.errors import Refused, StellwerkError


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="The file of settings.  [default: stellwerk.yml]")
@click.option("--data", type=click.Path(path_type=Path), help="The data folder.  [default: .stellwerk]")
@click.option("--store", metavar="URL", help="Where the runs are kept.  [default: SQLite in the data folder]")
@click.option("--host", metavar="ADDRESS", help="The address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65_535), help="The port to listen on.  [default: 8765]")
@click.option("--workers", type=click.IntRange(0, 1_000), help="Slots of the queue `default`.  [default: 16]")
def up(
    *,
    config: Path | None,
    data: Path | None,
    store: str | None,
    host: str | None,
    port: int | None,
    workers: int | None,
) -> int:
    """Start a host on this machine.

    It listens, claims and runs until SIGTERM or Ctrl-C, then waits for what runs (workers.drain, 30s); a
    second signal skips the wait. Flags win over the environment (STELLWERK_…), and that over the file.

    \b
    Example:
      stellwerk up --port 8800 --workers 4
    """
    given = {"data": data, "store": store, "host": host, "port": port, "workers": workers}
    flags: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    # Here, not above: a host is heavy, and every other command does without it.
    from stellwerk.kernel.settings import load_settings

    try:
        settings = load_settings(config, os.environ, flags)
    except Refused as refused:
        raise exits.Quit(refused.message, exits.USAGE) from refused
    from stellwerk.assemble import run_host

    try:
        return run_host(settings)
    except Refused as refused:
        is_file = exits.AT_A_LINE.match(refused.message) is not None
        raise exits.Quit(refused.message, exits.USAGE if is_file else exits.REFUSED) from refused
    except StellwerkError as error:
        raise exits.Quit(str(error), exits.REFUSED) from error
    except OSError as error:
        if error.errno not in {errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES}:
            raise
        raise exits.Quit(f"the host cannot listen: {error.strerror or error}. Try another --port.") from error
