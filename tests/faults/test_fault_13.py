"""A rolling deploy: an old worker without the task takes its messages, and Celery throws away what it does not know.

The library is not even installed there. That an old worker with the library, or one that knows the task as a plain one,
does no harm, tests/acceptance/test_deploys.py shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.testing import WorkerProcess, eventually
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.checks import assert_invariants, assert_log, wait_status
from tests.support.processes import ROOT, Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults

JOBS = 20
LOG = [
    "job - > queued #0",
    "job queued > leased #1",
    "job leased > running #1",
    "1 - > intent_recorded #1",
    "1 intent_recorded > outcome_confirmed #1",
    "job running > succeeded #1",
]


def test_13_an_old_worker_without_the_task_takes_its_messages(
    app: Celery,
    app_conf: dict[str, Any],
    workers: Workers,
    broker: Broker,
    provider: Provider,
    sql: Sql,
    tmp_path: Path,
    acks_late: bool,
) -> None:
    old = WorkerProcess(
        "tests.support.plain_app:app",
        name="old",
        env={"PLAIN_BROKER": broker.url, "PLAIN_BACKEND": app_conf["result_backend"]},
        cwd=ROOT,
        log_path=tmp_path / "old.log",
    )
    with old.start():
        sent = [app.tasks["tests.charge"].apply_async(("cus", n)) for n in range(JOBS)]
        eventually(lambda: old.log().count("unregistered task") >= JOBS, 20, message="it threw all of them away")
        eventually(lambda: broker.depth() == 0, 5)
        assert sql("SELECT count(*) AS n FROM jobs WHERE status = 'queued' AND attempts = 0") == [{"n": JOBS}]

        # Old and new side by side: some messages go to the wrong one again.
        workers("new", acks_late=acks_late, concurrency=2)
        eventually(lambda: sql("SELECT id FROM jobs WHERE status = 'succeeded'"), 20, message="the new one runs some")
    for result in sent:
        assert wait_status(sql, result.id, "succeeded", timeout=40)["attempts"] == 1
        assert_log(sql, result.id, LOG)
        # The old worker told the backend of a failure, which it did not know to be none.
        assert eventually(lambda: app.AsyncResult(result.id).state == "SUCCESS", 10)  # noqa: B023 - called here and now
    assert len(provider.ledger()) == JOBS
    assert_invariants(sql, provider)
