"""Every error of the library: one base, a stable ``code``, and what to do next.

Control-flow signals that user code must not swallow by accident (:class:`OutcomeUnknown`, :class:`LeaseLost`,
:class:`JobCancelled`) derive from :class:`BaseException`, so that ``except Exception`` in a task body lets them pass.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar


def _rebuild(cls: type[_Coded], message: str, details: dict[str, Any]) -> _Coded:
    return cls(message, **details)


class _Coded(BaseException):
    """A message, a stable code and keyword details, all of which survive pickling."""

    code: ClassVar[str] = "safe_effects"

    def __init__(self, message: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.details)

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}" if self.message else f"[{self.code}]"


class SafeEffectsError(_Coded, Exception):
    """Base of the library's ordinary exceptions.

    Attributes:
        code: a stable identifier, safe to match on.
        message: what happened and what to do next.
        details: the values that the message mentions, by name.
    """

    code = "safe_effects_error"


class ConfigurationError(SafeEffectsError):
    """A setting, a declaration or the schema is wrong; the message names the key or the command that mends it."""

    code = "configuration"


class SchemaMismatch(ConfigurationError):
    """The database's schema is missing, older than this library needs, or newer and not made for it too."""

    code = "schema_mismatch"


class PermissionMissing(ConfigurationError):
    """The database role may not do this; the message says which kind of role may, and the command that grants it.

    Attributes:
        kinds: the kinds of roles that may: ``producer``, ``worker``, ``observer``.
    """

    code = "permission_missing"

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.details.get("kinds", ()))


class StoreUnavailable(SafeEffectsError):
    """PostgreSQL could not be reached, or did not answer within the statement timeout."""

    code = "store_unavailable"


class AdmissionRejected(SafeEffectsError):
    """The job was not accepted, and nothing was written.

    Attributes:
        reason: stable text, such as ``tenant_queue_limit``.
        limit: the limit that refused, or ``None``.
        current: the present value, or ``None``.
        retry_after: seconds after which to try again, or ``None``.
    """

    code = "admission_rejected"

    @property
    def reason(self) -> str:
        return str(self.details.get("reason", ""))

    @property
    def limit(self) -> int | None:
        return self.details.get("limit")

    @property
    def current(self) -> int | None:
        return self.details.get("current")

    @property
    def retry_after(self) -> float | None:
        return self.details.get("retry_after")

    @property
    def status_code(self) -> int:
        """What it is in HTTP: 429, or 413 for a payload that is too large, which no waiting mends."""
        return 413 if self.reason == "payload_too_large" else 429

    @property
    def headers(self) -> dict[str, str]:
        """``Retry-After`` for HTTP, in whole seconds, where trying again later may help."""
        return {} if self.retry_after is None else {"Retry-After": str(max(1, math.ceil(self.retry_after)))}


class PayloadTooLarge(AdmissionRejected):
    """The encoded arguments exceed ``safe_effects_max_payload``; nothing was written."""

    code = "payload_too_large"


class PayloadInvalid(SafeEffectsError):
    """The arguments cannot be encoded; nothing was written."""

    code = "payload_invalid"


class AcceptanceUnknown(SafeEffectsError):
    """The database did not confirm whether the job was accepted.

    Enqueue again with the same ``task_id`` (or idempotency key): an accepted job is then returned, not doubled.

    Attributes:
        job_id: the id under which the job may have been accepted.
    """

    code = "acceptance_unknown"

    @property
    def job_id(self) -> str:
        return str(self.details["job_id"])


class IdempotencyConflict(SafeEffectsError):
    """The idempotency key (or task id) belongs to a job with another task or other arguments.

    Attributes:
        job_id: the job that holds the key; it is unchanged.
    """

    code = "idempotency_conflict"

    @property
    def job_id(self) -> str | None:
        return self.details.get("job_id")


class ReplayMismatch(SafeEffectsError):
    """A replayed body asked for another effect, or other arguments, at a step that is already recorded."""

    code = "replay_mismatch"


class UndeclaredEffect(SafeEffectsError):
    """The task called an effect that its ``effects=`` does not list; nothing was recorded."""

    code = "undeclared_effect"


class StepNameRequired(SafeEffectsError):
    """An unnamed effect was called while another one of the job was open; name it: ``effect.step("name")(...)``."""

    code = "step_name_required"


class OperationBusy(SafeEffectsError):
    """The same operation key is being called elsewhere in this job."""

    code = "operation_busy"


class NoActiveJob(SafeEffectsError):
    """An effect (or ``self.job``) was used outside a running job."""

    code = "no_active_job"


class EffectRefused(SafeEffectsError):
    """The provider said no, which is proven; the original exception is the cause. The same again on replay."""

    code = "effect_refused"


class EffectResultInvalid(SafeEffectsError):
    """The effect happened and is recorded, but what it returned is not JSON; it is not called again."""

    code = "effect_result_invalid"


class AttemptsExhausted(SafeEffectsError):
    """The job's runs ended without a result as often as ``max_attempts`` allows; the message says how the last did."""

    code = "attempts_exhausted"


class NotFound(SafeEffectsError):
    """No such job or operation."""

    code = "not_found"


class NotAllowed(SafeEffectsError):
    """The present state does not allow this; nothing was changed."""

    code = "not_allowed"


class OutcomeUnknown(_Coded, BaseException):
    """It cannot be told whether the effect happened; the job is parked as ``unknown``."""

    code = "outcome_unknown"


class LeaseLost(_Coded, BaseException):
    """This worker no longer owns the job: another one took over, or its lease ran out. Nothing more was recorded."""

    code = "lease_lost"


class JobCancelled(_Coded, BaseException):
    """The job was cancelled (or is too old); raised at a checkpoint or before an effect, never inside one."""

    code = "job_cancelled"


class Deferred(_Coded, BaseException):
    """Internal signal: the job cannot go on yet and returns to ``queued`` without spending an attempt."""

    code = "deferred"
