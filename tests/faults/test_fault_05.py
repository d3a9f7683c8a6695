"""A body asks for a retry twice in one run: one message, one more run; what a broker doubles is stale."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Producer, Queue, pools

from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support import retry_tasks
from tests.support.brokers import Broker
from tests.support.checks import assert_invariants, job, log, wait_status
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults

RUNS = [
    "job - > queued #0",
    "job queued > leased #1",
    "job leased > running #1",
    "job running > queued #1 (retry: Retry: Retry in 0.5s)",
    "job queued > leased #2",
    "job leased > running #2",
    "1 - > intent_recorded #2",
    "1 intent_recorded > outcome_confirmed #2",
    "job running > succeeded #2",
]


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    # Our own republication must not be what is counted.
    return {**app_conf, "imports": ["tests.support.retry_tasks"], "safe_effects_republish_after": 60}


@pytest.fixture
def app(app: Celery) -> Celery:
    retry_tasks.add_tasks(app)
    pools.reset()  # a connection of an earlier test remembers queues that are gone
    return app


def stale(sql: Sql) -> int:
    return int(sql("SELECT coalesce(sum(value), 0) AS n FROM counter WHERE name = 'stale_deliveries'")[0]["n"])


def double(broker: Broker) -> None:
    """What waits in the queue is there twice."""
    eventually(lambda: broker.depth() == 1, 10, message="the message has arrived")
    with Connection(broker.url) as connection, connection.channel() as channel:
        message = Queue("celery")(channel).get(no_ack=True)
        assert message is not None
        for _ in range(2):
            Producer(channel).publish(
                message.body,
                routing_key="celery",
                content_type=message.content_type,
                content_encoding=message.content_encoding,
                headers=message.headers,
                correlation_id=message.properties["correlation_id"],
            )


@pytest.mark.parametrize("kind", ["effects", "whole"])
def test_fault_05(
    app: Celery, workers: Workers, broker: Broker, provider: Provider, sql: Sql, acks_late: bool, kind: str
) -> None:
    first = app.tasks[f"tests.retries_twice_{kind}"].delay("o-1")
    double(broker)
    worker = workers("a", acks_late=acks_late, concurrency=2)
    wait_status(sql, first.id, "succeeded", timeout=20)
    eventually(lambda: job(sql, first.id)["settled_at"], 10)

    steps = ("job", "1 ") if kind == "effects" else ("job",)
    assert [line for line in log(sql, first.id) if line.startswith(steps)] == [
        line for line in RUNS if line.startswith(steps)
    ]
    assert len(provider.ledger()) == 1
    eventually(lambda: stale(sql) == 1, 10, message="the doubled message is counted")
    received = worker.log().count(f"tests.retries_twice_{kind}[{first.id}] received")
    assert received == 3, "the doubled message, and one for the retry"
    assert stale(sql) == 1
    assert broker.depth() == 0
    assert first.get(timeout=10) == job(sql, first.id)["result"]
    assert_invariants(sql, provider)
