"""Jobs that fail before they have begun: each costs an attempt, so that none of them fails for ever."""

from __future__ import annotations

import re
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from kombu import Connection, Producer

from celery_safe_effects.testing import WorkerProcess, eventually
from example_project.provider_client import Provider
from tests.support import poison_tasks
from tests.support.brokers import EACH_BROKER_AND_ACKS, Broker
from tests.support.checks import assert_log, job, wait_status
from tests.support.poison_tasks import Fatal, Unreadable
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults

RUNS = 2
ENV = {"C_FORCE_ROOT": "1"}  # a root that accepts pickle is refused otherwise


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    """Pickle, which may do anything; and no message is sent twice, since what dies before its claim would run twice."""
    return {
        **app_conf,
        "imports": ["tests.support.poison_tasks"],
        "accept_content": ["json", "pickle"],
        "safe_effects_max_attempts": RUNS,
        "safe_effects_lease_ttl": 20,
        "safe_effects_republish_after": 60,
    }


@pytest.fixture
def app(app: Celery) -> Celery:
    poison_tasks.add_tasks(app)
    return app


def unmarked(app: Celery, broker: Broker, body: Any, **options: Any) -> str:
    """A message of a producer without the library; its id."""
    job_id = str(uuid4())
    with Connection(broker.url) as connection, connection.channel() as channel:
        Producer(channel).publish(
            body,
            routing_key="celery",
            declare=[app.amqp.queues["celery"]],
            **(options or {"serializer": "pickle"}),
            headers={"id": job_id, "task": "tests.taking", "lang": "py", "retries": 0},
            correlation_id=job_id,
        )
    return job_id


@EACH_BROKER_AND_ACKS
def test_a_message_that_ends_the_worker(
    app: Celery, workers: Workers, broker: Broker, provider: Provider, sql: Sql, acks_late: bool
) -> None:
    """Celery decodes in the main process: the whole worker goes, twice and no more, whoever sent the message."""
    taking = app.tasks["tests.taking"]
    if broker.kind == "redis":
        job_id = taking.apply_async((Fatal(),), serializer="pickle").id
    else:
        job_id = unmarked(app, broker, ([Fatal()], {}, {}))
    worker = workers("a", acks_late=acks_late, ready=False, env=ENV)

    def over() -> bool:
        if not worker.running:
            worker.start(ready=False)
        return bool(sql("SELECT 1 FROM jobs WHERE id = %s AND status = 'failed'", job_id))

    eventually(over, 60, interval=0.1, message="it has ended")
    assert provider.received("entered_unpickling") == RUNS
    row = job(sql, job_id)
    assert (row["reason"], row["attempts"]) == ("max_attempts", 0)
    assert "ended each process that read it" in row["last_error"]
    assert_log(sql, job_id, ["job - > queued #0", "job queued > failed #0 (max_attempts)"])
    assert eventually(lambda: app.AsyncResult(job_id).state == "FAILURE", 15)
    # What is pickled and harmless runs, and is no try any more.
    good = taking.apply_async((b"\x00",), serializer="pickle").id
    assert wait_status(sql, good, "succeeded")["attempts"] == 1
    assert sql("SELECT tried FROM job WHERE id = %s", good) == [{"tried": 0}]
    assert worker.running
    eventually(lambda: broker.depth() == 0, 10)
    assert eventually(lambda: not sql("SELECT id FROM jobs WHERE settled_at IS NULL"), 10)


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_everything_else_that_may_fail_before_the_body(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, broker: Broker, app_conf: dict[str, Any]
) -> None:
    worker = workers("a", concurrency=2, env=ENV)
    taking, send = app.tasks["tests.taking"], app.send_task
    unreadable = taking.apply_async((Unreadable(),), serializer="pickle").id
    refused = taking.apply_async(("yaml",), serializer="yaml").id
    prerun = send("tests.dies_in_prerun").id
    imports = send("tests.imports", ("tests.support.fatal_module",)).id
    hook = send("tests.does_not_start").id
    whole = send("tests.whole_does_not_start").id
    binding = send("tests.taking", (1, 2, 3)).id
    plain = unmarked(app, broker, ([Unreadable()], {}, {}))
    garbled = unmarked(app, broker, b"[[1], {", content_type="application/json", content_encoding="utf-8")
    good = taking.delay("good").id

    for job_id, words, attempts in (
        (unreadable, "this cannot be read", 0),
        (refused, "untrusted content of type yaml", 0),
        (plain, "this cannot be read", 0),
        (garbled, "DecodeError", 0),
        (prerun, "worker_lost", 0),
        # Of a process that dies before its parent has read which job it took, the lease tells.
        (imports, "worker_lost|lease_expired", RUNS),
    ):
        row = wait_status(sql, job_id, "failed", timeout=60)
        assert (row["reason"], row["attempts"]) == ("max_attempts", attempts), row
        assert re.search(words, row["last_error"]), row
    # These come to their claim, so that they are runs like any other; and what they raise is the user's own.
    for job_id, words in ((hook, "LookupError: not today"), (binding, "TypeError")):
        row = wait_status(sql, job_id, "failed")
        assert (row["reason"], row["attempts"]) == ("error", 1)
        assert words in row["last_error"]
    assert wait_status(sql, whole, "unknown")["attempts"] == 1
    assert provider.received("entered_before_start") == 2
    assert provider.received("entered_prerun") == RUNS
    assert provider.received("entered_unreadable") == 2 * RUNS
    assert wait_status(sql, good, "succeeded")["attempts"] == 1
    for job_id in (unreadable, refused, plain, garbled, prerun, imports, hook, binding):
        assert eventually(lambda: app.AsyncResult(job_id).state == "FAILURE", 20), job_id  # noqa: B023
    # Each delivery that came to nothing was put off a little longer.
    assert worker.running
    assert provider.received("entered_taking") == 1


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_task_class_that_cannot_be_made_keeps_the_worker_from_starting(
    tmp_path: Any, app_conf: dict[str, Any], broker: Broker
) -> None:
    (tmp_path / "broken_app.py").write_text(
        "from celery import Celery\n"
        "from celery_safe_effects import SafeEffects, SafeTask\n"
        f"app = Celery('broken', broker={broker.url!r})\n"
        f"app.conf.safe_effects_database_url = {app_conf['safe_effects_database_url']!r}\n"
        "SafeEffects(app)\n"
        "class Broken(SafeTask):\n"
        "    abstract = True\n"
        "    def __init__(self):\n"
        "        raise RuntimeError('it cannot be made')\n"
        "@app.task(base=Broken, effects=[])\n"
        "def task(): pass\n"
    )
    worker = WorkerProcess("broken_app:app", name="broken", cwd=tmp_path, log_path=tmp_path / "log")
    worker.start(ready=False)
    try:
        assert worker.wait(timeout=30) != 0
        assert "it cannot be made" in worker.log()
    finally:
        worker.kill()
