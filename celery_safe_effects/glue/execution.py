"""One delivery: claim, run, conclude. Decides between running, returning what is stored, and leaving it alone."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from uuid import uuid4

from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded, WorkerShutdown, WorkerTerminate
from celery.result import ResultBase
from kombu.exceptions import EncodeError

from .. import canonical, faults, signals
from ..engine import current, failures, loop, outcomes, process
from ..engine.admission import OPERATIONS_LIMIT, check_size
from ..engine.calls import intent_options, kill_after, what_ends_it
from ..engine.job import ActiveJob, RetryOver
from ..engine.lease import Moment, clock
from ..engine.outcomes import classify, outcome_of
from ..errors import (
    AcceptanceUnknown,
    AdmissionRejected,
    Deferred,
    EffectResultInvalid,
    IdempotencyConflict,
    JobCancelled,
    LeaseLost,
    OutcomeUnknown,
    ReplayMismatch,
    SafeEffectsError,
)
from ..faults import Point
from ..states import TERMINAL, JobStatus
from ..states import OperationStatus as Op
from ..store.hot import RETRYABLE, STORE_ERRORS, Lease, Row
from ..values import Operation, Outcome
from . import routing
from .acceptance import Run, time_of
from .batch import Batch
from .envelope import MARK, OPAQUE, Envelope, Mark, arguments_digest, is_marked
from .errbacks import called_with
from .trace import END, End, storable
from .wire import Message

if TYPE_CHECKING:
    from ..effects import Effect
    from .task import SafeTask

logger = logging.getLogger(__name__)

SHOWN = 10_000
"""Bytes up to which a whole body's arguments are recorded for views alone; a lookup gets them all."""
EARLY_WAIT = 1.0
"""Seconds that a delivery which is a little early waits in place."""
BACKOFF, MAX_BACKOFF = 1.0, 60.0
"""Seconds before another run after an error that proved that nothing happened; doubles with each attempt."""


class _Conclusion(NamedTuple):
    """How a run ended: what to write, and what Celery is told once it is written."""

    wish: str
    reason: str | None = None
    result: str | None = None
    error: Any = None
    delay: float = 0.0
    run_at: datetime | None = None
    refund: int = 0
    waiting_for: str | None = None
    outgoing: Envelope | None = None
    settle: bool | None = None
    ref: str | None = None
    generation: int | None = None
    replacement: Batch | None = None
    tell: BaseException | None = None
    value: Any = None


class _PutOff(BaseException):
    """Internal: the database does not take a statement; the cause says why."""


class Execution:
    """One delivery of one job to one pool child.

    Arguments:
        task, request: Celery's.
        args, kwargs: the delivered arguments.
    """

    def __init__(self, task: SafeTask, request: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.task = task
        self.request = request
        self.args = args
        self.kwargs = kwargs
        self.safe = task.safe_effects
        self.store = self.safe.store
        self.id: str = request.id
        self.mark = Mark.of(getattr(request, MARK, None))
        self.owner = self.safe.owner(request.hostname)
        self.whole_body = task.effects is None
        self.digest: str | None = None
        self._left_as: str | None = None

    def run(self) -> Any:
        """Handle the delivery.

        Returns:
            what Celery stores as the result of a job that succeeded.

        Raises:
            Ignore: Celery has nothing to store for this delivery.
            Exception: the job's own error; the job has failed.
        """
        digest = arguments_digest(self.task.name, self.args, self.kwargs)
        opaque = self.mark is not None and self.mark.digest.startswith(OPAQUE)
        if self.mark is None and is_marked(getattr(self.request, MARK, None)):
            # Of a version that says more than this one knows. The sweep gives the job again, in this one's words.
            self._stale("mark_of_another_version")
        if self.mark is not None:
            if digest != self.mark.digest and not opaque:  # those were compared before they were decoded
                self._forged("payload_differs")
            digest = self.mark.digest
        if self.mark is None or opaque:
            # Its producer gave the continuations no ids that would stay the same if they were sent twice.
            embed = self.safe.publisher.definite(self._envelope(), self.task._options_of_apply()).body[2]
            for name in ("callbacks", "errbacks", "chain", "chord"):
                setattr(self.request, name, embed.get(name))
        self.digest = digest
        with ExitStack() as alarm:
            try:
                return self._deliver(digest, alarm)
            except _PutOff as exc:
                # Whatever ails the database says nothing about the job: its row is the recovery.
                logger.error("job %s is left to the sweep: %s", self.id, exc.__cause__)
                raise Ignore(f"job {self.id} is left to the sweep") from exc
            except Exception:
                raise
            except BaseException as exc:
                if self.safe.prefork or self.request.is_eager or isinstance(exc, (WorkerShutdown, WorkerTerminate)):
                    raise
                # A killed greenlet, a time limit of gevent's, a body that exits in a thread: the row says what becomes
                # of the job. The other pools take such an exception for a success, or lose the message.
                logger.warning("the run of job %s was ended by %r", self.id, exc)
                raise Ignore(f"the run of job {self.id} was ended") from exc

    def _deliver(self, digest: str | None, alarm: ExitStack) -> Any:
        token, nonce = uuid4(), uuid4()
        held = self.safe.keeper.hold(Lease(self.id, token, 0, self.owner), self._ttl())
        recorded = None
        try:
            row, since = self._claim(digest, token, nonce, alarm)
            if row is None or row.lease_token != token or row.status != JobStatus.RUNNING:
                self.safe.keeper.drop(held)
                return self._not_claimed(row, digest)
            held.claimed(row.fence, since)
            self.request.retries = row.retries
            # The fence never shrinks; attempts do, by an operator's retry or a deferral.
            if row.fence > 1 and not self.whole_body:
                recorded = self._insist("RECORDED", until=held.trusted, id=self.id)
        except BaseException:
            self.safe.keeper.drop(held)
            raise
        job = ActiveJob(
            self.store,
            held,
            row,
            declared=None if self.whole_body else self.task._declared,
            hooks=self.safe.hooks,
            prefork=self.safe.prefork,
            recorded=recorded,
        )
        job.veil.hide(*self.task._secrets(self.args, self.kwargs))
        span = self.safe.hooks.tracing.job(self.task, self.request, job)
        scope = current.begin(job, alone=self.safe.prefork)
        try:
            with span.current():
                try:
                    if self.whole_body:
                        return self._whole_body(job, row, nonce, since, alarm)
                    return self._conclude(job, self._body(job))
                except Exception as exc:
                    shown = self._unveiled(job, exc)
                    if shown is exc:
                        raise
                    raise shown from None
        except LeaseLost as exc:
            logger.warning("%s", exc)
            self.safe.count("leases_lost", self.task.name)
            signals.lease_lost.send(sender=self.task.name, job_id=self.id, fence=job.fence)
            raise Ignore(str(exc)) from None
        finally:
            current.end(scope)
            span.end(self._left_as, sys.exc_info()[1])
            self.safe.keeper.drop(held)
            self.safe.announce(self.owner, self.id)
            if row.slots:
                self.safe.publisher.deliver_woken(row.slots)

    def _insist(self, statement: str, /, **params: Any) -> list[Row]:
        try:
            return self.store.insist(statement, **params)
        except STORE_ERRORS as exc:
            raise _PutOff from exc

    # -- claim ---------------------------------------------------------------------------------------------------------

    def _ttl(self) -> float:
        return float(self.task.lease_ttl or self.safe.config.lease_ttl)

    def _claim(self, digest: str | None, token: Any, nonce: Any, alarm: ExitStack) -> tuple[Row | None, float]:
        params: dict[str, Any] = {
            "id": self.id,
            "token": token,
            "owner": self.owner,
            "ttl": self._ttl(),
            "generation": self.mark.generation if self.mark is not None else 0,
            "digest": digest,
            "task": self.task.name,
            "seq": self.mark.seq if self.mark is not None else None,
            "tenant": self.mark.tenant if self.mark is not None else None,
            "limits": self.safe.admission.running({"max_operations": self.task.max_operations}),
        }
        statement = "CLAIM"
        if self.whole_body:
            statement = "CLAIM_BODY"
            body = self.task._body_effect()
            shown = self._shown(body)
            options = intent_options(body)
            del options["repeatable"]
            params |= options | {
                "step": "body",
                "ordinal": 1,
                "effect": body.name,
                "keyed": False,
                "repeatable": False,
                "whole_body": True,
                "nonce": nonce,
                "process": process.identity(),
                "trace": self.safe.hooks.tracing.sent_by(self.request),
                "args": self._recorded(body, shown),
                "args_digest": digest or "",
            }
        for attempt in range(3):
            row, since = self._ask(statement, params, alarm)
            if row is None and attempt == 0 and self._adopt(digest):
                continue
            # Its time may also have come between the refusal and the look at the row.
            if attempt < 2 and row is not None and self._soon(row):
                time.sleep(max(0.0, row.wait_s) + 0.01)
                continue
            break
        return row, since

    @staticmethod
    def _soon(row: Row) -> bool:
        """Whether a delivery that was too early for its job is so by little, or no longer."""
        waits = row.status == JobStatus.QUEUED and row.waiting_for is None and not row.dying
        return waits and row.wait_s is not None and row.wait_s <= EARLY_WAIT

    def _shown(self, body: Effect[Any, Any]) -> dict[str, Any]:
        """A whole body's arguments as they are recorded; none where they do not fit, which the claimed run will say."""
        try:
            arguments = body.bind(self.args, self.kwargs).arguments
        except TypeError:
            return {}
        return {name: value for name, value in arguments.items() if name not in body.options.redact}

    @staticmethod
    def _recorded(body: Effect[Any, Any], shown: dict[str, Any]) -> str | None:
        """The same as JSON. They are in the job's envelope already: what nobody looks up by is not kept twice."""
        try:
            text = canonical.canonical(shown)
        except (TypeError, ValueError):
            return None
        return text if body.find is not None or len(text) <= SHOWN else None

    def _never_entered(self, exc: BaseException) -> bool:
        """Whether the delivered arguments do not fit the body's signature, so that it cannot have begun."""
        if not isinstance(exc, TypeError) or self.task._user_call is not None:
            return False
        try:
            self.task._body_effect().bind(self.args, self.kwargs)
        except TypeError:
            return True
        return False

    def _ask(self, statement: str, params: dict[str, Any], alarm: ExitStack) -> tuple[Row | None, float]:
        """One claim, however long the database takes: the row is the recovery, but an unmarked message may have none.

        A whole body's intent goes with its claim, so that its deadline's timer is armed before either is sent.
        """
        body = self.task._body_effect() if self.whole_body else None
        kill = kill_after(body, self.safe.prefork) if body is not None else None
        sent = Moment()
        while True:
            alarm.close()
            armed = alarm.enter_context(self.safe.hooks.armed(kill))
            if body is not None:
                params |= what_ends_it(body, armed)
            try:
                return self.store.claim(statement, params, sent), sent.at
            except (*STORE_ERRORS, *RETRYABLE) as exc:
                if self.mark is not None and not isinstance(exc, RETRYABLE):
                    raise _PutOff from exc
                logger.warning("claiming job %s waits for the database: %s", self.id, exc)
                alarm.close()
                time.sleep(0.2)

    def _adopt(self, digest: str | None) -> bool:
        """A message without a row: an unmarked one is persisted and runs; a marked one never runs."""
        if self.mark is None:
            try:
                envelope = self._of_apply() if self.request.is_eager else self._envelope()
                self.safe.publisher.adopt(envelope, self.owner, ours=self.task._options_of_apply())
            except IdempotencyConflict:
                self._stale("payload_differs")
            return True
        if self.safe.publisher.park_missing(self._insist, self._envelope(), self.mark, self.owner):
            self._tell_unknown("row_missing")
        self._stale("no_row")

    def _of_apply(self) -> Envelope:
        """The message that ``apply()`` does not send; a worker gets it if the job does not end here."""
        outer = current.job()
        if outer is not None:
            self.request.parent_id = outer.id
        app = self.task.app
        route = app.amqp.router.route({}, self.task.name, self.args, self.kwargs, self.task)
        return replace(self._envelope(), options=routing.kept(app, route))

    def _envelope(self, args: Any = None, kwargs: Any = None, **headers: Any) -> Envelope:
        request = {**vars(self.request), "task": self.task.name, "id": self.id, **headers}
        return Envelope.of_request(
            request, self.args if args is None else args, self.kwargs if kwargs is None else kwargs
        )

    def _not_claimed(self, row: Row | None, digest: str | None) -> Any:
        if row is None:
            self._stale("no_row")
        self._belongs(row, digest)
        if row.status in {s.value for s in TERMINAL}:
            if row.settled or not row.settle_due:
                self._stale("finished")
            return self._tell_end(row)
        if row.status == JobStatus.QUEUED:
            if row.dying:
                self._insist("SWEEP_DYING", id=self.id, limit=1, actor=self.owner)
                self.safe.publisher.deliver_now(self.id)
                raise Ignore
            if row.waiting_for is not None:
                logger.info("job %s waits: %s", self.id, row.reason)
                # The class alone: what follows may be anybody's business key.
                self.safe.count("deferrals", (row.reason or "").partition(":")[0])
                raise Ignore(f"job {self.id} waits for {row.waiting_for}")
            if (row.wait_s or 0) > 0:
                self.safe.publisher.soon(self.id)
                self._stale("early")
        self._stale(f"job_{row.status}")

    def _tell_end(self, row: Row) -> Any:
        """The end stands in the row, but Celery was not told: let it store, dispatch and count now."""
        if not self._insist("TELL", id=self.id, fence=row.fence):
            self._stale("being_told")
        if row.status == JobStatus.CANCELLED:
            self._tell_cancelled(row.reason or "cancelled", row.fence)
        if row.status == JobStatus.SUCCEEDED:
            self._settles(row.fence)
            return canonical.decode(row.result)
        error = failures.from_json(canonical.decode(row.error) or {"text": f"job {self.id} failed: {row.reason}"})
        raise self._settles(row.fence, error)

    def _belongs(self, row: Row, digest: str | None) -> None:
        """A message may move its own row alone, and only by what the row says of it."""
        mark = self.mark
        if mark is not None and mark.generation < row.generation:
            self._stale("older_generation")
        if mark is not None and (mark.seq, mark.tenant, mark.generation) != (row.seq, row.tenant, row.generation):
            self._forged("mark_differs")
        if row.task != self.task.name or (digest is not None and digest != row.args_digest):
            self._forged("payload_differs")

    def _forged(self, why: str) -> NoReturn:
        logger.warning("a message of job %s does not belong to its row (%s) and is refused", self.id, why)
        self._stale(why)

    def _stale(self, why: str) -> NoReturn:
        logger.info("delivery of job %s is stale (%s) and ignored", self.id, why)
        self.safe.count("stale_deliveries", why)
        signals.stale_delivery.send(sender=self.task.name, job_id=self.id, reason=why)
        raise Ignore(f"stale delivery: {why}")

    # -- run -----------------------------------------------------------------------------------------------------------

    def _started(self) -> None:
        task = self.task
        if task._store_started:
            self.safe.teller.started(task, self.id, self.request)
        if task._user_before_start is not None:
            task._user_before_start(self.id, self.args, self.kwargs)

    def _body(self, job: ActiveJob) -> _Conclusion:
        value: Any = None
        raised: BaseException | None = None
        try:
            self._started()
            value = self._run_tracked(job)
            if faults.armed is not None:
                faults.at(Point.AFTER_BODY, self.id)
        except BaseException as exc:
            raised = exc
        swallowed = job.mismatch or job.parked or job.deferred or (job.asked and job.asked.retry)
        raised = self._close(job, raised) or swallowed
        if raised is not None:
            return self._failed(job, raised)
        if isinstance(value, Outcome):
            value = value.result
        try:
            result = canonical.encode(_storable(value))
            # As it is told again, should it have to be: what JSON makes of it.
            return _Conclusion("succeeded", result=result, value=canonical.decode(result))
        except (TypeError, ValueError) as exc:
            error = EffectResultInvalid(
                f"task {self.task.name} returned what is not JSON ({exc}); its effects stand and are not run again"
            )
            return _Conclusion("failed", "result_not_json", error=failures.to_json(error), tell=error)

    def _close(self, job: ActiveJob, raised: BaseException | None) -> BaseException | None:
        """The body has ended: so do the calls that it left in flight, and none of them starts later."""
        try:
            if not _interrupts(raised):
                job.close()
                return raised
        except BaseException as exc:
            raised = exc
        job.interrupt()
        job.close(loop.GRACE)
        return raised

    def _failed(self, job: ActiveJob, exc: BaseException) -> _Conclusion:
        """What an exception out of the body means for the job."""
        stop = failures.find(exc, (LeaseLost,))
        if stop is not None:
            raise stop
        unknown = job.parked or failures.find(exc, (OutcomeUnknown,))
        if unknown is not None:
            return _Conclusion("unknown", "outcome_unknown", error=failures.to_json(unknown), tell=Ignore())
        mismatch = job.mismatch or failures.find(exc, (ReplayMismatch,))
        if mismatch is not None:
            return _Conclusion("held", "replay_mismatch", error=failures.to_json(mismatch), tell=Ignore())
        cancelled = failures.find(exc, (JobCancelled,))
        if cancelled is not None:
            reason = cancelled.details["reason"]  # type: ignore[attr-defined]
            if reason != "max_age":
                return _Conclusion("cancelled", reason, tell=Ignore())
            error = SafeEffectsError(f"job {self.id} is older than its max_age")
            return _Conclusion("failed", reason, error=failures.to_json(error), tell=error)
        deferred = job.deferred or failures.find(exc, (Deferred,))
        if deferred is not None:
            key = deferred.details.get("waiting_for")  # type: ignore[attr-defined]
            if key is None:
                again = SafeEffectsError(str(deferred))
                text, delay = failures.to_json(again), self._backoff(job)
                return _Conclusion("again", "cancelled_call", error=text, delay=delay, tell=Ignore(), value=again)
            return _Conclusion("queued", f"waiting_for:{key}", refund=1, waiting_for=key, tell=Ignore())
        if isinstance(exc, Retry) or (job.asked is not None and isinstance(exc, Exception)):
            return self._retry(job, exc)
        if isinstance(exc, Ignore):
            return self._replaced(job) or self._ignored()
        if isinstance(exc, Reject):
            error = SafeEffectsError(f"the task rejected its message: {exc.reason}")
            if exc.requeue:  # not by the broker: a message is only a hint
                told = Ignore(str(error))
                return _Conclusion(
                    "again", "rejected", error=failures.to_json(error), delay=self._backoff(job), tell=told, value=error
                )
            return _Conclusion("failed", "rejected", error=failures.to_json(error), tell=error)
        over = self._over(job, exc)
        if over is not None:
            return _Conclusion("failed", over.reason, error=failures.to_json(exc), tell=exc)
        if (
            job.retry_over is None
            and job.not_happened is not None
            and failures.find(exc, (type(job.not_happened),)) is job.not_happened
        ):
            delay = self._backoff(job)
            tell = Retry(exc=job.not_happened, when=delay)
            return _Conclusion("again", "not_happened", error=failures.to_json(exc), delay=delay, tell=tell, value=exc)
        if not isinstance(exc, Exception):
            # The process, or this greenlet, is being ended: between two effects the body may run again. A stop of the
            # worker costs no attempt; a body that ends its process by itself must not do so for ever.
            if self.safe.stopping.now():
                return _Conclusion("queued", "stopped", refund=1, tell=exc)
            ended, delay = failures.to_json(exc), self._backoff(job)
            return _Conclusion("again", _ended_by(exc), error=ended, delay=delay, tell=exc, value=exc)
        reason = OPERATIONS_LIMIT if getattr(exc, "reason", None) == OPERATIONS_LIMIT else "error"
        return _Conclusion("failed", reason, error=failures.to_json(exc), tell=exc)

    @staticmethod
    def _backoff(job: ActiveJob) -> float:
        return float(min(MAX_BACKOFF, BACKOFF * 2 ** min(job.attempt - 1, 16)))

    def _retry(self, job: ActiveJob, exc: BaseException) -> _Conclusion:
        """What the author asked for last; or a ``Retry`` that was raised by hand and says when at most."""
        retry: Any = exc if job.asked is None else job.asked.retry
        about = retry.exc if job.asked is None else job.asked.about
        cause = failures.to_json(about if isinstance(about, BaseException) else retry)
        if job.outgoing is None and retry.sig is not None:
            # apply() sends no message for a retry: it runs it itself, with what the signature says.
            sent = self.task._as_sent(retry.sig.args, retry.sig.kwargs)
            job.outgoing = self._envelope(*sent, retries=self.request.retries + 1)
        try:
            timed = isinstance(retry.when, (int, float)) or retry.when is None
            run_at = None if timed else time_of(self.task.app, retry.when)
            self._outgoing(job.outgoing, True)
        except (EncodeError, TypeError, ValueError, SafeEffectsError) as bad:
            return _Conclusion("failed", "retry_not_encodable", error=failures.to_json(bad), tell=bad)
        return _Conclusion(
            "again",
            f"retry: {cause['text']}"[:500],
            error=cause,
            delay=float(retry.when or 0.0) if timed else 0.0,
            run_at=run_at,
            outgoing=job.outgoing,
            tell=retry,
            value=about if isinstance(about, Exception) else self.task.MaxRetriesExceededError(cause["text"]),
        )

    def _replaced(self, job: ActiveJob) -> _Conclusion | None:
        """``self.replace()``: a SafeTask takes over id and row, and the keys of its effects carry the generation.

        Anything else is stored with the end of this job, and goes out after that.
        """
        outgoing: Envelope | None = job.outgoing
        batch: Batch | None = job.replacement
        if batch is None:
            return None
        if outgoing is not None and self.safe.publisher.is_safe(outgoing.task):
            try:
                self._outgoing(outgoing, False)
            except (EncodeError, TypeError, ValueError, SafeEffectsError) as bad:
                return _Conclusion("failed", "replacement_not_encodable", error=failures.to_json(bad), tell=bad)
            return _Conclusion(
                "queued",
                "replaced",
                run_at=time_of(self.task.app, outgoing.headers.get("eta")),
                refund=job.attempt,
                outgoing=outgoing,
                settle=outgoing.needs_settling,
                generation=job.generation + 1,
                tell=Ignore(),
            )
        if outgoing is not None:
            batch.plain.append(Message.of(self.task.app, outgoing))
        return _Conclusion(
            "succeeded", "replaced", ref=f"replaced:{self.id}", settle=False, replacement=batch, tell=Ignore()
        )

    @staticmethod
    def _ignored() -> _Conclusion:
        """``Ignore``: done, and Celery stores nothing."""
        return _Conclusion("succeeded", "ignored", result="null", settle=False, tell=Ignore())

    def _whole_body(self, job: ActiveJob, row: Row, nonce: Any, since: float, alarm: ExitStack) -> Any:
        """The body is one effect: its outcome is the job's end, in one statement."""
        body = self.task._body_effect()
        key = job.key("body")
        if row.nonce != nonce:
            return self._conclude(job, self._unknown(key, "an earlier attempt's outcome is not known"))
        options = body.options
        expires = since + options.deadline if options.deadline else None
        job.operation = Operation(
            key=key,
            job_id=self.id,
            step="body",
            effect=body.name,
            attempt=row.op_attempt,
            tenant=job.tenant,
            arguments=self._shown(body),
            intent_at=row.intent_at,
            deadline_at=row.deadline_at,
            _expires=expires,
            _clock=clock,
        )
        if not job.held.trusted() or (expires is not None and clock() >= expires):
            not_called = {"not_called": "its time was over"}
            outcomes.record(job, "OUTCOME", key, nonce, Op.NOT_HAPPENED, evidence=not_called)
            raise job.lost()
        value: Any = None
        raised: BaseException | None = None
        try:
            self._started()
            value = self._run_tracked(job)
            if faults.armed is not None:
                faults.at(Point.AFTER_BODY, self.id)
        except BaseException as exc:
            raised = exc
        alarm.close()
        asked = job.asked
        if asked is not None and (raised is None or raised is asked.about):
            raised = asked.retry  # the author's word, whatever the body did with it
        if raised is None:
            ref, result, invalid = outcome_of(_storable(value), key)
            error = None if invalid is None else {"text": f"task {self.task.name!r} {invalid}"}
            if error is not None:
                self._pend(job, "failed", _Conclusion("failed", "result_not_json", error=error))
            outcomes.record(job, "OUTCOME", key, nonce, Op.OUTCOME_CONFIRMED, ref, result, error)
            self._left_as = "succeeded" if error is None else "failed"
            if error is not None:
                raise self._settles(job.fence, EffectResultInvalid(error["text"]))
            self._settles(job.fence)
            return canonical.decode(result)
        replaced = self._replaced(job) if isinstance(raised, Ignore) else None
        if replaced is not None:
            return self._body_replaced(job, key, nonce, replaced)
        if isinstance(raised, (LeaseLost, JobCancelled)):
            # Raised by a checkpoint in the body: whether it had begun its effect, only its author could say.
            status = Op.UNKNOWN
        elif isinstance(raised, Retry) or self._never_entered(raised) or self._over(job, raised):
            # retry() says that running again is safe: also where it was told that there is no other run.
            status = Op.NOT_HAPPENED
        elif isinstance(raised, self.task.throws or ()):
            status = Op.REFUSED
        else:
            status = classify(options, raised)
        error = failures.to_json(raised)
        again = True
        if status == Op.NOT_HAPPENED:
            conclusion = self._not_happened(job, raised)
            if conclusion.wish == "failed":
                again, raised = False, conclusion.tell or raised
                self._pend(job, "failed", conclusion)
            elif not self._pend(job, "queued", conclusion):
                again, raised = False, conclusion.value
                self._pend(job, "failed", conclusion._replace(reason="max_attempts", outgoing=None))
        elif status == Op.REFUSED:
            self._pend(job, "failed", _Conclusion("failed", "refused", error=error))
        status = outcomes.record(job, "OUTCOME", key, nonce, status, None, None, error)
        if status == Op.UNKNOWN:
            return self._conclude(job, self._unknown(key, error["text"]))
        self._left_as = "queued" if status == Op.NOT_HAPPENED and again else "failed"
        if status == Op.NOT_HAPPENED and again:
            if not self.request.is_eager:
                self.safe.publisher.deliver_now(self.id)
            if isinstance(raised, Retry):
                raise raised
            raise Retry(exc=raised, when=conclusion.delay) from raised
        raise self._settles(job.fence, raised)

    def _body_replaced(self, job: ActiveJob, key: str, nonce: Any, end: _Conclusion) -> Any:
        """The body has happened, by its author's word, and something else goes on in its place."""
        ref = f"replaced:{self.id}"
        if end.replacement is None:
            self._pend(job, "queued", end)
            outcomes.record(job, "OUTCOME", key, nonce, Op.OUTCOME_CONFIRMED, ref)
            self._left_as = "queued"
            if not self.request.is_eager:
                self.safe.publisher.deliver_now(self.id)
            raise end.tell or Ignore()
        pending = self._pending(job, None, end)
        outcome = outcomes.params(job, key, nonce, Op.OUTCOME_CONFIRMED, ref)

        def write(run: Run) -> list[Row]:
            rows = run("BODY_PENDING", **pending)
            return rows and [row for row in run("OUTCOME", **outcome) if row.held and row.status is not None]

        try:
            if not self._handed_over(job, end.replacement, write):
                self._already_left(job)
        except ReplayMismatch as exc:
            return self._conclude(job, self._unknown(key, str(exc)))
        self._left_as = "succeeded"
        self._settles(job.fence)
        raise end.tell or Ignore()

    def _not_happened(self, job: ActiveJob, exc: BaseException) -> _Conclusion:
        """What follows from a whole body that did not happen."""
        if isinstance(exc, Retry):
            return self._retry(job, exc)
        error = failures.to_json(exc)
        if self._never_entered(exc):
            return _Conclusion("failed", "error", error=error, tell=exc)
        if job.retry_over is not None:
            return _Conclusion("failed", job.retry_over.reason, error=error, tell=exc)
        return _Conclusion("again", "not_happened", error=error, delay=self._backoff(job), value=exc)

    @staticmethod
    def _over(job: ActiveJob, exc: BaseException) -> RetryOver | None:
        return job.retry_over if job.retry_over is not None and job.retry_over.raised is exc else None

    def _unknown(self, key: str, why: str) -> _Conclusion:
        unknown = OutcomeUnknown(f"operation {key}: {why}", key=key, job_id=self.id)
        return _Conclusion("unknown", "outcome_unknown", error=failures.to_json(unknown), tell=Ignore())

    def _run_tracked(self, job: ActiveJob) -> Any:
        """Run the body so that ``retry()`` can tell the author's call from the one that ``autoretry_for`` makes."""
        task = self.task
        if faults.armed is not None:
            faults.at(Point.BEFORE_BODY, self.id)
        task.__dict__.pop("override_max_retries", None)  # retry(max_retries=...) leaves it behind for the next job
        original = task.__dict__.get("_orig_run")
        if original is None:
            job.in_body = True
            return task._invoke(*called_with(self.args), **self.kwargs)
        if not getattr(original, "_safe_effects_tracked", False):

            def tracked(*args: Any, **kwargs: Any) -> Any:
                here = current.job()
                if here is None:
                    return original(*args, **kwargs)
                here.in_body = True
                try:
                    return original(*args, **kwargs)
                finally:
                    here.in_body = False

            tracked._safe_effects_tracked = True  # type: ignore[attr-defined]
            task._orig_run = tracked
        return task._invoke(*called_with(self.args), **self.kwargs)

    def _pend(self, job: ActiveJob, status: str, end: _Conclusion) -> bool:
        rows = self._insist("BODY_PENDING", until=job.held.trusted, **self._pending(job, status, end))
        if not rows:
            raise job.lost()
        return bool(rows[0].again)

    def _pending(self, job: ActiveJob, status: str | None, end: _Conclusion) -> dict[str, Any]:
        return {
            "id": self.id,
            "token": job.lease.token,
            "fence": job.fence,
            "pending": status,
            "reason": end.reason,
            "error": None if end.error is None else canonical.encode(end.error),
            "refund": end.refund,
            "settle": end.settle,
            **self._generation(end),
            **self._when(end),
            **self._outgoing(end.outgoing, status == "queued"),
        }

    @staticmethod
    def _generation(end: _Conclusion) -> dict[str, Any]:
        swapped = end.generation is not None and end.outgoing is not None
        return {"generation": end.generation, "task": end.outgoing.task if swapped and end.outgoing else None}

    # -- conclude ------------------------------------------------------------------------------------------------------

    def _outgoing(self, outgoing: Envelope | None, retried: bool) -> dict[str, Any]:
        if outgoing is None:
            retries = self.request.retries + 1 if retried else None
            return {
                "envelope": None,
                "digest": None,
                "retries": retries,
                "expires": None,
                "queue": None,
                "priority": None,
            }
        serializer = outgoing.serializer or self.task.app.conf.task_serializer
        envelope, digest = outgoing.encode(serializer), outgoing.digest(serializer)
        if digest != self.digest:  # the same arguments were accepted before, however large
            most = self.safe.config.max_payload
            check_size(f"the message of {outgoing.task}", len(envelope), most, "it was not sent")
        return {
            "envelope": envelope,
            "digest": digest,
            "retries": int(outgoing.headers.get("retries") or 0),
            "expires": time_of(self.task.app, outgoing.headers.get("expires")),
            "queue": routing.lands_in(self.task.app, outgoing.options),
            "priority": routing.priority(outgoing.options),
        }

    def _when(self, end: _Conclusion) -> dict[str, Any]:
        # apply() runs a retry at once and by itself; the sweep is only for when it does not get to it.
        eager = self.request.is_eager
        return {"delay": 0.0 if eager else end.delay, "run_at": None if eager else end.run_at}

    def _conclude(self, job: ActiveJob, end: _Conclusion) -> Any:
        """Write the end, then tell Celery what was written."""
        with_ref = end.wish == "succeeded"
        params: dict[str, Any] = {
            "id": self.id,
            "token": job.lease.token,
            "fence": job.fence,
            "actor": self.owner,
            "wish": end.wish,
            "reason": end.reason,
            "ref": (end.ref or job.last_ref or f"result:{self.id}") if with_ref else None,
            "result": end.result,
            "error": None if end.error is None else canonical.encode(end.error),
            **self._when(end),
            "hold": self.safe.config.republish_after if self.request.is_eager else None,
            "refund": end.refund,
            "waiting_for": end.waiting_for,
            "patience": self.safe.config.republish_after,
            "settle": end.settle,
            **self._generation(end),
            **self._outgoing(end.outgoing, isinstance(end.tell, Retry) and end.wish == "again"),
        }
        try:
            rows = self._leave(job, end, params)
        except ReplayMismatch as exc:
            mismatch = failures.to_json(exc)
            return self._conclude(job, _Conclusion("held", "replay_mismatch", error=mismatch, tell=Ignore()))
        if not rows:
            rows = self._already_left(job)
        self.safe.keeper.drop(job.held)  # or a renewal meanwhile would take the end for a loss
        status = self._left_as = rows[0].status
        if status == JobStatus.QUEUED:
            if end.waiting_for is None and not self.request.is_eager:
                self.safe.publisher.deliver_now(self.id)
            raise end.tell or Ignore()
        if status == JobStatus.UNKNOWN:
            self._tell_unknown(rows[0].reason or "unknown", end.error)
            raise Ignore
        if status == JobStatus.CANCELLED:
            self._tell_cancelled(rows[0].reason or "cancelled", job.fence)
        error = end.value if status == JobStatus.FAILED and end.wish == "again" else end.tell
        self._settles(job.fence, error)
        if error is not None:
            raise error
        return end.value

    def _leave(self, job: ActiveJob, end: _Conclusion, params: dict[str, Any]) -> list[Row]:
        if end.replacement is not None:
            rows: list[Row] = []

            def write(run: Run) -> list[Row]:
                rows[:] = run("LEAVE", **params)
                return [row for row in rows if row.status == JobStatus.SUCCEEDED]

            if self._handed_over(job, end.replacement, write):
                return rows
        return self._insist("LEAVE", until=None, **params)

    def _handed_over(self, job: ActiveJob, batch: Batch, write: Callable[[Run], list[Row]]) -> bool:
        """The end of this run and what goes on in its place, in one transaction.

        Returns:
            whether it was written; if not, nothing was.

        Raises:
            ReplayMismatch: the body replaced itself by something else before.
        """
        pause = 0.05
        while True:
            try:
                return self.safe.publisher.hand_over(batch, write)
            except (*RETRYABLE, AcceptanceUnknown, AdmissionRejected) as exc:
                logger.warning("the replacement of job %s waits for the database: %s", self.id, exc)
                time.sleep(pause)
                pause = min(pause * 2, 1.0)
            except STORE_ERRORS as exc:
                raise _PutOff from exc

    def _already_left(self, job: ActiveJob) -> list[Row]:
        """No row: an earlier try got through and its reply was lost, or the job is no longer ours."""
        found = self._insist("JOB", id=self.id)
        if (
            found
            and (found[0].lease_token, found[0].fence) == (job.lease.token, job.fence)
            and found[0].status in {s.value for s in TERMINAL}
        ):
            return found
        raise job.lost()

    def _settles(self, fence: int, error: BaseException | None = None) -> BaseException:
        """Celery is about to be told of an end; when it has been, the row says so. Returns the error, to be raised."""
        self.request.update({END: End(fence, error)}, **storable(self.task, self.request))
        if faults.armed is not None:
            faults.at(Point.BEFORE_TELL, self.id)
        return error or Ignore()

    def _unveiled(self, job: ActiveJob, exc: Exception) -> Exception:
        """What Celery is told, stores and logs of an exception: none of the values that the task keeps to itself."""
        if isinstance(exc, Retry) and isinstance(exc.exc, Exception) and job.veil.shows(exc):
            told: Exception = Retry(exc=failures.unveiled(exc.exc), when=exc.when, is_eager=exc.is_eager, sig=exc.sig)
            return told
        shown = failures.unveiled(exc)
        end = getattr(self.request, END, None)
        if shown is not exc and end is not None and end.error is exc:
            self._settles(end.fence, shown)
        return shown

    def _tell_unknown(self, reason: str, error: Any = None) -> None:
        self.safe.teller.unknown(self.task, self.id, self.request, reason, error)

    def _tell_cancelled(self, reason: str, fence: int) -> None:
        self.safe.teller.cancelled(self.task, self.id, self.request, reason, fence)
        raise Ignore(f"job {self.id} is cancelled")


def _interrupts(exc: BaseException | None) -> bool:
    """Whether it came from outside, a time limit or a shutdown, and asks for haste."""
    ours = (OutcomeUnknown, LeaseLost, JobCancelled, Deferred)
    return exc is not None and (
        isinstance(exc, SoftTimeLimitExceeded) or not (isinstance(exc, Exception) or failures.find(exc, ours))
    )


def _ended_by(exc: BaseException) -> str:
    """A short name for what ended a run."""
    names = {cls.__name__ for cls in type(exc).__mro__}
    return "time_limit" if "Timeout" in names else "terminated" if "GreenletExit" in names else "stopped"


def _storable(value: Any) -> Any:
    """What a body returned, with a result of Celery's as Celery stores it."""
    return value.as_tuple() if isinstance(value, ResultBase) else value
