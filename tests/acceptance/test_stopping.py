"""A worker that is stopped loses nothing, doubles nothing, and costs no job an attempt."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery

from celery_safe_effects.faults import Fault, Plan, Point
from celery_safe_effects.testing import WorkerProcess, eventually
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.checks import assert_invariants, assert_ledger, job, log, wait_status
from tests.support.pools import POOLS, one_worker_each
from tests.support.processes import Workers
from tests.support.services import Sql

ROUNDS = int(os.environ.get("SAFE_EFFECTS_TEST_ROUNDS", "3"))
"""Rolling restarts; twenty for a thorough run."""
BROKERS = ["redis", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)][: 1 if ROUNDS < 20 else 2]
STARTED = ["job - > queued #0", "job queued > leased #1", "job leased > running #1"]


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> Broker:
    """One broker will do, but for a thorough rolling restart."""
    found: Broker = request.getfixturevalue(f"{getattr(request, 'param', 'redis')}_broker")
    return found


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    """Nothing here waits for a lease to run out."""
    return {**app_conf, "safe_effects_lease_ttl": 60}


def test_a_warm_stop(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, request: pytest.FixtureRequest
) -> None:
    """What runs comes to its end; what waits in the worker's hands waits for the next one."""
    first = one_worker_each(request, workers, {pool: {"concurrency": 1} for pool in POOLS})
    send = app.tasks["tests.charge_slowly"].apply_async
    running = {pool: send((pool, 10), queue=pool) for pool in POOLS}
    for result in running.values():
        wait_status(sql, result.id, "running")
    waiting = {pool: send((f"later {pool}",), queue=pool) for pool in POOLS}
    for pool in ("prefork", "threads"):
        eventually(lambda p=pool: waiting[p].id in first[p].log(), 10)  # type: ignore[misc]
    for pool, worker in first.items():
        if pool == "threads":
            app.control.shutdown(destination=[worker.node])
        else:
            worker.terminate()
    for pool, worker in first.items():
        assert worker.wait(40) == 0, pool
        assert (job(sql, running[pool].id)["status"], job(sql, running[pool].id)["attempts"]) == ("succeeded", 1), pool
        assert job(sql, running[pool].id)["settled_at"], pool
    for pool in ("prefork", "threads"):
        assert log(sql, waiting[pool].id) == ["job - > queued #0"], pool

    one_worker_each(request, workers, {"prefork": {}}, queues=POOLS)
    for pool in POOLS:
        assert wait_status(sql, waiting[pool].id, "succeeded")["attempts"] == 1, pool
        for result in (running[pool], waiting[pool]):
            assert_ledger(provider, sql, result.id, "1", "charge")
            assert_ledger(provider, sql, result.id, "2", "mail")
    assert_invariants(sql, provider)


COLD: dict[str, dict[str, Any]] = {
    "prefork": {"acks_late": True},
    "prefork-soft": {"acks_late": False, "conf": {"worker_soft_shutdown_timeout": 1}},
    "prefork-remapped": {"acks_late": False, "env": {"REMAP_SIGTERM": "SIGQUIT"}},
    "prefork-group": {"acks_late": True},
    "threads": {"acks_late": True},
    "solo": {"acks_late": False, "concurrency": 1},
    "gevent": {"acks_late": True},
    "eventlet": {"acks_late": False},
}
"""Ways to end a worker that is not done. Only processes and greenlets can be ended in the middle."""


def stop(kind: str, worker: WorkerProcess) -> None:
    if kind == "prefork-remapped":
        worker.terminate()
    elif kind == "prefork-group":
        # As a service manager does it: everything that belongs to the worker is told at once.
        os.killpg(worker.pid, signal.SIGTERM)
    else:
        worker.quit()


def test_a_cold_stop(
    app: Celery,
    workers: Workers,
    provider: Provider,
    sql: Sql,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The job between its effects goes on elsewhere at once, and the one inside an effect is parked and looked up."""
    monkeypatch.setenv("SAFE_EFFECTS_TEST_DEADLINE", "30")
    provider.control(kind="refund", delay_after=10)
    first = one_worker_each(request, workers, COLD, concurrency=2)
    between = {kind: app.tasks["tests.charge_slowly"].apply_async((kind, 11), queue=kind) for kind in COLD}
    inside = {kind: app.tasks["tests.refunds"].apply_async((kind,), queue=kind) for kind in COLD if kind != "solo"}
    for result in between.values():
        eventually(lambda r=result: provider.ledger(key=f"{r.id}:1"), 20)  # type: ignore[misc]
    for result in inside.values():
        eventually(lambda r=result: provider.ledger(key=f"{r.id}:1"), 20)  # type: ignore[misc]
    for kind, worker in first.items():
        stop(kind, worker)
    for worker in first.values():
        worker.wait(60)
    confirmed = [*STARTED, "1 - > intent_recorded #1", "1 intent_recorded > outcome_confirmed #1"]
    for kind in ("prefork", "prefork-soft", "prefork-remapped", "prefork-group", "gevent"):
        assert log(sql, between[kind].id) == [*confirmed, "job running > queued #1 (stopped)"], kind
        assert job(sql, between[kind].id)["attempts"] == 0, kind
        parked = wait_status(sql, inside[kind].id, "unknown", "queued", timeout=5)
        assert "job running > unknown #1" in " ".join(log(sql, inside[kind].id)), (kind, parked)
    for kind in ("threads", "solo"):
        # Celery waits for them, and tells their ends; nothing of that is left to be told again.
        assert job(sql, between[kind].id)["status"] == "succeeded", kind
        assert job(sql, between[kind].id)["settled_at"], kind

    provider.control(kind="refund", delay_after=None)
    one_worker_each(request, workers, {"prefork": {"concurrency": 4}}, queues=list(COLD))
    for kind, result in between.items():
        found = wait_status(sql, result.id, "succeeded", timeout=40)
        assert (found["attempts"], found["fence"] <= 2) == (1, True), kind
        assert_ledger(provider, sql, result.id, "1", "charge")
        assert_ledger(provider, sql, result.id, "2", "mail")
    for result in inside.values():
        wait_status(sql, result.id, "succeeded", timeout=40)
        assert_ledger(provider, sql, result.id, "1", "refund")
    assert provider.received("charge") == len(between)
    assert_invariants(sql, provider)


@pytest.mark.usefixtures("broker")
def test_a_service_manager_ends_children_anywhere(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, tmp_path: Path
) -> None:
    """Also where a child holds a claim whose answer it has not read: that is no attempt either."""
    points = (Point.BEFORE_CLAIM, Point.AFTER_CLAIM, Point.BEFORE_BODY, Point.BEFORE_LEAVE)
    jobs = {point: str(uuid4()) for point in points}
    never = str(tmp_path / "never")
    held = [Fault(point, "wait", role="child", job=job_id, until=never) for point, job_id in jobs.items()]
    plan = Plan(held, tmp_path / "faults")
    plan.prepare()
    worker = workers("a", env=plan.environment(), concurrency=len(points), acks_late=True)
    for job_id in jobs.values():
        app.tasks["tests.charge_then_mail"].apply_async(("cus", 1), task_id=job_id)
    eventually(lambda: plan.happened() == held, 20, message="each child stands at its point")
    os.killpg(worker.pid, signal.SIGTERM)
    worker.wait(20)
    for point, job_id in jobs.items():
        found = sql("SELECT status, attempts, tried FROM safe_effects.job WHERE id = %s", job_id)
        assert found == [{"status": "queued", "attempts": 0, "tried": 0}], (point, log(sql, job_id))
    workers("b")
    for job_id in jobs.values():
        assert wait_status(sql, job_id, "succeeded", timeout=20)["attempts"] == 1
    assert_invariants(sql, provider)


def test_killed_soon_after_a_warm_stop_began(app: Celery, workers: Workers, provider: Provider, sql: Sql) -> None:
    """No time to say anything: the lease's end is what remains, and that is a lost attempt."""
    conf = {"safe_effects_lease_ttl": 3}
    first = workers("a", conf=conf)
    result = app.tasks["tests.charge_slowly"].apply_async(("cus_1", 60))
    eventually(lambda: provider.ledger(key=f"{result.id}:1"), 15)
    first.terminate()
    time.sleep(0.5)
    first.kill()
    assert job(sql, result.id)["status"] == "running"
    second = workers("b", conf=conf)
    eventually(lambda: "job running > queued #1 (lease_expired)" in log(sql, result.id), 15)
    wait_status(sql, result.id, "running", timeout=15)
    # The second one is asked politely, and waits for nothing: a body that is told by a signal may do what it likes.
    second.quit()
    second.wait(20)
    assert (job(sql, result.id)["status"], job(sql, result.id)["attempts"]) == ("queued", 1)
    assert_invariants(sql, provider)


@pytest.mark.slow
@pytest.mark.timeout(60 + 20 * ROUNDS)
@pytest.mark.parametrize(
    "broker",
    ["redis", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)] if ROUNDS > 4 else ["redis"],
    indirect=True,
)
@pytest.mark.usefixtures("broker")
def test_rolling_restarts_under_load(app: Celery, workers: Workers, provider: Provider, sql: Sql) -> None:
    """Workers come and go, warm and cold, and the load notices nothing."""
    results: list[Any] = []
    over = threading.Event()

    def produce() -> None:
        while not over.wait(0.15):
            results.append(app.tasks["tests.charge_slowly"].apply_async((f"cus_{len(results)}", 0.3)))

    producer = threading.Thread(target=produce)
    current = workers("w0", concurrency=2)
    producer.start()
    try:
        for number in range(1, ROUNDS + 1):
            following = workers(f"w{number}", concurrency=2, acks_late=bool(number % 2))
            time.sleep(0.5)
            (current.terminate, current.quit, lambda w=current: os.killpg(w.pid, signal.SIGTERM))[number % 3]()
            current.wait(30)
            current = following
    finally:
        over.set()
        producer.join()
    eventually(
        lambda: not sql("SELECT id FROM jobs WHERE status <> 'succeeded' OR settled_at IS NULL"),
        60,
        message="all of them are done",
    )
    assert len(sql("SELECT id FROM jobs")) == len(results)
    for kind in ("charge", "mail"):
        keys = [row["key"] for row in provider.ledger(kind=kind)]
        assert len(keys) == len(set(keys)) == len(results), kind
    spent = sql(
        "SELECT id FROM jobs j WHERE attempts > 1 AND NOT EXISTS ("
        "SELECT FROM transitions t WHERE t.job_id = j.id AND t.to_status = 'unknown')"
    )
    assert [log(sql, row["id"]) for row in spent] == []
    assert_invariants(sql, provider)
