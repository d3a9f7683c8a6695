"""Faults 23 and 41: one idempotency key with other parameters, with the same in another order, and of two tenants."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects import IdempotencyConflict
from example_project.provider_client import Provider
from tests.support.brokers import EACH_BROKER_AND_ACKS
from tests.support.checks import assert_invariants, assert_ledger, wait_status
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults


@EACH_BROKER_AND_ACKS
def test_fault_23_one_key_with_other_parameters(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, acks_late: bool
) -> None:
    app.conf.safe_effects_max_connections = 8
    charge = app.tasks["tests.charge"]

    def enqueue(number: int) -> str:
        kwargs: dict[str, Any] = {"customer": "cus_1", "cents": 500}
        if number % 4 == 1:
            kwargs = dict(reversed(kwargs.items()))
        elif number % 4 == 2:
            kwargs["cents"] = 501
        try:
            if number % 4 == 3:
                return str(app.tasks["tests.whole_body"].apply_async((), kwargs, idempotency_key="order-1").id)
            return str(charge.apply_async((), kwargs, idempotency_key="order-1").id)
        except IdempotencyConflict as conflict:
            return f"conflict with {conflict.job_id}"

    first = charge.apply_async((), {"customer": "cus_1", "cents": 500}, idempotency_key="order-1").id
    row = sql("SELECT * FROM job")
    with ThreadPoolExecutor(8) as pool:
        answers = Counter(pool.map(enqueue, range(40)))
    assert answers == {first: 20, f"conflict with {first}": 20}
    assert sql("SELECT * FROM job") == row

    workers("a", acks_late=acks_late)
    wait_status(sql, first, "succeeded")
    # Long finished, it still is the same job, and still another's.
    assert enqueue(1) == first
    assert enqueue(2) == f"conflict with {first}"
    (found,) = provider.ledger()
    assert (found["key"], found["body"]["cents"]) == (f"{first}:1", 500)
    assert_invariants(sql, provider)


@EACH_BROKER_AND_ACKS
def test_fault_41_two_tenants_with_one_key(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, acks_late: bool
) -> None:
    charge = app.tasks["tests.charge"]
    ids = {
        tenant: charge.apply_async(("cus_1", 500), idempotency_key="order-1", tenant=tenant).id
        for tenant in ("acme", "globex")
    }
    assert ids["acme"] != ids["globex"]
    again = charge.apply_async(("cus_1", 500), idempotency_key="order-1", tenant="acme")
    assert again.id == ids["acme"]
    workers("a", acks_late=acks_late)
    for tenant, job_id in ids.items():
        assert wait_status(sql, job_id, "succeeded")["tenant"] == tenant
        assert_ledger(provider, sql, job_id)
    assert len(provider.ledger()) == len(sql("SELECT id FROM jobs")) == 2
    assert_invariants(sql, provider)
