"""The store: the protocol's statements as methods, over psycopg alone.

A method is one round trip (a refused claim is two). Every statement can be repeated after a lost reply: claims are
told apart by their token, intents and outcomes by their nonce, so a repetition finds its own work done.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
from psycopg.rows import namedtuple_row

from .. import faults
from ..address import quote_schema
from ..config import Config
from ..errors import ConfigurationError, PermissionMissing, SchemaMismatch, StoreUnavailable
from ..states import JobStatus
from . import grants, migrate, statements
from .connection import Connections, DeadlineConnection, OwnConnection
from .enlist import Enlisted

Row = Any
"""A named tuple with the statement's columns."""

WRONG_SCHEMA = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.InvalidSchemaName,
)
RETRYABLE = (psycopg.OperationalError, psycopg.InterfaceError, StoreUnavailable)
STORE_ERRORS = (StoreUnavailable, SchemaMismatch, PermissionMissing, psycopg.Error)
"""What a statement may raise."""

NOT_HERE = ("25006",)
"""Read-only: a standby, or a primary on its way out."""
NOT_NOW = ("40", "53", *NOT_HERE)
"""Beginnings of the SQLSTATEs of a statement that surely did nothing and may succeed later, or elsewhere. A connection
that ended (08, 57P) is not among them: its last statement may have been committed."""


def _not_now(exc: psycopg.Error) -> bool:
    # A lost connection has no SQLSTATE; it is a psycopg.OperationalError and handled as such.
    return exc.sqlstate is not None and exc.sqlstate.startswith(NOT_NOW)


@contextlib.contextmanager
def _faults_as_lost_connections() -> Iterator[None]:
    try:
        yield
    except faults.InjectedFault as exc:
        raise psycopg.OperationalError(str(exc)) from exc


class _Named:
    """Rows of one statement as named tuples: its columns are always the same, and their names are looked up once."""

    def __init__(self) -> None:
        self._make: Callable[[Sequence[Any]], Row] | None = None

    def __call__(self, cursor: psycopg.Cursor[Any]) -> Callable[[Sequence[Any]], Row]:
        if self._make is not None:
            return self._make
        make = namedtuple_row(cursor)
        if cursor.pgresult is not None and cursor.pgresult.nfields:
            self._make = make
        return make


class Intent(NamedTuple):
    """What an intent statement records, apart from the lease."""

    key: str
    step: str
    ordinal: int
    effect: str
    keyed: bool
    repeatable: bool
    whole_body: bool
    args: str
    args_digest: str
    deadline: float | None
    lag: float
    idempotent_for: float | None
    has_lookup: bool
    if_unknown: str
    detached: bool
    deadline_kills: bool
    deadline_is_proof: bool
    trace: str | None = None


class Lease(NamedTuple):
    """The right to write for a job: every write of a worker carries all of it."""

    job: str
    token: UUID
    fence: int
    owner: str


class Store:
    """The database, as the protocol sees it.

    Arguments:
        config: the validated settings.
        alone: whether this process does one thing at a time; asked once in each process.
        natively: for one thread of the system alone, with a connection of its own that waits for no greenlet.
    """

    def __init__(self, config: Config, *, alone: Callable[[], bool] = lambda: False, natively: bool = False) -> None:
        self.config = config
        self._here: set[tuple[str, int, str]] = set()
        how: dict[str, Any] = {"statement_timeout": config.statement_timeout, "prepare": config.prepare}
        self.connections: Connections | OwnConnection = (
            OwnConnection(config.database_url, **how)
            if natively
            else Connections(config.database_url, limit=lambda: config.connections(alone()), **how)
        )
        schema = quote_schema(config.schema)
        commit = "NULL::text" if config.strict_durability else "set_config('synchronous_commit', 'off', true)"
        self.sql = {
            name: text.replace("{s}", schema).replace("{async}", commit).replace("{now}", "(SELECT clock_timestamp())")
            for name, text in vars(statements).items()
            if isinstance(text, str) and name.isupper() and not name.startswith("_")
        }
        self._named: defaultdict[str, _Named] = defaultdict(_Named)

    # -- running statements -------------------------------------------------------------------------------------------

    def rows(self, statement: str, /, **params: Any) -> list[Row]:
        """Run a statement once and return its rows; :meth:`send` says what it raises."""
        return self.send(statement, params)

    def send(self, statement: str, params: dict[str, Any], sending: Callable[[], None] | None = None) -> list[Row]:
        """Run a statement once and return its rows.

        Arguments:
            statement, params: its name, and its values.
            sending: called when a connection is free and the statement is about to be sent.

        Raises:
            StoreUnavailable: when the database cannot be reached.
            SchemaMismatch: when the schema is not the one that this library knows.
            PermissionMissing: when the role may not do this.
            psycopg.Error: what the database answered.
        """
        with self.connections.connection() as conn, self._in_our_words(conn):
            if sending is not None:
                sending()
            if faults.armed is None:
                return self._execute(conn, statement, params)
            with _faults_as_lost_connections():
                faults.before(statement, params)
                found = self._execute(conn, statement, params)
                faults.after(statement, params)
            return found

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Callable[..., list[Row]]]:
        """Several statements that commit or vanish together; gives what runs one, as :meth:`rows` does.

        Raises:
            As :meth:`rows`, also from the commit at the end.
        """
        ran: list[tuple[str, dict[str, Any]]] = []

        def run(statement: str, /, **params: Any) -> list[Row]:
            if faults.armed is not None:
                ran.append((statement, params))
            return self._execute(conn, statement, params)

        with self.connections.connection() as conn, self._in_our_words(conn), _faults_as_lost_connections():
            with conn.transaction():
                yield run
                for statement, params in ran:
                    faults.before(statement, params)
            for statement, params in ran:
                faults.after(statement, params)

    def look(self, statement: str, /, **params: Any) -> list[Row]:
        """Run a statement that reads by bounds, planned for their values; else as :meth:`rows`."""
        with self.transaction() as run:
            run("METRICS_BEGIN")
            return run(statement, **params)

    def _execute(self, conn: DeadlineConnection, statement: str, params: dict[str, Any]) -> list[Row]:
        text = self.sql[statement]
        cursor = conn.cursor(row_factory=self._named[text])
        try:
            cursor.execute(text, params, prepare=conn.prepare_threshold is not None)
        except psycopg.errors.InsufficientPrivilege as exc:
            raise self._not_permitted(exc, statement, conn) from exc
        return cursor.fetchall()

    @contextlib.contextmanager
    def _in_our_words(self, conn: DeadlineConnection) -> Iterator[None]:
        try:
            yield
        except WRONG_SCHEMA as exc:
            raise self._wrong_schema(exc) from exc
        except psycopg.Error as exc:
            if not _not_now(exc):
                raise
            if exc.sqlstate in NOT_HERE:
                conn.close()  # the next one may reach the primary
            raise StoreUnavailable(f"PostgreSQL cannot take this now: {str(exc).strip()}") from exc

    def enlisted_rows(self, enlisted: Enlisted, statement: str, /, **params: Any) -> list[Row]:
        """Run a statement inside a caller's own transaction, which stays usable whatever it raises.

        Raises:
            ConfigurationError: when that is a transaction of another database.
            SchemaMismatch, PermissionMissing, StoreUnavailable, psycopg.Error: as :meth:`rows`.
        """
        self._refuse_elsewhere(enlisted)
        try:
            if faults.armed is None:
                return enlisted.rows(self.sql[statement], params)
            with _faults_as_lost_connections():
                faults.before(statement, params)
                found: list[Row] = enlisted.rows(self.sql[statement], params)
                faults.after(statement, params)
            return found
        except WRONG_SCHEMA as exc:
            raise self._wrong_schema(exc) from exc
        except psycopg.errors.InsufficientPrivilege as exc:
            raise self._not_permitted(exc, statement, enlisted.connection) from exc

    def _wrong_schema(self, exc: psycopg.Error) -> SchemaMismatch:
        return SchemaMismatch(
            f"schema {self.config.schema!r} is missing or of another version ({str(exc).splitlines()[0]}): "
            "run `celery -A yourproject safe-effects upgrade`"
        )

    @staticmethod
    def _not_permitted(exc: psycopg.Error, statement: str, conn: psycopg.Connection[Any]) -> PermissionMissing:
        role = conn.info.user
        return PermissionMissing(
            f"PostgreSQL refuses ({str(exc).splitlines()[0]}): {grants.needed(statement, role)}",
            kinds=grants.STATEMENTS.get(statement, ()),
            role=role,
        )

    def lacking(self) -> dict[str, list[grants.Right]]:
        """By kind of role, the rights that ours lacks for being one."""
        asked = [(kind, right) for kind in grants.KINDS for right in grants.rights(kind)]
        columns = {name: [getattr(right, name) for _, right in asked] for name in ("privilege", "on", "name", "column")}
        found = self.rows("DOCTOR_RIGHTS", schema=self.config.schema, **columns)
        lacking: dict[str, list[grants.Right]] = {kind: [] for kind in grants.KINDS}
        for row in found:
            kind, right = asked[row.n]
            lacking[kind].append(right)
        return lacking

    def _refuse_elsewhere(self, enlisted: Enlisted) -> None:
        """A job accepted in another database would be seen by no worker."""
        info = enlisted.connection.info
        address = (info.host, info.port, info.dbname)
        if address in self._here:
            return
        theirs, ours = enlisted.rows(self.sql["IDENTITY"], {})[0], self.rows("IDENTITY")[0]
        if theirs != ours:
            raise ConfigurationError(
                f"transaction= runs on the database {theirs.name!r} (of {info.host}:{info.port}), and "
                f"safe_effects_database_url names another one ({ours.name!r}): the jobs must be in the database of the "
                "business rows; nothing was enqueued"
            )
        self._here.add(address)

    def row(self, statement: str, /, **params: Any) -> Row | None:
        """Run a statement once and return its first row."""
        found = self.rows(statement, **params)
        return found[0] if found else None

    def claim(self, statement: str, params: dict[str, Any], sending: Callable[[], None] | None = None) -> Row | None:
        """Claim a job; may be repeated with the same token.

        Arguments:
            statement, params, sending: as for :meth:`send`.

        Returns:
            what a run needs of the row that is now running under the token; where it is not, the whole row as it is,
            which is also one's own after a lost reply; ``None`` without one.

        Raises:
            as :meth:`send`.
        """
        found = self.send(statement, params, sending)
        if not found or found[0].status != JobStatus.RUNNING:
            found = self.rows("CLAIMED", id=params["id"])
        return found[0] if found else None

    def insist(
        self,
        statement: str,
        /,
        *,
        until: Callable[[], bool] | None = None,
        sending: Callable[[], None] | None = None,
        **params: Any,
    ) -> list[Row]:
        """Run a statement that may be repeated, waiting for the database as long as ``until`` says true.

        Arguments:
            until: asked before each repetition; ``None`` waits for ever.
            sending: called before each time that it is sent.

        Raises:
            StoreUnavailable: when ``until`` said no.
        """
        pause = 0.05
        while True:
            try:
                return self.send(statement, params, sending)
            except RETRYABLE as exc:
                if until is not None and not until():
                    if isinstance(exc, StoreUnavailable):
                        raise
                    raise StoreUnavailable(f"PostgreSQL does not answer: {str(exc).strip()}") from exc
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, 1.0)

    # -- schema -------------------------------------------------------------------------------------------------------

    def check_schema(self) -> None:
        """Refuse a schema that is missing, older, or newer and not made for this code too.

        Raises:
            SchemaMismatch: with the command that mends it.
            StoreUnavailable: when the database cannot be reached.
        """
        needed = migrate.latest()
        name = self.config.schema
        try:
            row = self.row("SCHEMA_VERSION")
        except SchemaMismatch:
            row = None
        except psycopg.OperationalError as exc:
            raise StoreUnavailable(f"PostgreSQL does not answer: {str(exc).strip()}") from exc
        present, oldest_code = (row.version, row.oldest_code) if row is not None else (None, None)
        if present is not None and oldest_code is not None and oldest_code <= needed <= present:
            return
        if present is None:
            what, todo = "is missing", "run `celery -A yourproject safe-effects upgrade`"
        elif present < needed:
            what, todo = f"is at version {present}, older", "run `celery -A yourproject safe-effects upgrade`"
        else:
            what = f"is at version {present}, newer, and works with {oldest_code} and later"
            todo = "upgrade the package celery-safe-effects"
        raise SchemaMismatch(
            f"schema {name!r} {what}; this version of celery-safe-effects needs {needed}: {todo}",
            present=present,
            needed=needed,
        )

    def prune(self, limit: int) -> int:
        """Delete one batch of finished jobs with their operations and their log, leaving tombstones."""
        retention = self.config.retention
        with self.transaction() as run:
            ids = [row.id for row in run("PRUNE", **vars(retention), limit=limit)]
            if ids:
                run("PRUNE_LOG", ids=ids)
        return len(ids)

    def due_for_pruning(self, most: int) -> int:
        """How many finished jobs are past their retention, counted so far in each status."""
        return int(self.rows("PRUNE_LEFT", **vars(self.config.retention), most=most)[0].jobs)

    # -- leases -------------------------------------------------------------------------------------------------------

    def renew(self, leases: Sequence[tuple[Lease, float]]) -> dict[UUID, Row]:
        """Renew leases in one statement.

        Arguments:
            leases: each with its ttl in seconds.

        Returns:
            for each lease token still held, whether it is ``renewed`` (not, while somebody else has its row locked),
            and whether a cancel was requested (``cancelled``); a token that is absent is lost.
        """
        rows = self.rows(
            "RENEW",
            ids=[lease.job for lease, _ in leases],
            tokens=[lease.token for lease, _ in leases],
            fences=[lease.fence for lease, _ in leases],
            ttls=[ttl for _, ttl in leases],
        )
        return {row.lease_token: row for row in rows}

    def settle(self, ended: Iterable[tuple[str, int]]) -> None:
        """Record that Celery has been told of these ends: pairs of job id and fence."""
        pairs = list(ended)
        if pairs:
            self.rows("SETTLE", ids=[job for job, _ in pairs], fences=[fence for _, fence in pairs])

    # -- intents and outcomes -----------------------------------------------------------------------------------------

    def intent(
        self,
        lease: Lease,
        intent: Intent,
        nonce: UUID,
        process: str,
        until: Callable[[], bool],
        sending: Callable[[], None] | None = None,
    ) -> tuple[bool, Row | None]:
        """Record an intent.

        Returns:
            whether the lease is held, live and not cancelled, and the recorded intent (``None``: refused, since the
            key already has a record that does not allow another).
        """
        row = self.insist(
            "INTENT_REPEATABLE" if intent.repeatable else "INTENT",
            until=until,
            sending=sending,
            job=lease.job,
            token=lease.token,
            fence=lease.fence,
            owner=lease.owner,
            nonce=nonce,
            process=process,
            **intent._asdict(),
        )[0]
        return row.held, (row if row.nonce is not None else None)

    def count(self, name: str, label: str = "", by: int = 1) -> None:
        """Add to a counter in the database."""
        self.rows("COUNT", name=name, label=label, by=by)
