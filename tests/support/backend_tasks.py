"""Tasks whose ends Celery has trouble to tell, and arguments and results of all kinds.

A worker gets them by `imports=["tests.support.backend_tasks"]`, a producer by `add_tasks`.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from kombu.serialization import register
from kombu.utils import json

from celery_safe_effects import SafeEffects, SafeTask
from tests.support import tasks
from tests.support.fault_tasks import entered
from tests.support.names import CONF_VARIABLE

TRIES_VARIABLE = "SAFE_EFFECTS_TEST_SETTLE_TRIES"


def _picky(value: Any) -> str:
    text = str(json.dumps(value))
    if "unencodable" in text:
        raise TypeError("picky")
    return text


register("picky", _picky, json.loads, content_type="application/x-picky", content_encoding="utf-8")


class Telling(SafeTask):
    """Tells the provider what Celery tells it."""

    abstract = True

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        entered("on_success")

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        entered("on_failure")


def add_tasks(app: Celery) -> None:
    """Add the tasks, named `tests.<name>`.

    Args:
        app: the application of the tests.
    """

    @app.task(base=Telling, bind=True, shared=False, name="tests.tells", effects=[tasks.refund])
    def tells(self: Any, order: str, result: Any = None, fails: bool = False) -> Any:
        """One effect, and a result that is given; or an error."""
        tasks.refund(order)
        if fails:
            raise LookupError(order)
        return result

    @app.task(base=SafeTask, shared=False, name="tests.ignored", effects=[], ignore_result=True)
    def ignored(value: Any) -> Any:
        """Nobody wants to know."""
        return value

    @app.task(base=SafeTask, shared=False, name="tests.ignored_but_errors", effects=[], ignore_result=True,
              store_errors_even_if_ignored=True)  # fmt: skip
    def ignored_but_errors(value: Any) -> Any:
        """Unless it fails."""
        raise LookupError(value)

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.echo", effects=[])
    def echo(self: Any, *args: Any, **kwargs: Any) -> Any:
        """What came, as text and as it is."""
        if args and isinstance(args[0], set):
            args = (sorted(args[0]),)
        return [repr(args), args, kwargs]

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.returns_set", effects=[])
    def returns_set(self: Any) -> Any:
        """Pickle takes it, JSON does not."""
        return {1, 2}

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.pair", effects=[])
    def pair(self: Any) -> Any:
        """JSON makes a list of it."""
        return 1, 2

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.returns_result", effects=[])
    def returns_result(self: Any) -> Any:
        """The result of another job."""
        return app.tasks["tests.pure"].delay(5)


if CONF_VARIABLE in os.environ:
    from tests.support.app import app as worker_app

    add_tasks(worker_app)
    SafeEffects.SETTLE_TRIES = int(os.environ.get(TRIES_VARIABLE, SafeEffects.SETTLE_TRIES))
