"""Tasks that retry, in each of the ways of declaring effects.

A worker gets them by `imports=["tests.support.retry_tasks"]`, a producer by `add_tasks`.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from celery import Celery
from celery.exceptions import MaxRetriesExceededError

from celery_safe_effects import Outcome, SafeTask
from tests.support import tasks
from tests.support.names import CONF_VARIABLE

KINDS: dict[str, dict[str, Any]] = {"whole": {}, "effects": {"effects": [tasks.refund, tasks.mail]}}


class Unpicklable(Exception):
    """Neither pickle nor JSON can keep it."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__()
        self.code, self.text, self.held = code, text, iter(())


def _refund(self: Any, order: str) -> Any:
    if self.job.operation is None:
        return tasks.refund(order).ref
    return tasks.provider().call("refund", self.job.operation.key, {"argument": order})["ref"]


def add_tasks(app: Celery) -> None:
    """Add the tasks, named `tests.<name>_<kind>`.

    Args:
        app: the application of the tests.
    """
    for kind, declared in KINDS.items():
        _add(app, kind, declared)


def _add(app: Celery, kind: str, declared: dict[str, Any]) -> None:
    def task(name: str, **options: Any) -> Any:
        return app.task(base=SafeTask, bind=True, shared=False, name=f"tests.{name}_{kind}", **declared, **options)

    @task("retries_twice", max_retries=5)
    def retries_twice(self: Any, order: str) -> Any:
        """Asks in the try, and again in the except that catches it."""
        if self.request.retries:
            return _refund(self, order)
        try:
            raise self.retry(countdown=0.5)
        except Exception as exc:
            raise self.retry(exc=exc, countdown=0.5) from exc

    @task("retries_with", max_retries=2)
    def retries_with(self: Any, order: str, options: dict[str, Any], then: str = "raise") -> Any:
        """Retries once with the options given; `then` says what it does about it."""
        if self.request.retries:
            ref = _refund(self, order)
            result = [order, self.request.retries, ref]
            return Outcome(ref, result) if self.job.operation is not None else result
        retry = None
        with contextlib.suppress(Exception):
            retry = self.retry(throw=then == "swallow", **options)
        if then == "raise" and retry is not None:
            raise retry
        return "first run"

    @task("gives_up", max_retries=1, default_retry_delay=0)
    def gives_up(self: Any, how: str) -> Any:
        """Never succeeds; its retries end in the way given."""
        if how == "catch":
            try:
                raise self.retry()
            except MaxRetriesExceededError:
                return _refund(self, "after all")
        exc: Exception | None = {"exc": LookupError("gone"), "unpicklable": Unpicklable(1, "x")}.get(how)
        raise self.retry(exc=exc)

    @task("autoretries", autoretry_for=(Exception,), retry_kwargs={"max_retries": 6}, retry_backoff=False,
          default_retry_delay=0)  # fmt: skip
    def autoretries(self: Any, order: str) -> Any:
        """Fails six times, and no effect has happened by then."""
        if self.request.retries < 6:
            raise LookupError(order)
        return _refund(self, order)


if CONF_VARIABLE in os.environ:
    from tests.support.app import app as worker_app

    add_tasks(worker_app)
