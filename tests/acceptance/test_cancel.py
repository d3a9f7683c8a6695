"""Cancelling: at once where nobody works on a job, else at its next checkpoint or effect, never inside one."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.errors import NotAllowed
from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.checks import assert_invariants, assert_ledger, assert_log, job, operation, wait_status
from tests.support.faults2 import open_gate, reached
from tests.support.processes import Workers
from tests.support.services import Sql, queries

JOBS = 500


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    """What is cancelled is a row; the broker has no say in it."""
    return redis_broker


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    """Nothing is to be swept away while hundreds of jobs share two cores."""
    return {**app_conf, "safe_effects_lease_ttl": 20, "safe_effects_max_connections": 8}


AFTER_THE_CANCEL = """
SELECT t.*, j.cancel_requested_at FROM transitions t JOIN jobs j ON j.id = t.job_id
 WHERE t.to_status = 'intent_recorded' AND t.at > j.cancel_requested_at
"""
"""Effects that began after the cancel; both times are the database's, taken under the lock of the job's row."""


MOMENTS = """
SELECT moment, count(*) AS n FROM (
    SELECT CASE WHEN o.key IS NOT NULL THEN 'in an effect'
                WHEN j.attempts > 0 THEN 'running'
                WHEN j.eta IS NOT NULL THEN 'delayed'
                WHEN j.id = ANY (%s) THEN 'prefetched'
                ELSE 'queued' END AS moment
      FROM jobs j
      LEFT JOIN operations o ON o.job_id = j.id AND o.intent_at <= j.cancel_requested_at
                            AND o.resolved_at > j.cancel_requested_at
     WHERE j.cancel_requested_at IS NOT NULL) m GROUP BY moment
"""
"""In which moments jobs were cancelled."""


class Prefetched:
    """Which jobs the worker's main process held, as it told, before they were cancelled."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.ids: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        held = "SELECT j.id FROM jobs j JOIN held h ON j.id = ANY (h.jobs) WHERE j.cancel_requested_at IS NULL"
        with queries(self.dsn) as sql:
            while not self._over.wait(0.03):
                self.ids |= {row["id"] for row in sql(held)}

    def __enter__(self) -> Prefetched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.slow
def test_500_jobs_are_cancelled_at_random_moments(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, broker: Broker, dsn: str
) -> None:
    seen = random.Random(20261129)
    # Some cancels are to find a job inside its effect, and some between two.
    for kind in ("charge", "entered_after_the_checkpoint"):
        provider.control(kind=kind, delay_before=0.1)
    workers("a", concurrency=3)
    task, safe = app.tasks["tests.charge_then_mail"], app.safe_effects

    def enqueue_and_cancel(number: int) -> tuple[str, bool]:
        later = {"countdown": 30 + number} if number % 5 == 0 else {}
        job_id = task.apply_async(("cus", number), ignore_result=True, **later).id
        time.sleep(pauses[number])
        try:
            row = safe.cancel(job_id, "changed my mind", actor="storm")
        except NotAllowed:
            return job_id, False
        # Nobody works on it: it ends at once. Else it is asked to.
        assert row.status == "cancelled" or row.cancel_requested_at is not None
        return job_id, True

    pauses = [seen.choice([0, seen.uniform(0, 0.3), seen.uniform(0, 4)]) for _ in range(JOBS)]
    with Prefetched(dsn) as prefetched, ThreadPoolExecutor(24) as pool:
        # While the worker's children are busy, its main process holds what comes next.
        asked = {app.tasks["tests.sleep"].apply_async((5,), ignore_result=True).id: False for _ in range(3)}
        waiting = [task.apply_async(("cus", number), ignore_result=True).id for number in range(9)]
        eventually(lambda: len(prefetched.ids & set(waiting)) >= 6, 10, interval=0.02, message="some are prefetched")
        for job_id in waiting:
            asked[job_id] = safe.cancel(job_id, "changed my mind", actor="storm").cancel_requested_at is not None
        asked.update(pool.map(enqueue_and_cancel, range(JOBS)))
    eventually(
        lambda: not sql("SELECT 1 FROM jobs WHERE status NOT IN ('succeeded', 'cancelled') LIMIT 1"),
        60,
        interval=0.3,
        message="all of them ended",
    )

    jobs = {row["id"]: row for row in sql("SELECT * FROM jobs")}
    assert set(jobs) == set(asked)
    ended = {"succeeded": 0, "cancelled": 0, "in_mid_job": 0}
    for job_id, row in jobs.items():
        ended[row["status"]] += 1
        if row["status"] == "cancelled":
            assert asked[job_id]
            ended["in_mid_job"] += row["attempts"]
        elif asked[job_id]:
            assert row["cancel_requested_at"] < row["finished_at"], "asked before the end, after the last effect"
    # Or this has shown nothing.
    assert min(ended.values()) > 0, ended
    moments = {row["moment"]: row["n"] for row in sql(MOMENTS, list(prefetched.ids))}
    assert set(moments) == {"queued", "delayed", "prefetched", "running", "in an effect"}, moments
    assert moments["prefetched"] >= 6, moments
    once = sql(
        "SELECT job_id, count(*) FROM transitions WHERE operation_key IS NULL"
        " AND to_status IN ('succeeded', 'failed', 'cancelled', 'unknown') GROUP BY job_id HAVING count(*) <> 1"
    )
    assert once == []
    assert sql(AFTER_THE_CANCEL) == []
    # What the provider did, somebody had recorded the intent of before; and each was done once.
    for row in provider.ledger():
        if row["key"] is not None:
            assert operation(sql, row["key"])["provider_ref"] == row["ref"]
    assert_invariants(sql, provider)


def test_what_is_in_flight_keeps_its_true_outcome(app: Celery, workers: Workers, provider: Provider, sql: Sql) -> None:
    """The job is cancelled; the charge beside it happened, and says so. Its next effect does not begin."""
    workers("a", env={"SAFE_EFFECTS_TEST_DEADLINE": "30"})
    provider.control(kind="charge", delay_before=4)
    result = app.tasks["tests.charge_then_mail"].apply_async(("cus_1", 500))
    eventually(lambda: provider.received("charge") == 1, 15)
    row = app.safe_effects.cancel(result.id, "the customer called")
    assert (row.status, row.cancel_requested_at is None) == ("running", False)

    wait_status(sql, result.id, "cancelled")
    assert_log(
        sql,
        result.id,
        [
            "job - > queued #0",
            "job queued > leased #1",
            "job leased > running #1",
            "1 - > intent_recorded #1",
            "1 intent_recorded > outcome_confirmed #1",
            "job running > cancelled #1 (the customer called)",
        ],
    )
    assert_ledger(provider, sql, result.id)
    assert provider.received("mail") == provider.received("entered_after_the_checkpoint") == 0
    assert eventually(lambda: result.state == "REVOKED", 10)
    assert_invariants(sql, provider)


def test_a_cancelled_job_whose_effect_is_open_ends_when_that_is_known(
    app: Celery, workers: Workers, provider: Provider, sql: Sql
) -> None:
    """Never cancelled beside an open question: it parks, and the look-up ends it."""
    first = workers("a", env={"SAFE_EFFECTS_TEST_DEADLINE": "30"})
    provider.control(kind="charge", delay_after=30, times=1)
    result = app.tasks["tests.charge"].apply_async(("cus_1", 500))
    eventually(provider.ledger, 15, message="the provider accepted")
    app.safe_effects.cancel(result.id, "the customer called")
    first.kill()
    sql("UPDATE job SET lease_until = clock_timestamp() - interval '1 second' WHERE id = %s", result.id)
    app.safe_effects.sweep()
    row = job(sql, result.id)
    assert (row["status"], row["reason"]) == ("unknown", "lease_expired")
    workers("b")
    row = wait_status(sql, result.id, "cancelled")
    assert row["reason"] == "the customer called"
    assert_ledger(provider, sql, result.id)
    assert (row["attempts"], provider.received("charge")) == (1, 1)


def test_a_body_sees_the_cancel_at_its_next_effect(app: Celery, workers: Workers, provider: Provider, sql: Sql) -> None:
    workers("a")
    result = app.tasks["tests.two_steps"].apply_async(("between",))
    reached(provider, "between")
    app.safe_effects.cancel(result.id, "enough")
    open_gate(provider, "between")
    wait_status(sql, result.id, "cancelled")
    assert [row["key"] for row in provider.ledger(kind="charge")] == [f"{result.id}:1"]
    assert sql(AFTER_THE_CANCEL) == []
