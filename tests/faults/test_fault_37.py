"""Faults 37 and 38: messages older than their rows, and effects that outlive the worker that began them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from celery import Celery
from kombu import Connection

from celery_safe_effects.testing import EmbeddedRedis, LocalServer, eventually
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.faults2 import becomes, counted, job_row, ledger, log, open_gate, operation_row, reached
from tests.support.names import PROVIDER_VARIABLE
from tests.support.processes import Workers
from tests.support.services import Sql
from tests.support.tasks import create_app

pytestmark = pytest.mark.faults


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    return {**app_conf, "safe_effects_lease_ttl": 1.5}


def snapshot(broker: Broker, folder: Path) -> Callable[[], None]:
    """Remember what the broker holds; returns what brings it back."""
    if isinstance(broker.server, EmbeddedRedis):
        server = broker.server
        copy = server.snapshot(folder / "snapshot")
        return lambda: server.restore(copy)
    messages = []
    with Connection(broker.url) as connection, connection.channel() as channel:
        while (message := channel.basic_get("celery", no_ack=False)) is not None:
            messages.append(message)
        # Closing the channel gives them back to the queue.
    assert messages

    def restore() -> None:
        with Connection(broker.url) as connection, connection.channel() as channel:
            for message in messages:
                channel.basic_publish(message, exchange="", routing_key="celery")

    return restore


def without_triggers(dsn: str, *statements: str) -> None:
    """Change the tables as no client can: as pruning does, or a rollback, or a restore of an older database."""
    with psycopg.connect(dsn) as connection:
        connection.execute("SET session_replication_role = replica")
        for statement in statements:
            connection.execute(statement.encode())


def prune(conf: dict[str, Any]) -> int:
    """Prune as if all retention times were over, those of the tombstones aside."""
    pruning = create_app({**conf, "safe_effects_retention": {"succeeded": 0.001}})
    try:
        return int(pruning.safe_effects.prune().jobs)
    finally:
        pruning.safe_effects.close()
        pruning.close()


def test_fault_37_an_old_snapshot_of_the_broker_after_pruning(
    app: Celery,
    workers: Workers,
    provider: Provider,
    sql: Sql,
    dsn: str,
    broker: Broker,
    own_broker: LocalServer,
    app_conf: dict[str, Any],
    tmp_path: Path,
) -> None:
    jobs = [app.tasks["tests.charge"].delay("cus_1", n).id for n in range(3)]
    eventually(lambda: broker.depth() == len(jobs), 10, message="the messages have arrived")
    restore = snapshot(broker, tmp_path)
    worker = workers("a")
    for job_id in jobs:
        becomes(sql, job_id, "succeeded")
    assert len(ledger(provider)) == 3
    eventually(lambda: not sql("SELECT 1 FROM jobs WHERE settled_at IS NULL"), 10, message="Celery was told")
    worker.kill()
    assert prune(app_conf) == 3

    restore()
    worker.start()
    eventually(lambda: counted(sql, "stale_deliveries", "no_row") == 3, 15, message="three stale deliveries")
    worker.kill()
    # After a year the tombstones are gone too.
    without_triggers(dsn, "DELETE FROM safe_effects.tombstone")
    restore()
    worker.start()
    eventually(lambda: counted(sql, "stale_deliveries", "no_row") == 6, 15, message="three more")
    assert eventually(lambda: broker.depth() == 0, 5)
    for table in ("jobs", "operations", "transitions"):
        assert sql(f"SELECT * FROM {table}") == []
    assert provider.received("charge") == len(ledger(provider)) == 3


def test_fault_37_a_message_whose_savepoint_was_rolled_back(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, dsn: str, broker: Broker
) -> None:
    lost = app.tasks["tests.charge"].delay("cus_1", 1).id
    kept = app.tasks["tests.charge"].delay("cus_1", 2).id
    # A rollback takes the row with it, but not the number that it was given.
    without_triggers(
        dsn,
        f"DELETE FROM safe_effects.job WHERE id = '{lost}'",
        f"DELETE FROM safe_effects.transition WHERE job_id = '{lost}'",
    )
    workers("a")
    becomes(sql, kept, "succeeded")
    eventually(lambda: counted(sql, "stale_deliveries", "no_row") == 1, 10, message="one stale delivery")
    assert [row["key"] for row in ledger(provider)] == [f"{kept}:1"]
    assert provider.received("charge") == 1
    assert [row["id"] for row in sql("SELECT id FROM jobs")] == [kept]
    assert app.AsyncResult(lost).status == "PENDING"


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.usefixtures("broker")
def test_fault_37_a_message_from_the_future_of_a_restored_database(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, dsn: str
) -> None:
    first = app.tasks["tests.pure"].delay(1).id
    lost = app.tasks["tests.charge"].delay("cus_1", 1).id
    (row,) = sql("SELECT seq FROM job WHERE id = %s", first)
    without_triggers(
        dsn,
        f"DELETE FROM safe_effects.job WHERE id = '{lost}'",
        f"DELETE FROM safe_effects.transition WHERE job_id = '{lost}'",
        f"SELECT setval('safe_effects.job_seq_seq', {row['seq']})",
    )
    workers("a")
    becomes(sql, first, "succeeded")
    job = becomes(sql, lost, "unknown")
    # Nobody knows how far it had come: it never runs by itself, and an operator may let it.
    assert job["reason"] == "row_missing"
    assert ledger(provider) == []
    eventually(lambda: app.AsyncResult(lost).status == "UNKNOWN", 5, message="everybody can see it")
    app.safe_effects.retry(lost, "the provider's ledger has no such charge")
    becomes(sql, lost, "succeeded")
    assert [charged["key"] for charged in ledger(provider)] == [f"{lost}:1"]


# -- 38 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broker", "acks_late"),
    [
        pytest.param("redis", False, id="redis-early"),
        pytest.param("rabbitmq", True, id="rabbitmq-late", marks=pytest.mark.rabbitmq),
    ],
    indirect=["broker"],
)
@pytest.mark.usefixtures("broker")
def test_fault_38_the_process_that_the_effect_started_goes_on(
    app: Celery,
    workers: Workers,
    provider: Provider,
    sql: Sql,
    acks_late: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provider.control(kind="detached", dedupe=False)
    env = {"SAFE_EFFECTS_TEST_DEADLINE": "1"}
    first = workers("a", acks_late=acks_late, env=env)
    job_id = app.tasks["tests.detached"].delay().id
    key = f"{job_id}:1"
    reached(provider, key)
    first.kill()
    workers("b", acks_late=acks_late, env=env)
    becomes(sql, job_id, "unknown")

    def absent_late_enough() -> bool:
        row = operation_row(sql, key)
        assert row["status"] == "unknown"
        found_nothing = row["evidence"] and row["evidence"]["lookup"] == "not_found"
        return bool(found_nothing and datetime.fromisoformat(row["evidence"]["asked_at"]) > row["deadline_at"])

    eventually(absent_late_enough, 15, message="asked after the deadline, with the worker gone")
    assert job_row(sql, job_id)["status"] == "unknown"
    assert sql("SELECT gone_at FROM operation") == [{"gone_at": None}]

    open_gate(provider, key)
    eventually(lambda: ledger(provider), 10, message="the other process has done it")
    monkeypatch.setenv(PROVIDER_VARIABLE, provider.url)
    app.safe_effects.reconcile([key])
    job = becomes(sql, job_id, "succeeded")
    (row,) = ledger(provider)
    assert row["key"] == key
    assert job["outcome_ref"] == row["ref"]
    assert log(sql, job_id, key) == ["intent_recorded", "unknown", "outcome_confirmed"]
    assert provider.received("gate_reached") == 1
