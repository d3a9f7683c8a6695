"""Deliveries on Redis, with a key prefix for all of its keys."""

from __future__ import annotations

import pytest

from tests.support.delivery import (  # noqa: F401 - fixtures and tests
    module_broker,
    redis_url,
    site_conf,
    site_worker,
    test_a_broadcast_is_one_job,
    test_a_killed_child_is_seen_within_worker_lost_wait,
    test_a_rate_limit_is_no_loss,
    test_a_retry_s_countdown,
    test_a_short_job_behind_a_long_one,
    test_a_topic_exchange,
    test_eta_and_countdown,
    test_events,
    test_expires,
    test_ignored_results,
    test_late_and_rejected,
    test_priorities,
    test_time_limits_of_one_call,
    test_without_remote_control,
    test_worker_options,
)


@pytest.fixture(scope="module")
def kind() -> str:
    return "redis"
