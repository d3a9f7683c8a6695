"""Fault 33: hundreds of jobs with arguments of five megabytes each; and where large arguments come from otherwise."""

from __future__ import annotations

import os
import time
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, group

from celery_safe_effects import AdmissionRejected
from celery_safe_effects.errors import PayloadTooLarge
from tests.support.brokers import Broker
from tests.support.faults2 import counted
from tests.support.lab import Lab
from tests.support.services import Sql

pytestmark = pytest.mark.faults

JOBS = 300
LARGE = os.urandom(2_500_000).hex()


@pytest.mark.slow
@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_fault_33(app: Celery, broker: Broker, sql: Sql) -> None:
    """Each is refused with an error that says why and what to do; nothing is committed, and nothing published."""
    task = app.tasks["tests.pure"]
    before = time.monotonic()
    for number in range(JOBS // 10):
        with pytest.raises(PayloadTooLarge, match=r"safe_effects_max_payload.*pass a reference") as caught:
            task.apply_async(([LARGE, number],), idempotency_key=f"large-{number}")
    error = caught.value
    assert isinstance(error, AdmissionRejected)
    assert (error.reason, error.limit, error.status_code) == ("payload_too_large", 1_000_000, 413)
    assert (error.current or 0) > 5_000_000
    refused = app.safe_effects.enqueue_many([task.s([LARGE, number]) for number in range(JOBS * 8 // 10)])
    assert {one.status for one in refused} == {"refused"}
    # Parts of something larger: all of it or none of it.
    with pytest.raises(PayloadTooLarge):
        group([task.s(number) for number in range(JOBS // 10 - 1)] + [task.s(LARGE)]).apply_async()
    assert time.monotonic() - before < 90
    assert [sql(f"SELECT 1 FROM {table}") for table in ("job", "operation", "transition", "reservation")] == [[]] * 4
    assert broker.depth() == 0
    assert counted(sql, "admission_refusals", "payload_too_large") > JOBS // 10
    # The key was not taken by what was refused.
    assert task.apply_async((1,), idempotency_key="large-1").id


@pytest.fixture
def lab(database_url: str, sql: Sql) -> Any:
    made = Lab(database_url, sql)
    yield made
    made.safe.close()
    made.app.close()


def test_what_a_body_sends_or_calls_with_is_bounded_too(lab: Lab) -> None:
    lab.app.conf.safe_effects_max_payload = 10_000
    large = "x" * 20_000
    charge = lab.effect("charge")
    told: list[Any] = []

    def body(self: Any, how: str) -> Any:
        if how == "effect":
            charge(large)
        if how == "child":
            child.delay(large)
        if how == "retry":
            raise self.retry(args=(large,), countdown=0)
        if how == "replace":
            raise self.replace(child.s(large))
        return "ok"

    child = lab.task(lambda self, value: told.append(value), effects=[])
    task = lab.task(body, effects=[charge])
    reasons = {}
    for how in ("effect", "child", "retry", "replace"):
        job = str(uuid4())
        lab.deliver(task, job, how)
        row = lab.row(job)
        assert row["status"] == "failed", row
        assert "safe_effects_max_payload" in row["last_error"], row
        reasons[how] = row["reason"]
    assert reasons == {
        "effect": "error",
        "child": "error",
        "retry": "retry_not_encodable",
        "replace": "replacement_not_encodable",
    }
    assert lab.calls == told == lab.sql("SELECT 1 FROM operations") == []
    assert lab.row(lab.run(task, "none"))["status"] == "succeeded"


@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        ({"effects": []}, None),
        ({}, False),
        ({"effect_options": {"lookup": lambda op: None}}, True),
    ],
    ids=["no effects", "whole body", "whole body with a lookup"],
)
def test_a_payload_is_stored_once(lab: Lab, options: dict[str, Any], recorded: bool | None) -> None:
    """A whole body's arguments are kept a second time only where a lookup reads them, or where they are short."""
    value = os.urandom(100_000).hex()
    task = lab.task(lambda self, value: None, **options)
    job = lab.run(task, value)
    (size,) = lab.sql(
        "SELECT octet_length(envelope) AS envelope, octet_length((to_jsonb(j) - 'envelope')::text) AS rest FROM job j"
    )
    assert size["envelope"] < len(value) + 5_000
    assert size["rest"] < 5_000
    operations = lab.sql("SELECT args FROM operations WHERE job_id = %s", job)
    assert operations == ([] if recorded is None else [{"args": {"value": value} if recorded else None}])
    short = lab.run(task, "short")
    for row in lab.sql("SELECT args FROM operations WHERE job_id = %s", short):
        assert row["args"] == {"value": "short"}
