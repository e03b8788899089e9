"""`./dev bench [NAME …]`: all benchmarks, or those named."""

from __future__ import annotations

import asyncio
import importlib
import sys

ALL = ("cycle", "latency", "http", "spawn", "store", "idle")


def main() -> None:
    names = sys.argv[1:] or ALL
    unknown = [name for name in names if name not in (*ALL, "calls")]
    if unknown:
        sys.exit(f"no benchmark {', '.join(unknown)}; there are {', '.join(ALL)} and calls")
    for name in names:
        print(f"── {name} " + "─" * 60, flush=True)
        found = importlib.import_module(f"bench.{name}").main()
        if asyncio.iscoroutine(found):
            asyncio.run(found)


main()
