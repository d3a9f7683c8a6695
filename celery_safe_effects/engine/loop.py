"""The one event loop of a process, and how synchronous code waits for what runs on it.

Made at its first use, keyed by process id, in a daemon thread of its own: clients and connection pools that belong to a
loop live as long as the process, and a pool's thread that waits can still be interrupted by a time limit or a shutdown.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import inspect
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import CancelledError as Cancelled
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from .. import native
from ..errors import ConfigurationError

logger = logging.getLogger(__name__)

R = TypeVar("R")

GRACE: Final = 5.0
"""Seconds that an interrupted coroutine has to come to its end."""
STATEMENT_THREADS: Final = 4
"""Threads a process that run the protocol's statements for coroutines."""

# A parent's stays in here: to close or to collect it would disturb the parent, which shares its selector.
_loops: dict[int, Loop] = {}
_executors: dict[int, ThreadPoolExecutor] = {}
_threads: set[tuple[int, int]] = set()
"""The threads, by process, that run a loop of ours."""
_blocked: contextvars.ContextVar[asyncio.AbstractEventLoop | None] = contextvars.ContextVar(
    "safe_effects_blocked_loop", default=None
)


# -- who is waiting ----------------------------------------------------------------------------------------------------


def running() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


@contextlib.contextmanager
def synchronous() -> Iterator[None]:
    """Within this block the code is synchronous, even if some event loop runs in this thread: that one is blocked."""
    token = _blocked.set(running())
    try:
        yield
    finally:
        _blocked.reset(token)


def in_coroutine() -> bool:
    """Whether whoever is running here can await."""
    found = running()
    return found is not None and found is not _blocked.get()


# -- running -----------------------------------------------------------------------------------------------------------


def complete(awaitable: Awaitable[R], *, timeout: float | None = None) -> R:
    """Wait, in synchronous code, for something that runs on the process's loop.

    An exception that is raised in this thread meanwhile (a time limit, a shutdown) cancels the coroutine, which has
    :data:`GRACE` seconds to end; if it then returns or raises something else than the cancellation, that counts, unless
    the process is to end.

    Arguments:
        awaitable: what to wait for; it runs in a copy of this context.
        timeout: seconds after which it is cancelled and left to itself.

    Raises:
        TimeoutError: after ``timeout``.
        concurrent.futures.CancelledError: it was cancelled from inside.
        BaseException: what it raised, or what interrupted it.
    """
    if (os.getpid(), threading.get_ident()) in _threads:
        # Synchronous code of a coroutine: its own loop stands still until we return.
        apart = Loop("safe-effects-loop-apart")
        try:
            return apart.run(awaitable, timeout)
        finally:
            apart.close()
    return _process_loop().run(awaitable, timeout)


def close() -> None:
    """End this process's loop, if it has one; pending tasks are cancelled."""
    found = _loops.pop(os.getpid(), None)
    if found is not None:
        found.close()


def check(what: str = "a coroutine") -> None:
    """Refuse a process whose threads are greenlets, since a loop needs a thread of its own.

    Arguments:
        what: is to run on the loop.

    Raises:
        ConfigurationError: under gevent's or eventlet's patches.
    """
    if native.threads_are_greenlets():
        raise ConfigurationError(
            f"{what} is `async def` and needs an event loop in a thread of its own, which gevent and eventlet do not "
            "leave: use the pool prefork, threads or solo for it"
        )


def _process_loop() -> Loop:
    pid = os.getpid()
    found = _loops.get(pid)
    if found is None:
        check()
        found = _loops.setdefault(pid, Loop("safe-effects-loop"))
        atexit.register(close)
    return found


class Loop:
    """An event loop in a daemon thread.

    Arguments:
        name: the thread's.
    """

    CLOSE_PATIENCE = 5.0

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._run, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        here = (os.getpid(), threading.get_ident())
        _threads.add(here)
        asyncio.set_event_loop(loop)
        try:
            while not self._closing:
                # A coroutine that ends its process raises here too; whoever waits for it gets it as its result.
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    loop.run_forever()
            pending = asyncio.all_tasks(loop)
            for task in pending:
                task.cancel()
            if pending:
                loop.run_until_complete(asyncio.wait(pending, timeout=self.CLOSE_PATIENCE / 2))
            loop.run_until_complete(loop.shutdown_asyncgens())
        except BaseException:
            logger.exception("closing the event loop of this process failed")
        finally:
            asyncio.set_event_loop(None)
            _threads.discard(here)
            loop.close()

    def close(self) -> None:
        """Cancel what is pending and end the thread; one whose coroutine blocks it is left behind."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._closing = True
        if loop is not None and thread is not None and thread.is_alive():
            loop.call_soon_threadsafe(loop.stop)
            thread.join(self.CLOSE_PATIENCE)

    def run(self, awaitable: Awaitable[R], timeout: float | None) -> R:
        """Run something and wait for it; see :func:`complete`."""
        made = _Running(self._started(), awaitable)
        try:
            made.start()
            ended = made.done.wait(timeout)
        except BaseException as exc:
            made.cancel()
            made.done.wait(GRACE)
            if not made.done.is_set() or made.cancelled or (made.error is None and not isinstance(exc, Exception)):
                raise
            if made.error is not None:
                raise made.error from exc
            return made.value  # type: ignore[no-any-return]
        if not ended:
            made.cancel()
            raise TimeoutError(f"a coroutine did not end within {timeout:g} s")
        if made.cancelled:
            raise Cancelled("the coroutine was cancelled") from made.error
        if made.error is not None:
            raise made.error
        return made.value  # type: ignore[no-any-return]


class _Running:
    """One coroutine on a loop, and the thread that waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, awaitable: Awaitable[Any]) -> None:
        self.done = threading.Event()
        self.cancelled = False
        self.value: Any = None
        self.error: BaseException | None = None
        self._loop = loop
        self._awaitable = awaitable
        self._began = False
        self._task: asyncio.Task[Any] | None = None

    def start(self) -> None:
        self._loop.call_soon_threadsafe(self._create, context=contextvars.copy_context())

    def cancel(self) -> None:
        self._loop.call_soon_threadsafe(lambda: self._task is not None and self._task.cancel())

    def _create(self) -> None:
        self._task = self._loop.create_task(self._main())
        self._task.add_done_callback(self._over)

    async def _main(self) -> Any:
        self._began = True
        return await self._awaitable

    def _over(self, task: asyncio.Task[Any]) -> None:
        self.cancelled = task.cancelled()
        if not self.cancelled:
            self.error = task.exception()
            self.value = task.result() if self.error is None else None
        if not self._began and inspect.iscoroutine(self._awaitable):
            self._awaitable.close()
        self.done.set()


# -- statements for coroutines -----------------------------------------------------------------------------------------


async def in_thread(call: Callable[[], R], *, statements: bool = True) -> tuple[R, asyncio.CancelledError | None]:
    """Run blocking code of the protocol beside the loop, to its end.

    Arguments:
        call: takes nothing.
        statements: whether it is nothing but statements; else it runs among the other things that the loop's user
            runs in threads.

    Returns:
        its value, and the cancellation that arrived meanwhile, for the caller to raise when it has drawn the
        conclusions.

    Raises:
        BaseException: what it raised; a cancellation that arrived meanwhile is then of no more account.
    """
    loop = asyncio.get_running_loop()
    future = loop.run_in_executor(_statements() if statements else None, contextvars.copy_context().run, call)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as exc:
            cancelled = cancelled or exc
    return future.result(), cancelled


def _statements() -> ThreadPoolExecutor:
    pid = os.getpid()
    found = _executors.get(pid)
    if found is None:
        made = ThreadPoolExecutor(STATEMENT_THREADS, thread_name_prefix="safe-effects-statements")
        found = _executors.setdefault(pid, made)
    return found
