"""How the end of a process tree becomes the outcome of an attempt: pure, and in words a user can act on."""

from __future__ import annotations

import errno
import os
import signal

from stellwerk.core.run import Failed, Lost, Outcome, Returned, Succeeded

_ADVICE = {
    errno.ENOENT: "check the command, its PATH and its working directory",
    errno.EACCES: "check the permissions of the file and of every folder above it",
    errno.ENOTDIR: "check the working directory",
    errno.E2BIG: "its arguments or environment are too long; pass large values by stdin",
    errno.ENOEXEC: "the file is not a program; a script needs a first line such as #!/bin/sh",
    errno.EMFILE: "the host has no file descriptors left; raise its limit (ulimit -n) or run fewer at once",
    errno.ENOSPC: "the disk with the private folders of attempts is full",
    errno.EAGAIN: "the user's limit of processes is reached, or the keeper does not start",
}


def outcome_of_end(wait_status: int, why: str, *, asked: str | None, timeout_ms: int | None) -> Outcome:
    """`why` is the keeper's word, `asked` the reason of our own stop: stopped or timeout."""
    if why == "keeper lost":
        return Lost("the keeper process died, and everything it had started was ended")
    if why == "deadline":
        return Lost("lease deadline passed")
    if why == "stop" and asked == "timeout":
        return Failed(reason="timeout", error=f"still running after {timeout_ms} ms", exit_code=_code(wait_status))
    if why == "stop":
        return Failed(reason="stopped", error="stopped on request", exit_code=_code(wait_status))
    code = _code(wait_status)
    if os.WIFSIGNALED(wait_status):
        return Failed(reason="signal", error=f"ended by {_signal_name(os.WTERMSIG(wait_status))}", exit_code=code)
    if code == 0:
        return Succeeded(exit_code=0)
    return Failed(reason="exit", error=f"exit code {code}", exit_code=code)


def outcome_of_failed_start(program: str, number: int | None, text: str) -> Outcome:
    """Nothing ran. A start that came after its lease or in a shutdown is given back, not counted."""
    if number in (errno.ETIMEDOUT, errno.ESHUTDOWN):
        return Returned(text)
    advice = _ADVICE.get(number) if number is not None else None
    ending = f"; {advice}" if advice is not None else ""
    return Failed(reason="start", error=f"cannot start {program!r}: {text}{ending}")


def _code(wait_status: int) -> int:
    if os.WIFSIGNALED(wait_status):
        return 128 + os.WTERMSIG(wait_status)
    return os.WEXITSTATUS(wait_status)


def _signal_name(number: int) -> str:
    try:
        return f"signal {signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"
