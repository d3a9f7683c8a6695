"""Tasks whose arguments hold secrets, and that let them slip wherever they can.

A worker gets them by `imports=["tests.support.secret_tasks"]`, a producer by `add_tasks`.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from celery_safe_effects import Operation, Outcome, SafeTask, effect
from example_project.provider_client import Row
from tests.support import tasks
from tests.support.names import CONF_VARIABLE


class CardRefused(Exception):
    """Says which card."""


@effect(name="pay", deadline=tasks.DEADLINE, refused_on=(CardRefused,), redact=["card"])
def pay(op: Operation, card: str, how: str) -> Outcome[Row]:
    """Its client's errors tell everything."""
    assert "card" not in op.arguments
    if how == "refused":
        raise CardRefused(f"card {card} is refused", {"number": card})
    if how == "unknown":
        raise RuntimeError(f"POST /pay?card={card}: no answer")
    return tasks._call("pay", op, {"how": how})


def add_tasks(app: Celery) -> None:
    """Add the tasks, named `tests.<name>`."""

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.pays", effects=[pay], redact=["card", "pins"])
    def pays(self: Any, card: str, how: str, pins: Any = None, **_: Any) -> Any:
        """Declared effects."""
        if how == "body":
            raise KeyError(card)
        if how == "cause":
            try:
                raise CardRefused(card)
            except CardRefused as refused:
                raise RuntimeError("it did not work") from refused
        if how == "retry" and self.request.retries == 0:
            raise self.retry(exc=CardRefused(f"try {card} again"), countdown=0)
        return pay(card, how).ref

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.pays_whole", effect_options={"redact": ["card"]})
    def pays_whole(self: Any, card: str, how: str) -> Any:
        """The body is the effect."""
        assert "card" not in self.job.operation.arguments
        if how == "body":
            raise RuntimeError(f"lost {card}")
        return tasks.provider().call("pays_whole", self.job.operation.key, {"how": how})["ref"]


if CONF_VARIABLE in os.environ:
    from tests.support.app import app as worker_app

    add_tasks(worker_app)
