"""A producer, beat, a worker, operators and an observer, each with a database role of its own, do their whole work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from celery import Celery, group
from celery.bin.base import CLIContext
from click.testing import CliRunner
from psycopg import sql as pg
from psycopg.rows import dict_row
from sqlalchemy import create_engine, pool, text
from sqlalchemy.orm import Session

from celery_safe_effects import AdmissionRejected, IdempotencyConflict
from celery_safe_effects.cli import safe_effects
from celery_safe_effects.store import migrate
from celery_safe_effects.store.grants import KINDS, OBSERVER, PRODUCER, WORKER
from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support import producer_tasks
from tests.support.brokers import Broker
from tests.support.checks import assert_invariants, wait_status
from tests.support.processes import Beats, Workers
from tests.support.roles import as_role, roles
from tests.support.services import Sql
from tests.support.tasks import create_app

Cli = Callable[..., tuple[int, Any]]


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    return redis_broker


@pytest.fixture(params=["safe_effects", "Shop_Jobs"])
def schema(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def urls(empty_database_url: str, schema: str) -> Iterator[dict[str, str]]:
    """The database as each kind of role; the schema is another's."""
    with roles(empty_database_url, *KINDS) as made:
        migrate.upgrade(empty_database_url, schema, grants=made)
        yield {kind: as_role(empty_database_url, role) for kind, role in made.items()}


@pytest.fixture
def sql(empty_database_url: str, schema: str, urls: dict[str, str]) -> Iterator[Sql]:
    """Queries of the judge, who may see everything."""
    options = f'-c search_path="{schema}",public'
    dsn = empty_database_url.replace("+psycopg", "", 1)
    with psycopg.connect(dsn, autocommit=True, row_factory=dict_row, options=options) as connection:

        def run(query: str, *params: Any) -> list[dict[str, Any]]:
            cursor = connection.execute(query.encode(), params or None)
            return cursor.fetchall() if cursor.description else []

        yield run


@pytest.fixture
def app_conf(app_conf: dict[str, Any], urls: dict[str, str], schema: str) -> dict[str, Any]:
    """The producer's, in this process; the others' differ in the URL."""
    return {**app_conf, "safe_effects_database_url": urls[PRODUCER], "safe_effects_schema": schema,
            "imports": ["tests.support.producer_tasks"]}  # fmt: skip


@pytest.fixture
def cli(app_conf: dict[str, Any], urls: dict[str, str], provider: Provider) -> Cli:
    """`cli("observer", "jobs")`: the exit status and the document of a command as that role."""

    def run(kind: str, *arguments: str, **conf: Any) -> tuple[int, Any]:
        made = create_app({**app_conf, "safe_effects_database_url": urls[kind], "imports": [], **conf})
        context = CLIContext(app=made, no_color=True, workdir=None)
        done = CliRunner().invoke(safe_effects, [*arguments, "--json"], obj=context, catch_exceptions=False)
        made.close()
        return done.exit_code, json.loads(done.stdout)

    return run


@pytest.mark.slow
def test_each_does_its_whole_work(
    app: Celery, urls: dict[str, str], sql: Sql, provider: Provider, workers: Workers, beat: Beats, cli: Cli,
    empty_database_url: str, schema: str,
) -> None:  # fmt: skip
    producer_tasks.add_tasks(app)
    tasks, safe = app.tasks, app.safe_effects
    worker = workers("a", conf={"safe_effects_database_url": urls[WORKER]}, concurrency=2)
    beat()  # sends, as a producer does

    # Enqueued once, twice, with other arguments; parked by a lost reply, asked about, confirmed.
    provider.control(kind="charge", drop_reply=True, times=1)
    bill = tasks["tests.charge"].apply_async(("cus_1", 500), idempotency_key="order-1")
    assert tasks["tests.charge"].apply_async(("cus_1", 500), idempotency_key="order-1").id == bill.id
    with pytest.raises(IdempotencyConflict):
        tasks["tests.charge"].apply_async(("cus_1", 700), idempotency_key="order-1")
    assert wait_status(sql, bill.id, "succeeded")["outcome_ref"] == bill.get(timeout=20)
    assert len(provider.ledger(key=f"{bill.id}:1")) == 1
    assert {"unknown", "outcome_confirmed"} <= {row["to_status"] for row in sql("SELECT to_status FROM transitions")}
    # A result that the backend has forgotten is stored again.
    eventually(lambda: sql("SELECT 1 FROM jobs WHERE id = %s AND settled_at IS NOT NULL", bill.id), 20)
    bill.forget()
    assert bill.state == "PENDING"
    tasks["tests.charge"].apply_async(("cus_1", 500), idempotency_key="order-1")
    assert eventually(lambda: bill.state == "SUCCESS", 20)

    # With the caller's own rows, also under a limit; a canvas with a plain member; a refusal.
    code, answer = cli(WORKER, "limits", "--tenant", "acme", "--set", "tenant_queued=3")
    assert code == 0, answer
    sql("CREATE TABLE public.orders (id text PRIMARY KEY)")
    producer = str(psycopg.conninfo.conninfo_to_dict(urls[PRODUCER].replace("+psycopg", "", 1))["user"])
    sql(pg.SQL("GRANT INSERT, SELECT ON public.orders TO {}").format(pg.Identifier(producer)).as_string(None))
    engine = create_engine(urls[PRODUCER], poolclass=pool.NullPool)
    with Session(engine) as session:
        session.execute(text("INSERT INTO public.orders VALUES ('o-1')"))
        enlisted = tasks["tests.charge"].apply_async(("cus_2", 1), tenant="acme", transaction=session)
        canvas = group(tasks["tests.pure"].si(n) for n in range(3)) | tasks["tests.plain"].si("after")
        whole = canvas.apply_async(transaction=session)
        for _ in range(2):
            tasks["tests.charge"].apply_async(("cus_2", 2), tenant="acme", countdown=600, transaction=session)
        with pytest.raises(AdmissionRejected):
            tasks["tests.charge"].apply_async(("cus_2", 3), tenant="acme", countdown=600, transaction=session)
        session.commit()
    engine.dispose()
    wait_status(sql, enlisted.id, "succeeded")
    assert whole.get(timeout=20) == "after"
    tasks["tests.charge"].apply_async(("cus_2", 4), tenant="acme", countdown=600)
    with pytest.raises(AdmissionRejected):
        tasks["tests.charge"].apply_async(("cus_2", 4), tenant="acme", countdown=600)

    # Many at once; a few of another tenant pass them; one at a time in a pool.
    code, answer = cli(WORKER, "limits", "--pool", "narrow", "--set", "pool_running=1")
    assert code == 0, answer
    many = safe.enqueue_many([tasks["tests.sleep"].s(0.1).set(tenant="long") for _ in range(60)])
    few = [tasks["tests.sleep"].apply_async((0.01,), tenant="short", pool="narrow") for _ in range(4)]
    for job in (*(one.job_id for one in many), *(one.id for one in few)):
        wait_status(sql, job, "succeeded", timeout=60)
    assert sql("SELECT 1 FROM job WHERE express"), "the express lane was used"
    # What bodies send and how they end: children, a retry, a replacement, an error.
    retries = tasks["tests.retries"].delay("r-1", 0.1)
    replaces = tasks["tests.replaces"].delay("r-2")
    assert retries.get(timeout=20)[1:] == [1, True]
    wait_status(sql, replaces.id, "succeeded")

    # A killed worker's lease runs out; another takes over.
    taken = tasks["tests.sleep"].delay(5)
    wait_status(sql, taken.id, "running")
    worker.kill()
    workers("b", conf={"safe_effects_database_url": urls[WORKER]})
    assert wait_status(sql, taken.id, "succeeded", timeout=40)["fence"] == 2

    # Operators work with the worker's role.
    parked = tasks["tests.charge_plain"].delay("cus_3", 9)
    late = tasks["tests.pure"].apply_async(("late",), countdown=600)
    provider.control(kind="charge_plain", drop_reply=True, times=1)
    lost = tasks["tests.charge_plain"].delay("cus_4", 9)
    wait_status(sql, parked.id, "succeeded", "unknown")
    wait_status(sql, lost.id, "unknown", "succeeded")
    (unknown,) = [job for job in (parked.id, lost.id) if safe_status(sql, job) == "unknown"]
    operator = ("--reason", "seen at the provider")
    (row,) = provider.ledger(key=f"{unknown}:1")
    assert cli(WORKER, "resolve", f"{unknown}:1", "--happened", "--ref", row["ref"], *operator)[0] == 0
    assert cli(WORKER, "cancel", late.id, *operator)[0] == 0
    assert cli(WORKER, "retry", late.id, *operator)[0] == 0
    for now in ("sweep", "reconcile", "republish"):
        assert cli(WORKER, now)[0] == 0, now
    wait_status(sql, unknown, "succeeded")
    wait_status(sql, late.id, "succeeded")
    assert cli(WORKER, "doctor")[1]["healthy"], cli(WORKER, "doctor")

    # An observer sees it all.
    looks: list[tuple[str, ...]] = [
        ("status",), ("jobs",), ("jobs", "--status", "succeeded"), ("show", bill.id), ("log", bill.id),
        ("operations", "--job", bill.id), ("limits",), ("metrics",), ("doctor",),
    ]  # fmt: skip
    for command in looks:
        code, answer = cli(OBSERVER, *command)
        assert code == 0, (command, answer)

    # What none of them is for.
    others: list[tuple[str, tuple[str, ...], str | None]] = [
        (OBSERVER, ("cancel", late.id, *operator), WORKER),
        (OBSERVER, ("sweep",), WORKER),
        (OBSERVER, ("limits", "--set", "tenant_queued=1"), WORKER),
        (PRODUCER, ("jobs",), OBSERVER),
        (PRODUCER, ("show", bill.id), OBSERVER),
        (PRODUCER, ("cancel", late.id, *operator), WORKER),
        (PRODUCER, ("resolve", f"{bill.id}:1", "--not-happened", *operator), OBSERVER),
        (WORKER, ("upgrade",), None),
    ]
    for kind, command, wanted in others:
        code, answer = cli(kind, *command)
        assert (code, answer["error"]["code"]) == (1, "permission_missing"), (kind, command, answer)
        assert wanted is None or f"upgrade --grant {wanted}=" in answer["error"]["message"], answer
    for kind in (PRODUCER, OBSERVER):
        refused = workers(f"not-{kind}", conf={"safe_effects_database_url": urls[kind]}, ready=False)
        assert refused.wait(30) != 0
        assert "[permission_missing]" in refused.log()

    assert_invariants(sql, provider)

    # Finished jobs go, with their log; their keys stay.
    code, answer = cli(WORKER, "prune", safe_effects_retention={"succeeded": 0.1})
    assert code == 0, answer
    assert sql("SELECT 1 FROM tombstone WHERE id = %s", bill.id)
    assert sql("SELECT 1 FROM transitions WHERE job_id = %s", bill.id) == []

    # Nobody was more than a role that may log in.
    used = sql("SELECT DISTINCT usename FROM pg_stat_activity WHERE application_name = 'celery-safe-effects'")
    assert {row["usename"].rpartition("_")[0] for row in used} >= {PRODUCER, WORKER}
    for row in used:
        (role,) = sql("SELECT rolsuper, rolcreaterole, rolbypassrls FROM pg_roles WHERE rolname = %s", row["usename"])
        assert not any(role.values()), row
        assert sql("SELECT 1 FROM pg_class WHERE relowner = %s::regrole", f'"{row["usename"]}"') == []


def safe_status(sql: Sql, job: str) -> str:
    return str(sql("SELECT status FROM jobs WHERE id = %s", job)[0]["status"])
