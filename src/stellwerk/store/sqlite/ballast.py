"""Ballast: a file that is thrown off when the disk is full, so that ends and clean-up can still be written.

A full disk blocks even the DELETE that would make room.
"""

from __future__ import annotations

import os
from pathlib import Path

BALLAST_NAME = "ballast"
BALLAST_BYTES = 1024 * 1024
ROOM_BYTES = 2 * BALLAST_BYTES  # free space from which on the ballast is taken in again


class Ballast:
    """`is_off` while the disk is low."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / BALLAST_NAME
        self.is_off = False

    def is_missed(self) -> bool:
        """Whether it is off and there is still no room for it."""
        return self.is_off and not self._has_room()

    def _has_room(self) -> bool:
        room = os.statvfs(self._path.parent)
        return room.f_bavail * room.f_frsize >= ROOM_BYTES

    def take_in(self) -> None:
        """Have the file there, if there is room for it."""
        try:
            if self._path.exists() and self._path.stat().st_size == BALLAST_BYTES:
                self.is_off = False
                return
            if not self._has_room():
                self.is_off = True
                return
            self._write()
            self.is_off = False
        except OSError:
            self.throw_off()

    def throw_off(self) -> None:
        """Give its room to what must be written."""
        self.is_off = True
        try:
            self._path.unlink(missing_ok=True)
        except OSError:
            pass  # then there is no room to be had; the next write says so

    def _write(self) -> None:
        # Random bytes: a file system that compresses would keep no room for zeros.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(os.urandom(BALLAST_BYTES))
            file.flush()
            os.fsync(file.fileno())
