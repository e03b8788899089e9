"""Which host a command talks to, and with which token.

The host: `--url`, `STELLWERK_URL`, the address in `stellwerk.yml`, 127.0.0.1:8765. The token: `--token-file`,
`STELLWERK_TOKEN`, `STELLWERK_ADMIN_TOKEN`, the file `admin-token` in the data folder. A token is never taken from
the command line, where every user of the machine could read it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from stellwerk.cli import exits

HOST_DEFAULT, PORT_DEFAULT = "127.0.0.1", 8765
CONFIG_DEFAULT = "stellwerk.yml"
DATA_DEFAULT = ".stellwerk"
TOKEN_FILE = "admin-token"  # noqa: S105 - a file's name
TOKEN_CHARS_MAX = 4_096
CONFIG_BYTES_MAX = 16 * 1024 * 1024

_TOKEN = re.compile(r"[\x21-\x7e]+")
# Where a host listens and where it is reached differ for the addresses that mean "everywhere".
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "*": "127.0.0.1", "": "127.0.0.1"}  # noqa: S104


class Asked(NamedTuple):
    """What the command line says about the host."""

    url: str | None = None
    token_file: Path | None = None
    config: Path | None = None
    data: Path | None = None


class Address(NamedTuple):
    """A host as the client needs it. `prefix` is a path before `/api`, of a proxy; it has no slash at its end."""

    is_tls: bool
    host: str
    port: int
    prefix: str
    token: str | None
    token_from: str  # where the token is from or was looked for: for people

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.prefix}"


def find_address(asked: Asked, environ: Mapping[str, str], folder: Path, *, needs_token: bool = True) -> Address:
    """Look in all places, in their order. `folder` is the working folder."""
    config_path = asked.config
    if config_path is None and environ.get("STELLWERK_CONFIG"):
        config_path = Path(environ["STELLWERK_CONFIG"])
    config = _read_config(folder / (config_path or CONFIG_DEFAULT), is_asked_for=config_path is not None)
    beside = (folder / (config_path or CONFIG_DEFAULT)).parent
    token, token_from = _find_token(asked, environ, config, beside, folder) if needs_token else (None, "nowhere")
    url = asked.url or environ.get("STELLWERK_URL")
    if url:
        source = "--url" if asked.url else "STELLWERK_URL"
        is_tls, host, port, prefix = _parse_url(url, source)
    else:
        server = _part(config, "server")
        is_tls, prefix = bool(_part(server, "tls").get("cert")), ""
        host, port = _listening(server, environ)
    return Address(is_tls, host, port, prefix, token, token_from)


def _parse_url(url: str, source: str) -> tuple[bool, str, int, str]:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    wrong = f"{source} is not the address of a host: {url}. Write it as http://127.0.0.1:8765"
    if "@" in parts.netloc:
        raise exits.Quit(f"{source} holds a name or password; give a token by --token-file", exits.USAGE)
    try:
        port = parts.port
    except ValueError:
        raise exits.Quit(wrong, exits.USAGE) from None
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
        raise exits.Quit(wrong, exits.USAGE)
    if re.search(r"[^\x21-\x7e]", url) is not None:
        raise exits.Quit(wrong, exits.USAGE)
    is_tls = parts.scheme == "https"
    return is_tls, parts.hostname, port or (443 if is_tls else 80), parts.path.rstrip("/")


def _part(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = settings.get(name)
    return found if isinstance(found, dict) else {}


def _listening(server: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[str, int]:
    host = environ.get("STELLWERK_HOST") or server.get("host")
    host = host if isinstance(host, str) else HOST_DEFAULT
    port = environ.get("STELLWERK_PORT") or server.get("port")
    try:
        port = int(str(port))
    except ValueError:
        port = PORT_DEFAULT
    return _EVERYWHERE.get(host, host), port if 0 < port < 65_536 else PORT_DEFAULT


def _read_config(path: Path, *, is_asked_for: bool) -> Mapping[str, Any]:
    """The file's settings, as far as they can be read: whether they are right is the host's question."""
    if not path.is_file():
        if is_asked_for:
            raise exits.Quit(f"there is no file {path}; check --config", exits.USAGE)
        return {}
    # Here, not above: most commands meet no file.
    import yaml

    try:
        with path.open("rb") as file:
            document = yaml.safe_load(file.read(CONFIG_BYTES_MAX))
    except (OSError, yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _find_token(
    asked: Asked, environ: Mapping[str, str], config: Mapping[str, Any], beside: Path, folder: Path
) -> tuple[str | None, str]:
    if asked.token_file is not None:
        source = f"the file {asked.token_file}"
        return _read_token(folder / asked.token_file, source, is_asked_for=True), source
    for name in ("STELLWERK_TOKEN", "STELLWERK_ADMIN_TOKEN"):
        if environ.get(name, "").strip():
            return _checked(environ[name], name), name
    data = asked.data or (Path(environ["STELLWERK_DATA"]) if environ.get("STELLWERK_DATA") else None)
    if data is not None:
        path = folder / data.expanduser() / TOKEN_FILE
    else:
        # A host that was given its token by the file of settings has made none of its own.
        set_token = _part(config, "server").get("admin_token")
        if isinstance(set_token, str) and set_token:
            source = "server.admin_token in the file of settings"
            return _checked(set_token, source), source
        written = config.get("data")
        name = written if isinstance(written, str) and written else DATA_DEFAULT
        path = beside / Path(name).expanduser() / TOKEN_FILE
    source = f"the file {path}"
    return _read_token(path, source, is_asked_for=False), source


def _read_token(path: Path, source: str, *, is_asked_for: bool) -> str | None:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(TOKEN_CHARS_MAX + 1)
    except PermissionError:
        raise exits.Quit(
            f"{source} may not be read by this user; its owner may, or set STELLWERK_TOKEN", exits.NO_RIGHT
        ) from None
    except OSError as error:
        if is_asked_for:
            raise exits.Quit(f"{source} cannot be read: {error.strerror}; check --token-file", exits.USAGE) from None
        return None
    return _checked(text, source)


def _checked(text: str, source: str) -> str:
    token = text.strip()
    if len(token) > TOKEN_CHARS_MAX or _TOKEN.fullmatch(token) is None:
        raise exits.Quit(f"{source} does not hold a token: one line of visible ASCII characters", exits.USAGE)
    return token
