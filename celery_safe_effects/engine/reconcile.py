"""The reconciler: asks the provider about operations whose outcome is unknown, and records what can be proven.

Claims a batch, looks up outside any transaction with a time limit for each lookup, records, backs off. One hanging
lookup delays no other.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import canonical, faults
from ..faults import Point
from ..store.hot import Row, Store
from ..values import Happened, NotHappened, Operation, Refused, Unresolved, Verdict
from . import failures, loop
from .lease import clock
from .tracing import Tracing

if TYPE_CHECKING:
    from ..effects import Effect

logger = logging.getLogger(__name__)

MAX_BACKOFF = 3600.0
HOLD_MARGIN = 5.0
"""Seconds beyond the longest lookup for which nobody else asks about an operation that is being asked about."""
POLICY_ASKS = 3
"""Lookups past the deadline that must stay without an answer before the author's policy applies."""


@dataclass
class Reconciled:
    """What one reconciliation did, as counts by result."""

    asked: int = 0
    results: dict[str, int] = field(default_factory=dict)

    def add(self, result: str) -> None:
        """Count one result."""
        self.results[result] = self.results.get(result, 0) + 1


class Reconciler:
    """Resolves due unknown operations.

    Arguments:
        store: the database.
        interval: seconds; the first back-off.
        find_effect: the registered effect for a recorded name (of an effect, or of a whole-body task).
        longest_lookup: seconds that the slowest of this process's lookups may take.
        deliver_now: publishes the jobs that moved on.
        on_moved: told of who moved which jobs.
        count: adds to a counter by name and label; losing it is safe.
        tracing: told of each question.
        leave: called in the thread of each lookup at its end.
    """

    BATCH = 8
    PER_EFFECT = 8
    PARALLEL = 32

    def __init__(
        self,
        store: Store,
        *,
        interval: float,
        find_effect: Callable[[str, str], Effect[Any, Any] | None],
        longest_lookup: Callable[[], float],
        deliver_now: Callable[..., int],
        on_moved: Callable[..., None],
        count: Callable[[str, str], None],
        tracing: Tracing,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self.store = store
        self.leave = leave
        self.interval = interval
        self.find_effect = find_effect
        self.longest_lookup = longest_lookup
        self.deliver_now = deliver_now
        self.on_moved = on_moved
        self.count = count
        self.tracing = tracing

    def run(self, by: str, keys: list[str] | None = None) -> Reconciled:
        """Reconcile everything that is due, or some operations.

        Arguments:
            by: who asks, for the log of transitions.
            keys: operation keys; ``None`` takes all that are due.
        """
        self.store.row("MAINTENANCE_BEGIN", name="reconcile", by=by, idle_for=None)
        return self.reconcile(by, keys)

    def reconcile(self, by: str, keys: list[str] | None = None) -> Reconciled:
        """The reconciliation itself, for a caller that has already taken its turn.

        Claims only what it can ask at once, and no more of an effect whose lookups hang, so that these delay no other.
        New questions are taken up for one interval; whatever is being asked then is waited for, up to its limit.
        """
        with faults.acting("sweeper"):
            if faults.armed is not None:
                faults.at(Point.BEFORE_RECONCILE)
            done = self._reconcile(by, keys)
            if faults.armed is not None:
                faults.at(Point.AFTER_RECONCILE)
        return done

    def _reconcile(self, by: str, keys: list[str] | None) -> Reconciled:
        done = Reconciled()
        running: list[_Lookup] = []
        waiting: deque[tuple[Row, Effect[Any, Any]]] = deque()
        until = clock() + self.interval
        more = True
        while True:
            if more and len(waiting) < self.PER_EFFECT and len(running) < self.PARALLEL:
                busy = [name for name, n in Counter(x.row.effect for x in running).items() if n >= self.PER_EFFECT]
                rows = self._claim(busy, keys)
                done.asked += len(rows)
                for row in rows:
                    effect = self.find_effect(row.effect, row.task)
                    if effect is not None and effect.find is not None:
                        waiting.append((row, effect))
                    else:
                        why = "no lookup is declared" if effect else f"effect {row.effect!r} is not imported here"
                        self._conclude(row, None if effect else Unresolved(why), by, done)
                more = keys is None and clock() < until and (len(rows) == self.BATCH or bool(running or waiting))
            while waiting and len(running) < self.PARALLEL:
                running.append(_Lookup(*waiting.popleft(), self.leave, self.tracing))
            if not running and not more:
                break
            if running:
                self._wait_any(running)
            for lookup in [x for x in running if x.over()]:
                running.remove(lookup)
                self._conclude(lookup.row, lookup.verdict(), by, done)
        self.store.row("MAINTENANCE_END", name="reconcile")
        return done

    def _claim(self, busy: list[str], keys: list[str] | None) -> list[Row]:
        limit = self.BATCH if keys is None else max(len(keys), 1)
        return self.store.rows(
            "RECONCILE_DUE", keys=keys, busy=busy, limit=limit, hold=self.longest_lookup() + HOLD_MARGIN
        )

    def _conclude(self, row: Row, verdict: Verdict | None, by: str, done: Reconciled) -> None:
        try:
            result = self._apply(row, verdict, by)
        except Exception:
            logger.exception("recording the verdict on operation %s failed; it is asked again", row.key)
            result = "error"
        done.add(result)
        self.count("reconcile_results", result)

    @staticmethod
    def _wait_any(running: list[_Lookup]) -> None:
        nearest = min(x.ends for x in running)
        _Lookup.finished.wait(max(0.0, min(nearest - clock(), 0.2)))
        _Lookup.finished.clear()

    def _apply(self, row: Row, verdict: Verdict | None, by: str) -> str:
        """Record one verdict (``None``: nobody can be asked) and move the job on. Returns a result for the metrics."""
        if isinstance(verdict, Happened):
            result = canonical.encode(verdict.result)
            return self._resolve(row, "outcome_confirmed", by, "lookup", ref=verdict.ref, result=result)
        if isinstance(verdict, Refused):
            exc = verdict.error
            error = failures.to_json(exc) if isinstance(exc, BaseException) else canonical.printable({"text": str(exc)})
            return self._resolve(row, "refused", by, "lookup", error=error)
        evidence = None
        after: float | None = None
        if isinstance(verdict, NotHappened):
            evidence = {"lookup": "not_found", "asked_at": row.asked_at.isoformat(), "evidence": verdict.evidence}
            if self._resolve(row, "not_happened", by, "lookup", evidence=evidence) != "superseded":
                return "not_happened"
            # Not late enough, or the sender may still be alive: with a retained key it may be sent again all the same.
            params = {"key": row.key, "attempt": row.attempt, "fence": row.fence}
            absent = self.store.rows("ABSENT", asked_at=row.asked_at, evidence=canonical.encode(evidence), **params)
            if absent and row.idempotent_for is not None and self._resume(row, by, "resend"):
                return "resend"
        elif isinstance(verdict, Unresolved):
            evidence = {"lookup": "unresolved", "asked_at": row.asked_at.isoformat(), "reason": verdict.reason}
            after = verdict.retry_after
        elif row.sendable and self._resume(row, by, "resend"):
            return "resend"
        if self._policy(row, verdict, by):
            return f"policy_{row.if_unknown}"
        self._ask_again(row, after, evidence)
        return "unresolved" if isinstance(verdict, Unresolved) else "too_early" if verdict is not None else "parked"

    def _resolve(
        self,
        row: Row,
        status: str,
        by: str,
        reason: str,
        *,
        ref: str | None = None,
        result: str | None = None,
        error: Any = None,
        evidence: Any = None,
    ) -> str:
        rows = self.store.insist(
            "VERDICT",
            job=row.job_id,
            key=row.key,
            attempt=row.attempt,
            fence=row.fence,
            status=status,
            ref=ref,
            result=result,
            error=None if error is None else canonical.encode(error),
            evidence=canonical.encode(
                canonical.printable(evidence or {"lookup": status, "asked_at": row.asked_at.isoformat()})
            ),
            asked_at=row.asked_at,
            trusted=False,
            actor=by,
            reason=reason,
        )
        if not rows:
            return "superseded"
        self.on_moved(by, row.job_id)
        self.deliver_now(row.job_id)
        return status

    def _resume(self, row: Row, by: str, reason: str) -> bool:
        resumed = self.store.insist("RESUME", id=row.job_id, reason=f"{reason}:{row.key}", actor=by)
        if resumed:
            self.on_moved(by, row.job_id)
            self.deliver_now(row.job_id)
        return bool(resumed)

    def _policy(self, row: Row, verdict: Verdict | None, by: str) -> bool:
        """The author's declared policy, once the deadline and the lag are over and nobody else answers."""
        if row.if_unknown == "park" or not row.past_deadline:
            return False
        if isinstance(verdict, Unresolved) and row.reconcile_attempts < POLICY_ASKS:
            return False
        if row.idempotent_for is not None and not isinstance(verdict, Unresolved) and self._still_retained(row):
            return False
        if row.if_unknown == "assume_happened":
            evidence = {"policy": "assume_happened", "asked_at": row.asked_at.isoformat()}
            policy = "policy:assume_happened"
            return (
                self._resolve(row, "outcome_confirmed", policy, policy, ref=row.key, evidence=evidence) != "superseded"
            )
        marked = self.store.insist("POLICY", key=row.key, attempt=row.attempt, fence=row.fence)
        return bool(marked) and self._resume(row, by, "policy:send_again")

    @staticmethod
    def _still_retained(row: Row) -> bool:
        return bool(row.asked_at < row.first_intent_at + row.idempotent_for) and not row.has_lookup

    def _ask_again(self, row: Row, after: float | None, evidence: Any) -> None:
        """Back off, but ask as soon as an absence can be believed or a resend is allowed."""
        backoff = min(self.interval * 2 ** min(row.reconcile_attempts - 1, 16), MAX_BACKOFF)
        moments = [m for m in (row.absent_from, row.deadline_at) if m is not None and m > row.asked_at]
        self.store.insist(
            "ASK_AT",
            key=row.key,
            attempt=row.attempt,
            at=min(moments) if moments and after is None else None,
            after=backoff if after is None else min(max(after, 0.0), MAX_BACKOFF),
            evidence=None if evidence is None else canonical.encode(evidence),
        )


class _Lookup:
    """One question to a provider, in a thread of its own; abandoned when its time is over."""

    finished = threading.Event()

    def __init__(self, row: Row, effect: Effect[Any, Any], leave: Callable[[], None], tracing: Tracing) -> None:
        self.row = row
        self._tracing = tracing
        self._leave = leave
        self.timeout = effect.options.lookup_timeout
        self.ends = clock() + self.timeout
        self._answer: Any = None
        self._done = threading.Event()
        self._effect = effect
        threading.Thread(target=self._run, name=f"safe-effects-lookup-{row.key}", daemon=True).start()

    def _run(self) -> None:
        with faults.acting("sweeper"):
            self._ask()

    def _ask(self) -> None:
        row = self.row
        span = self._tracing.lookup(row)
        raised: BaseException | None = None
        try:
            operation = Operation(
                key=row.key,
                job_id=row.job_id,
                step=row.step,
                effect=row.effect,
                attempt=row.attempt,
                tenant=row.tenant,
                arguments=canonical.decode(canonical.encode(row.args)) or {},
                intent_at=row.intent_at,
                deadline_at=row.deadline_at,
                _expires=self.ends,
                _clock=clock,
            )
            find = self._effect.find
            if faults.armed is not None:
                faults.at(Point.BEFORE_LOOKUP, row.job_id, row.step)
            with span.current():
                answer = find(operation) if find is not None else None
                if inspect.isawaitable(answer):
                    answer = loop.complete(answer, timeout=max(0.0, self.ends - clock()))
            if faults.armed is not None:
                faults.at(Point.AFTER_LOOKUP, row.job_id, row.step)
            self._answer = answer
        except BaseException as exc:
            raised = exc
            self._answer = Unresolved(f"the lookup raised {type(exc).__name__}: {exc}")
        finally:
            span.end(Tracing.verdict(self._answer), raised)
            self._done.set()
            _Lookup.finished.set()
            self._leave()

    def over(self) -> bool:
        return self._done.is_set() or clock() >= self.ends

    def verdict(self) -> Verdict:
        """The answer; anything that is no valid verdict is unresolved."""
        if not self._done.is_set():
            return Unresolved(f"the lookup did not answer within {self.timeout:g} s")
        answer = self._answer
        if isinstance(answer, Happened):
            try:
                canonical.encode(answer.result)
            except (TypeError, ValueError):
                return Happened(answer.ref, None) if _is_ref(answer.ref) else _nonsense(answer)
            return answer if _is_ref(answer.ref) else _nonsense(answer)
        if isinstance(answer, (NotHappened, Refused, Unresolved)):
            return answer
        return _nonsense(answer)


def _is_ref(ref: Any) -> bool:
    return canonical.is_text(ref)


def _nonsense(answer: Any) -> Unresolved:
    return Unresolved(f"the lookup returned {answer!r}; return Happened, NotHappened, Refused or Unresolved")
