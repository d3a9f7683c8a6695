"""Fault 27: queued, delayed and prefetched jobs are cancelled while no worker runs; then one starts."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.brokers import EACH_BROKER_AND_ACKS, Broker
from tests.support.checks import assert_log, wait_status
from tests.support.faults2 import reached
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    """Redis gives back what a dead worker held after two seconds; RabbitMQ does so at once."""
    if app_conf["broker_url"].startswith("redis"):
        options = {"visibility_timeout": 2, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}
        app_conf["broker_transport_options"] = options
    return {**app_conf, "safe_effects_lease_ttl": 1.5}


@EACH_BROKER_AND_ACKS
def test_fault_27(app: Celery, workers: Workers, broker: Broker, provider: Provider, sql: Sql, acks_late: bool) -> None:
    charge, safe = app.tasks["tests.charge"], app.safe_effects
    first = workers("a", acks_late=acks_late)
    blocker = app.tasks["tests.gated_charge"].delay("blocked")
    reached(provider, "blocked")
    prefetched = [charge.delay("prefetched", n) for n in range(3)]
    for result in prefetched:
        eventually(lambda: f"[{result.id}] received" in first.log(), 15, message="prefetched")  # noqa: B023
    first.kill()
    queued = [charge.delay("queued", n) for n in range(3)]
    delayed = [charge.apply_async(("delayed", n), countdown=n) for n in (1, 2, 3600)]

    for result in (*prefetched, *queued, *delayed):
        row = safe.cancel(result.id, "not wanted any more")
        assert (row.status, row.attempts) == ("cancelled", 0)
    safe.cancel(blocker.id, "it has done its part")
    workers("b", acks_late=acks_late)
    # This one came after all of them: what was in the queue has been looked at.
    last = charge.delay("last", 0)
    wait_status(sql, last.id, "succeeded")
    wait_status(sql, blocker.id, "cancelled")

    for result in (*prefetched, *queued, *delayed):
        assert_log(sql, result.id, ["job - > queued #0", "job queued > cancelled #0 (not wanted any more)"])
        assert eventually(lambda: result.state == "REVOKED", 15)  # noqa: B023 - called here and now
    assert eventually(lambda: broker.depth() == 0, 10)
    assert [row["key"] for row in provider.ledger(kind="charge")] == [f"{last.id}:1"]
    assert provider.received("charge") == 1
