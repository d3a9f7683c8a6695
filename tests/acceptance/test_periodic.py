"""Sweep and reconciliation: sent by beat beside the user's own entries, done without it if need be, cheap at rest."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from celery import Celery
from kombu import Connection, Queue

from celery_safe_effects import SafeEffects
from celery_safe_effects.store import migrate
from celery_safe_effects.testing import EmbeddedPostgres, eventually
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.checks import assert_invariants, assert_ledger, job, wait_status
from tests.support.processes import Beats, Workers
from tests.support.services import Sql
from tests.support.tasks import create_app

SWEEP, RECONCILE = "celery_safe_effects.sweep", "celery_safe_effects.reconcile"


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    """The broker makes no difference here."""
    return redis_broker


def swept_by(sql: Sql) -> str:
    """Who swept last."""
    (row,) = sql("SELECT last_by FROM maintenance WHERE name = 'sweep'")
    return str(row["last_by"])


# -- the entries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after", "in a handler"])
def test_the_users_entries_stay(when: str) -> None:
    mine = {"task": "shop.report", "schedule": 60.0}
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.safe_effects_database_url = "postgresql+psycopg://localhost/shop"
    app.conf.safe_effects_queue = "upkeep"
    if when == "before":
        app.conf.beat_schedule = {"report": mine}
    SafeEffects(app)
    if when == "after":
        app.conf.beat_schedule = {"report": mine}

    @app.on_after_configure.connect(weak=False)
    def add(sender: Any, **_: Any) -> None:
        if when == "in a handler":
            sender.add_periodic_task(60.0, sender.signature("shop.report"), name="report")

    app.finalize()
    schedule = app.conf.beat_schedule
    assert schedule["report"]["task"] == "shop.report"
    for name, interval in ((SWEEP, 5.0), (RECONCILE, 10.0)):
        assert schedule[name]["schedule"] == interval
        assert schedule[name]["options"]["queue"] == "upkeep"
        assert app.tasks[name].expires >= interval
    app.close()


def test_an_entry_of_the_user_under_our_name_goes_first() -> None:
    mine = {"task": SWEEP, "schedule": 1.5, "options": {"queue": "mine"}}
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.safe_effects_database_url = "postgresql+psycopg://localhost/shop"
    app.conf.beat_schedule = {SWEEP: mine}
    SafeEffects(app)
    app.finalize()
    assert app.conf.beat_schedule[SWEEP] == mine
    assert app.conf.beat_schedule[RECONCILE]["task"] == RECONCILE
    app.close()


def take(broker: Broker, queue: str) -> list[Any]:
    """Everything that waits in a queue."""
    found = []
    with Connection(broker.url) as connection, connection.channel() as channel:
        while (message := Queue(queue)(channel).get(no_ack=True)) is not None:
            found.append(message)
    return found


def test_beat_sends_them_beside_the_users_own(app_conf: dict[str, Any], beat: Beats, broker: Broker, sql: Sql) -> None:
    """Nobody consumes; the messages of the sweep say when they are worth nothing any more, and have no row."""
    beat(
        conf={
            "beat_schedule": {
                "mine": {"task": "tests.plain", "schedule": 0.3},
                "job": {"task": "tests.pure", "schedule": 0.3},
            }
        }
    )
    eventually(lambda: broker.depth("safe_effects") >= 4 and broker.depth() >= 4, 20, message="both queues fill")
    ours = take(broker, "safe_effects")
    assert {message.headers["task"] for message in ours} >= {SWEEP, RECONCILE}
    assert all(message.headers["expires"] for message in ours)
    assert {message.headers["task"] for message in take(broker, "celery")} == {"tests.plain", "tests.pure"}
    # A SafeTask in the user's own schedule is a job like any other.
    assert {row["task"] for row in sql("SELECT task FROM jobs")} == {"tests.pure"}


# -- who does the work -------------------------------------------------------------------------------------------------


def heard(sql: Sql) -> bool:
    """Whether the last sweep was a task."""
    by = swept_by(sql)
    return by != "None" and not by.endswith("/stand-in")


def who_ended_the_lease(sql: Sql, job_id: str) -> str:
    """The actor of the log's row."""
    (row,) = sql("SELECT actor FROM transitions WHERE job_id = %s AND reason = 'lease_expired'", job_id)
    return str(row["actor"])


def test_recovery_with_beat_alone(app: Celery, workers: Workers, beat: Beats, provider: Provider, sql: Sql) -> None:
    """As long as beat's sweeps run, nobody stands in."""
    conf = {"safe_effects_sweep_interval": 2}  # a stand-in has patience for three intervals
    beat(conf={"safe_effects_sweep_interval": 1})
    nodes = {worker.node: worker for worker in [workers(name, ready=False, conf=conf) for name in "ab"]}
    for worker in nodes.values():
        worker.wait_ready()
    eventually(lambda: heard(sql), 15, message="beat is heard")
    result = app.tasks["tests.sleep_then_charge"].apply_async((60, "cus_1", 1))
    eventually(lambda: provider.received("entered_sleep_then_charge"), 10, message="it is under way")
    nodes.pop(str(job(sql, result.id)["lease_owner"]).partition("/")[0]).kill()
    found = wait_status(sql, result.id, "succeeded", timeout=20)
    (survivor,) = nodes
    by = who_ended_the_lease(sql, result.id)
    assert by.startswith(f"{survivor}/")
    assert not by.endswith("/stand-in")
    assert found["outcome_ref"] == assert_ledger(provider, sql, result.id)["ref"]
    assert_invariants(sql, provider)


def test_recovery_when_beat_has_died(
    app: Celery, workers: Workers, beat: Beats, provider: Provider, sql: Sql, dsn: str
) -> None:
    """A worker's main process takes over after three intervals, and the queue of the sweep is not needed."""
    workers("a")
    ticking = beat()
    eventually(lambda: heard(sql), 15, message="beat is heard")
    ticking.kill()
    eventually(lambda: swept_by(sql) == "a@test/stand-in", 10)  # and what beat has sent is done with
    safe: Any = app.safe_effects
    with psycopg.connect(dsn) as connection:
        # A job whose worker, on another machine, was killed as soon as it had claimed it.
        result = app.tasks["tests.charge"].apply_async(("cus_1", 500), transaction=connection)
        claim = {
            "id": result.id,
            "token": uuid4(),
            "owner": "b@gone/1/1",
            "ttl": 0.1,
            "generation": 0,
            "digest": None,
            "task": None,
            "seq": None,
            "tenant": None,
            "limits": None,
        }
        connection.execute(safe.store.sql["CLAIM"].encode(), claim)
    found = wait_status(sql, result.id, "succeeded", timeout=20)
    assert who_ended_the_lease(sql, result.id) == "a@test/stand-in"
    assert found["outcome_ref"] == assert_ledger(provider, sql, result.id)["ref"]
    assert_invariants(sql, provider)


def test_who_consumes_our_queue(app: Celery, workers: Workers, beat: Beats, broker: Broker, sql: Sql) -> None:
    """Not a worker that was told not to; every other one, whatever queues it was given."""
    workers("a", conf={"safe_effects_consume": False})
    beat()
    eventually(lambda: broker.depth("safe_effects") >= 3, 20, message="beat sends and nobody takes")
    result = app.tasks["tests.pure"].apply_async((1,))
    wait_status(sql, result.id, "succeeded", timeout=10)
    assert broker.depth("safe_effects") >= 3
    workers("b", queues=["other"])
    eventually(lambda: swept_by(sql).startswith("b@test/"), 10, message="the other worker sweeps")
    eventually(lambda: broker.depth("safe_effects") <= 2, 10, message="and takes what was left")
    elsewhere = app.tasks["tests.pure"].apply_async((2,), queue="other")
    wait_status(sql, elsewhere.id, "succeeded", timeout=10)


# -- several at once ---------------------------------------------------------------------------------------------------

JOBS = 120


def test_several_sweeps_at_once_share_the_work(
    app: Celery, app_conf: dict[str, Any], broker: Broker, sql: Sql, provider: Provider
) -> None:
    """Each lease that ran out is ended once, each message that is due is published once."""
    tasks = [app.tasks["tests.pure"].apply_async((n,)).id for n in range(JOBS)]
    dead, due = tasks[: JOBS // 2], tasks[JOBS // 2 :]
    safe: Any = app.safe_effects
    for job_id in dead:
        claim = {
            "token": uuid4(),
            "owner": "gone@test/1/1",
            "ttl": 0.01,
            "generation": 0,
            "digest": None,
            "task": None,
            "seq": None,
            "tenant": None,
            "limits": None,
        }
        assert safe.store.row("CLAIM", id=job_id, **claim).status == "running"
    broker.purge()
    sql("UPDATE job SET next_publish_at = clock_timestamp() WHERE id = ANY (%s)", due)
    barrier = threading.Barrier(4, timeout=20)
    swept: list[Any] = []

    def sweep() -> None:
        one: Any = create_app(app_conf)
        try:
            one.safe_effects.store.check_schema()  # the connection is open
            barrier.wait()
            swept.append(one.safe_effects.sweep())
        finally:
            one.safe_effects.close()
            one.close()

    threads = [threading.Thread(target=sweep) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(swept) == 4
    assert sorted(job_id for one in swept for job_id in one.jobs) == sorted(dead)
    ended = sql("SELECT job_id FROM transitions WHERE reason = 'lease_expired'")
    assert sorted(row["job_id"] for row in ended) == sorted(dead)
    sent = Counter(message.headers["id"] for message in take(broker, "celery"))
    assert sum(one.published for one in swept) == sum(sent.values())
    # Those that were dead are due again after a second, which is within a slow sweep.
    assert set(due) <= set(sent) <= set(tasks)
    assert set(sent.values()) == {1}
    assert_invariants(sql, provider)


# -- at rest -----------------------------------------------------------------------------------------------------------


class TestAtRest:
    """On a server that logs every statement."""

    @pytest.fixture
    def logging_postgres(self) -> Iterator[EmbeddedPostgres]:
        settings: dict[str, Any] = {"log_statement": "all", "log_line_prefix": "<%p %a> ", "log_min_messages": "log"}
        with EmbeddedPostgres(settings=settings) as server:
            yield server

    @pytest.fixture
    def database_url(self, logging_postgres: EmbeddedPostgres) -> Iterator[str]:
        url = logging_postgres.create_database("rest")
        migrate.upgrade(url)
        yield url
        logging_postgres.drop_database("rest")

    @pytest.fixture
    def app_conf(self, app_conf: dict[str, Any]) -> dict[str, Any]:
        """A heartbeat of a second; a sweep is due more often than that."""
        return {**app_conf, "safe_effects_lease_ttl": 3, "safe_effects_heartbeat_interval": 1}

    def test_an_idle_worker_asks_once_a_heartbeat(
        self, app: Celery, workers: Workers, sql: Sql, logging_postgres: EmbeddedPostgres
    ) -> None:
        """While others sweep: for five heartbeats, we say in the database that they do."""
        workers("a", concurrency=2)
        for n in range(4):
            app.tasks["tests.pure"].apply_async((n,))
        eventually(lambda: len(sql("SELECT 1 FROM jobs WHERE settled_at IS NOT NULL")) == 4, 15)

        def somebody_sweeps() -> Any:
            soon = "clock_timestamp() + interval '5 s'"
            return sql(f"UPDATE maintenance SET last_started_at = {soon}, last_by = 'b@test' RETURNING 1")

        def for_seconds(seconds: int) -> float:
            """How many it became."""
            (began,) = sql("SELECT clock_timestamp() AS at")[0].values()
            past = "SELECT extract(epoch FROM clock_timestamp() - %s)::float8 AS s"
            eventually(lambda: somebody_sweeps() and sql(past, began)[0]["s"] >= seconds, 20, 0.3)
            return float(sql(past, began)[0]["s"])

        for_seconds(2)  # in which the worker finds that it need not stand in any more
        start = logging_postgres.log_path.stat().st_size
        took = for_seconds(5)
        text = logging_postgres.log_path.read_bytes()[start:].decode()
        statements = re.findall(r"<\d+ celery-safe-effects> LOG:  (?:execute [^:]*|statement): \s*(\S.*)", text)
        assert 0 < len(statements) <= took + 2, "\n".join(statements)
