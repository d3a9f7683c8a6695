"""States and legal transitions: the one home of both.

The database's triggers refuse everything that is not listed here; a test holds the two against each other.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class JobStatus(str, Enum):
    """What a job can be. See the state diagram in the documentation."""

    QUEUED = "queued"
    LEASED = "leased"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    UNKNOWN = "unknown"
    CANCELLED = "cancelled"

    def __str__(self) -> str:
        return self.value


class OperationStatus(str, Enum):
    """What one recorded side effect can be."""

    INTENT_RECORDED = "intent_recorded"
    OUTCOME_CONFIRMED = "outcome_confirmed"
    REFUSED = "refused"
    NOT_HAPPENED = "not_happened"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


EXPRESS: Final = ".express"
"""Ends the name of the lane beside a queue; the database's function ``express_of`` says the same."""

TERMINAL: Final = frozenset({JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED})
LIVE: Final = frozenset({JobStatus.LEASED, JobStatus.RUNNING})
UNRESOLVED: Final = frozenset({OperationStatus.INTENT_RECORDED, OperationStatus.UNKNOWN})

J, P = JobStatus, OperationStatus

JOB_TRANSITIONS: Final[dict[JobStatus, frozenset[JobStatus]]] = {
    J.QUEUED: frozenset({J.LEASED, J.UNKNOWN, J.FAILED, J.CANCELLED}),
    J.LEASED: frozenset({J.RUNNING, J.QUEUED, J.UNKNOWN, J.FAILED, J.CANCELLED}),
    J.RUNNING: frozenset({J.QUEUED, J.SUCCEEDED, J.FAILED, J.UNKNOWN, J.CANCELLED}),
    J.UNKNOWN: frozenset({J.QUEUED, J.SUCCEEDED, J.FAILED, J.CANCELLED}),
    J.FAILED: frozenset({J.QUEUED}),  # an operator's retry
    J.CANCELLED: frozenset({J.QUEUED}),  # an operator's retry
    J.SUCCEEDED: frozenset(),
}
"""``queued → running`` in one statement is two transitions, and the trigger writes two log rows for it."""

OPERATION_TRANSITIONS: Final[dict[OperationStatus, frozenset[OperationStatus]]] = {
    P.INTENT_RECORDED: frozenset({P.OUTCOME_CONFIRMED, P.REFUSED, P.NOT_HAPPENED, P.UNKNOWN}),
    # unknown → intent_recorded is a resend: the trigger also asks for the resend rule or the declared policy.
    P.UNKNOWN: frozenset({P.OUTCOME_CONFIRMED, P.REFUSED, P.NOT_HAPPENED, P.INTENT_RECORDED}),
    P.NOT_HAPPENED: frozenset({P.INTENT_RECORDED, P.OUTCOME_CONFIRMED}),
    P.OUTCOME_CONFIRMED: frozenset(),
    P.REFUSED: frozenset(),
}

del J, P

UNKNOWN_STATE: Final = "UNKNOWN"
"""The result backend's state of a parked job; not one of Celery's ready states, so ``get()`` keeps waiting."""
