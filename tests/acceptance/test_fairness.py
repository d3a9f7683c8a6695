"""One tenant's backlog does not hold up another's few jobs, on real workers with prefetch."""

from __future__ import annotations

import os
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.testing import eventually
from tests.support.processes import Beats, Workers
from tests.support.services import Sql

pytestmark = pytest.mark.slow

BACKLOG = int(os.environ.get("SAFE_EFFECTS_TEST_TENANT_BACKLOG", "150"))
CONCURRENCY = 2
STARTED_BEFORE = """
SELECT count(*) AS n FROM jobs a, jobs b
 WHERE b.id = %s AND a.tenant = 'big' AND a.started_at > b.created_at AND a.started_at < b.started_at
"""


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    app_conf.update(task_ignore_result=True, worker_send_task_events=False, safe_effects_lease_ttl=10)
    return app_conf


def nap(app: Celery, tenant: str) -> str:
    return str(app.tasks["tests.sleep"].apply_async((0.1,), tenant=tenant).id)


@pytest.mark.parametrize("when", ["while workers run", "before any worker ran"])
def test_five_jobs_pass_a_backlog(app: Celery, workers: Workers, beat: Beats, sql: Sql, when: str) -> None:
    def start() -> None:
        workers(concurrency=CONCURRENCY, conf={"worker_prefetch_multiplier": 4})
        beat()

    if when == "while workers run":
        start()
    for _ in range(BACKLOG):
        nap(app, "big")
    if when == "while workers run":
        eventually(lambda: sql("SELECT count(*) AS n FROM jobs WHERE started_at IS NOT NULL")[0]["n"] > 10, 30)
        small = [nap(app, "small") for _ in range(5)]
    else:
        small = [nap(app, "small") for _ in range(5)]
        start()

    def all_started() -> bool:
        rows = sql("SELECT count(*) AS n FROM jobs WHERE id = ANY (%s) AND started_at IS NOT NULL", small)
        return bool(rows[0]["n"] == 5)

    eventually(all_started, 60)
    before = sorted(sql(STARTED_BEFORE, job)[0]["n"] for job in small)
    if when == "while workers run":
        # Three job times are three jobs of the other tenant on each of the worker's processes.
        assert before[-1] <= 3 * CONCURRENCY, before
    else:
        assert before[-1] < BACKLOG / 2, before

    def all_done() -> bool:
        return not sql("SELECT id FROM jobs WHERE status <> 'succeeded' LIMIT 1")

    eventually(all_done, 120)
    assert sql("SELECT count(*) AS n FROM jobs WHERE attempts <> 1 OR fence <> 1")[0]["n"] == 0
