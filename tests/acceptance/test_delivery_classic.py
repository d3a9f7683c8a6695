"""Deliveries on RabbitMQ's classic queues, with priorities."""

from __future__ import annotations

import pytest

from tests.support.delivery import (  # noqa: F401 - fixtures and tests
    module_broker,
    redis_url,
    site_conf,
    site_worker,
    test_a_broadcast_is_one_job,
    test_a_retry_s_countdown,
    test_a_short_job_behind_a_long_one,
    test_a_topic_exchange,
    test_eta_and_countdown,
    test_events,
    test_late_and_rejected,
    test_priorities,
)

pytestmark = pytest.mark.rabbitmq


@pytest.fixture(scope="module")
def kind() -> str:
    return "classic"
