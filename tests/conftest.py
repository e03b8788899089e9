"""What holds for every test, and nothing that belongs to a part.

In CI a skipped test is a failed one: a server that was not there is a promise that was not shown. On a
laptop a skip stays a skip. Expected failures are not skips.
"""

import os
from collections.abc import Generator

import pytest
from hypothesis import settings

SKIPS_FAIL = os.environ.get("CI", "").lower() in {"1", "true", "yes"}

# Two cores shared with real processes make single examples slow by chance; a time limit on each would
# report the machine. In CI the examples are the same each time, so that a red build can be repeated.
settings.register_profile("stellwerk", deadline=None, derandomize=SKIPS_FAIL)
settings.load_profile("stellwerk")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if SKIPS_FAIL and report.skipped and not hasattr(report, "wasxfail"):
        fail_the_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    # A whole file can be skipped while it is imported; then no test of it is ever reported.
    report = yield
    if SKIPS_FAIL and report.skipped:
        fail_the_skip(report)
    return report


def fail_the_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"skipped, which CI does not accept: {reason}"
