"""Lazily opened psycopg connections, keyed by process id, with a deadline on every statement.

Nothing is opened at import or before a fork is over: a child never touches a connection of its parent. The deadline is
enforced by the client (a cancel request, then the connection is closed), so that it also holds behind a pooler and
against a server that does not answer at all. There is no start-up option, and behind a pooler no session state either.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any, Final, Protocol, TypeVar

import psycopg
from psycopg import generators, pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.numeric import Int8Dumper

from .. import native
from ..address import conninfo_from_url, is_of_django_tests
from ..errors import StoreUnavailable

CONNECT_TIMEOUT = 5
APPLICATION: Final = "celery-safe-effects"
READ, WRITE = 1, 2
"""What to wait for, by psycopg's numbers; 3 is either."""
# Each statement has one plan, made once, which serves all values: left to itself the planner makes the larger ones anew
# each time, which takes half as long as running them. Those that need a plan for their values say so (`Store.look`).
_MEET: Final = """
SELECT pg_backend_pid(),
       CASE WHEN pg_backend_pid() = %s THEN set_config('plan_cache_mode', 'force_generic_plan', false) END
"""
R = TypeVar("R")


class StatementTimeout(psycopg.OperationalError):
    """The server did not answer in time; whether the statement took effect is unknown."""


class _Wait(Protocol):
    """Waits for one file: asked what to wait for and how long, answers what is ready."""

    def __call__(self, wanted: int, seconds: float) -> int: ...


def _polling(poll: Any, fileno: int) -> _Wait:
    """``select.poll()``, which knows no highest file number."""
    asked = 0

    def wait(wanted: int, seconds: float) -> int:
        nonlocal asked
        if wanted != asked:
            events = (select.POLLIN if wanted & READ else 0) | (select.POLLOUT if wanted & WRITE else 0)
            (poll.modify if asked else poll.register)(fileno, events)
            asked = wanted
        ready = poll.poll(max(0.0, seconds) * 1000)
        mask = ready[0][1] if ready else 0
        return (READ if mask & ~select.POLLOUT else 0) | (WRITE if mask & select.POLLOUT else 0)

    return wait


def _selecting(fileno: int) -> _Wait:
    """``select.select()``, for where there is no poll: eventlet takes it away and has this one give way."""

    def wait(wanted: int, seconds: float) -> int:
        here: list[int] = [fileno]
        reads, writes, _ = select.select(
            here if wanted & READ else [], here if wanted & WRITE else [], [], max(0.0, seconds)
        )
        return (READ if reads else 0) | (WRITE if writes else 0)

    return wait


def _waiting(fileno: int) -> _Wait:
    """Wait as this process does: under gevent and eventlet, other greenlets run meanwhile."""
    poll = getattr(select, "poll", None)
    return _polling(poll(), fileno) if poll is not None else _selecting(fileno)


def _waiting_natively(fileno: int) -> _Wait:
    """Wait as the system does; other threads run meanwhile."""
    try:
        poll = native.original("select", "poll")
    except AttributeError:  # Windows
        return _selecting(fileno)
    return _polling(poll(), fileno)


class DeadlineConnection(psycopg.Connection[Any]):
    """A connection whose every wait ends at a deadline."""

    statement_timeout: float = 5.0
    pooled: bool = False
    _hears: _Wait | None = None
    _dismissed: bool = False

    def hear_farewells(self) -> None:
        """Know when the server says that it ends the connection, which may be some time before it does."""
        self.add_notice_handler(functools.partial(_hear, weakref.ref(self)))

    def wait(self, gen: Generator[Any, Any, R], interval: float = 0.0, timeout: float | None = None) -> R:
        """As psycopg's, but never longer than the statement timeout."""
        del interval
        deadline = time.monotonic() + (self.statement_timeout if timeout is None else timeout)
        try:
            wanted = next(gen)
            wait = self._waiting(self.pgconn.socket)
            while True:
                ready = wait(wanted, deadline - time.monotonic())
                if not ready:
                    self._give_up()
                wanted = gen.send(ready)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        except psycopg.Error:
            raise
        except BaseException:
            # Interrupted half-way (a time limit, a shutdown): the reply is still under way, so nobody may reuse it.
            self.pgconn.finish()
            raise

    _waiting = staticmethod(_waiting)

    def ended(self) -> bool:
        """Whether it is of no use any more, as far as this side has heard: asks the socket, not the server.

        To be asked of an idle connection. A farewell is heard before the connection is closed; that of a server which
        vanished without one is found by the next statement.
        """
        if self._hears is None and not self.closed:
            self._hears = _waiting_natively(self.pgconn.socket)
        while not self.closed and self._hears is not None and self._hears(READ, 0):
            try:
                self.pgconn.consume_input()
                self.pgconn.is_busy()  # what came while nothing was asked is told as a notice
            except psycopg.OperationalError:
                self.close()
            if self._dismissed:
                self.close()
        return self.closed

    def _give_up(self) -> None:
        self._cancel_statement()
        self.pgconn.finish()
        raise StatementTimeout(f"no answer from PostgreSQL within {self.statement_timeout:g} s")

    def _cancel_statement(self) -> None:
        with contextlib.suppress(Exception):
            if pq.version() >= 170000:
                self.cancel_safe(timeout=1.0)
            else:
                self.pgconn.get_cancel().cancel()


def _hear(connection: weakref.ref[DeadlineConnection], told: psycopg.errors.Diagnostic) -> None:
    # Not closed here: libpq is in the midst of reading from it.
    to = connection()
    if to is not None and told.severity_nonlocalized in {"FATAL", "PANIC"}:
        to._dismissed = True


class NativeConnection(DeadlineConnection):
    """A connection of a thread of the system: nothing in it waits for greenlets, or takes a lock that they take."""

    _waiting = staticmethod(_waiting_natively)

    def _cancel_statement(self) -> None:
        """Not worth a connection of its own: what it waits for is a renewal or a settlement."""

    @classmethod
    def open(cls, conninfo: str) -> NativeConnection:
        """Connect, host by host.

        Raises:
            psycopg.OperationalError: when none of them takes it in time.
        """
        last: psycopg.Error | None = None
        for attempt in _hosts(make_conninfo(conninfo, application_name=APPLICATION)):
            try:
                conn = cls(cls._connect(generators.connect(attempt)))
            except psycopg.Error as exc:
                last = exc
                continue
            conn.autocommit = True
            return conn
        raise last if last is not None else psycopg.OperationalError("there is no host to connect to")

    @staticmethod
    def _connect(gen: Generator[Any, Any, Any]) -> Any:
        deadline = time.monotonic() + CONNECT_TIMEOUT
        try:
            fileno, wanted = next(gen)
            while True:
                # The socket may be another one at each step.
                ready = _waiting_natively(fileno)(wanted, deadline - time.monotonic())
                if not ready:
                    raise psycopg.errors.ConnectionTimeout("connection timeout expired")
                fileno, wanted = gen.send(ready)
        except StopIteration as done:
            return done.value
        finally:
            gen.close()


def _hosts(conninfo: str) -> Iterator[str]:
    """One conninfo for each host: libpq, driven step by step, has no time limit for any one of them."""
    params = conninfo_to_dict(conninfo)
    lists = {name: str(params[name]).split(",") for name in ("host", "hostaddr", "port") if params.get(name)}
    for number in range(max((len(many) for many in lists.values()), default=1)):
        yield make_conninfo("", **{**params, **{name: many[number % len(many)] for name, many in lists.items()}})


class Opener:
    """Opens connections that look alike.

    Arguments:
        url: the database URL.
        statement_timeout: seconds.
        prepare: prepared statements: ``"on"``, ``"off"`` or ``"detected"`` (off behind a transaction-mode pooler).
    """

    def __init__(self, url: str, *, statement_timeout: float, prepare: str) -> None:
        self.conninfo = conninfo_from_url(url)
        self.keep = not is_of_django_tests(url)
        self.statement_timeout = statement_timeout
        self.prepare = prepare

    def open(self, natively: bool = False) -> DeadlineConnection:
        try:
            conn = NativeConnection.open(self.conninfo) if natively else self._open()
            self._set_up(conn)
        except psycopg.OperationalError as exc:
            raise StoreUnavailable(
                f"cannot connect to PostgreSQL: {str(exc).strip()}; check safe_effects_database_url"
            ) from exc
        return conn

    def _open(self) -> DeadlineConnection:
        return DeadlineConnection.connect(
            self.conninfo, autocommit=True, connect_timeout=CONNECT_TIMEOUT, application_name=APPLICATION
        )

    def _set_up(self, conn: DeadlineConnection) -> None:
        conn.statement_timeout = self.statement_timeout
        conn.hear_farewells()
        # One wire type for every integer, so that a statement has one prepared form.
        conn.adapters.register_dumper(int, Int8Dumper)
        if self.prepare == "off":
            conn.prepare_threshold = None
            return
        conn.prepare_threshold = 0
        row = conn.execute(_MEET, (conn.info.backend_pid,), prepare=False).fetchone()
        # A pooler hands out a key of its own instead of the backend's process id.
        if self.prepare == "detected" and (row is None or row[0] != conn.info.backend_pid):
            conn.prepare_threshold = None
            conn.pooled = True


class Connections:
    """A small pool of connections for one process at a time.

    Arguments:
        limit: asked once in each process: the most connections that it opens; a caller waits for a free one.
        url, statement_timeout, prepare: what each of them is.
    """

    def __init__(self, url: str, *, limit: Callable[[], int], statement_timeout: float, prepare: str) -> None:
        self.opener = Opener(url, statement_timeout=statement_timeout, prepare=prepare)
        self.statement_timeout = statement_timeout
        self._ask_limit = limit
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self.limit = self._ask_limit()
        self._idle: list[DeadlineConnection] = []
        self._slots = threading.BoundedSemaphore(self.limit)
        self._lock = threading.Lock()
        self._closings = 0

    @contextlib.contextmanager
    def connection(self) -> Iterator[DeadlineConnection]:
        """Borrow a connection; a broken one is dropped, not returned.

        Raises:
            StoreUnavailable: when no connection can be made, or none is free within the statement timeout.
        """
        if self._pid != os.getpid():
            # Not closed: the sockets are the parent's.
            self._reset()
        slots = self._slots
        if not slots.acquire(timeout=self.statement_timeout):
            raise StoreUnavailable(
                f"all {self.limit} connections of this process were busy for {self.statement_timeout:g} s; raise "
                "safe_effects_max_connections, or lower the worker's concurrency"
            )
        try:
            conn, closings = self._take()
            if conn is None:
                conn = self.opener.open()
            try:
                yield conn
            finally:
                if not self.opener.keep:
                    conn.close()
                elif not conn.closed and not conn.broken:
                    with self._lock:
                        kept = closings == self._closings
                        if kept:
                            self._idle.append(conn)
                    if not kept:  # closed meanwhile, by another thread
                        conn.close()
        finally:
            slots.release()

    def _take(self) -> tuple[DeadlineConnection | None, int]:
        """An idle connection that has not ended, if there is one, and how often the pool was closed before."""
        while True:
            with self._lock:
                conn = self._idle.pop() if self._idle else None
                closings = self._closings
            if conn is None or not conn.ended():
                return conn, closings

    def close(self) -> None:
        """Close the connections of this process: idle ones now, borrowed ones when they are given back."""
        if self._pid != os.getpid():
            self._reset()
            return
        with self._lock:
            idle, self._idle = self._idle, []
            self._closings += 1
        for conn in idle:
            conn.close()


class OwnConnection:
    """The one connection of a thread of the system, which waits for nobody else's.

    Arguments:
        url, statement_timeout, prepare: as for :class:`Connections`.
    """

    def __init__(self, url: str, *, statement_timeout: float, prepare: str) -> None:
        self.opener = Opener(url, statement_timeout=statement_timeout, prepare=prepare)
        self._pid = os.getpid()
        self._conn: DeadlineConnection | None = None

    @contextlib.contextmanager
    def connection(self) -> Iterator[DeadlineConnection]:
        """The connection, opened again if it is broken. For one thread alone.

        Raises:
            StoreUnavailable: when it cannot be made.
        """
        if self._conn is None or self._pid != os.getpid() or self._conn.ended():
            self._pid = os.getpid()
            self._conn = None
            self._conn = self.opener.open(natively=True)
        try:
            yield self._conn
        finally:
            if not self.opener.keep:
                self.close()

    def close(self) -> None:
        """Close it."""
        if self._conn is not None and self._pid == os.getpid():
            self._conn.close()
        self._conn = None
