"""Who asks, from where, and may they? Deny by default: what is not proved is refused.

The front looks at every request before any route: the Host it was sent to, the Origin it came from. The token is
looked at by the route, since only the route knows the role that it needs.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
from typing import Literal, Protocol

from stellwerk.core.errors import NoRight
from stellwerk.kernel.settings import ServerSettings
from stellwerk.kernel.tokens import RANK, Role, Token, may
from stellwerk.web.problem import HttpRefusal

RouteRole = Literal["open", "viewer", "operator", "admin"]
ROLES: frozenset[str] = frozenset({"open", *RANK})
OPEN_PATHS = frozenset({"/health"})  # the only routes that may be open, whatever a door says

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
HOSTS_REMEMBERED_MAX = 256
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_ANY_ADDRESS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104  compared with, not bound to
# A second header of these names could show one thing to us and another to a proxy.
_SINGLE = frozenset(
    {b"host", b"origin", b"authorization", b"x-admin-token", b"content-type", b"content-length", b"idempotency-key"}
)


class TokenBook(Protocol):
    """What the web tools want to know of tokens; `kernel.tokens.Tokens` is one."""

    def check(self, secret: str) -> Token | None: ...


def token_of(headers: dict[bytes, bytes], book: TokenBook, *, for_browsers: bool = False) -> Token:
    """The token that came with a request: `Authorization: Bearer T` or `X-Admin-Token: T`.

    Pages that only describe are also opened `for_browsers`, which ask for a name and a password: the password is the
    token. Nothing else is, since a browser would send it along with requests that a stranger's page makes.
    """
    try:
        return _token_of(headers, book, for_browsers)
    except HttpRefusal as refusal:
        if for_browsers:
            refusal.headers = {"www-authenticate": 'Basic realm="Stellwerk: any name, a token as the password"'}
        raise


def _token_of(headers: dict[bytes, bytes], book: TokenBook, for_browsers: bool) -> Token:
    given = headers.get(b"authorization")
    if given is not None:
        scheme, _, secret = given.partition(b" ")
        if for_browsers and scheme.lower() == b"basic":
            secret = _password(secret)
        elif scheme.lower() != b"bearer":
            raise _no_token("the Authorization header must read: Bearer and a token")
    else:
        secret = headers.get(b"x-admin-token", b"")
    if not secret:
        raise _no_token("a token is needed: send the header Authorization: Bearer TOKEN")
    token = book.check(secret.strip().decode("latin-1"))
    if token is None:
        raise _no_token("this token is not valid here, or no longer")
    return token


def _password(credentials: bytes) -> bytes:
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def need_role(token: Token, role: Role) -> None:
    """Refuse who may not."""
    if not may(token, role):
        raise NoRight(f"this needs the role {role}; the token {token.name!r} is a {token.role}'s")


def _no_token(text: str) -> HttpRefusal:
    return HttpRefusal(401, text, headers={"www-authenticate": 'Bearer realm="stellwerk"'})


class Hosts:
    """The names under which this host may be addressed: a page of a stranger must not reach it by a name of its own.

    A stranger's page can give its own name our address, but it cannot make a browser send a bare address as Host.
    So where the host listens at all addresses, any address is right, and names must be listed.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._names = _LOOPBACK | {_bare(name) for name in (*settings.allowed_hosts, settings.host) if name}
        self._any_address = settings.host in _ANY_ADDRESS
        self._known: set[bytes] = set()

    def allow(self, host: bytes) -> bool:
        if host in self._known:
            return True
        name = _name_in(host)
        if name is None or not (name in self._names or (self._any_address and _is_address(name))):
            return False
        if len(self._known) < HOSTS_REMEMBERED_MAX:
            self._known.add(host)
        return True


def checked_headers(pairs: list[tuple[bytes, bytes]], method: str, hosts: Hosts) -> dict[bytes, bytes]:
    """The headers of a request that came to the right host, from a place that may ask."""
    headers = dict(pairs)
    if len(headers) != len(pairs):
        _refuse_doubles(pairs)
    host = headers.get(b"host")
    if not host:
        raise HttpRefusal(400, "the Host header is missing")
    if not hosts.allow(host):
        text = "this host does not go by that name; add it to server.allowed_hosts if it should"
        raise HttpRefusal(421, text, where="Host")
    if method not in SAFE_METHODS:
        _check_origin(headers, host)
    return headers


def _check_origin(headers: dict[bytes, bytes], host: bytes) -> None:
    """A change must not come from a page of another site."""
    site = headers.get(b"sec-fetch-site")
    if site is not None and site not in (b"same-origin", b"none"):
        raise HttpRefusal(403, "a page of another site may not change anything here", where="Sec-Fetch-Site")
    origin = headers.get(b"origin")
    if origin is not None:
        scheme, _, place = origin.partition(b"://")
        # Behind a TLS proxy our own scheme is not the browser's, so only the place is compared.
        if scheme not in (b"http", b"https") or place.lower() != host.lower():
            raise HttpRefusal(403, "a page of another origin may not change anything here", where="Origin")


def _refuse_doubles(pairs: list[tuple[bytes, bytes]]) -> None:
    seen: set[bytes] = set()
    for name, _ in pairs:
        if name in seen and name in _SINGLE:
            raise HttpRefusal(400, f"the header {name.decode('latin-1')} is given twice")
        seen.add(name)


def _name_in(host: bytes) -> str | None:
    """The name of `name:port`, `[address]:port` or `name`; None if it is neither."""
    if not host.isascii() or len(host) > 255:
        return None
    text = host.decode("ascii").lower()
    if text.startswith("["):
        name, bracket, port = text[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            return None
        port = port[1:]
    else:
        name, _, port = text.partition(":")
    if port and not (port.isdigit() and len(port) <= 5):
        return None
    return name.removesuffix(".") or None


def _bare(name: str) -> str:
    return _name_in(name.encode("ascii", "replace")) or name if not _is_address(name) else name.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
