"""Faults 30 and 31: connections that are older than the fork, terminated ones, and a server that crashes."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from celery import Celery

from celery_safe_effects.testing import EmbeddedPostgres, TcpProxy, eventually
from example_project.provider_client import Provider
from tests.support import processes
from tests.support.faults2 import becomes, job_row, ledger, log, open_gate, operation_row, reached
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults

REDIS = pytest.mark.parametrize("broker", ["redis"], indirect=True)


@pytest.mark.slow
@REDIS
def test_fault_30_connections_opened_at_import_do_not_reach_the_children(
    app: Celery,
    workers: Workers,
    sql: Sql,
    own_postgres: EmbeddedPostgres,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server_log = len(own_postgres.log())
    monkeypatch.setattr(processes, "APP", "tests.support.faults2_early:app")
    worker = workers("a", concurrency=4)
    forks: list[set[int]] = []
    for number in (400, 600):
        if forks:
            # These fork from a parent that has been standing in for beat, on connections of its own.
            eventually(lambda: sql("SELECT 1 FROM maintenance WHERE last_by LIKE '%%stand-in'"), 15)
            worker.kill_child()
        with app.connection_for_write() as connection, app.amqp.Producer(connection) as producer:
            for _ in range(number):
                app.tasks["tests.backend"].apply_async(producer=producer, ignore_result=True)
        eventually(
            lambda: not sql("SELECT 1 FROM jobs WHERE status <> 'succeeded' LIMIT 1"),
            90,
            interval=0.3,
            message="all of them ran",
        )
        forks.append(set(worker.children()))

    backends: dict[int, set[int]] = defaultdict(set)
    rows = sql("SELECT result, attempts FROM jobs")
    assert len(rows) == 1000
    for row in rows:
        assert row["attempts"] == 1
        child, backend = row["result"]
        backends[child].add(backend)
    assert set(backends) <= forks[0] | forks[1]
    assert not forks[0] & forks[1]
    # One that came late may have found nothing to do.
    assert [len(fork & set(backends)) >= 2 for fork in forks] == [True, True]
    early = re.search(r"opened at import by \d+: (\[.*\])", worker.log())
    assert early is not None
    used = [*json.loads(early[1]), *(pid for pids in backends.values() for pid in pids)]
    assert len(used) == len(set(used)), "a backend served two processes"
    assert re.findall(r"(?i).*(?:protocol|synchroni[sz]ation|invalid message).*", own_postgres.log()[server_log:]) == []


# -- 31 ----------------------------------------------------------------------------------------------------------------

INTENT, OUTCOME, RENEW = "%.operation AS o (key, %", "%SET status = CASE WHEN o.in_doubt%", "%unnest(%lease_until%"
CLAIM, LEAVE = "%attempts = j.attempts + 1%", "%outcome_ref = coalesce(%"


class Row:
    """Holds a job's row, so that the worker's next statement on it waits and can be met there."""

    def __init__(self, sql: Sql, dsn: str, job_id: str) -> None:
        self.sql = sql
        self.dsn = dsn
        self.job_id = job_id

    @contextmanager
    def held(self, statement: str) -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(self.dsn) as connection:
            if statement == RENEW:  # passes by a row that is held
                connection.execute("LOCK TABLE safe_effects.job IN EXCLUSIVE MODE")
            found = connection.execute("SELECT 1 FROM safe_effects.job WHERE id = %s FOR UPDATE", (self.job_id,))
            assert found.fetchone()
            yield connection

    def waiting(self, statement: str) -> int:
        """The server process whose statement waits for the row."""
        query = (
            "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"
            " AND application_name = 'celery-safe-effects'"
        )
        return int(eventually(lambda: self.sql(query, statement), 10, message=f"{statement} waits")[0]["pid"])

    def terminate(self, statement: str, begin: Callable[[], object]) -> None:
        """End the connection before its statement commits."""
        with self.held(statement):
            begin()
            self.sql("SELECT pg_terminate_backend(%s)", self.waiting(statement))

    def lose_the_reply(self, proxy: TcpProxy, statement: str, begin: Callable[[], object]) -> None:
        """Let the statement commit, and cut the connection before anybody hears of it."""
        with self.held(statement):
            begin()
            pid = self.waiting(statement)
            proxy.blackhole()
        idle = "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND state = 'idle'"
        eventually(lambda: self.sql(idle, pid), 5, message=f"{statement} is committed")
        proxy.cut()
        proxy.resume()


@pytest.fixture
def database_proxy(own_postgres: EmbeddedPostgres) -> Iterator[TcpProxy]:
    """What stands between the workers and their database."""
    with TcpProxy(own_postgres.host, own_postgres.port) as proxy:
        yield proxy


def through(proxy: TcpProxy, own_postgres: EmbeddedPostgres, database_url: str) -> dict[str, str]:
    """Settings of a worker that reaches its database through a proxy."""
    assert f":{own_postgres.port}/" in database_url
    return {"safe_effects_database_url": database_url.replace(f":{own_postgres.port}/", f":{proxy.port}/")}


@REDIS
def test_fault_31_connections_terminated_at_every_step(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, dsn: str
) -> None:
    worker = workers("a")
    children = worker.children()
    job_id = app.tasks["tests.gated_charge"].delay("gate").id
    key = f"{job_id}:1"
    row = Row(sql, dsn, job_id)

    reached(provider, "gate")
    row.terminate(RENEW, lambda: None)
    row.terminate(INTENT, lambda: _before_the_intent(provider, sql))
    eventually(lambda: provider.received("charge"), 10, message="the call is made after all")
    job = becomes(sql, job_id, "succeeded")
    assert provider.received("charge") == 1
    (charged,) = ledger(provider)
    assert (charged["key"], charged["ref"]) == (key, job["outcome_ref"])
    _intent_came_first(sql, provider)
    assert log(sql, job_id, key) == ["intent_recorded", "outcome_confirmed"]

    # After the provider accepted, every connection at once.
    provider.control(kind="charge", times=1, delay_after=1)
    job_id = app.tasks["tests.charge"].delay("cus_1", 500).id
    eventually(lambda: provider.ledger(f"{job_id}:1"), 10, message="the provider accepted")
    sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = 'celery-safe-effects'"
    )
    job = becomes(sql, job_id, "succeeded")
    assert log(sql, job_id, f"{job_id}:1") == ["intent_recorded", "outcome_confirmed"]
    assert (job["attempts"], job["fence"]) == (1, 1)
    assert provider.received("charge") == 2
    assert worker.children() == children


def _before_the_intent(provider: Provider, sql: Sql) -> None:
    open_gate(provider, "gate")
    assert sql("SELECT 1 FROM operations") == []
    assert provider.received("charge") == 0


def _intent_came_first(sql: Sql, provider: Provider) -> None:
    """Every request that the provider saw had a recorded intent."""
    recorded = {row["key"] for row in sql("SELECT key FROM operations")}
    assert {row["key"] for row in ledger(provider)} <= recorded


@REDIS
def test_fault_31_every_reply_of_the_database_is_lost_once(
    app: Celery,
    workers: Workers,
    provider: Provider,
    sql: Sql,
    dsn: str,
    own_postgres: EmbeddedPostgres,
    database_url: str,
    database_proxy: TcpProxy,
) -> None:
    worker = workers("a", conf=through(database_proxy, own_postgres, database_url))
    provider.control(kind="primary", times=1, delay_before=1)
    worker.pause()
    job_id = app.tasks["tests.with_fallback"].delay(provider.url, "gate").id
    key = f"{job_id}:1"
    row = Row(sql, dsn, job_id)

    row.lose_the_reply(database_proxy, CLAIM, worker.resume)
    eventually(lambda: provider.received("primary"), 10, message="the call is under way")
    row.lose_the_reply(database_proxy, OUTCOME, lambda: None)
    reached(provider, "gate")
    row.lose_the_reply(database_proxy, LEAVE, lambda: open_gate(provider, "gate"))
    job = becomes(sql, job_id, "succeeded")
    assert (job["attempts"], job["fence"]) == (1, 1)
    assert log(sql, job_id) == ["queued", "leased", "running", "succeeded"]
    assert log(sql, job_id, key) == ["intent_recorded", "outcome_confirmed"]
    eventually(lambda: job_row(sql, job_id)["settled_at"], 10, message="Celery was told")
    assert app.AsyncResult(job_id).get(timeout=5) == job["outcome_ref"]

    job_id = app.tasks["tests.gated_charge"].delay("another gate").id
    reached(provider, "another gate")
    Row(sql, dsn, job_id).lose_the_reply(database_proxy, INTENT, lambda: open_gate(provider, "another gate"))
    job = becomes(sql, job_id, "succeeded")
    assert log(sql, job_id, f"{job_id}:1") == ["intent_recorded", "outcome_confirmed"]
    assert operation_row(sql, f"{job_id}:1")["attempt"] == 1
    assert sorted(charged["kind"] for charged in ledger(provider)) == ["charge", "primary"]
    assert (provider.received("primary"), provider.received("charge")) == (1, 1)


@pytest.mark.parametrize(
    ("broker", "acks_late"),
    [
        pytest.param("redis", False, id="redis-early"),
        pytest.param("rabbitmq", True, id="rabbitmq-late", marks=pytest.mark.rabbitmq),
    ],
    indirect=["broker"],
)
def test_fault_31_the_server_crashes_under_load(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, own_postgres: EmbeddedPostgres, acks_late: bool
) -> None:
    provider.control(kind="charge", delay_before=0.15)
    workers("a", acks_late=acks_late, concurrency=2)
    jobs = [app.tasks["tests.charge"].delay("cus_1", n).id for n in range(16)]
    for seen in (4, 9):
        eventually(lambda: len(provider.ledger(kind="charge")) >= seen, 20)  # noqa: B023 - called here and now
        own_postgres.restart("immediate")
    for job_id in jobs:
        job = becomes(sql, job_id, "succeeded", timeout=25)
        (charged,) = provider.ledger(f"{job_id}:1")
        assert job["outcome_ref"] == charged["ref"]
    assert provider.received("charge") == len(jobs)
    _intent_came_first(sql, provider)
