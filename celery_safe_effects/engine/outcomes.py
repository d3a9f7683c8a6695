"""What became of a call: what a value or an exception proves, and the record of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from uuid import UUID

from .. import canonical
from ..states import OperationStatus as Op
from ..values import Outcome
from . import failures
from .lease import clock

if TYPE_CHECKING:
    from ..effects import EffectOptions
    from ..store.hot import Row
    from .job import ActiveJob

logger = logging.getLogger(__name__)

RECORD_PATIENCE = 300.0
"""Seconds for which a finished call tries to record its outcome while the database is away."""


def classify(options: EffectOptions, exc: BaseException) -> Op:
    """What an exception out of an effect proves. The allow-lists decide; anything else is unknown."""
    if options.repeatable:
        return Op.NOT_HAPPENED
    if failures.matches(exc, options.refused_on):
        return Op.REFUSED
    if failures.matches(exc, options.not_happened_on):
        return Op.NOT_HAPPENED
    return Op.UNKNOWN


def outcome_of(value: Any, key: str) -> tuple[str, str | None, str | None]:
    """What an effect returned, as reference and JSON text.

    Returns:
        the reference, the result's JSON text, and what is wrong with the value (``None`` if nothing is).
    """
    if isinstance(value, Outcome):
        ref, result = value.ref, value.result
    elif isinstance(value, str) and value:
        ref, result = value, value
    else:
        ref, result = key, value
    if not canonical.is_text(ref):
        return key, None, f"happened, but gave {ref!r} as its reference; return a non-empty string"
    try:
        return str(ref), canonical.encode(result), None
    except (TypeError, ValueError) as exc:
        return ref, None, f"happened, but what it returned is not JSON ({exc}); return JSON, or Outcome(ref, JSON)"


def message(error: Any) -> str:
    """The text of a recorded error."""
    return str(error.get("text", error)) if isinstance(error, dict) else str(error)


def record(
    job: ActiveJob,
    statement: str,
    key: str,
    nonce: UUID,
    status: Op,
    ref: str | None = None,
    result: str | None = None,
    error: Any = None,
    evidence: Any = None,
) -> Op:
    """Record what became of a call that this process made.

    Returns:
        what is recorded: of a call that was sent again, that it did not happen leaves open whether the one before did;
        and so does a refusal, unless the provider answers a repeated key with the first result.

    Raises:
        LeaseLost: the outcome may be recorded as evidence, but the job is no longer ours.
    """
    give_up = clock() + RECORD_PATIENCE
    given = params(job, key, nonce, status, ref, result, error=error, evidence=evidence)
    row = job.insist(statement, until=lambda: clock() < give_up, **given)
    if not row:
        raise job.lost()
    recorded = row[0].status or _own_record(job, key, nonce, status, ref)
    if recorded is None:
        raise job.lost()
    job.unrecorded.pop(nonce, None)
    if row[0].doubled:
        _double(job, key, ref)
    if not row[0].held:
        raise job.lost()
    return Op(recorded)


def params(
    job: ActiveJob,
    key: str,
    nonce: UUID,
    status: Op,
    ref: str | None = None,
    result: str | None = None,
    *,
    error: Any = None,
    evidence: Any = None,
) -> dict[str, Any]:
    """The parameters of the outcome statements."""
    return {
        "job": job.id,
        "token": job.lease.token,
        "fence": job.fence,
        "owner": job.lease.owner,
        "key": key,
        "nonce": nonce,
        "status": status.value,
        "ref": ref,
        "result": result,
        "error": None if error is None else canonical.encode(error),
        "evidence": None if evidence is None else canonical.encode(evidence),
        "reason": None,
        "position": job.position if status == Op.NOT_HAPPENED else None,
    }


def _own_record(job: ActiveJob, key: str, nonce: UUID, status: Op, ref: str | None) -> Op | None:
    """What is recorded already, if that is what was wanted, by an earlier try whose reply was lost."""
    found: list[Row] = job.insist("OPERATION", key=key)
    if not found:
        return None
    if found[0].nonce == nonce:
        wanted = (status, Op.UNKNOWN) if status in {Op.NOT_HAPPENED, Op.REFUSED} else (status,)
        return Op(found[0].status) if found[0].status in wanted else None
    if status == Op.OUTCOME_CONFIRMED:
        late = job.insist("LATE_OUTCOME", key=key, nonce=nonce, ref=ref, fence=job.fence, owner=job.lease.owner)
        if late and late[0].doubled:
            _double(job, key, ref)
    return None


def _double(job: ActiveJob, key: str, ref: str | None) -> None:
    logger.critical("double effect: operation %s of job %s happened more than once (%s)", key, job.id, ref)
    job.hooks.double_effect(key, job.id, ref or "")
