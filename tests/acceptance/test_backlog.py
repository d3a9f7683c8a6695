"""A long queue is no sign of loss: hardly a message is published twice, and one that is lost in it is found.

`SAFE_EFFECTS_TEST_BACKLOG=100000` runs it at the size that the design names.
"""

from __future__ import annotations

import base64
import json
import os
import time
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import redis
from celery import Celery

from celery_safe_effects.glue.envelope import arguments_digest
from celery_safe_effects.testing import eventually
from tests.support.brokers import Broker
from tests.support.processes import Beats, Workers
from tests.support.services import Sql

pytestmark = pytest.mark.slow

JOBS = int(os.environ.get("SAFE_EFFECTS_TEST_BACKLOG", "3000"))
LOST = 5
"""Messages that never reach the broker, spread over the queue."""
RATE = 60.0
"""Jobs a second that any machine manages."""


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    """Whose messages can be written in bulk."""
    return redis_broker


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    """A queue that is longer than `republish_after` many times over."""
    app_conf.update(safe_effects_republish_after=2, task_ignore_result=True, worker_send_task_events=False)
    return app_conf


def fill(app: Celery, broker: Broker, dsn: str, jobs: int) -> list[str]:
    """Rows, and the message of each in the broker, save for `LOST` of them.

    Returns:
        the ids of those without a message.
    """
    task = app.tasks["tests.pure"]
    model = task.apply_async((0,)).id
    client = redis.Redis.from_url(broker.url)
    (raw,) = client.lrange("celery", 0, -1)
    client.delete("celery")
    message = json.loads(raw)
    ids = [str(uuid4()) for _ in range(jobs)]
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET search_path = safe_effects")
        (envelope,) = connection.execute("SELECT envelope FROM job WHERE id = %s", (model,)).fetchone() or (b"",)
        connection.execute("UPDATE job SET cancel_requested_at = now(), status = 'cancelled', settle = false")
        columns = "id, task, args_digest, queue, envelope, settle, max_attempts, published_at, publishes"
        with connection.cursor().copy(f"COPY job ({columns}) FROM STDIN".encode()) as copy:
            start = datetime.now(timezone.utc)
            for number, one in enumerate(ids):
                digest = arguments_digest("tests.pure", [number], {})
                published = start - timedelta(microseconds=jobs - number)
                data = _changed(bytes(envelope).decode(), model, one, number).encode()
                copy.write_row((one, "tests.pure", digest, "celery", data, False, 5, published, 1))
        rows = connection.execute("SELECT id, seq, args_digest FROM job WHERE status = 'queued'").fetchall()
    facts = {one: (seq, digest) for one, seq, digest in rows}
    lost = [ids[jobs * (n + 1) // (LOST + 1)] for n in range(LOST)]
    with client.pipeline(transaction=False) as pipe:
        for number, one in enumerate(ids):
            seq, digest = facts[one]
            mark = {**message["headers"]["safe_effects"], "seq": seq, "digest": digest}
            copied = {**message, "headers": {**message["headers"], "id": one, "root_id": one, "safe_effects": mark}}
            copied["body"] = base64.b64encode(_body(number).encode()).decode()
            copied["properties"] = {**message["properties"], "correlation_id": one, "delivery_tag": str(uuid4())}
            if one not in lost:
                pipe.lpush("celery", json.dumps(copied))
            if number % 1000 == 999:
                pipe.execute()
        pipe.execute()
    client.close()
    return lost


def _body(number: int) -> str:
    return json.dumps([[number], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}])


def _changed(envelope: str, model: str, one: str, number: int) -> str:
    stored = json.loads(envelope.replace(model, one))
    stored["content"][2] = _body(number)
    return json.dumps(stored)


@pytest.mark.timeout(300 + JOBS / RATE)
def test_a_backlog_costs_hardly_an_extra_message(
    app: Celery, workers: Workers, beat: Beats, broker: Broker, sql: Sql, dsn: str
) -> None:
    lost = fill(app, broker, dsn, JOBS)
    assert broker.depth() == JOBS - LOST
    beat()
    workers("a", concurrency=2)
    began = time.monotonic()

    def left() -> int:
        return int(sql("SELECT count(*) AS n FROM job WHERE status IN ('queued', 'leased', 'running')")[0]["n"])

    eventually(lambda: left() == 0, 60 + JOBS / RATE, interval=0.5, message="all jobs have run")
    took = time.monotonic() - began
    extra = {row["label"]: row["value"] for row in sql("SELECT label, value FROM counter WHERE name = 'republished'")}
    print(f"{JOBS} jobs in {took:.0f} s; published again: {extra}")
    assert took > 3  # longer than republish_after: by time alone, most would have been published again
    assert sql("SELECT count(*) AS n FROM jobs WHERE status = 'succeeded'") == [{"n": JOBS}]
    assert sql("SELECT count(*) AS n FROM jobs WHERE id = ANY (%s) AND status = 'succeeded'", lost) == [{"n": LOST}]
    assert LOST <= sum(extra.values()) < LOST + JOBS / 100
