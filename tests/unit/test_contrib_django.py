"""What can be told of the Django module without a database."""

from __future__ import annotations

import asyncio
from importlib import resources
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects import SafeEffects, SafeTask
from celery_safe_effects.address import conninfo_from_url, django_alias
from celery_safe_effects.contrib.django import DjangoSafeTask
from celery_safe_effects.contrib.django import schema as django_schema
from celery_safe_effects.errors import ConfigurationError
from celery_safe_effects.store import migrate
from celery_safe_effects.store.enlist import enlist

OLD_DRIVER = type("connection", (), {"__module__": "psycopg2.extensions"})


def connection_of(raw: Any, vendor: str = "postgresql", alias: str = "default") -> Any:
    """Something like Django's connection."""
    return SimpleNamespace(ensure_connection=lambda: None, connection=raw, vendor=vendor, alias=alias)


def test_there_is_a_django_migration_for_each_of_ours() -> None:
    """`manage.py migrate` would otherwise not know that there is something to do."""
    found = resources.files("celery_safe_effects.contrib.django").joinpath("migrations")
    theirs = sorted(entry.name.removesuffix(".py") for entry in found.iterdir() if entry.name[0].isdigit())
    assert theirs == [f"{migration.version:04d}_{migration.name}" for migration in migrate.migrations()]


def test_psycopg_2_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(django_schema, "_setting", {}.get)
    with pytest.raises(ConfigurationError, match=r"psycopg2\.extensions; it must use psycopg 3"):
        enlist(connection_of(OLD_DRIVER()))
    editor = SimpleNamespace(connection=connection_of(OLD_DRIVER()))
    with pytest.raises(ConfigurationError, match="needs psycopg 3: pip install"):
        django_schema.upgrade(None, editor)


@pytest.mark.parametrize("alias", ["shop", "default"])
def test_the_migration_leaves_other_databases_alone(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    upgraded: list[tuple[Any, str]] = []
    monkeypatch.setattr(migrate, "upgrade", lambda connection, schema: upgraded.append((connection, schema)))
    monkeypatch.setattr(django_schema, "_setting", {"database_url": "django:shop"}.get)
    monkeypatch.setattr("psycopg.Connection", OLD_DRIVER)
    for vendor in ("postgresql", "sqlite"):
        connection = connection_of(OLD_DRIVER(), vendor, alias)
        django_schema.upgrade(None, SimpleNamespace(connection=connection))
    assert [(c.alias, c.vendor, schema) for c, schema in upgraded] == (
        [("shop", "postgresql", "safe_effects")] if alias == "shop" else []
    )


@pytest.mark.parametrize(
    ("settings", "vendor", "words"),
    [
        ({"NAME": "x"}, "sqlite", "only PostgreSQL can hold the truth"),
        ({"NAME": "x", "OPTIONS": {"assume_role": "app"}}, "postgresql", "assume_role"),
        (None, "", "Django has no such database"),
    ],
)
def test_a_database_of_djangos_that_cannot_be_taken(
    settings: Any, vendor: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"shop": SimpleNamespace(settings_dict=settings, vendor=vendor)} if settings else {}
    monkeypatch.setattr("django.db.connections", known)
    with pytest.raises(ConfigurationError, match=words) as caught:
        conninfo_from_url("django:shop")
    assert "safe_effects_database_url = 'django:shop'" in str(caught.value)


def test_what_is_taken_of_djangos_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is and how to get in, with TLS and all; nothing of sessions, pools and Django's own."""
    settings = {
        "NAME": "shop",
        "USER": "app",
        "PASSWORD": "it's",
        "HOST": "db",
        "PORT": "5433",
        "OPTIONS": {
            "sslmode": "require",
            "options": "-c statement_timeout=1",
            "pool": True,
            "isolation_level": 4,
            "server_side_binding": True,
        },
    }
    known = {"shop": SimpleNamespace(settings_dict=settings, vendor="postgresql")}
    monkeypatch.setattr("django.db.connections", known)
    found = conninfo_from_url("django:shop")
    assert found == r"sslmode=require dbname=shop user=app password=it\'s host=db port=5433"
    assert django_alias("django:shop") == "shop"
    assert django_alias("postgresql://h/django:shop") is None


def test_the_task_class() -> None:
    app = Celery("unit", set_as_current=False)
    SafeEffects(app)

    @app.task(base=DjangoSafeTask, shared=False, effects=[])
    def task() -> None: ...

    assert isinstance(task, SafeTask)
    assert isinstance(task, DjangoSafeTask)


def test_a_transaction_of_djangos_is_not_taken_into_another_thread() -> None:
    app = Celery("unit", set_as_current=False)
    SafeEffects(app)

    @app.task(base=DjangoSafeTask, shared=False, effects=[])
    def task() -> None: ...

    for transaction in ("default", connection_of(None)):
        with pytest.raises(ConfigurationError, match="sync_to_async"):
            asyncio.run(task.aapply_async(transaction=transaction))
