"""What the Django migrations run: the library's own migrations, on Django's connection."""

from __future__ import annotations

from typing import Any

import psycopg
from celery import current_app
from django.conf import settings

from ...address import django_alias
from ...errors import ConfigurationError
from ...store import migrate


def upgrade(apps: Any, schema_editor: Any) -> None:
    """Bring the schema up to date in the transaction of Django's migration.

    Nothing happens in a database that is not PostgreSQL, or not the one that the settings name as ``django:<alias>``;
    database routers are asked as for any migration.

    Raises:
        ConfigurationError: for a PostgreSQL that Django reaches by another driver than psycopg 3.
    """
    connection = schema_editor.connection
    alias = django_alias(_setting("database_url"))
    if connection.vendor != "postgresql" or (alias is not None and alias != connection.alias):
        return
    connection.ensure_connection()
    if not isinstance(connection.connection, psycopg.Connection):
        raise ConfigurationError(
            f"Django's database {connection.alias!r} runs on {type(connection.connection).__module__}; the schema "
            "needs psycopg 3: pip install 'psycopg[binary]'"
        )
    migrate.upgrade(connection, _setting("schema") or migrate.DEFAULT_SCHEMA)


def _setting(name: str) -> Any:
    """A setting of the project's Celery app; Django's own, where no app is loaded."""
    key = f"safe_effects_{name}"
    if current_app.__dict__.get("_safe_effects") is not None:
        return current_app.conf.get(key)
    return getattr(settings, f"CELERY_{key.upper()}", None)
