"""A Django project: its settings, its transactions, its migrations, its tests, its schedule and its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from celery_safe_effects.testing import BeatProcess, CeleryProcess, WorkerProcess, eventually
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.checks import assert_invariants, assert_ledger, job, log, wait_status
from tests.support.names import PROVIDER_VARIABLE
from tests.support.processes import FAST, ROOT
from tests.support.services import PostgresServer, Sql

PROJECT = "tests.support.django_project"
VARIABLE = "SAFE_EFFECTS_TEST_DJANGO"
MANAGE = (
    "import sys; from django.core.management import execute_from_command_line as run; run(['manage.py', *sys.argv[1:]])"
)


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    return redis_broker


class Django:
    """The project, in processes of its own."""

    def __init__(self, folder: Path, databases: dict[str, str], celery: dict[str, Any], provider: Provider) -> None:
        self.folder = folder
        self.databases = databases
        self.celery = celery
        self.provider = provider
        self.started: list[CeleryProcess] = []

    def env(self, **celery: Any) -> dict[str, str]:
        given = {"databases": self.databases, "celery": {**self.celery, **celery}}
        return {
            VARIABLE: json.dumps(given),
            PROVIDER_VARIABLE: self.provider.url,
            "DJANGO_SETTINGS_MODULE": f"{PROJECT}.settings",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }

    def python(self, code: str, *arguments: str, ok: bool = True, **celery: Any) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "error::ResourceWarning", "-c", code, *arguments],
            cwd=self.folder,
            env={**os.environ, **self.env(**celery)},
            capture_output=True,
            text=True,
            check=False,
            timeout=90,
        )
        assert (done.returncode == 0) is ok, done.stdout + done.stderr
        return done.stdout + done.stderr

    def manage(self, *arguments: str, ok: bool = True, **celery: Any) -> str:
        return self.python(f"import {PROJECT}; {MANAGE}", *arguments, ok=ok, **celery)

    def run(self, code: str, **celery: Any) -> Any:
        """Run code in the project; what it puts into `answer`."""
        prelude = f"""
            import json, sys, django, {PROJECT}
            django.setup()
            from django.db import connection, connections, transaction
            from {PROJECT}.shop.models import Order
            from {PROJECT}.shop.tasks import bill, close, plain, whole
            from celery_safe_effects import *
            answer = None
        """
        text = textwrap.dedent(prelude) + textwrap.dedent(code) + "\nprint('ANSWER', json.dumps(answer))"
        return json.loads(self.python(text, **celery).rpartition("ANSWER ")[2])

    def worker(self, name: str = "a", *, ready: bool = True, extra: Any = (), **celery: Any) -> WorkerProcess:
        made = WorkerProcess(
            f"{PROJECT}.celery:app",
            name=name,
            env={**self.env(**celery), "PYTHONWARNINGS": "always::ResourceWarning"},
            extra=extra,
            cwd=ROOT,
            log_path=self.folder / f"{name}.log",
        )
        self.started.append(made)
        made.start(ready=ready)
        return made

    def beat(self) -> BeatProcess:
        made = BeatProcess(f"{PROJECT}.celery:app", env=self.env(), cwd=ROOT, log_path=self.folder / "beat.log")
        self.started.append(made)
        made.start()
        return made


@pytest.fixture
def django(tmp_path: Path, empty_database_url: str, broker: Broker, provider: Provider) -> Iterator[Django]:
    """The project on an empty database."""
    fast = {key: value for key, value in FAST.items() if key != "safe_effects_sweep_interval"}
    celery = {**fast, "safe_effects_sweep_interval": 1, "broker_url": broker.url}
    made = Django(tmp_path, {"default": empty_database_url}, celery, provider)
    yield made
    for process in made.started:
        process.kill()


@pytest.fixture(scope="module")
def _migrated_once() -> dict[str, str]:
    return {}


@pytest.fixture
def migrated(django: Django, database_server: PostgresServer, _migrated_once: dict[str, str]) -> Django:
    """The project on a database that has been migrated; the first time, by the project, and then copied."""
    url = django.databases["default"]
    name = url.rpartition("/")[2]
    if "dump" not in _migrated_once:
        django.manage("migrate", "--verbosity=0")
        _migrated_once["dump"] = f"template_{uuid4().hex[:12]}"
        database_server.create_database(_migrated_once["dump"], template=name)
    else:
        database_server.drop_database(name)
        database_server.create_database(name, template=_migrated_once["dump"])
    return django


@pytest.fixture
def sql(empty_database_url: str) -> Iterator[Sql]:
    """As the usual one, on the project's database."""
    dsn = empty_database_url.replace("+psycopg", "", 1)
    options = {"autocommit": True, "row_factory": psycopg.rows.dict_row}
    with psycopg.connect(dsn, options="-c search_path=safe_effects,public", **options) as connection:  # type: ignore[arg-type]

        def run(query: str, *params: Any) -> list[dict[str, Any]]:
            cursor: Any = connection.execute(query.encode(), params or None)
            return cursor.fetchall() if cursor.description else []

        yield run


@pytest.fixture
def other_database(database_server: PostgresServer, django: Django) -> Iterator[str]:
    """A second database of the project, named `other`."""
    name = f"{django.databases['default'].rpartition('/')[2]}_other"
    django.databases["other"] = database_server.create_database(name)
    yield django.databases["other"]
    database_server.drop_database(name)


# -- settings and migrations -------------------------------------------------------------------------------------------


def test_the_schema_is_a_migration(django: Django, sql: Sql, other_database: str) -> None:
    """Made with the project's own, in the database of the jobs alone; going back leaves the record."""
    assert "No changes detected" in django.manage("makemigrations", "--check", "--dry-run", "safe_effects", "shop")
    assert "safe-effects upgrade" in refused(django)
    django.manage("migrate", "--verbosity=0")
    assert [row["version"] for row in sql("SELECT version FROM schema_version")] == [1]
    django.manage("migrate", "--verbosity=0", "--database=other")
    django.manage("migrate", "--verbosity=0", "--database=lite", "safe_effects")
    with psycopg.connect(other_database.replace("+psycopg", "", 1)) as connection:
        (there,) = connection.execute("SELECT to_regclass('safe_effects.job') IS NOT NULL").fetchone() or (None,)
    assert there is False
    sql("INSERT INTO job (id, task, args_digest, envelope) VALUES ('kept', 't', 'd', '')")
    django.manage("migrate", "--verbosity=0", "safe_effects", "zero")
    django.manage("migrate", "--verbosity=0")
    assert sql("SELECT id FROM jobs") == [{"id": "kept"}]
    assert "no issues" in django.manage("check")


def refused(django: Django, **celery: Any) -> str:
    worker = django.worker("refused", ready=False, **celery)
    assert worker.wait(timeout=30) != 0
    return worker.log()


def test_settings_under_a_namespace(migrated: Django, sql: Sql) -> None:
    """`CELERY_SAFE_EFFECTS_...`, checked as everywhere; the URL may be one of Django's databases."""
    code = """
        safe = %s.celery_app._safe_effects
        answer = [safe.config.lease_ttl, safe.config.schema, safe.upgrade(), connection.settings_dict["NAME"],
                  safe.store.rows("IDENTITY")[0].name]
    """
    ttl, schema, applied, name, own = migrated.run(code % PROJECT, safe_effects_lease_ttl=7)
    assert (ttl, schema, applied) == (7, "safe_effects", [])
    assert name == own
    assert "no setting safe_effects_lease_tll" in refused(migrated, safe_effects_lease_tll=7)
    assert "Django has no such database" in refused(migrated, safe_effects_database_url="django:nowhere")
    assert "only PostgreSQL can hold the truth" in refused(migrated, safe_effects_database_url="django:lite")
    migrated.manage("migrate", "--verbosity=0", "safe_effects", "zero")
    migrated.manage("migrate", "--verbosity=0", safe_effects_schema="jobs_of_the_shop")
    assert sql("SELECT version FROM jobs_of_the_shop.schema_version") == [{"version": 1}]


# -- transactions ------------------------------------------------------------------------------------------------------

ENQUEUE = """
    import psycopg
    from kombu import Connection
    from celery_safe_effects.errors import ConfigurationError

    def others():
        with psycopg.connect(%(dsn)r) as conn, Connection(%(broker)r) as broker:
            rows = conn.execute("SELECT count(*) FROM safe_effects.jobs").fetchone()[0]
            return [rows, broker.default_channel.client.llen("celery")]

    answer, seen = {}, []
    with transaction.atomic():
        Order.objects.create(id="kept", cents=5)
        answer["kept"] = bill.delay_on_commit("kept").id
        try:
            with transaction.atomic():
                Order.objects.create(id="lost", cents=5)
                answer["lost"] = bill.delay_on_commit("lost").id
                raise LookupError
        except LookupError:
            pass
        with transaction.atomic():
            Order.objects.create(id="released", cents=5)
            answer["released"] = close.apply_async_on_commit(("released",), idempotency_key="released").id
        seen.append(others())
        for conflict in (
            lambda: close.apply_async_on_commit(("other",), idempotency_key="released"),
            lambda: bill.delay_on_commit({1, 2}),
            lambda: bill.apply_async_on_commit(("kept",), using="lite"),
        ):
            try:
                conflict()
            except (SafeEffectsError, Exception) as exc:
                seen.append(type(exc).__name__)
        plain.delay_on_commit("kept")
    seen.append(others())
    try:
        with transaction.atomic():
            Order.objects.create(id="rolled back", cents=5)
            answer["rolled back"] = bill.apply_async(("rolled back",), transaction=connection).id
            raise LookupError
    except LookupError:
        pass
    Order.objects.create(id="at once", cents=5)
    answer["at once"] = bill.delay_on_commit("at once").id
    answer["seen"] = [*seen, others()]
"""


def test_jobs_are_part_of_djangos_transactions(
    migrated: Django, sql: Sql, broker: Broker, provider: Provider, empty_database_url: str
) -> None:
    """Job and rows commit or vanish together, with savepoints; messages follow; a refusal disturbs nothing."""
    dsn = empty_database_url.replace("+psycopg", "", 1)
    found = migrated.run(ENQUEUE % {"dsn": dsn, "broker": broker.url})
    *seen, once = found.pop("seen")
    assert seen == [[0, 0], "IdempotencyConflict", "PayloadInvalid", "ConfigurationError", [2, 3]]
    assert once == [3, 4]
    jobs = {row["id"] for row in sql("SELECT id FROM jobs")}
    assert jobs == {found[name] for name in ("kept", "released", "at once")}
    migrated.worker()
    for name, kind in (("kept", "charge"), ("released", "settle"), ("at once", "charge")):
        wait_status(sql, found[name], "succeeded")
        row = assert_ledger(provider, sql, found[name], kind=kind)
        assert sql("SELECT ref FROM public.shop_order WHERE id = %s", name) == [{"ref": row["ref"]}]
    assert len(provider.ledger()) == 3
    assert_invariants(sql, provider)


def test_another_database_is_refused(migrated: Django, other_database: str, sql: Sql) -> None:
    """Also where it has a schema of its own, in which no worker would ever look."""
    migrated.run(
        """
        from celery_safe_effects.store import migrate
        with transaction.atomic(using="other"):
            migrate.upgrade(connections["other"])
        """
    )
    code = """
        from celery_safe_effects.errors import ConfigurationError
        with transaction.atomic(using="other"):
            try:
                bill.apply_async_on_commit(("o",), using="other")
            except ConfigurationError as exc:
                answer = str(exc)
            with connections["other"].cursor() as cursor:
                cursor.execute("SELECT 1")
    """
    assert "names another one" in migrated.run(code)
    assert sql("SELECT id FROM jobs") == []


def test_the_projects_own_tests(migrated: Django) -> None:
    """`TestCase` rolls jobs back with everything else; `TransactionTestCase` commits them; eager ones run then."""
    assert "OK" in migrated.manage("test", f"{PROJECT}.shop", "--noinput")


# -- results and schedule ----------------------------------------------------------------------------------------------


def result_of(sql: Sql, job_id: str) -> str | None:
    """What django-celery-results shows."""
    found = sql("SELECT status FROM public.django_celery_results_taskresult WHERE task_id = %s", job_id)
    return str(found[0]["status"]) if found else None


def backends(sql: Sql, where: str) -> list[str]:
    """Connections to this database that are not ours."""
    query = "SELECT pid::text AS pid FROM pg_stat_activity WHERE datname = current_database()"
    not_ours = "pid <> pg_backend_pid() AND application_name <> 'celery-safe-effects'"
    return [row["pid"] for row in sql(f"{query} AND {not_ours} AND {where}")]


def test_results_in_djangos_database(migrated: Django, sql: Sql, provider: Provider) -> None:
    """UNKNOWN is stored and shown, and then what became of it; no connection is held where none is needed."""
    worker = migrated.worker()
    provider.control(kind="whole_body", delay_before=60)
    job_id = migrated.run('Order.objects.create(id="o", cents=5); answer = whole.delay("o").id')
    eventually(lambda: provider.received("whole_body", f"{job_id}:body"), 15, message="the provider is called")
    assert result_of(sql, job_id) == "STARTED"
    assert backends(sql, "state LIKE 'idle in transaction%%'") == []
    worker.kill_child()
    wait_status(sql, job_id, "unknown")
    eventually(lambda: result_of(sql, job_id) == "UNKNOWN", 10, message="the main process shows UNKNOWN")
    # There, one that broke would never be replaced.
    eventually(lambda: not backends(sql, "true"), 10, message="the main process keeps no connection of Django's")
    code = f"""
        from django_celery_results.models import TaskResult
        answer = [TaskResult.objects.get(task_id="{job_id}").status]
        result = whole.AsyncResult("{job_id}")
        answer += [result.state, result.ready()]
        {PROJECT}.celery_app._safe_effects.resolve("{job_id}:body", Happened("ref"), "ops", "seen")
        answer += [result.get(timeout=20), result.state]
    """
    assert migrated.run(code) == ["UNKNOWN", "UNKNOWN", False, None, "SUCCESS"]
    assert job(sql, job_id)["outcome_ref"] == "ref"


def test_a_lookup_that_asks_djangos_database(migrated: Django, sql: Sql, provider: Provider) -> None:
    """In threads that Celery does not know of; they leave no connection behind."""
    worker = migrated.worker()
    provider.control(kind="settle", drop_reply=True)
    job_id = migrated.run('Order.objects.create(id="o", cents=5); answer = close.delay("o").id')
    wait_status(sql, job_id, "succeeded")
    assert any("unknown > outcome_confirmed" in line for line in log(sql, job_id))
    eventually(lambda: not backends(sql, "true"), 10, message="no connection of Django's is left")
    assert "still open" not in worker.log()
    assert len(provider.ledger()) == 1
    assert_invariants(sql, provider)


def test_the_schedule_in_djangos_database(migrated: Django, sql: Sql) -> None:
    """django-celery-beat shows our entries and sends them; the task says when they are worth nothing any more."""
    migrated.worker(safe_effects_consume=False, extra=["-Q", "celery"])
    migrated.beat()
    query = "SELECT name, queue, enabled FROM public.django_celery_beat_periodictask WHERE name LIKE 'celery_safe%'"
    eventually(lambda: len(sql(query)) == 3, 20, message="the entries are there")
    names = {row["name"]: (row["queue"], row["enabled"]) for row in sql(query)}
    ours = ("safe_effects", True)
    assert names == {f"celery_safe_effects.{name}": ours for name in ("sweep", "reconcile", "prune")}
    code = """
        import time
        from kombu import Connection
        with Connection(%(broker)r) as broker:
            for _ in range(200):
                raw = broker.default_channel.client.lindex("safe_effects", 0)
                if raw:
                    break
                time.sleep(0.1)
            answer = json.loads(raw)["headers"]
    """
    headers = migrated.run(code % {"broker": migrated.celery["broker_url"]})
    assert headers["expires"], "else they would pile up while no worker runs"
    migrated.worker("b")
    swept = "SELECT last_by FROM maintenance WHERE name = 'sweep' AND last_by LIKE 'b@test%/sweep'"
    eventually(lambda: sql(swept), 20, message="a sweep that beat has sent")
