"""The fixtures are plugins, one module for each concern."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.support.checks")

pytest_plugins = [
    "tests.support.loud",
    "tests.support.services",
    "tests.support.brokers",
    "tests.support.provider",
    "tests.support.processes",
    "tests.support.pytest_celery_local",
]
