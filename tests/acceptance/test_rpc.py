"""The result backend `rpc://` on RabbitMQ, where a reply without its queue is lost."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery import Celery

from celery_safe_effects.testing import TcpProxy, eventually
from tests.support.brokers import Broker
from tests.support.checks import job
from tests.support.processes import Workers
from tests.support.services import Sql
from tests.support.tasks import create_app

pytestmark = pytest.mark.rabbitmq


@pytest.fixture
def broker(rabbitmq_broker: Broker) -> Broker:
    return rabbitmq_broker


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    return {**app_conf, "result_backend": "rpc://"}


def test_the_reply_queue_is_there_before_the_message(app: Celery, workers: Workers, sql: Sql) -> None:
    """Also when an end is told again, by a message that the sweep published."""
    workers("a")
    first = app.tasks["tests.pure"].delay(5)
    eventually(lambda: job(sql, first.id)["settled_at"], 20)
    assert first.get(timeout=10) == 5
    second = app.tasks["tests.pure"].apply_async((6,), countdown=1)
    assert second.get(timeout=20) == 6
    sql("UPDATE job SET settled_at = NULL, next_publish_at = clock_timestamp() WHERE id = %s", second.id)
    eventually(lambda: job(sql, second.id)["settled_at"], 20)


def test_an_enqueue_while_broker_and_reply_queue_are_out_of_reach(
    app_conf: dict[str, Any], broker: Broker, workers: Workers, sql: Sql
) -> None:
    """Accepted within a publish's own patience. Its reply goes with the queue, as in Celery; the row has the result."""
    url = urlsplit(broker.url)
    proxy = TcpProxy(url.hostname or "", url.port or 0)
    proxy.start()
    producer = create_app({**app_conf, "broker_url": broker.url.replace(f":{url.port}", f":{proxy.port}")})
    try:
        workers("a")
        assert producer.tasks["tests.pure"].delay(5).get(timeout=20) == 5
        proxy.refuse()
        before = time.monotonic()
        result = producer.tasks["tests.pure"].delay(6)
        assert time.monotonic() - before < 5
        eventually(lambda: job(sql, result.id)["settled_at"], 20, message="the worker's sweep has published it")
        assert job(sql, result.id)["result"] == 6
        proxy.accept()
        assert producer.tasks["tests.pure"].delay(7).get(timeout=20) == 7
    finally:
        proxy.accept()
        producer.__dict__["_safe_effects"].close()
        producer.close()
        proxy.stop()
