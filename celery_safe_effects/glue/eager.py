"""Jobs that run here and now (``apply()``, ``task_always_eager``): what their caller is told is what the row says."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from celery import exceptions, states
from celery.result import EagerResult

from .. import canonical
from ..engine import current, failures
from ..errors import IdempotencyConflict
from ..states import TERMINAL, UNKNOWN_STATE, JobStatus
from .acceptance import key_of
from .envelope import arguments_digest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..app import SafeEffects
    from ..store.hot import Row

logger = logging.getLogger(__name__)

STATES: Final = {
    "succeeded": states.SUCCESS,
    "failed": states.FAILURE,
    "cancelled": states.REVOKED,
    "leased": states.STARTED,
    "running": states.STARTED,
    "unknown": UNKNOWN_STATE,
}
"""What a job's status is in Celery's words."""
ENDED: Final = frozenset(status.value for status in TERMINAL)


class SafeEagerResult(EagerResult):
    """What a job came to that ran here and now; it need not have ended."""

    def ready(self) -> bool:
        """Whether the job has ended."""
        return self.state in states.READY_STATES

    def get(self, timeout: Any = None, propagate: bool = True, **options: Any) -> Any:
        """As Celery's, for a job that has ended.

        Raises:
            celery.exceptions.TimeoutError: it has not: it is parked, or a worker is to go on with it. A chain that is
                run here and now stops there.
        """
        if not self.ready():
            raise exceptions.TimeoutError(f"job {self.id} has no result yet, its state is {self.state}: {self.result}")
        return super().get(timeout=timeout, propagate=propagate, **options)

    wait = get


class Eager:
    """What ``apply()`` needs to know of the rows.

    Arguments:
        safe: the composition root.
    """

    def __init__(self, safe: SafeEffects) -> None:
        self.safe = safe

    def existing(
        self, task: Any, args: Any, kwargs: Any, ours: Mapping[str, Any], task_id: str
    ) -> SafeEagerResult | None:
        """The result of the job that has the idempotency key or the id of a call already, unless it is to run now.

        Raises:
            IdempotencyConflict: the key or the id belongs to another call.
        """
        key = key_of(ours.get("idempotency_key"))
        acceptance = self.safe.publisher.acceptance
        holder = acceptance.holder(acceptance.tenant(ours, task.name), key, task_id)
        if holder is None or (holder.id == task_id and holder.status == JobStatus.QUEUED):
            return None
        running = current.job()
        if running is not None and holder.id == task_id == running.id:
            return None  # what the body replaces itself by takes over its id
        if holder.task != task.name or holder.args_digest != arguments_digest(task.name, args, kwargs):
            what = "task id" if holder.id == task_id else f"idempotency key {key!r}"
            raise IdempotencyConflict(
                f"{what} belongs to job {holder.id} ({holder.task}, {holder.status}) with another task or other "
                "arguments; nothing was run",
                job_id=holder.id,
            )
        row = self.safe.store.row("JOB", id=holder.id)
        if row is None:  # pruned: what remains is its status
            return SafeEagerResult(holder.id, None, STATES.get(holder.status, states.PENDING), name=task.name)
        return self._of(row, task.name)

    def told(self, result: Any) -> Any:
        """What the caller of ``apply()`` is told: Celery's result where the row says the same."""
        if result.state == states.SUCCESS:
            return result
        row = self.safe.store.row("JOB", id=result.id)
        if row is None or row.reason == "ignored" or (row.status, result.state) == ("failed", states.FAILURE):
            return result
        return self._of(row, result.name)

    def settle(self, job_id: str) -> None:
        """The caller got the job's error as an exception: there is nobody else to tell."""
        row = self.safe.store.row("JOB", id=job_id)
        if row is not None and row.status in ENDED and not row.settled:
            self.safe.store.settle([(job_id, row.fence)])

    @staticmethod
    def _of(row: Row, name: str) -> SafeEagerResult:
        state = STATES.get(row.status, states.RETRY if row.attempts else states.PENDING)
        result: Any = row.reason
        if row.status == JobStatus.SUCCEEDED:
            result = canonical.decode(row.result)
        elif row.status == JobStatus.FAILED:
            result = failures.from_json(canonical.decode(row.error) or {"text": f"job {row.id} failed: {row.reason}"})
        elif row.status == JobStatus.CANCELLED:
            result = exceptions.TaskRevokedError(row.reason or "cancelled")
        return SafeEagerResult(row.id, result, state, name=name)
