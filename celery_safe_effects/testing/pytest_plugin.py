"""Fixtures for users' tests; load them with `pytest_plugins = ["celery_safe_effects.testing.pytest_plugin"]`."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from celery_safe_effects.testing.postgres import EmbeddedPostgres


@pytest.fixture(scope="session")
def safe_effects_postgres_server() -> Iterator[EmbeddedPostgres]:
    """A PostgreSQL server for the whole run; override it to use one that runs already."""
    with EmbeddedPostgres() as server:
        yield server


@pytest.fixture(scope="session")
def _safe_effects_template(safe_effects_postgres_server: EmbeddedPostgres) -> str:
    from celery_safe_effects.store import migrate

    name = f"template_{uuid4().hex[:12]}"
    migrate.upgrade(safe_effects_postgres_server.create_database(name))
    safe_effects_postgres_server.wait_idle(name)
    return name


@pytest.fixture
def safe_effects_postgres(safe_effects_postgres_server: EmbeddedPostgres, _safe_effects_template: str) -> Iterator[str]:
    """A fresh database with the schema, as the URL for `safe_effects_database_url`."""
    name = f"test_{uuid4().hex[:12]}"
    yield safe_effects_postgres_server.create_database(name, template=_safe_effects_template)
    safe_effects_postgres_server.drop_database(name)
