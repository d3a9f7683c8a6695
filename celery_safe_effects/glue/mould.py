"""Many messages of one form: the first of them goes all of Celery's way, and the others are cast after it.

What Celery and we make of a call depends on its task, its options and its surroundings, which are the same for all of
them, and only in a few named places on its arguments. Where somebody has changed a function on that way, or looks at
arguments on it, all of them go there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from celery import Celery, Task
from celery._state import get_current_task
from celery.app.amqp import AMQP
from celery.app.routes import MapRoute
from celery.canvas import Signature
from kombu.utils.uuid import uuid

from ..engine import current
from ..engine.tracing import Tracing
from .acceptance import Candidate, key_of
from .batch import Gathered
from .envelope import Envelope
from .task import SafeTask
from .wire import Message

if TYPE_CHECKING:
    from .publish import Publisher

CAST: Final = frozenset({"tenant", "pool", "queue", "priority", "max_attempts", "max_age"})
"""Options that say the same for every call that has them; those with the key are the ones that a call may have."""
_KEY: Final = "idempotency_key"
_PLAIN: Final = (str, int, float, type(None))


class Moulds:
    """The forms of one ``enqueue_many``.

    Arguments:
        publisher: the way out.
    """

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self._made: dict[Any, Gathered] = {}
        self._tasks: dict[str, bool] = {}
        self._usable = self._is_usual()

    def cast(self, signature: Signature, reprs: Mapping[str, str]) -> Gathered | None:
        """The message of a call, if one of its form was made before.

        Arguments:
            signature: the call.
            reprs: what is shown of its arguments; empty where only Celery can tell.

        Returns:
            what a batch gathers; ``None`` where the call has to go all the way, and is kept then.

        Raises:
            TypeError: the task does not take these arguments.
            PayloadInvalid, PayloadTooLarge: as on the long way.
        """
        form = self._form(signature, reprs)
        first = self._made.get(form) if form is not None else None
        if first is None:
            return None
        args, kwargs = tuple(signature.args), dict(signature.kwargs)
        task = self.publisher.app.tasks[signature["task"]]
        if task.typing:
            task.__header__(*args, **kwargs)
        (headers, properties, body, _), old = first.hint.parts, first.candidate.id
        job_id = uuid()
        headers = {**headers, **reprs, "id": job_id}
        if headers["root_id"] == old:
            headers["root_id"] = job_id
        properties = {**properties, "correlation_id": job_id}
        body = (args, kwargs, body[2])
        kept = {**first.candidate.envelope.headers, **reprs, "id": job_id, "root_id": headers["root_id"]}
        envelope = Envelope(kept, properties, body, {**first.candidate.envelope.options, **reprs})
        data, digest = self.publisher.acceptance.encoded(envelope)
        params = {
            **first.candidate.params,
            "id": job_id,
            "key": key_of(signature.options.get(_KEY)),
            "digest": digest,
            "envelope": data,
        }
        hint = Message(first.hint.name, (headers, properties, body, None), {**first.hint.options, **reprs})
        return Gathered(hint, Candidate(envelope, params))

    def keep(self, signature: Signature, reprs: Mapping[str, str], made: Gathered) -> None:
        """Remember a message that went all the way."""
        form = self._form(signature, reprs)
        if (
            form is not None
            and made.hint.parts[3] is None
            and made.hint.parts[1].get("correlation_id") == made.candidate.id
        ):
            self._made[form] = made

    def _form(self, signature: Signature, reprs: Mapping[str, str]) -> Any:
        """What calls of one form have in common; ``None`` for a call that has to go all the way."""
        if not self._usable or not reprs or type(signature) is not Signature:
            return None
        options = signature.options
        said = [(name, options[name]) for name in sorted(options) if name != _KEY]
        if not all(name in CAST and type(value) in _PLAIN for name, value in said):
            return None
        name = signature["task"]
        if name not in self._tasks:
            self._tasks[name] = self._is_usual_task(self.publisher.app.tasks.get(name))
        return (name, *said) if self._tasks[name] else None

    def _is_usual(self) -> bool:
        """Nothing around here looks at single messages while they are made."""
        publisher = self.publisher
        app: Any = publisher.app
        return (
            current.job() is None
            and get_current_task() is None
            and getattr(publisher.celerys_send_task, "__func__", None) is Celery.send_task
            and type(app.amqp).as_task_v2 is AMQP.as_task_v2
            and all(isinstance(router, MapRoute) for router in app.amqp.routes)
            and type(publisher.safe.hooks.tracing) is Tracing
        )

    @staticmethod
    def _is_usual_task(task: Any) -> bool:
        made = type(task)
        return (
            isinstance(task, SafeTask)
            and made.apply_async is SafeTask.apply_async
            and made.shadow_name is Task.shadow_name
            and not task._redacted()
        )


__all__ = ["Moulds"]
