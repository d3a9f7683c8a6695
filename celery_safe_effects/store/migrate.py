"""Numbered migrations, serialised by a transaction-scoped advisory lock.

Callable from the command line, from Alembic (``upgrade(op.get_bind())``) and from a Django migration
(``upgrade(schema_editor.connection)``).
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from psycopg.pq import TransactionStatus

from ..address import conninfo_from_url, quote_schema
from ..errors import SchemaMismatch

LOCK_KEY: Final = 7_236_071_155  # any fixed number: the same for every version of the library
DEFAULT_SCHEMA: Final = "safe_effects"


@dataclass(frozen=True)
class Migration:
    """One numbered file."""

    version: int
    name: str
    sql: str


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

        from .connection import CONNECT_TIMEOUT

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
    return _upgrade(_driver(target), schema)


def _driver(target: Any) -> Any:
    """The psycopg connection under a caller's one, its transaction begun where its framework begins them."""
    if hasattr(target, "exec_driver_sql"):  # SQLAlchemy Connection
        if not target.in_transaction():
            target.exec_driver_sql("SELECT 1")  # else its commit() would not know of ours
        return target.connection.driver_connection
    if hasattr(target, "ensure_connection"):  # Django
        target.ensure_connection()
        return target.connection
    return target


def _upgrade(connection: Any, schema: str) -> list[int]:
    # In autocommit, the lock would be released at once and a failure leave half a migration.
    alone = connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE
    with connection.transaction() if alone else contextlib.nullcontext(), connection.cursor() as cursor:
        return _apply(cursor, schema)


def _apply(cursor: Any, schema: str) -> list[int]:
    quoted = quote_schema(schema)
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
