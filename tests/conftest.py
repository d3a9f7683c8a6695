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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One order in every process: pytest-celery's parameters come out of sets, and xdist compares."""
    items.sort(key=lambda item: (str(item.path), item.location[1] or 0, item.name))
