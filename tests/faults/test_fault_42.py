"""Fault 42: PostgreSQL crashes under load, again and again."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects import AcceptanceUnknown, SafeEffectsError
from celery_safe_effects.testing import EmbeddedPostgres, eventually
from example_project.provider_client import Provider
from tests.support.brokers import EACH_BROKER_AND_ACKS
from tests.support.checks import assert_invariants
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = [pytest.mark.faults, pytest.mark.slow]

CRASHES = 4
KINDS = ("charge", "charge_keyed", "charge_both", "agent", "whole_body")
"""Of every kind; the body of the last is its effect, which nobody can look up."""


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    app_conf.update(safe_effects_lease_ttl=2)
    return app_conf


class Producer(threading.Thread):
    """Enqueues jobs until it is stopped, whatever the database does, and remembers what it was told."""

    def __init__(self, app: Celery) -> None:
        super().__init__(daemon=True)
        self.app = app
        self.accepted: dict[str, str] = {}
        self.maybe: dict[str, str] = {}
        self.refused = 0
        self.stopped = threading.Event()

    def run(self) -> None:
        """One at a time, of each kind in turn."""
        number = 0
        while not self.stopped.wait(0.12):
            number += 1
            kind = KINDS[number % len(KINDS)]
            arguments = ("order",) if kind == "agent" else ("cus", number)
            try:
                told = self.app.tasks[f"tests.{kind}"].apply_async(arguments)
            except AcceptanceUnknown as unknown:
                self.maybe[str(unknown.job_id)] = kind
            except SafeEffectsError:
                self.refused += 1
            else:
                self.accepted[str(told.id)] = kind


class Listener(threading.Thread):
    """Remembers each job that Celery's result backend has ever reported as ended."""

    def __init__(self, app: Celery, producer: Producer) -> None:
        super().__init__(daemon=True)
        self.app = app
        self.producer = producer
        self.reported: dict[str, str] = {}
        self.stopped = threading.Event()

    def run(self) -> None:
        """Look at all of them, over and over."""
        while not self.stopped.wait(0.05):
            for job_id in [*self.producer.accepted, *self.producer.maybe]:
                state = self.app.AsyncResult(job_id).state
                if state in {"SUCCESS", "FAILURE", "REVOKED"}:
                    assert self.reported.setdefault(job_id, state) == state


@EACH_BROKER_AND_ACKS
def test_fault_42_the_database_crashes_under_load_many_times(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, own_postgres: EmbeddedPostgres, acks_late: bool,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """No effect twice, nothing accepted lost, nothing reported that is not in the log."""
    provider.control(delay_before=0.05)
    for name in "ab":
        workers(name, acks_late=acks_late, concurrency=2)
    producer = Producer(app)
    listener = Listener(app, producer)
    request.addfinalizer(listener.stopped.set)
    request.addfinalizer(producer.stopped.set)
    producer.start()
    listener.start()
    for crash in range(CRASHES):
        done = len(provider.ledger())
        eventually(lambda: len(provider.ledger()) >= done + 8, 30, message="work goes on")  # noqa: B023 - here and now
        time.sleep(0.03 * crash)  # not always in the same step
        own_postgres.restart("immediate")
    producer.stopped.set()
    producer.join(30)

    def unfinished() -> list[dict[str, Any]]:
        return sql("SELECT id, status, reason FROM jobs WHERE status IN ('queued', 'leased', 'running')")

    eventually(lambda: not unfinished(), 60, message="accepted work ends")
    jobs = {row["id"]: row for row in sql("SELECT * FROM jobs")}
    assert len(producer.accepted) >= 2 * CRASHES
    assert set(producer.accepted) <= set(jobs), "nothing accepted is lost"
    assert set(jobs) <= {*producer.accepted, *producer.maybe}
    eventually(
        lambda: (
            not sql("SELECT 1 FROM jobs WHERE status = 'unknown' AND task <> 'tests.whole_body'") and not unfinished()
        ),  # what was resolved runs once more
        60,
        message="what can be looked up or sent again is resolved",
    )
    statuses = {row["id"]: row["status"] for row in sql("SELECT id, status FROM jobs")}
    assert set(statuses.values()) <= {"succeeded", "unknown"}
    # What a crash left untold is told again after republish_after.
    eventually(lambda: not sql("SELECT 1 FROM jobs WHERE status = 'succeeded' AND settled_at IS NULL"), 90)
    listener.stopped.set()
    listener.join(30)

    ended = {
        row["job_id"]
        for row in sql("SELECT job_id FROM transitions WHERE operation_key IS NULL AND to_status = 'succeeded'")
    }
    assert set(listener.reported.values()) <= {"SUCCESS"}
    assert set(listener.reported) <= ended, "nothing is reported that the log does not say"
    assert ended == {job_id for job_id, status in statuses.items() if status == "succeeded"}
    assert_invariants(sql, provider)
