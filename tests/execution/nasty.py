"""Programs that try to outlive their end. Run as `python -S nasty.py SHAPE TOKEN`; prints `ready` when all is up.

The token stands in the argv of every process of the shape, so that the tests find survivors by themselves.
"""

from __future__ import annotations

import os
import signal
import sys
import time

TOKEN = sys.argv[2] if len(sys.argv) > 2 else ""
SLEEP = "import time; time.sleep(1000)"


def sleep_for_ever() -> None:
    while True:
        time.sleep(1000)


def ready() -> None:
    os.write(1, b"ready\n")


def fork_sleeper(*, new_session: bool = False) -> int:
    pid = os.fork()
    if pid == 0:
        if new_session:
            os.setsid()
        sleep_for_ever()
    return pid


def exec_sleeper_without_anything() -> None:
    """Empty environment, no descriptors, another program."""
    os.closerange(0, 64)
    os.execve(sys.executable, [sys.executable, "-S", "-c", SLEEP, TOKEN], {})


def run_detached(body: object) -> None:
    """Run a function in a process that is nobody's child any more; return when it has detached."""
    done_read, done_write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.close(done_read)
                os.write(done_write, b"x")
                os.close(done_write)
                body()  # type: ignore[operator]
                os._exit(0)
        os._exit(0)
    os.wait()
    os.close(done_write)
    os.read(done_read, 1)
    os.close(done_read)


def three_sessions() -> None:
    for _ in range(3):
        fork_sleeper(new_session=True)
    ready()
    sleep_for_ever()


def double_fork() -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            ready()
            sleep_for_ever()
        os._exit(0)
    os.wait()
    sleep_for_ever()


def ignores_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    fork_sleeper(new_session=True)
    ready()
    sleep_for_ever()


def cleared() -> None:
    run_detached(exec_sleeper_without_anything)
    ready()
    sleep_for_ever()


def bomb() -> None:
    for _ in range(64):
        fork_sleeper(new_session=True)
    ready()
    sleep_for_ever()


def runner() -> None:
    for _ in range(3):
        if os.fork() == 0:
            while True:
                if os.fork() != 0:
                    os._exit(0)
                os.setsid()
    ready()
    sleep_for_ever()


def holder() -> None:
    """A daemon that holds stdout; the root is gone at once."""
    ready()
    if os.fork() == 0:
        os.setsid()
        sleep_for_ever()
    os._exit(0)


def stopped() -> None:
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            os.setsid()
            os.kill(os.getpid(), signal.SIGSTOP)
            sleep_for_ever()
        os.kill(os.getpid(), signal.SIGSTOP)
        sleep_for_ever()
    os.waitpid(child, os.WUNTRACED)
    ready()
    os.kill(os.getpid(), signal.SIGSTOP)
    sleep_for_ever()


def zombies() -> None:
    for _ in range(60):
        if os.fork() == 0:
            fork_sleeper()
            os._exit(0)
    ready()
    sleep_for_ever()


def leaves_a_cleared_daemon() -> None:
    run_detached(exec_sleeper_without_anything)
    ready()
    os._exit(0)


def untagged() -> None:
    """Also without the keeper's tag: nobody's child in every respect."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_RTTIME)[1]
    resource.setrlimit(resource.RLIMIT_RTTIME, (hard, hard))
    cleared()


ENDED_FROM_OUTSIDE = (
    three_sessions,
    double_fork,
    ignores_signals,
    cleared,
    bomb,
    runner,
    stopped,
    zombies,
    untagged,
)
ENDS_BY_ITSELF = (holder, leaves_a_cleared_daemon)
SHAPES = {shape.__name__: shape for shape in (*ENDED_FROM_OUTSIDE, *ENDS_BY_ITSELF)}

if __name__ == "__main__":
    SHAPES[sys.argv[1]]()
