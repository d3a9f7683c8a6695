"""Background work on Celery that never does the same thing twice and never loses what was accepted."""

from .app import SafeEffects
from .effects import effect
from .errors import (
    AcceptanceUnknown,
    AdmissionRejected,
    EffectRefused,
    IdempotencyConflict,
    JobCancelled,
    LeaseLost,
    NoActiveJob,
    OperationBusy,
    OutcomeUnknown,
    ReplayMismatch,
    SafeEffectsError,
    StepNameRequired,
    UndeclaredEffect,
)
from .glue.task import SafeTask
from .limits import Limits
from .values import Enqueued, Happened, NotHappened, Operation, Outcome, Refused, Unresolved

__version__ = "0.1.0"

__all__ = [
    "AcceptanceUnknown",
    "AdmissionRejected",
    "EffectRefused",
    "Enqueued",
    "Happened",
    "IdempotencyConflict",
    "JobCancelled",
    "LeaseLost",
    "Limits",
    "NoActiveJob",
    "NotHappened",
    "Operation",
    "OperationBusy",
    "Outcome",
    "OutcomeUnknown",
    "Refused",
    "ReplayMismatch",
    "SafeEffects",
    "SafeEffectsError",
    "SafeTask",
    "StepNameRequired",
    "UndeclaredEffect",
    "Unresolved",
    "__version__",
    "effect",
]
