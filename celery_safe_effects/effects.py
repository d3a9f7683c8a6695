"""``effect``: declares a side effect, what its provider guarantees, and how to look it up."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any, Concatenate, Final, Generic, Literal, ParamSpec, TypeVar, overload

from . import canonical
from .engine import calls, current, loop
from .engine.failures import Matcher
from .errors import ConfigurationError, NoActiveJob
from .values import Operation, Outcome, Verdict, seconds

P = ParamSpec("P")
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)
Awaited = Coroutine[object, None, R]
"""What a call returns that is awaited; without ``Any``, in which type checkers would lose themselves in ``gather``."""
Policy = Literal["park", "assume_happened", "send_again"]
POLICIES: Final = ("park", "assume_happened", "send_again")
DEFAULT_DEADLINE: Final = 60.0
BODY: Final = "body"
Lookup = Callable[[Operation], Verdict | Awaitable[Verdict]]
L = TypeVar("L", bound=Lookup)


@dataclass(frozen=True)
class EffectOptions:
    """What the author states about an effect. Times are seconds."""

    idempotent_for: float | None = None
    deadline: float | None = DEFAULT_DEADLINE
    lookup_lag: float = 0.0
    lookup_timeout: float = 10.0
    refused_on: tuple[Matcher, ...] = ()
    not_happened_on: tuple[Matcher, ...] = ()
    if_unknown: Policy = "park"
    repeatable: bool = False
    detached: bool = False
    kill_at_deadline: bool = True
    trust_deadline_kill: bool = False
    redact: frozenset[str] = field(default_factory=frozenset)


def make_options(name: str, given: Mapping[str, Any]) -> EffectOptions:
    """Validate the options of an effect; what is not given has the default of :class:`EffectOptions`.

    Arguments:
        name: the effect's, for the messages.
        given: options by the names of :func:`effect`.

    Raises:
        ConfigurationError: naming the effect and the option.
    """
    known = {f.name for f in fields(EffectOptions)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigurationError(f"effect {name!r} has no option {unknown[0]!r}; it takes {', '.join(sorted(known))}")
    value: dict[str, Any] = {**vars(EffectOptions()), **given}

    def bad(option: str, why: str) -> ConfigurationError:
        return ConfigurationError(f"effect {name!r}: {option} {why}")

    def positive(option: str, value: Any, *, zero: bool = False) -> float | None:
        number = seconds(value)
        if number is None:
            return None
        if isinstance(number, bool) or not isinstance(number, (int, float)) or number < 0 or (number == 0 and not zero):
            raise bad(option, f"must be a number of seconds, not {value!r}")
        return float(number)

    def matchers(option: str, value: Any) -> tuple[Matcher, ...]:
        found = tuple(value) if isinstance(value, (tuple, list, set, frozenset)) else (value,)
        for matcher in found:
            if isinstance(matcher, type) and issubclass(matcher, BaseException):
                continue
            if callable(matcher) and not isinstance(matcher, type):
                continue
            raise bad(option, f"takes exception classes and predicates, not {matcher!r}")
        return found

    if value["if_unknown"] not in POLICIES:
        raise bad("if_unknown", f"must be one of {', '.join(POLICIES)}, not {value['if_unknown']!r}")
    if isinstance(value["redact"], str):
        raise bad("redact", "takes several parameter names, not one string")
    value["redact"] = frozenset(value["redact"])
    for option in ("idempotent_for", "deadline", "lookup_lag", "lookup_timeout"):
        value[option] = positive(option, value[option], zero=option == "lookup_lag")
    if value["lookup_lag"] is None or value["lookup_timeout"] is None:
        raise bad("lookup_lag and lookup_timeout", "must be numbers of seconds")
    for option in ("refused_on", "not_happened_on"):
        value[option] = matchers(option, value[option])
    options = EffectOptions(**value)
    outside = options.idempotent_for or options.if_unknown != "park" or options.refused_on or options.detached
    if options.repeatable and outside:
        raise bad("repeatable", "means no outside effect: it takes no idempotent_for, if_unknown, refused_on, detached")
    if options.detached and options.trust_deadline_kill:
        raise bad("detached", "and trust_deadline_kill exclude each other: the timer cannot end other processes")
    if options.idempotent_for is not None and options.deadline and options.idempotent_for <= options.deadline:
        raise bad("idempotent_for", "must be longer than the deadline, or a resend is never allowed")
    return options


class Effect(Generic[P, T_co]):
    """A declared side effect; call it inside a job like its function, without its ``op`` argument.

    Made by :func:`effect`. Calling it records the intent, calls the function, records the outcome and returns it. One
    whose function is ``async def`` is awaited; synchronous code of a job, which cannot await, gets the outcome itself.

    Attributes:
        is_async: whether its function is ``async def``.

    Raises (when called):
        EffectRefused: the provider said no (``refused_on``).
        OutcomeUnknown: it cannot be told whether it happened; the job is parked.
        LeaseLost, JobCancelled: nothing was called.
        ReplayMismatch, UndeclaredEffect, StepNameRequired, OperationBusy, NoActiveJob: nothing was called.
    """

    def __init__(self, fn: Callable[..., Any], name: str, options: EffectOptions) -> None:
        self.fn = fn
        self.name = name
        self.options = options
        self.find: Lookup | None = None
        self.__name__ = getattr(fn, "__name__", name)
        self.__qualname__ = getattr(fn, "__qualname__", self.__name__)
        self.__module__ = getattr(fn, "__module__", __name__)
        self.__doc__ = fn.__doc__
        self.__wrapped__ = fn
        parameters = list(inspect.signature(fn).parameters.values())
        if not parameters or parameters[0].kind not in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            raise ConfigurationError(f"effect {name!r}: its function takes the Operation as its first argument")
        if inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
            raise ConfigurationError(f"effect {name!r}: its function returns one outcome; it must not `yield`")
        self.is_async = inspect.iscoroutinefunction(fn)
        self.signature = inspect.Signature(parameters[1:])
        missing = options.redact - {p.name for p in parameters[1:]}
        if missing:
            raise ConfigurationError(f"effect {name!r}: redact names no parameter: {', '.join(sorted(missing))}")

    @property
    def uses_loop(self) -> bool:
        """Whether a coroutine is run for it: its function, or its lookup."""
        return self.is_async or inspect.iscoroutinefunction(self.find)

    def __repr__(self) -> str:
        return f"<effect {self.name}>"

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """The call's arguments, bound to the signature, defaults included.

        Raises:
            TypeError: when they do not fit the signature.
        """
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co:
        return self._call(None, None, args, kwargs)

    @property
    def blocking(self: Effect[P, Awaited[R]]) -> Effect[P, R]:
        """This very effect, typed as synchronous code sees one whose function is ``async def``."""
        return self  # type: ignore[return-value]

    def step(self, name: str) -> Callable[P, T_co]:
        """The same effect under a step name instead of its ordinal; named steps may overlap.

        Arguments:
            name: unique in the job; not a number.
        """
        _step_name(self.name, name)

        def call(*args: P.args, **kwargs: P.kwargs) -> T_co:
            return self._call(name, None, args, kwargs)

        return call

    def keyed(self, name: str) -> Callable[P, T_co]:
        """The same effect under a business key, ``<tenant>/<effect>/<name>``, shared by all jobs of the tenant.

        Arguments:
            name: such as an invoice number.
        """
        if not canonical.is_text(name):
            raise ConfigurationError(f"effect {self.name!r}: keyed() takes a non-empty string, not {name!r}")

        def call(*args: P.args, **kwargs: P.kwargs) -> T_co:
            return self._call(None, name, args, kwargs)

        return call

    def lookup(self, find: L) -> L:
        """Declare how to ask the provider what became of an operation. Used as a decorator.

        Arguments:
            find: ``def`` or ``async def``; takes an :class:`Operation`, returns a verdict; anything else counts as
                unresolved.
        """
        if self.options.repeatable:
            raise ConfigurationError(f"effect {self.name!r} is repeatable and never unknown; it takes no lookup")
        if not callable(find):
            raise ConfigurationError(f"effect {self.name!r}: lookup takes a function of one Operation")
        try:
            inspect.signature(find).bind(None)
        except TypeError as exc:
            raise ConfigurationError(f"effect {self.name!r}: its lookup takes the Operation alone: {exc}") from None
        except ValueError:
            pass  # a builtin that tells no signature
        self.find = find
        return find

    def _call(self, step: str | None, keyed: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> T_co:
        job = current.job_here()
        if job is None:
            raise NoActiveJob(
                f"effect {self.name!r} was called outside a job, and nothing was done: run its task with delay(), "
                "apply_async() or apply(), not as a function; in a thread of the job's, use contextvars.copy_context()"
            )
        made: Any
        if not self.is_async:
            made = calls.call(job, self, step, keyed, args, dict(kwargs))
        else:
            made = calls.acall(job, self, step, keyed, args, dict(kwargs))
            if not loop.in_coroutine():
                made = loop.complete(made)
        return made  # type: ignore[no-any-return]


def _step_name(effect_name: str, name: str) -> None:
    if not canonical.is_text(name) or name.isdigit() or name == BODY:
        raise ConfigurationError(
            f"effect {effect_name!r}: a step's name is a non-empty string that is no number and not 'body', "
            f"not {name!r}"
        )


_registry: dict[str, Effect[Any, Any]] = {}


def registered(name: str) -> Effect[Any, Any] | None:
    """The effect of this name, if this process has imported it."""
    return _registry.get(name)


def all_effects() -> list[Effect[Any, Any]]:
    """The effects that this process has imported."""
    return list(_registry.values())


def _register(found: Effect[Any, Any]) -> None:
    other = _registry.get(found.name)
    if other is not None and _place(other.fn) != _place(found.fn):
        raise ConfigurationError(
            f"two effects are named {found.name!r}: {_place(other.fn)} and {_place(found.fn)}; "
            "give one of them another name="
        )
    _registry[found.name] = found


def _place(fn: Callable[..., Any]) -> str:
    # A module that is imported twice (as __main__ and by name) defines the same effect, not another one.
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(fn)


class _Decorator:
    """What ``effect(...)`` returns: turns a function into an :class:`Effect`."""

    def __init__(self, name: str | None, options: dict[str, Any]) -> None:
        self.name = name
        self.options = options

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, fn: Callable[Concatenate[Operation, P], Coroutine[Any, Any, Outcome[R]]]
    ) -> Effect[P, Awaited[Outcome[R]]]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, fn: Callable[Concatenate[Operation, P], Coroutine[Any, Any, R]]
    ) -> Effect[P, Awaited[Outcome[R]]]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[Operation, P], Outcome[R]]) -> Effect[P, Outcome[R]]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[Operation, P], R]) -> Effect[P, Outcome[R]]: ...
    def __call__(self, fn: Callable[..., Any]) -> Effect[Any, Any]:
        name = self.name or f"{fn.__module__}.{fn.__qualname__.replace('.<locals>', '')}"
        made: Effect[Any, Any] = Effect(fn, name, make_options(name, self.options))
        _register(made)
        return made


def effect(
    name: str | None = None,
    *,
    idempotent_for: float | timedelta | None = None,
    deadline: float | timedelta | None = DEFAULT_DEADLINE,
    lookup_lag: float | timedelta = 0.0,
    lookup_timeout: float | timedelta = 10.0,
    refused_on: Matcher | Iterable[Matcher] = (),
    not_happened_on: Matcher | Iterable[Matcher] = (),
    if_unknown: Policy = "park",
    repeatable: bool = False,
    detached: bool = False,
    kill_at_deadline: bool = True,
    trust_deadline_kill: bool = False,
    redact: Iterable[str] = (),
) -> _Decorator:
    """Declare a side effect. The function's first argument is its :class:`Operation`.

    Arguments:
        name: default ``module.function``; renaming it orphans recorded operations.
        idempotent_for: how long the provider de-duplicates on ``op.key`` (seconds or timedelta); ``None``: it does not.
        deadline: seconds after the intent when the request can no longer be in flight.
        lookup_lag: seconds more until a "not found" of the provider can be believed.
        lookup_timeout: seconds that one lookup may take.
        refused_on: exception classes or predicates that prove that the provider said no.
        not_happened_on: ... that prove that nothing happened.
        if_unknown: the author's policy after deadline and lag: ``park``, ``assume_happened`` or ``send_again``.
        repeatable: no outside effect: recorded for replay, run again after a crash or an exception, never unknown.
        detached: it starts processes of its own, so that its sender is never known to be gone.
        kill_at_deadline: on Linux under prefork, a kernel timer ends a process that is still inside the call.
        trust_deadline_kill: take that timer alone as proof that the sender is gone.
        redact: parameter names that are kept out of the database and of ``op.arguments``.

    Returns:
        a decorator that makes an :class:`Effect`.

    Raises:
        ConfigurationError: for options that contradict each other, or a name that is taken.
    """
    if name is not None and (not isinstance(name, str) or not name):
        raise ConfigurationError(f"effect() takes its name as a non-empty string, not {name!r}: write @effect()")
    options = dict(locals())
    options.pop("name")
    return _Decorator(name, options)


def body_effect(task_name: str, fn: Callable[..., Any], options: Mapping[str, Any]) -> Effect[Any, Any]:
    """The effect that a whole task body is, made from the task's ``effect_options``; no deadline unless given."""
    given = dict(options)
    find = given.pop("lookup", None)
    given.setdefault("deadline", None)
    made = make_options(f"{task_name} (effect_options)", given)
    body: Effect[Any, Any] = Effect(_with_operation(fn), task_name, made)
    if find is not None:
        body.lookup(find)
    return body


def effect_of_items(body: Effect[Any, Any], fn: Callable[..., Any], *, refused: Matcher, not_happened: Matcher) -> Any:
    """The effect that each of many calls of a whole body is, where one job makes them.

    Arguments:
        body: the effect that the whole body is.
        fn: calls it.
        refused, not_happened: what it proves there beside its own options.
    """
    options = replace(
        body.options,
        refused_on=(*body.options.refused_on, refused),
        not_happened_on=(*body.options.not_happened_on, not_happened),
    )
    item: Effect[Any, Any] = Effect(_with_operation(fn, body.signature), body.name, options)
    item.find = body.find
    return item


def _with_operation(fn: Callable[..., Any], signature: inspect.Signature | None = None) -> Callable[..., Any]:
    def run(op: Operation, /, *args: Any, **kwargs: Any) -> Any:
        job = current.job_here()
        if job is None:
            return fn(*args, **kwargs)
        job.operation = op
        try:
            return fn(*args, **kwargs)
        finally:
            job.operation = None

    signature = signature or inspect.signature(fn)
    # A body may well have a parameter `op` of its own.
    operation = inspect.Parameter("safe_effects_operation", inspect.Parameter.POSITIONAL_ONLY)
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[operation, *signature.parameters.values()]
    )
    return run
