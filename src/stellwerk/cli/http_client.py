"""A small HTTP client for `/api` on the standard library: JSON answers, server-sent events, clear errors.

Every error becomes a `Quit` with the exit code that belongs to it: no host 3, no right 4, refused 1.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote, urlencode

from stellwerk.cli import exits
from stellwerk.cli.address import Address

CONNECT_S = 5.0
ANSWER_S = 60.0  # a bulk verb over many runs may take a while
QUIET_S = 75.0  # a stream that is silent for so long is opened again: its host may be gone without a word
RECONNECT_S_MAX = 60.0  # a restarted host is back by then
PAUSE_S_FIRST, PAUSE_S_MAX = 0.1, 3.0
PATIENCE_S = 1.0  # a shorter loss is not worth a word
ANSWER_BYTES_MAX = 256 * 1024 * 1024
STREAM_LINE_BYTES_MAX = 16 * 1024 * 1024
READ_BYTES = 64 * 1024

Query = Mapping[str, str | int | bool | tuple[str, ...] | None]  # None: left out; a tuple: repeated


class Document(dict[str, Any]):
    """A JSON object of the host. A field that should be there and is not is the host's fault, not a bug here."""

    def __missing__(self, name: str) -> Any:
        raise exits.Quit(f"the host's answer lacks {name!r}: is it Stellwerk, and of this version?", exits.NO_HOST)


class Answer(NamedTuple):
    """`body` is the JSON object, an empty one where there was none."""

    status: int
    body: Any


class ServerEvent(NamedTuple):
    """One server-sent event; `id` is the last one given, also by an earlier event."""

    id: str
    name: str
    data: str


class Lost(Exception):
    """The connection broke, or was never made. `is_fresh` if it was not even opened."""

    def __init__(self, text: str, *, is_fresh: bool) -> None:
        super().__init__(text)
        self.is_fresh = is_fresh


class Sleep(Protocol):
    """How to wait; a test may wait faster."""

    def __call__(self, seconds: float, /) -> None: ...


class Client:
    """Talks to one host. Each request has its own connection: a command makes few, and none can be stale."""

    def __init__(self, address: Address, sleep: Sleep = time.sleep, say: Callable[[str], None] | None = None) -> None:
        self.address = address
        self._sleep = sleep
        self._say = say

    def get(self, path: str, query: Query | None = None, *, also: frozenset[int] = frozenset()) -> Any:
        """The JSON document at a path. Statuses in `also` are answers, not errors."""
        return self.ask("GET", path, query, also=also).body

    def ask(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        also: frozenset[int] = frozenset(),
        wait_s: float = 0.0,
    ) -> Answer:
        """One request and its answer; an answer that refuses is raised as `Quit`."""
        sent = {"Accept": "application/json", **(headers or {})}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            sent["Content-Type"] = "application/json"
        try:
            connection, response = self._open(method, path, query, data, sent, wait_s + ANSWER_S)
        except Lost as lost:
            raise self._no_host(lost, method) from lost
        try:
            content = response.read(ANSWER_BYTES_MAX + 1)
            if response.length:
                # A read with a limit does not notice by itself that the rest is missing.
                raise http.client.IncompleteRead(content, response.length)
        except (OSError, http.client.HTTPException) as error:
            raise self._no_host(Lost(_words(error), is_fresh=False), method) from error
        finally:
            response.close()
            connection.close()
        document = self._document(response, content)
        if response.status >= 300 and response.status not in also:
            raise self._refusal(response, document)
        return Answer(response.status, document)

    def stream(self, path: str, query: Query, after: int | None) -> Iterator[ServerEvent]:
        """Server-sent events after an id, opened again with `Last-Event-ID` whenever the connection breaks.

        It never ends by itself; the caller stops when it has seen the end. A host that stays away is a `Quit`.
        """
        last = None if after is None else str(after)
        pause_s, away_s, is_first = PAUSE_S_FIRST, 0.0, True
        while True:
            try:
                for event in self._stream_once(path, query, last):
                    pause_s, away_s, is_first = PAUSE_S_FIRST, 0.0, False
                    last = event.id or last
                    yield event
                away_s, is_first = 0.0, False
            except Lost as lost:
                if (is_first and lost.is_fresh) or away_s >= RECONNECT_S_MAX:
                    raise self._no_host(lost, "GET") from lost
                is_first = is_first and lost.is_fresh
                if away_s < PATIENCE_S <= away_s + pause_s and self._say is not None:
                    self._say(f"the connection to {self.address.url} is lost ({lost}); trying again")
            self._sleep(pause_s)
            away_s += pause_s
            pause_s = min(pause_s * 2, PAUSE_S_MAX)

    def _stream_once(self, path: str, query: Query, last: str | None) -> Iterator[ServerEvent]:
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        if last is not None:
            # Both: the header is what the protocol says, the parameter is what the first request said.
            headers["Last-Event-ID"] = last
            query = {**query, "after": last}
        connection, response = self._open("GET", path, query, None, headers, QUIET_S)
        try:
            if response.status != 200:
                document = self._document(response, response.read(ANSWER_BYTES_MAX))
                if response.status in {502, 503, 504}:
                    raise Lost(self._refusal(response, document).text, is_fresh=False)
                raise self._refusal(response, document)
            if not response.getheader("Content-Type", "").startswith("text/event-stream"):
                raise self._not_ours(f"it answers {path} with no event stream")
            yield from parse_events(response, last or "")
        except (OSError, http.client.HTTPException) as error:
            raise Lost(_words(error), is_fresh=False) from error
        finally:
            response.close()
            connection.close()

    def _open(
        self,
        method: str,
        path: str,
        query: Query | None,
        data: bytes | None,
        headers: Mapping[str, str],
        answer_s: float,
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        address = self.address
        maker = http.client.HTTPSConnection if address.is_tls else http.client.HTTPConnection
        connection = maker(address.host, address.port, timeout=CONNECT_S)
        try:
            connection.connect()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Lost(_words(error), is_fresh=True) from error
        sent = {"User-Agent": "stellwerk-cli", "Connection": "close", **headers}
        if address.token is not None:
            sent["Authorization"] = f"Bearer {address.token}"
        try:
            if connection.sock is not None:
                connection.sock.settimeout(answer_s)
            try:
                connection.request(method, address.prefix + path + _query_text(query), data, sent)
            except (BrokenPipeError, ConnectionResetError):
                # A host that refuses a body may close before it has read all of it; its answer says why.
                pass
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Lost(_words(error), is_fresh=False) from error

    def _document(self, response: http.client.HTTPResponse, content: bytes) -> Any:
        if len(content) > ANSWER_BYTES_MAX:
            raise exits.Quit(f"the answer is larger than {ANSWER_BYTES_MAX >> 20} MiB; ask for less with --limit")
        if not content:
            return Document()
        try:
            document = json.loads(content)
        except (ValueError, RecursionError):
            document = None
        if isinstance(document, dict):
            return Document(document)
        if response.status >= 300:
            return None
        raise self._not_ours("its answer is no JSON object")

    def _refusal(self, response: http.client.HTTPResponse, document: Any) -> exits.Quit:
        status, reason = response.status, response.reason
        told = document if isinstance(document, dict) else {}
        text = told.get("message") if isinstance(told.get("message"), str) else None
        if status == 401:
            return exits.Quit(f"{self.address.url} does not know this caller: {self._token_hint()}", exits.NO_RIGHT)
        if status == 403:
            return exits.Quit(f"{text or 'this is not allowed'} (token from {self.address.token_from})", exits.NO_RIGHT)
        if 300 <= status < 400:
            target = response.getheader("Location", "elsewhere")
            return self._not_ours(f"it points to {target}; if that is the host, give its address")
        if status in {502, 504}:
            return self._not_ours(f"a proxy says {status} {reason}: the host behind it is away")
        if text is None:
            return exits.Quit(f"{self.address.url} answered {status} {reason} without saying why; is it Stellwerk?")
        where = told.get("where")
        if isinstance(where, str) and where not in text:
            text += f" (at {where})"
        if status == 503:
            after_s = response.getheader("Retry-After")
            text += f". Nothing was taken; try again{f' in {after_s} s' if after_s else ' later'}."
        if status >= 500 and told.get("request_id"):
            text += f" (request {told['request_id']})"
        return exits.Quit(text)

    def _token_hint(self) -> str:
        if self.address.token is not None:
            return f"the token from {self.address.token_from} is not valid here (or no longer)"
        return f"no token was found in {self.address.token_from}. Set STELLWERK_TOKEN, or use --token-file or --data"

    def _no_host(self, lost: Lost, method: str) -> exits.Quit:
        if lost.is_fresh:
            text = (
                f"no host answers at {self.address.url} ({lost}). "
                "Start one with `stellwerk up`, or name it with --url or STELLWERK_URL."
            )
        else:
            text = f"the connection to {self.address.url} broke before the answer came ({lost})."
            if method != "GET":
                text += " Whether the request took effect is not known: look with `stellwerk runs`."
        return exits.Quit(text, exits.NO_HOST)

    def _not_ours(self, what: str) -> exits.Quit:
        return exits.Quit(
            f"what answers at {self.address.url} is no Stellwerk host: {what}. Check --url.", exits.NO_HOST
        )


class Readable(Protocol):
    """What a stream is read from."""

    def read1(self, n: int = ..., /) -> bytes: ...


def parse_events(source: Readable, last_id: str) -> Iterator[ServerEvent]:
    """Server-sent events as they arrive. An event that is cut off by the stream's end is dropped."""
    name, data, seen_id = "", list[str](), last_id
    for line in _lines(source):
        if not line:
            if data:
                last_id = seen_id
                yield ServerEvent(last_id, name or "message", "\n".join(data))
            name, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
        elif field == "id":
            if "\0" not in value:
                seen_id = value


def _lines(source: Readable) -> Iterator[str]:
    buffer = b""
    while True:
        chunk = source.read1(READ_BYTES)
        if not chunk:
            return
        *whole, buffer = (buffer + chunk).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r").decode("utf-8", "replace")
        if len(buffer) > STREAM_LINE_BYTES_MAX:
            raise http.client.LineTooLong("server-sent event")


def path_of(*parts: str) -> str:
    """A path below the host's root; each part is quoted, so that no id can leave its place."""
    quoted = [quote(part, safe=":") for part in parts]
    return "/" + "/".join("%2E" * len(part) if part in {".", ".."} else part for part in quoted)


def _query_text(query: Query | None) -> str:
    if not query:
        return ""
    given: list[tuple[str, str]] = []
    for name, value in query.items():
        if isinstance(value, tuple):
            given.extend((name, part) for part in value)
        elif value is not None:
            given.append((name, str(value).lower() if isinstance(value, bool) else str(value)))
    return "?" + urlencode(given) if given else ""


def _words(error: Exception) -> str:
    """What went wrong, in a few words; the class says it where the error itself is mute."""
    if isinstance(error, socket.gaierror):
        return "its name is not known"
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
