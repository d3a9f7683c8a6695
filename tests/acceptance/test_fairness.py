"""One tenant's backlog does not hold up another's few jobs, on real workers with prefetch.

`SAFE_EFFECTS_TEST_TENANT_BACKLOG=10000` runs it at the size that is promised, with `SAFE_EFFECTS_TEST_JOB_TIME=1` also
against the clock; `-s` shows what was measured. The rest of a long backlog is not waited for.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.testing import eventually
from celery_safe_effects.testing.process import patience
from tests.support.processes import Beats, Workers
from tests.support.services import Sql

pytestmark = pytest.mark.slow

BACKLOG = int(os.environ.get("SAFE_EFFECTS_TEST_TENANT_BACKLOG", "150"))
LONG = BACKLOG > 1000
JOB_TIME = float(os.environ.get("SAFE_EFFECTS_TEST_JOB_TIME") or 0.1 * patience())
STARTED_BEFORE = """
SELECT count(*) AS n FROM jobs a, jobs b
 WHERE b.id = %s AND a.tenant = 'big' AND a.started_at > b.created_at AND a.started_at < b.started_at
"""


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    app_conf.update(task_ignore_result=True, worker_send_task_events=False, safe_effects_lease_ttl=10)
    return app_conf


def nap(app: Celery, tenant: str) -> str:
    return str(app.tasks["tests.sleep"].apply_async((JOB_TIME,), tenant=tenant).id)


@pytest.mark.parametrize(
    ("when", "concurrency", "prefetch"),
    [("while workers run", 2, 4), ("while workers run", 1, 1), ("before any worker ran", 2, 4)],
    ids=["running", "one-process", "later"],
)
def test_five_jobs_pass_a_backlog(
    app: Celery, workers: Workers, beat: Beats, sql: Sql, when: str, concurrency: int, prefetch: int
) -> None:
    def start() -> None:
        workers(concurrency=concurrency, conf={"worker_prefetch_multiplier": prefetch})
        beat()

    if when == "while workers run":
        start()
    backlog = [app.tasks["tests.sleep"].s(JOB_TIME).set(tenant="big") for _ in range(BACKLOG)]
    assert {one.status for one in app.__dict__["_safe_effects"].enqueue_many(backlog)} == {"accepted"}
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
    waits = sql("SELECT extract(epoch FROM started_at - created_at)::float8 AS s FROM jobs WHERE id = ANY (%s)", small)
    print(f"\n{when}, {BACKLOG} queued: before them {before}, waits {sorted(round(row['s'], 2) for row in waits)} s")
    if when == "while workers run":
        # Three job times are three jobs of the other tenant on each of the worker's processes.
        assert before[-1] <= 3 * concurrency, before
        if JOB_TIME >= 1:  # the rest is small beside it; of five jobs, those of one process wait for each other
            assert max(row["s"] for row in waits) <= (3 if concurrency > 1 else 5.5) * JOB_TIME, waits
    else:
        assert before[-1] < 75, before

    def all_done() -> bool:
        return not sql("SELECT id FROM jobs WHERE status <> 'succeeded' LIMIT 1")

    if not LONG:
        eventually(all_done, 120)
    assert sql("SELECT count(*) AS n FROM jobs WHERE attempts > 1 OR fence > 1")[0]["n"] == 0
