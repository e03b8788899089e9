"""What a command finds in its environment: a short list of harmless things, and what its run brings."""

from __future__ import annotations

from collections.abc import Mapping

# Nothing else of the host's environment: it holds tokens, database addresses and the like.
PASSED_ON = frozenset({"PATH", "HOME", "LANG", "TZ", "USER", "LOGNAME", "SHELL", "TMPDIR"})
PASSED_ON_PREFIX = "LC_"
PATH_DEFAULT = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def base_environment(os_environ: Mapping[str, str]) -> dict[str, str]:
    """The part of the host's environment that commands may see."""
    passed = {
        name: value for name, value in os_environ.items() if name in PASSED_ON or name.startswith(PASSED_ON_PREFIX)
    }
    passed.setdefault("PATH", PATH_DEFAULT)
    return passed
