"""Faults 1, 4, 7 and 8 in the pools that are not prefork, where a kill takes the whole worker along.

One worker of each pool at a time, on queues of their own: the pools do not disturb each other, and one wait serves all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, chain

from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.checks import assert_invariants, assert_ledger, job, log, wait_status
from tests.support.names import DEATH_VARIABLE
from tests.support.pools import POOLS, one_worker_each
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = [pytest.mark.faults, pytest.mark.slow]

OTHERS = [pool for pool in POOLS if pool != "prefork"]
ACKS_LATE = {"threads": True, "solo": False, "gevent": True, "eventlet": False}
CONCURRENCY = {"threads": 3, "solo": 1, "gevent": 3, "eventlet": 3}
SHARED = [pool for pool in OTHERS if CONCURRENCY[pool] > 1]
CLAIMED = ["job - > queued #0", "job queued > leased #1", "job leased > running #1"]
ONCE = [
    *CLAIMED,
    "1 - > intent_recorded #1",
    "1 intent_recorded > outcome_confirmed #1",
    "job running > succeeded #1",
]
RUNS = 3


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    """What a pool does is no matter of the broker's."""
    return redis_broker


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    """Short leases; Redis gives a message again that was not acknowledged in four seconds."""
    return {
        **app_conf,
        "safe_effects_lease_ttl": 3,
        "safe_effects_max_attempts": RUNS,
        "broker_transport_options": {
            "visibility_timeout": 4,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
        },
    }


def each(**more: Any) -> dict[str, dict[str, Any]]:
    """The workers' options."""
    return {pool: {"acks_late": ACKS_LATE[pool], "concurrency": CONCURRENCY[pool], **more} for pool in OTHERS}


def test_01_a_long_job_is_delivered_again(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, request: pytest.FixtureRequest
) -> None:
    """Two workers of each pool, late acknowledgement everywhere, and a call twice as long as the broker's patience."""
    provider.control(kind="charge", delay_before=8)
    kinds = {f"{pool}{n}": {"pool": pool, "queues": [pool]} for pool in OTHERS for n in ("", "-second")}
    del kinds["gevent-second"], kinds["eventlet-second"], kinds["threads-second"]  # they take it again themselves
    one_worker_each(request, workers, kinds, acks_late=True, concurrency=4, env={"SAFE_EFFECTS_TEST_DEADLINE": "60"})
    results = {pool: app.tasks["tests.charge"].apply_async((pool, 1), queue=pool) for pool in OTHERS}
    for pool, result in results.items():
        wait_status(sql, result.id, "succeeded", timeout=30)
        assert log(sql, result.id) == ONCE, pool
        assert_ledger(provider, sql, result.id)
    for pool, result in results.items():
        eventually(lambda r=result: r.state == "SUCCESS", 15, message=pool)  # type: ignore[misc]

    def again() -> int:
        return sum(
            worker.log().count("is stale (")
            for worker in workers.started
            for result in results.values()
            if result.id in worker.log()
        )

    eventually(lambda: again() >= len(results), 15, message="each was given again")
    assert provider.received("charge") == len(results)
    assert_invariants(sql, provider)


def test_04_a_handler_that_kills_its_worker(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, request: pytest.FixtureRequest
) -> None:
    """Each run costs a worker and an attempt; somebody starts the worker again, and it comes to an end."""
    pure = {pool: app.tasks["tests.kills_itself"].apply_async(queue=pool) for pool in OTHERS}
    for _ in range(RUNS + 1):
        alive = one_worker_each(request, workers, each())
        eventually(
            lambda a=alive: all(  # type: ignore[misc]
                not worker.running or job(sql, pure[pool].id)["status"] == "failed" for pool, worker in a.items()
            ),
            30,
            message="every worker has died of it",
        )
        for worker in alive.values():
            worker.kill()
        if all(job(sql, result.id)["status"] == "failed" for result in pure.values()):
            break
    for pool, result in pure.items():
        found = job(sql, result.id)
        assert (found["status"], found["attempts"], found["reason"]) == ("failed", RUNS, "max_attempts"), pool
    assert provider.received("entered_kills_itself") == RUNS * len(pure)

    # An effect that did it happened, is found, and kills nobody again.
    effect = app.tasks["tests.kills_itself_in_effect"].apply_async(queue="gevent")
    kinds = {"gevent": each()["gevent"]}
    mortal = one_worker_each(request, workers, kinds)["gevent"]
    eventually(lambda: not mortal.running, 20, message="the worker has died of it")
    one_worker_each(request, workers, kinds)
    wait_status(sql, effect.id, "succeeded", timeout=30)
    assert_ledger(provider, sql, effect.id)
    assert provider.received("fatal") == 1
    assert_invariants(sql, provider)


def test_07_killed_before_celery_knew_of_the_end(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    victims = {pool: str(uuid4()) for pool in OTHERS}
    places = dict(zip(OTHERS, ("before_dispatch", "before_store", "before_settling", "before_store"), strict=True))
    kinds = each()
    for pool, options in kinds.items():
        options["env"] = {DEATH_VARIABLE: f"{places[pool]}|{victims[pool]}|{tmp_path / pool}"}
    first = one_worker_each(request, workers, kinds)
    mortal, follow = app.tasks["tests.mortal"], app.tasks["tests.follow"]
    last = {}
    for pool, victim in victims.items():
        head = mortal.s(f"order {pool}").set(task_id=victim, queue=pool)
        last[pool] = chain(head, follow.s().set(queue=pool)).apply_async()
    eventually(lambda: not any(worker.running for worker in first.values()), 30, message="all workers died")
    for victim in victims.values():
        assert (job(sql, victim)["status"], job(sql, victim)["settled_at"]) == ("succeeded", None)

    one_worker_each(request, workers, kinds)
    for pool, victim in victims.items():
        eventually(lambda p=pool: sql("SELECT 1 AS ok FROM jobs WHERE id = %s", last[p].id), 30)  # type: ignore[misc]
        found = wait_status(sql, last[pool].id, "succeeded", timeout=30)
        eventually(lambda p=pool: last[p].state == "SUCCESS", 20)  # type: ignore[misc]
        assert log(sql, victim) == ONCE, pool
        # A continuation that began in the same process died with it, and is looked up.
        assert found["fence"] <= 2
        assert_ledger(provider, sql, victim, kind="refund")
        assert_ledger(provider, sql, last[pool].id, kind="deploy")
    assert provider.received("refund") == len(victims)
    eventually(lambda: not sql("SELECT id FROM jobs WHERE settled_at IS NULL"), 20, message="Celery knows of every end")
    assert_invariants(sql, provider)


def test_08_a_worker_killed_with_a_job_in_each_place(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, request: pytest.FixtureRequest
) -> None:
    """Prefetched, claimed, with an intent, accepted by the provider: the first two run again, the others are parked."""
    env = {"SAFE_EFFECTS_TEST_DEADLINE": "8"}
    provider.control(kind="refund", delay_after=30, times=len(OTHERS))
    first = one_worker_each(request, workers, each(env=env))
    send = {name: app.tasks[f"tests.{name}"].apply_async for name in ("sleep_then_charge", "waits_charge", "refunds")}
    accepted = {pool: send["refunds"]((pool,), queue=pool) for pool in OTHERS}
    claimed = {pool: send["sleep_then_charge"]((60, pool, 1), queue=pool) for pool in SHARED}
    intended = {pool: send["waits_charge"]((pool, 1, 30), queue=pool) for pool in SHARED}
    for result in claimed.values():
        wait_status(sql, result.id, "running", timeout=20)
    for result in accepted.values():
        eventually(lambda r=result: provider.ledger(key=f"{r.id}:1"), 20)  # type: ignore[misc]
    for result in intended.values():
        eventually(lambda r=result: sql("SELECT 1 AS ok FROM operations WHERE key = %s", f"{r.id}:1"), 20)  # type: ignore[misc]
    prefetched = {pool: app.tasks["tests.charge"].apply_async((pool, 1), queue=pool) for pool in OTHERS}
    eventually(lambda: prefetched["threads"].id in first["threads"].log(), 15, message="it is prefetched")
    for worker in first.values():
        worker.kill()
    for result in prefetched.values():
        assert log(sql, result.id) == ["job - > queued #0"]

    one_worker_each(request, workers, each(env=env))
    for jobs in (accepted, claimed, intended, prefetched):
        for pool, result in jobs.items():
            found = wait_status(sql, result.id, "succeeded", timeout=60)
            assert len(provider.ledger(key=f"{result.id}:1")) == 1, pool
            assert found["outcome_ref"], pool
    for pool, result in accepted.items():
        assert "1 unknown > outcome_confirmed #1 (lookup)" in log(sql, result.id), pool
        assert "job running > unknown #1 (lease_expired)" in log(sql, result.id), pool
    for pool, result in claimed.items():
        assert log(sql, result.id)[:4] == [*CLAIMED, "job running > queued #1 (lease_expired)"], pool
    for pool, result in intended.items():
        # The sender is seen to be gone, and the provider knows nothing: sent once, by the second attempt.
        assert "1 unknown > not_happened #1 (lookup)" in log(sql, result.id), pool
    for pool, result in prefetched.items():
        assert log(sql, result.id) == ONCE, pool
    assert provider.received("refund") == len(accepted)
    assert_invariants(sql, provider)
