"""Skips that the end of the run tells about: a missing server must not pass for a tested one."""

from __future__ import annotations

import os
from collections import Counter
from typing import Final, NoReturn

import pytest

MARK: Final = "not tested here: "
"""Begins the reason of such a skip; the reason is all that reaches the end of a run in several processes."""


def skip_loudly(request: pytest.FixtureRequest, reason: str) -> NoReturn:
    """Skip the test, and say so once more at the end of the run.

    Args:
        request: the fixture's or test's request.
        reason: what is missing and how to get it.
    """
    pytest.skip(f"{MARK}{reason}")


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name what failed at once: a run is long, and pytest tells at its end."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.when} of {report.nodeid} failed", flush=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what could not be tested here."""
    missing: Counter[str] = Counter()
    for report in terminalreporter.getreports("skipped"):
        _, found, reason = str(report.longrepr).partition(MARK)
        if found:
            missing[reason.rstrip("')")] += 1
    if missing:
        terminalreporter.section("NOT TESTED HERE", sep="!", red=True, bold=True)
        for reason, number in missing.most_common():
            terminalreporter.line(f"{number} skipped: {reason}")
