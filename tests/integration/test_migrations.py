"""The schema arrives through whatever an application migrates with, in its transaction, once."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic import command
from alembic.config import Config
from celery import Celery
from sqlalchemy import create_engine, pool, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from celery_safe_effects.errors import ConfigurationError, SchemaMismatch
from celery_safe_effects.store import migrate
from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.processes import ROOT, Workers
from tests.support.services import Sql

LATEST = list(range(1, migrate.latest() + 1))


@pytest.fixture
def empty_dsn(empty_database_url: str) -> str:
    return empty_database_url.replace("+psycopg", "", 1)


@pytest.fixture
def engine(empty_database_url: str) -> Iterator[Any]:
    made = create_engine(empty_database_url, poolclass=pool.NullPool)
    yield made
    made.dispose()


def applied(dsn: str, schema: str = "safe_effects") -> list[int] | None:
    """The versions that the schema says it has; None without a schema."""
    with psycopg.connect(dsn) as connection:
        try:
            rows = connection.execute(f'SELECT version FROM "{schema}".schema_version ORDER BY 1'.encode())
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
            found = connection.cursor()
            connection.rollback()
            found.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,))
            assert found.fetchone() is None, "a schema without its versions"
            return None
        return [row[0] for row in rows]


def run(folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with this checkout to import."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def write(folder: Path, files: dict[str, str]) -> None:
    """Write files, by their names."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(content))


# -- SQLAlchemy and psycopg --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begun", ["first statement", "nothing before", "begin()"])
def test_a_connection_of_sqlalchemy_is_the_callers_transaction(engine: Any, empty_dsn: str, begun: str) -> None:
    """Rolled back: nothing is there; committed: it is."""
    for commit in (False, True):
        with engine.connect() as connection:
            if begun == "begin()":
                connection.begin()
            elif begun == "first statement":
                connection.execute(text("CREATE TABLE IF NOT EXISTS public.shop (id int)"))
            assert migrate.upgrade(connection) == LATEST
            assert applied(empty_dsn) is None, "visible before the commit"
            (connection.commit if commit else connection.rollback)()
            assert applied(empty_dsn) == (LATEST if commit else None)
    with engine.connect() as connection:
        assert migrate.upgrade(connection) == []
    assert migrate.upgrade(engine) == []


def test_an_engine_commits_by_itself(engine: Any, empty_dsn: str) -> None:
    assert migrate.upgrade(engine) == LATEST
    assert applied(empty_dsn) == LATEST


def test_a_connection_of_psycopg_is_the_callers_transaction(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn) as connection:
        assert migrate.upgrade(connection) == LATEST
        connection.rollback()
        assert applied(empty_dsn) is None
        with connection.transaction():
            assert migrate.upgrade(connection) == LATEST
            assert applied(empty_dsn) is None
    assert applied(empty_dsn) == LATEST


def test_a_connection_in_autocommit_gets_all_or_nothing(empty_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = migrate.migrations()
    broken = migrate.Migration(real[-1].version + 1, "broken", "CREATE TABLE {schema}.half (id int); SELECT 1 / 0", 1)
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        with monkeypatch.context() as patch:
            patch.setattr(migrate, "migrations", lambda: [*real, broken])
            with pytest.raises(psycopg.errors.DivisionByZero):
                migrate.upgrade(connection)
        assert applied(empty_dsn) is None
        assert migrate.upgrade(connection) == LATEST
    assert applied(empty_dsn) == LATEST


def test_every_migration_says_which_code_it_is_for() -> None:
    """The oldest code that a later migration works with is never older than that of an earlier one."""
    said = [migration.oldest_code for migration in migrate.migrations()]
    assert said == sorted(said)
    assert [migration.version for migration in migrate.migrations()] == LATEST
    for nothing in ("SELECT 1", "-- oldest code: 3\nSELECT 1", "-- oldest code: 0\nSELECT 1"):
        with pytest.raises(ConfigurationError, match="oldest code: N"):
            migrate._read(2, "two", nothing)
    assert migrate._read(2, "two", "-- two\n-- oldest code: 1\nSELECT 1").oldest_code == 1


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        ("UPDATE job SET status = 'running', lease_until = clock_timestamp() + '1 min', lease_owner = 'a@test/1/1',"
         " lease_token = gen_random_uuid(), fence = 1, actor = 'a'", r"a@test/1/1 was here \d s ago"),
        ("INSERT INTO worker (node, pid, version, pool, concurrency, connections, queues, seen_at)"
         " VALUES ('b@test', 1, '0', 'prefork', 1, 1, '{}', clock_timestamp() - interval '50 s')",
         r"b@test was here 5\d s ago"),
    ],
    ids=["a live lease", "a worker"],
)  # fmt: skip
def test_what_older_code_does_not_survive_waits_until_none_runs(
    database_url: str, sql: Sql, dsn: str, monkeypatch: pytest.MonkeyPatch, trace: str, words: str
) -> None:
    """Nothing is changed while a worker is there; one that stopped, or has not been seen for long, is not."""
    real = migrate.migrations()
    after = real[-1].version + 1
    harmless = migrate.Migration(after, "harmless", "CREATE TABLE {schema}.one ()", real[-1].version)
    harmful = migrate.Migration(after + 1, "harmful", "CREATE TABLE {schema}.two ()", after + 1)
    sql("INSERT INTO job (id, task, args_digest, envelope) VALUES ('one', 't', 'd', '')")
    sql(trace)
    with monkeypatch.context() as patch:
        patch.setattr(migrate, "migrations", lambda: [*real, harmless, harmful])
        with pytest.raises(SchemaMismatch, match=words) as refused:
            migrate.upgrade(database_url)
        assert "stop all workers" in str(refused.value)
        assert applied(dsn) == LATEST
        patch.setattr(migrate, "migrations", lambda: [*real, harmless])
        assert migrate.upgrade(database_url) == [after], "what older code survives needs no stop"
        sql("UPDATE job SET status = 'queued', lease_until = NULL, lease_owner = NULL, lease_token = NULL, actor = 'a'")
        sql("UPDATE worker SET seen_at = clock_timestamp() - interval '61 s'")
        sql(
            "INSERT INTO worker (node, pid, version, pool, concurrency, connections, queues, stopped_at)"
            " VALUES ('c@test', 1, '0', 'prefork', 1, 1, '{}', clock_timestamp())"
        )
        patch.setattr(migrate, "migrations", lambda: [*real, harmless, harmful])
        assert migrate.upgrade(database_url) == [after + 1]
    with pytest.raises(SchemaMismatch, match="upgrade celery-safe-effects"):
        migrate.upgrade(database_url)


AT_ONCE = """
import os, sys
import psycopg, sqlalchemy
from celery_safe_effects.errors import ConfigurationError, SchemaMismatch
from celery_safe_effects.store import migrate
url = sys.argv[1]
read, write = os.pipe()

def once(how):
    os.close(write)
    os.read(read, 1)  # all begin when the parent closes its end
    if how == "url":
        return migrate.upgrade(url)
    with psycopg.connect(url.replace("+psycopg", "", 1), autocommit=how == "autocommit") as connection:
        return migrate.upgrade(connection)

for n in range(8):
    if os.fork() == 0:
        os.write(1, f"{once(['url', 'transaction', 'autocommit'][n % 3])}\\n".encode())  # whole, beside the others
        os._exit(0)
os.close(write)
print([os.wait()[1] for _ in range(8)])
"""


def test_eight_processes_at_once(empty_database_url: str, empty_dsn: str) -> None:
    """One of them does it, the others wait and find it done."""
    done = run(ROOT, "-c", AT_ONCE, empty_database_url)
    *answers, statuses = done.stdout.split("\n")[:-1]
    assert statuses == str([0] * 8), done.stderr
    assert sorted(answers) == sorted([str(LATEST), *["[]"] * 7])
    assert applied(empty_dsn) == LATEST


# -- Alembic and Django ------------------------------------------------------------------------------------------------


@pytest.fixture
def alembic(tmp_path: Path, empty_database_url: str) -> Config:
    """A migration environment as `alembic init` makes it, with a migration that makes a table of the shop and ours."""
    write(
        tmp_path,
        {
            "env.py": """
                from alembic import context
                from sqlalchemy import engine_from_config, pool

                section = context.config.get_section(context.config.config_ini_section)
                connectable = engine_from_config(section, prefix="sqlalchemy.", poolclass=pool.NullPool)
                with connectable.connect() as connection:
                    context.configure(connection=connection, target_metadata=None)
                    with context.begin_transaction():
                        context.run_migrations()
            """,
            "versions/one.py": """
                from alembic import op
                from celery_safe_effects.store.migrate import upgrade as upgrade_safe_effects

                revision, down_revision = "one", None

                def upgrade():
                    op.execute("CREATE TABLE public.orders (id text PRIMARY KEY)")
                    upgrade_safe_effects(op.get_bind())

                def downgrade():
                    op.execute("DROP SCHEMA safe_effects CASCADE")
                    op.execute("DROP TABLE public.orders")
            """,
        },
    )
    config = Config()
    config.set_main_option("script_location", str(tmp_path))
    config.set_main_option("sqlalchemy.url", empty_database_url)
    return config


def test_through_alembic(alembic: Config, tmp_path: Path, empty_dsn: str) -> None:
    command.upgrade(alembic, "head")
    assert applied(empty_dsn) == LATEST
    command.downgrade(alembic, "base")
    assert applied(empty_dsn) is None
    # A migration that fails later in the same transaction takes ours along.
    fails = """
        from alembic import op

        revision, down_revision = "two", "one"

        def upgrade():
            op.execute("SELECT 1 / 0")
    """
    write(tmp_path, {"versions/two.py": fails})
    with pytest.raises(DBAPIError, match="division by zero"):
        command.upgrade(alembic, "head")
    assert applied(empty_dsn) is None


@pytest.mark.parametrize("atomic", [True, False])
def test_through_django(tmp_path: Path, empty_database_url: str, empty_dsn: str, atomic: bool) -> None:
    url = make_url(empty_database_url)
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": url.database,
        "USER": url.username,
        "PASSWORD": url.password,
        "HOST": url.host,
        "PORT": url.port,
    }
    write(
        tmp_path,
        {
            "settings.py": f"""
                SECRET_KEY = "x"
                INSTALLED_APPS = ["shop"]
                USE_TZ = True
                DATABASES = {{"default": {database!r}}}
            """,
            "shop/__init__.py": "",
            "shop/migrations/__init__.py": "",
            "shop/migrations/0001_initial.py": f"""
                from django.db import migrations

                from celery_safe_effects.store.migrate import upgrade


                class Migration(migrations.Migration):
                    atomic = {atomic}
                    operations = [
                        migrations.RunPython(
                            lambda apps, editor: upgrade(editor.connection),
                            lambda apps, editor: editor.execute("DROP SCHEMA safe_effects CASCADE"),
                        ),
                    ]
            """,
        },
    )
    steps = """
        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate")
        call_command("migrate")
        call_command("migrate", "shop", "zero")
        call_command("migrate", "shop", "0001")
    """
    run(tmp_path, "-c", textwrap.dedent(steps), DJANGO_SETTINGS_MODULE="settings")
    assert applied(empty_dsn) == LATEST
    with psycopg.connect(empty_dsn) as connection:
        names = connection.execute("SELECT app, name FROM django_migrations").fetchall()
    assert names == [("shop", "0001_initial")]


# -- another name ------------------------------------------------------------------------------------------------------


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    return redis_broker


@pytest.fixture
def app_conf(app_conf: dict[str, Any], empty_database_url: str) -> dict[str, Any]:
    return {**app_conf, "safe_effects_database_url": empty_database_url, "safe_effects_schema": "Shop_Jobs"}


def test_a_schema_of_another_name(app: Celery, workers: Workers, provider: Provider, empty_dsn: str) -> None:
    """Everything is in it, down to the names in the triggers and functions; nothing is in the usual one."""
    safe: Any = app.safe_effects
    assert safe.upgrade() == LATEST
    assert applied(empty_dsn, "Shop_Jobs") == LATEST
    provider.control(kind="refund", drop_reply=True, times=1)
    workers("a")
    bill = app.tasks["tests.charge"].apply_async(("cus_1", 500), idempotency_key="order-1")
    # Parked by the lost reply, confirmed by the look-up, replayed.
    refund = app.tasks["tests.mortal"].apply_async(("order-1",))
    for result, kind in ((bill, "charge"), (refund, "refund")):
        eventually(lambda: safe.job(result.id).status == "succeeded", 30, message=kind)  # noqa: B023 - now
        (row,) = provider.ledger(key=f"{result.id}:1")
        assert safe.job(result.id).outcome_ref == row["ref"]
        assert result.get(timeout=10) == row["ref"]
    assert applied(empty_dsn) is None
    with psycopg.connect(empty_dsn) as connection:
        query = """SELECT from_status, to_status FROM "Shop_Jobs".transitions WHERE job_id = %s ORDER BY id"""
        states = [row[1] for row in connection.execute(query, (refund.id,))]
        assert states[:6] == ["queued", "leased", "running", "intent_recorded", "unknown", "unknown"]
        (elsewhere,) = connection.execute(
            "SELECT count(*) FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace"
            " WHERE n.nspname <> 'Shop_Jobs' AND p.prosrc LIKE '%safe_effects%'"
        ).fetchone() or (None,)
        assert elsewhere == 0
