"""`./dev sim`: worlds from seeds, endlessly by default; a failure says how to see it again."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import traceback

from tests.simulation.world import Failure, simulate

TAIL_LINES = 60


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="the first seed; alone: just this one")
    parser.add_argument("--seeds", type=int, help="how many; else endless")
    parser.add_argument("--minutes", type=float, help="how long; else endless")
    parser.add_argument("--store", choices=("shared", "memory", "sqlite"), help="one kind of world only")
    parser.add_argument("--tail", type=int, default=TAIL_LINES, help="lines of the trace to show after a failure")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure")
    given = parser.parse_args()
    first = given.seed if given.seed is not None else int(time.time()) * 1_000
    count = given.seeds if given.seeds is not None else 1 if given.seed is not None and not given.minutes else None
    begun, shown, events, failures = time.monotonic(), 0.0, 0, 0
    for done in itertools.count():
        elapsed_s = time.monotonic() - begun
        if (count is not None and done >= count) or (given.minutes and elapsed_s > given.minutes * 60):
            break
        if elapsed_s - shown > 5:
            shown = elapsed_s
            print(f"{done} seeds, {events} events, {failures} failures, {done / elapsed_s:.1f} seeds/s", flush=True)
        try:
            report = simulate(first + done, given.store)
        except Failure as failure:
            failures += 1
            _tell(failure, given)
            if not given.keep_going:
                return 1
        except Exception:
            failures += 1
            print(f"seed {first + done}: the simulation itself broke", flush=True)
            traceback.print_exc()
            if not given.keep_going:
                return 1
        else:
            events += report.events
            if count == 1:
                print(report)
    print(f"{done} seeds, {events} events, {failures} failures, {time.monotonic() - begun:.1f} s")
    return 1 if failures else 0


def _tell(failure: Failure, given: argparse.Namespace) -> None:
    for line in list(failure.trace)[max(0, len(failure.trace) - given.tail) :]:
        print("  ", line)
    print(failure)
    store = f" --store {given.store}" if given.store else ""
    print(f"See it again: ./dev sim --seed {failure.seed}{store}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
