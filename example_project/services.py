"""The servers that the demo runs on: our own, or those that the environment names."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psycopg
from psycopg import sql

from celery_safe_effects.testing import EmbeddedPostgres, EmbeddedRedis
from example_project.provider_process import ProviderProcess

DATABASE_VARIABLE = "SAFE_EFFECTS_TEST_DATABASE_URL"
REDIS_VARIABLE = "SAFE_EFFECTS_TEST_REDIS_URL"


@dataclass(frozen=True)
class Services:
    """What runs.

    Attributes:
        database_url: an empty database.
        redis_url: an empty Redis database.
        plain, safe: two providers of one kind, each in a process of its own with a ledger of its own.
        logs: the folder for the workers' logs.
        kept: the folder that is left behind, if any.
        described: what was started, for people.
    """

    database_url: str
    redis_url: str
    plain: ProviderProcess
    safe: ProviderProcess
    logs: Path
    kept: Path | None
    described: str


@contextmanager
def running(keep: bool) -> Iterator[Services]:
    """Start the servers, and stop them at the end, also when we are killed.

    Args:
        keep: leave data and logs behind, in a new folder.

    Yields:
        The servers.
    """
    base = _kept_folder() if keep else None
    with ExitStack() as stack:
        plain = stack.enter_context(ProviderProcess(base / "provider-plain" if base else None))
        safe = stack.enter_context(ProviderProcess(base / "provider-safe" if base else None))
        database_url, database = _database(stack, base)
        redis_url, redis = _redis(stack, base)
        # Without a folder that is kept, the logs go away with the provider's, however we end.
        logs = base / "logs" if base else plain.folder / "logs"
        yield Services(database_url, redis_url, plain, safe, logs, base, f"{database}, {redis}")


def _kept_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="celery-safe-effects-demo-"))
    folder.chmod(0o711)  # a PostgreSQL that runs as another user has to pass through
    return folder


def _database(stack: ExitStack, base: Path | None) -> tuple[str, str]:
    given = os.environ.get(DATABASE_VARIABLE)
    if not given:
        server = stack.enter_context(EmbeddedPostgres(base / "postgres" if base else None))
        return server.create_database("demo"), f"PostgreSQL of our own on port {server.port}"
    # A server that runs already: a database of our own on it, and nothing else is touched.
    head, _, _ = given.partition("?")[0].replace("+psycopg", "", 1).rpartition("/")
    name = f"safe_effects_demo_{uuid4().hex[:8]}"
    with psycopg.connect(given.replace("+psycopg", "", 1), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    if base is None:
        stack.callback(_drop, given, name)
    return f"{head.replace('://', '+psycopg://', 1)}/{name}", f"database {name} on the server in {DATABASE_VARIABLE}"


def _drop(url: str, name: str) -> None:
    with psycopg.connect(url.replace("+psycopg", "", 1), autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def _redis(stack: ExitStack, base: Path | None) -> tuple[str, str]:
    given = os.environ.get(REDIS_VARIABLE)
    if not given:
        server = stack.enter_context(EmbeddedRedis(base / "redis" if base else None))
        return server.url(), f"Redis of our own on port {server.port}"
    _empty(given)
    if base is None:
        stack.callback(_empty, given)
    return given, f"the Redis database in {REDIS_VARIABLE}, emptied"


def _empty(url: str) -> None:
    import redis

    with redis.Redis.from_url(url) as client:
        client.flushdb()
