"""Fault 20: fifty recipients in one job, and the worker is killed when the provider has accepted the twentieth."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.brokers import EACH_BROKER_AND_ACKS
from tests.support.checks import log, wait_status
from tests.support.faults2 import open_gate, reached
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults

RECIPIENTS, KILLED_AT = 50, 20


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    """Short leases."""
    return {**app_conf, "safe_effects_lease_ttl": 1.5}


@EACH_BROKER_AND_ACKS
def test_fault_20(app: Celery, workers: Workers, provider: Provider, sql: Sql, acks_late: bool) -> None:
    env = {"SAFE_EFFECTS_TEST_DEADLINE": "3"}
    first = workers("a", acks_late=acks_late, env=env)
    job_id = app.tasks["tests.newsletter"].delay(RECIPIENTS, KILLED_AT, "stop").id
    reached(provider, "stop")
    provider.control(kind="charge", delay_after=30, times=1)
    open_gate(provider, "stop")
    eventually(lambda: len(provider.ledger(kind="charge")) == KILLED_AT, 10, message="the twentieth is accepted")
    first.kill()
    workers("b", acks_late=acks_late, env=env)

    def statuses() -> Counter[str]:
        return Counter(row["status"] for row in sql("SELECT status FROM operations WHERE job_id = %s", job_id))

    row = wait_status(sql, job_id, "succeeded")
    # Nineteen were confirmed before, the twentieth was unknown until it was looked up; none was sent again.
    lines = log(sql, job_id)
    parked = lines.index("job running > unknown #1 (lease_expired)")
    assert sum(line.endswith("> outcome_confirmed #1") for line in lines[:parked]) == KILLED_AT - 1
    assert [line for line in lines if "> unknown" in line] == [
        "job running > unknown #1 (lease_expired)",
        f"{KILLED_AT} intent_recorded > unknown #1 (lease_expired)",
    ]
    assert f"{KILLED_AT} unknown > outcome_confirmed #1 (lookup)" in lines
    assert statuses() == {"outcome_confirmed": RECIPIENTS}
    charged = provider.ledger(kind="charge")
    assert [row["body"]["customer"] for row in charged] == [f"recipient-{n}" for n in range(1, RECIPIENTS + 1)]
    assert [row["key"] for row in charged] == [f"{job_id}:{n}" for n in range(1, RECIPIENTS + 1)]
    assert provider.received("charge") == RECIPIENTS
    assert (row["attempts"], row["outcome_ref"]) == (2, charged[-1]["ref"])
