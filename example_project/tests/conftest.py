"""What the tests run on: a PostgreSQL of their own, and the fake provider as a process with a ledger."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_safe_effects.testing.pytest_plugin import (  # noqa: F401 - fixtures
    _safe_effects_template,
    safe_effects_postgres,
    safe_effects_postgres_server,
)
from example_project.provider_client import Provider
from example_project.provider_process import ProviderProcess


@pytest.fixture(scope="session")
def _provider_process() -> Iterator[ProviderProcess]:
    with ProviderProcess() as process:
        yield process


@pytest.fixture
def provider(_provider_process: ProviderProcess, monkeypatch: pytest.MonkeyPatch) -> Provider:
    """The provider, empty; the service's effects call it."""
    monkeypatch.setenv("EXAMPLE_PROVIDER_URL", _provider_process.url)
    _provider_process.client.reset()
    return _provider_process.client
