"""A hard time limit ends a call that the provider accepts all the same."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.checks import assert_invariants, assert_ledger, assert_log, job, wait_status
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults

CLAIMED = ["job - > queued #0", "job queued > leased #1", "job leased > running #1"]


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    """A lease that is not what ends the attempt."""
    app_conf.update(safe_effects_lease_ttl=20)
    return app_conf


def test_19_a_hard_time_limit_while_the_provider_accepts_late(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, acks_late: bool
) -> None:
    provider.control(kind="charge", delay_before=3)
    provider.control(kind="charge", lookup_status=503)  # open until the test has seen it so
    worker = workers("a", acks_late=acks_late, conf={"worker_proc_alive_timeout": 20})
    errback = app.tasks["tests.errback"]
    late = app.tasks["tests.charge"].apply_async(("cus_1", 500), time_limit=1, link_error=errback.s())
    wait_status(sql, late.id, "unknown", timeout=15)
    assert eventually(lambda: late.state == "UNKNOWN", 10)
    # The slot is free: another job runs while the first one is open.
    after = app.tasks["tests.pure"].apply_async((1,))
    wait_status(sql, after.id, "succeeded")
    assert job(sql, late.id)["status"] == "unknown"
    (accepted,) = eventually(provider.ledger, 10, message="the provider accepts all the same")
    (parked,) = sql(
        "SELECT extract(epoch FROM at)::float8 AS at FROM transitions WHERE operation_key IS NULL"
        " AND job_id = %s AND to_status = 'unknown'",
        late.id,
    )
    assert parked["at"] < accepted["at"], "parked before the provider accepted"

    provider.control(kind="charge", lookup_status=None)
    wait_status(sql, late.id, "succeeded")
    assert_log(
        sql,
        late.id,
        [
            *CLAIMED,
            "1 - > intent_recorded #1",
            "job running > unknown #1 (time_limit)",
            "1 intent_recorded > unknown #1 (time_limit)",
            "1 unknown > outcome_confirmed #1 (lookup)",
            "job unknown > queued #1 (resolved:~:1)",
            "job queued > leased #2",
            "job leased > running #2",
            "job running > succeeded #2",
        ],
    )
    assert job(sql, late.id)["outcome_ref"] == assert_ledger(provider, sql, late.id)["ref"]
    assert provider.received("charge") == 1
    assert eventually(lambda: late.state == "SUCCESS", 10)

    # With nothing open it is a failure, and the errback is run for it: once.
    failed = app.tasks["tests.sleep"].apply_async((60,), time_limit=1, max_attempts=1, link_error=errback.s())
    found = wait_status(sql, failed.id, "failed", timeout=15)
    assert found["reason"] == "max_attempts"
    assert_log(sql, failed.id, [*CLAIMED, "job running > failed #1 (max_attempts)"])
    assert eventually(lambda: failed.state == "FAILURE", 10)
    eventually(lambda: provider.received("mail"), 15, message="the errback ran")
    eventually(lambda: job(sql, failed.id)["settled_at"], 10, message="Celery knows of the end")
    (told,) = sql("SELECT id, status FROM jobs WHERE task = 'tests.errback'")
    wait_status(sql, told["id"], "succeeded")
    assert [row["body"]["argument"] for row in provider.ledger(kind="mail")] == [f"{failed.id} failed"]

    # Its child was killed for it, and the worker goes on.
    last = app.tasks["tests.pure"].apply_async((2,))
    wait_status(sql, last.id, "succeeded")
    assert worker.running
    assert_invariants(sql, provider)
