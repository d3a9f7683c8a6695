"""The values that users' code meets: ``Outcome``, ``Operation``, the verdicts of a lookup, and the views' rows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, Generic, Literal, TypeVar

R = TypeVar("R")


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """What an effect achieved.

    Attributes:
        ref: the provider's reference, a non-empty string.
        result: any JSON value. The caller of the effect always sees the JSON-decoded value, on the first call too.
        replayed: true when the outcome comes from the record, and nothing was called.
    """

    ref: str
    result: R = None  # type: ignore[assignment]
    replayed: bool = False


@dataclass(frozen=True)
class Happened:
    """Verdict: the provider knows the operation. It moves ``unknown`` to ``outcome_confirmed``."""

    ref: str
    result: Any = None


@dataclass(frozen=True)
class NotHappened:
    """Verdict: the provider does not know the operation.

    It counts only if the lookup was asked after the attempt's deadline and lag, and, without an idempotency key, only
    if the sender is known to be gone.
    """

    evidence: Any = None


@dataclass(frozen=True)
class Refused:
    """Verdict: the provider refused the operation, and will not do it."""

    error: Any


@dataclass(frozen=True)
class Unresolved:
    """Verdict: the provider could not tell. Asked again after ``retry_after`` seconds, or the usual back-off."""

    reason: str
    retry_after: float | None = None


Verdict = Happened | NotHappened | Refused | Unresolved


@dataclass(frozen=True)
class Operation:
    """One side effect, as its function and its lookup see it.

    Attributes:
        key: the stable idempotency key to hand to the provider.
        job_id, step, effect: where it stands.
        attempt: how often an intent was recorded for this key, from 1.
        tenant: the job's tenant.
        arguments: the call's arguments, bound to the effect's signature; redacted ones are absent.
        intent_at: when this attempt's intent was recorded (database clock).
        deadline_at: when its request can no longer be in flight, or ``None``.
    """

    key: str
    job_id: str
    step: str
    effect: str
    attempt: int
    tenant: str
    arguments: Mapping[str, Any]
    intent_at: datetime
    deadline_at: datetime | None
    _expires: float | None = field(default=None, repr=False, compare=False)
    _clock: Callable[[], float] | None = field(default=None, repr=False, compare=False)
    _confirm: Callable[[str, Any, Any], None] | None = field(default=None, repr=False, compare=False)
    _aconfirm: Callable[[str, Any, Any], Awaitable[None]] | None = field(default=None, repr=False, compare=False)

    def remaining(self) -> float:
        """Seconds until the deadline: the timeout to give to the provider call. Never negative.

        Returns:
            Infinity where there is no deadline. In an effect it is measured on the worker's monotonic clock, from
            before the intent was sent; in a lookup, from the wall clock.
        """
        if self._expires is not None and self._clock is not None:
            return max(0.0, self._expires - self._clock())
        if self.deadline_at is None:
            return float("inf")
        return max(0.0, (self.deadline_at - datetime.now(timezone.utc)).total_seconds())

    def confirm(self, ref: str, result: Any = None, *, transaction: Any) -> None:
        """Record the outcome in the caller's own transaction on the same database: exactly once.

        Arguments:
            ref: a non-empty reference.
            result: any JSON value.
            transaction: a SQLAlchemy Session or Connection, a psycopg connection, or a Django connection or alias.
                Its commit makes the user's rows and the outcome durable together. Call it as the last thing before the
                commit: the job's row is locked from here on, and its lease is not renewed meanwhile.

        Raises:
            LeaseLost: when this call no longer owns the operation; the caller's transaction must be rolled back.
            NoActiveJob: outside the effect's own call.
        """
        if self._confirm is None:
            raise _outside()
        self._confirm(ref, result, transaction)

    async def aconfirm(self, ref: str, result: Any = None, *, transaction: Any) -> None:
        """As :meth:`confirm`, without blocking the event loop.

        Arguments:
            ref: a non-empty reference.
            result: any JSON value.
            transaction: also SQLAlchemy's AsyncSession or AsyncConnection, or psycopg's AsyncConnection.

        Raises:
            LeaseLost: when this call no longer owns the operation; the caller's transaction must be rolled back.
            NoActiveJob: outside the effect's own call.
        """
        if self._aconfirm is None:
            raise _outside()
        await self._aconfirm(ref, result, transaction)


def _outside() -> Exception:
    from .errors import NoActiveJob

    return NoActiveJob("confirm() works only inside the effect's own call")


@dataclass(frozen=True)
class JobRow:
    """A row of the view ``jobs``."""

    id: str
    task: str
    status: str
    reason: str | None
    tenant: str
    pool: str | None
    queue: str | None
    idempotency_key: str | None
    parent_id: str | None
    attempts: int
    fence: int
    lease_owner: str | None
    lease_until: datetime | None
    cancel_requested_at: datetime | None
    eta: datetime | None
    expires_at: datetime | None
    outcome_ref: str | None
    result: Any
    last_error: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    settled_at: datetime | None


@dataclass(frozen=True)
class InFlight:
    """A job that a worker owns.

    Attributes:
        worker: host, process and thread, as in the log of transitions.
        held_s: seconds since this attempt's claim.
        left_s: seconds until its lease runs out, unless it is renewed.
        cancelled: whether it was asked to stop.
    """

    id: str
    task: str
    status: str
    tenant: str
    worker: str
    held_s: float
    left_s: float
    attempts: int
    cancelled: bool


@dataclass(frozen=True)
class OperationRow:
    """A row of the view ``operations``."""

    key: str
    job_id: str
    step: str
    effect: str
    status: str
    attempt: int
    fence: int
    args: Any
    provider_ref: str | None
    result: Any
    error: Any
    first_intent_at: datetime
    intent_at: datetime
    deadline_at: datetime | None
    resolved_at: datetime | None
    resolved_by: str | None
    evidence: Any
    reconcile_attempts: int
    next_reconcile_at: datetime | None


@dataclass(frozen=True)
class TransitionRow:
    """A row of the view ``transitions``, the append-only log."""

    id: int
    at: datetime
    job_id: str
    operation_key: str | None
    from_status: str | None
    to_status: str
    fence: int
    actor: str
    reason: str | None


@dataclass(frozen=True)
class Enqueued:
    """What became of one call of ``enqueue_many``.

    Attributes:
        status: ``accepted``; ``existing``: the same call has a job already; ``refused``: nothing was written, and
            ``error`` says why; ``unknown``: the database did not say, and the same call under the same ``job_id`` (as
            ``task_id``) or key finds out.
        job_id: the job's id; of a refused call, the id that it would have had, or of the job that holds its key; or
            ``None``.
        error: what a single call would have raised.
    """

    status: Literal["accepted", "existing", "refused", "unknown"]
    job_id: str | None
    error: Exception | None = None

    @property
    def reason(self) -> str | None:
        """A stable text for why it was refused: the error's ``reason`` or ``code``; of a foreign error, its class."""
        error = self.error
        if error is None:
            return None
        return str(getattr(error, "reason", None) or getattr(error, "code", None) or type(error).__name__)


def seconds(value: float | timedelta | None) -> float | None:
    """Seconds from a number or a timedelta; ``None`` stays ``None``."""
    return value.total_seconds() if isinstance(value, timedelta) else value
