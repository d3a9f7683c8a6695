"""A worker is killed, and a new one starts under the same host name."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.testing import eventually
from celery_safe_effects.testing.process import patience
from example_project.provider_client import Provider
from tests.support.checks import assert_invariants, assert_ledger, assert_log, job, wait_status
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults

LEASE, SWEEP, PAUSE, SLACK = 5.0, 0.5, 1.0, 2.0


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    """A lease that outlives the start of the second worker."""
    app_conf.update(safe_effects_lease_ttl=LEASE, safe_effects_sweep_interval=SWEEP)
    return app_conf


def test_14_a_new_worker_under_the_same_host_name(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, acks_late: bool
) -> None:
    first = workers("a", acks_late=acks_late)
    result = app.tasks["tests.sleep_then_charge"].apply_async((60, "cus_1", 500))
    eventually(lambda: provider.received("entered_sleep_then_charge") == 1, 10)
    first.kill()
    found = job(sql, result.id)
    until, owner = found["lease_until"], found["lease_owner"]
    second = workers("a", acks_late=acks_late)
    assert second.node == first.node
    (ready,) = sql("SELECT clock_timestamp() AS at")

    wait_status(sql, result.id, "succeeded")
    assert_log(
        sql,
        result.id,
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
    times = {
        (row["from_status"], row["fence"]): (row["at"] - until).total_seconds()
        for row in sql("SELECT * FROM transitions WHERE job_id = %s AND operation_key IS NULL", result.id)
    }
    # Nobody sweeps before the second worker is there, which may take longer than the lease.
    slack = SLACK * patience() + max(0.0, (ready["at"] - until).total_seconds() + 3 * SWEEP)
    assert 0 <= times["running", 1] < 2 * SWEEP + slack, "released with the lease's end and the sweep, not before"
    assert 0 <= times["queued", 2] < 2 * SWEEP + PAUSE + slack, "taken over"
    claims = sql("SELECT actor FROM transitions WHERE job_id = %s AND to_status = 'leased' ORDER BY id", result.id)
    assert claims[0]["actor"] == owner
    assert claims[1]["actor"] != owner
    assert all(claim["actor"].startswith(f"{first.node}/") for claim in claims)
    assert_ledger(provider, sql, result.id)
    assert provider.received("charge") == 1
    assert_invariants(sql, provider)
