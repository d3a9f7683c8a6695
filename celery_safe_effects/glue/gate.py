"""In a worker's consumer: a message that belongs to a row reaches a SafeTask or nobody.

During a deploy, and when a task is taken back to a plain one, a worker may know the task as a plain one, or not at all.
Celery would run it without a claim, or store FAILURE for it. The row is the recovery: the message is dropped, and the
sweep gives it again, by and by to a worker that has the SafeTask.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery import bootsteps

from .. import signals
from .envelope import MARK, is_marked
from .intake import Intake
from .task import SafeTask

if TYPE_CHECKING:
    from ..app import SafeEffects

logger = logging.getLogger(__name__)


class Strategies(dict[str, Callable[..., Any]]):
    """What a consumer does with a message, by the task's name.

    Arguments:
        safe: the composition root.
        consumer: Celery's.
    """

    def __init__(self, safe: SafeEffects, consumer: Any) -> None:
        super().__init__()
        self.safe = safe
        self.consumer = consumer

    def __setitem__(self, name: str, strategy: Callable[..., Any]) -> None:
        if isinstance(self.consumer.app.tasks.get(name), SafeTask):
            super().__setitem__(name, Intake(self.safe, self.consumer, name, strategy))
        else:
            super().__setitem__(name, self._unmarked_only(name, strategy))

    def __missing__(self, name: str) -> Callable[..., Any]:
        def unknown(message: Any, *_: Any) -> None:
            try:
                raise KeyError(name)
            except KeyError as exc:
                self.consumer.on_unknown_task(None, message, exc)

        return self._unmarked_only(name, unknown)

    def _unmarked_only(self, name: str, strategy: Callable[..., Any]) -> Callable[..., Any]:
        def handle(message: Any, payload: Any, ack: Callable[..., Any], *more: Any) -> Any:
            headers = message.headers or {}
            if not is_marked(headers.get(MARK)):
                return strategy(message, payload, ack, *more)
            job_id = headers.get("id")
            logger.error(
                "job %s came to a worker that does not have %s as a SafeTask; it is left to one that does", job_id, name
            )
            ack(logger, self.consumer.connection_errors)
            self.safe.count("stale_deliveries", "no_safe_task_here")
            signals.stale_delivery.send(sender=name, job_id=job_id, reason="no_safe_task_here")
            return None

        return handle


def make_gate(safe: SafeEffects) -> type[bootsteps.StartStopStep]:
    """The consumer step of one app."""

    class SafeEffectsGate(bootsteps.StartStopStep):
        """Stands before Celery fills in its strategies."""

        name = "safe_effects_gate"

        def __init__(self, consumer: Any, **kwargs: Any) -> None:
            super().__init__(consumer, **kwargs)
            consumer.strategies = Strategies(safe, consumer)

    return SafeEffectsGate
