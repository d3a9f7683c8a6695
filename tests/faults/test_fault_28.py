"""Fault 28: the holder of a unique job is killed, and its key is enqueued again at once."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_safe_effects import IdempotencyConflict
from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.brokers import EACH_BROKER_AND_ACKS
from tests.support.checks import assert_ledger, assert_log, job, wait_status
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults

LEASE, SWEEP = 4.0, 0.5


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    return {**app_conf, "safe_effects_lease_ttl": LEASE, "safe_effects_sweep_interval": SWEEP}


@EACH_BROKER_AND_ACKS
def test_fault_28(app: Celery, workers: Workers, provider: Provider, sql: Sql, acks_late: bool) -> None:
    task = app.tasks["tests.sleep_then_charge"]

    def enqueue() -> Any:
        return task.apply_async((60, "cus_1", 500), idempotency_key="nightly")

    first, second = (workers(name, acks_late=acks_late) for name in "ab")
    job_id = enqueue().id
    eventually(lambda: provider.received("entered_sleep_then_charge") == 1, 15)
    holder = first if job(sql, job_id)["lease_owner"].startswith(first.node) else second
    holder.kill()

    # At once: the same job, and it says that it is active.
    assert enqueue().id == job_id
    assert app.safe_effects.job(job_id).status == "running"
    with pytest.raises(IdempotencyConflict, match=r"\(tests\.sleep_then_charge, running\)"):
        task.apply_async((0, "another", 1), idempotency_key="nightly")
    assert len(sql("SELECT id FROM jobs")) == 1

    # Free within its lease and a sweep, as the log tells; what waits beyond that is the machine's slowness.
    row = wait_status(sql, job_id, "succeeded")
    (found,) = sql(
        "SELECT extract(epoch FROM t.at - b.at)::float8 AS s FROM transitions t, transitions b WHERE t.job_id = %s"
        " AND t.to_status = 'queued' AND t.from_status = 'running' AND b.job_id = t.job_id AND b.to_status = 'running'"
        " AND b.fence = 1",
        job_id,
    )
    assert LEASE * 0.9 <= found["s"] <= LEASE + 4 * SWEEP + 3 + LEASE
    assert row["attempts"] == 2
    assert_log(
        sql,
        job_id,
        [
            "job - > queued #0",
            "job queued > leased #1",
            "job leased > running #1",
            "job running > queued #1 (lease_expired)",
            "job queued > leased #2",
            "job leased > running #2",
            "1 - > intent_recorded #2",
            "1 intent_recorded > outcome_confirmed #2",
            "job running > succeeded #2",
        ],
    )
    assert_ledger(provider, sql, job_id)
    assert provider.received("charge") == 1
    assert enqueue().id == job_id
