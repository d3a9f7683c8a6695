"""pytest-celery runs on local processes: its nodes work, die and come back."""

from __future__ import annotations

from types import ModuleType

import pytest
from celery import Celery
from celery.canvas import Signature, chain, group
from celery.contrib.pytest import celery_worker as in_process_worker  # noqa: F401 - pytest-celery shadows it
from celery.contrib.testing.worker import TestWorkController
from pytest_celery import RESULT_TIMEOUT, CeleryTestSetup
from pytest_celery.vendors.worker import tasks

from tests.support.brokers import Broker


@pytest.fixture
def default_worker_tasks(default_worker_tasks: set[ModuleType]) -> set[ModuleType]:
    return default_worker_tasks | {tasks}


def _signature(setup: CeleryTestSetup, task: Signature) -> Signature:
    return task.clone(app=setup.app).set(queue=setup.worker.worker_queue)


def test_a_plain_task_goes_through(celery_setup: CeleryTestSetup) -> None:
    assert celery_setup.ready(ping=True, control=True)
    assert tasks.add.s(1, 2).apply_async(queue=celery_setup.worker.worker_queue).get(timeout=RESULT_TIMEOUT) == 3


def test_a_worker_node_is_killed_and_restarted(celery_setup: CeleryTestSetup) -> None:
    worker = celery_setup.worker
    worker.kill()
    assert worker.container.status == "exited"
    waiting = tasks.identity.s("kept").apply_async(queue=worker.worker_queue)
    worker.restart()
    assert waiting.get(timeout=RESULT_TIMEOUT) == "kept"
    worker.assert_log_exists("ready.")
    assert {p["pid"] for p in worker.get_running_processes_info(["pid"])} >= {worker.container.process.pid}


def test_a_broker_node_is_restarted(celery_setup: CeleryTestSetup) -> None:
    celery_setup.broker.restart()
    queue = celery_setup.worker.worker_queue
    steps = group(tasks.identity.si(n).set(queue=queue) for n in range(3))
    assert chain(steps, tasks.xsum.s().set(queue=queue)).apply_async().get(timeout=RESULT_TIMEOUT) == 3


@pytest.fixture
def celery_config(redis_broker: Broker) -> dict[str, str]:
    return {"broker_url": redis_broker.url, "result_backend": redis_broker.url}


def test_the_worker_in_this_process_is_still_to_be_had(
    celery_app: Celery,
    in_process_worker: TestWorkController,  # noqa: F811 - the fixture
) -> None:
    @celery_app.task
    def double(n: int) -> int:
        return 2 * n

    in_process_worker.reload()
    assert double.delay(21).get(timeout=10) == 42
