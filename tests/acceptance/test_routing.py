"""What is published again goes to where it was sent first, with everything that Celery gave it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Exchange, Queue, pools
from kombu.common import Broadcast

from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.services import Sql

TOPIC = Exchange("h_topic", type="topic")
QUEUES = ("h_default", "h_routed", "h_topic_queue", "h_prio", "h_spot", "h_by_object", "h_strict")
NOT_KEPT = {"delivery_tag", "delivery_info", "safe_effects", "application_headers"}


def create(conf: dict[str, Any], sent_by: str = "producer") -> Celery:
    """An app whose queues are as varied as an app's may be; each process has one of its own."""
    from tests.support.tasks import create_app

    made = create_app(conf)
    made.conf.task_routes = {"tests.pure": {"queue": "h_routed"}}
    made.conf.task_queues = [
        Queue("h_default", Exchange("h_default"), routing_key="h_default"),
        Queue("h_routed", Exchange("h_routed"), routing_key="h_routed"),
        Queue("h_topic_queue", TOPIC, routing_key="media.#"),
        Queue("h_prio", Exchange("h_prio"), routing_key="h_prio", queue_arguments={"x-max-priority": 10}),
        Broadcast("h_all"),
    ]
    return made


@pytest.fixture
def apps(app_conf: dict[str, Any], broker: Broker, provider: Provider) -> Iterator[tuple[Celery, Celery]]:
    """Two processes' apps: who sends, and who publishes again."""
    app_conf["task_send_sent_event"] = False
    made = create(app_conf), create(app_conf)
    yield made
    for one in made:
        one.safe_effects.close()
        one.close()
    purge(broker, *QUEUES)


def purge(broker: Broker, *queues: str) -> None:
    """Empty them; a queue that was deleted would not be declared again by a connection that has declared it."""
    with Connection(broker.url) as connection:
        for name in queues:
            with suppress(Exception), connection.channel() as channel:
                channel.queue_purge(name)


def taken(broker: Broker, queue: str) -> dict[str, Any]:
    """The one message of a queue, taken out of it."""

    def get() -> Any:
        with Connection(broker.url) as connection, connection.channel() as channel:
            message = Queue(queue, no_declare=True)(channel).get(no_ack=True)
            assert message is not None
            more = Queue(queue, no_declare=True)(channel).get(no_ack=True)
            assert more is None
            return message

    found = eventually(get, 5, message=f"a message in {queue}")
    properties = {name: value for name, value in found.properties.items() if name not in NOT_KEPT}
    headers = {name: value for name, value in found.headers.items() if name not in NOT_KEPT}
    where = (found.delivery_info["exchange"], found.delivery_info["routing_key"])
    mark = dict(found.headers["safe_effects"])
    return {
        "where": where, "properties": properties, "headers": headers, "body": found.body, "mark": mark,
        "content": (found.content_type, found.content_encoding),
    }  # fmt: skip


SPOT = Queue("h_spot", Exchange("h_spot"), routing_key="h_spot", queue_arguments={"x-max-length": 1000})
ROUTES: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "routes": ({}, "h_routed", "h_routed"),
    "queue": ({"queue": "h_prio", "priority": 6}, "h_prio", "h_prio"),
    "default": ({"queue": "h_default"}, "h_default", "h_default"),
    "topic_queue": ({"queue": "h_topic_queue"}, "h_topic_queue", "h_topic_queue"),
    "exchange": ({"exchange": "h_topic", "routing_key": "media.video"}, "h_topic_queue", "h_topic_queue"),
    "exchange_object": ({"exchange": TOPIC, "routing_key": "media.video"}, "h_topic_queue", "h_topic_queue"),
    "missing_queue": ({"queue": "h_by_object"}, "h_by_object", "h_by_object"),
    "queue_object": ({"queue": SPOT}, "h_spot", "h_spot"),
    "options": (
        {
            "queue": "h_prio", "priority": 3, "time_limit": 30, "soft_time_limit": 20, "shadow": "a_name",
            "headers": {"x-trace": "abc"}, "compression": "gzip", "delivery_mode": 1, "reply_to": "somewhere",
            "ignore_result": True, "app_id": "shop",
        },
        "h_prio",
        "h_prio",
    ),
}  # fmt: skip


def test_it_is_published_again_to_the_same_place(apps: tuple[Celery, Celery], broker: Broker, sql: Sql) -> None:
    sender, sweeper = apps
    with Connection(broker.url) as connection, connection.channel() as channel:
        sender.amqp.queues["h_topic_queue"](channel).declare()  # as its consumer does
    for route, (options, queue, lane) in ROUTES.items():
        result = sender.tasks["tests.pure"].apply_async(({"x": 1},), **options)
        first = taken(broker, queue)
        (row,) = sql("SELECT queue, priority FROM job WHERE id = %s", result.id)
        assert row == {"queue": lane, "priority": options.get("priority", 0)}, route

        assert sweeper.safe_effects.republish(result.id) == 1, route
        assert taken(broker, queue) == first, route
        assert first["properties"].get("priority", 0) == options.get("priority", 0), route


@pytest.mark.parametrize("broker", [pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)], indirect=True)
def test_a_queue_that_the_sweeping_process_would_make_otherwise(
    apps: tuple[Celery, Celery], app_conf: dict[str, Any], broker: Broker
) -> None:
    """The broker refuses such a declaration, and the message goes there all the same."""
    sender, _ = apps
    other = create({**app_conf, "task_queues": []})
    other.conf.task_queues = []
    sent = [sender.tasks["tests.pure"].apply_async((n,), queue="h_prio") for n in range(3)]
    purge(broker, "h_prio")
    pools.reset()  # another process has connections of its own, which have declared nothing yet
    assert other.safe_effects.republish(*(result.id for result in sent)) == 3
    eventually(lambda: broker.depth("h_prio") == 3, 5)
    other.safe_effects.close()
    other.close()


def test_an_exchange_that_only_the_consumer_has(app_conf: dict[str, Any], broker: Broker, sql: Sql) -> None:
    """Redis routes in the producer, by what the producer knows; what it knows stands in the row for who sends again."""
    app_conf["task_send_sent_event"] = False
    sender, other = create(app_conf), create(app_conf)
    other.conf.task_queues = [one for one in other.conf.task_queues if one.name != "h_topic_queue"]
    try:
        with Connection(broker.url) as connection, connection.channel() as channel:
            sender.amqp.queues["h_topic_queue"](channel).declare()
        pools.reset()  # as in a process that has declared nothing yet
        result = sender.tasks["tests.pure"].apply_async((1,), exchange="h_topic", routing_key="media.audio.loud")
        first = taken(broker, "h_topic_queue")
        assert sql("SELECT queue FROM job WHERE id = %s", result.id) == [{"queue": "h_topic_queue"}]
        pools.reset()
        assert other.safe_effects.republish(result.id) == 1
        assert taken(broker, "h_topic_queue") == first
    finally:
        for one in (sender, other):
            one.safe_effects.close()
            one.close()
        purge(broker, *QUEUES)


def test_a_broker_that_lost_the_queue_too(apps: tuple[Celery, Celery], broker: Broker, sql: Sql) -> None:
    """A connection declares a queue once; what is lost is declared again, or the message would go nowhere."""
    sender, _ = apps
    for route in ("routes", "topic_queue"):
        options, queue, _ = ROUTES[route]
        with Connection(broker.url) as connection, connection.channel() as channel:
            sender.amqp.queues[queue](channel).declare()
            result = sender.tasks["tests.pure"].apply_async((1,), **options)
            first = taken(broker, queue)
            if broker.kind == "redis":
                broker.purge()
            else:
                channel.queue_delete(queue)
        sql("UPDATE job SET published_at = published_at - interval '1 hour' WHERE id = %s", result.id)
        eventually(lambda: sender.safe_effects.sweep().republished, 10, 0.2)
        assert taken(broker, queue) == first, route
        assert sql("SELECT publishes FROM job WHERE id = %s", result.id) == [{"publishes": 2}]
        sender.safe_effects.cancel(result.id, "seen")


def test_an_eta_or_expiry_is_the_database_s_business(apps: tuple[Celery, Celery], broker: Broker, sql: Sql) -> None:
    """The message carries neither: nobody's clock may drop it or hold it for long."""
    sender, _ = apps
    later = datetime.now(timezone.utc) + timedelta(hours=1)
    sender.tasks["tests.pure"].apply_async((1,), expires=later)
    sent = taken(broker, "h_routed")
    assert (sent["headers"]["expires"], sent["properties"].get("expiration")) == (None, None)
    waits = sender.tasks["tests.pure"].apply_async((2,), eta=later, queue="h_strict")
    assert broker.depth("h_strict") == 0
    assert sql("SELECT eta, next_publish_at, publishes FROM job WHERE id = %s", waits.id) == [
        {"eta": later, "next_publish_at": later, "publishes": 0}
    ]


def test_a_queue_that_the_sweeping_process_does_not_have(app_conf: dict[str, Any], broker: Broker, sql: Sql) -> None:
    """`task_create_missing_queues = False`: nobody may make it, but the message finds it."""
    sender, strict = create(app_conf), create({**app_conf, "task_create_missing_queues": False})
    strict.conf.task_queues = [*strict.conf.task_queues, Queue("celery")]  # Celery 5.5 wants the default one
    sender.conf.task_queues = [
        *sender.conf.task_queues,
        Queue("h_strict", Exchange("h_strict"), routing_key="h_strict"),
    ]
    try:
        result = sender.tasks["tests.pure"].apply_async((1,), queue="h_strict")
        first = taken(broker, "h_strict")
        assert strict.safe_effects.republish(result.id) == 1
        assert taken(broker, "h_strict") == first
        with pytest.raises(KeyError):
            strict.amqp.queues["h_strict"]
    finally:
        for one in (sender, strict):
            one.safe_effects.close()
            one.close()
        purge(broker, "h_strict")
