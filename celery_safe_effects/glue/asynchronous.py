"""``async def`` bodies in Celery: where a coroutine finds its request, and how a body that Celery calls awaits one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import CellType, FunctionType
from typing import Any

from celery.utils.threads import get_ident

from ..engine import current, loop
from ..errors import ConfigurationError
from ..store.enlist import enlist_async, is_async

_home: ContextVar[Any] = ContextVar("safe_effects_home", default=None)


def _ident() -> Any:
    """Whose request it is: the thread's own, or that of the thread which waits for this coroutine."""
    home = _home.get()
    return get_ident() if home is None else home


def follow(stack: Any) -> None:
    """Let one of Celery's thread-local stacks be found from the coroutines and the copied contexts of a job."""
    stack.__ident_func__ = _ident


@contextlib.contextmanager
def at_home() -> Iterator[None]:
    """Within this block, and in coroutines and copied contexts that begin in it, the request is this thread's."""
    token = _home.set(_ident())
    try:
        yield
    finally:
        _home.reset(token)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Within this block a job that runs at once has stacks of its own: several may run in one context at a time."""
    token = _home.set(object()) if _home.get() is not None else None
    try:
        yield
    finally:
        if token is not None:
            _home.reset(token)


def awaited_run(run: Any) -> Any:
    """Make a task's ``run`` of an ``async def`` one: a job that calls it runs it to completion, others get a coroutine.

    Arguments:
        run: as it stands in the class; anything else than an ``async def`` is returned as it is.
    """
    if isinstance(run, staticmethod):
        made = awaited_run(run.__func__)
        return run if made is run.__func__ else staticmethod(made)
    if inspect.iscoroutinefunction(run):

        @functools.wraps(run)
        def called(*args: Any, **kwargs: Any) -> Any:
            return finished(run(*args, **kwargs))

        return called
    return _awaited_pydantic(run)


def _awaited_pydantic(run: Any) -> Any:
    """Celery's ``pydantic=True`` wraps the function once more, and converts what it takes for the result."""
    inner = getattr(run, "__wrapped__", None)
    code = getattr(run, "__code__", None)
    if not inspect.iscoroutinefunction(inner) or code is None or run.__globals__.get("__name__") != "celery.app.base":
        return run
    cells = dict(zip(code.co_freevars, run.__closure__ or (), strict=True))
    if "task_fun" not in cells:
        raise ConfigurationError(
            "this version of Celery cannot run an `async def` task with pydantic=True; write `def`"
        )
    cells["task_fun"] = CellType(awaited_run(inner))
    made = FunctionType(code, run.__globals__, run.__name__, run.__defaults__, tuple(cells.values()))
    made.__kwdefaults__ = run.__kwdefaults__
    return functools.update_wrapper(made, run)


def finished(value: Any) -> Any:
    """What a call in a job's synchronous code comes to: what is awaitable is waited for."""
    if not inspect.isawaitable(value) or current.job() is None or loop.in_coroutine():
        return value
    return loop.complete(value)


async def send(sending: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Send messages beside the event loop; in a job, their ids are as sure as if it were sent on it.

    Arguments:
        sending: takes the options.
        options: of ``apply_async``; ``transaction`` may be asynchronous.

    Raises:
        ConfigurationError: for a transaction that another thread cannot use.
        Exception: what ``sending`` raises.
    """
    job = current.job()
    with job.branch() if job is not None else contextlib.nullcontext():
        others = {name: value for name, value in options.items() if name != "transaction"}
        transaction = options.get("transaction")
        if transaction is None:
            return await asyncio.to_thread(sending, **others)
        if isinstance(transaction, str) or hasattr(transaction, "ensure_connection"):
            raise ConfigurationError(
                "transaction= got a Django connection, which belongs to a thread; call apply_async() inside the atomic "
                "block, in a function that sync_to_async() runs"
            )
        if hasattr(transaction, "registry") and callable(transaction):  # scoped_session: whose, depends on the thread
            transaction = transaction()
        enlisted = await enlist_async(transaction) if is_async(transaction) else transaction
        # Whoever is cancelled rolls back next: not before this is over.
        call = functools.partial(sending, **others, transaction=enlisted)
        result, cancelled = await loop.in_thread(call, statements=False)
        if cancelled is not None:
            raise cancelled
        return result
