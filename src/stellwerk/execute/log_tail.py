"""The end of a very long output, kept aside on disk: only its last bytes matter, and only when it is over."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from stellwerk.core.logs import LogPiece
from stellwerk.execute.keeper_frames import FRAME_HEAD

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LogPiece)


def written_bytes(piece: LogPiece) -> int:
    """How many bytes the attempt wrote for this piece: a newline counts, or empty lines would be free."""
    return len(piece.data) + (0 if piece.cut else 1)


class LogTail:
    """Two files take turns: when the newer one is full, the older one is dropped. Neither has a name."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        self._older: IO[bytes] | None = None
        self._newer: IO[bytes] = self._new_file()
        self._older_bytes = 0
        self._newer_bytes = 0
        self.total_bytes = 0

    def add(self, piece: LogPiece) -> None:
        """Keep this for as long as it is among the last."""
        size = written_bytes(piece)
        if self._newer_bytes + size > self._bytes_max:
            if self._older is not None:
                self._older.close()
            self._older, self._older_bytes = self._newer, self._newer_bytes
            self._newer, self._newer_bytes = self._new_file(), 0
        record = _encoder.encode(piece)
        self._newer.write(FRAME_HEAD.pack(len(record)) + record)
        self._newer_bytes += size
        self.total_bytes += size

    def read_last(self) -> tuple[int, Iterator[LogPiece]]:
        """How many bytes are missing, and the pieces that are left; the files go with the last one."""
        skip = max(0, self._older_bytes + self._newer_bytes - self._bytes_max)
        skipped, pieces = self._skip(skip)
        return self.total_bytes - self._older_bytes - self._newer_bytes + skipped, pieces

    def close(self) -> None:
        """Give the disk space back."""
        for file in (self._older, self._newer):
            if file is not None:
                file.close()

    def _skip(self, bytes_min: int) -> tuple[int, Iterator[LogPiece]]:
        pieces = self._records()
        skipped = 0
        while skipped < bytes_min:
            skipped += written_bytes(next(pieces))
        return skipped, pieces

    def _records(self) -> Iterator[LogPiece]:
        for file in (self._older, self._newer):
            if file is None:
                continue
            file.seek(0)
            while head := file.read(FRAME_HEAD.size):
                yield _decoder.decode(file.read(FRAME_HEAD.unpack(head)[0]))
        self.close()

    def _new_file(self) -> IO[bytes]:
        return tempfile.TemporaryFile(dir=self._folder)
