"""Faults 10 and 11: the broker is down for a while, the publisher dies before it publishes, the reply to it is lost."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.testing import LocalServer
from example_project.provider_client import Provider
from tests.support.brokers import EACH_BROKER_AND_ACKS, Broker
from tests.support.checks import assert_invariants, assert_ledger, assert_log, wait_status
from tests.support.names import CONF_VARIABLE
from tests.support.processes import ROOT, Workers, process_environment
from tests.support.services import Sql
from tests.support.tasks import create_app

pytestmark = pytest.mark.faults

ONE_RUN = [
    "job - > queued #0",
    "job queued > leased #1",
    "job leased > running #1",
    "1 - > intent_recorded #1",
    "1 intent_recorded > outcome_confirmed #1",
    "job running > succeeded #1",
]


def ran_once(sql: Sql, provider: Provider, *jobs: str) -> None:
    """Each in its first run; nothing else was done."""
    for job_id in jobs:
        assert wait_status(sql, job_id, "succeeded", "failed", timeout=40)["attempts"] == 1
        assert_log(sql, job_id, ONE_RUN)
        assert_ledger(provider, sql, job_id)
        assert provider.received("charge", f"{job_id}:1") == 1
    assert len(provider.ledger()) == len(jobs)
    assert_invariants(sql, provider)


# -- 10 ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def producer(app_conf: dict[str, Any], own_broker: LocalServer) -> Iterator[Any]:
    """An app without the result backend, which is on the broker's server here."""
    app_conf["result_backend"] = None
    made = create_app(app_conf)
    yield made
    own_broker.start()
    made.safe_effects.close()
    made.close()


@EACH_BROKER_AND_ACKS
def test_fault_10_the_broker_is_down_for_twenty_enqueues(
    producer: Any, workers: Workers, own_broker: LocalServer, provider: Provider, sql: Sql, acks_late: bool
) -> None:
    workers("a", acks_late=acks_late)
    own_broker.stop()

    def enqueue(number: int) -> tuple[str, float]:
        before = time.monotonic()
        found = producer.tasks["tests.charge"].delay("cus_1", number).id
        return found, time.monotonic() - before

    # Celery's own policy for publishing tries four times within 0.6 s; the rest is the machine's.
    answers = [enqueue(number) for number in range(5)]
    assert max(took for _, took in answers) < 3, answers
    with ThreadPoolExecutor(10) as pool:
        answers += pool.map(enqueue, range(5, 20))
    # Ten callers share two connections here.
    assert median(took for _, took in answers) < 3
    assert max(took for _, took in answers) < 10
    jobs = [job_id for job_id, _ in answers]
    assert [row["status"] for row in sql("SELECT status FROM jobs")] == ["queued"] * 20
    own_broker.start()
    ran_once(sql, provider, *jobs)


# -- 11 ----------------------------------------------------------------------------------------------------------------

DYING = """
import json, os, signal, sys
from tests.support.tasks import create_app
app = create_app(json.loads(os.environ[sys.argv[1]]))
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
_ = app.amqp.send_task_message
app.safe_effects.publisher.wire.send = die
print(app.tasks["tests.charge"].apply_async(("cus_1", 500), task_id="the-job").id)
"""


@EACH_BROKER_AND_ACKS
def test_fault_11_the_publisher_dies_or_does_not_hear(
    app: Celery,
    app_conf: dict[str, Any],
    workers: Workers,
    broker: Broker,
    provider: Provider,
    sql: Sql,
    acks_late: bool,
) -> None:
    env = process_environment(app_conf, provider)
    done = subprocess.run(
        [sys.executable, "-c", DYING, CONF_VARIABLE],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert json.dumps(sql("SELECT id, status FROM jobs")) == '[{"id": "the-job", "status": "queued"}]'
    assert broker.depth() == 0

    wire = app.safe_effects.publisher.wire
    _ = app.amqp.send_task_message
    really = wire.send

    def unheard(*args: Any, **options: Any) -> Any:
        really(*args, **options)
        raise ConnectionResetError("the reply is lost")

    wire.send = unheard
    result = app.tasks["tests.charge"].delay("cus_2", 500)
    wire.send = really
    workers("a", acks_late=acks_late)
    ran_once(sql, provider, "the-job", result.id)
    assert result.get(timeout=10)
    assert app.AsyncResult("the-job").get(timeout=10)
