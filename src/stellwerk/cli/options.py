"""Options that many commands share, and the kinds of values they take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stellwerk.cli.address import Asked
from stellwerk.core.errors import Refused
from stellwerk.core.names import check_run_id
from stellwerk.core.times import parse_duration, parse_time, show_time

if TYPE_CHECKING:
    from stellwerk.cli.http_client import Client, Query

STATES = ("waiting", "ready", "running", "succeeded", "failed", "cancelled")

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class RunIdType(click.ParamType[str]):
    """An id as it could exist; whether it does is the host's answer."""

    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return check_run_id(str(value), "a run's id")
        except Refused as refused:
            self.fail(refused.message, param, ctx)


class DurationType(click.ParamType[str]):
    """A duration, handed to the host as it was written."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse_duration(str(value), _where(param))
        except Refused as refused:
            self.fail(refused.message, param, ctx)
        return str(value)


class MomentType(click.ParamType[str]):
    """A moment as ISO 8601 with its zone, or as a duration from now: back (`sign` -1) or ahead (1)."""

    name = "time"

    def __init__(self, sign: int) -> None:
        self.sign = sign

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text, where = str(value), _where(param)
        try:
            distance_ms = parse_duration(text, where)
        except Refused:
            try:
                # Written anew: a plus sign or a comma in an odd place never reaches the query.
                return show_time(parse_time(text, where))
            except Refused as refused:
                self.fail(f"{refused.message}; or a duration such as 2h", param, ctx)
        moment_ms = now_ms() + self.sign * distance_ms
        if moment_ms < 0:
            self.fail(f"{where} lies before 1970", param, ctx)
        return show_time(moment_ms)


class PairType(click.ParamType[str]):
    """`KEY=VALUE`; kept as it was written."""

    name = "key=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        key, equals, _ = str(value).partition("=")
        if not key or not equals:
            self.fail(f"{value!r} is not of the form KEY=VALUE", param, ctx)
        return str(value)


RUN_ID, DURATION, PAIR = RunIdType(), DurationType(), PairType()
PAST, FUTURE = MomentType(-1), MomentType(1)


def _where(param: click.Parameter | None) -> str:
    return param.opts[0] if param is not None and param.opts else "the value"


def now_ms() -> int:
    """The clock of this machine; a host on another may differ by a little."""
    return time.time_ns() // 1_000_000


def host_options(command: Decorated) -> Decorated:
    """Where the host is, who asks, and how the answer is wanted: on every command that talks to a host.

    The command gets them as `asked` and `as_json`, made by `Asked` and the flag.
    """
    path = click.Path(path_type=Path)
    for decorate in reversed(
        (
            click.option("--json", "as_json", is_flag=True, help="Print the API's JSON, for scripts."),
            click.option("--url", metavar="URL", help="The host's address.  [env: STELLWERK_URL]"),
            click.option("--token-file", type=path, metavar="FILE", help="A file that holds the token."),
            click.option("--config", type=path, metavar="FILE", help="Settings to find the host by."),
            click.option("--data", type=path, metavar="DIR", help="The data folder with the admin token."),
        )
    ):
        command = decorate(command)
    return command


def filter_options(command: Decorated) -> Decorated:
    """Which runs are meant."""
    for decorate in reversed(
        (
            click.option("--state", type=click.Choice(STATES), help="Only runs in this state."),
            click.option("--scope", help="Only runs of this scope."),
            click.option("--name", help="Only runs of this name."),
            click.option("--label", type=PAIR, help="Only runs with this label."),
            click.option("--since", type=PAST, help="Added since: ISO 8601, or 2h for two hours ago."),
            click.option("--until", type=PAST, help="Added until: ISO 8601, or 2h for two hours ago."),
        )
    ):
        command = decorate(command)
    return command


HOST_OPTIONS = ("url", "token_file", "config", "data")
FILTERS = ("state", "scope", "name", "label", "since", "until")


def connect(options: dict[str, Any], *, needs_token: bool = True) -> Client:
    """A client by the host options; they are taken out of `options`."""
    # Here, not above: `--help` of a command needs no HTTP.
    from stellwerk.cli.address import find_address
    from stellwerk.cli.http_client import Client
    from stellwerk.cli.show import note

    asked = Asked(*(options.pop(name) for name in HOST_OPTIONS))
    return Client(find_address(asked, os.environ, Path.cwd(), needs_token=needs_token), say=note)


def run_filter(options: dict[str, Any]) -> Query:
    """The filters as query parameters; they are taken out of `options`."""
    given = {name: options.pop(name) for name in FILTERS}
    return {name: value for name, value in given.items() if value is not None}
