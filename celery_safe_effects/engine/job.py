"""A running job: records an intent before every side effect and an outcome after it, and replays what is recorded.

The call of an effect and the recording of its outcome never share a ``try``: whatever is not proven is unknown.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_OID, UUID, uuid4, uuid5

import psycopg

from .. import canonical
from ..errors import (
    Deferred,
    EffectRefused,
    EffectResultInvalid,
    IdempotencyConflict,
    JobCancelled,
    LeaseLost,
    OperationBusy,
    OutcomeUnknown,
    ReplayMismatch,
    SafeEffectsError,
    SchemaMismatch,
    StepNameRequired,
    StoreUnavailable,
    UndeclaredEffect,
)
from ..states import OperationStatus as Op
from ..store.enlist import enlist
from ..store.hot import Intent, Row, Store
from ..values import Operation, Outcome
from . import deadline, failures, process
from .lease import HeldLease, clock

if TYPE_CHECKING:
    from ..effects import Effect, EffectOptions

logger = logging.getLogger(__name__)

STORE_ERRORS = (StoreUnavailable, SchemaMismatch, psycopg.Error)
RECORD_PATIENCE = 300.0
"""Seconds for which a finished call tries to record its outcome while the database is away."""


@dataclass(frozen=True)
class Hooks:
    """What the surroundings want to know: Celery's signals and counters hang here."""

    double_effect: Callable[[str, str, str], None] = lambda _key, _job, _ref: None
    armed: Callable[[float | None], AbstractContextManager[bool]] = deadline.killed_after


class ActiveJob:
    """One attempt of a job, in the process that runs it.

    Attributes:
        id, tenant, pool: the job's.
        attempt: how often the job was started, from 1.
        fence: the fencing token of this attempt's lease.
    """

    def __init__(
        self,
        store: Store,
        held: HeldLease,
        row: Row,
        *,
        declared: tuple[Effect[Any, Any], ...] | None,
        hooks: Hooks,
        prefork: bool,
        recorded: list[Row] | None = None,
    ) -> None:
        self.store = store
        self.held = held
        self.lease = held.lease
        self.id: str = row.id
        self.tenant: str = row.tenant
        self.pool: str | None = row.pool
        self.attempt: int = row.attempts
        self.fence: int = row.fence
        self.generation: int = row.generation
        self.declared = declared
        self.hooks = hooks
        self.prefork = prefork
        self.operation: Operation | None = None
        """The whole body's operation; ``None`` where effects are declared."""
        self.last_ref: str | None = None
        self.parked: OutcomeUnknown | None = None
        self.mismatch: ReplayMismatch | None = None
        self.not_happened: BaseException | None = None
        self.outgoing: Any = None
        self.children = 0
        self.in_body = False
        self.retries_over = False
        self._lock = threading.Lock()
        self._open: set[str] = set()
        self._enlisted: set[UUID] = set()
        self._unrecorded: set[UUID] = set()
        self._passed: int = row.passed
        self._not_passed: int = 0
        self._ordinal = 0
        # What an earlier generation (before ``self.replace()``) recorded is not this body's.
        self._recorded = {r.key: r for r in recorded or () if r.keyed or r.key == self.key(r.step)}
        self._last_recorded = max((record.ordinal for record in self._recorded.values()), default=0)

    # -- what users see as self.job ------------------------------------------------------------------------------------

    @property
    def cancel_requested(self) -> bool:
        """Whether a cancel was seen at the last renewal or checkpoint; no round trip."""
        return self.held.cancelled

    def checkpoint(self) -> None:
        """Ask the database whether to go on; also renews the lease.

        Raises:
            JobCancelled: the job was cancelled, expired, or is too old.
            LeaseLost: another worker owns the job, or the lease ran out.
        """
        if self.held.lost:
            raise self._lost()
        since = clock()
        rows = self._insist(
            "CHECKPOINT",
            until=self.held.trusted,
            job=self.id,
            token=self.lease.token,
            fence=self.fence,
            ttl=self.held.ttl,
        )
        if not rows:
            raise self._lost()
        self.held.renewed = max(self.held.renewed, since)
        if rows[0].cancelled or rows[0].dying:
            self.held.cancelled = self.held.cancelled or rows[0].cancelled
            raise self._cancelled(rows[0].cancelled)

    # -- effects -------------------------------------------------------------------------------------------------------

    def call(
        self,
        effect: Effect[Any, Any],
        step: str | None,
        keyed: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Outcome[Any]:
        """Run one declared effect, or return what is recorded for it; the effect's own docstring says more."""
        if self.declared is None or effect not in self.declared:
            listed = "whose whole body is one effect" if self.declared is None else "whose effects= does not list it"
            raise UndeclaredEffect(
                f"effect {effect.name!r} was called by a task {listed}; add it to the task's effects=[...]",
                effect=effect.name,
            )
        bound = effect.bind(args, kwargs)
        arguments = dict(bound.arguments)
        try:
            content = canonical.canonical(arguments)
        except (TypeError, ValueError) as exc:
            raise SafeEffectsError(
                f"effect {effect.name!r}: its arguments are not JSON ({exc}); nothing was recorded or called"
            ) from exc
        digest = canonical.digest(content)
        shown = {name: value for name, value in arguments.items() if name not in effect.options.redact}
        with self._slot(effect, step, keyed) as (name, ordinal):
            key = f"{self.tenant}/{effect.name}/{keyed}" if keyed else self.key(name)
            replayed = self._replay(effect, name, key, digest)
            if replayed is not None:
                return replayed
            if self.parked is not None:
                raise OutcomeUnknown(f"job {self.id} is parked; no further effect starts", job_id=self.id)
            if keyed is not None:
                self.pass_over()  # the answer may be another job's, and no intent of this one
            intent = Intent(
                key=key,
                step=name,
                ordinal=ordinal,
                effect=effect.name,
                keyed=keyed is not None,
                args=content if len(shown) == len(arguments) else canonical.canonical(shown),
                args_digest=digest,
                whole_body=False,
                **intent_options(effect, self.prefork),
            )
            nonce = uuid4()
            self._unrecorded.add(nonce)
            try:
                return self._perform(effect, intent, nonce, bound, shown)
            finally:
                # Interrupted (a time limit, a shutdown) between its intent and the record of its outcome.
                if nonce in self._unrecorded and self.parked is None:
                    self._unknown(key, "its outcome was not recorded")

    def pass_over(self) -> None:
        """The body does something else than an effect of its own: steps that did not happen are behind it now.

        Raises:
            LeaseLost: nothing else may be done.
        """
        if self._not_passed > self._passed:
            rows = self._insist(
                "WENT_ON",
                until=self.held.trusted,
                id=self.id,
                token=self.lease.token,
                fence=self.fence,
                ordinal=self._not_passed,
            )
            if not rows:
                raise self._lost()
            self._passed = rows[0].passed

    def child_id(self) -> str:
        """The id of the next message (or canvas) that the body makes: the same each time that the body runs."""
        with self._lock:
            self.children += 1
            return str(uuid5(NAMESPACE_OID, f"{self.id}:{self.generation}:child:{self.children}"))

    def key(self, step: str) -> str:
        """The operation key of a step; after ``self.replace()`` it carries the generation."""
        return f"{self.id}:{step}" if not self.generation else f"{self.id}:{self.generation}:{step}"

    @contextlib.contextmanager
    def _slot(self, effect: Effect[Any, Any], step: str | None, keyed: str | None) -> Iterator[tuple[str, int]]:
        with self._lock:
            if step is None and keyed is None and self._open:
                raise StepNameRequired(
                    f"effect {effect.name!r} was called while {', '.join(sorted(self._open))} is open; name "
                    f'overlapping calls: {effect.__name__}.step("...")(...)'
                )
            ordinal = self._ordinal + 1
            name = step or (f"{effect.name}/{keyed}" if keyed else str(ordinal))
            if name in self._open:
                raise OperationBusy(f"step {name!r} of job {self.id} is being called already", step=name)
            self._ordinal = ordinal
            self._open.add(name)
        try:
            yield name, ordinal
        finally:
            with self._lock:
                self._open.discard(name)

    def _replay(self, effect: Effect[Any, Any], step: str, key: str, digest: str) -> Outcome[Any] | None:
        record = self._recorded.get(key)
        if record is None:
            return None
        self._same_call(effect, record, step, digest)
        error = canonical.decode(record.error)
        behind = record.ordinal < self._last_recorded or record.ordinal <= self._passed
        if record.status == Op.NOT_HAPPENED and error is not None and behind:
            # The body went on from this very exception: it must do so again.
            raise failures.from_json(error)
        return self._settled(record, replayed=True)

    def _same_call(self, effect: Effect[Any, Any], record: Row, step: str, digest: str) -> None:
        if record.effect != effect.name or record.args_digest != digest:
            what = f"effect {effect.name!r}" if record.effect != effect.name else "other arguments"
            self.mismatch = ReplayMismatch(
                f"step {step!r} of job {self.id} is recorded as {record.effect!r}, the replay asks for {what}; the "
                "body must make the same calls each time it runs: put clocks, randomness, reads in repeatable effects",
                job_id=self.id,
                step=step,
            )
            raise self.mismatch

    def _settled(self, record: Row, *, replayed: bool) -> Outcome[Any] | None:
        """What a resolved record stands for; ``None`` for one that may be sent (again)."""
        if record.status == Op.OUTCOME_CONFIRMED:
            if not record.repeatable:
                self.last_ref = record.provider_ref
            if record.error is not None:
                raise EffectResultInvalid(*_message(canonical.decode(record.error)))
            return Outcome(record.provider_ref, canonical.decode(record.result), replayed)
        if record.status == Op.REFUSED:
            error = canonical.decode(record.error)
            cause = failures.from_json(error)
            raise EffectRefused(f"{record.effect} was refused: {cause}", key=record.key) from cause
        return None

    def _perform(
        self,
        effect: Effect[Any, Any],
        intent: Intent,
        nonce: UUID,
        bound: inspect.BoundArguments,
        shown: Mapping[str, Any],
    ) -> Outcome[Any]:
        options = effect.options
        if not self.held.trusted():
            self._unrecorded.discard(nonce)
            raise self._lost()
        started = clock()
        expires = started + options.deadline if options.deadline and not options.repeatable else None
        kill = options.deadline if self.prefork and options.kill_at_deadline and not options.repeatable else None
        with self.hooks.armed(kill):
            try:
                live, row = self.store.intent(self.lease, intent, nonce, process.identity(), self.held.trusted)
            except STORE_ERRORS as exc:
                raise self._lost() from exc
            if row is None:
                row = self._not_recorded(effect, intent, nonce, live)
                if isinstance(row, Outcome):
                    return row
            if (expires is not None and clock() >= expires) or not self.held.trusted():
                # The call has not begun, which its owner can prove.
                self._record(intent, nonce, Op.NOT_HAPPENED, evidence={"not_called": "its time was over"})
                raise self._lost()
            op = Operation(
                key=intent.key,
                job_id=self.id,
                step=intent.step,
                effect=effect.name,
                attempt=row.attempt,
                tenant=self.tenant,
                arguments=dict(shown),
                intent_at=row.intent_at,
                deadline_at=row.deadline_at,
                _expires=expires,
                _clock=clock,
                _confirm=functools.partial(self._confirm, intent, nonce),
            )
            value: Any = None
            raised: BaseException | None = None
            try:
                value = effect.fn(op, *bound.args, **bound.kwargs)
            except BaseException as exc:
                raised = exc
        if nonce in self._enlisted:
            return self._after_confirm(intent, nonce, raised)
        if raised is not None:
            return self._raised(effect, intent, nonce, raised)
        return self._returned(effect, intent, nonce, value)

    def _not_recorded(self, effect: Effect[Any, Any], intent: Intent, nonce: Any, live: bool) -> Outcome[Any] | Any:
        """The intent statement changed nothing: say why, or find that an earlier try of it got through."""
        if not live:
            self._unrecorded.discard(nonce)
            found = self._insist("JOB", until=self.held.trusted, id=self.id)
            job = found[0] if found else None
            ours = job is not None and (job.lease_token, job.fence) == (self.lease.token, self.fence)
            if job is not None and ours and job.status == "running" and (job.cancelled or job.dying):
                raise self._cancelled(job.cancelled)
            raise self._lost()
        record = self._insist("OPERATION", until=self.held.trusted, key=intent.key)[0]
        if record.nonce == nonce:
            return self._insist("INTENT_OF", until=self.held.trusted, key=intent.key)[0]
        self._unrecorded.discard(nonce)
        if record.job_id != self.id or intent.keyed:
            if record.effect != effect.name or record.args_digest != intent.args_digest:
                raise IdempotencyConflict(
                    f"operation {intent.key} is recorded with other arguments by job {record.job_id}",
                    job_id=record.job_id,
                )
        else:
            self._same_call(effect, record, intent.step, intent.args_digest)
        outcome = self._settled(record, replayed=True)
        if outcome is not None:
            return outcome
        if record.job_id != self.id:
            raise Deferred(f"waiting for operation {intent.key} of job {record.job_id}", waiting_for=intent.key)
        if record.status == Op.INTENT_RECORDED:
            raise OperationBusy(f"operation {intent.key} is being called already in this job", key=intent.key)
        raise self._unknown(intent.key, "an earlier attempt's outcome is not known")

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def _returned(self, effect: Effect[Any, Any], intent: Intent, nonce: Any, value: Any) -> Outcome[Any]:
        ref, result, invalid = outcome_of(value, intent.key)
        error = None if invalid is None else {"text": f"effect {effect.name!r} {invalid}"}
        self._record(intent, nonce, Op.OUTCOME_CONFIRMED, ref=ref, result=result, error=error)
        if not intent.repeatable:
            self.last_ref = ref
        if error is not None:
            raise EffectResultInvalid(*_message(error))
        return Outcome(ref, canonical.decode(result))

    def _raised(self, effect: Effect[Any, Any], intent: Intent, nonce: Any, exc: BaseException) -> Outcome[Any]:
        options = effect.options
        status = classify(options, exc)
        self._record(intent, nonce, status, error=failures.to_json(exc))
        if status == Op.REFUSED:
            raise EffectRefused(f"{effect.name} was refused: {exc}", key=intent.key) from exc
        if status == Op.NOT_HAPPENED:
            self._not_passed = max(self._not_passed, intent.ordinal)
            if not intent.repeatable:
                self.not_happened = exc
            raise exc
        raise self._unknown(intent.key, failures.to_json(exc)["text"]) from exc

    def _confirm(self, intent: Intent, nonce: UUID, ref: str, result: Any, transaction: Any) -> None:
        """``op.confirm()``: the outcome in the caller's own transaction, committed or undone with the caller's rows."""
        found, encoded, invalid = outcome_of(Outcome(ref, result), intent.key)
        if invalid is not None:
            raise SafeEffectsError(f"op.confirm() of {intent.key}: {invalid}; nothing was recorded")
        self._enlisted.add(nonce)
        params = self._outcome_params(intent.key, nonce, Op.OUTCOME_CONFIRMED, found, encoded)
        rows = self.store.enlisted_rows(enlist(transaction), "OUTCOME", **params)
        if not rows or rows[0].status is None or not rows[0].held:
            raise self._lost()

    def _after_confirm(self, intent: Intent, nonce: UUID, raised: BaseException | None) -> Outcome[Any]:
        """Whether the caller's transaction was committed, the record itself says: nothing here is ever unknown."""
        record = self._insist("OPERATION", key=intent.key)[0]
        self._unrecorded.discard(nonce)
        if record.nonce == nonce and record.status == Op.INTENT_RECORDED:
            error = failures.to_json(raised) if raised is not None else None
            # Waits for the row if the transaction is being committed at this moment, and then finds it resolved.
            row = self._insist(
                "OUTCOME", **self._outcome_params(intent.key, nonce, Op.NOT_HAPPENED, None, None, error=error)
            )[0]
            if row.status is not None:
                why = raised or SafeEffectsError(
                    f"the transaction given to op.confirm() of {intent.key} was not committed; nothing happened"
                )
                self.not_happened = why
                self._not_passed = max(self._not_passed, intent.ordinal)
                raise why
            record = self._insist("OPERATION", key=intent.key)[0]
        if record.nonce != nonce or record.status != Op.OUTCOME_CONFIRMED:
            raise self._lost()
        if raised is not None:
            logger.warning(
                "operation %s is committed; what its effect raised afterwards is dropped: %r", intent.key, raised
            )
        self.last_ref = record.provider_ref
        return Outcome(record.provider_ref, canonical.decode(record.result))

    def _record(
        self,
        intent: Intent,
        nonce: Any,
        status: Op,
        *,
        ref: str | None = None,
        result: str | None = None,
        error: Any = None,
        evidence: Any = None,
    ) -> None:
        # Without key and lookup nothing else can ever tell the outcome: wait for the disk.
        recoverable = intent.repeatable or intent.has_lookup or intent.idempotent_for is not None
        statement = "OUTCOME_ASYNC" if status == Op.OUTCOME_CONFIRMED and recoverable else "OUTCOME"
        self.record_outcome(statement, intent.key, nonce, status, ref, result, error, evidence)

    def record_outcome(
        self,
        statement: str,
        key: str,
        nonce: Any,
        status: Op,
        ref: str | None,
        result: str | None,
        error: Any,
        evidence: Any = None,
        reason: str | None = None,
    ) -> Row:
        """Record what became of a call that this process made.

        Raises:
            LeaseLost: the outcome may be recorded as evidence, but the job is no longer ours.
        """
        give_up = clock() + RECORD_PATIENCE
        params = self._outcome_params(key, nonce, status, ref, result, error=error, evidence=evidence, reason=reason)
        row = self._insist(statement, until=lambda: clock() < give_up, **params)
        if not row:
            raise self._lost()
        if row[0].status is None and not self._own_record(key, nonce, status, ref):
            raise self._lost()
        self._unrecorded.discard(nonce)
        if row[0].doubled:
            self._double(key, ref)
        if not row[0].held:
            raise self._lost()
        return row[0]

    def _outcome_params(
        self,
        key: str,
        nonce: UUID,
        status: Op,
        ref: str | None,
        result: str | None,
        *,
        error: Any = None,
        evidence: Any = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        return {
            "job": self.id,
            "token": self.lease.token,
            "fence": self.fence,
            "owner": self.lease.owner,
            "key": key,
            "nonce": nonce,
            "status": status.value,
            "ref": ref,
            "result": result,
            "error": None if error is None else canonical.encode(error),
            "evidence": None if evidence is None else canonical.encode(evidence),
            "reason": reason,
        }

    def _own_record(self, key: str, nonce: Any, status: Op, ref: str | None) -> bool:
        """Whether the record is already as wanted, by an earlier try whose reply was lost."""
        record = self._insist("OPERATION", key=key)
        if not record:
            return False
        if record[0].nonce == nonce:
            return bool(record[0].status == status)
        if status == Op.OUTCOME_CONFIRMED:
            late = self._insist("LATE_OUTCOME", key=key, nonce=nonce, ref=ref, fence=self.fence, owner=self.lease.owner)
            if late and late[0].doubled:
                self._double(key, ref)
        return False

    def _double(self, key: str, ref: str | None) -> None:
        logger.critical("double effect: operation %s of job %s happened more than once (%s)", key, self.id, ref)
        self.hooks.double_effect(key, self.id, ref or "")

    def _insist(self, statement: str, /, **params: Any) -> list[Row]:
        """Run a statement that may be repeated.

        Raises:
            LeaseLost: the database does not take it; what became of the job, it will say to others. Never the error
                itself, which the body could take for the effect's.
        """
        try:
            return self.store.insist(statement, **params)
        except STORE_ERRORS as exc:
            logger.error("job %s: the database does not take %s: %s", self.id, statement, exc)
            raise self._lost() from exc

    # -- reasons to stop -----------------------------------------------------------------------------------------------

    def _lost(self) -> LeaseLost:
        self.held.lost = True
        return LeaseLost(
            f"job {self.id} (fence {self.fence}) is no longer ours; nothing more is recorded", job_id=self.id
        )

    def _unknown(self, key: str, why: str) -> OutcomeUnknown:
        self.parked = OutcomeUnknown(
            f"operation {key}: {why}; the job is parked until a lookup, the policy or an operator resolves it",
            key=key,
            job_id=self.id,
        )
        return self.parked

    def _cancelled(self, requested: bool) -> JobCancelled:
        why = "cancelled" if requested else "expired or too old"
        return JobCancelled(f"job {self.id} is {why}", job_id=self.id, requested=requested)


def intent_options(effect: Effect[Any, Any], prefork: bool) -> dict[str, Any]:
    """The part of an intent that the effect's declaration fixes."""
    options = effect.options
    timed = not options.repeatable
    return {
        "repeatable": options.repeatable,
        "deadline": options.deadline if timed else None,
        "lag": options.lookup_lag,
        "idempotent_for": options.idempotent_for,
        "has_lookup": effect.find is not None,
        "if_unknown": options.if_unknown,
        "detached": options.detached,
        "deadline_is_proof": bool(
            timed and options.trust_deadline_kill and options.kill_at_deadline and prefork and deadline.available()
        ),
    }


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


def _message(error: Any) -> tuple[str]:
    return (str(error.get("text", error)) if isinstance(error, dict) else str(error),)
