"""``SafeRequest``: the worker's main process, when a pool child dies, is ended, or runs out of time.

It fences the attempt first, then releases the job (nothing open) or parks it, acknowledges, and does not call Celery's
own handlers, which would store FAILURE and run errbacks for a job whose outcome is open.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from billiard.common import TERM_SIGNAME
from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import Terminated
from celery.concurrency.prefork import TaskPool as Prefork
from celery.exceptions import Ignore, Reject, Retry, TimeLimitExceeded, WorkerLostError
from celery.platforms import signals
from celery.utils.time import rate
from celery.worker import state
from celery.worker.request import Request

from .. import faults
from ..engine import tries
from ..engine.sweep import BACKOFF, MAX_BACKOFF
from ..errors import IdempotencyConflict
from ..faults import Point
from ..states import JobStatus
from . import held, threads
from .envelope import CONTENT_TYPE, MARK, Envelope, Mark, is_marked
from .trace import untold

if TYPE_CHECKING:
    from ..app import SafeEffects

logger = logging.getLogger(__name__)

PERSIST_AGAIN = 2.0
"""Seconds until the main process tries again to persist a message."""
CRASHES = ("worker_lost", "time_limit", "internal_error")
"""What may come again with the next delivery; a worker that gives a job up is no fault of the job's."""
LOST = (WorkerLostError, TimeLimitExceeded, Terminated, SystemExit, KeyboardInterrupt)


class SafeRequest(Request):
    """A request of a :class:`~celery_safe_effects.SafeTask`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.marked:
            self._request_dict[CONTENT_TYPE] = self.content_type
        held.received(self)

    _left = False
    _unpersisted = False
    _has_end = False

    @property
    def _safe(self) -> SafeEffects:
        return self.task.safe_effects  # type: ignore[no-any-return]

    @property
    def _actor(self) -> str:
        """The worker's main process, which is never the owner of a lease that it ends."""
        return f"{self._safe.owner(self.hostname)}/main"

    @property
    def marked(self) -> bool:
        """Whether the message belongs to a row already."""
        return is_marked(self._request_dict.get(MARK))

    @property
    def rate_limited(self) -> bool:
        """Whether a rate limit may be why it waits."""
        return bool(rate(self.task.rate_limit))

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """An unmarked message is persisted before it is acknowledged."""
        if not self.task.acks_late:
            self._persist()
        super().on_accepted(pid, time_accepted)

    def acknowledge(self) -> None:
        """As Celery's, unless the message is the only copy of its job."""
        if self._unpersisted:
            return
        if faults.armed is not None:
            faults.at(Point.BEFORE_ACK, self.id)
        super().acknowledge()
        if faults.armed is not None:
            faults.at(Point.AFTER_ACK, self.id)

    def _persist(self) -> None:
        """Write the row of an unmarked message (the child does, too); until there is one, it stays unacknowledged."""
        if self.marked:
            return
        args, kwargs, embed = self._payload
        envelope = Envelope.of_request({**self._request_dict, **(embed or {})}, args, kwargs)
        try:
            self._safe.publisher.adopt(envelope, self._safe.owner(self.hostname), patience=0.0)
        except IdempotencyConflict:
            pass  # the id has a row of another call: the child refuses this one
        except Exception as exc:
            logger.warning("message %s waits to be persisted and stays unacknowledged: %s", self.id, exc)
            self._unpersisted = True
            self._safe.call_later(PERSIST_AGAIN, self._persist_and_acknowledge)
            return
        self._unpersisted = False

    def _persist_and_acknowledge(self) -> None:
        self._persist()
        self.acknowledge()

    def maybe_expire(self) -> bool:
        """Never: expiry is judged by the database, not by this worker's clock."""
        return False

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """A child that is gone ends its attempt; everything else is Celery's."""
        exc = exc_info.exception
        if isinstance(exc, ExceptionWithTraceback):
            exc = exc.exc
        if isinstance(exc, LOST):
            if not self._left:
                reason = "time_limit" if isinstance(exc, TimeLimitExceeded) else "worker_lost"
                self._leave(reason)
            return None
        ours = return_ok and not exc_info.internal  # the tracer's word, which is the job's own end
        if not ours and not isinstance(exc, (Ignore, Reject, Retry, MemoryError)):
            untold(self.task, self.id, exc)
            if return_ok:
                self._done()
            else:
                self._leave("internal_error")
            return None
        return super().on_failure(exc_info, send_failed_event, return_ok)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """A hard limit ends the attempt before the child is killed."""
        if soft:
            super().on_timeout(soft, timeout)
            return
        if not state.should_terminate:
            logger.error("hard time limit (%ss) exceeded for %s[%s]", timeout, self.name, self.id)
        if not self._left:  # the pool has told on_failure() already: one limit ends one attempt
            self._leave("time_limit")

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:
        """Celery gives the task up, after a lost connection or in a cold stop: the attempt is over."""
        if self._end_run(pool, signal, "worker_cancelled"):
            self._already_cancelled = True

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """``revoke(terminate=True)``: cancel the job, then end what runs it."""
        if not self.time_start:
            super().terminate(pool, signal)
            return
        self._cancel_job("revoked")
        if self._end_run(pool, signal, "terminated"):
            self._already_revoked = True

    def _end_run(self, pool: Any, signal: Any, reason: str) -> bool:
        """End the attempt and what runs it. A greenlet, which is asked to end, says itself how far it has come.

        Returns:
            whether it ends: nobody can end a thread, or the main process.
        """
        signal = signals.signum(signal or TERM_SIGNAME)
        if self.time_start:
            if isinstance(pool, Prefork):
                self._leave(reason)
            try:
                pool.terminate_job(self.worker_pid, signal)
            except NotImplementedError:
                logger.warning(
                    "job %s cannot be ended in this pool; it goes on until its next effect or checkpoint, or its end",
                    self.id,
                )
                return False
        obj = self._apply_result() if self._apply_result is not None else None
        if obj is not None:
            obj.terminate(signal)
        return True

    def revoked(self) -> bool:
        """As Celery's; but an end that Celery was not told goes to the pool all the same."""
        return bool(super().revoked()) and not self._has_end

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        """A revoke before the start cancels the row, and what the row then says is told."""
        self._persist()  # what is revoked must have a row that says so, or another worker would run it
        self._cancel_job(reason)
        try:
            row = self._safe.store.row("JOB", id=self.id)
        except Exception:
            logger.warning("job %s could not be read", self.id, exc_info=True)
            row = None
        if row is not None and not row.settled:
            if row.status == JobStatus.CANCELLED:
                self._safe.teller.cancelled(self.task, self.id, self._context, row.reason or reason, row.fence)
            elif row.status in (JobStatus.SUCCEEDED, JobStatus.FAILED):
                self._has_end = True
                return
        self._done()
        self._already_revoked = True

    # ------------------------------------------------------------------------------------------------------------------

    def _cancel_job(self, reason: str) -> None:
        try:
            self._safe.store.rows("CANCEL", id=self.id, reason=reason, actor=self._actor)
        except Exception:
            logger.warning("job %s could not be cancelled", self.id, exc_info=True)

    def _leave(self, reason: str) -> None:
        """Fence the attempt and release or park the job; what cannot be written now, the lease's end will do."""
        self._left = True
        safe = self._safe
        # A service manager tells the children, too: one that is between two places where it can leave is just gone.
        stopped = reason in ("worker_cancelled", "worker_lost") and safe.stopping.now()
        owner = f"{self.hostname}/{self.worker_pid}/"
        try:
            rows = safe.store.rows(
                "LOST",
                id=self.id,
                owner=owner,
                wish="queued" if stopped else "again",
                reason="stopped" if stopped else reason,
                refund=1 if stopped else 0,
                delay=0.0 if stopped else BACKOFF,
                max_delay=MAX_BACKOFF,
                actor=self._actor,
            )
        except Exception:
            logger.warning("job %s is left to its lease's end", self.id, exc_info=True)
            return self._done()
        if not rows and reason in CRASHES and not stopped:
            self._came_to_nothing(owner, reason)
        safe.announce(self._actor, self.id)
        for row in rows:
            if row.status == JobStatus.UNKNOWN:
                safe.teller.unknown(self.task, self.id, self._context, reason)
            if row.slots:
                safe.publisher.deliver_woken(row.slots)
        self._done()

    def _came_to_nothing(self, owner: str, reason: str) -> None:
        """The delivery ended before its claim, perhaps by its very message: or it might do so for ever."""
        mark = Mark.of(self._request_dict.get(MARK))
        if mark is None:
            return
        try:
            store = self._safe.store
            tries.came_to_nothing(store, self.id, mark.generation, reason, reason, actor=self._actor, owner=owner)
            self._safe.teller.end(self.task, self.id, self._context)
        except Exception:
            logger.warning("a delivery of job %s could not be counted", self.id, exc_info=True)

    def _done(self) -> None:
        threads.leave()  # Celery's result backend may be Django's
        state.task_ready(self)
        self._persist()
        self.acknowledge()
