"""Numbered migrations, serialised by a transaction-scoped advisory lock.

Each says in its head which code goes on working once it is applied: ``-- oldest code: N``, where N is the latest
migration that this code knows. So a rolling deploy can migrate first, while processes of the older code run on.

Callable from the command line, from Alembic (``upgrade(op.get_bind())``) and from a Django migration
(``upgrade(schema_editor.connection)``).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from psycopg.pq import TransactionStatus

from ..address import conninfo_from_url, quote_schema
from ..errors import ConfigurationError, SchemaMismatch
from . import grants as rights
from .statements import WORKERS_SEEN

LOCK_KEY: Final = 7_236_071_155  # any fixed number: the same for every version of the library
DEFAULT_SCHEMA: Final = "safe_effects"
SEEN_FOR: Final = 60.0
"""Seconds for which a worker counts as running that did not say that it stopped; it shows itself far more often."""


@dataclass(frozen=True)
class Migration:
    """One numbered file; code that knows migration ``oldest_code`` or a later one works once it is applied."""

    version: int
    name: str
    sql: str
    oldest_code: int


def migrations() -> list[Migration]:
    """All migrations that this version of the library knows, in order."""
    found = []
    for entry in resources.files(__package__).joinpath("migrations").iterdir():
        match = re.fullmatch(r"(\d{4})_(\w+)\.sql", entry.name)
        if match:
            found.append(_read(int(match[1]), match[2], entry.read_text("utf-8")))
    return sorted(found, key=lambda m: m.version)


def _read(version: int, name: str, sql: str) -> Migration:
    said = re.search(r"^-- oldest code: (\d+)$", sql, re.MULTILINE)
    if said is None or not 1 <= int(said[1]) <= version:
        raise ConfigurationError(
            f"migration {version:04d}_{name} must say `-- oldest code: N`, with N from 1 to {version}"
        )
    return Migration(version, name, sql, int(said[1]))


def latest() -> int:
    """The schema version that this library needs."""
    return max(m.version for m in migrations())


def upgrade(
    target: Any,
    schema: str = DEFAULT_SCHEMA,
    *,
    grants: rights.Grants | None = None,
    revoke: Collection[str] = (),
) -> list[int]:
    """Bring the schema up to this library's version; several at once are harmless.

    Arguments:
        target: a database URL, a SQLAlchemy Engine or Connection, or a Django connection. A connection is used within
            its own transaction and is not committed.
        schema: the schema's name.
        grants: database roles by kind, ``{"producer": ["web", "beat"], "worker": ["worker"]}``: each gets what its kind
            needs, now and with every later upgrade.
        revoke: roles that lose all that they have in the schema; before ``grants``.

    Returns:
        the versions that were applied, empty if there was nothing to do.

    Raises:
        ConfigurationError: for a kind or a role that does not exist, and for the role that owns the schema.
        SchemaMismatch: when the schema is newer than this library and not made for it too, or when workers run that a
            pending migration would break.
    """
    given = rights.checked(grants or {})
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
            return upgrade(engine, schema, grants=grants, revoke=revoke)
        finally:
            engine.dispose()
    if hasattr(target, "begin") and hasattr(target, "dialect") and not hasattr(target, "exec_driver_sql"):
        with target.begin() as connection:
            return upgrade(connection, schema, grants=grants, revoke=revoke)
    return _upgrade(_driver(target), schema, given, revoke)


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


def _upgrade(connection: Any, schema: str, given: list[tuple[str, str]], revoked: Collection[str]) -> list[int]:
    # In autocommit, the lock would be released at once and a failure leave half a migration.
    alone = connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE
    with connection.transaction() if alone else contextlib.nullcontext(), connection.cursor() as cursor:
        applied = _apply(cursor, schema)
        if applied:
            rights.close(cursor, schema)
        rights.apply(cursor, schema, given, revoked)
        return applied


def _apply(cursor: Any, schema: str) -> list[int]:
    quoted = quote_schema(schema)
    cursor.execute("SELECT pg_advisory_xact_lock(%s::bigint)", (LOCK_KEY,))
    cursor.execute(f"CREATE SCHEMA IF NOT EXISTS {quoted}")
    cursor.execute(
        f"CREATE TABLE IF NOT EXISTS {quoted}.schema_version (version integer PRIMARY KEY, name text NOT NULL,"
        " oldest_code integer NOT NULL, applied_at timestamptz NOT NULL DEFAULT clock_timestamp())"
    )
    cursor.execute(f"SELECT coalesce(max(version), 0), coalesce(max(oldest_code), 0) FROM {quoted}.schema_version")
    present, oldest_code = cursor.fetchone()
    known = migrations()
    if oldest_code > known[-1].version:
        raise SchemaMismatch(
            f"schema {schema!r} is at version {present}, this library knows {known[-1].version}; "
            "upgrade celery-safe-effects",
            present=present,
            needed=known[-1].version,
        )
    pending = [migration for migration in known if migration.version > present]
    if present and any(migration.oldest_code > present for migration in pending):
        _refuse_while_workers_run(cursor, schema, present, pending[-1].version)
    for migration in pending:
        cursor.execute(migration.sql.replace("{schema}", quoted))
        cursor.execute(
            f"INSERT INTO {quoted}.schema_version (version, name, oldest_code) VALUES (%s, %s, %s)",
            (migration.version, migration.name, migration.oldest_code),
        )
    return [migration.version for migration in pending]


def _refuse_while_workers_run(cursor: Any, schema: str, present: int, wanted: int) -> None:
    """A migration that older code does not survive waits until none of it runs."""
    cursor.execute(WORKERS_SEEN.replace("{s}", quote_schema(schema)), {"seen_for": SEEN_FOR})
    seen = cursor.fetchone()
    if seen is not None:
        raise SchemaMismatch(
            f"schema {schema!r} cannot go from version {present} to {wanted} while workers of the older code run "
            f"({seen[0]} was here {seen[1]:.0f} s ago; one that was killed counts for {SEEN_FOR:.0f} s): stop all "
            "workers and producers and upgrade again; nothing was changed",
            present=present,
            needed=wanted,
        )
