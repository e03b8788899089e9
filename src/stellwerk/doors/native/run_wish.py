"""From the body of a submit to what the kernel is asked for. Every mistake names its place: `[3].action.argv`."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from stellwerk.core.errors import Refused
from stellwerk.core.names import (
    LABEL_CHARS_MAX,
    LABELS_MAX,
    LIVE_KEY_CHARS_MAX,
    check_name,
    check_path,
    check_run_id,
    check_text,
)
from stellwerk.core.retry import DELAY_MS_MAX, RETRIES_MAX, RetryPolicy
from stellwerk.core.run import (
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    PRIORITY_MIN,
    Action,
    Body,
    Command,
    PythonCall,
    Shell,
    When,
)
from stellwerk.core.times import TIME_MS_MAX, parse_duration, parse_time
from stellwerk.kernel.settings import Settings
from stellwerk.kernel.submit import PARENTS_MAX, RUNS_PER_REQUEST_MAX, NewRun

ARGS_BYTES_MAX = 1024 * 1024
BACKOFF_MAX = 100.0
PATH_CHARS_MAX = 4_096

_NAME = r"^[A-Za-z0-9_.\-]+$"
_PATH = r"^[A-Za-z0-9_.\-/]+$"
Name = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": 100, "pattern": _NAME})]
Path = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": 100, "pattern": _PATH})]
_DURATION = r"^(\d{1,6}(\.\d{1,3})?(ms|s|m|h|d|w)?|P(\d{1,4}D)?(T(\d{1,5}H)?(\d{1,6}M)?(\d{1,6}(\.\d{1,3})?S)?)?)$"
Duration = Annotated[
    int | float | str,
    Meta(
        description='Seconds (60, 1.5), "10s" "5m" "2h" "1d", or ISO 8601 ("PT5M").',
        examples=["5m"],
        extra_json_schema={"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": _DURATION}]},
    ),
]
_LABELS = {
    "propertyNames": {"pattern": r"^[^=\x00-\x1f\x7f]+$", "maxLength": LABEL_CHARS_MAX},
    "additionalProperties": {"type": "string", "pattern": r"^[^\x00-\x1f\x7f]*$", "maxLength": LABEL_CHARS_MAX},
}
_ENV = {"propertyNames": {"pattern": r"^(?!STELLWERK_)[A-Za-z_][A-Za-z0-9_]*$"}}
Moment = Annotated[str, Meta(description="ISO 8601 with a zone.", extra_json_schema={"format": "date-time"})]
Priority = Annotated[int, Meta(ge=PRIORITY_MIN, le=PRIORITY_MAX)]

_FUNCTION = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)
_FUNCTION_SCHEMA = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*$"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ENTRY = re.compile(r"#(\d{1,5})")
_NO_ARGS = msgspec.Raw(b"[]")


class CommandWish(Struct, frozen=True, forbid_unknown_fields=True, tag="command", tag_field="type"):
    """A program with its arguments; no shell looks at them."""

    argv: Annotated[list[str], Meta(min_length=1)]


class ShellWish(Struct, frozen=True, forbid_unknown_fields=True, tag="shell", tag_field="type"):
    """A script for bash. Values reach it by `env` or `stdin`."""

    script: Annotated[str, Meta(min_length=1)]


class PythonWish(Struct, frozen=True, forbid_unknown_fields=True, tag="python", tag_field="type"):
    """A function `module:name`; `args` are an array or an object. A parameter named `run` gets the run."""

    function: Annotated[str, Meta(max_length=300, extra_json_schema={"pattern": _FUNCTION_SCHEMA})]
    args: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": ["array", "object"]})] = msgspec.field(
        default_factory=lambda: _NO_ARGS
    )
    isolation: Literal["process", "thread"] = "process"


class RetryWish(Struct, frozen=True, forbid_unknown_fields=True):
    """`max` retries after the first try."""

    max: Annotated[int, Meta(ge=0, le=RETRIES_MAX)]
    delay: Duration = 0
    backoff: Annotated[float, Meta(ge=1, le=BACKOFF_MAX)] = 1.0
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.0


class StdinBytes(Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes that are not text."""

    base64: str


class RunWish(Struct, frozen=True, forbid_unknown_fields=True):
    """A run that someone wants."""

    scope: Path
    name: Name
    action: CommandWish | ShellWish | PythonWish
    priority: Priority = PRIORITY_DEFAULT
    due: Moment | UnsetType = UNSET
    delay: Duration | UnsetType = UNSET
    live_key: Annotated[str, Meta(max_length=LIVE_KEY_CHARS_MAX)] | UnsetType = UNSET
    parents: Annotated[list[str], Meta(max_length=PARENTS_MAX, description='Ids, or "#0" of the same array.')] = []
    when: When = "succeeded"
    retry: RetryWish | UnsetType = UNSET
    timeout: Duration | UnsetType = UNSET
    keep: Annotated[int | float | str, Meta(description='"nothing", "always" or a duration.')] | UnsetType = UNSET
    stdin: str | StdinBytes | UnsetType = UNSET
    env: Annotated[dict[str, str], Meta(extra_json_schema=_ENV)] = {}
    cwd: Annotated[str, Meta(max_length=PATH_CHARS_MAX)] | UnsetType = UNSET
    labels: Annotated[dict[str, str], Meta(max_length=LABELS_MAX, extra_json_schema=_LABELS)] = {}


Wishes = RunWish | Annotated[list[RunWish], Meta(min_length=1, max_length=RUNS_PER_REQUEST_MAX)]


def new_run(wish: RunWish, at: str, settings: Settings, now_ms: int) -> NewRun:
    """The run that is wanted. `at` is the entry's place, such as `[3].`, or empty for a single one."""
    action, bodies = _action(wish.action, at, settings)
    if wish.stdin is not UNSET:
        bodies = (*bodies, Body("stdin", _stdin(wish.stdin, at)))
    return NewRun(
        scope=check_path(wish.scope, f"{at}scope"),
        name=check_name(wish.name, f"{at}name"),
        action=action,
        priority=wish.priority,
        due_ms=_due_ms(wish, at, now_ms),
        live_key=None if wish.live_key is UNSET else check_text(wish.live_key, f"{at}live_key", LIVE_KEY_CHARS_MAX),
        parents=_parents(wish.parents, at) if wish.parents else (),
        when=wish.when,
        retry=None if wish.retry is UNSET else _retry(wish.retry, at),
        timeout_ms=None if wish.timeout is UNSET else _timeout_ms(wish.timeout, at),
        keep_ms=settings.keep_ms if wish.keep is UNSET else _keep_ms(wish.keep, at),
        labels=_labels(wish.labels, at) if wish.labels else {},
        env=_env(wish.env, at) if wish.env else {},
        cwd=None if wish.cwd is UNSET else _filled(wish.cwd, f"{at}cwd"),
        bodies=bodies,
    )


def _action(wish: CommandWish | ShellWish | PythonWish, at: str, settings: Settings) -> tuple[Action, tuple[Body, ...]]:
    if isinstance(wish, CommandWish):
        for argument in wish.argv:
            if "\0" in argument:
                raise Refused(f"{at}action.argv holds a NUL character; no program can be given one", f"{at}action.argv")
        if not wish.argv[0]:
            raise Refused(f"{at}action.argv[0] is the program and must not be empty", f"{at}action.argv[0]")
        return Command(tuple(wish.argv)), ()
    if isinstance(wish, ShellWish):
        if not settings.execution.shell:
            raise Refused("shell actions are switched off here (execution.shell)", f"{at}action.type")
        return Shell(_filled(wish.script, f"{at}action.script")), ()
    return _python(wish, at, settings)


def _python(wish: PythonWish, at: str, settings: Settings) -> tuple[Action, tuple[Body, ...]]:
    where = f"{at}action.function"
    if _FUNCTION.fullmatch(wish.function) is None:
        raise Refused(f"{where} must read module:name, as in shop.jobs:sync", where)
    packages = settings.execution.python
    if packages is not None:
        module = wish.function.partition(":")[0]
        if not any(module == package or module.startswith(f"{package}.") for package in packages):
            raise Refused(f"{module} is not among the packages that may be called here (execution.python)", where)
    args = bytes(wish.args)
    where = f"{at}action.args"
    if args[:1] not in (b"[", b"{"):
        raise Refused(f"{where} must be an array or an object", where)
    if len(args) > ARGS_BYTES_MAX:
        raise Refused(f"{where} must be at most 1 MiB of JSON", where)
    try:
        msgspec.json.decode(args)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Refused(f"{where}: {error}", where) from None
    return PythonCall(wish.function, wish.isolation), (Body("args", args),)


def _stdin(wish: str | StdinBytes, at: str) -> bytes:
    if isinstance(wish, str):
        return wish.encode()
    try:
        return base64.b64decode(wish.base64, validate=True)
    except (binascii.Error, ValueError):
        raise Refused(f"{at}stdin.base64 is not base64", f"{at}stdin.base64") from None


def _due_ms(wish: RunWish, at: str, now_ms: int) -> int | None:
    if wish.delay is UNSET:
        return None if wish.due is UNSET else parse_time(wish.due, f"{at}due")
    if wish.due is not UNSET:
        raise Refused(f"{at}due and {at}delay are two answers to one question; give one of them", f"{at}delay")
    return min(now_ms + parse_duration(wish.delay, f"{at}delay"), TIME_MS_MAX)


def _parents(wishes: list[str], at: str) -> tuple[str | int, ...]:
    found: list[str | int] = []
    for place, parent in enumerate(wishes):
        entry = _ENTRY.fullmatch(parent)
        found.append(check_run_id(parent, f"{at}parents[{place}]") if entry is None else int(entry[1]))
    return tuple(found)


def _retry(wish: RetryWish, at: str) -> RetryPolicy:
    delay_ms = parse_duration(wish.delay, f"{at}retry.delay")
    if delay_ms > DELAY_MS_MAX:
        raise Refused(f"{at}retry.delay must be at most 30 days", f"{at}retry.delay")
    return RetryPolicy(wish.max, delay_ms, wish.backoff, wish.jitter)


def _timeout_ms(wish: int | float | str, at: str) -> int:
    timeout_ms = parse_duration(wish, f"{at}timeout")
    if timeout_ms == 0:
        raise Refused(f"{at}timeout must be more than 0; leave it out for none", f"{at}timeout")
    return timeout_ms


def _keep_ms(wish: int | float | str, at: str) -> int | None:
    if wish == "always":
        return None
    return 0 if wish == "nothing" else parse_duration(wish, f"{at}keep")


def _labels(wish: dict[str, str], at: str) -> dict[str, str]:
    where = f"{at}labels"
    for key, value in wish.items():
        check_text(key, f"{where}: the key", LABEL_CHARS_MAX)
        if "=" in key:
            raise Refused(f"{where}: a key must not hold =, since filters are written key=value", where)
        if value:
            check_text(value, f"{where}.{key}", LABEL_CHARS_MAX)
    return wish


def _env(wish: dict[str, str], at: str) -> dict[str, str]:
    where = f"{at}env"
    for name, value in wish.items():
        if _VARIABLE.fullmatch(name) is None:
            raise Refused(f"{where}: {name[:100]!r} is no name of a variable ([A-Za-z_][A-Za-z0-9_]*)", where)
        if name.startswith("STELLWERK_"):
            raise Refused(f"{where}.{name}: names that begin with STELLWERK_ are the host's own", f"{where}.{name}")
        if "\0" in value:
            raise Refused(f"{where}.{name} holds a NUL character, which no variable can", f"{where}.{name}")
    return wish


def _filled(text: str, where: str) -> str:
    if not text or "\0" in text:
        raise Refused(f"{where} must be a text without NUL characters, and not empty", where)
    return text
