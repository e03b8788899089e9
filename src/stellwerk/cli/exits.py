"""How a command ends: the exit codes that scripts rely on, and the one exception that carries them."""

from __future__ import annotations

import re

DONE = 0
REFUSED = 1  # refused, or the thing named does not exist
USAGE = 2
NO_HOST = 3
NO_RIGHT = 4
RUN_FAILED = 5  # the followed run failed or was cancelled
INTERRUPTED = 130  # Ctrl-C, as a shell reports it
PIPE_CLOSED = 141  # the reader of our output went away, as a shell reports it

AT_A_LINE = re.compile(r"[^\n]*:\d+:\d+: ")  # stellwerk.yml:LINE:COLUMN: …


class Quit(Exception):
    """The command cannot go on; `text` says what happened, to what, and what to do."""

    def __init__(self, text: str, exit_code: int = REFUSED) -> None:
        super().__init__(text)
        self.text = text
        self.exit_code = exit_code
