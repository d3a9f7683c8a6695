"""A worker is killed in the middle of a provider call: the effect happens once and the job is settled."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.processes import Beats, Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("acks_late", [False, True], ids=["early", "late"])
def test_a_worker_killed_while_the_provider_accepts(
    app: Celery,
    workers: Workers,
    beat: Beats,
    provider: Provider,
    sql: Sql,
    acks_late: bool,
) -> None:
    provider.control(delay_before=2, kind="charge", times=1)
    first = workers("a", acks_late=acks_late)
    result = app.tasks["tests.charge"].apply_async(("cus_1", 500), idempotency_key="order-1")
    eventually(lambda: provider.received("charge"), 10, message="the provider received the call")
    first.kill()
    workers("b", acks_late=acks_late)
    beat()

    def status() -> str:
        return str(sql("SELECT status FROM jobs WHERE id = %s", result.id)[0]["status"])

    eventually(lambda: status() == "succeeded", 40, message="the job succeeded")
    (row,) = provider.ledger()
    assert row["key"] == f"{result.id}:1"
    (job,) = sql("SELECT * FROM jobs")
    assert job["outcome_ref"] == row["ref"]
    states = [t["to_status"] for t in sql("SELECT to_status FROM transitions ORDER BY id")]
    assert states.count("unknown") >= 1
    assert "failed" not in states
