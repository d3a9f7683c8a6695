"""An app whose broker is in memory: what it accepts is in the database, and what it published can be counted.

It can also be its own worker, one delivery at a time, in this process (`work`): a delivery may be made twice, or be cut
short wherever a test raises `Killed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from celery import Celery
from celery._state import _tls
from celery.app.trace import build_tracer
from sqlalchemy import create_engine, pool

from celery_safe_effects import SafeEffects, SafeTask
from tests.support.services import Sql


class Killed(BaseException):
    """The child is gone: nothing catches this."""


class Delivery(NamedTuple):
    """A message as a worker gets it."""

    headers: dict[str, Any]
    body: Any
    properties: dict[str, Any]


class Shop:
    """A producer; its broker is in memory, so that what was published can be counted."""

    def __init__(self, database_url: str, **conf: Any) -> None:
        self.app = Celery("shop", broker="memory://", set_as_current=False)
        self.queue = f"shop-{uuid4()}"  # all memory transports are one
        self.app.conf.update(
            safe_effects_database_url=database_url,
            task_default_queue=self.queue,
            **{"safe_effects_max_payload": 100_000, **conf},
        )
        self.safe = SafeEffects(self.app)

        @self.app.task(base=SafeTask, shared=False, name="shop.bill", effects=[])
        def bill(order: Any, cents: int = 0) -> None:
            """Does nothing."""

        @self.app.task(base=SafeTask, shared=False, name="shop.mail", effects=[], tenant="mailers")
        def mail(order: Any) -> None:
            """Does nothing."""

        @self.app.task(shared=False, name="shop.plain")
        def plain(order: Any) -> None:
            """Is no SafeTask."""

        self.bill, self.mail, self.plain = bill, mail, plain
        self.statements: list[str] = []
        run = self.safe.store._execute

        def counted(conn: Any, statement: str, params: Any) -> Any:
            self.statements.append(statement)
            return run(conn, statement, params)

        self.safe.store._execute = counted  # type: ignore[method-assign]

    def task(self, name: str, body: Callable[..., Any], **options: Any) -> Any:
        """A SafeTask `shop.<name>`, bound."""
        body.__name__ = "body"
        return self.app.task(base=SafeTask, bind=True, shared=False, name=f"shop.{name}", **options)(body)

    def take(self) -> Delivery | None:
        """The next message of the queue; it is gone then."""
        with self.app.connection_for_write() as connection, connection.SimpleQueue(self.queue) as queue:
            if not queue.qsize():
                return None
            message = queue.get()
            message.ack()
            return Delivery(dict(message.headers), message.payload, dict(message.properties))

    def deliver(self, delivery: Delivery) -> Any:
        """Run a message as a worker's child does, ETA or not.

        Returns:
            what Celery's tracer says; `None` where the child was killed.
        """
        headers, (args, kwargs, embed), properties = delivery
        task = self.app.tasks[headers["task"]]
        request = {
            **headers,
            **embed,
            "args": args,
            "kwargs": kwargs,
            "correlation_id": properties.get("correlation_id"),
            "reply_to": properties.get("reply_to"),
            "delivery_info": {"exchange": "", "routing_key": self.queue, "priority": None},
            "hostname": "shop",
            "is_eager": False,
        }
        before = _tls.current_app
        self.app.set_current()  # as it is in a worker
        try:
            task.__trace__ = build_tracer(task.name, task, app=self.app, hostname="shop")  # ours, where it is ours
            return task.__trace__(headers["id"], args, kwargs, request)
        except Killed:
            return None
        finally:
            _tls.current_app = before

    def work(self, most: int = 300) -> list[str]:
        """Run what is in the queue, and what that brings, until nothing is left.

        Returns:
            the names of the tasks that were delivered.
        """
        delivered = []
        while (delivery := self.take()) is not None:
            delivered.append(delivery.headers["task"])
            self.deliver(delivery)
            assert len(delivered) < most, delivered
        return delivered

    def published(self) -> list[str]:
        """The ids of the messages in the queue, in their order; they are gone then."""
        return [headers["id"] for headers, _ in self.messages()]

    def messages(self) -> list[tuple[dict[str, Any], Any]]:
        """The messages in the queue, in their order, as headers and body; they are gone then."""
        found = []
        with self.app.connection_for_write() as connection, connection.SimpleQueue(self.queue) as queue:
            while queue.qsize():
                message = queue.get()
                found.append((dict(message.headers), message.payload))
                message.ack()
        return found


@pytest.fixture
def shops(database_url: str) -> Iterator[Callable[..., Shop]]:
    made: list[Shop] = []

    def make(**conf: Any) -> Shop:
        made.append(Shop(database_url, **conf))
        return made[-1]

    yield make
    for one in made:
        one.safe.close()
        one.app.close()


@pytest.fixture
def shop(shops: Callable[..., Shop]) -> Shop:
    return shops()


@pytest.fixture
def engine(database_url: str, sql: Sql) -> Iterator[Any]:
    """The shop's own tables are in the same database."""
    sql("CREATE TABLE public.orders (id text PRIMARY KEY)")
    made = create_engine(database_url, poolclass=pool.NullPool)
    yield made
    made.dispose()
