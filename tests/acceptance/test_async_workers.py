"""``async def`` on real workers: in each pool that has threads, killed, limited and stopped."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.testing import WorkerProcess, eventually
from celery_safe_effects.testing.process import patience
from example_project.provider_client import Provider
from tests.support.async_tasks import ASKED_FOR
from tests.support.brokers import Broker
from tests.support.checks import assert_invariants, assert_ledger, job, log, wait_status
from tests.support.faults2 import reached
from tests.support.pools import one_worker_each
from tests.support.processes import Workers
from tests.support.services import Sql

TTL = 1.5 * patience()
ENV = {"SAFE_EFFECTS_TEST_DEADLINE": "8"}
CLAIMED = ["job - > queued #0", "job queued > leased #1", "job leased > running #1"]
CLEAN = ["1 - > intent_recorded #1", "1 intent_recorded > outcome_confirmed #1", "job running > succeeded #1"]
AGAIN = ["job queued > leased #2", "job leased > running #2", "job running > succeeded #2"]


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    """What a coroutine does is no matter of the broker's."""
    return redis_broker


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    """Leases that are over soon if nobody renews them."""
    app_conf.update(safe_effects_lease_ttl=TTL, worker_prefetch_multiplier=1, **{ASKED_FOR: True})
    return app_conf


def operations(sql: Sql, job_id: str) -> list[str]:
    return [row["status"] for row in sql("SELECT status FROM operations WHERE job_id = %s", job_id)]


@pytest.mark.slow
def test_each_pool_runs_coroutines_and_a_blocked_loop_is_no_death(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, request: pytest.FixtureRequest
) -> None:
    """Two bodies block their loop for longer than a lease lives, while everybody sweeps."""
    pools = {"prefork": {"concurrency": 2}, "threads": {"concurrency": 4}, "solo": {"concurrency": 1}}
    one_worker_each(request, workers, pools, env=ENV)
    over = threading.Event()

    def sweep() -> None:
        while not over.wait(0.2):
            app.safe_effects.sweep()

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    waits = app.tasks["tests.async_waits"]
    sent = [waits.apply_async((f"{pool}-{n}", 2.5 * TTL, n == 0), queue=pool) for pool in pools for n in range(2)]
    try:
        for result in sent:
            found = wait_status(sql, result.id, "succeeded", timeout=40)
            assert found["attempts"] == 1
            assert log(sql, result.id) == [*CLAIMED, *CLEAN]
            assert_ledger(provider, sql, result.id, kind="charge")
    finally:
        over.set()
        sweeper.join()
    assert_invariants(sql, provider)


def test_a_worker_of_greenlets_does_not_start(
    app: Celery, workers: Workers, provider: Provider, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("gevent")
    worker = workers("green", pool="gevent", ready=False)
    assert worker.wait(30) != 0
    assert "is `async def` and needs an event loop in a thread of its own" in worker.log()


# -- killed ------------------------------------------------------------------------------------------------------------


def test_killed_in_an_effect_that_the_provider_accepts(
    app: Celery, workers: Workers, provider: Provider, sql: Sql
) -> None:
    """Parked, and found by the lookup, which is a coroutine."""
    provider.control(kind="charge", delay_after=30)
    first = workers("a", env=ENV)
    result = app.tasks["tests.async_charge"].apply_async(("cus_1",))
    eventually(provider.ledger, 10, message="the provider accepted")
    first.kill()
    workers("b", env=ENV)
    found = wait_status(sql, result.id, "succeeded")
    assert log(sql, result.id) == [
        *CLAIMED,
        "1 - > intent_recorded #1",
        "job running > unknown #1 (lease_expired)",
        "1 intent_recorded > unknown #1 (lease_expired)",
        "1 unknown > outcome_confirmed #1 (lookup)",
        "job unknown > queued #1 (resolved:~:1)",
        *AGAIN,
    ]
    assert found["outcome_ref"] == assert_ledger(provider, sql, result.id, kind="charge")["ref"]
    assert provider.received("charge") == 1
    assert_invariants(sql, provider)


def test_ten_effects_in_parallel_are_killed_in_the_middle(
    app: Celery, workers: Workers, provider: Provider, sql: Sql
) -> None:
    """Half of them are done; the replay completes the others, and no key happens twice."""
    first = workers("a", env=ENV)
    result = app.tasks["tests.async_many"].apply_async((10, "half"))
    reached(provider, "half", 5)
    eventually(lambda: sorted(operations(sql, result.id)) == ["intent_recorded"] * 5 + ["outcome_confirmed"] * 5, 10)
    first.kill()
    workers("b", env=ENV)
    wait_status(sql, result.id, "succeeded")
    rows = {row["key"]: row["ref"] for row in provider.ledger(kind="tool")}
    assert len(rows) == len(provider.ledger(kind="tool")) == 10
    assert job(sql, result.id)["result"] == [rows[f"{result.id}:tool-{n}"] for n in range(10)]
    attempts = sql("SELECT step, attempt FROM operations WHERE job_id = %s ORDER BY step", result.id)
    assert [row["attempt"] for row in attempts] == [1, 2] * 5


# -- limited -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_a_time_limit_while_the_provider_accepts_late(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, kind: str
) -> None:
    provider.control(kind="charge", delay_before=6, times=1)
    worker = workers("a", env=ENV, conf={"safe_effects_lease_ttl": 20, "worker_proc_alive_timeout": 20})
    limit = {"soft_time_limit": 2} if kind == "soft" else {"time_limit": 2}
    late = app.tasks["tests.async_charge"].apply_async(("cus_1",), **limit)
    wait_status(sql, late.id, "unknown", timeout=15)
    assert provider.ledger() == [], "parked before the provider accepted"
    after = app.tasks["tests.async_waits"].apply_async(("cus_2", 0.0))
    wait_status(sql, after.id, "succeeded")
    wait_status(sql, late.id, "succeeded")
    assert_ledger(provider, sql, late.id, kind="charge")
    assert provider.received("charge") == 2, "once for each of the two jobs"
    reason = "outcome_unknown" if kind == "soft" else "time_limit"
    assert f"job running > unknown #1 ({reason})" in log(sql, late.id)
    assert worker.running
    assert_invariants(sql, provider)


def test_a_soft_limit_between_effects_is_the_jobs_end(
    app: Celery, workers: Workers, provider: Provider, sql: Sql
) -> None:
    worker = workers("a", env=ENV)
    result = app.tasks["tests.async_waits"].apply_async(("cus_1", 60.0), soft_time_limit=1)
    found = wait_status(sql, result.id, "failed", timeout=20)
    assert "SoftTimeLimitExceeded" in found["last_error"]
    assert eventually(lambda: result.state == "FAILURE", 10)
    # The loop of this very child goes on.
    after = app.tasks["tests.async_waits"].apply_async(("cus_2", 0.0))
    wait_status(sql, after.id, "succeeded")
    assert len(provider.ledger()) == 1
    assert worker.running


# -- stopped -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_warm_stop_lets_coroutines_end(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, request: pytest.FixtureRequest
) -> None:
    """In each pool the effect under way is finished, and the process ends by itself, its loop included."""
    pools = ("prefork", "threads", "solo")
    made = one_worker_each(request, workers, {pool: {"concurrency": 1} for pool in pools}, env=ENV)
    provider.control(kind="charge", delay_after=1.5)
    sent = {pool: app.tasks["tests.async_charge"].apply_async((pool,), queue=pool) for pool in pools}
    eventually(lambda: len(provider.ledger()) == 3, 15)
    for worker in made.values():
        worker.terminate()
    for pool, worker in made.items():
        assert worker.wait(20) == 0, pool
        found = job(sql, sent[pool].id)
        assert (found["status"], found["attempts"]) == ("succeeded", 1), pool
        assert "Traceback" not in worker.log(), pool
    assert_invariants(sql, provider)


def test_a_stop_of_all_processes_puts_a_waiting_body_back(
    app: Celery, workers: Workers, provider: Provider, sql: Sql
) -> None:
    """A service manager signals the children too: the coroutine is cancelled, and the run costs no attempt."""
    first = workers("a", env=ENV, conf={"safe_effects_lease_ttl": 60})
    result = app.tasks["tests.async_waits"].apply_async(("cus_1", 60.0))
    wait_status(sql, result.id, "running")
    terminate_all(first)
    found = wait_status(sql, result.id, "queued", timeout=15)
    assert (found["reason"], found["attempts"]) == ("stopped", 0)
    first.wait(20)
    assert operations(sql, result.id) == []
    app.safe_effects.cancel(result.id, "it has done its part")
    assert provider.ledger() == []


def terminate_all(worker: WorkerProcess) -> None:
    for pid in [worker.pid, *worker.children()]:
        os.kill(pid, signal.SIGTERM)
