"""The fixtures are plugins, one module for each concern."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from celery import _state

pytest.register_assert_rewrite("tests.support.checks", "tests.support.delivery")

pytest_plugins = [
    "tests.support.loud",
    "tests.support.services",
    "tests.support.brokers",
    "tests.support.provider",
    "tests.support.processes",
    "tests.support.lab",
    "tests.support.site",
    "tests.support.pytest_celery_local",
    "tests.support.shop",
    "tests.support.roles",
    "tests.support.pgbouncer",
]


def pytest_configure() -> None:
    """Django may be imported by a test, and pytest-celery looks at every object: unconfigured settings would refuse."""
    from django.conf import settings

    if not settings.configured:
        settings.configure()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One order in every process: pytest-celery's parameters come out of sets, and xdist compares."""
    items.sort(key=lambda item: (str(item.path), item.location[1] or 0, item.name))


def pytest_collection_finish() -> None:
    """Tasks of modules that were imported meanwhile are not every app's: they would turn up in those of other tests."""
    for finalizer in list(_state._on_app_finalizers):
        if finalizer.__module__ == "celery.app.base":  # made by app.task(), whose own app knows it anyhow
            _state._on_app_finalizers.discard(finalizer)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Captured text reaches another process under xdist, which cannot take lone surrogates; some tests log them."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report
