"""Every pool: jobs run, leases are renewed whatever the jobs do, and many jobs share few connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from celery import Celery

from celery_safe_effects.testing import eventually
from celery_safe_effects.testing.process import patience
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.checks import assert_invariants, assert_ledger, job, log, wait_status
from tests.support.pools import POOLS, SHARED_POOLS, needs_pool
from tests.support.processes import Workers
from tests.support.services import Sql

TTL = 1.2 * patience()
CLEAN = ["job - > queued #0", "job queued > leased #1", "job leased > running #1", "job running > succeeded #1"]


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    """What a pool does is no matter of the broker's."""
    return redis_broker


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    """Leases that are over soon if nobody renews them."""
    return {**app_conf, "safe_effects_lease_ttl": TTL, "worker_prefetch_multiplier": 1}


@contextmanager
def sweeping(app: Celery) -> Iterator[None]:
    """Somebody else sweeps meanwhile, and would take a lease that ran out."""
    over = threading.Event()

    def sweep() -> None:
        while not over.wait(0.2):
            app.safe_effects.sweep()

    thread = threading.Thread(target=sweep)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("pool", POOLS)
def test_a_pool(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, pool: str, request: pytest.FixtureRequest
) -> None:
    needs_pool(request, pool)
    worker = workers("a", pool=pool, concurrency=1 if pool == "solo" else 4)
    agent = app.tasks["tests.agent"].apply_async(("order-1",))
    wait_status(sql, agent.id, "succeeded", timeout=15)
    for step, kind in (("2", "refund"), ("3", "mail"), ("4", "deploy")):
        assert_ledger(provider, sql, agent.id, step, kind)
    body = app.tasks["tests.whole_body"].apply_async(("cus_1", 500))
    wait_status(sql, body.id, "succeeded", timeout=15)
    eventually(lambda: (agent.state, body.state) == ("SUCCESS", "SUCCESS"), 10)

    # Jobs that give way to nobody are longer than their lease, which another would take if it were not renewed.
    with sweeping(app):
        busy = [app.tasks[f"tests.{name}"].apply_async((2 * TTL,)) for name in ("burn", "blocks", "sleep")]
        for result in busy:
            wait_status(sql, result.id, "succeeded", timeout=30)
            assert log(sql, result.id) == CLEAN

    # The context is the job: where it does not go by itself, the body takes it along.
    result = app.tasks["tests.from_threads"].apply_async()
    found = eventually(lambda: job(sql, result.id)["result"], 15)
    reached = {name for name, ref in found.items() if ref != "NoActiveJob"}
    assert (
        reached
        == {
            "prefork": {"executor", "executor with its context", "spawned", "spawned with its context"},
            "threads": {"executor with its context"},
            "solo": {"executor with its context"},
            "gevent": {"executor with its context"},
            "eventlet": {"executor with its context", "spawned with its context"},
        }[pool]
    ), found
    assert len(provider.ledger(kind="charge")) == len(reached)

    # A body that exits ends in the row, and nothing else ends with it.
    result = app.tasks["tests.exits"].apply_async()
    found = wait_status(sql, result.id, "failed", timeout=20)
    assert (found["attempts"], found["reason"]) == (2, "max_attempts")
    eventually(lambda: result.state == "FAILURE", 20)
    last = app.tasks["tests.pure"].apply_async((5,))
    assert last.get(timeout=10) == 5
    assert worker.running
    print(worker.log()[-6000:])
    assert provider.received("entered_exits") == 2
    assert_invariants(sql, provider)


@pytest.mark.parametrize("pool", SHARED_POOLS)
def test_many_jobs_share_few_connections(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, pool: str, request: pytest.FixtureRequest
) -> None:
    """Two hundred at once on four connections wait for each other, lose no lease, and open no fifth."""
    needs_pool(request, pool)
    many = 200
    with sweeping(app):
        results = [app.tasks["tests.sleep"].apply_async((2 * TTL,)) for _ in range(many)]
        before = connections(sql)
        workers("a", pool=pool, concurrency=many, conf={"safe_effects_max_connections": 4})
        most, at_once = 0, 0
        limit = time.monotonic() + 60 * patience()
        while job_count(sql, "succeeded") < many and time.monotonic() < limit:
            most = max(most, connections(sql) - before)
            at_once = max(at_once, job_count(sql, "running"))
            time.sleep(0.05)
    rows = sql("SELECT status, attempts, fence FROM jobs")
    assert [tuple(row.values()) for row in rows] == [("succeeded", 1, 1)] * many
    assert at_once > many / 4
    assert 2 <= most <= 4
    eventually(lambda: results[-1].state == "SUCCESS", 20)
    assert_invariants(sql, provider)


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_who_waits_for_the_database_takes_no_lease_from_others(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, dsn: str, pool: str, request: pytest.FixtureRequest
) -> None:
    """Two rows are locked, and their jobs wait on all connections that there are; a third job's lease is renewed."""
    needs_pool(request, pool)
    conf = {"safe_effects_max_connections": 3, "safe_effects_statement_timeout": 5 * patience()}
    workers("a", pool=pool, concurrency=4, conf=conf)
    stuck = [app.tasks["tests.charge_slowly"].apply_async((name, 1.0)) for name in "ab"]
    for result in stuck:
        wait_key(provider, f"{result.id}:1")
    with sweeping(app), psycopg.connect(dsn) as connection:
        connection.execute(
            "SELECT FROM safe_effects.job WHERE id = ANY (%s) FOR UPDATE", ([result.id for result in stuck],)
        )
        other = app.tasks["tests.sleep"].apply_async((2.5 * TTL,))
        wait_status(sql, other.id, "running")
        time.sleep(2.5 * TTL)
        connection.rollback()
        wait_status(sql, other.id, "succeeded", timeout=20)
        for result in stuck:
            wait_status(sql, result.id, "succeeded", timeout=20)
    assert log(sql, other.id) == CLEAN
    assert len(provider.ledger()) == 4
    assert_invariants(sql, provider)


def connections(sql: Sql) -> int:
    """How many connections the library has to the test's database."""
    return int(
        sql(
            "SELECT count(*) AS n FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'celery-safe-effects'"
        )[0]["n"]
    )


def wait_key(provider: Provider, key: str) -> None:
    eventually(lambda: provider.ledger(key=key), 15, message=f"{key} happened")


def job_count(sql: Sql, status: str) -> int:
    return int(sql("SELECT count(*) AS n FROM jobs WHERE status = %s", status)[0]["n"])


def test_a_time_limit_of_a_greenlet(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, request: pytest.FixtureRequest
) -> None:
    """Between effects it ends the attempt; inside one the job is parked, and what happened is found."""
    needs_pool(request, "gevent")
    workers("a", pool="gevent", concurrency=4)
    provider.control(kind="charge", delay_after=4, times=1)
    inside = app.tasks["tests.charge"].apply_async(("cus_1", 500), time_limit=2)
    between = app.tasks["tests.sleep"].apply_async((60,), time_limit=2, max_attempts=1)
    ended = wait_status(sql, between.id, "failed", timeout=20)
    assert (ended["attempts"], ended["reason"]) == (1, "max_attempts")
    assert "Timeout" in ended["last_error"]
    wait_status(sql, inside.id, "succeeded", timeout=30)
    assert "job running > unknown #1 (outcome_unknown)" in log(sql, inside.id)
    assert_ledger(provider, sql, inside.id)
    eventually(lambda: (inside.state, between.state) == ("SUCCESS", "FAILURE"), 10)
    assert_invariants(sql, provider)
