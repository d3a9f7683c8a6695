"""Statements inside a caller's own transaction: job and business rows commit or vanish together.

Takes what applications hold: a SQLAlchemy Session or Connection, a psycopg connection, the asynchronous ones of both, a
Django connection or its alias. All of them must run on psycopg 3 and on the database that holds the truth.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import psycopg
from psycopg import pq
from psycopg.rows import namedtuple_row

from ..errors import ConfigurationError

LOCK_TIMEOUT: Final = "2s"
_PENDING: Final = "safe_effects_after_commit"


class Enlisted:
    """A caller's transaction.

    Arguments:
        connection: the psycopg connection under it.
        after_commit: registers a function to be called right after the commit; ``None`` where nobody can tell us.
    """

    def __init__(self, connection: Any, after_commit: Callable[[Callable[[], Any]], None] | None) -> None:
        self.connection: psycopg.Connection[Any] = connection
        self._after_commit = after_commit

    def rows(self, sql: str, params: Mapping[str, Any]) -> list[Any]:
        """Run a statement; whatever it raises, the caller's transaction stays usable."""
        with self._savepoint():
            return self._execute(sql.encode(), params)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Several statements that stand or fall together within the caller's transaction."""
        if self._without_transaction:
            with self.connection.transaction():
                yield
            return
        with self._savepoint():
            yield

    @property
    def _without_transaction(self) -> bool:
        """Django outside ``atomic()``: each statement is its own transaction."""
        idle = self.connection.info.transaction_status == pq.TransactionStatus.IDLE
        return self.connection.autocommit and idle

    def _execute(self, query: bytes, params: Mapping[str, Any] | None = None) -> list[Any]:
        with self.connection.cursor(row_factory=namedtuple_row) as cursor:
            cursor.execute(query, params)
            return cursor.fetchall() if cursor.description else []

    @contextlib.contextmanager
    def _savepoint(self) -> Iterator[None]:
        if self._without_transaction:
            yield
            return
        self._execute(b"SAVEPOINT safe_effects")
        try:
            # Nobody waits long for a key that another open transaction holds.
            before = self._execute(b"SELECT current_setting('lock_timeout') AS before")[0].before
            self._lock_timeout(LOCK_TIMEOUT)
            yield
        except BaseException:
            if not self.connection.closed:
                self._execute(b"ROLLBACK TO SAVEPOINT safe_effects")
                self._execute(b"RELEASE SAVEPOINT safe_effects")
            raise
        self._lock_timeout(before)
        self._execute(b"RELEASE SAVEPOINT safe_effects")

    def _lock_timeout(self, value: str) -> None:
        self._execute(b"SELECT set_config('lock_timeout', %(value)s, true)", {"value": value})

    def after_commit(self, call: Callable[[], Any]) -> None:
        """Call something right after the commit, if the transaction's kind can tell; else the sweeper does its work."""
        if self._after_commit is not None:
            self._after_commit(call)


class EnlistedOnLoop(Enlisted):
    """An asynchronous transaction, used by a thread beside the event loop on which its statements run.

    Arguments:
        connection: psycopg's asynchronous connection.
        after_commit: as for :class:`Enlisted`.
        loop: the event loop that the transaction belongs to.
    """

    def __init__(
        self,
        connection: psycopg.AsyncConnection[Any],
        after_commit: Callable[[Callable[[], Any]], None] | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(connection, after_commit)
        self._async = connection
        self._loop = loop

    def _execute(self, query: bytes, params: Mapping[str, Any] | None = None) -> list[Any]:
        return asyncio.run_coroutine_threadsafe(self._run(query, params), self._loop).result()

    async def _run(self, query: bytes, params: Mapping[str, Any] | None) -> list[Any]:
        async with self._async.cursor(row_factory=namedtuple_row) as cursor:
            await cursor.execute(query, params)
            return await cursor.fetchall() if cursor.description else []

    def after_commit(self, call: Callable[[], Any]) -> None:
        """As :meth:`Enlisted.after_commit`; the call is made beside the loop, on which the commit happens."""

        def beside() -> None:
            self._loop.run_in_executor(None, contextvars.copy_context().run, call)

        super().after_commit(beside)


def is_async(transaction: Any) -> bool:
    """Whether something is a transaction whose statements are awaited."""
    return (
        hasattr(transaction, "sync_session")
        or hasattr(transaction, "sync_connection")
        or isinstance(transaction, psycopg.AsyncConnection)
    )


async def enlist_async(transaction: Any) -> EnlistedOnLoop:
    """Recognise SQLAlchemy's AsyncSession or AsyncConnection, or psycopg's AsyncConnection, on its event loop.

    Raises:
        ConfigurationError: for another driver, or a connection without an open transaction.
    """
    loop = asyncio.get_running_loop()
    if isinstance(transaction, psycopg.AsyncConnection):
        _must_be_open(transaction)
        return EnlistedOnLoop(transaction, None, loop)
    connection, after_commit = transaction, None
    session = getattr(transaction, "sync_session", None)
    if session is not None:
        connection, after_commit = await transaction.connection(), functools.partial(_after_session_commit, session)
    if not connection.in_transaction():
        await connection.exec_driver_sql("SELECT 1")  # begins it, so that SQLAlchemy commits what we add
    raw = (await connection.get_raw_connection()).driver_connection
    if not isinstance(raw, psycopg.AsyncConnection):
        raise _other_driver(raw)
    return EnlistedOnLoop(raw, after_commit, loop)


def _must_be_open(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    if connection.autocommit and connection.info.transaction_status == pq.TransactionStatus.IDLE:
        kind = "async with" if isinstance(connection, psycopg.AsyncConnection) else "with"
        raise ConfigurationError(
            "transaction= got a psycopg connection in autocommit mode without an open transaction; "
            f"open one: `{kind} connection.transaction(): ...`"
        )


def _other_driver(raw: Any) -> ConfigurationError:
    return ConfigurationError(
        f"transaction= runs on {type(raw).__module__}; it must use psycopg 3 (postgresql+psycopg://...)"
    )


def enlist(transaction: Any) -> Enlisted:
    """Recognise a caller's transaction.

    Raises:
        ConfigurationError: for something else, another driver, or a connection without an open transaction.
    """
    if isinstance(transaction, Enlisted):
        return transaction
    if isinstance(transaction, psycopg.Connection):
        _must_be_open(transaction)
        return Enlisted(transaction, None)
    if is_async(transaction):
        raise ConfigurationError(
            "transaction= got an asynchronous transaction; use `await task.aapply_async(...)`, `await op.aconfirm(...)`"
        )
    if isinstance(transaction, str) or hasattr(transaction, "ensure_connection"):
        return _django(transaction)
    if hasattr(transaction, "exec_driver_sql"):
        return Enlisted(_driver(transaction), None)
    if hasattr(transaction, "registry") and callable(transaction):  # scoped_session
        transaction = transaction()
    if hasattr(transaction, "connection") and hasattr(transaction, "info") and hasattr(transaction, "in_transaction"):
        return Enlisted(_driver(transaction.connection()), lambda call: _after_session_commit(transaction, call))
    raise ConfigurationError(
        "transaction= takes a SQLAlchemy Session or Connection, a psycopg connection, or a Django connection or "
        f"alias, not {type(transaction).__name__}"
    )


def _driver(connection: Any) -> psycopg.Connection[Any]:
    """The psycopg connection under a SQLAlchemy one, its transaction begun."""
    if not connection.in_transaction():
        connection.exec_driver_sql("SELECT 1")  # begins it, so that SQLAlchemy commits what we add
    raw = connection.connection.driver_connection
    if not isinstance(raw, psycopg.Connection):
        raise _other_driver(raw)
    return raw


def _after_session_commit(session: Any, call: Callable[[], Any]) -> None:
    from sqlalchemy import event

    pending = session.info.get(_PENDING)
    if pending is None:
        pending = session.info[_PENDING] = []

        def committed(session: Any) -> None:
            # Also sent when a savepoint is released, when nothing is visible to anybody yet.
            if not session.in_nested_transaction():
                calls, session.info[_PENDING][:] = list(session.info[_PENDING]), []
                for waiting in calls:
                    waiting()

        def rolled_back(session: Any) -> None:
            # Also sent for a savepoint: what was enlisted before it stands.
            if not session.in_nested_transaction():
                session.info[_PENDING].clear()

        event.listen(session, "after_commit", committed)
        event.listen(session, "after_rollback", rolled_back)
    pending.append(call)


def _django(transaction: Any) -> Enlisted:
    try:
        from django.db import connections
        from django.db import transaction as django_transaction
    except ImportError as exc:
        raise ConfigurationError(
            f"transaction= got {transaction!r}, a Django alias, and Django is not installed"
        ) from exc

    try:
        connection = connections[transaction] if isinstance(transaction, str) else transaction
        connection.ensure_connection()
    except Exception as exc:
        raise ConfigurationError(
            f"transaction= got {transaction!r}, which is no Django connection or alias here: {exc}"
        ) from exc
    raw = connection.connection
    if not isinstance(raw, psycopg.Connection):
        raise ConfigurationError(
            f"transaction= got Django's {connection.vendor} connection on {type(raw).__module__}; it must use psycopg 3"
        )
    return Enlisted(raw, lambda call: django_transaction.on_commit(call, using=connection.alias))
