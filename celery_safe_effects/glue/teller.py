"""Tells Celery, its events and the result backend what the row says, where Celery itself does not."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from celery import signals, states
from celery.app.task import Context

from .. import canonical
from ..engine import failures
from ..states import UNKNOWN_STATE, JobStatus
from .trace import storable

if TYPE_CHECKING:
    from ..app import SafeEffects

logger = logging.getLogger(__name__)


class Teller:
    """Writes ``UNKNOWN`` and ``REVOKED``; whoever writes them re-reads the row.

    Arguments:
        safe: the composition root.
    """

    def __init__(self, safe: SafeEffects) -> None:
        self.safe = safe

    def unknown(self, task: Any, job_id: str, request: Any, reason: str, error: Any = None) -> None:
        """Show a parked job as UNKNOWN in the result backend and as the event ``task-unknown``."""
        text = (error or {}).get("text") or reason
        try:
            if not _ignores_result(task, request):
                meta = {"reason": reason, "detail": text}
                task.backend.store_result(job_id, meta, UNKNOWN_STATE, request=_storable(task, request))
            # ``exception`` is a field that Flower declares: it shows the reason.
            self._event(task, request, "task-unknown", uuid=job_id, exception=f"{reason}: {text}", name=task.name)
        except Exception:
            logger.warning("UNKNOWN of job %s could not be shown; its row stands", job_id, exc_info=True)
        self.recheck(job_id, JobStatus.UNKNOWN)

    def started(self, task: Any, job_id: str, request: Any) -> None:
        """Show a claimed job as STARTED."""
        if _ignores_result(task, request):
            return
        try:
            meta = {"pid": os.getpid(), "hostname": request.hostname}
            task.backend.store_result(job_id, meta, states.STARTED, request=_storable(task, request))
        except Exception:
            logger.warning("STARTED of job %s could not be stored", job_id, exc_info=True)
        self.recheck(job_id, JobStatus.RUNNING)

    def cancelled(self, task: Any, job_id: str, request: Any, reason: str, fence: int) -> None:
        """Show a cancelled job as REVOKED, and settle it."""
        try:
            if not _ignores_result(task, request):
                request = _storable(task, request)
                task.backend.mark_as_revoked(job_id, reason, request=request, store_result=True)
            expired = reason == "expired"
            how = {"terminated": False, "signum": None, "expired": expired}
            self._event(task, request, "task-revoked", uuid=job_id, **how)
            signals.task_revoked.send(sender=task, request=request, **how)
        except Exception:
            logger.warning("REVOKED of job %s could not be shown; it is delivered again", job_id, exc_info=True)
            return
        self._settle(job_id, fence)

    def end(self, task: Any, job_id: str, request: Any) -> None:
        """Tell an end that no delivery can tell, since its message is never read, or ends whoever reads it.

        A success is left to the deliveries: its continuations are in the message.
        """
        row = self.safe.store.row("JOB", id=job_id)
        if row is None or row.settled or row.status not in (JobStatus.FAILED, JobStatus.CANCELLED):
            return
        if not self.safe.store.rows("TELL", id=job_id, fence=row.fence):
            return
        if row.status == JobStatus.CANCELLED:
            self.cancelled(task, job_id, request, row.reason or "cancelled", row.fence)
        else:
            error = canonical.decode(row.error) or {"text": f"job {job_id} failed: {row.reason}"}
            self._failed(task, job_id, request, failures.from_json(error), row.fence)

    def _failed(self, task: Any, job_id: str, request: Any, error: Exception, fence: int) -> None:
        try:
            task.backend.mark_as_failure(
                job_id, error, request=request, store_result=not _ignores_result(task, request)
            )
            self._event(task, request, "task-failed", uuid=job_id, exception=repr(error), traceback=None)
        except Exception:
            logger.warning("FAILURE of job %s could not be shown; it is tried again", job_id, exc_info=True)
            return
        self._settle(job_id, fence)

    def _settle(self, job_id: str, fence: int) -> None:
        try:
            self.safe.store.settle([(job_id, fence)])
        except Exception:
            logger.warning("job %s could not be settled; its end is delivered again", job_id, exc_info=True)

    @staticmethod
    def _event(task: Any, request: Any, kind: str, **fields: Any) -> None:
        if getattr(request, "is_eager", False):
            return  # Celery sends none; there need be no broker
        with task.app.events.default_dispatcher(hostname=getattr(request, "hostname", None)) as dispatcher:
            dispatcher.send(kind, **fields)

    def recheck(self, job_id: str, written: JobStatus | None = None) -> None:
        """What the backend holds now may be older than the row: if so, deliver the end again."""
        try:
            row = self.safe.store.row("JOB", id=job_id)
            if row is not None and row.status != written and row.settled:
                self.safe.store.rows("UNSETTLE", id=job_id)
        except Exception:
            logger.warning("job %s could not be read again", job_id, exc_info=True)


def _storable(task: Any, request: Any) -> Any:
    """The request, or a copy of it that the backend can encode."""
    changed = storable(task, request)
    return Context({**vars(request), **changed}) if changed else request


def _ignores_result(task: Any, request: Any) -> bool:
    if getattr(request, "is_eager", False) and not task.store_eager_result:
        return True
    value = getattr(request, "ignore_result", None)
    return bool(task.ignore_result if value is None else value)
