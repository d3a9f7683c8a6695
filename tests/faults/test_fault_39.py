"""Fault 39: two jobs meet one business key; and one job uses it twice at once."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.brokers import EACH_BROKER_AND_ACKS
from tests.support.checks import assert_invariants, job, log, operation, wait_status
from tests.support.processes import FAST, Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults

KEY = "default/charge/invoice-cus_1"


def result(sql: Sql, job_id: str) -> Any:
    found = job(sql, job_id)["result"]
    return json.loads(found) if isinstance(found, str) else found


@EACH_BROKER_AND_ACKS
def test_fault_39_two_jobs_meet_one_business_key(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, acks_late: bool
) -> None:
    """The first parks; the second waits without spending attempts, and gets the outcome when the first is resolved."""
    provider.control(kind="charge", times=1, drop_reply=True)
    provider.control(kind="charge", lookup_status=503)
    workers("a", acks_late=acks_late, concurrency=2)
    first = app.tasks["tests.invoice"].delay("cus_1", 500)
    wait_status(sql, first.id, "unknown")
    second = app.tasks["tests.invoice"].delay("cus_1", 500)

    def waits() -> bool:
        found = job(sql, second.id)
        return (found["status"], found["reason"]) == ("queued", f"waiting_for:{KEY}")

    eventually(waits, 10, message="the second waits for the first one's question")
    until = time.monotonic() + 2
    while time.monotonic() < until:  # it is not delivered in vain meanwhile; while it looks again, it is one
        found = job(sql, second.id)
        assert found["attempts"] == (found["status"] in {"leased", "running"}), found
        time.sleep(0.1)
    assert job(sql, first.id)["status"] == "unknown"
    assert provider.received("charge", KEY) == 1

    provider.control(kind="charge", lookup_status=None)
    for one in (first, second):
        wait_status(sql, one.id, "succeeded")
    (row,) = provider.ledger(KEY)
    assert provider.received("charge", KEY) == 1
    assert operation(sql, KEY)["provider_ref"] == row["ref"]
    assert result(sql, first.id) == [row["ref"], True]
    assert result(sql, second.id) == [row["ref"], True]
    assert job(sql, second.id)["attempts"] == 1
    # It looks again now and then, which costs no attempt either.
    returns = [line for line in log(sql, second.id) if line.startswith("job running > queued")]
    assert returns == [f"job running > queued #{n} (waiting_for:{KEY})" for n in range(1, len(returns) + 1)]
    (took,) = sql(
        "SELECT extract(epoch FROM max(at) - min(at))::float8 AS s FROM transitions WHERE job_id = %s", second.id
    )
    least = FAST["safe_effects_republish_after"] - FAST["safe_effects_sweep_interval"]  # it goes out a sweep ahead
    assert 1 <= len(returns) <= 1 + took["s"] / least
    assert_invariants(sql, provider)


@EACH_BROKER_AND_ACKS
def test_fault_39_one_key_twice_in_one_job(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, acks_late: bool
) -> None:
    """One of two calls at the same time is made; the other is told so."""
    provider.control(kind="charge", delay_before=1)
    workers("a", acks_late=acks_late)
    done = app.tasks["tests.invoice_twice"].delay("cus_1", 500)
    wait_status(sql, done.id, "succeeded")
    (row,) = provider.ledger(KEY)
    assert result(sql, done.id) == sorted([row["ref"], "busy"])
    assert provider.received("charge") == 1
    assert_invariants(sql, provider)
