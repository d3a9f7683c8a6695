"""Errbacks that take ``(request, exc, traceback)``: Celery calls them where the task failed; a SafeTask is a job there.

Called as a function, it would have no row: a crash would lose it, and an end that is told again would call it again.
"""

from __future__ import annotations

import functools
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from celery.app.task import Context
from celery.backends.base import Backend
from celery.exceptions import NotRegistered
from celery.utils.functional import arity_greater
from kombu.utils.encoding import safe_repr

from .. import canonical
from ..engine import failures
from ..errors import AcceptanceUnknown, AdmissionRejected, IdempotencyConflict, PayloadTooLarge
from ..store.hot import STORE_ERRORS
from .task import SafeTask
from .wire import BROKER_ERRORS

if TYPE_CHECKING:
    from ..app import SafeEffects

logger = logging.getLogger(__name__)

FAILED: Final = "safe_effects_failed"
"""The key of a job's first argument that says: what follows is told of a task that has failed."""
TOLD: Final = (
    "id", "task", "args", "kwargs", "root_id", "parent_id", "group", "group_index", "retries", "eta", "expires",
    "hostname", "origin", "argsrepr", "kwargsrepr", "stamps", "stamped_headers", "correlation_id", "reply_to",
    "timelimit", "ignore_result", "replaced_task_nesting", "delivery_info",
)  # fmt: skip
"""What is told of its request."""
TRACEBACK_LIMIT: Final = 10_000
LATER: Final = (*STORE_ERRORS, AcceptanceUnknown, AdmissionRejected, *BROKER_ERRORS)
"""What keeps something from being sent now, and not for ever."""


def install() -> None:
    """Change how Celery's backends call errbacks, once a process; those of other tasks as ever."""
    original = Backend._call_task_errbacks
    if getattr(original, "_safe_effects", False):
        return

    @functools.wraps(original)
    def call_task_errbacks(self: Any, request: Any, exc: Any, traceback: Any) -> Any:
        safe, given = self.app.__dict__.get("_safe_effects"), list(request.errbacks or ())
        eager = self.app.conf.task_always_eager or (request.delivery_info or {}).get("is_eager")
        rest = given
        if safe is not None and not eager:
            rest = [one for one in given if not _sent(safe, self, one, request, exc, traceback)]
        if len(rest) == len(given):
            return original(self, request, exc, traceback)
        if not rest:
            return None
        request.errbacks = rest
        try:
            return original(self, request, exc, traceback)
        finally:
            request.errbacks = given

    call_task_errbacks._safe_effects = True  # type: ignore[attr-defined]
    Backend._call_task_errbacks = call_task_errbacks


def called_with(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A job's arguments as its body gets them: of an errback, with what they tell of the failed task."""
    if len(args) < 3 or not isinstance(args[0], dict) or FAILED not in args[0]:
        return args
    return (Context(args[0][FAILED]), failures.from_json(args[1]), args[2], *args[3:])


def _sent(safe: SafeEffects, backend: Any, errback: Any, request: Any, exc: Any, traceback: Any) -> bool:
    """Send an errback that Celery would call.

    Returns:
        whether it is one.
    """
    signature = safe.app.signature(errback)
    if not _is_called(backend, signature):
        return False
    told = _told(safe, request)
    error = failures.to_json(exc) if isinstance(exc, BaseException) else {"text": str(exc)}
    trace = None if traceback is None else canonical.printable(str(traceback)[-TRACEBACK_LIMIT:])
    options = {"parent_id": request.id, "root_id": request.root_id or request.id}
    try:
        try:
            signature.apply_async(({FAILED: told}, error, trace), **options)
        except PayloadTooLarge:
            short = {**told, "args": None, "kwargs": None}
            signature.apply_async(({FAILED: short}, error, trace), **options)
    except IdempotencyConflict:
        logger.info("errback %s of %s is out already", signature.id, request.id)  # with another traceback, perhaps
    except LATER:
        raise
    except Exception:  # as Celery does
        logger.exception("errback %r of %s cannot be sent", signature.name, request.id)
    return True


def _is_called(backend: Any, signature: Any) -> bool:
    """Whether it is a SafeTask that Celery would call as a function."""
    try:
        task = signature.type
    except NotRegistered:
        return False
    header = getattr(task, "__header__", None)
    if not isinstance(task, SafeTask) or header is None or isinstance(header, partial):
        return False
    judge = getattr(backend, "_errback_arity_greater", None)  # Celery's own, from 5.7 on
    return bool(judge(signature, 1) if judge is not None else arity_greater(header, 1))


def _told(safe: SafeEffects, request: Any) -> dict[str, Any]:
    told = {name: getattr(request, name, None) for name in TOLD}
    task = safe.app.tasks.get(told["task"])
    if isinstance(task, SafeTask):
        told["args"], told["kwargs"] = task._shown(told["args"], told["kwargs"])
    for name, value in told.items():
        try:
            told[name] = canonical.decode(canonical.encode(value))
        except (TypeError, ValueError):
            told[name] = safe_repr(value)
    return told
