"""Tasks for the ways in which Celery may deliver them.

A worker gets them by `imports=["tests.support.delivery_tasks"]`, a producer by `add_tasks`.
"""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery
from kombu import Exchange, Queue
from kombu.common import Broadcast

from celery_safe_effects import SafeTask
from tests.support import tasks
from tests.support.names import CONF_VARIABLE

LET_GO = "let_go"
"""The kind of the provider's rows that let `holds` go on."""


def note(name: str) -> None:
    """Let the provider write down that a body runs, where, and in which order."""
    tasks.provider().call("noted", None, {"name": name, "pid": os.getpid()})


def add_queues(app: Celery) -> None:
    """Add queues beside the default one.

    Args:
        app: of a producer, or of a worker that consumes one of them; Celery wants every other worker's to be there.
    """
    app.amqp.queues.add(Broadcast("h4_everybody"))
    app.amqp.queues.add(Queue("h4_topic", Exchange("h4_media", type="topic"), routing_key="media.#"))
    limited = {"x-queue-type": "quorum", "x-delivery-limit": 1}
    exchange = Exchange("h4_limited", type="topic")
    app.amqp.queues.add(Queue("h4_limited", exchange, routing_key="h4_limited", queue_arguments=limited))


def add_tasks(app: Celery) -> None:
    """Add the tasks, named `tests.<name>`.

    Args:
        app: the application of the tests.
    """
    if CONF_VARIABLE not in os.environ or app.conf.get("tests_queues"):
        add_queues(app)

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.notes", effects=[])
    def notes(self: Any, name: str, seconds: float = 0) -> None:
        """Note it, and take some time."""
        note(name)
        time.sleep(seconds)

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.holds", effects=[])
    def holds(self: Any, name: str) -> None:
        """Keep its process busy until the test lets it go."""
        limit = time.monotonic() + 60
        while not any(row["body"]["name"] == name for row in tasks.provider().ledger(kind=LET_GO)):
            if time.monotonic() > limit:
                raise TimeoutError(f"nobody let {name} go")
            time.sleep(0.05)

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.notes_late", effects=[], acks_late=True)
    def notes_late(self: Any, name: str) -> None:
        """Note it, and acknowledge the message afterwards."""
        note(name)

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.rated", effects=[], rate_limit="2/s")
    def rated(self: Any, name: str) -> None:
        """Note it, twice a second at most."""
        note(name)

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.retries_after", effects=[])
    def retries_after(self: Any, countdown: float) -> int:
        """Retry once."""
        if self.request.retries == 0:
            raise self.retry(countdown=countdown)
        return int(self.request.retries)

    @app.task(
        base=SafeTask, bind=True, shared=False, name="tests.fails_late", effects=[], acks_late=True,
        acks_on_failure_or_timeout=False, reject_on_worker_lost=True,
    )  # fmt: skip
    def fails_late(self: Any, name: str, seconds: float = 0) -> None:
        """Fail, after some time; its message is rejected then."""
        note(name)
        time.sleep(seconds)
        raise ValueError(name)


if CONF_VARIABLE in os.environ:
    from tests.support.app import app as _app

    add_tasks(_app)
