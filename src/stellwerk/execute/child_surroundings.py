"""What a call finds around it and may change: environment, folder, output, private folder, timers.

Every call finds them as if it were the first. All is made right before a call or after it, never by trusting a
function to tidy up; what nobody touched costs a comparison.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from typing import cast

from stellwerk.execute.call import CallRefused
from stellwerk.execute.call_frames import PIPE_BYTES, STDERR_READ_FD, STDOUT_READ_FD, Request

UNTOUCHED = 0  # the private folder's time; any file made in it changes that, and a look costs one system call


class Surroundings:
    """The process around the calls of one child."""

    def __init__(self, temp_folder: str) -> None:
        self._environment = _Environment()
        self._private = _PrivateFolder(temp_folder)
        self._output = _Output()
        self._home = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def prepare(self, request: Request) -> None:
        """Make everything as this call shall find it."""
        self._environment.become(
            {
                **request.env,
                "STELLWERK_RUN_ID": request.run_id,
                "STELLWERK_ATTEMPT": str(request.number),
                "STELLWERK_SCOPE": request.scope,
                "STELLWERK_NAME": request.name,
                "STELLWERK_TMP": self._private.ready(),
            }
        )
        if request.cwd is not None:
            try:
                os.chdir(request.cwd)
            except OSError as error:
                raise CallRefused(f"the run's folder {request.cwd} cannot be entered: {error.strerror}") from None

    def restore(self) -> None:
        """After the call; the environment is put right before the next one."""
        os.fchdir(self._home)
        self._output.restore()
        self._private.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that this call set would kill the next one

    def take_output(self) -> tuple[bytes, bytes]:
        """All bytes in both pipes: since nothing else runs, they are this call's."""
        return _drain(STDOUT_READ_FD), _drain(STDERR_READ_FD)

    def remove(self) -> None:
        self._private.remove()


class _Environment:
    """The process's environment: the one it started with, and a call's variables over it."""

    def __init__(self) -> None:
        # The dictionary inside os.environ: comparing it is 1 µs, reading os.environ through its methods 20.
        self._now = cast("dict[bytes, bytes]", vars(os.environ)["_data"])
        self._base = dict(self._now)
        self._variables: dict[bytes, bytes] = {}
        self._last = self._base

    def become(self, variables: Mapping[str, str]) -> None:
        wanted = {os.fsencode(name): os.fsencode(value) for name, value in variables.items()}
        whole = self._base | wanted
        if self._now == self._last and wanted.keys() == self._variables.keys():
            changed = wanted
        else:
            for name in self._now.keys() - whole.keys():
                del os.environb[name]
            changed = whole
        # Forgotten first: if a name or value is refused halfway, the next call must not trust what stands here.
        self._variables = {}
        for name, value in changed.items():
            if self._now.get(name) != value:
                os.environb[name] = value
        self._variables, self._last = wanted, whole


class _PrivateFolder:
    """A folder per call, for this user only. One that was left untouched serves the next call as well."""

    def __init__(self, parent: str) -> None:
        self._parent = parent
        self._count = 0
        self._path: str | None = None

    def ready(self) -> str:
        if self._path is None:
            self._count += 1
            path = f"{self._parent}/{self._count}"
            os.makedirs(path, mode=0o700)  # the umask is 077: parents are private too
            os.utime(path, (UNTOUCHED, UNTOUCHED))
            self._path = path
        return self._path

    def clear(self) -> None:
        path = self._path
        if path is not None:
            try:
                is_used = os.stat(path).st_mtime != UNTOUCHED
            except OSError:
                is_used = True  # removed by the call
            if is_used:
                self._path = None
                shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self._parent, ignore_errors=True)


class _Output:
    """Descriptors 1 and 2 and the text streams over them, whatever a call did to either."""

    def __init__(self) -> None:
        self._stdout_fd, self._stderr_fd = os.dup(1), os.dup(2)
        self._stdout, self._stderr = _text_stream(1), _text_stream(2)
        self._put_back()

    def restore(self) -> None:
        self._put_back()
        for stream in (self._stdout, self._stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass  # closed by the call; what it had not written is lost by its own doing
        if self._stdout.closed or self._stderr.closed:
            self._stdout, self._stderr = _text_stream(1), _text_stream(2)
            self._put_back()
        os.dup2(self._stdout_fd, 1)
        os.dup2(self._stderr_fd, 2)

    def _put_back(self) -> None:
        # A stream that the call put in its place is let go here, and thereby flushed.
        sys.stdout = sys.__stdout__ = self._stdout  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = self._stderr  # type: ignore[misc]


def _text_stream(fd: int) -> io.TextIOWrapper:
    # By line, so that a print and a raw write keep their order; closing it must not close the descriptor.
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _drain(fd: int) -> bytes:
    pieces = []
    try:
        # Often the pipe is empty, which is an exception; a short read says so without one.
        while len(piece := os.read(fd, PIPE_BYTES)) == PIPE_BYTES:
            pieces.append(piece)
        pieces.append(piece)
    except BlockingIOError:
        pass
    return b"".join(pieces)
