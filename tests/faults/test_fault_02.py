"""A job due in 15 s under a visibility timeout of 3 s: it runs once, not early; early deliveries cost no attempt."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.glue.envelope import Envelope, Mark
from celery_safe_effects.glue.wire import Message
from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support import delivery_tasks
from tests.support.checks import assert_invariants, assert_log, job, wait_status
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = [pytest.mark.faults, pytest.mark.slow]

DUE = 15.0
LATE = 6.0
"""Seconds by which a busy machine may start it after its time; a message published again would be later by sixty."""
TASKS = {"tests.notes": "early", "tests.notes_late": "late"}
"""Both ways of acknowledging, in one worker."""


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    """The message goes to a worker one sweep ahead of its time: longer than the broker's patience."""
    if app_conf["broker_url"].startswith("redis"):
        app_conf["broker_transport_options"] = {
            "visibility_timeout": 3,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
        }
    return {
        **app_conf,
        "imports": ["tests.support.delivery_tasks"],
        "safe_effects_sweep_interval": 8,
        "safe_effects_republish_after": 60,
    }


def early_copy(app: Celery, sql: Sql, job_id: str) -> None:
    """Give the workers the job's message long before its time, without a time."""
    (row,) = sql("SELECT seq, args_digest, tenant, envelope FROM job WHERE id = %s", job_id)
    stored = Envelope.decode(row["envelope"])
    marked = stored.marked(Mark(row["seq"], 0, row["args_digest"], row["tenant"]))
    app.__dict__["_safe_effects"].publisher.wire.send_one(Message.of(app, marked))


def stale(sql: Sql) -> dict[str, int]:
    rows = sql("SELECT label, value FROM counter WHERE name = 'stale_deliveries'")
    return {row["label"]: row["value"] for row in rows}


def test_02_a_job_that_is_due_later_than_the_broker_is_patient(
    app: Celery, app_conf: dict[str, Any], workers: Workers, provider: Provider, sql: Sql
) -> None:
    delivery_tasks.add_tasks(app)
    for name in "ab":
        workers(name)
    sent = {task: app.tasks[task].apply_async((name,), countdown=DUE) for task, name in TASKS.items()}
    for _ in range(2):
        for result in sent.values():
            early_copy(app, sql, result.id)
    eventually(lambda: stale(sql).get("early") == 4, 10, message="the early deliveries are counted")
    for result in sent.values():
        row = job(sql, result.id)
        assert (row["status"], row["attempts"], row["fence"]) == ("queued", 0, 0)

    def published() -> bool:
        app.__dict__["_safe_effects"].sweep()  # as soon as it may go out
        return sql("SELECT count(*) AS n FROM job WHERE publishes = 1") == [{"n": 2}]

    eventually(published, DUE, 0.3, message="both went to a worker, a sweep ahead of their time")
    for result in sent.values():
        row = wait_status(sql, result.id, "succeeded", timeout=DUE + 15)
        assert (row["attempts"], row["fence"]) == (1, 1)
        assert row["eta"] <= row["started_at"] <= row["eta"] + timedelta(seconds=LATE)
        wanted = [
            "job - > queued #0",
            "job queued > leased #1",
            "job leased > running #1",
            "job running > succeeded #1",
        ]
        assert_log(sql, result.id, wanted)
    if app_conf["broker_url"].startswith("redis"):
        # While it waited in one worker for its time, the broker gave it to the other.
        eventually(lambda: set(stale(sql)) - {"early"}, 15, message="what the broker gave again is stale")
    assert sorted(row["body"]["name"] for row in provider.ledger(kind="noted")) == sorted(TASKS.values())
    assert_invariants(sql, provider)
