"""Limits on real workers: never exceeded at any sample, no claims in vain, changed without a restart, not leaked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from celery import Celery

from celery_safe_effects import Limits
from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.brokers import EACH_BROKER_AND_ACKS
from tests.support.checks import assert_invariants, wait_status
from tests.support.processes import Workers
from tests.support.services import Sql

MANY = 30
LIVE = "SELECT count(*) FROM safe_effects.jobs WHERE tenant = 'acme' AND status IN ('leased', 'running')"


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    limits = {"tenants": {"acme": {"tenant_running": 2}}}
    return {**app_conf, "safe_effects_limits": limits, "worker_prefetch_multiplier": 2}


class Sampler(threading.Thread):
    """How many of the tenant's jobs are live, as often as it can be asked."""

    def __init__(self, dsn: str) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        self.seen: list[int] = []
        self._dsn = dsn

    def run(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while not self.over.wait(0.004):
                self.seen += connection.execute(LIVE).fetchone() or ()


@contextmanager
def sampled(dsn: str) -> Iterator[list[int]]:
    sampler = Sampler(dsn)
    sampler.start()
    try:
        yield sampler.seen
    finally:
        sampler.over.set()
        sampler.join(10)


def deferrals(sql: Sql) -> int:
    rows = sql("SELECT coalesce(sum(value), 0)::int AS n FROM counter WHERE name = 'deferrals'")
    return int(rows[0]["n"])


@EACH_BROKER_AND_ACKS
def test_a_tenant_that_may_run_two_at_once(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, dsn: str, acks_late: bool
) -> None:
    sleep: Any = app.tasks["tests.sleep"]
    both = [workers(name, acks_late=acks_late, concurrency=3) for name in "ab"]
    with sampled(dsn) as seen:
        jobs = [sleep.apply_async((0.2,), tenant="acme").id for _ in range(MANY // 2)]
        # Another tenant's job finds a free child at once: who may not run holds none.
        other = sleep.apply_async((0.1,), tenant="other")
        jobs += [sleep.apply_async((0.2,), tenant="acme").id for _ in range(MANY // 2)]
        wait_status(sql, other.id, "succeeded", timeout=10)
        eventually(lambda: not sql("SELECT 1 FROM jobs WHERE status <> 'succeeded'"), 40)
    assert max(seen) == 2
    assert len(seen) > 100
    later = "SELECT 1 FROM jobs WHERE tenant = 'acme' AND started_at > (SELECT finished_at FROM jobs WHERE id = %s)"
    assert sql(later, other.id)
    assert deferrals(sql) > 0
    rows = sql("SELECT attempts, fence FROM jobs WHERE id = ANY (%s)", jobs)
    assert {(row["attempts"], row["fence"]) for row in rows} == {(1, 1)}
    # Its first message brings each job to a claim, and so does each slot that becomes free.
    assert deferrals(sql) <= 2 * MANY

    # Their first claims apart: while one holds both slots, the others are refused once; then each slot wakes one job.
    holders = [sleep.apply_async((8,), tenant="acme") for _ in range(2)]
    for holder in holders:
        wait_status(sql, holder.id, "running")
    waiting = [sleep.apply_async((0.05,), tenant="acme").id for _ in range(MANY)]
    eventually(
        lambda: len(sql("SELECT 1 FROM job WHERE id = ANY (%s) AND waiting_for IS NOT NULL", waiting)) == MANY, 10
    )
    eventually(lambda: deferrals(sql) >= MANY, 10)
    before = deferrals(sql)
    eventually(lambda: not sql("SELECT 1 FROM jobs WHERE status <> 'succeeded'"), 40)
    eventually(lambda: not sql("SELECT 1 FROM jobs WHERE settled_at IS NULL"), 20)
    freed = MANY + len(holders)
    assert MANY + deferrals(sql) - before <= 2 * freed

    # Changed without a restart: the next sweep wakes those that may run now.
    with sampled(dsn) as seen:
        long = [sleep.apply_async((5,), tenant="acme").id for _ in range(4)]
        eventually(lambda: 2 in seen, 10)
        app.__dict__["_safe_effects"].set_limits(Limits(tenant_running=4), tenant="acme")
        eventually(lambda: 4 in seen, 10, message="four run at once")
        for job_id in long:
            wait_status(sql, job_id, "succeeded")
        assert max(seen) == 4
        app.__dict__["_safe_effects"].set_limits(Limits(tenant_running=1), tenant="acme")

    # A killed holder's slot is free when its lease is over, and no sooner.
    with sampled(dsn) as seen:
        stuck = sleep.apply_async((60,), tenant="acme", max_attempts=1)
        row = wait_status(sql, stuck.id, "running")
        (hit,) = [one for one in both if row["lease_owner"].startswith(one.node)]
        following = sleep.apply_async((0.1,), tenant="acme")
        eventually(
            lambda: sql("SELECT 1 FROM jobs WHERE id = %s AND reason = 'tenant_running_limit'", following.id), 10
        )
        hit.kill()
        wait_status(sql, following.id, "succeeded", timeout=20)
        assert wait_status(sql, stuck.id, "failed")["reason"] == "max_attempts"
    assert max(seen) == 1
    assert_invariants(sql, provider)
