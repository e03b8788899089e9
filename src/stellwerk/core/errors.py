"""The errors that callers of Stellwerk can cause or meet.

StellwerkError
├── Refused              the request is wrong; asking again unchanged gives the same answer
│   ├── NotFound         the thing named does not exist
│   ├── Clash            the thing exists, but its state does not allow this
│   └── NoRight          the caller is known, but may not do this
├── Unavailable          not now: overload, full disk, lost or foreign store; ask again later
├── ImpossibleEvent      a bug: an event that does not fit the state it is applied to
└── BrokenStore          a bug or a damaged file: what was read is not what was written
"""

from __future__ import annotations


class StellwerkError(Exception):
    """Base of all errors that Stellwerk raises on purpose."""


class Refused(StellwerkError):
    """The request is wrong. `where` points into the request, as in `runs[3].action.argv`."""

    def __init__(self, message: str, where: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where


class NotFound(Refused):
    """The thing named does not exist."""


class Clash(Refused):
    """The thing exists, but its state does not allow what was asked."""


class NoRight(Refused):
    """The caller is known, but its role does not allow this."""


class Unavailable(StellwerkError):
    """Not now; nothing was acknowledged. `retry_after_s` is an honest guess."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class ImpossibleEvent(StellwerkError):
    """An event was applied to a state that it does not fit: a bug in a decision."""


class BrokenStore(StellwerkError):
    """What was read from the store is not what was written to it."""
