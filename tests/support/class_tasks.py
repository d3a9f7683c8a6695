"""Tasks of users' own classes, typed or not, in an app whose every task is a SafeTask; and a second app beside it.

A worker's process has both apps: `tests.support.class_tasks:app` and `:second`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import celery
from celery import Celery, Task, shared_task
from pydantic import BaseModel

from celery_safe_effects import SafeEffects, SafeTask
from celery_safe_effects.glue.request import SafeRequest
from tests.support import tasks
from tests.support.names import CONF_VARIABLE

SCHEMA = "second"
"""Where the second app's jobs stand, in the same database."""


def note(what: str, task_id: str | None, status: str = "") -> None:
    """Have the provider write down what ran for a job."""
    tasks.provider().call("hook", None, {"what": what, "job": task_id, "status": status})


class Contextual(Task):
    """A base class as frameworks recommend it: each run in a context of the framework's."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        note("context", self.request.id)
        return self.run(*args, **kwargs)


class Noting(SafeRequest):
    """A request of the users' own, in the worker's main process."""

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        note("accepted", self.id)
        super().on_accepted(pid, time_accepted)


class Hooked(Contextual, SafeTask):
    """All hooks; each tells what the row says at that time."""

    abstract = True
    Request = Noting

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        self._tell("before_start", task_id)

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        self._tell("on_success", task_id)

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self._tell("on_failure", task_id)

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self._tell("on_retry", task_id)

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self._tell(f"after_return {status}", task_id)

    def _tell(self, hook: str, job_id: str) -> None:
        note(hook, job_id, self.safe_effects.job(job_id).status)


class Bill(Hooked):
    """A class-based task: attributes, a constructor, and a body named `run`."""

    name = "classes.bill"
    effects = [tasks.charge]  # noqa: RUF012
    max_attempts = 4
    throws = (KeyError,)

    def __init__(self, currency: str = "eur") -> None:
        self.currency = currency

    def run(self, customer: str, cents: int = 5, how: str = "") -> Any:
        if how == "fails":
            raise KeyError(customer)
        if how == "retries" and self.request.retries == 0:
            raise self.retry(countdown=0)
        return [tasks.charge(customer, cents).ref, self.currency]


class Dear(Bill):
    """Inherits a task that is registered itself."""

    name = "classes.dear"

    def run(self, customer: str, cents: int = 5, how: str = "") -> Any:
        return ["dear", *super().run(customer, 100 * cents, how)]


class Order(BaseModel):
    number: str
    cents: int


class Receipt(BaseModel):
    ref: str


class Foreign(celery.worker.request.Request):
    """What a worker refuses at its start: it would fail jobs whose outcome is open."""


SHARED = {"bind": True, "name": "workers.shared", "effects": [tasks.charge]}


def shared(self: Any, customer: str) -> Any:
    """One task of both apps."""
    return [self.app.main, tasks.charge(customer, 1).ref]


def create(conf: Mapping[str, Any]) -> tuple[Celery, Celery]:
    """Make the two apps.

    Args:
        conf: their settings.

    Returns:
        The first, whose every task is a SafeTask, and the second, whose jobs stand in a schema of their own.
    """
    app = Celery("first", task_cls=SafeTask, set_as_current=False)
    app.conf.update(conf)
    app.safe_effects = SafeEffects(app)
    other = Celery("second", task_cls=SafeTask, set_as_current=False)
    other.conf.update(
        {**conf, "safe_effects_schema": SCHEMA, "safe_effects_queue": SCHEMA, "task_default_queue": "two"}
    )
    other.safe_effects = SafeEffects(other)
    if CONF_VARIABLE in os.environ:
        shared_task(**SHARED)(shared)
    else:  # a producer that is a test: what is shared would be in every later app of its process
        for one in (app, other):
            one.task(shared=False, **SHARED)(shared)
    app.register_task(Bill("usd"))
    app.register_task(Dear("chf"))

    @app.task(shared=False, name="classes.add", effects=[])
    def add(a: int, b: int = 2) -> int:
        """Neither bound nor of a class."""
        return a + b

    @app.task(bind=True, shared=False, name="classes.typed", pydantic=True, effects=[tasks.charge])
    def typed(self: Any, order: Order, note: str | None = None) -> Receipt:
        """Models in and out."""
        return Receipt(ref=tasks.charge(order.number, order.cents).ref)

    @app.task(bind=True, shared=False, name="classes.sends", effects=[])
    def sends(self: Any, customer: str) -> Any:
        """A job of the other app's, sent by one of this app's."""
        return other.tasks["workers.shared"].delay(customer).id

    if conf.get("tests_foreign_request"):

        @app.task(base=type("Requesting", (SafeTask,), {"Request": Foreign}), shared=False, name="classes.foreign")
        def foreign() -> None:
            """Refused."""

    return app, other


if CONF_VARIABLE in os.environ:
    app, second = create(json.loads(os.environ[CONF_VARIABLE]))
