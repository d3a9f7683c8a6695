"""Prometheus' own checker, where it is installed."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.support.loud import skip_loudly

VARIABLE = "SAFE_EFFECTS_TEST_PROMTOOL"


def promtool(request: pytest.FixtureRequest) -> str:
    """Its path; the test is skipped loudly where there is none."""
    found = os.environ.get(VARIABLE) or shutil.which("promtool")
    if not found:
        skip_loudly(request, f"needs promtool: install Prometheus, or name it in {VARIABLE}")
    return found
