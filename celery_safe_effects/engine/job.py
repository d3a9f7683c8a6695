"""A running job: what its body sees of it, its steps, and the reasons to stop.

An intent is recorded before every side effect and an outcome after it (:mod:`.calls`); what is recorded is replayed
(:mod:`.replay`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import NAMESPACE_OID, UUID, uuid5

from .. import canonical
from ..errors import (
    Deferred,
    JobCancelled,
    LeaseLost,
    NoActiveJob,
    OperationBusy,
    OutcomeUnknown,
    ReplayMismatch,
    StepNameRequired,
)
from ..store.hot import STORE_ERRORS, Row, Store
from ..values import Operation
from . import deadline, loop
from .lease import HeldLease, Moment, clock
from .replay import Recorded
from .tracing import Tracing
from .veil import Veil

if TYPE_CHECKING:
    from ..effects import Effect

logger = logging.getLogger(__name__)

CLOSE_TICK = 0.5
"""Seconds between two looks at whether it is still worth waiting for calls in flight."""


def key_of(job_id: str, generation: int, step: str, number: int | None = None) -> str:
    """The key of a step's operation.

    Arguments:
        job_id: the job.
        generation: how often it replaced itself.
        step: the step.
        number: which of its keys, where an operator has given it a new one.
    """
    key = f"{job_id}:{step}" if not generation else f"{job_id}:{generation}:{step}"
    return key if number is None else f"{key}#{number}"


@dataclass
class _Branch:
    """Messages that are sent beside the event loop."""

    job: ActiveJob
    place: int
    children: int = 0


_branch: ContextVar[_Branch | None] = ContextVar("safe_effects_branch", default=None)


@dataclass(frozen=True)
class Hooks:
    """What the surroundings want to know: Celery's signals and counters hang here."""

    double_effect: Callable[[str, str, str], None] = lambda _key, _job, _ref: None
    armed: Callable[[float | None], AbstractContextManager[bool]] = deadline.killed_after
    tracing: Tracing = field(default_factory=Tracing)


class RetryAsked(NamedTuple):
    """The body asked to run again; it stands, whatever the body does afterwards.

    Attributes:
        retry: what says when and with what.
        about: the exception that it was asked for.
    """

    retry: Any
    about: BaseException | None


class RetryOver(NamedTuple):
    """The body asked to run again and was told that it may not.

    Attributes:
        raised: what it was told with.
        reason: why: ``max_retries``, ``max_attempts``.
    """

    raised: BaseException
    reason: str


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
        self.uncalled: str | None = None
        self.deferred: Deferred | None = None
        self.outgoing: Any = None
        self.replacement: Any = None
        self.children = 0
        self.veil = Veil()
        """What is kept out of records and errors."""
        self._named: set[str] = set()
        self.in_body = False
        self.max_attempts: int = row.max_attempts
        self.asked: RetryAsked | None = None
        self.retry_over: RetryOver | None = None
        self.passed: int = row.passed
        self._new_keys: dict[str, int] = canonical.decode(row.new_keys) or {}
        self.unrecorded: dict[UUID, str] = {}
        """The nonces and keys of intents that may be recorded, and whose outcome is not."""
        self.closed = False
        """The body has ended: no further effect starts."""
        self._not_passed: int = 0
        self._lock = threading.Lock()
        self._none_open = threading.Condition(self._lock)
        self._open: dict[str, asyncio.Task[Any] | None] = {}
        self.position = 0
        """How many calls have begun."""
        self._unnamed = 0
        self._prefix = ""
        self.recorded = Recorded(self, recorded or ())

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
            raise self.lost()
        sent = Moment()
        rows = self.insist(
            "CHECKPOINT",
            until=self.held.trusted,
            sending=sent,
            job=self.id,
            token=self.lease.token,
            fence=self.fence,
            ttl=self.held.ttl,
        )
        if not rows:
            raise self.lost()
        self.held.renewed = max(self.held.renewed, sent.at)
        if rows[0].cancelled or rows[0].dying:
            self.held.cancelled = self.held.cancelled or rows[0].cancelled
            raise self.cancelled(rows[0])

    async def acheckpoint(self) -> None:
        """As :meth:`checkpoint`, without blocking the event loop."""
        _, cancelled = await loop.in_thread(self.checkpoint)
        if cancelled is not None:
            raise cancelled

    # -- steps ---------------------------------------------------------------------------------------------------------

    def key(self, step: str) -> str:
        """The operation key of a step; after ``self.replace()`` it carries the generation."""
        return key_of(self.id, self.generation, step, self._new_keys.get(step))

    def open_step(self, effect: Effect[Any, Any], step: str | None, keyed: str | None) -> tuple[str, int]:
        """Take the step's name, which nobody else has until :meth:`close_step`.

        Returns:
            the name, and the call's place in the order of all calls.

        Raises:
            StepNameRequired, OperationBusy: another call is open.
            NoActiveJob: the body has ended.
        """
        with self._lock:
            if self.closed:
                raise self.over()
            if step is None and keyed is None and self._open:
                raise StepNameRequired(
                    f"effect {effect.name!r} was called while {', '.join(sorted(self._open))} is open; name "
                    f'overlapping calls: {effect.__name__}.step("...")(...)'
                )
            # Unnamed calls are counted by themselves: a named one may have begun by now, and not yet the next time.
            unnamed = self._unnamed + (step is None and keyed is None)
            name = f"{effect.name}/{keyed}" if keyed else f"{self._prefix}{step or unnamed}"
            if name in self._open:
                raise OperationBusy(f"step {name!r} of job {self.id} is being called already", step=name)
            self._unnamed = unnamed
            self.position += 1
            self._open[name] = asyncio.current_task() if loop.in_coroutine() else None
            return name, self.position

    @contextlib.contextmanager
    def item(self, index: int) -> Iterator[None]:
        """Within, it is the body of one of many calls in this job: its steps begin with ``<index>.``."""
        self._prefix, self._unnamed = f"{index}.", 0
        try:
            yield
        finally:
            self._prefix = ""

    def close_step(self, name: str) -> None:
        """A call is over."""
        with self._lock:
            self._open.pop(name, None)
            if not self._open:
                self._none_open.notify_all()

    def interrupt(self) -> None:
        """Cancel the calls that coroutines have in flight."""
        with self._lock:
            tasks = [task for task in self._open.values() if task is not None]
        for task in tasks:
            task.get_loop().call_soon_threadsafe(task.cancel)

    def close(self, patience: float | None = None) -> None:
        """The body has ended: no further effect starts, and the calls in flight are waited for.

        Arguments:
            patience: seconds; ``None`` waits for as long as the lease is ours. What is in flight then is unknown.
        """
        until = None if patience is None else clock() + patience
        with self._lock:
            self.closed = True
            while self._open and (self.held.trusted() if until is None else clock() < until):
                self._none_open.wait(CLOSE_TICK if until is None else min(CLOSE_TICK, max(0.0, until - clock())))
            open_keys = list(self.unrecorded.values())
        if open_keys and self.parked is None:
            self.parks(open_keys[0], "its call has not returned")

    def did_not_happen(self, exc: BaseException | None) -> None:
        """A step did not happen; unless the body goes on from ``exc``, it is the last one and may be sent again."""
        self._not_passed = self.position
        if exc is not None:
            self.not_happened = exc

    def go_on(self) -> None:
        """The body is about to do something more; not behind a call that was cancelled before it began.

        A replay could not take the same way: nothing tells it when to cancel, and it would make that call.

        Raises:
            Deferred: the body is to run again.
        """
        if self.uncalled is not None:
            self.deferred = Deferred(
                f"step {self.uncalled!r} of job {self.id} was cancelled before its call began; the body runs again"
            )
        if self.deferred is not None:
            raise self.deferred

    def pass_over(self) -> None:
        """The body does something else than an effect of its own: steps that did not happen are behind it now.

        Raises:
            LeaseLost: nothing else may be done.
            Deferred: see :meth:`go_on`.
        """
        self.go_on()
        if self._not_passed > self.passed:
            rows = self.insist(
                "WENT_ON",
                until=self.held.trusted,
                id=self.id,
                token=self.lease.token,
                fence=self.fence,
                ordinal=self._not_passed,
            )
            if not rows:
                raise self.lost()
            self.passed = rows[0].passed

    def ask_for_more_attempts(self, wanted: int) -> None:
        """A retry may need more runs than were known to be needed; in vain where ``max_attempts`` itself was given.

        Raises:
            LeaseLost: nothing else may be done.
        """
        rows = self.insist(
            "MORE_ATTEMPTS",
            until=self.held.trusted,
            id=self.id,
            token=self.lease.token,
            fence=self.fence,
            wanted=wanted,
        )
        if not rows:
            raise self.lost()
        self.max_attempts = rows[0].max_attempts

    def child_id(self, named: str | None = None) -> str:
        """The id of the next message (or canvas) that the body makes: the same each time that the body runs.

        Arguments:
            named: the message's own name, which makes its place in their order unimportant; once in a run.
        """
        branch = _branch.get()
        with self._lock:
            if named is not None and named not in self._named:
                self._named.add(named)
                place = f"named:{named}"
            elif branch is not None and branch.job is self:
                branch.children += 1
                place = f"{branch.place}.{branch.children}"
            else:
                self.children += 1
                place = str(self.children)
        return str(uuid5(NAMESPACE_OID, f"{self.id}:{self.generation}:child:{place}"))

    @contextlib.contextmanager
    def branch(self) -> Iterator[None]:
        """Within this block, and in threads that take its context along, messages are counted by themselves.

        What others send meanwhile does not change their ids.
        """
        with self._lock:
            self.children += 1
            made = _Branch(self, self.children)
        token = _branch.set(made)
        try:
            yield
        finally:
            _branch.reset(token)

    # -- the database, and reasons to stop -----------------------------------------------------------------------------

    def insist(self, statement: str, /, **params: Any) -> list[Row]:
        """Run a statement that may be repeated.

        Raises:
            LeaseLost: the database does not take it; what became of the job, it will say to others. Never the error
                itself, which the body could take for the effect's.
        """
        try:
            return self.store.insist(statement, **params)
        except STORE_ERRORS as exc:
            logger.error("job %s: the database does not take %s: %s", self.id, statement, exc)
            raise self.lost() from exc

    def lost(self) -> LeaseLost:
        """The lease is not ours any more: what to raise."""
        self.held.lost = True
        return LeaseLost(
            f"job {self.id} (fence {self.fence}) is no longer ours; nothing more is recorded", job_id=self.id
        )

    def over(self) -> NoActiveJob:
        """The body has ended: what to raise in what it left behind."""
        return NoActiveJob(f"the body of job {self.id} has ended; no further effect of it starts")

    def parks(self, key: str, why: str) -> OutcomeUnknown:
        """An outcome is not known, and no further effect starts: what to raise."""
        self.parked = OutcomeUnknown(
            f"operation {key}: {why}; the job is parked until a lookup, the policy or an operator resolves it",
            key=key,
            job_id=self.id,
        )
        return self.parked

    def cancelled(self, row: Row) -> JobCancelled:
        """The job was cancelled, or its time is over: what to raise."""
        reason = "cancelled" if row.cancelled else row.dying
        why = {"expired": "expired", "max_age": "older than its max_age"}.get(reason, reason)
        return JobCancelled(f"job {self.id} is {why}", job_id=self.id, reason=reason)
