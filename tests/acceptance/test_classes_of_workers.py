"""Typed and class-based tasks, and `task_cls=SafeTask`, on workers of two apps that share a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import celery
import pytest
from celery import Celery
from celery.result import AsyncResult

from celery_safe_effects.store import migrate
from celery_safe_effects.testing import WorkerProcess, eventually
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.checks import assert_invariants, job, log, wait_status
from tests.support.names import PROVIDER_VARIABLE
from tests.support.processes import ROOT, process_environment
from tests.support.services import Sql

Start = Callable[..., WorkerProcess]


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    """What a class does is no matter of the broker's."""
    return redis_broker


@pytest.fixture
def apps(
    app_conf: dict[str, Any], database_url: str, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Celery, Celery]]:
    """Both apps as a producer has them."""
    monkeypatch.setenv(PROVIDER_VARIABLE, provider.url)
    from tests.support import class_tasks

    migrate.upgrade(database_url, schema=class_tasks.SCHEMA)
    made = class_tasks.create(app_conf)
    yield made
    for one in made:
        one.safe_effects.close()
        one.close()


@pytest.fixture
def start(
    app_conf: dict[str, Any], provider: Provider, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Start]:
    """Starts a worker of one of the apps; failures show its log."""
    made: list[WorkerProcess] = []

    def begin(which: str, ready: bool = True, **conf: Any) -> WorkerProcess:
        process = WorkerProcess(
            f"tests.support.class_tasks:{which}",
            name=which,
            env=process_environment({**app_conf, **conf}, provider),
            concurrency=1,
            cwd=ROOT,
            log_path=tmp_path / f"{which}.log",
        )
        made.append(process)
        process.start(ready=ready)
        return process

    yield begin
    for process in made:
        process.kill()


def hooks(provider: Provider, job_id: str, *but: str) -> list[tuple[str, str]]:
    """What ran for a job, and what its row said then."""
    rows = [row["body"] for row in provider.ledger(kind="hook")]
    return [(row["what"], row["status"]) for row in rows if row["job"] == job_id and row["what"] not in but]


@contextmanager
def told(provider: Provider, result: AsyncResult[Any], *wanted: tuple[str, str]) -> Iterator[None]:
    yield

    def seen() -> bool:
        assert hooks(provider, result.id, "accepted") == list(wanted)
        return True

    eventually(seen, 10)


START = [("before_start", "running"), ("context", "")]


def test_classes_hooks_and_types(apps: tuple[Celery, Celery], start: Start, provider: Provider, sql: Sql) -> None:
    app, other = apps
    first = start("app")
    bill = app.tasks["classes.bill"]

    done = bill.delay("cus_1")
    row = wait_status(sql, done.id, "succeeded")
    (charge,) = provider.ledger(key=f"{done.id}:1")
    assert done.get(timeout=10) == [charge["ref"], "usd"]
    assert row["outcome_ref"] == charge["ref"]
    assert sql("SELECT max_attempts FROM job WHERE id = %s", done.id) == [{"max_attempts": 4}]
    with told(provider, done, *START, ("on_success", "succeeded"), ("after_return SUCCESS", "succeeded")):
        # By the main process, beside what the child does.
        eventually(lambda: ("accepted", "") in hooks(provider, done.id), 10)
    failed, retried = bill.delay("cus_2", how="fails"), bill.delay("cus_3", how="retries")
    assert wait_status(sql, failed.id, "failed")["reason"] == "error"
    wait_status(sql, retried.id, "succeeded")
    with told(provider, failed, *START, ("on_failure", "failed"), ("after_return FAILURE", "failed")):
        pass
    with told(
        provider,
        retried,
        *START,
        ("on_retry", "queued"),
        *START,
        ("on_success", "succeeded"),
        ("after_return SUCCESS", "succeeded"),
    ):
        assert job(sql, retried.id)["attempts"] == 2

    dear = app.tasks["classes.dear"].delay("cus_4")
    wait_status(sql, dear.id, "succeeded")
    (charge,) = provider.ledger(key=f"{dear.id}:1")
    assert (dear.get(timeout=10), charge["body"]["cents"]) == (["dear", charge["ref"], "chf"], 500)

    # A parked job runs none of the hooks of an end before its verdict, and then those of its end.
    provider.control(kind="charge", drop_reply=True, times=1)
    parked = bill.delay("cus_5")
    wait_status(sql, parked.id, "succeeded", timeout=30)
    assert "job running > unknown #1" in " ".join(log(sql, parked.id))
    with told(provider, parked, *START, *START, ("on_success", "succeeded"), ("after_return SUCCESS", "succeeded")):
        assert len(provider.ledger(key=f"{parked.id}:1")) == 1

    added = app.tasks["classes.add"].delay(1)
    assert (added.get(timeout=10), job(sql, added.id)["status"]) == (3, "succeeded")
    assert "celery.chord_unlock" in app.tasks
    assert not [name for name in app.safe_effects.task_names() if name.startswith("celery")]

    if celery.__version__ >= "5.6":  # 5.5 reads no annotations that are text
        typed = app.tasks["classes.typed"]
        good, bad = typed.delay({"number": "o-1", "cents": "5"}), typed.delay({"number": "o-2"})
        wait_status(sql, good.id, "succeeded")
        (charge,) = provider.ledger(key=f"{good.id}:1")
        assert (good.get(timeout=10), charge["body"]["cents"]) == ({"ref": charge["ref"]}, 5)
        assert "ValidationError" in wait_status(sql, bad.id, "failed")["last_error"]
        assert provider.ledger(key=f"{bad.id}:1") == []

    assert_invariants(sql, provider)

    # The other app in the same process: its jobs stand in its own schema, and its own worker runs them.
    start("second")
    here = app.tasks["workers.shared"].delay("cus_6")
    child = app.tasks["classes.sends"].delay("cus_7").get(timeout=10)
    assert here.get(timeout=10)[0] == "first"
    assert AsyncResult(child, app=other).get(timeout=10)[0] == "second"
    assert sql("SELECT status FROM second.jobs WHERE id = %s", child) == [{"status": "succeeded"}]
    assert sql("SELECT 1 FROM jobs WHERE id = %s", child) == []
    assert len(provider.ledger(key=f"{child}:1")) == 1
    assert first.running


def test_a_request_that_would_fail_open_jobs_stops_the_worker_at_its_start(
    apps: tuple[Celery, Celery], start: Start
) -> None:
    worker = start("app", ready=False, tests_foreign_request=True)
    eventually(lambda: not worker.running, 30, message="it does not start")
    assert "Request Foreign of its class Requesting must derive from" in worker.log()
