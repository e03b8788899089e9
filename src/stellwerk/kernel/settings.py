"""Settings: by flag, environment and `stellwerk.yml`, in that order. Every mistake names its line and column."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from stellwerk.core.errors import Refused
from stellwerk.core.run import KEEP_MS_DEFAULT
from stellwerk.core.times import SECOND_MS, parse_duration

CONFIG_NAME = "stellwerk.yml"
CONFIG_BYTES_MAX = 16 * 1024 * 1024
QUEUES = ("default", "sync", "events", "nodes", "steps", "reactive")
SLOTS_MAX = 1_000
DEPTH_MAX = 20
PLACES_MAX = 100_000  # aliases of aliases can stand for more than any memory holds
SECRET_CHARS_MIN, SECRET_CHARS_MAX = 10, 256  # a longer one is refused by every check, see tokens.TOKEN_CHARS_MAX
LEASE_MS_MIN = SECOND_MS


class ServerSettings(Struct, frozen=True):
    host: str = "127.0.0.1"
    port: int = 8765
    allowed_hosts: tuple[str, ...] = ()
    behind_tls_proxy: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None


class WorkerSettings(Struct, frozen=True):
    slots: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(QUEUES, 16))
    lease_ms: int = 30 * SECOND_MS
    drain_ms: int = 30 * SECOND_MS
    kill_grace_ms: int = 10 * SECOND_MS


class ExecutionSettings(Struct, frozen=True):
    shell: bool = True
    python: tuple[str, ...] | None = None  # packages whose functions may be called; None: any


class Settings(Struct, frozen=True):
    """All that a host must be told. `folder` is that of the config file: what relative paths start from."""

    folder: Path
    data: Path
    store: str = "sqlite:"
    server: ServerSettings = field(default_factory=ServerSettings)
    workers: WorkerSettings = field(default_factory=WorkerSettings)
    execution: ExecutionSettings = field(default_factory=ExecutionSettings)
    keep_ms: int | None = KEEP_MS_DEFAULT
    admin_token: str | None = None


class _Place(Struct, frozen=True):
    """A value of the file with the place where it stands, and its key with its own."""

    value: Any
    line: int
    column: int
    key_line: int
    key_column: int


def load_settings(config: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> Settings:
    """Settings of a host. `config` None: `stellwerk.yml` in the working folder, if there is one."""
    path = config or Path(environ.get("STELLWERK_CONFIG", "") or CONFIG_NAME)
    found: dict[str, _Place] = {}
    if config is not None or "STELLWERK_CONFIG" in environ or path.exists():
        found = _read(path)
    folder = path.resolve().parent
    reader = _Reader(path.name, found, environ, flags)
    settings = _settings(reader, folder)
    reader.refuse_unknown()
    if reader.mistakes:
        raise Refused("\n".join(reader.mistakes))
    return settings


def _settings(reader: _Reader, folder: Path) -> Settings:
    slots = {queue: reader.whole(f"workers.{queue}", 16, 0, SLOTS_MAX) for queue in QUEUES}
    keep_ms = reader.keep("retention", KEEP_MS_DEFAULT)
    server = ServerSettings(
        host=reader.text("server.host", "127.0.0.1"),
        port=reader.whole("server.port", 8765, 0, 65_535),
        allowed_hosts=reader.texts("server.allowed_hosts") or (),
        behind_tls_proxy=reader.flag("server.behind_tls_proxy", False),
        tls_cert=reader.path("server.tls.cert", folder),
        tls_key=reader.path("server.tls.key", folder),
    )
    if not _is_loopback(server.host) and not server.behind_tls_proxy and server.tls_cert is None:
        reader.mistake(
            "server.host",
            f"{server.host} is not this machine alone: set server.tls (cert and key), or server.behind_tls_proxy: true",
        )
    if (server.tls_cert is None) != (server.tls_key is None):
        reader.mistake("server.tls", "needs both cert and key")
    return Settings(
        folder=folder,
        data=reader.path("data", folder) or folder / ".stellwerk",
        store=reader.text("store", "sqlite:"),
        server=server,
        workers=WorkerSettings(
            slots=slots,
            lease_ms=reader.duration("workers.lease", 30 * SECOND_MS, LEASE_MS_MIN),
            drain_ms=reader.duration("workers.drain", 30 * SECOND_MS, 0),
            kill_grace_ms=reader.duration("workers.kill_grace", 10 * SECOND_MS, 0),
        ),
        execution=ExecutionSettings(
            shell=reader.flag("execution.shell", True), python=reader.texts("execution.python")
        ),
        keep_ms=keep_ms,
        admin_token=reader.secret("server.admin_token"),
    )


# The variables of the environment that are not simply STELLWERK_ and the setting's name.
_VARIABLES = {"workers.default": "STELLWERK_WORKERS", "server.host": "STELLWERK_HOST", "server.port": "STELLWERK_PORT"}
_FLAGS = {"workers.default": "workers", "server.host": "host", "server.port": "port"}


class _Reader:
    """Looks a setting up by flag, environment and file; collects mistakes instead of stopping at the first."""

    def __init__(
        self, file: str, found: dict[str, _Place], environ: Mapping[str, str], flags: Mapping[str, object]
    ) -> None:
        self._file = file
        self._found = found
        self._environ = environ
        self._flags = flags
        self._known: set[str] = set()
        self.mistakes: list[str] = []

    def _look(self, name: str) -> tuple[object, str] | None:
        """The value of a setting and where it was said."""
        self._known.add(name)
        flag = self._flags.get(_FLAGS.get(name, name))
        if flag is not None:
            return flag, f"--{_FLAGS.get(name, name)}"
        variable = _VARIABLES.get(name, "STELLWERK_" + name.replace(".", "_").upper())
        if self._environ.get(variable):
            return self._environ[variable], variable
        place = self._found.get(name)
        if place is not None and place.value is not None:
            return place.value, f"{self._file}:{place.line}:{place.column}"
        return None

    def mistake(self, name: str, text: str) -> None:
        found = self._look(name)
        where = found[1] if found is not None else self._file
        self.mistakes.append(f"{where}: {name} {text}")

    def _take(self, name: str, default: Any, parse: Callable[[object], Any]) -> Any:
        found = self._look(name)
        if found is None:
            return default
        try:
            return parse(found[0])
        except Refused as error:
            self.mistakes.append(f"{found[1]}: {error.message}")
        except (ValueError, TypeError) as error:
            self.mistakes.append(f"{found[1]}: {name} {error}")
        return default

    def text(self, name: str, default: str) -> str:
        def parse(value: object) -> str:
            if not isinstance(value, str | Path) or not str(value) or len(str(value)) > 4_096:
                raise ValueError("must be a text")
            return str(value)

        return str(self._take(name, default, parse))

    def secret(self, name: str) -> str | None:
        value = self._environ.get("STELLWERK_ADMIN_TOKEN", "")
        where = "STELLWERK_ADMIN_TOKEN:"
        if not value:
            value, where = self.text(name, ""), ""
        if value and not SECRET_CHARS_MIN <= len(value) <= SECRET_CHARS_MAX:
            text = f"must have {SECRET_CHARS_MIN} to {SECRET_CHARS_MAX} characters"
            if where:
                self.mistakes.append(f"{where} {text}")
            else:
                self.mistake(name, text)
        return value or None

    def whole(self, name: str, default: int, lowest: int, highest: int) -> int:
        def parse(value: object) -> int:
            if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
                raise ValueError(f"must be a whole number from {lowest} to {highest}")
            return value

        return int(self._take(name, default, parse))

    def flag(self, name: str, default: bool) -> bool:
        words = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)

        def parse(value: object) -> bool:
            if isinstance(value, bool):
                return value
            if isinstance(value, str) and value.lower() in words:
                return words[value.lower()]
            raise ValueError("must be true or false")

        return bool(self._take(name, default, parse))

    def duration(self, name: str, default: int, lowest_ms: int) -> int:
        def parse(value: object) -> int:
            duration_ms = parse_duration(value, name)
            if duration_ms < lowest_ms:
                raise ValueError(f"must be at least {lowest_ms // SECOND_MS} s")
            return duration_ms

        return int(self._take(name, default, parse))

    def keep(self, name: str, default: int) -> int | None:
        def parse(value: object) -> int | None:
            return None if value == "always" else parse_duration(value, name)

        found: int | None = self._take(name, default, parse)
        return found

    def texts(self, name: str) -> tuple[str, ...] | None:
        def parse(value: object) -> tuple[str, ...]:
            if isinstance(value, str):
                value = value.split(",")
            if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
                raise ValueError("must be a list of texts")
            return tuple(value)

        found: tuple[str, ...] | None = self._take(name, None, parse)
        return found

    def path(self, name: str, folder: Path) -> Path | None:
        value = self.text(name, "")
        if not value:
            return None
        in_file = self._flags.get(name) is None and not self._environ.get("STELLWERK_" + name.replace(".", "_").upper())
        return (folder if in_file else Path.cwd()) / Path(value).expanduser()

    def refuse_unknown(self) -> None:
        prefixes = {name.rpartition(".")[0] for name in self._known}
        for name, place in self._found.items():
            if name in prefixes and place.value is not None:
                self.mistakes.append(f"{self._file}:{place.line}:{place.column}: {name} must be a mapping")
            elif name not in self._known and name not in prefixes:
                self.mistakes.append(f"{self._file}:{place.key_line}:{place.key_column}: {name} is not a setting")


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _read(path: Path) -> dict[str, _Place]:
    """The file as dotted names with their places. Duplicate keys, anchors' bombs and wrong YAML are refused."""
    import yaml  # only a host with a file needs it

    try:
        with path.open("rb") as file:
            anyone_writes = os.fstat(file.fileno()).st_mode & stat.S_IWOTH
            text = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise Refused(f"{path}: {error.strerror or error}") from None
    if anyone_writes:
        raise Refused(f"{path.name}:1:1: anyone may write this file, and so run anything as this host: chmod o-w it")
    if len(text) > CONFIG_BYTES_MAX:
        raise Refused(f"{path.name}:1:1: the file is larger than 16 MiB")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _refuse_depth(path.name, yaml.parse(text, Loader=loader))
        root = yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{mark.line + 1}:{mark.column + 1}" if mark is not None else "1:1"
        raise Refused(f"{path.name}:{place}: {error.problem or 'not YAML'}") from None
    except (yaml.YAMLError, UnicodeError, ValueError) as error:
        raise Refused(f"{path.name}:1:1: not YAML: {error}") from None
    found: dict[str, _Place] = {}
    if root is not None and root.tag != "tag:yaml.org,2002:null":
        _walk(path.name, root, found)
    return found


def _refuse_depth(file: str, events: Iterable[Any]) -> None:
    """Composing recurses, in C without a limit: what is too deep must not get so far."""
    import yaml

    depth = 0
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEPTH_MAX:
            mark = event.start_mark
            raise Refused(f"{file}:{mark.line + 1}:{mark.column + 1}: nested too deeply")


def _walk(file: str, root: Any, found: dict[str, _Place]) -> None:
    import yaml

    constructor = yaml.SafeLoader("")
    stack: list[tuple[str, Any]] = [("", root)]
    while stack:
        prefix, part = stack.pop()
        if not isinstance(part, yaml.MappingNode):
            mark = part.start_mark
            raise Refused(f"{file}:{mark.line + 1}:{mark.column + 1}: {prefix or 'the file'} must be a mapping")
        seen: set[str] = set()
        for key_part, value_part in part.value:
            mark = key_part.start_mark
            where = f"{file}:{mark.line + 1}:{mark.column + 1}"
            if not isinstance(key_part, yaml.ScalarNode):
                raise Refused(f"{where}: a key must be a plain word")
            key = key_part.value
            if key in seen:
                raise Refused(f"{where}: {key} stands here a second time")
            seen.add(key)
            name = f"{prefix}.{key}" if prefix else key
            if isinstance(value_part, yaml.MappingNode):
                if name.count(".") > DEPTH_MAX:
                    raise Refused(f"{where}: nested too deeply")
                found[name] = _Place(None, mark.line + 1, mark.column + 1, mark.line + 1, mark.column + 1)
                stack.append((name, value_part))
            else:
                spot = value_part.start_mark
                try:
                    value = constructor.construct_object(value_part, deep=True)
                except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
                    raise Refused(f"{file}:{spot.line + 1}:{spot.column + 1}: {name}: {error}") from None
                found[name] = _Place(value, spot.line + 1, spot.column + 1, mark.line + 1, mark.column + 1)
            if len(found) > PLACES_MAX:
                raise Refused(f"{where}: more than {PLACES_MAX} settings; are there aliases of aliases?")
