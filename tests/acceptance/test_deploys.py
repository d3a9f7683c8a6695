"""Deploys: two versions of the library side by side, adoption, and the way back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from kombu import Connection, Producer

from celery_safe_effects import Happened
from celery_safe_effects.errors import ConfigurationError, SchemaMismatch
from celery_safe_effects.glue.envelope import MARK
from celery_safe_effects.store import migrate
from celery_safe_effects.testing import WorkerProcess, eventually
from example_project.provider_client import Provider
from tests.support.adopted_tasks import ABSENT_VARIABLE, PLAIN_VARIABLE
from tests.support.brokers import Broker
from tests.support.checks import assert_invariants, assert_ledger, job, log, wait_status
from tests.support.newer_library import newer_library
from tests.support.processes import Workers
from tests.support.services import Sql

LATEST = migrate.latest()


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    return redis_broker


def refused(workers: Workers, name: str = "refused", **options: Any) -> str:
    """Start a worker that must refuse; its log."""
    worker: WorkerProcess = workers(name, ready=False, **options)
    assert worker.wait(timeout=30) != 0
    return worker.log()


def as_newer(environment: dict[str, str]) -> dict[str, Any]:
    """A worker of a later version of the library."""
    return {"conf": {"imports": ["tests.support.newer_library"]}, "env": environment}


def as_of(**variables: str) -> dict[str, Any]:
    """A worker of another version of the app."""
    return {"conf": {"imports": ["tests.support.adopted_tasks"]}, "env": variables}


def charged(app: Celery, sql: Sql, provider: Provider, customer: str) -> str:
    """Charge by way of whatever workers there are; who ran it."""
    result = app.tasks["tests.charge"].apply_async((customer, 5))
    wait_status(sql, result.id, "succeeded", timeout=20)
    assert_ledger(provider, sql, result.id, kind="charge")
    (row,) = sql("SELECT actor FROM transitions WHERE job_id = %s AND to_status = 'leased'", result.id)
    return str(row["actor"]).partition("@")[0]


# -- two versions of the library ---------------------------------------------------------------------------------------

NOTE = (
    LATEST + 1,
    "note",
    """ALTER TABLE {schema}.job ADD COLUMN note text;
       ALTER TABLE {schema}.operation ADD COLUMN note text NOT NULL DEFAULT '';
       CREATE INDEX job_note ON {schema}.job (note)""",
    LATEST,
)
"""What the older code does not notice."""
CHANGE = (LATEST + 2, "change", "ALTER TABLE {schema}.job RENAME COLUMN note TO remark", LATEST + 2)
"""What it must not meet."""


def test_a_rolling_deploy_of_the_library(
    app: Celery, workers: Workers, database_url: str, sql: Sql, provider: Provider
) -> None:
    """Upgraded first, while old workers run on with jobs in their hands; then both side by side; then the new alone."""
    old = workers("old")
    assert charged(app, sql, provider, "before") == "old"
    with newer_library(NOTE) as environment:
        newer = as_newer(environment)
        assert f"is at version {LATEST}, older" in refused(workers, "early", **newer)
        running = app.tasks["tests.sleep"].apply_async((3,))
        wait_status(sql, running.id, "running")
        assert migrate.upgrade(database_url) == [LATEST + 1]
        wait_status(sql, running.id, "succeeded")
        assert charged(app, sql, provider, "old code on the newer schema") == "old"
        new = workers("new", **newer)
        old.stop(30)
        assert charged(app, sql, provider, "new") == "new"
    assert migrate.upgrade(database_url) == [], "a late starter of the old version finds nothing to do"
    late = workers("late")
    new.stop(30)
    assert charged(app, sql, provider, "old again") == "late"

    with newer_library(NOTE, CHANGE) as environment:
        newest = as_newer(environment)
        with pytest.raises(SchemaMismatch, match=r"late@test.* was here .*stop all workers and producers"):
            migrate.upgrade(database_url)
        assert charged(app, sql, provider, "nothing was changed") == "late"
        late.stop(30)
        assert migrate.upgrade(database_url) == [LATEST + 2]
        workers("newest", **newest)
        assert charged(app, sql, provider, "newest") == "newest"
    words = refused(workers, "older")
    assert f"is at version {LATEST + 2}, newer, and works with {LATEST + 2} and later" in words
    assert "upgrade the package celery-safe-effects" in words
    assert_invariants(sql, provider)


def test_a_mark_of_another_version(app: Celery, workers: Workers, broker: Broker, sql: Sql, provider: Provider) -> None:
    """It says that there is a row, so the message alone never runs; the sweep gives the job in words of its own."""
    workers("a")
    accepted = app.tasks["tests.charge"].apply_async(("cus_1", 5), countdown=2)
    for job_id in (accepted.id, str(uuid4())):
        send_as(broker, job_id, {"v": 2, "seq": [1], "more": "words"}, ("cus_1", 5))
    eventually(lambda: stale(sql) == {"mark_of_another_version": 2}, 10, message="both are ignored")
    wait_status(sql, accepted.id, "succeeded", timeout=20)
    assert len(sql("SELECT id FROM jobs")) == 1
    assert len(provider.ledger()) == 1
    assert_invariants(sql, provider)


def stale(sql: Sql) -> dict[str, int]:
    """The counted deliveries that were not allowed to run, by why."""
    return {r["label"]: r["value"] for r in sql("SELECT label, value FROM counter WHERE name = 'stale_deliveries'")}


def send_as(broker: Broker, job_id: str, mark: Any, args: Any, task: str = "tests.charge") -> None:
    """Send a message with a mark."""
    headers = {
        "id": job_id,
        "task": task,
        MARK: mark,
        "lang": "py",
        "root_id": job_id,
        "argsrepr": "",
        "kwargsrepr": "",
    }
    with Connection(broker.url) as connection, connection.channel() as channel:
        body = json.dumps([args, {}, {}])
        properties = {"correlation_id": job_id, "content_type": "application/json", "content_encoding": "utf-8"}
        Producer(channel).publish(body, routing_key="celery", headers=headers, **properties)


# -- two versions of the app -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", [ABSENT_VARIABLE, PLAIN_VARIABLE], ids=["unknown", "plain"])
def test_13_a_worker_of_the_old_app_takes_the_messages(
    app: Celery, workers: Workers, sql: Sql, provider: Provider, variable: str
) -> None:
    """It knows the task not at all, or as a plain one: it runs none, spends no attempt, and stores no FAILURE."""
    old = workers("old", **as_of(**{variable: "tests.charge"}))
    results = [app.tasks["tests.charge"].apply_async((f"cus_{n}", 5)) for n in range(3)]
    eventually(lambda: stale(sql).get("no_safe_task_here", 0) >= 3, 15, message="the old worker took them all")
    assert {result.state for result in results} == {"PENDING"}
    assert provider.ledger() == []
    workers("new")
    old.stop(30)
    for result in results:
        row = wait_status(sql, result.id, "succeeded", timeout=40)
        assert row["attempts"] == 1
        assert log(sql, result.id)[1:3] == ["job queued > leased #1", "job leased > running #1"]
        assert result.get(timeout=10)
    assert len(provider.ledger()) == 3
    assert_invariants(sql, provider)


def test_an_unknown_task_without_a_mark_is_celerys_business(
    app: Celery, workers: Workers, sql: Sql, broker: Broker
) -> None:
    workers("a")
    result = app.send_task("tests.nobody", ())
    eventually(lambda: result.state == "FAILURE", 10)
    assert "nobody" in str(result.result)
    assert sql("SELECT id FROM jobs") == []


@pytest.fixture
def front(app_conf: dict[str, Any], provider: Provider) -> Iterator[Celery]:
    """A producer that has gone back already: the task is a plain one in it."""
    import os

    from tests.support import adopted_tasks
    from tests.support.tasks import create_app

    made: Any = create_app(app_conf)
    os.environ[PLAIN_VARIABLE] = "tests.charge"
    try:
        adopted_tasks.change(made)
    finally:
        del os.environ[PLAIN_VARIABLE]
    yield made
    made.safe_effects.close()
    made.close()


def test_the_way_back(
    app: Celery, front: Celery, workers: Workers, sql: Sql, provider: Provider, broker: Broker
) -> None:
    """Producers first, then what is queued or parked ends, then the workers: nothing is lost, nothing runs twice."""
    safe: Any = app.safe_effects
    worker = workers("safe")
    provider.control(kind="charge", drop_reply=True, times=1)
    provider.control(kind="charge", lookup_status=503)
    parked = app.tasks["tests.charge"].apply_async(("parked", 5))
    wait_status(sql, parked.id, "unknown")
    worker.stop()
    queued = app.tasks["tests.charge"].apply_async(("queued", 5))

    # Too early: a worker of the plain task would strand both.
    plain = as_of(**{PLAIN_VARIABLE: "tests.charge"})
    words = refused(workers, "early", **plain)
    assert "'tests.charge' (1 queued, 1 unknown)" in words
    assert "keep base=SafeTask" in words

    # Producers first: what they send has no mark, and the workers that are still there take it in.
    with pytest.raises(ConfigurationError, match="base=SafeTask"):
        front.tasks["tests.charge"].apply_async(("no", 5), idempotency_key="order-1")
    unmarked = front.tasks["tests.charge"].apply_async(("unmarked", 5))
    assert sql("SELECT 1 FROM jobs WHERE id = %s", unmarked.id) == []
    worker = workers("safe again")
    wait_status(sql, queued.id, "succeeded")
    eventually(lambda: sql("SELECT 1 FROM jobs WHERE id = %s", unmarked.id), 15)
    wait_status(sql, unmarked.id, "succeeded")
    (row,) = provider.ledger(key=f"{parked.id}:1")
    safe.resolve(f"{parked.id}:1", Happened(row["ref"]), "ops", "listed there")
    wait_status(sql, parked.id, "succeeded", timeout=20)
    worker.stop()

    # Drained: now the task is a plain one, also for those who know it by its name alone.
    workers("plain", **plain)
    result = front.tasks["tests.charge"].apply_async(("plain", 5))
    assert result.get(timeout=15)
    assert sql("SELECT 1 FROM known_task WHERE name = 'tests.charge'") == []
    assert sql("SELECT count(*) AS n FROM jobs")[0]["n"] == 3
    charged_once = sorted(row["body"]["customer"] for row in provider.ledger())
    assert charged_once == ["parked", "plain", "queued", "unmarked"]
    assert job(sql, parked.id)["outcome_ref"] == row["ref"]
