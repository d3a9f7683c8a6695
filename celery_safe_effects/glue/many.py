"""``enqueue_many``: thousands of calls, one statement, and a verdict for each."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from celery import Task
from celery.canvas import Signature

from ..engine import current
from ..errors import ConfigurationError, IdempotencyConflict, PayloadInvalid
from ..store.enlist import Enlisted, enlist
from ..values import Enqueued
from .acceptance import Door, Verdict
from .batch import Batch, Gathered
from .mould import Moulds
from .publish import continues, in_a_body

if TYPE_CHECKING:
    from .publish import Publisher

logger = logging.getLogger(__name__)

PART: Final = 1000
"""Calls in one statement, at most; while the database takes one part, the next is made."""


class _Item(NamedTuple):
    """One call: refused as it stands, or gathered."""

    gathered: Gathered | None
    error: Exception | None = None
    job_id: str | None = None


class Many:
    """One ``enqueue_many``.

    Arguments:
        publisher: the way out.
        transaction: a caller's transaction, or ``None``.
    """

    def __init__(self, publisher: Publisher, transaction: Any) -> None:
        self.publisher = publisher
        self.app: Any = publisher.app
        if transaction is not None and self.app.conf.task_always_eager:
            raise ConfigurationError("transaction= has no meaning where jobs run at once (task_always_eager)")
        self.enlisted: Enlisted | None = enlist(transaction) if transaction is not None else None
        self.moulds = Moulds(publisher)
        self.door = Door(enlisted=self.enlisted, admitted=continues(current.job()))

    def run(self, items: Iterable[Any]) -> list[Enqueued]:
        """Enqueue all of them.

        Returns:
            what became of each, in order.
        """
        calls = list(items)
        if self.app.conf.task_always_eager:
            return [self._eager(call) for call in calls]
        parts = [calls[start : start + PART] for start in range(0, len(calls), PART)]
        found: list[Enqueued] = []
        with self._beside(len(parts) > 1) as beside:
            waiting: tuple[list[_Item], Callable[[], list[Verdict]]] | None = None
            for part in parts:
                made = self._make(part)
                asked = beside(functools.partial(self._ask, made))
                if waiting is not None:
                    found += self._finish(*waiting)
                waiting = made, asked
            if waiting is not None:
                found += self._finish(*waiting)
        return found

    @contextlib.contextmanager
    def _beside(self, worth_it: bool) -> Iterator[Callable[[Callable[[], Any]], Callable[[], Any]]]:
        """Lets the database work while the next messages are made; a caller's connection is left in its thread."""
        if not worth_it or self.enlisted is not None:
            yield lambda call: functools.partial(lambda answer: answer, call())
            return
        with ThreadPoolExecutor(1, thread_name_prefix="safe_effects_accept") as pool:
            yield lambda call: pool.submit(call).result

    # -- making messages -----------------------------------------------------------------------------------------------

    def _make(self, calls: list[Any]) -> list[_Item]:
        batch = Batch(plain=False)
        with batch.gather():
            return [self._item(batch, call) for call in calls]

    def _item(self, batch: Batch, call: Any) -> _Item:
        before = len(batch.gathered)
        try:
            signature = self._checked(call)
            shown = self.moulds.shown(signature)
            cast = self.moulds.cast(signature, shown)
            if cast is not None:
                return _Item(cast)
            signature.apply_async(**(shown.reprs if shown is not None else {}))
        except Exception as exc:
            del batch.gathered[before:]
            return _Item(None, exc, getattr(exc, "job_id", None))
        made = batch.gathered[before:]
        if len(made) != 1:
            error = PayloadInvalid(
                f"{call!r} sent {len(made)} messages of SafeTasks instead of one; nothing was enqueued"
            )
            return _Item(None, error)
        self.moulds.keep(signature, shown, made[0])
        return _Item(made[0])

    def _checked(self, call: Any) -> Signature:
        """The signature of a call.

        Raises:
            PayloadInvalid: it is none, or none of a SafeTask.
        """
        signature = _signature(call, self.app)
        if signature.subtask_type in ("group", "chain", "chord") or signature["task"].startswith("celery."):
            raise PayloadInvalid(
                f"a {signature.subtask_type or signature['task']} is no single call; a canvas is enqueued whole by its "
                "own apply_async(); nothing was enqueued"
            )
        if "transaction" in signature.options:
            raise PayloadInvalid("transaction= is given to enqueue_many itself; nothing was enqueued")
        name = signature["task"]
        if not self.publisher.is_safe(name):
            known = name in self.app.tasks
            why = "is no SafeTask" if known else "is not registered here, nor known from any worker"
            raise PayloadInvalid(f"task {name!r} {why}; enqueue_many takes calls of SafeTasks; nothing was enqueued")
        return signature

    # -- accepting and publishing --------------------------------------------------------------------------------------

    def _ask(self, made: list[_Item]) -> list[Verdict]:
        candidates = [item.gathered.candidate for item in made if item.gathered is not None]
        return self.publisher.acceptance.ask(candidates, self.door) if candidates else []

    def _finish(self, made: list[_Item], asked: Callable[[], list[Verdict]]) -> list[Enqueued]:
        gathered = [item.gathered for item in made if item.gathered is not None]
        verdicts = asked()
        self.publisher.acceptance.tell([one.candidate for one in gathered], verdicts, self.door)
        self.publisher.publish_accepted(gathered, verdicts, self.door)
        told = iter(self._said(one, verdict) for one, verdict in zip(gathered, verdicts, strict=True))
        return [
            next(told) if item.gathered is not None else Enqueued("refused", item.job_id, item.error) for item in made
        ]

    def _said(self, one: Gathered, verdict: Verdict) -> Enqueued:
        error = verdict.error
        if isinstance(error, IdempotencyConflict):
            told = in_a_body(error, one.candidate.id)
            if told is not error:
                raise told from error
        status: Any = verdict.status
        if status == "existing" and verdict.job_id == one.candidate.id and current.job() is not None:
            status = "accepted"  # in a body that runs again, the answer is the first one's
        return Enqueued(status, verdict.job_id, error)

    def _eager(self, call: Any) -> Enqueued:
        try:
            result = self._checked(call).apply_async()
        except Exception as exc:
            return Enqueued("refused", getattr(exc, "job_id", None), exc)
        return Enqueued("accepted", result.id)


def _signature(call: Any, app: Any) -> Signature:
    if isinstance(call, (tuple, list)) and 1 <= len(call) <= 4:
        given: list[Any] = [*call, *((), {}, {})[len(call) - 1 :]]
        task, args, kwargs, options = given
        if not isinstance(task, (str, Task)):
            raise PayloadInvalid(f"{task!r} is neither a task nor a task's name; nothing was enqueued")
        mappings = isinstance(kwargs or {}, Mapping) and isinstance(options or {}, Mapping)
        if not mappings or not isinstance(args or (), (tuple, list)):
            raise PayloadInvalid(
                "a call is a signature, or (task, args, kwargs, options) with a tuple and two mappings; nothing was "
                "enqueued"
            )
        return Signature(task, args, dict(kwargs or {}), dict(options or {}), app=app)
    if isinstance(call, Signature):
        return call
    if isinstance(call, dict) and isinstance(call.get("task"), str):
        return Signature.from_dict(call, app=app)
    raise PayloadInvalid(
        f"{call!r} is no call; give task.s(...), or (task, args, kwargs, options); nothing was enqueued"
    )
