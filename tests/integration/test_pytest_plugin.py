"""The fixtures that users get."""

from __future__ import annotations

import psycopg

from celery_safe_effects.testing.pytest_plugin import (  # noqa: F401 - fixtures
    _safe_effects_template,
    safe_effects_postgres,
    safe_effects_postgres_server,
)


def test_a_database_with_the_schema(safe_effects_postgres: str) -> None:  # noqa: F811
    with psycopg.connect(safe_effects_postgres.replace("+psycopg", "")) as connection:
        assert connection.execute("SELECT count(*) FROM safe_effects.jobs").fetchone() == (0,)
