"""Producers in other languages: messages made by hand, as sparse as Celery takes them."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from kombu import Connection, Producer

from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.checks import assert_invariants, job, log, wait_status
from tests.support.processes import Workers
from tests.support.services import Sql

TASK = "tests.charge"
ONE_RUN = [
    "job - > queued #0",
    "job queued > leased #1",
    "job leased > running #1",
    "1 - > intent_recorded #1",
    "1 intent_recorded > outcome_confirmed #1",
    "job running > succeeded #1",
]


@pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
def broker(request: pytest.FixtureRequest) -> Broker:
    found: Broker = request.getfixturevalue(f"{request.param}_broker")
    return found


def publish(broker: Broker, body: Any, headers: dict[str, Any] | None, **properties: Any) -> None:
    """Send what a client in another language sends."""
    with Connection(broker.url) as connection, connection.channel() as channel:
        Producer(channel).publish(
            body if isinstance(body, str) else json.dumps(body),
            routing_key="celery",
            headers=headers,
            content_type="application/json",
            content_encoding="utf-8",
            **properties,
        )


def protocol_2(customer: str) -> dict[str, tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Messages by name: body, headers, properties; each charges a customer of its own."""
    full = {"lang": "go", "root_id": None, "parent_id": None, "group": None, "retries": 0, "timelimit": [None, None]}

    def args(name: str) -> list[Any]:
        return [f"{customer} {name}", 5]

    def headers(**more: Any) -> dict[str, Any]:
        return {"task": TASK, "id": str(uuid4()), **more}

    return {
        "sparse": ([args("sparse"), {}, {}], headers(), {}),
        "null embed": ([args("null embed"), {}, None], headers(), {}),
        "null kwargs": ([args("null kwargs"), {}, {"callbacks": None}], headers(**full), {}),
        "keywords": ([[], {"customer": f"{customer} keywords", "cents": 5}, {}], headers(lang="js"), {}),
        "own id": ([args("own id"), {}, {}], headers(id=f"order/{customer}"), {"correlation_id": "c"}),
        "eta": ([args("eta"), {}, {}], headers(eta="2026-01-01T00:00:00Z", expires="2199-01-01T00:00:00+00:00"), {}),
        "naive": ([args("naive"), {}, {}], headers(eta="2026-01-01T00:00:00"), {}),
        "nonsense": ([args("nonsense"), {}, {}], headers(safe_effects="yes", tenant="acme"), {"priority": 3}),
    }


def test_messages_made_by_hand(app: Celery, workers: Workers, broker: Broker, sql: Sql, provider: Provider) -> None:
    """Each has a row before it is acknowledged, runs once, and is told to Celery's result backend."""
    workers("a", acks_late=broker.kind == "rabbitmq")
    messages = protocol_2("cus")
    for body, headers, properties in messages.values():
        publish(broker, body, headers, **properties)
    old = str(uuid4())
    publish(broker, {"id": old, "task": TASK, "args": ["cus protocol 1", 5], "kwargs": {}, "retries": 0}, None)
    ids = {name: headers["id"] for name, (_, headers, _) in messages.items()} | {"protocol 1": old}
    for name, job_id in ids.items():
        eventually(lambda: sql("SELECT 1 FROM jobs WHERE id = %s", job_id), 15, message=name)  # noqa: B023 - now
        wait_status(sql, job_id, "succeeded")
        assert log(sql, job_id) == ONE_RUN, name
        row = job(sql, job_id)
        assert row["tenant"] == "default"
        (charged,) = provider.ledger(key=f"{job_id}:1")
        assert charged["body"]["customer"] == f"cus {name}"
        assert eventually(lambda: app.AsyncResult(job_id).state == "SUCCESS", 10), name  # noqa: B023 - now
    assert len(provider.ledger()) == len(ids)
    assert_invariants(sql, provider)


def test_the_same_message_twice(app: Celery, workers: Workers, broker: Broker, sql: Sql, provider: Provider) -> None:
    """A producer that is not sure sends again: one id is one job, also with other arguments; the others count."""
    workers("a")
    job_id = str(uuid4())
    for cents in (5, 5, 6):
        publish(broker, [["cus", cents], {}, {}], {"task": TASK, "id": job_id})
    eventually(lambda: sum(stale(sql).values()) == 2, 15, message="two were stale")
    wait_status(sql, job_id, "succeeded")
    (row,) = provider.ledger()
    assert row["body"]["cents"] == 5
    assert log(sql, job_id) == ONE_RUN
    assert_invariants(sql, provider)


def test_what_celery_does_not_take(app: Celery, workers: Workers, broker: Broker, sql: Sql, provider: Provider) -> None:
    """Malformed messages are Celery's to refuse; the worker and the messages behind them go on, nothing is a job."""
    workers("a")
    publish(broker, "no json", {"task": TASK, "id": str(uuid4())})
    publish(broker, [["cus", 5], {}, {}], {"task": TASK})
    publish(broker, [["cus", 5], {}, {}], {"task": TASK, "id": 5})
    publish(broker, {"task": TASK, "args": ["cus", 5], "kwargs": {}}, None)
    bodies: list[Any] = [[["cus", 5]], ["cus", {}, {}], [["cus", 5], None, {}], [["cus", 5], {}, [1]], {"args": []}, 5]
    for body in bodies:
        publish(broker, body, {"task": TASK, "id": str(uuid4())})
    publish(broker, {"args": ["cus", 5]}, None)
    publish(broker, [["cus", 5], {}, {}], {"task": TASK, "id": str(uuid4()), "eta": "tomorrow"})
    good = str(uuid4())
    publish(broker, [["cus", 5], {}, {}], {"task": TASK, "id": good})
    eventually(lambda: sql("SELECT 1 FROM jobs WHERE id = %s", good), 15)
    wait_status(sql, good, "succeeded")
    # What has an id and cannot be read may be readable for another worker: it is kept, and bounded.
    others = "SELECT * FROM jobs WHERE id <> %s AND reason IS DISTINCT FROM 'unreadable'"
    assert sql(others, good) == []
    assert len(provider.ledger()) == 1


def stale(sql: Sql) -> dict[str, int]:
    """The counted deliveries that were not allowed to run, by why."""
    return {r["label"]: r["value"] for r in sql("SELECT label, value FROM counter WHERE name = 'stale_deliveries'")}
