"""A producer and its result backend: a job is accepted whether or not the backend answers.

Celery lets the backend prepare for each result before the message is sent: Redis subscribes, and fails the call when it
is down. A backend that keeps results can be asked when somebody wants them; only one that does not, ``rpc://``, needs
its reply queue first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from celery import states
from celery._state import task_join_will_block
from celery.app.backends import by_url
from celery.backends.rpc import RPCBackend
from kombu.common import maybe_declare

from ..engine.lease import clock
from .wire import LATER

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

MADE_AGAIN: Final = 30.0
"""Seconds after which a backend that could not be made is tried again."""
_NOT_HERE: Final = object()
_ignored: ContextVar[Any] = ContextVar("safe_effects_ignored", default=_NOT_HERE)


class Results:
    """The results of what an app's producers send.

    Arguments:
        app: the Celery app.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app
        self._down_until = 0.0

    def send(
        self, send: Callable[..., Any], name: str, args: Any, kwargs: Any, options: dict[str, Any], *, reply: bool
    ) -> Any:
        """``app.send_task``, in which the backend has no say.

        Arguments:
            send: the app's own ``send_task``.
            name, args, kwargs, options: the call.
            reply: whether a reply can come of it; a retry's reply was prepared with the first message.

        Returns:
            its result.
        """
        ignored = options.get("ignore_result")
        if reply and not ignored:
            self._prepare_reply(options)
        make = options.get("result_cls")
        # Nobody prepares for a result that is ignored; the message says what the caller said.
        changed = {"ignore_result": True, "result_cls": lambda job_id: self.of(job_id, make)}
        if not options.get("connection"):
            changed["producer"] = options.get("producer") or LATER
        scope = _ignored.set(ignored)
        try:
            result = send(name, args, kwargs, **{**options, **changed})
        finally:
            _ignored.reset(scope)
        result.ignored = ignored
        return result

    def of(self, job_id: str, make: Callable[[str], Any] | None = None) -> Any:
        """A job's result; where the backend cannot be made now, one that makes it when somebody asks."""
        if clock() >= self._down_until:
            try:
                return (make or self.app.AsyncResult)(job_id)
            except Exception as exc:
                self._down_until = clock() + MADE_AGAIN
                logger.warning("job %s is accepted, but the result backend does not answer: %r", job_id, exc)
        return self.app.AsyncResult(job_id, backend=_Later(self.app))

    def are_forgotten(self, job_id: str) -> bool:
        """Whether the backend answers, and knows nothing of a job."""
        if clock() < self._down_until:
            return False
        try:
            return bool(self.app.backend.get_state(job_id) == states.PENDING)
        except NotImplementedError:
            return False  # there is no backend
        except Exception as exc:
            self._down_until = clock() + MADE_AGAIN
            logger.warning("the result of job %s could not be checked: %r", job_id, exc)
            return False

    def _prepare_reply(self, options: Mapping[str, Any]) -> None:
        policy = dict(self.app.conf.task_publish_retry_policy or {})
        policy.pop("retry_errors", None)
        try:
            backend, _ = by_url(self.app.backend_cls or self.app.conf.result_backend, self.app.loader)
            if backend.persistent:
                return
            with self.app.producer_or_acquire(options.get("producer")) as producer:
                made = self.app.backend
                if type(made).on_task_call is RPCBackend.on_task_call:
                    # Celery's own way tries for ever where the broker is down.
                    if not task_join_will_block():
                        maybe_declare(made.binding(producer.channel), retry=True, **policy)
                else:
                    made.on_task_call(producer, options.get("task_id"))
        except Exception as exc:
            logger.warning("the reply queue could not be prepared, and results may be lost: %r", exc)


class _Later:
    """A result backend that is made when it is used."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._made: Any = None

    def __getattr__(self, name: str) -> Any:
        self._made = self._app.backend
        return getattr(self._made, name)

    def remove_pending_result(self, result: Any) -> Any:
        """What a result that goes away calls, also one that nobody asked for."""
        return self._made.remove_pending_result(result) if self._made is not None else result


def restore_header(headers: dict[str, Any]) -> None:
    """Let a message say again whether its result is ignored."""
    ignored = _ignored.get()
    if ignored is not _NOT_HERE:
        headers["ignore_result"] = ignored
