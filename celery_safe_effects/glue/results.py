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

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

_NOT_HERE: Final = object()
_ignored: ContextVar[Any] = ContextVar("safe_effects_ignored", default=_NOT_HERE)


def send_without_backend(
    app: Celery,
    send: Callable[..., Any],
    name: str,
    args: Any,
    kwargs: Any,
    options: dict[str, Any],
    *,
    reply: bool,
) -> Any:
    """``app.send_task``, in which the backend has no say.

    Arguments:
        app, send: the app and its own ``send_task``.
        name, args, kwargs, options: the call.
        reply: whether a reply can come of it; a retry's reply was prepared with the first message.

    Returns:
        its result.
    """
    ignored = options.get("ignore_result")
    if reply and not ignored:
        _prepare_reply(app, options)
    scope = _ignored.set(ignored)
    try:
        # Nobody prepares for a result that is ignored; the message says what the caller said.
        result = send(name, args, kwargs, **{**options, "ignore_result": True})
    finally:
        _ignored.reset(scope)
    result.ignored = ignored
    return result


def restore_header(headers: dict[str, Any]) -> None:
    """Let a message say again whether its result is ignored."""
    ignored = _ignored.get()
    if ignored is not _NOT_HERE:
        headers["ignore_result"] = ignored


def _prepare_reply(app: Celery, options: Mapping[str, Any]) -> None:
    backend = app.backend
    if type(backend).persistent:
        return
    policy = dict(app.conf.task_publish_retry_policy or {})
    policy.pop("retry_errors", None)
    try:
        with app.producer_or_acquire(options.get("producer")) as producer:
            # Declaring it would try for ever where the broker is down; connecting can be bounded.
            producer.connection.ensure_connection(**policy)
            backend.on_task_call(producer, options.get("task_id"))
    except Exception as exc:
        logger.warning("the reply queue could not be prepared, and results may be lost: %r", exc)
