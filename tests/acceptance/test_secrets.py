"""A redacted argument stands in the job's message, which needs it, and nowhere else."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from celery.exceptions import TimeoutError as NoResult

from celery_safe_effects import SafeTask
from celery_safe_effects.errors import ConfigurationError
from celery_safe_effects.testing import eventually
from tests.support import secret_tasks
from tests.support.brokers import Broker
from tests.support.checks import wait_status
from tests.support.processes import Workers
from tests.support.services import Sql

CARD, PIN = "4242-4242-4242-4242", 735501
HOWS = {
    "ok": "succeeded",
    "refused": "failed",
    "unknown": "unknown",
    "body": "failed",
    "cause": "failed",
    "retry": "succeeded",
}


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    """Whose every byte can be read."""
    return redis_broker


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    return {**app_conf, "imports": ["tests.support.secret_tasks"], "task_send_sent_event": True}


@pytest.fixture
def app(app: Celery) -> Celery:
    secret_tasks.add_tasks(app)
    return app


@pytest.fixture
def events(app: Celery) -> Iterator[list[dict[str, Any]]]:
    """Everything that monitors are told."""
    seen: list[dict[str, Any]] = []
    ready, over = threading.Event(), threading.Event()

    def listen() -> None:
        with app.connection_for_read() as connection:
            receiver = app.events.Receiver(connection, handlers={"*": seen.append})
            with receiver.consumer_context() as (own, _, _):
                while not over.is_set():
                    with contextlib.suppress(TimeoutError):
                        own.drain_events(timeout=0.2)
                    ready.set()  # Redis is asked for events at the first look

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    assert ready.wait(10)
    yield seen
    over.set()
    thread.join(10)


def everything(broker: Broker) -> str:
    """What the broker and the result backend hold."""
    found = []
    with redis.Redis.from_url(broker.url) as client:
        for key in client.scan_iter("*"):
            kind = client.type(key)
            if kind == b"string":
                found.append(client.get(key))
            elif kind == b"list":
                found += client.lrange(key, 0, -1)
            elif kind == b"hash":
                found += client.hvals(key)
    return "\n".join(one.decode("utf-8", "replace") for one in found)


def tables(sql: Sql) -> Iterator[tuple[str, str]]:
    """Each row of each table, the envelopes aside."""
    names = sql("SELECT table_name AS name FROM information_schema.tables WHERE table_schema = 'safe_effects'")
    for table in [row["name"] for row in names]:
        for row in sql(f"SELECT (to_jsonb(t) - 'envelope')::text AS all FROM {table} t"):
            yield table, row["all"]


def test_a_secret_is_in_the_message_and_nowhere_else(
    app: Celery, workers: Workers, broker: Broker, sql: Sql, events: list[dict[str, Any]]
) -> None:
    pays, whole = app.tasks["tests.pays"], app.tasks["tests.pays_whole"]
    jobs = {how: pays.apply_async((CARD, how), {"pins": [PIN]}).id for how in HOWS}
    lost = whole.delay(CARD, "body").id
    done = whole.delay(how="ok", card=CARD).id
    messages = redis.Redis.from_url(broker.url).lrange("celery", 0, -1)
    assert len(messages) == len(HOWS) + 2
    for message in messages:
        headers = json.loads(message)["headers"]
        assert CARD not in json.dumps(headers)
        assert str(PIN) not in json.dumps(headers)
        assert "***" in headers["argsrepr"] + headers["kwargsrepr"]
    worker = workers("a", extra=("--loglevel=DEBUG",))
    for how, status in HOWS.items():
        wait_status(sql, jobs[how], status)
    wait_status(sql, done, "succeeded")
    wait_status(sql, lost, "unknown")
    eventually(lambda: not sql("SELECT 1 FROM jobs WHERE status IN ('succeeded','failed') AND settled_at IS NULL"), 15)
    ended = {"task-succeeded", "task-failed", "task-unknown"}
    wanted = {*jobs.values(), done, lost}
    eventually(lambda: {e["uuid"] for e in events if e["type"] in ended} >= wanted, 15, message="monitors were told")

    places = {
        "the log": worker.log(),
        "the backend and the broker": everything(broker),
        "events": json.dumps(events, default=str),
        **{f"{table} {number}": text for number, (table, text) in enumerate(tables(sql))},
    }
    for place, text in places.items():
        for secret in (CARD, str(PIN)):
            at = text.find(secret)
            assert at < 0, f"{secret} in {place}: …{text[max(0, at - 200) : at + 60]}…"
    # Where it has to be, and what is told instead.
    (row,) = sql("SELECT count(*) AS n FROM job WHERE convert_from(envelope, 'utf8') LIKE %s", f"%{CARD}%")
    assert row["n"] == len(HOWS) + 2
    told = {how: sql("SELECT last_error FROM jobs WHERE id = %s", job)[0]["last_error"] for how, job in jobs.items()}
    assert "card *** is refused" in told["refused"]
    assert told["body"] == "KeyError: '***'"
    assert told["cause"] == "RuntimeError: it did not work"
    with pytest.raises(KeyError, match=r"\*\*\*"):
        app.AsyncResult(jobs["body"]).get(timeout=10)
    with pytest.raises(NoResult):
        app.AsyncResult(jobs["unknown"]).get(timeout=0.5)
    (operation,) = sql("SELECT args, error FROM operations WHERE job_id = %s", jobs["refused"])
    assert operation["args"] == {"how": "refused"}
    assert operation["error"]["args"] == ["card *** is refused", {"number": "***"}]


@pytest.mark.parametrize("redact", ["card", ["nothing"], [5]])
def test_a_redaction_that_means_nothing_is_refused(app: Celery, redact: Any) -> None:
    def wrong(card: str) -> None: ...

    made = app.task(base=SafeTask, shared=False, name="tests.wrong", effects=[], redact=redact)(wrong)
    with pytest.raises(ConfigurationError, match="redact"):
        made.run("x")
