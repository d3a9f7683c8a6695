"""Fault 12: the broker forgets everything, is full, or comes back with what it held long ago."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_safe_effects.testing import EmbeddedRedis, LocalServer, RabbitMQServer, eventually
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.checks import assert_invariants, wait_status
from tests.support.faults2 import counted
from tests.support.processes import Workers
from tests.support.services import Sql
from tests.support.tasks import create_app

pytestmark = pytest.mark.faults

JOBS = 100
BUSY = 8
ALL = JOBS + 2 * BUSY


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    """The result backend would be on the server that is destroyed."""
    return {**app_conf, "result_backend": None, "safe_effects_lease_ttl": 5}


@pytest.fixture
def producer(app_conf: dict[str, Any], own_broker: LocalServer) -> Iterator[Any]:
    made = create_app(app_conf)
    yield made
    own_broker.start()
    made.safe_effects.close()
    made.close()


def enqueue(producer: Any, number: int) -> list[str]:
    """Jobs whose messages are in the broker."""
    charge = producer.tasks["tests.charge"]
    with producer.producer_or_acquire() as held:
        return [charge.apply_async(("cus", n), producer=held).id for n in range(number)]


def all_succeeded(sql: Sql, number: int) -> None:
    def count() -> bool:
        rows = sql("SELECT status, count(*) AS n FROM jobs GROUP BY status")
        assert {row["status"]: row["n"] for row in rows} == {"succeeded": number}
        return True

    eventually(count, 60, interval=0.2, message=f"all {number} have succeeded")


@pytest.mark.parametrize(("broker", "acks_late"), [pytest.param("redis", False, id="redis-early")], indirect=["broker"])
def test_fault_12_redis_forgets_is_full_and_remembers_what_is_over(
    producer: Any,
    workers: Workers,
    broker: Broker,
    own_broker: LocalServer,
    provider: Provider,
    sql: Sql,
    tmp_path: Path,
    acks_late: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert isinstance(own_broker, EmbeddedRedis)
    jobs = enqueue(producer, JOBS)
    assert broker.depth() == JOBS
    copy = own_broker.snapshot(tmp_path / "snapshot")
    own_broker.command("FLUSHALL")
    worker = workers("a", acks_late=acks_late, concurrency=2)
    all_succeeded(sql, JOBS)
    assert sorted(row["key"] for row in provider.ledger()) == sorted(f"{job_id}:1" for job_id in jobs)

    # And under the feet of a worker that is busy, and of a producer.
    provider.control(kind="charge", delay_before=0.2)
    jobs += enqueue(producer, BUSY)
    eventually(lambda: len(provider.ledger()) > JOBS, 20, message="the worker is busy with them")
    own_broker.command("FLUSHALL")
    jobs += enqueue(producer, BUSY)
    all_succeeded(sql, ALL)
    provider.control(kind="charge", delay_before=None)

    # Full: what is accepted is accepted, and comes out when there is room.
    own_broker.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    own_broker.command("CONFIG", "SET", "maxmemory", 1)
    late = enqueue(producer, 3)
    assert [wait_status(sql, one, "queued", timeout=0)["attempts"] for one in late] == [0, 0, 0]
    assert broker.depth() == 0
    own_broker.command("CONFIG", "SET", "maxmemory", 0)
    all_succeeded(sql, ALL + 3)

    # An old snapshot holds a hundred messages of jobs that are over.
    before = [sql("SELECT * FROM jobs ORDER BY id"), sql("SELECT * FROM transitions ORDER BY id")]
    eventually(lambda: not sql("SELECT 1 FROM jobs WHERE settled_at IS NULL"), 20)
    before[0] = sql("SELECT * FROM jobs ORDER BY id")
    own_broker.restore(copy)
    eventually(lambda: counted(sql, "stale_deliveries", "finished") >= JOBS, 40, message="all of them were looked at")
    assert eventually(lambda: broker.depth() == 0, 10)
    assert [sql("SELECT * FROM jobs ORDER BY id"), sql("SELECT * FROM transitions ORDER BY id")] == before
    assert len(provider.ledger()) == provider.received("charge") == ALL + 3
    assert worker.running
    assert_invariants(sql, provider)


@pytest.mark.rabbitmq
@pytest.mark.parametrize(
    ("broker", "acks_late"), [pytest.param("rabbitmq", True, id="rabbitmq-late")], indirect=["broker"]
)
def test_fault_12_the_vhost_is_deleted_and_made_anew(
    producer: Any,
    workers: Workers,
    broker: Broker,
    own_broker: LocalServer,
    provider: Provider,
    sql: Sql,
    acks_late: bool,
) -> None:
    """With nobody connected, and under the feet of a worker and a producer, idle and busy."""
    assert isinstance(own_broker, RabbitMQServer)
    vhost = broker.url.rpartition("/")[2]

    def anew() -> None:
        own_broker.ctl("delete_vhost", vhost)
        own_broker.add_vhost(vhost)

    jobs = enqueue(producer, 10)
    assert eventually(lambda: broker.depth() == 10, 5)
    anew()
    assert broker.depth() == 0
    worker = workers("a", acks_late=acks_late)
    all_succeeded(sql, 10)
    anew()
    jobs += enqueue(producer, 3)
    all_succeeded(sql, 13)
    # While it is busy, and some wait in the queue and in the worker.
    provider.control(kind="charge", delay_before=0.3)
    jobs += enqueue(producer, BUSY)
    eventually(lambda: len(provider.ledger()) > 13, 20, message="the worker is busy with them")
    anew()
    jobs += enqueue(producer, BUSY)
    all_succeeded(sql, 13 + 2 * BUSY)
    assert worker.running
    assert sorted(row["key"] for row in provider.ledger()) == sorted(f"{job_id}:1" for job_id in jobs)
    assert provider.received("charge") == 13 + 2 * BUSY
    assert_invariants(sql, provider)
