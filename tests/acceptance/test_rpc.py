"""The result backend `rpc://` on RabbitMQ, where a reply without its queue is lost."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.testing import eventually
from tests.support.brokers import Broker
from tests.support.checks import job
from tests.support.processes import Workers
from tests.support.services import Sql

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
