"""What real workers leave behind for the metrics: a paused child, a killed worker, one that stops."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.testing import eventually
from tests.support.brokers import Broker
from tests.support.checks import wait_status
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    return redis_broker


def values(app: Celery, name: str) -> dict[str, float]:
    (metric,) = [m for m in app.safe_effects.metrics() if m.name == f"safe_effects_{name}"]
    return {"".join(sample.labels.values()): sample.value for sample in metric.samples}


@pytest.mark.slow
def test_leases_that_run_out_under_a_worker_and_with_one(app: Celery, workers: Workers, sql: Sql) -> None:
    worker = workers("a", conf={"safe_effects_lease_ttl": 3, "safe_effects_sweep_interval": 0.3})
    (seen,) = eventually(lambda: sql("SELECT * FROM worker"), 20, message="the worker said that it is there") or []
    assert (seen["pool"], seen["concurrency"], seen["pid"]) == ("prefork", 1, worker.pid)
    assert "safe_effects" in seen["queues"]
    job = app.tasks["tests.sleep"].delay(8).id
    wait_status(sql, job, "running")
    worker.pause("child")
    wait_status(sql, job, "queued")
    assert values(app, "lease_expirations_total") == {"active": 1, "gone": 0}
    worker.resume("child")

    def noticed() -> bool:
        lost, pause = values(app, "leases_lost_total")["renewal"], values(app, "longest_pause_seconds")[""]
        return lost == 1 and pause > 1

    eventually(noticed, 20, message="the child noticed its pause")
    assert values(app, "workers") == {seen["version"]: 1}
    wait_status(sql, job, "running")
    worker.kill()
    other = workers("b", conf={"safe_effects_lease_ttl": 3, "safe_effects_sweep_interval": 0.3})
    eventually(lambda: values(app, "lease_expirations_total")["gone"], 30, message="the killed worker's lease ran out")
    assert values(app, "lease_expirations_total")["active"] == 1
    wait_status(sql, job, "succeeded")
    other.terminate()

    def stopped() -> Any:
        return sql("SELECT node FROM worker WHERE node = 'b@test' AND stopped_at IS NOT NULL")

    eventually(stopped, 20, message="a worker that stops says so")
