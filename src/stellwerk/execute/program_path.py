"""Which file a command's first word means: searched in the run's own PATH, seen from the run's own folder.

posix_spawnp would search the keeper's PATH instead.
"""

from __future__ import annotations

import errno
import os


def find_program(name: bytes, path: bytes | None) -> bytes:
    """The file to execute; the caller stands in the run's folder already. Raises OSError as exec would."""
    if not name:
        raise OSError(errno.ENOENT, "the command is empty")
    if b"/" in name:
        return name
    is_there = False
    for folder in (path if path is not None else os.fsencode(os.defpath)).split(b":"):
        file = os.path.join(folder or b".", name)
        if os.path.isfile(file):
            if os.access(file, os.X_OK):
                return file
            is_there = True
    if is_there:
        raise OSError(errno.EACCES, "found in PATH, but not executable", name)
    raise OSError(errno.ENOENT, "no such program in the PATH of the run", name)
