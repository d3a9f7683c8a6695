"""``revoke``: the row is cancelled, and Celery is told of it."""

from __future__ import annotations

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError

from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.processes import Workers
from tests.support.services import Sql


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    return redis_broker


def settled(sql: Sql, job: str, status: str) -> None:
    eventually(
        lambda: sql("SELECT 1 AS ok FROM jobs WHERE id = %s AND status = %s AND settled_at IS NOT NULL", job, status),
        timeout=30,
        message=f"job {job} did not become {status} and settled",
    )


def test_a_job_that_waits_for_its_time(app: Celery, workers: Workers, sql: Sql, provider: Provider) -> None:
    workers("a")
    result = app.tasks["tests.charge"].apply_async(("c", 1), countdown=3)
    result.revoke()
    settled(sql, result.id, "cancelled")
    with pytest.raises(TaskRevokedError):
        result.get(timeout=10)
    assert provider.ledger() == []


def test_terminate_during_an_effect_keeps_its_true_outcome(
    app: Celery, workers: Workers, sql: Sql, provider: Provider
) -> None:
    """Parked first, cancelled when the lookup has told what became of the effect; and only then REVOKED."""
    workers("a")
    provider.control(delay_after=5, kind="charge")
    result = app.tasks["tests.charge"].delay("c", 1)
    eventually(provider.ledger, timeout=20, message="the provider was not called")
    result.revoke(terminate=True)
    settled(sql, result.id, "cancelled")
    with pytest.raises(TaskRevokedError):
        result.get(timeout=10)
    assert [r["status"] for r in sql("SELECT status FROM operations")] == ["outcome_confirmed"]
    assert "unknown" in [r["to_status"] for r in sql("SELECT to_status FROM transitions WHERE operation_key IS NULL")]
    assert len(provider.ledger()) == 1
