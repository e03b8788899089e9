"""Bytes for another process in a file without a name: never a pipe that the host would have to feed."""

from __future__ import annotations

import os
import tempfile


def nameless_file(content: bytes, folder: str | None = None) -> int:
    """A descriptor at the beginning of a file with this content; in memory where the system has that."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("stellwerk", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile(dir=folder) as temporary:
            file = os.dup(temporary.fileno())
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file
