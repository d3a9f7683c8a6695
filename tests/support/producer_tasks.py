"""Tasks whose bodies send messages: children, retries, replacements.

A worker gets them by `imports=["tests.support.producer_tasks"]`, a producer by `add_tasks`.
"""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery

from celery_safe_effects import SafeTask
from tests.support import tasks
from tests.support.fault_tasks import entered
from tests.support.names import CONF_VARIABLE

SLEEP = 60.0


def add_tasks(app: Celery) -> None:
    """Add the tasks, named `tests.<name>`.

    Args:
        app: the application of the tests.
    """

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.two_children", effects=[tasks.refund])
    def two_children(self: Any, order: str) -> Any:
        """Sends one child, has an effect, sends another child; in its first run it then stands still."""
        first = app.tasks["tests.follow"].delay(f"before {order}")
        tasks.refund(order)
        second = app.tasks["tests.follow"].delay(f"after {order}")
        if self.job.attempt == 1:
            entered("parent")
            time.sleep(SLEEP)
        return [first.id, second.id]

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.retries", effects=[tasks.refund], max_retries=3)
    def retries(self: Any, order: str, countdown: float) -> Any:
        """Has its effect, and then wants to run once more."""
        done = tasks.refund(order)
        if self.request.retries == 0:
            raise self.retry(countdown=countdown, exc=LookupError("not there yet"))
        return [done.ref, self.request.retries, done.replayed]

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.replaces", effects=[tasks.refund])
    def replaces(self: Any, order: str) -> Any:
        """Has an effect, and lets another task go on in its place."""
        done = tasks.refund(order)
        return self.replace(app.tasks["tests.follow"].s(done.ref))


if CONF_VARIABLE in os.environ:
    from tests.support.app import app as worker_app

    add_tasks(worker_app)
