"""Lazily opened psycopg connections, keyed by process id, with a deadline on every statement.

Nothing is opened at import or before a fork is over: a child never touches a connection of its parent. The deadline is
enforced by the client (a cancel request, then the connection is closed), so that it also holds behind a pooler and
against a server that does not answer at all; no start-up option and no session state is used.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any, Final, NoReturn, TypeVar

import psycopg
from psycopg import pq
from psycopg.types.numeric import Int8Dumper

from ..address import conninfo_from_url, is_of_django_tests
from ..errors import StoreUnavailable

CONNECT_TIMEOUT = 5
R = TypeVar("R")
_EVENTS: Final = (0, select.POLLIN, select.POLLOUT, select.POLLIN | select.POLLOUT)
"""What to wait for, by psycopg's numbers: 1 to read, 2 to write, 3 for either."""


class StatementTimeout(psycopg.OperationalError):
    """The server did not answer in time; whether the statement took effect is unknown."""


class DeadlineConnection(psycopg.Connection[Any]):
    """A connection whose every wait ends at a deadline."""

    statement_timeout: float = 5.0
    pooled: bool = False
    used_at: float = 0.0

    def wait(self, gen: Generator[Any, Any, R], interval: float = 0.0, timeout: float | None = None) -> R:
        """As psycopg's, but never longer than the statement timeout."""
        del interval
        deadline = time.monotonic() + (self.statement_timeout if timeout is None else timeout)
        try:
            wanted = next(gen)
            fileno = self.pgconn.socket
            poll = select.poll()
            poll.register(fileno, _EVENTS[int(wanted)])
            while True:
                ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
                if not ready:
                    self._give_up()
                mask = ready[0][1]
                answer = (1 if mask & ~select.POLLOUT else 0) | (2 if mask & select.POLLOUT else 0)
                state = gen.send(answer)
                if state != wanted:
                    wanted = state
                    poll.modify(fileno, _EVENTS[int(wanted)])
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        except psycopg.Error:
            raise
        except BaseException:
            # Interrupted half-way (a time limit, a shutdown): the reply is still under way, so nobody may reuse it.
            self.pgconn.finish()
            raise

    def _give_up(self) -> NoReturn:
        with contextlib.suppress(Exception):
            if pq.version() >= 170000:
                self.cancel_safe(timeout=1.0)
            else:
                self.pgconn.get_cancel().cancel()
        self.pgconn.finish()
        raise StatementTimeout(f"no answer from PostgreSQL within {self.statement_timeout:g} s")


class Connections:
    """A small pool of connections for one process at a time.

    Arguments:
        url: the database URL.
        limit: the most connections that a process opens; a caller waits for a free one.
        statement_timeout: seconds.
        prepare: prepared statements: ``"on"``, ``"off"`` or ``"detected"`` (off behind a transaction-mode pooler).
    """

    def __init__(self, url: str, *, limit: int, statement_timeout: float, prepare: str) -> None:
        self.conninfo = conninfo_from_url(url)
        self.keep = not is_of_django_tests(url)
        self.limit = limit
        self.statement_timeout = statement_timeout
        self.prepare = prepare
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._idle: list[DeadlineConnection] = []
        self._slots = threading.BoundedSemaphore(self.limit)
        self._lock = threading.Lock()

    def _open(self) -> DeadlineConnection:
        conn = DeadlineConnection.connect(
            self.conninfo, autocommit=True, connect_timeout=CONNECT_TIMEOUT, application_name="celery-safe-effects"
        )
        conn.statement_timeout = self.statement_timeout
        # One wire type for every integer, so that a statement has one prepared form.
        conn.adapters.register_dumper(int, Int8Dumper)
        if self.prepare == "off":
            conn.prepare_threshold = None
        else:
            conn.prepare_threshold = 0
            if self.prepare == "detected":
                row = conn.execute("SELECT pg_backend_pid()", prepare=False).fetchone()
                # A pooler hands out a key of its own instead of the backend's process id.
                if row is None or row[0] != conn.info.backend_pid:
                    conn.prepare_threshold = None
                    conn.pooled = True
        return conn

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
                f"all {self.limit} connections of this process are busy; raise safe_effects_max_connections"
            )
        try:
            with self._lock:
                conn = self._idle.pop() if self._idle else None
            if conn is None or conn.closed:
                try:
                    conn = self._open()
                except psycopg.OperationalError as exc:
                    raise StoreUnavailable(
                        f"cannot connect to PostgreSQL: {str(exc).strip()}; check safe_effects_database_url"
                    ) from exc
            try:
                yield conn
            finally:
                if not self.keep:
                    conn.close()
                elif not conn.closed and not conn.broken:
                    with self._lock:
                        self._idle.append(conn)
        finally:
            slots.release()

    def close(self) -> None:
        """Close the idle connections of this process."""
        if self._pid != os.getpid():
            self._reset()
            return
        with self._lock:
            idle, self._idle = self._idle, []
        for conn in idle:
            conn.close()
