"""A message moves its own row alone, and only by what the row says of it; anything else is refused, counted, logged."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import pytest
import redis
from celery import Celery

from celery_safe_effects.glue.envelope import MARK, arguments_digest
from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support import poison_tasks
from tests.support.brokers import Broker
from tests.support.checks import assert_ledger, assert_log, job, wait_status
from tests.support.faults2 import counted
from tests.support.processes import Workers
from tests.support.services import Sql

CHARGE, BODY = "tests.charge", "tests.charge_plain"


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    """Whose messages are easily forged."""
    return redis_broker


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    return {**app_conf, "imports": ["tests.support.poison_tasks"], "accept_content": ["json", "pickle"]}


@pytest.fixture
def app(app: Celery) -> Celery:
    poison_tasks.add_tasks(app)
    return app


def with_args(message: dict[str, Any], *args: Any) -> None:
    message["body"] = base64.b64encode(json.dumps([args, {}, {}]).encode()).decode()


def test_messages_that_are_forged(app: Celery, workers: Workers, broker: Broker, provider: Provider, sql: Sql) -> None:
    client = redis.Redis.from_url(broker.url)
    other = app.tasks[CHARGE].apply_async(("other", 2), countdown=3600).id
    mine = app.tasks[CHARGE].apply_async(("mine", 1), tenant="acme").id
    opaque = app.tasks["tests.taking"].apply_async(({1, 2},), serializer="pickle").id
    (raw_opaque, raw) = client.lrange("celery", 0, -1)
    client.delete("celery")
    true, true_opaque = json.loads(raw), json.loads(raw_opaque)
    assert (true["headers"]["id"], true_opaque["headers"]["id"]) == (mine, opaque)

    forged = []

    def forge(why: str, of: dict[str, Any] = true, **mark: Any) -> dict[str, Any]:
        made = copy.deepcopy(of)
        made["headers"][MARK].update(mark)
        forged.append((why, made))
        return made

    theirs = ("mine", 1_000_000)
    with_args(forge("payload_differs"), *theirs)
    with_args(forge("payload_differs", digest=arguments_digest(CHARGE, theirs, {})), *theirs)
    forge("payload_differs")["headers"]["task"] = BODY
    forge("payload_differs", digest=arguments_digest(BODY, ("mine", 1), {}))["headers"]["task"] = BODY
    (row,) = sql("SELECT seq FROM job WHERE id = %s", other)
    forge("mark_differs")["headers"]["id"] = other
    forge("payload_differs", seq=row["seq"], tenant="default")["headers"]["id"] = other
    forge("mark_differs", tenant="globex")
    forge("mark_differs", seq=true["headers"][MARK]["seq"] + 7)
    forge("mark_differs", gen=1)
    forge("no_row")["headers"]["id"] = "nobody"
    forge("mark_of_another_version", v=2)
    del forge("mark_of_another_version")["headers"][MARK]["digest"]
    unmarked = forge("payload_differs")
    del unmarked["headers"][MARK]
    with_args(unmarked, *theirs)
    # Bytes that are compared before they are unpickled.
    changed = forge("payload_differs", of=true_opaque)
    data = base64.b64decode(changed["body"])
    changed["body"] = base64.b64encode(data.replace(b"K\x02", b"K\x03")).decode()
    assert data != base64.b64decode(changed["body"])
    for number, (_, message) in enumerate(forged):
        message["properties"]["delivery_tag"] = f"forged-{number}"
        client.lpush("celery", json.dumps(message))

    # Nothing brings the right ones back meanwhile.
    later = "UPDATE job SET next_publish_at = clock_timestamp() + interval '600 s' WHERE id = ANY (%s)"
    sql(later, [mine, opaque])
    worker = workers("a", env={"C_FORCE_ROOT": "1"})
    expected = {why: sum(w == why for w, _ in forged) for why, _ in forged}
    eventually(lambda: counted(sql, "stale_deliveries") == len(forged), 20, message="each was refused and counted")
    assert {why: counted(sql, "stale_deliveries", why) for why in expected} == expected
    assert provider.received("charge") == provider.received("charge_plain") == provider.received("entered_taking") == 0
    for job_id in (mine, other, opaque):
        assert_log(sql, job_id, ["job - > queued #0"])
    assert len(sql("SELECT id FROM jobs")) == 3
    assert worker.log().count("does not belong to its row") + worker.log().count("is refused unread") >= 9

    for raw_message in (raw, raw_opaque, raw, raw_opaque):
        client.lpush("celery", raw_message)
    assert wait_status(sql, mine, "succeeded")["tenant"] == "acme"
    wait_status(sql, opaque, "succeeded")
    assert assert_ledger(provider, sql, mine)["body"]["cents"] == 1
    # Replays, however many.
    for _ in range(3):
        client.lpush("celery", raw, raw_opaque)
    eventually(lambda: counted(sql, "stale_deliveries", "finished") >= 6, 20, message="they are stale")
    assert provider.received("charge") == provider.received("entered_taking") == 1
    assert job(sql, other)["status"] == "queued"
    assert worker.running


def test_content_that_celery_does_not_accept_is_not_decoded(
    app: Celery, workers: Workers, provider: Provider, sql: Sql
) -> None:
    """The setting is Celery's: pickle that is not accepted is not even read, let alone run."""
    worker = workers("a", conf={"accept_content": ["json"], "safe_effects_max_attempts": 1})
    job_id = app.tasks["tests.taking"].apply_async((poison_tasks.Fatal(),), serializer="pickle").id
    row = wait_status(sql, job_id, "failed")
    assert "untrusted content of type pickle" in row["last_error"]
    assert provider.received("entered_unpickling") == 0
    assert worker.running
