"""What a function sees of the run it is called for. Imported by every warm child, so it imports next to nothing."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class RunView(Struct, frozen=True):
    """The run as its function sees it: handed to a parameter named `run`."""

    id: str
    attempt: int
    scope: str
    name: str
    labels: Mapping[str, str] = {}
