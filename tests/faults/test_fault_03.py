"""The broker restarts while late-acknowledged jobs run: one effect each, whether the worker lets them run or not."""

from __future__ import annotations

import time
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.testing import LocalServer, eventually
from example_project.provider_client import Provider
from tests.support.checks import assert_invariants, assert_ledger, job, log, wait_status
from tests.support.pools import one_worker_each
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = [pytest.mark.faults, pytest.mark.slow]

STARTED = ["job - > queued #0", "job queued > leased #1", "job leased > running #1"]
ENDS_ITSELF = "Unrecoverable error: AttributeError"
"""What Celery 5.7 does on Redis when the connection is lost with messages unacknowledged: a warm stop."""
CONFIRMED = ["1 - > intent_recorded #1", "1 intent_recorded > outcome_confirmed #1"]


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    """Nothing here waits for a lease to run out."""
    return {**app_conf, "safe_effects_lease_ttl": 60, "broker_connection_retry": True, "broker_connection_timeout": 2}


def test_03_the_broker_restarts_in_the_middle_of_late_jobs(
    app: Celery,
    workers: Workers,
    own_broker: LocalServer,
    provider: Provider,
    sql: Sql,
    request: pytest.FixtureRequest,
) -> None:
    kinds = {
        "prefork": {"conf": {"worker_cancel_long_running_tasks_on_connection_loss": False}},
        "prefork-cancels": {"conf": {"worker_cancel_long_running_tasks_on_connection_loss": True}},
    }
    env = {"SAFE_EFFECTS_TEST_DEADLINE": "20"}
    both = one_worker_each(request, workers, kinds, concurrency=2, acks_late=True, env=env)
    provider.control(kind="refund", delay_after=12, times=2)
    between = {kind: app.tasks["tests.charge_slowly"].apply_async((kind, 12), queue=kind) for kind in kinds}
    inside = {kind: app.tasks["tests.refunds"].apply_async((kind,), queue=kind) for kind in kinds}
    for result in (*between.values(), *inside.values()):
        eventually(lambda r=result: provider.ledger(key=f"{r.id}:1"), 20)  # type: ignore[misc]
    own_broker.kill()
    time.sleep(1)
    own_broker.start()

    for result in (*between.values(), *inside.values()):
        wait_status(sql, result.id, "succeeded", timeout=60)
    # Left alone, they come to their ends; whatever the broker gave again was stale.
    ended = "job running > succeeded #1"
    second = ["2 - > intent_recorded #1", "2 intent_recorded > outcome_confirmed #1"]
    assert log(sql, between["prefork"].id) == [*STARTED, *CONFIRMED, *second, ended]
    assert log(sql, inside["prefork"].id) == [*STARTED, *CONFIRMED, ended]
    given_up = "(worker_cancelled)"
    if ENDS_ITSELF not in both["prefork-cancels"].log():
        # Given up by the worker: queued again between two effects, parked and looked up inside one.
        assert f"job running > queued #1 {given_up}" in log(sql, between["prefork-cancels"].id)
        assert f"job running > unknown #1 {given_up}" in log(sql, inside["prefork-cancels"].id)
    for result in between.values():
        assert_ledger(provider, sql, result.id, "1", "charge")
        assert_ledger(provider, sql, result.id, "2", "mail")
    for result in inside.values():
        assert_ledger(provider, sql, result.id, "1", "refund")
    assert (provider.received("charge"), provider.received("refund")) == (2, 2)
    # The workers are back, and Celery knows of every end.
    for kind, worker in both.items():
        if ENDS_ITSELF in worker.log():
            worker.wait(20)
            worker.start()
        again = app.tasks["tests.pure"].apply_async((kind,), queue=kind)
        wait_status(sql, again.id, "succeeded", timeout=30)
    for result in (*between.values(), *inside.values()):
        eventually(lambda r=result: job(sql, r.id)["settled_at"], 20)  # type: ignore[misc]
        assert app.AsyncResult(result.id).state == "SUCCESS"
    assert_invariants(sql, provider)
