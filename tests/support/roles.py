"""Database roles of a test, as an administrator makes them: they may log in, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql as pg
from sqlalchemy.engine import make_url

from celery_safe_effects.store import migrate
from celery_safe_effects.store.grants import KINDS

PASSWORD = "of-a-test"


def as_role(url: str, role: str) -> str:
    """A database URL, as that role."""
    return make_url(url).set(username=role, password=PASSWORD).render_as_string(hide_password=False)


@contextmanager
def roles(url: str, *names: str) -> Iterator[dict[str, str]]:
    """Make login roles on a database's server.

    Yields:
        The roles' names, unlike any other's, by the names given.
    """
    dsn = url.replace("+psycopg", "", 1)
    made = {name: f"{name}_{uuid4().hex[:8]}" for name in names}
    with psycopg.connect(dsn, autocommit=True) as connection:
        for role in made.values():
            make = pg.SQL("CREATE ROLE {} LOGIN PASSWORD {}")
            connection.execute(make.format(pg.Identifier(role), pg.Literal(PASSWORD)))
    try:
        yield made
    finally:
        with psycopg.connect(dsn, autocommit=True) as connection:
            for role in made.values():
                connection.execute(pg.SQL("DROP OWNED BY {} CASCADE").format(pg.Identifier(role)))
                connection.execute(pg.SQL("DROP ROLE {}").format(pg.Identifier(role)))


@pytest.fixture
def role_urls(database_url: str) -> Iterator[dict[str, str]]:
    """The test's database as a granted role of each kind, and as `nobody`, who may only log in."""
    with roles(database_url, *KINDS, "nobody") as made:
        migrate.upgrade(database_url, grants={kind: made[kind] for kind in KINDS})
        yield {name: as_role(database_url, role) for name, role in made.items()}
