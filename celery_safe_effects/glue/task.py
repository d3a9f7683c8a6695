"""``SafeTask``: what runs in the pool child between a broker delivery and Celery's own bookkeeping."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, Final

from celery import Task
from celery._state import _task_stack
from celery.app.task import Task as BaseTask
from celery.exceptions import Ignore, Reject
from celery.utils.imports import symbol_by_name
from celery.utils.serialization import raise_with_context
from kombu.utils.uuid import uuid

from .. import canonical
from ..effects import Effect, body_effect
from ..engine import current, failures, loop
from ..engine.job import ActiveJob, RetryAsked, RetryOver
from ..engine.veil import HIDDEN
from ..errors import ConfigurationError, EffectRefused, LeaseLost, NoActiveJob, UndeclaredEffect
from . import mapped
from .asynchronous import apart, at_home, awaited_run, finished, follow, send
from .trace import Traced

if TYPE_CHECKING:
    from ..app import SafeEffects

logger = logging.getLogger(__name__)

OURS: Final = ("idempotency_key", "tenant", "pool", "max_attempts", "max_age")
"""Options of ``apply_async`` that are the library's own and never reach the broker."""

UNBOUNDED: Final = 2**31 - 1
"""Runs of a job whose retries have no end."""
HOOKS: Final = ("before_start", "on_success", "on_failure", "on_retry", "after_return")
"""What Celery calls around a body."""
PROVIDED: Final = ("job", "safe_effects")
"""What a SafeTask gives its bodies: a class of the user's that defines it differently would take it away."""
BUILT_IN: Final = "celery."
"""Begins the names of Celery's own tasks, which are machinery and no jobs."""

_eager_options: ContextVar[dict[str, Any] | None] = ContextVar("safe_effects_eager_options", default=None)
_in_user_call: ContextVar[frozenset[str]] = ContextVar("safe_effects_in_user_call", default=frozenset())


class SafeTask(Task):
    """Base class of tasks whose deliveries are persisted, leased and recorded.

    Use it as ``@app.task(base=SafeTask, effects=[...])`` in an app that has ``SafeEffects(app)``.

    Attributes:
        effects: the effects that the body may call. Left out, the whole body is one side effect; an empty list declares
            it free of side effects.
        effect_options: where ``effects`` is left out: ``effect()``'s options for the whole body, and ``lookup``.
        lease_ttl, max_attempts, max_age, max_operations, pool, tenant: per-task values; times in seconds.
        redact: parameters whose values stand in the message alone: not in records, errors, events and logs.
    """

    abstract = True
    Request: ClassVar[Any] = "celery_safe_effects.glue.request:SafeRequest"
    __trace__ = Traced()
    effects: ClassVar[Sequence[Effect[Any, Any]] | None] = None
    effect_options: ClassVar[Mapping[str, Any] | None] = None
    lease_ttl: ClassVar[float | None] = None
    max_attempts: ClassVar[int | None] = None
    max_age: ClassVar[float | None] = None
    max_operations: ClassVar[int | None] = None
    pool: ClassVar[str | None] = None
    tenant: ClassVar[str | None] = None
    redact: ClassVar[Iterable[str]] = ()

    _is_async: ClassVar[bool] = False
    _declared: ClassVar[tuple[Effect[Any, Any], ...] | None] = None
    _body: ClassVar[Effect[Any, Any] | None] = None
    _store_started: ClassVar[bool] = False
    _user_call: ClassVar[Any] = None
    _user_before_start: ClassVar[Any] = None
    _dump_pydantic_arguments: ClassVar[Any] = None  # Celery's own, from 5.7 on

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """An ``async def`` body is awaited on the process's loop; before anything of Celery's is wrapped around it."""
        super().__init_subclass__(**kwargs)
        run = inspect.getattr_static(cls, "run")
        made = awaited_run(run)
        if made is not run:
            cls.run = made
            cls._is_async = True

    @classmethod
    def bind(cls, app: Any) -> Any:
        """Check the declaration when the task meets its app, and put what runs before the claim behind it.

        Raises:
            ConfigurationError: naming the task and what is wrong.
        """
        # Not in on_bound: that is the user's to override, and Celery's own does nothing that asks for super().
        bound = super().bind(app)
        cls._check_declaration()
        # STARTED and a user's before_start come after the claim: a stale delivery must write and run nothing.
        if cls.track_started:
            cls._store_started = True
            cls.track_started = False
        if inspect.isasyncgenfunction(cls.run):
            raise ConfigurationError(f"task {cls.name!r}: its body returns one result; it must not `yield`")
        if cls.request_stack is not None:  # else another thread is binding the class, and comes here with it
            follow(cls.request_stack)
        follow(_task_stack)
        # A user's own __call__ runs inside the claimed job, whether it calls super() or not, and wherever its class
        # stands among the bases.
        cls._set_aside("__call__", SafeTask, "_user_call")
        cls._set_aside("before_start", BaseTask, "_user_before_start")
        return bound

    @classmethod
    def _set_aside(cls, name: str, ours: type, kept: str) -> None:
        default = vars(ours)[name]
        for base in cls.__mro__:
            theirs = vars(base).get(name, default)
            if base not in (SafeTask, BaseTask) and theirs is not default:
                setattr(cls, kept, theirs)  # as it stands in the class: a function, a staticmethod
                setattr(cls, name, default)
                return

    @classmethod
    def _check_declaration(cls) -> None:
        def bad(what: str) -> ConfigurationError:
            return ConfigurationError(f"task {cls.name!r}: {what}")

        cls._body = cls._declared = None
        if cls.effects is not None:
            cls._declared = _declared(cls.name, cls.effects)
            if cls.effect_options:
                raise bad(
                    "effect_options describe a whole body that is one side effect; with effects= give the options to "
                    "effect() itself"
                )
        if isinstance(cls.redact, str) or not all(isinstance(name, str) for name in cls.redact):
            raise bad("redact takes the names of parameters, as a list")
        strangers = cls._redacted() - set(inspect.signature(cls.run).parameters)
        if strangers:
            raise bad(f"redact names no parameter: {', '.join(sorted(strangers))}")
        for option in ("lease_ttl", "max_age"):
            value = getattr(cls, option)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0):
                raise bad(f"{option} must be seconds greater than 0, not {value!r}")
        for option in ("max_attempts", "max_operations"):
            value = getattr(cls, option)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise bad(f"{option} must be at least 1, not {value!r}")
        for option in ("tenant", "pool"):
            text = getattr(cls, option)
            if text is not None and not canonical.is_text(text):
                raise bad(f"{option} must be a non-empty string, not {text!r}")
        for name in HOOKS:
            if inspect.iscoroutinefunction(getattr(cls, name)):
                raise bad(
                    f"its {name} is `async def`, which Celery would call and never await; make it a plain function"
                )
        for name in PROVIDED:
            owner = next(base for base in cls.__mro__ if name in vars(base))
            if owner is not SafeTask:
                raise bad(f"its class {owner.__name__} defines {name!r}, which SafeTask provides; rename it")

    @classmethod
    def _redacted(cls) -> frozenset[str]:
        """The parameters whose values are kept out of everything but the message."""
        body = (cls.effect_options or {}).get("redact") or ()
        return frozenset(cls.redact) | (frozenset((body,)) if isinstance(body, str) else frozenset(body))

    def _parts(self, args: Any, kwargs: Any) -> tuple[list[tuple[bool, Any]], dict[str, tuple[bool, Any]]]:
        """The arguments of a call, each with whether it is redacted."""
        names = self._redacted()
        if not names:
            return [(False, value) for value in args or ()], {k: (False, v) for k, v in (kwargs or {}).items()}
        parameters = inspect.signature(self.run).parameters.values()
        named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        rest = {p.kind: p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        known = {p.name for p in parameters}
        more = rest.get(inspect.Parameter.VAR_POSITIONAL)
        others = rest.get(inspect.Parameter.VAR_KEYWORD)
        return (
            [((named[i] if i < len(named) else more) in names, value) for i, value in enumerate(args or ())],
            {k: ((k if k in known else others) in names, v) for k, v in (kwargs or {}).items()},
        )

    def _shown(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call as anybody may see them."""
        positional, named = self._parts(args, kwargs)
        return (
            tuple(HIDDEN if secret else value for secret, value in positional),
            {name: HIDDEN if secret else value for name, (secret, value) in named.items()},
        )

    def _secrets(self, args: Any, kwargs: Any) -> list[Any]:
        """The values that nobody may see."""
        positional, named = self._parts(args, kwargs)
        return [value for secret, value in [*positional, *named.values()] if secret]

    @property
    def job(self) -> ActiveJob:
        """The running job.

        Raises:
            NoActiveJob: outside a running job.
        """
        found = current.job_here()
        if found is None:
            raise NoActiveJob("self.job exists only while a worker runs the task")
        return found

    @property
    def safe_effects(self) -> SafeEffects:
        """The app's :class:`~celery_safe_effects.SafeEffects`.

        Raises:
            ConfigurationError: when the app has none.
        """
        return of(self._get_app())

    def _body_effect(self) -> Effect[Any, Any]:
        """The effect that this task's whole body is."""
        found = type(self)._body
        if found is None:
            fn = getattr(self, "_orig_run", None) or self.run
            options = {**(self.effect_options or {}), "redact": self._redacted()}
            found = type(self)._body = body_effect(self.name, fn, options)
        return found

    def retry(
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: Any = None,
        throw: bool = True,
        eta: Any = None,
        countdown: Any = None,
        max_retries: int | None = None,
        **options: Any,
    ) -> Any:
        """As Celery's; the retry is written when the body has unwound, under the same job id, and costs one attempt.

        In a task whose whole body is one side effect, it is the author's recorded statement that running again is safe.
        A retry that was asked for stands, also if the body goes on after ``throw=False`` or swallows the ``Retry``.

        Raises:
            Retry: as Celery's, unless ``throw`` is false.
            MaxRetriesExceededError: or ``exc`` where it is given, as Celery's: ``max_retries`` is reached, or this was
                the last of ``max_attempts`` runs.
        """
        job = current.job()
        if job is None or job.id != self.request.id:
            return super().retry(args, kwargs, exc, throw, eta, countdown, max_retries, **options)
        job.asked = None
        if isinstance(exc, BaseException) and not job.in_body:
            # autoretry_for is a guess about classes, not the author's statement about this run; and what was refused
            # stays so, however often it is replayed.
            guess = job.operation is not None and not failures.matches(exc, self._body_effect().options.not_happened_on)
            if guess or isinstance(exc, EffectRefused) or isinstance(exc.__cause__, EffectRefused):
                raise exc
        try:
            self._must_have_a_run_left(job, args, kwargs, exc, max_retries)
            asked = super().retry(args, kwargs, exc, False, eta, countdown, max_retries, **options)
        except Reject as rejected:
            # Celery's word for a retry that could not be sent.
            over = rejected.reason if isinstance(rejected.reason, Exception) else rejected
            job.retry_over = RetryOver(over, "retry_not_sent")
            raise over from None
        except LeaseLost:
            raise
        except BaseException as over:
            job.retry_over = job.retry_over or RetryOver(over, "max_retries")
            raise
        job.asked = RetryAsked(asked, exc if isinstance(exc, BaseException) else None)
        if throw:
            raise asked
        return asked

    def _must_have_a_run_left(self, job: ActiveJob, args: Any, kwargs: Any, exc: Any, max_retries: int | None) -> None:
        """Raise what Celery raises when ``max_retries`` is reached, if this run is the last of ``max_attempts``."""
        allowed = self.max_retries if max_retries is None else max_retries
        if job.attempt < job.max_attempts or (allowed is not None and self.request.retries >= allowed):
            return  # there is, or Celery says that there is none
        wanted = runs_needed(self, max_retries)
        if wanted is not None and wanted > job.max_attempts:
            job.ask_for_more_attempts(wanted)
            if job.attempt < job.max_attempts:
                return
        final = exc or self.MaxRetriesExceededError(
            f"Can't retry {self.name}[{job.id}]: it has had {job.attempt} runs, and max_attempts allows no more",
            task_args=self.request.args if args is None else args,
            task_kwargs=self.request.kwargs if kwargs is None else kwargs,
        )
        job.retry_over = RetryOver(final, "max_attempts")
        raise_with_context(final)

    def replace(self, sig: Any) -> Any:
        """As Celery's. A SafeTask takes over this job's id and row; of a canvas, its members are jobs of their own.

        The row of a job that is replaced by something else than one SafeTask ends with the reference
        ``replaced:<id>``, in the transaction in which what replaces it is accepted; the result comes under the same id.

        Raises:
            Ignore: as Celery's, always.
        """
        from .batch import Batch
        from .canvas import with_end

        job = current.job()
        if job is None or job.id != self.request.id:
            return super().replace(sig)
        job.asked = None  # the last word counts
        if self.request.is_eager:
            sig = sig.clone()
            sig.options.setdefault("task_id", job.child_id())  # it runs within this job, and is another one
            return super().replace(sig)
        batch = Batch(tenant=job.tenant)
        try:
            with batch.gather():
                return super().replace(with_end(sig, self._get_app()))
        except Ignore:
            job.replacement = batch
            raise

    def add_to_chord(self, sig: Any, lazy: bool = False) -> Any:
        """As Celery's. A body that runs again adds the same member, which is counted once.

        Raises:
            ValueError: this job is no member of a chord.
            NotImplementedError: the result backend cannot do it; Celery's own does so on Redis alone.
        """
        job = current.job()
        request = self.request
        if job is None or job.id != request.id or not request.chord:
            return super().add_to_chord(sig, lazy)
        sig.set(group_id=request.group, group_index=request.group_index, chord=request.chord, root_id=request.root_id)
        self.safe_effects.publisher.chords.add(request.group, sig.freeze())
        return sig if lazy else sig.delay()

    def map(self, it: Any) -> Any:
        """As Celery's: one job that calls the task with each item. Its steps begin with the item's index."""
        return mapped.signature(self, ([item] for item in it))

    def starmap(self, it: Any) -> Any:
        """As :meth:`map`, with items that are lists of arguments."""
        return mapped.signature(self, it)

    def chunks(self, it: Any, n: int) -> Any:
        """As Celery's: a group of such jobs of ``n`` items each, which are lists of arguments."""
        return mapped.Chunks(self.s(), it, n, app=self._get_app())

    def apply(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """As Celery's: runs the job here and now, with its row, its lease, its intents and its outcomes.

        Also what ``apply_async`` does under ``task_always_eager``. An existing job of the same idempotency key or id is
        returned and not run again. In a job's body it is a step like a message that it sends.

        Returns:
            the result as the row says it; its ``get()`` raises ``TimeoutError`` where the job has not ended.

        Raises:
            IdempotencyConflict: the key belongs to another call.
            ConfigurationError: for ``transaction=``, which cannot commit together with a job that runs before it.
        """
        if options.pop("transaction", None) is not None:
            raise ConfigurationError("transaction= has no meaning where a job runs at once (apply, task_always_eager)")
        ours: dict[str, Any] = {name: options.pop(name) for name in OURS if name in options}
        args, kwargs = self._as_sent(args, kwargs)
        job_id = options["task_id"] = options.get("task_id") or self._child_id() or uuid()
        eager = self.safe_effects.eager
        found = eager.existing(self, args, kwargs, ours, job_id)
        if found is not None:
            return found
        scope = _eager_options.set(ours)
        try:
            with apart():
                result = super().apply(args, kwargs, **options)
        except Exception:
            eager.settle(job_id)
            raise
        finally:
            _eager_options.reset(scope)
        return eager.told(result)

    @staticmethod
    def _child_id() -> str | None:
        """The id of what the running body runs or sends next: the same each time that the body runs."""
        job = current.job()
        if job is None:
            return None
        job.pass_over()
        return job.child_id()

    def _as_sent(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments as a message would carry them, which ``apply()`` does not send but records."""
        dump = self._dump_pydantic_arguments
        return dump(args, kwargs) if dump is not None else (args, kwargs)

    def _invoke(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body, by way of the user's own ``__call__`` where there is one."""
        call = self._user_call
        with at_home(), loop.synchronous():
            return finished(call(*args, **kwargs) if call is not None else self.run(*args, **kwargs))

    @classmethod
    def _check_for_worker(cls) -> None:
        """Check what only a worker needs to know.

        Raises:
            ConfigurationError: naming the task and the class.
        """
        ours: Any = symbol_by_name(SafeTask.Request)
        for base in cls.__mro__:
            wanted: Any = symbol_by_name(vars(base).get("Request", ours))
            if base is not BaseTask and not issubclass(wanted, ours):
                raise ConfigurationError(
                    f"task {cls.name!r}: the Request {wanted.__name__} of its class {base.__name__} must derive from "
                    "celery_safe_effects.glue.request.SafeRequest, or a lost worker would be taken for a failed job"
                )

    @staticmethod
    def _options_of_apply() -> dict[str, Any]:
        """The library's own options of the ``apply()`` that is under way."""
        return _eager_options.get() or {}

    async def aapply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """As ``apply_async``, without blocking the event loop.

        What is accepted when the call is cancelled stays accepted: enqueue again with the same ``idempotency_key`` or
        ``task_id`` to learn.

        Arguments:
            transaction: also SQLAlchemy's AsyncSession or AsyncConnection, or psycopg's AsyncConnection; its statements
                run on the loop. Not Django's, whose connections belong to a thread.

        Returns:
            the ``AsyncResult``.

        Raises:
            as ``apply_async``.
        """
        return await send(functools.partial(self.apply_async, args, kwargs), options)

    async def adelay(self, *args: Any, **kwargs: Any) -> Any:
        """As ``delay``, without blocking the event loop."""
        return await self.aapply_async(args, kwargs)

    def start_strategy(self, app: Any, consumer: Any, **kwargs: Any) -> Any:
        """Refuse to consume for a SafeTask in an app without ``SafeEffects``: every delivery of it would fail."""
        try:
            of(app)
        except ConfigurationError as exc:
            logger.critical("celery-safe-effects refuses to start this worker: %s", exc)
            raise SystemExit(f"celery-safe-effects refuses to start this worker: {exc}") from exc
        return super().start_strategy(app, consumer, **kwargs)

    def apply_async(
        self, args: Any = None, kwargs: Any = None, task_id: str | None = None, *more: Any, **options: Any
    ) -> Any:
        """As Celery's; returns once the job is durable.

        Raises:
            ConfigurationError: the app has no ``SafeEffects``, and the job would have no row.
        """
        app = self._get_app()
        of(app)
        if task_id is None and app.conf.task_always_eager:
            task_id = self._child_id()
        return super().apply_async(args, kwargs, task_id, *more, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request = self.request
        if request.called_directly or not request.id:
            return self._call_directly(args, kwargs)
        job = current.job()
        if job is not None and job.id == request.id:
            return self._inner_run(*args, **kwargs)  # a user's own __call__ came here by super()
        from .execution import Execution

        return Execution(self, request, args, kwargs).run()

    def _inner_run(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def _call_directly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``task(...)``: a function call as in Celery, without a job of its own; what it does belongs to its caller."""
        job = current.job_here()
        running = _task_stack.top
        if job is None and running is not None and running.name in mapped.CELERYS:
            raise ConfigurationError(
                f"task {self.name!r} would run unrecorded inside {running.name}; use {self.name}.map(), starmap() or "
                "chunks(), whose items are recorded"
            )
        if job is not None and job.declared is not None and self.effects is None:
            raise UndeclaredEffect(
                f"task {self.name!r} was called as a function by a task with effects=; its whole body is a side effect "
                "that would be neither declared nor recorded: send it with delay(), or declare its effects",
                effect=self.name,
            )
        inside = _in_user_call.get()
        first = self._user_call is not None and self.name not in inside
        scope = _in_user_call.set(inside | {self.name} if first else inside - {self.name})
        try:
            return self._user_call(*args, **kwargs) if first else super().__call__(*args, **kwargs)
        finally:
            _in_user_call.reset(scope)


def keep_built_ins_plain(app: Any) -> None:
    """``task_cls=SafeTask`` is meant for the user's tasks: Celery makes its own of the same class.

    Raises:
        ConfigurationError: when they are made already.
    """
    tasks = app.tasks if app.finalized else {}
    made = [name for name, task in tasks.items() if name.startswith(BUILT_IN) and isinstance(task, SafeTask)]
    if made:
        raise ConfigurationError(
            f"the app {app.main!r} has task_cls=SafeTask and was used before SafeEffects, so that {made[0]} is a job; "
            "make SafeEffects(app) where the app is made"
        )
    task_from_fun = app._task_from_fun

    def plain_if_built_in(fun: Any, name: str | None = None, base: Any = None, **options: Any) -> Any:
        named = name or app.gen_task_name(fun.__name__, fun.__module__)
        if base is None and named.startswith(BUILT_IN):
            base = BaseTask
        return task_from_fun(fun, name=named, base=base, **options)

    app._task_from_fun = plain_if_built_in


def hears_of_its_end(task: Any) -> bool:
    """Whether a task wants to be told of its end although its result is ignored: by a hook, or to store an error."""
    if task is None:
        return False
    hooks = ("on_success", "on_failure", "after_return")
    overridden = any(getattr(type(task), hook) is not getattr(BaseTask, hook) for hook in hooks)
    return overridden or bool(task.store_errors_even_if_ignored)


def runs_needed(task: Any, max_retries: int | None = None) -> int | None:
    """How many runs a task's retries may come to.

    Arguments:
        task: the task.
        max_retries: what the retry at hand says.

    Returns:
        one more than the larger ``max_retries`` that the retry and the task itself give; ``None`` where neither does:
        Celery's own default says nothing about this task.
    """
    given = [] if max_retries is None else [max_retries + 1]
    if any("max_retries" in vars(cls) for cls in type(task).__mro__ if not cls.__module__.startswith(BUILT_IN)):
        given.append(UNBOUNDED if task.max_retries is None else task.max_retries + 1)
    return min(max(given), UNBOUNDED) if given else None


def of(app: Any) -> SafeEffects:
    """The app's :class:`~celery_safe_effects.SafeEffects`.

    Raises:
        ConfigurationError: when the app has none.
    """
    found = app.__dict__.get("_safe_effects")
    if found is None:
        raise ConfigurationError(
            f"the app {app.main!r} has SafeTasks but no SafeEffects; add `SafeEffects(app)` where the app is made"
        )
    return found  # type: ignore[no-any-return]


def _declared(name: str, effects: Any) -> tuple[Effect[Any, Any], ...]:
    if not isinstance(effects, (list, tuple, set, frozenset)):
        raise ConfigurationError(f"task {name!r}: effects= takes a list of effects, not {effects!r}")
    seen: dict[str, Effect[Any, Any]] = {}
    for found in effects:
        if not isinstance(found, Effect):
            raise ConfigurationError(
                f"task {name!r}: effects= lists {found!r}, which is no effect; decorate it with @effect()"
            )
        if found.name in seen:
            raise ConfigurationError(f"task {name!r}: effects= lists {found.name!r} twice")
        seen[found.name] = found
    return tuple(seen.values())
