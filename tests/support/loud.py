"""Skips that the end of the run tells about: a missing server must not pass for a tested one."""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

import pytest

_MISSING = pytest.StashKey[Counter[str]]()


def skip_loudly(request: pytest.FixtureRequest, reason: str) -> NoReturn:
    """Skip the test, and say so once more at the end of the run.

    Args:
        request: the fixture's or test's request.
        reason: what is missing and how to get it.
    """
    request.config.stash.setdefault(_MISSING, Counter())[reason] += 1
    pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List what could not be tested here."""
    missing = config.stash.get(_MISSING, Counter())
    if missing:
        terminalreporter.section("NOT TESTED HERE", sep="!", red=True, bold=True)
        for reason, number in missing.most_common():
            terminalreporter.line(f"{number} skipped: {reason}")
