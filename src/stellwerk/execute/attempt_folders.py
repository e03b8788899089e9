"""STELLWERK_TMP: a private folder per attempt, made before it starts and removed when it is over."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


class AttemptFolders:
    """Folders are numbered, so that no text of a user's ever becomes a file name."""

    def __init__(self, temp_root: Path) -> None:
        self._temp_root = temp_root
        self._count = 0
        self._remover: ThreadPoolExecutor | None = None

    def open(self) -> None:
        """Make the folder of this host, for its own user alone."""
        self._temp_root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._own = tempfile.mkdtemp(prefix="host-", dir=self._temp_root)  # mkdtemp: mode 0700

    async def close(self) -> None:
        """Remove everything, and wait for it."""
        await asyncio.get_running_loop().run_in_executor(None, self._remove_all)

    def make(self) -> str:
        """A new folder."""
        self._count += 1
        folder = f"{self._own}/{self._count}"
        os.mkdir(folder, 0o700)
        return folder

    def remove(self, folder: str, script: str | None) -> None:
        """Remove it now if only our script is in it, else in a thread: nobody knows how much was put into it."""
        try:
            if script is not None:
                os.unlink(script)
            os.rmdir(folder)
        except OSError:
            if self._remover is None:
                self._remover = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stellwerk-remove")
            self._remover.submit(shutil.rmtree, folder, ignore_errors=True)

    def _remove_all(self) -> None:
        if self._remover is not None:
            self._remover.shutdown(wait=True)
        shutil.rmtree(self._own, ignore_errors=True)
