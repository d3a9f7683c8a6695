"""What Celery makes of an end: it may fail to tell it, and must not take that for the job's failure.

A result backend that is down or cannot encode, a callback that a broker refuses, a hook that raises: Celery's tracer
stores FAILURE for each of them, also for a job that has succeeded. Here only the job's own error does so; any other
leaves the job unsettled, and the sweep delivers its end again, a bounded number of times.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from billiard.einfo import ExceptionInfo
from celery import states
from celery.app.trace import TraceInfo, build_tracer
from celery.exceptions import Ignore
from kombu.utils.encoding import safe_repr

logger = logging.getLogger(__name__)

END: Final = "safe_effects_end"
"""The attribute of a request that says which end Celery is being told."""


class End:
    """An end that stands in the row, while Celery is being told of it.

    Attributes:
        fence: the fence under which the job ended.
        error: the job's own error; ``None`` where it has succeeded.
    """

    def __init__(self, fence: int, error: BaseException | None = None) -> None:
        self.fence = fence
        self.error = error


class SafeTraceInfo(TraceInfo):
    """Celery's handling of a delivery that ended with an exception, which has to be the job's own."""

    def handle_failure(self, task: Any, req: Any, store_errors: bool = True, call_errbacks: bool = True) -> Any:
        """As Celery's for the job's own error; for any other, nothing is stored and nothing is sent."""
        end = getattr(req, END, None)
        if end is not None and end.error is self.retval:
            return super().handle_failure(task, req, store_errors=store_errors, call_errbacks=call_errbacks)
        untold(task, req.id, self.retval)
        # What Celery does with a delivery that has no end of its own.
        self.state = states.IGNORED
        try:
            raise Ignore(f"job {req.id}: {self.retval!r}")
        except Ignore:
            return ExceptionInfo(internal=True)


class Traced:
    """The attribute ``__trace__`` of a SafeTask: whoever sets Celery's tracer gets one with :class:`SafeTraceInfo`."""

    def __get__(self, task: Any, owner: type | None = None) -> Any:
        return None if task is None else task.__dict__.get("__trace__")

    def __set__(self, task: Any, tracer: Any) -> None:
        if tracer is not None:
            app = task.app
            tracer = build_tracer(task.name, task, app.loader, Info=SafeTraceInfo, app=app)
        task.__dict__["__trace__"] = tracer


def storable(task: Any, request: Any) -> dict[str, Any]:
    """The arguments of a request that the backend cannot encode, as text: ``result_extended`` stores them, too."""
    if request is None or not task.app.conf.find_value_for_key("extended", "result"):
        return {}
    changed = {}
    for name in ("args", "kwargs"):
        try:
            task.backend.encode(getattr(request, name, None))
        except Exception:
            changed[name] = getattr(request, f"{name}repr", None) or safe_repr(getattr(request, name, None))
    return changed


def untold(task: Any, job_id: str, exc: Any) -> None:
    """Celery could not be told of an end, or a delivery came to none."""
    logger.error("job %s: %r is not its end, which the row keeps and Celery is told later", job_id, exc, exc_info=exc)
    task.safe_effects.count("untold", task.name)
