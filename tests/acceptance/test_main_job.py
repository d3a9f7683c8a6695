"""The main job on pytest-celery's nodes: killed in the middle of a provider call, it happens once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from pytest_celery import RESULT_TIMEOUT, CeleryTestSetup, CeleryTestWorker

from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.checks import assert_invariants, assert_ledger, assert_log, job
from tests.support.processes import FAST
from tests.support.pytest_celery_local import safe_worker
from tests.support.services import Sql


@pytest.fixture
def second_worker(
    celery_setup_app: Celery,
    celery_setup_config: Mapping[str, Any],
    database_url: str,
    provider: Provider,
    tmp_path: Path,
) -> Callable[[], AbstractContextManager[CeleryTestWorker]]:
    """Starts one more worker of the setup."""
    conf = {**FAST, **celery_setup_config, "safe_effects_database_url": database_url}
    return lambda: safe_worker("second", conf, celery_setup_app, provider, tmp_path)


def test_a_job_with_one_effect(celery_setup: CeleryTestSetup, provider: Provider, sql: Sql) -> None:
    bill = celery_setup.app.tasks["tests.charge"]
    options = {"idempotency_key": "order-42", "tenant": "acme"}
    result = bill.apply_async(("cus_1", 500), **options)

    ref = result.get(timeout=RESULT_TIMEOUT)
    assert result.state == "SUCCESS"
    assert ref == assert_ledger(provider, sql, result.id)["ref"]
    assert_log(
        sql,
        result.id,
        [
            "job - > queued #0",
            "job queued > leased #1",
            "job leased > running #1",
            "1 - > intent_recorded #1",
            "1 intent_recorded > outcome_confirmed #1",
            "job running > succeeded #1",
        ],
    )
    found = eventually(lambda: [r for r in [job(sql, result.id)] if r["settled_at"]], 10, message="Celery was told")[0]
    assert (found["outcome_ref"], found["result"], found["tenant"], found["attempts"]) == (ref, ref, "acme", 1)
    # The same order again, also from a caller who does not wait: the same job, and its result.
    again = bill.apply_async(("cus_1", 500), **options)
    assert (again.id, again.get(timeout=RESULT_TIMEOUT)) == (result.id, ref)
    assert len(provider.ledger()) == 1
    assert_invariants(sql, provider)


def test_the_main_job(
    celery_setup: CeleryTestSetup,
    second_worker: Callable[[], AbstractContextManager[CeleryTestWorker]],
    provider: Provider,
    sql: Sql,
) -> None:
    """An agent asks, and calls three tools; its worker is killed while the first of them is being accepted."""
    provider.control(kind="refund", delay_before=3, times=1)
    result = celery_setup.app.tasks["tests.agent"].apply_async(("order-42",), idempotency_key="order-42")
    eventually(lambda: provider.received("refund"), 15, message="the provider got the call")
    first = celery_setup.worker
    assert job(sql, result.id)["lease_owner"].startswith(f"{first.hostname()}/")
    first.kill()
    assert first.container.status == "exited"
    assert provider.ledger(kind="refund") == []

    with second_worker() as second:
        ref = result.get(timeout=RESULT_TIMEOUT)

    assert_log(
        sql,
        result.id,
        [
            "job - > queued #0",
            "job queued > leased #1",
            "job leased > running #1",
            "1 - > intent_recorded #1",
            "1 intent_recorded > outcome_confirmed #1",
            "2 - > intent_recorded #1",
            "job running > unknown #1 (lease_expired)",
            "2 intent_recorded > unknown #1 (lease_expired)",
            "2 unknown > outcome_confirmed #1 (lookup)",
            "job unknown > queued #1 (resolved:~:2)",
            "job queued > leased #2",
            "job leased > running #2",
            "3 - > intent_recorded #2",
            "3 intent_recorded > outcome_confirmed #2",
            "4 - > intent_recorded #2",
            "4 intent_recorded > outcome_confirmed #2",
            "job running > succeeded #2",
        ],
    )
    for step, kind in (("2", "refund"), ("3", "mail"), ("4", "deploy")):
        assert_ledger(provider, sql, result.id, step, kind)
        assert provider.received(kind) == 1, "one call, one row"
    assert provider.received("ask_model") == 1, "the replay has the answer that the first run acted on"
    found = job(sql, result.id)
    (deployed,) = provider.ledger(kind="deploy")
    assert (found["status"], found["outcome_ref"], ref) == ("succeeded", deployed["ref"], deployed["ref"])
    actors = {row["actor"] for row in sql("SELECT actor FROM transitions WHERE fence = 2")}
    assert {actor.partition("/")[0] for actor in actors} == {second.hostname()}
    assert_invariants(sql, provider)
