"""Fault 29: a pool that runs one at a time, whose holder is killed, or paused and continued, again and again."""

from __future__ import annotations

import os
import threading
from typing import Any

import psycopg
import pytest
from celery import Celery

from celery_safe_effects.testing import WorkerProcess, eventually
from example_project.provider_client import Provider
from tests.support.brokers import EACH_BROKER_AND_ACKS
from tests.support.checks import assert_invariants
from tests.support.faults3 import BEGUN
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = [pytest.mark.faults, pytest.mark.slow]

ROUNDS = int(os.environ.get("SAFE_EFFECTS_TEST_ROUNDS", "4"))
"""How often the holder is killed or paused; the fault itself speaks of twenty."""


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    limits = {"pool_running": {"one": 1}}
    return {**app_conf, "safe_effects_lease_ttl": 1.5, "safe_effects_limits": limits, "safe_effects_max_attempts": 50}


class Sampler(threading.Thread):
    """Counts who is inside, as often as it can."""

    def __init__(self, dsn: str) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        self.samples = 0
        self.most = 0
        self._dsn = dsn

    def run(self) -> None:
        query = "SELECT count(*) FROM safe_effects.jobs WHERE pool = 'one' AND status IN ('leased', 'running')"
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while not self.over.wait(0.005):
                (found,) = connection.execute(query).fetchone() or (0,)
                self.most = max(self.most, found)
                self.samples += 1

    def stop(self) -> None:
        self.over.set()
        if self.is_alive():
            self.join(10)


@EACH_BROKER_AND_ACKS
def test_fault_29(
    app: Celery,
    workers: Workers,
    provider: Provider,
    sql: Sql,
    dsn: str,
    acks_late: bool,
    request: pytest.FixtureRequest,
) -> None:
    both = {name: workers(name, acks_late=acks_late, concurrency=2, ready=False) for name in "ab"}
    for worker in both.values():
        worker.wait_ready()
    sampler = Sampler(dsn)
    request.addfinalizer(sampler.stop)
    sampler.start()
    # Each is hit once: in its first run it stays inside until then.
    jobs = [app.tasks["tests.holder"].delay(120).id for _ in range(ROUNDS)]
    zombies: list[WorkerProcess] = []

    begun: set[str] = set()

    def next_holder() -> tuple[str, WorkerProcess] | None:
        inside = {row["body"]["job"] for row in provider.ledger(kind=BEGUN)} - begun
        rows = sql("SELECT id, lease_owner FROM jobs WHERE status = 'running' AND id = ANY (%s)", list(inside))
        return (rows[0]["id"], both[rows[0]["lease_owner"][0]]) if rows else None

    for number in range(ROUNDS):
        found = eventually(next_holder, 40, message="the next is inside")
        assert found is not None
        job_id, hit = found
        begun.add(job_id)
        if number % 2:
            hit.kill()
            hit.start(ready=False)
            continue
        hit.pause()
        runs = provider.received(BEGUN)
        eventually(lambda: provider.received(BEGUN) > runs, 40, message="the other goes on")  # noqa: B023
        hit.resume()
        zombies.append(hit)
    eventually(
        lambda: not sql("SELECT 1 FROM jobs WHERE status <> 'succeeded'"), 60, message="all of them have their turn"
    )
    sampler.stop()
    assert sampler.most == 1
    assert sampler.samples > 100
    assert zombies
    # The log knows more than any sample: the runs one after the other, each begun after the one before was over.
    inside = 0
    for row in sql("SELECT from_status, to_status FROM transitions WHERE operation_key IS NULL ORDER BY id"):
        inside += (row["to_status"] == "leased") - (row["from_status"] == "running")
        assert inside in {0, 1}
    assert sorted(row["key"] for row in provider.ledger(kind="charge")) == sorted(f"{one}:1" for one in jobs)
    assert provider.received("charge") == len(jobs)
    assert_invariants(sql, provider)
