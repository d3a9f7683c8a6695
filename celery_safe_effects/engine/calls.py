"""One call of an effect: the intent before it, the call itself, the outcome after it.

The call and the recording of its outcome never share a ``try``: whatever is not proven is unknown.
"""

from __future__ import annotations

import functools
import inspect
import logging
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from .. import canonical, faults
from ..errors import (
    Deferred,
    EffectRefused,
    EffectResultInvalid,
    IdempotencyConflict,
    OperationBusy,
    OutcomeUnknown,
    SafeEffectsError,
    UndeclaredEffect,
)
from ..faults import Point
from ..states import OperationStatus as Op
from ..store.enlist import enlist, enlist_async, is_async
from ..store.hot import STORE_ERRORS, Intent, Row
from ..values import Operation, Outcome
from . import failures, loop, outcomes, process
from .admission import check_size, too_many_operations
from .lease import Moment, clock
from .outcomes import classify, outcome_of
from .tracing import Span

if TYPE_CHECKING:
    from ..effects import Effect
    from .job import ActiveJob

logger = logging.getLogger(__name__)

IN_DOUBT = "the call that was sent again did nothing, which says nothing of the one before"


def call(
    job: ActiveJob,
    effect: Effect[Any, Any],
    step: str | None,
    keyed: str | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Outcome[Any]:
    """Run one declared effect, or return what is recorded for it; the effect's own docstring says more."""
    with Call(job, effect, step, keyed, args, kwargs) as made:
        recorded = made.replayed() or made.begin()
        if recorded is not None:
            return recorded
        why_not = made.why_not()
        if why_not is not None:
            made.not_called()
            raise why_not
        value: Any = None
        raised: BaseException | None = None
        try:
            value = made.run()
            if inspect.isawaitable(value):  # a plain function that makes one
                value = loop.complete(value)
        except BaseException as exc:
            raised = exc
        return made.finish(value, raised)


async def acall(
    job: ActiveJob,
    effect: Effect[Any, Any],
    step: str | None,
    keyed: str | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Outcome[Any]:
    """The same for an effect that is awaited: its statements run beside the loop, and always to their end."""
    with Call(job, effect, step, keyed, args, kwargs) as made:
        recorded = made.replayed()
        if recorded is not None:
            return recorded
        found, cancelled = await loop.in_thread(made.begin)
        if found is not None:
            outcome = found
        else:
            why_not = cancelled or made.why_not()
            if why_not is not None:
                await loop.in_thread(made.not_called)
                if cancelled is not None:
                    job.uncalled = made.intent.step
                raise why_not
            value: Any = None
            raised: BaseException | None = None
            try:
                value = await made.run()
            except GeneratorExit:
                raise  # the loop was closed, and nobody runs this coroutine any more
            except BaseException as exc:
                raised = exc
            outcome, cancelled = await loop.in_thread(lambda: made.finish(value, raised))
        if cancelled is not None:
            raise cancelled
        return outcome


class Call:
    """One call; use it as a context manager, begin it, make the call, finish it.

    Arguments:
        job: whose call it is.
        effect: what is called.
        step, keyed: the call's own name, or its business key.
        args, kwargs: the call's arguments.

    Raises:
        UndeclaredEffect, SafeEffectsError, TypeError, StepNameRequired, OperationBusy: nothing was recorded or called.
    """

    def __init__(
        self,
        job: ActiveJob,
        effect: Effect[Any, Any],
        step: str | None,
        keyed: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if job.declared is None or effect not in job.declared:
            listed = "whose whole body is one effect" if job.declared is None else "whose effects= does not list it"
            raise UndeclaredEffect(
                f"effect {effect.name!r} was called by a task {listed}; add it to the task's effects=[...]",
                effect=effect.name,
            )
        self.job = job
        self.effect = effect
        self.nonce = uuid4()
        self.op: Operation | None = None
        self._bound = effect.bind(args, kwargs)
        arguments = dict(self._bound.arguments)
        try:
            content = canonical.canonical(arguments)
        except (TypeError, ValueError) as exc:
            raise SafeEffectsError(
                f"effect {effect.name!r}: its arguments are not JSON ({exc}); nothing was recorded or called"
            ) from exc
        self._shown = {name: value for name, value in arguments.items() if name not in effect.options.redact}
        job.veil.hide(*(value for name, value in arguments.items() if name not in self._shown))
        shown = content if len(self._shown) == len(arguments) else canonical.canonical(self._shown)
        most = job.store.config.max_payload
        check_size(f"what a call of {effect.name} records", len(shown), most, "nothing was recorded or called")
        self._alarm = ExitStack()
        self._span = Span()
        self._status: Op | None = None
        self._confirmed = False
        self._expires: float | None = None
        name, ordinal = job.open_step(effect, step, keyed)
        self.intent = Intent(
            key=f"{job.tenant}/{effect.name}/{keyed}" if keyed else job.key(name),
            step=name,
            ordinal=ordinal,
            effect=effect.name,
            keyed=keyed is not None,
            args=shown,
            args_digest=canonical.digest(content),
            whole_body=False,
            **intent_options(effect),
        )

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._alarm.close()
        self._span.end(self._status, exc)
        self.job.close_step(self.intent.step)
        # Interrupted (a time limit, a shutdown) between its intent and the record of its outcome.
        if self.nonce in self.job.unrecorded and self.job.parked is None:
            self.job.parks(self.intent.key, "its outcome was not recorded")

    # -- before the call -----------------------------------------------------------------------------------------------

    def replayed(self) -> Outcome[Any] | None:
        """What an earlier attempt of the job recorded for this call; ``None`` where the call is to be made."""
        intent = self.intent
        return self.job.recorded.outcome(self.effect, intent.step, intent.key, intent.args_digest)

    def begin(self) -> Outcome[Any] | None:
        """Record the intent.

        Returns:
            what is recorded for this call by now; ``None`` where it is to be made.
        """
        job, effect, intent = self.job, self.effect, self.intent
        if job.parked is not None:
            raise OutcomeUnknown(f"job {job.id} is parked; no further effect starts", job_id=job.id)
        if intent.keyed:
            job.pass_over()  # the answer may be another job's, and no intent of this one
        else:
            job.go_on()
        options = effect.options
        if not job.held.trusted():
            raise job.lost()
        self._span = job.hooks.tracing.effect(job, effect, intent)
        job.unrecorded[self.nonce] = intent.key
        sent = Moment()
        armed = self._alarm.enter_context(job.hooks.armed(kill_after(effect, job.prefork)))
        intent = self.intent = intent._replace(trace=self._span.trace, **what_ends_it(effect, armed))
        try:
            live, row = job.store.intent(job.lease, intent, self.nonce, process.identity(), job.held.trusted, sent)
        except STORE_ERRORS as exc:
            raise job.lost() from exc
        self._expires = sent.at + options.deadline if options.deadline and not options.repeatable else None
        if row is None:
            row = self._not_recorded(live)
            if isinstance(row, Outcome):
                return row
        self.op = Operation(
            key=intent.key,
            job_id=job.id,
            step=intent.step,
            effect=effect.name,
            attempt=row.attempt,
            tenant=job.tenant,
            arguments=dict(self._shown),
            intent_at=row.intent_at,
            deadline_at=row.deadline_at,
            _expires=self._expires,
            _clock=clock,
            _confirm=self._confirm,
            _aconfirm=self._aconfirm,
        )
        return None

    def _not_recorded(self, live: bool) -> Outcome[Any] | Row:
        """The intent statement changed nothing: say why, or find that an earlier try of it got through."""
        job, effect, intent = self.job, self.effect, self.intent
        if not live:
            job.unrecorded.pop(self.nonce, None)
            found = job.insist("JOB", until=job.held.trusted, id=job.id)
            row = found[0] if found else None
            ours = row is not None and (row.lease_token, row.fence) == (job.lease.token, job.fence)
            if row is not None and ours and row.status == "running" and (row.cancelled or row.dying):
                raise job.cancelled(row)
            raise job.lost()
        records = job.insist("OPERATION", until=job.held.trusted, key=intent.key)
        if not records:
            job.unrecorded.pop(self.nonce, None)
            full = job.insist("JOB", until=job.held.trusted, id=job.id)[0]
            raise too_many_operations(job.id, full.max_operations, full.operations)
        record = records[0]
        if record.nonce == self.nonce:
            return job.insist("INTENT_OF", until=job.held.trusted, key=intent.key)[0]
        job.unrecorded.pop(self.nonce, None)
        if record.job_id != job.id or intent.keyed:
            if record.effect != effect.name or record.args_digest != intent.args_digest:
                raise IdempotencyConflict(
                    f"operation {intent.key} is recorded with other arguments by job {record.job_id}",
                    job_id=record.job_id,
                )
        else:
            job.recorded.same_call(effect, record, intent.step, intent.args_digest)
        outcome = job.recorded.settled(record)
        if outcome is not None:
            return outcome
        if record.job_id != job.id:
            why = f"waiting for operation {intent.key} of job {record.job_id}"
            job.deferred = Deferred(why, waiting_for=intent.key)
            raise job.deferred
        if record.status == Op.INTENT_RECORDED:
            raise OperationBusy(f"operation {intent.key} is being called already in this job", key=intent.key)
        raise job.parks(intent.key, "an earlier attempt's outcome is not known")

    def why_not(self) -> BaseException | None:
        """Why the call may not begin any more, although its intent is recorded."""
        if self.job.closed:
            return self.job.over()
        if (self._expires is not None and clock() >= self._expires) or not self.job.held.trusted():
            return self.job.lost()
        return None

    def not_called(self) -> None:
        """Record that the call has not begun, which its owner can prove."""
        self._alarm.close()
        self._record(Op.NOT_HAPPENED, evidence={"not_called": "its time was over, or it was cancelled"})
        if self._status == Op.UNKNOWN:
            self.job.parks(self.intent.key, IN_DOUBT)

    # -- the call itself -----------------------------------------------------------------------------------------------

    def run(self) -> Any:
        """Call the effect's function."""
        if faults.armed is not None:
            faults.at(Point.BEFORE_CALL, self.job.id, self.intent.step)
        with self._span.current():
            value = self.effect.fn(self.op, *self._bound.args, **self._bound.kwargs)
        return self._span.carry(value) if inspect.isawaitable(value) else value

    # -- after the call ------------------------------------------------------------------------------------------------

    def finish(self, value: Any, raised: BaseException | None) -> Outcome[Any]:
        """Record what the call returned or raised, and return or raise what it means for the body."""
        self._alarm.close()
        if faults.armed is not None:
            faults.at(Point.AFTER_CALL, self.job.id, self.intent.step)
        if self._confirmed:
            return self._after_confirm(raised)
        if raised is not None:
            return self._raised(raised)
        return self._returned(value)

    def _returned(self, value: Any) -> Outcome[Any]:
        ref, result, invalid = outcome_of(value, self.intent.key)
        error = None if invalid is None else {"text": f"effect {self.effect.name!r} {invalid}"}
        self._record(Op.OUTCOME_CONFIRMED, ref=ref, result=result, error=error)
        if not self.intent.repeatable:
            self.job.last_ref = ref
        if error is not None:
            raise EffectResultInvalid(error["text"])
        return Outcome(ref, canonical.decode(result))

    def _raised(self, exc: BaseException) -> Outcome[Any]:
        status = classify(self.effect.options, exc)
        self._record(status, error=failures.to_json(exc))
        if status != Op.UNKNOWN and self._status == Op.UNKNOWN:
            raise self.job.parks(self.intent.key, IN_DOUBT) from exc
        if status == Op.REFUSED:
            raise EffectRefused(f"{self.effect.name} was refused: {exc}", key=self.intent.key) from exc
        if status == Op.NOT_HAPPENED:
            self.job.did_not_happen(None if self.intent.repeatable else exc)
            raise exc
        raise self.job.parks(self.intent.key, failures.to_json(exc)["text"]) from exc

    def _confirm(self, ref: str, result: Any, transaction: Any) -> None:
        """``op.confirm()``: the outcome in the caller's own transaction, committed or undone with the caller's rows."""
        key = self.intent.key
        found, encoded, invalid = outcome_of(Outcome(ref, result), key)
        if invalid is not None:
            raise SafeEffectsError(f"op.confirm() of {key}: {invalid}; nothing was recorded")
        self._confirmed = True
        params = outcomes.params(self.job, key, self.nonce, Op.OUTCOME_CONFIRMED, found, encoded)
        rows = self.job.store.enlisted_rows(enlist(transaction), "OUTCOME", **params)
        if not rows or rows[0].status is None or not rows[0].held:
            raise self.job.lost()

    async def _aconfirm(self, ref: str, result: Any, transaction: Any) -> None:
        enlisted = await enlist_async(transaction) if is_async(transaction) else transaction
        _, cancelled = await loop.in_thread(functools.partial(self._confirm, ref, result, enlisted))
        if cancelled is not None:
            raise cancelled

    def _after_confirm(self, raised: BaseException | None) -> Outcome[Any]:
        """Whether the caller's transaction was committed, the record itself says: nothing here is ever unknown."""
        job, key = self.job, self.intent.key
        record = job.insist("OPERATION", key=key)[0]
        job.unrecorded.pop(self.nonce, None)
        error = failures.to_json(raised) if raised is not None else None
        if record.nonce == self.nonce and record.status == Op.INTENT_RECORDED:
            # Waits for the row if the transaction is being committed at this moment, and then finds it resolved.
            row = job.insist("OUTCOME", **outcomes.params(job, key, self.nonce, Op.NOT_HAPPENED, error=error))[0]
            if row.status == Op.UNKNOWN:
                raise job.parks(key, IN_DOUBT)
            if row.status is not None:
                why = raised or SafeEffectsError(
                    f"the transaction given to op.confirm() of {key} was not committed; nothing happened"
                )
                self._status = Op.NOT_HAPPENED
                job.did_not_happen(why)
                raise why
            record = job.insist("OPERATION", key=key)[0]
        if record.nonce != self.nonce or record.status != Op.OUTCOME_CONFIRMED:
            raise job.lost()
        if error is not None:
            text = error["text"]
            logger.warning("operation %s is committed; what its effect raised afterwards is dropped: %s", key, text)
        self._status = Op.OUTCOME_CONFIRMED
        job.last_ref = record.provider_ref
        return Outcome(record.provider_ref, canonical.decode(record.result))

    def _record(
        self, status: Op, *, ref: str | None = None, result: str | None = None, error: Any = None, evidence: Any = None
    ) -> None:
        intent = self.intent
        # Without key and lookup nothing else can ever tell the outcome: wait for the disk.
        recoverable = intent.repeatable or intent.has_lookup or intent.idempotent_for is not None
        statement = "OUTCOME_ASYNC" if status == Op.OUTCOME_CONFIRMED and recoverable else "OUTCOME"
        key = intent.key
        self._status = outcomes.record(self.job, statement, key, self.nonce, status, ref, result, error, evidence)


def kill_after(effect: Effect[Any, Any], prefork: bool) -> float | None:
    """Seconds after which the kernel is to end a call's process; ``None``: it is not asked to."""
    options = effect.options
    return options.deadline if prefork and options.kill_at_deadline and not options.repeatable else None


def what_ends_it(effect: Effect[Any, Any], armed: bool) -> dict[str, Any]:
    """The part of an intent that says what the deadline does to the sender: what the timer itself told."""
    return {"deadline_kills": armed, "deadline_is_proof": armed and effect.options.trust_deadline_kill}


def intent_options(effect: Effect[Any, Any]) -> dict[str, Any]:
    """The part of an intent that the effect's declaration fixes; no timer is armed yet."""
    options = effect.options
    return {
        "repeatable": options.repeatable,
        "deadline": options.deadline if not options.repeatable else None,
        "lag": options.lookup_lag,
        "idempotent_for": options.idempotent_for,
        "has_lookup": effect.find is not None,
        "if_unknown": options.if_unknown,
        "detached": options.detached,
        **what_ends_it(effect, armed=False),
    }
