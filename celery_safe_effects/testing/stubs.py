"""Unit tests of bodies without a database: stubs for effects, and whether a body makes the same calls each time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid4, uuid5

from celery_safe_effects import canonical
from celery_safe_effects.config import from_conf
from celery_safe_effects.effects import Effect
from celery_safe_effects.engine import current
from celery_safe_effects.engine.job import ActiveJob, Hooks
from celery_safe_effects.engine.lease import HeldLease, clock
from celery_safe_effects.glue.task import SafeTask
from celery_safe_effects.states import OperationStatus
from celery_safe_effects.store.hot import Intent, Lease
from celery_safe_effects.values import Operation

JOB_ID = str(uuid5(NAMESPACE_OID, "celery-safe-effects unit test"))
"""The id of a stubbed job: always the same, so that keys can be asserted."""
_NOWHERE = {"safe_effects_database_url": "postgresql+psycopg://nowhere.invalid/none"}


class NotReplayable(AssertionError):
    """A body that makes other calls when it runs again; the message lists the differences."""


class _NotRecorded(BaseException):
    """A replay asks for what the first run did not: nothing can answer."""


@dataclass
class EffectCall:
    """One call of an effect.

    Attributes:
        effect: its name.
        step: the step: a number, the name given by ``step()``, or ``<effect>/<name>`` of ``keyed()``.
        key: the operation's key.
        arguments: by parameter name, as recorded: redacted ones are absent.
        status: ``outcome_confirmed``, ``refused``, ``not_happened`` or ``unknown``; ``intent_recorded`` while it runs.
        result: what the effect returned, as the body got it.
    """

    effect: str
    step: str
    key: str
    arguments: dict[str, Any]
    status: str = OperationStatus.INTENT_RECORDED.value
    result: Any = None
    digest: str = field(default="", repr=False)


@dataclass(frozen=True)
class SentMessage:
    """A message that a body sent, which went nowhere."""

    task: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    id: str


class StubbedJob:
    """What a stubbed body has done so far.

    Attributes:
        calls: its calls of effects, in the order of their intents.
        messages: the tasks that it sent.
        checkpoints: how many it has passed.
    """

    def __init__(self) -> None:
        self.calls: list[EffectCall] = []
        self.messages: list[SentMessage] = []
        self.checkpoints = 0

    def of(self, effect: Effect[Any, Any] | str) -> list[EffectCall]:
        """The calls of one effect.

        Args:
            effect: it, or its name.
        """
        name = effect if isinstance(effect, str) else effect.name
        return [call for call in self.calls if call.effect == name]


class _Store:
    """What a running job asks of the store, in memory."""

    def __init__(self, seen: StubbedJob) -> None:
        self.config = from_conf(_NOWHERE)
        self.seen = seen
        self._calls: dict[UUID, EffectCall] = {}

    def intent(self, lease: Lease, intent: Intent, nonce: UUID, *_: Any) -> tuple[bool, Any]:
        call = EffectCall(
            intent.effect, intent.step, intent.key, canonical.decode(intent.args) or {}, digest=intent.args_digest
        )
        self.seen.calls.append(call)
        self._calls[nonce] = call
        now = datetime.now(timezone.utc)
        ends = None if intent.deadline is None else now + timedelta(seconds=intent.deadline)
        return True, SimpleNamespace(attempt=1, nonce=nonce, intent_at=now, deadline_at=ends)

    def insist(self, statement: str, **params: Any) -> list[Any]:
        if statement in ("OUTCOME", "OUTCOME_ASYNC"):
            call = self._calls[params["nonce"]]
            call.status = params["status"]
            call.result = canonical.decode(params["result"])
            return [SimpleNamespace(status=params["status"], held=True, doubled=False)]
        if statement == "CHECKPOINT":
            self.seen.checkpoints += 1
            return [SimpleNamespace(cancelled=False, dying=None)]
        if statement == "WENT_ON":
            return [SimpleNamespace(passed=params["ordinal"])]
        if statement == "MORE_ATTEMPTS":
            return [SimpleNamespace(max_attempts=params["wanted"])]
        raise NotImplementedError(f"a stubbed job has no database to ask {statement}: test this with a real one")

    def count(self, *_: Any) -> None:
        """Nothing is counted."""


@contextlib.contextmanager
def stub_effects(
    task: Any, answers: Mapping[Effect[Any, Any], Any] | None = None, *, tenant: str = "default", attempt: int = 1
) -> Iterator[StubbedJob]:
    """Within, the task's body can be called as a function: its effects answer what they are told, and are recorded.

    No database, broker or provider is touched. The rules of a job hold: only declared effects may be called,
    overlapping calls need names, arguments must be JSON, exceptions mean what ``refused_on`` and ``not_happened_on``
    say. Messages that the body sends are recorded and go nowhere.

        with stub_effects(bill, {charge_card: Outcome("ch_1", 500), send_receipt: "r_1"}) as job:
            assert bill("cus_1", 500) == "ch_1"
        assert job.of(charge_card)[0].arguments == {"customer": "cus_1", "cents": 500}

    Args:
        task: a task with ``base=SafeTask``.
        answers: for each effect what its function returns; an exception (or its class) is raised, and a callable is
            called with the operation and the arguments. A list answers one call after another.
        tenant: the job's tenant.
        attempt: the job's attempt.

    Yields:
        what the body does.

    Raises (within):
        AssertionError: when an effect without an answer is called.
    """
    wanted = dict(answers or {})

    def answer(effect: Effect[Any, Any], _fn: Any, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if effect not in wanted:
            raise AssertionError(f"effect {effect.name!r} was called and has no answer; give it one in answers")
        return _answer(wanted[effect], op, args, kwargs)

    with _running(task, answer, tenant, attempt) as seen:
        yield seen


def _answer(given: Any, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(given, list):
        if not given:
            raise AssertionError(f"effect {op.effect!r} was called more often than it has answers")
        given = given.pop(0)
    if isinstance(given, BaseException) or (isinstance(given, type) and issubclass(given, BaseException)):
        raise given
    return given(op, *args, **kwargs) if callable(given) else given


Answer = Callable[[Effect[Any, Any], Any, Operation, tuple[Any, ...], dict[str, Any]], Any]


@contextlib.contextmanager
def _running(task: Any, answer: Answer, tenant: str = "default", attempt: int = 1) -> Iterator[StubbedJob]:
    if not isinstance(task, SafeTask):
        raise TypeError(f"{task!r} is no task with base=SafeTask")
    task = task._get_current_object() if hasattr(task, "_get_current_object") else task
    seen = StubbedJob()
    held = HeldLease(Lease(JOB_ID, uuid4(), 1, "unit test"), 3600.0)
    held.claimed(1, clock())
    row = SimpleNamespace(
        id=JOB_ID, tenant=tenant, pool=task.pool, attempts=attempt, fence=attempt, generation=0, max_attempts=5,
        passed=0, new_keys=None,
    )  # fmt: skip
    store: Any = _Store(seen)
    declared = None if task.effects is None else task._declared
    job = ActiveJob(store, held, row, declared=declared, hooks=Hooks(), prefork=False)
    if declared is None:
        now = datetime.now(timezone.utc)
        job.operation = Operation(
            key=job.key("body"), job_id=JOB_ID, step="body", effect=task.name, attempt=attempt, tenant=tenant,
            arguments={}, intent_at=now, deadline_at=None, _expires=None, _clock=clock,
        )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for effect in declared or ():
            stack.callback(setattr, effect, "fn", effect.fn)
            effect.fn = _replaced(effect, effect.fn, answer)
        stack.enter_context(_messages_to(seen, task, job))
        stack.callback(current.end, current.begin(job, alone=False))
        yield seen


def _replaced(effect: Effect[Any, Any], fn: Any, answer: Answer) -> Callable[..., Any]:
    def stub(op: Operation, *args: Any, **kwargs: Any) -> Any:
        return answer(effect, fn, op, args, kwargs)

    async def stub_awaited(op: Operation, *args: Any, **kwargs: Any) -> Any:
        given = answer(effect, fn, op, args, kwargs)
        return await given if hasattr(given, "__await__") else given

    return stub_awaited if effect.is_async else stub


@contextlib.contextmanager
def _messages_to(seen: StubbedJob, task: SafeTask, job: ActiveJob) -> Iterator[None]:
    publisher: Any = task.safe_effects.publisher

    def send_task(_send: Any, name: str, args: Any, kwargs: Any, options: dict[str, Any]) -> Any:
        job_id = options.get("task_id") or job.child_id()
        seen.messages.append(SentMessage(name, tuple(args or ()), dict(kwargs or {}), job_id))
        return task.app.AsyncResult(job_id)

    instead = {"send_task": send_task, "_accept_whole": lambda _batch: None}
    for name, value in instead.items():
        setattr(publisher, name, value)
    try:
        yield
    finally:
        for name in instead:
            delattr(publisher, name)


def assert_replayable(
    task: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    answers: Mapping[Effect[Any, Any], Any] | None = None,
    times: int = 2,
) -> StubbedJob:
    """Run a body, then run it again against what the first run recorded: it must ask for the same each time.

    After a crash a body runs again from its beginning and gets its recorded outcomes. One that then makes other calls
    (a clock, randomness, a read, an order of its own in the arguments or in a branch) is parked in production; here it
    fails. No database is needed.

    Args:
        task: a task with ``base=SafeTask`` and ``effects=``.
        args, kwargs: the body's arguments.
        answers: as for :func:`stub_effects`; effects that are not in it are really called, in the first run alone.
        times: how often the body runs again.

    Returns:
        what the first run did.

    Raises:
        NotReplayable: with a line for each step whose effect, key or arguments differ, for each operation or message
            that appears or vanishes, and for another end.
    """
    given = dict(answers or {})
    recorded: dict[str, tuple[Any, BaseException | None]] = {}

    def call(effect: Effect[Any, Any], fn: Any, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            value = _answer(given[effect], op, args, kwargs) if effect in given else fn(op, *args, **kwargs)
        except BaseException as exc:
            recorded[op.key] = (None, exc)
            raise
        if hasattr(value, "__await__"):
            return _noting(value, op.key, recorded)
        recorded[op.key] = (value, None)
        return value

    def again(effect: Effect[Any, Any], fn: Any, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op.key not in recorded:
            raise _NotRecorded(op.key)
        value, raised = recorded[op.key]
        if raised is not None:
            raise raised
        return value

    first, end = _run(task, call, args, kwargs, 1)
    for number in range(times):
        later, other_end = _run(task, again, args, kwargs, number + 2)
        problems = _differences(first, later)
        if not problems and end != other_end:
            problems = [f"the body ended with {other_end} and not with {end}"]
        if problems:
            lines = "\n".join(f"  - {problem}" for problem in problems)
            raise NotReplayable(
                f"task {task.name} does something else when it runs again:\n{lines}\n"
                "put clocks, randomness and reads into effects with repeatable=True"
            )
    return first


async def _noting(value: Any, key: str, recorded: dict[str, tuple[Any, BaseException | None]]) -> Any:
    try:
        found = await value
    except BaseException as exc:
        recorded[key] = (None, exc)
        raise
    recorded[key] = (found, None)
    return found


def _run(
    task: Any, answer: Answer, args: Sequence[Any], kwargs: Mapping[str, Any] | None, attempt: int
) -> tuple[StubbedJob, str]:
    with _running(task, answer, attempt=attempt) as seen:
        try:
            task._invoke(*args, **(kwargs or {}))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:
            return seen, type(exc).__name__
    return seen, "its return"


def _differences(first: StubbedJob, later: StubbedJob) -> list[str]:
    before = {call.key: call for call in first.calls}
    after = {call.key: call for call in later.calls}
    problems = []
    for key, call in after.items():
        known = before.get(key)
        if known is None:
            problems.append(f"step {call.step!r} ({call.effect}) appears: {_shown(call)}")
        elif known.effect != call.effect:
            problems.append(f"step {call.step!r} was {known.effect} and is {call.effect}")
        elif known.digest != call.digest:
            problems.append(f"step {call.step!r} ({call.effect}) has other arguments: {_changed(known, call)}")
    stopped = any(call.status == OperationStatus.UNKNOWN and call.key not in before for call in later.calls)
    if not stopped:  # behind an operation that appears, nothing ran
        problems += [
            f"step {call.step!r} ({call.effect}) vanishes: {_shown(call)}"
            for key, call in before.items()
            if key not in after
        ]
        sent, sent_again = ([(m.id, m.task, m.args, m.kwargs) for m in run.messages] for run in (first, later))
        for number in range(max(len(sent), len(sent_again))):
            old = sent[number] if number < len(sent) else None
            new = sent_again[number] if number < len(sent_again) else None
            if old != new:
                problems.append(f"message {number + 1} was {_message(old)} and is {_message(new)}")
    return problems


def _message(sent: tuple[Any, ...] | None) -> str:
    return "none" if sent is None else f"{sent[1]} {sent[2]} {sent[3]}"


def _shown(call: EffectCall) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in call.arguments.items()) or "no arguments"


def _changed(old: EffectCall, new: EffectCall) -> str:
    names = dict.fromkeys([*old.arguments, *new.arguments])
    found = [
        f"{name} was {old.arguments.get(name)!r} and is {new.arguments.get(name)!r}"
        for name in names
        if old.arguments.get(name) != new.arguments.get(name)
    ]
    return "; ".join(found) or "in a redacted one"
