"""Statements inside a caller's own transaction: job and business rows commit or vanish together.

Takes what applications hold: a SQLAlchemy Session or Connection, a psycopg connection, a Django connection or its
alias. All of them must run on psycopg 3 and on the database that holds the truth.
"""

from __future__ import annotations

import contextlib
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

    def __init__(
        self, connection: psycopg.Connection[Any], after_commit: Callable[[Callable[[], Any]], None] | None
    ) -> None:
        self.connection = connection
        self._after_commit = after_commit

    def rows(self, sql: str, params: Mapping[str, Any]) -> list[Any]:
        """Run a statement; whatever it raises, the caller's transaction stays usable."""
        with self.connection.cursor(row_factory=namedtuple_row) as cursor, self._savepoint(cursor):
            cursor.execute(sql.encode(), params)
            return cursor.fetchall()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Several statements that stand or fall together within the caller's transaction."""
        if self._without_transaction:
            with self.connection.transaction():
                yield
            return
        with self.connection.cursor() as cursor, self._savepoint(cursor):
            yield

    @property
    def _without_transaction(self) -> bool:
        """Django outside ``atomic()``: each statement is its own transaction."""
        idle = self.connection.info.transaction_status == pq.TransactionStatus.IDLE
        return self.connection.autocommit and idle

    @contextlib.contextmanager
    def _savepoint(self, cursor: psycopg.Cursor[Any]) -> Iterator[None]:
        if self._without_transaction:
            yield
            return
        cursor.execute("SAVEPOINT safe_effects")
        try:
            # Nobody waits long for a key that another open transaction holds.
            row: Any = cursor.execute("SELECT current_setting('lock_timeout') AS before").fetchone()
            before = row[0] if row is not None else "0"
            cursor.execute("SELECT set_config('lock_timeout', %s, true)", (LOCK_TIMEOUT,))
            yield
        except BaseException:
            if not self.connection.closed:
                self.connection.execute("ROLLBACK TO SAVEPOINT safe_effects")
                self.connection.execute("RELEASE SAVEPOINT safe_effects")
            raise
        self.connection.execute("SELECT set_config('lock_timeout', %s, true)", (before,))
        self.connection.execute("RELEASE SAVEPOINT safe_effects")

    def after_commit(self, call: Callable[[], Any]) -> None:
        """Call something right after the commit, if the transaction's kind can tell; else the sweeper does its work."""
        if self._after_commit is not None:
            self._after_commit(call)


def enlist(transaction: Any) -> Enlisted:
    """Recognise a caller's transaction.

    Raises:
        ConfigurationError: for something else, another driver, or a connection without an open transaction.
    """
    if isinstance(transaction, psycopg.Connection):
        if transaction.autocommit and transaction.info.transaction_status == pq.TransactionStatus.IDLE:
            raise ConfigurationError(
                "transaction= got a psycopg connection in autocommit mode without an open transaction; "
                "open one: `with connection.transaction(): ...`"
            )
        return Enlisted(transaction, None)
    if hasattr(transaction, "sync_session") or hasattr(transaction, "sync_connection"):
        raise ConfigurationError("transaction= got an asynchronous session; use `await task.aapply_async(...)`")
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
        raise ConfigurationError(
            f"transaction= runs on {type(raw).__module__}; it must use psycopg 3 (postgresql+psycopg://...)"
        )
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
