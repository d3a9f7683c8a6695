"""Fault 18: one worker's clock is an hour ahead, another's an hour behind; only the database's clock counts."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.testing import eventually
from celery_safe_effects.testing.process import patience
from example_project.provider_client import Provider
from tests.support.brokers import EACH_BROKER_AND_ACKS
from tests.support.checks import assert_invariants, assert_ledger, job, log, wait_status
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults

HOUR = 3600
LEASE, SWEEP, PAUSE, SLACK = 2.0, 0.5, 1.0, 2.0
ETA = 4.0


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    app_conf.update(safe_effects_lease_ttl=LEASE, safe_effects_sweep_interval=SWEEP)
    return app_conf


@pytest.mark.parametrize("wrong", [HOUR, -HOUR], ids=["holder-ahead", "holder-behind"])
@EACH_BROKER_AND_ACKS
def test_fault_18_clocks_that_are_wrong_by_an_hour(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, acks_late: bool, wrong: int
) -> None:
    """No early takeover, no immortal lease, nothing before its time or long after it."""
    holder = workers("a", acks_late=acks_late, clock_offset=wrong)
    charged = app.tasks["tests.charge"].delay("cus_1", 1)
    wait_status(sql, charged.id, "succeeded")

    held = app.tasks["tests.sleep_then_charge"].apply_async((60, "cus_2", 2))
    eventually(lambda: provider.received("entered_sleep_then_charge") == 1, 10)
    other = workers("b", acks_late=acks_late, clock_offset=-wrong)
    assert abs(_clock(holder.log()) - _clock(other.log())) > HOUR, "their clocks do differ"

    # Both sweep; for three leases nobody takes it, and the lease never reaches further than it may.
    until = time.monotonic() + 3 * LEASE
    while time.monotonic() < until:
        (row,) = sql(
            "SELECT status, fence, extract(epoch FROM lease_until - clock_timestamp())::float8 AS left_s"
            " FROM jobs WHERE id = %s",
            held.id,
        )
        assert (row["status"], row["fence"]) == ("running", 1)
        assert 0 < row["left_s"] <= LEASE
        time.sleep(0.1)

    holder.kill()
    ended_at = job(sql, held.id)["lease_until"]
    wait_status(sql, held.id, "succeeded")
    moved = {
        (row["to_status"], row["fence"]): (row["at"] - ended_at).total_seconds()
        for row in sql("SELECT * FROM transitions WHERE job_id = %s AND operation_key IS NULL", held.id)
    }
    slack = SLACK * patience()
    assert 0 <= moved["queued", 1] < 2 * SWEEP + slack, log(sql, held.id)
    assert 0 <= moved["leased", 2] < 2 * SWEEP + PAUSE + slack, log(sql, held.id)
    assert_ledger(provider, sql, held.id)
    assert provider.received("charge", f"{held.id}:1") == 1

    (now,) = sql("SELECT clock_timestamp() AS at")
    later = app.tasks["tests.charge"].apply_async(("cus_3", 3), countdown=ETA)
    started = wait_status(sql, later.id, "succeeded")["started_at"]
    assert ETA - 0.5 <= (started - now["at"]).total_seconds() < ETA + slack
    assert job(sql, later.id)["attempts"] == 1
    assert_invariants(sql, provider)


def _clock(text: str) -> float:
    """The time that a worker wrote before its first line."""
    found = re.search(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", text, re.MULTILINE)
    assert found is not None
    return datetime.fromisoformat(found[1]).timestamp()
