"""The broker delivers a job again while it runs: one run, one effect, and every other delivery is counted as stale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Producer, Queue

from celery_safe_effects.testing import RabbitMQServer, eventually
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.checks import assert_invariants, assert_ledger, assert_log, job, wait_status
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults

LONG = 12.0
ENV = {"SAFE_EFFECTS_TEST_DEADLINE": "60"}
LOG = [
    "job - > queued #0",
    "job queued > leased #1",
    "job leased > running #1",
    "1 - > intent_recorded #1",
    "1 intent_recorded > outcome_confirmed #1",
    "job running > succeeded #1",
]


@pytest.fixture
def impatient_rabbitmq(broker: Broker) -> Iterator[None]:
    """RabbitMQ takes a message away from a consumer that did not acknowledge it in four seconds."""
    server = broker.server
    if isinstance(server, RabbitMQServer):
        server.ctl("eval", "application:set_env(rabbit, consumer_timeout, 4000).")
    yield
    if isinstance(server, RabbitMQServer):
        server.ctl("eval", "application:set_env(rabbit, consumer_timeout, 1800000).")


@pytest.fixture
def app_conf(app_conf: dict[str, Any], impatient_rabbitmq: None) -> dict[str, Any]:
    """Redis restores a message that was not acknowledged in four seconds, and looks every second."""
    if app_conf["broker_url"].startswith("redis"):
        app_conf["broker_transport_options"] = {
            "visibility_timeout": 4,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
        }
    # Our own republication must not be what is counted.
    app_conf["safe_effects_republish_after"] = 60
    return app_conf


def stale(sql: Sql) -> int:
    """How many deliveries were counted as stale."""
    return int(sql("SELECT coalesce(sum(value), 0) AS n FROM counter WHERE name = 'stale_deliveries'")[0]["n"])


def double(broker: Broker, copies: int) -> None:
    """Put copies of the waiting message beside it."""
    eventually(lambda: broker.depth() == 1, 10, message="the message has arrived")
    with Connection(broker.url) as connection, connection.channel() as channel:
        message = Queue("celery")(channel).get()
        assert message is not None
        for _ in range(copies):
            Producer(channel).publish(
                message.body,
                routing_key="celery",
                content_type=message.content_type,
                content_encoding=message.content_encoding,
                headers=message.headers,
                correlation_id=message.properties["correlation_id"],
            )
        message.requeue()


def test_01_a_long_job_is_delivered_again_and_again(
    app: Celery, workers: Workers, broker: Broker, provider: Provider, sql: Sql, acks_late: bool
) -> None:
    provider.control(kind="charge", delay_before=LONG)
    result = app.tasks["tests.charge"].apply_async(("cus_1", 500))
    double(broker, 2)
    both = [workers(name, acks_late=acks_late, env=ENV, ready=False) for name in "ab"]
    for worker in both:
        worker.wait_ready()

    # The two copies; under late acknowledgement the broker gives up its patience too.
    wanted = 3 if acks_late else 2
    eventually(lambda: stale(sql) >= wanted, LONG + 20, message="every other delivery is counted")
    found = wait_status(sql, result.id, "succeeded", timeout=LONG + 20)

    assert_log(sql, result.id, LOG)
    assert (found["attempts"], found["fence"]) == (1, 1)
    assert found["outcome_ref"] == assert_ledger(provider, sql, result.id)["ref"]
    assert eventually(lambda: result.state == "SUCCESS", 10)
    eventually(lambda: job(sql, result.id)["settled_at"], 10)
    eventually(lambda: broker.depth() == 0, 10, message="no message is left")
    assert provider.received("charge") == 1
    assert_log(sql, result.id, LOG)
    assert_invariants(sql, provider)
