"""The guard: the keeper's parent, asleep until the keeper dies.

Then everything that lived below the keeper is the guard's own (it is a subreaper as well): it kills and reaps until
there is nobody left, and exits. Its exit is the proof that no tree of this keeper is left.

    python -m stellwerk.execute.guard HOST_PID OPEN_FILES_SOFT     (3: channel, 4: a pipe that dies with the guard)
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys

from stellwerk.execute.keeper import keep
from stellwerk.execute.linux_calls import become_subreaper
from stellwerk.execute.process_table import ChildList, kill_child
from stellwerk.execute.sweep import sweep

CHANNEL_FD, ALIVE_FD = 3, 4
PASS_DELAY_S = 0.02


def main() -> None:
    """Sweep, fork the keeper, wait, clean up."""
    host_pid, open_files_soft = int(sys.argv[1]), int(sys.argv[2])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the host's shutdown decides, not a signal to the group
    # Descriptors that the host's process left inheritable must not reach the commands.
    os.closerange(ALIVE_FD + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1] & 0xFFFFF | 0xFFFF)
    _limit_open_files(open_files_soft)
    os.set_inheritable(CHANNEL_FD, False)
    os.set_inheritable(ALIVE_FD, False)
    become_subreaper()
    sweep()
    keeper_pid = os.fork()
    if keeper_pid == 0:
        os.close(ALIVE_FD)
        keep(socket.socket(fileno=CHANNEL_FD), host_pid)
        os._exit(0)
    os.close(CHANNEL_FD)  # or the host would never see the end of file
    _, status = os.waitpid(keeper_pid, 0)
    _end_all_children()
    os._exit(0 if status == 0 else 1)


def _limit_open_files(soft: int) -> None:
    # A host raises its own limit for its pipes; commands shall find the one the host was started with.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _end_all_children() -> None:
    children = ChildList()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while _reap_all():
        for pid in children.read(()):
            kill_child(pid)
        signal.sigtimedwait({signal.SIGCHLD}, PASS_DELAY_S)


def _reap_all() -> bool:
    """Reap what is dead; False if there are no children at all, which is the proof."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


if __name__ == "__main__":
    main()
