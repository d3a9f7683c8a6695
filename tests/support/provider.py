"""The fake provider: one process a run, empty and without faults for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from example_project.provider_client import Provider
from example_project.provider_process import ProviderProcess

# These effects stand for providers that know no idempotency keys.
KEYLESS = ("charge", "charge_plain", "whole_body")


@pytest.fixture(scope="session")
def _provider_process() -> Iterator[ProviderProcess]:
    with ProviderProcess() as process:
        yield process


@pytest.fixture
def provider_process(_provider_process: ProviderProcess) -> ProviderProcess:
    """The provider's process, running."""
    _provider_process.resume()
    _provider_process.start()
    return _provider_process


@pytest.fixture
def provider(provider_process: ProviderProcess) -> Provider:
    """A client of the provider, whose ledger is empty. Effects of `KEYLESS` are not de-duplicated."""
    client = provider_process.client
    client.reset()
    for kind in KEYLESS:
        client.control(kind=kind, dedupe=False)
    return client
