"""SQL lives in .sql files: each statement has a name and a line that says what it is for.

    -- name: run_versions
    -- What is there of these runs, for the comparison.
    SELECT …

Two small things are filled in when a file is read, so that no statement is ever pasted together elsewhere:
`:include(name)` stands for the text of another statement of the file, and `:rows(n)` for a number of groups of
n question marks (see `Bulk`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any, Protocol

ROWS_PER_STATEMENT = 128  # more rows a statement are no faster; fewer statements are fewer turns of the GIL

_HEADER = re.compile(r"^-- name: (\w+)\n-- (\S.*)\n", re.MULTILINE)
_COMMENT = re.compile(r"^--.*\n", re.MULTILINE)
_INCLUDE = re.compile(r":include\((\w+)\)")
_ROWS = re.compile(r":rows\((\d+)\)")


class _Executes(Protocol):
    def execute(self, sql: str, parameters: Sequence[Any], /) -> Any: ...


class Bulk:
    """A statement with `:rows(n)`, in the sizes 128, 64, … 1 only, so that each is prepared once."""

    def __init__(self, text: str) -> None:
        found = _ROWS.search(text)
        if found is None:
            raise ValueError("a bulk statement needs :rows(n)")
        self.columns = int(found.group(1))
        group = "(" + ",".join("?" * self.columns) + ")"
        self._texts: dict[int, str] = {}
        size = ROWS_PER_STATEMENT
        while size >= 1:
            self._texts[size] = _ROWS.sub(",".join([group] * size), text)
            size //= 2

    def pieces(self, values: list[Any]) -> Iterator[tuple[str, list[Any]]]:
        """The statements, with their share of the values, that together write all rows."""
        begin, columns = 0, self.columns
        left = len(values) // columns
        for size, text in self._texts.items():
            while left >= size:
                end = begin + size * columns
                yield text, values[begin:end]
                begin, left = end, left - size

    def write(self, connection: _Executes, values: list[Any]) -> int:
        """Execute for all rows in one flat list; answer how many rows were written."""
        written = 0
        for text, share in self.pieces(values):
            written += connection.execute(text, share).rowcount
        return written


def read_statements(package: str, *names: str) -> Mapping[str, str]:
    """All named statements of .sql files that lie in a package; a later one may include one of an earlier."""
    return parse_statements("".join(files(package).joinpath(name).read_text(encoding="utf-8") for name in names))


def parse_statements(text: str) -> dict[str, str]:
    """Cut a file into its named statements."""
    headers = list(_HEADER.finditer(text))
    if text.count("-- name:") != len(headers):
        raise ValueError("a statement lacks its name or its line of purpose")
    found: dict[str, str] = {}
    for header, following in zip(headers, [*headers[1:], None], strict=True):
        name = header.group(1)
        if name in found:
            raise ValueError(f"two statements are named {name}")
        body = text[header.end() : following.start() if following else len(text)]
        body = _COMMENT.sub("", body)
        body = _INCLUDE.sub(lambda match: found[match.group(1)], body)
        found[name] = body.strip().removesuffix(";")
    return found
