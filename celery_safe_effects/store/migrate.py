"""Numbered migrations, serialised by a transaction-scoped advisory lock.

Callable from the command line, from Alembic (``upgrade(op.get_bind())``) and from a Django migration
(``upgrade(schema_editor.connection)``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from ..errors import ConfigurationError, SchemaMismatch

LOCK_KEY: Final = 7_236_071_155  # any fixed number: the same for every version of the library
DEFAULT_SCHEMA: Final = "safe_effects"


@dataclass(frozen=True)
class Migration:
    """One numbered file."""

    version: int
    name: str
    sql: str


def quote_schema(schema: str) -> str:
    """Quote a schema name for use in SQL text.

    Raises:
        ConfigurationError: for a name that no statement can carry safely.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_$]{0,62}", schema):
        raise ConfigurationError(
            f"safe_effects_schema {schema!r} is not a plain identifier (letters, digits, underscores; at most 63)"
        )
    return f'"{schema}"'


def migrations() -> list[Migration]:
    """All migrations that this version of the library knows, in order."""
    found = []
    for entry in resources.files(__package__).joinpath("migrations").iterdir():
        match = re.fullmatch(r"(\d{4})_(\w+)\.sql", entry.name)
        if match:
            found.append(Migration(int(match[1]), match[2], entry.read_text("utf-8")))
    return sorted(found, key=lambda m: m.version)


def latest() -> int:
    """The schema version that this library needs."""
    return max(m.version for m in migrations())


def upgrade(target: Any, schema: str = DEFAULT_SCHEMA) -> list[int]:
    """Bring the schema up to this library's version; several at once are harmless.

    Arguments:
        target: a database URL, a SQLAlchemy Engine or Connection, or a Django connection. A connection is used within
            its own transaction and is not committed.
        schema: the schema's name.

    Returns:
        the versions that were applied, empty if there was nothing to do.

    Raises:
        SchemaMismatch: when the schema is newer than this library.
    """
    if isinstance(target, str):
        import psycopg
        from sqlalchemy import create_engine, pool

        from .connection import CONNECT_TIMEOUT, conninfo_from_url

        conninfo = conninfo_from_url(target)
        engine = create_engine(
            "postgresql+psycopg://",
            creator=lambda: psycopg.connect(conninfo, connect_timeout=CONNECT_TIMEOUT),
            poolclass=pool.NullPool,
        )
        try:
            return upgrade(engine, schema)
        finally:
            engine.dispose()
    if hasattr(target, "begin") and hasattr(target, "dialect") and not hasattr(target, "exec_driver_sql"):
        with target.begin() as connection:
            return upgrade(connection, schema)
    return _upgrade(_cursor_of(target), schema)


def _cursor_of(target: Any) -> Any:
    if hasattr(target, "exec_driver_sql"):  # SQLAlchemy Connection
        return target.connection.driver_connection.cursor()
    if hasattr(target, "ensure_connection"):  # Django
        target.ensure_connection()
        return target.connection.cursor()
    return target.cursor()


def _upgrade(cursor: Any, schema: str) -> list[int]:
    quoted = quote_schema(schema)
    with cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s::bigint)", (LOCK_KEY,))
        cursor.execute(f"CREATE SCHEMA IF NOT EXISTS {quoted}")
        cursor.execute(
            f"CREATE TABLE IF NOT EXISTS {quoted}.schema_version (version integer PRIMARY KEY, name text NOT NULL,"
            " applied_at timestamptz NOT NULL DEFAULT clock_timestamp())"
        )
        cursor.execute(f"SELECT coalesce(max(version), 0) FROM {quoted}.schema_version")
        present = cursor.fetchone()[0]
        known = migrations()
        if present > known[-1].version:
            raise SchemaMismatch(
                f"schema {schema!r} is at version {present}, this library knows {known[-1].version}; "
                "upgrade celery-safe-effects",
                present=present,
                needed=known[-1].version,
            )
        applied = []
        for migration in known:
            if migration.version > present:
                cursor.execute(migration.sql.replace("{schema}", quoted))
                cursor.execute(
                    f"INSERT INTO {quoted}.schema_version (version, name) VALUES (%s, %s)",
                    (migration.version, migration.name),
                )
                applied.append(migration.version)
        return applied
