"""Faults 15 and 36: the sweeper stands still between its read and its write, and the row changes meanwhile.

Its statement is one, so the pause is made inside: the statement finds a clock_timestamp() of ours on its search path,
which waits for an advisory lock while rows are being chosen, after the snapshot and before the row is locked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.rows import namedtuple_row

from celery_safe_effects.config import from_conf
from celery_safe_effects.store import migrate
from celery_safe_effects.store.hot import Store
from celery_safe_effects.testing import eventually
from tests.faults.test_fault_16 import claim, end, intent
from tests.support.faults2 import log, operation_row
from tests.support.services import PostgresServer, Sql

pytestmark = pytest.mark.faults

GATE = 4711
CLOCK = f"""
CREATE SCHEMA paused;
CREATE FUNCTION paused.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_lock_shared({GATE});
    PERFORM pg_advisory_unlock_shared({GATE});
    RETURN pg_catalog.clock_timestamp();
END $$;
"""
SWEEP = {"limit": 10, "wish": "again", "reason": "lease_expired", "delay": 0.0, "max_delay": 0.0, "actor": "sweeper"}
LOST = {**SWEEP, "refund": 0}
DUE = {"ids": None, "limit": 10, "ahead": 0.0, "settle_tries": 8, "republish": 60.0}


@pytest.fixture(scope="module")
def shared_database(postgres_server: PostgresServer) -> Iterator[str]:
    """One database for the module: making one takes longer than a test."""
    name = f"sweeper_{uuid4().hex[:12]}"
    url = postgres_server.create_database(name)
    migrate.upgrade(url)
    with psycopg.connect(postgres_server.dsn(name)) as connection:
        connection.execute(CLOCK.encode())
    yield url
    postgres_server.drop_database(name)


@pytest.fixture
def database_url(shared_database: str) -> str:
    """The shared database, empty."""
    with psycopg.connect(shared_database.replace("+psycopg", "", 1)) as connection:
        connection.execute("SET session_replication_role = replica")
        for table in ("job", "operation", "transition"):
            connection.execute(f"DELETE FROM safe_effects.{table}".encode())
    return shared_database


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    made = Store(from_conf({"safe_effects_database_url": database_url}))
    yield made
    made.connections.close()


@pytest.fixture
def lease(store: Store, sql: Sql) -> dict[str, Any]:
    """The lease of a running job."""
    sql("INSERT INTO job (id, task, args_digest, envelope) VALUES ('job', 't', 'd', '')")
    return claim(store, "job", "a")


def expire(sql: Sql) -> None:
    """Let the lease run out."""
    sql("UPDATE job SET lease_until = clock_timestamp() - interval '1 second'")


class Session:
    """A session whose statement runs in the background."""

    def __init__(self, dsn: str, options: str = "") -> None:
        self.connection: psycopg.Connection[Any] = psycopg.connect(
            dsn, autocommit=True, row_factory=namedtuple_row, options=options
        )
        self.pool = ThreadPoolExecutor(1)

    def start(self, query: str, **params: Any) -> Future[list[Any]]:
        return self.pool.submit(lambda: self.connection.execute(query.encode(), params).fetchall())

    def close(self) -> None:
        self.pool.shutdown()
        self.connection.close()


def waits(sql: Sql, session: Session) -> bool:
    """Whether a session waits for a row."""
    pid = session.connection.info.backend_pid
    return bool(sql("SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'", pid))


@contextmanager
def paused(dsn: str, sql: Sql, store: Store, statement: str, **params: Any) -> Iterator[Future[list[Any]]]:
    """Run a statement that stands still between its read and its write for as long as the block takes."""
    session = Session(dsn, "-c search_path=paused,pg_catalog")
    try:
        sql("SELECT pg_advisory_lock(%s)", GATE)
        try:
            running = session.start(store.sql[statement], **params)
            blocked = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND pid = %s"
            eventually(lambda: sql(blocked, session.connection.info.backend_pid), 5, message="it stands still")
            yield running
        finally:
            sql("SELECT pg_advisory_unlock(%s)", GATE)
        running.result(10)
    finally:
        session.close()


def completes(store: Store, sql: Sql, lease: dict[str, Any]) -> None:
    (row,) = store.rows("LEAVE", **end(lease, "succeeded"))
    assert row.status == "succeeded"


def goes_on_living(store: Store, sql: Sql, lease: dict[str, Any]) -> None:
    # The renewal was on its way when the lease ran out: here it is as if it had been in time.
    sql("UPDATE job SET lease_until = clock_timestamp() + interval '30 seconds'")


def is_claimed_anew(store: Store, sql: Sql, lease: dict[str, Any]) -> None:
    (row,) = store.rows("SWEEP_LEASES", **{**SWEEP, "actor": "another sweeper"})
    assert row.status == "queued"
    claim(store, "job", "b")


def is_released(store: Store, sql: Sql, lease: dict[str, Any]) -> None:
    (row,) = store.rows("LOST", **{**LOST, "actor": "parent"}, id="job", owner="a")
    assert row.status == "queued"


@pytest.mark.parametrize("change", [completes, goes_on_living, is_claimed_anew, is_released])
def test_fault_15_a_sweeper_paused_between_read_and_write(
    store: Store, sql: Sql, dsn: str, lease: dict[str, Any], change: Callable[..., None]
) -> None:
    expire(sql)
    with paused(dsn, sql, store, "SWEEP_LEASES", **SWEEP) as sweep:
        change(store, sql, lease)
        before = [sql(f"SELECT * FROM {table}") for table in ("job", "transition")]
    assert sweep.result() == []
    assert [sql(f"SELECT * FROM {table}") for table in ("job", "transition")] == before


def test_fault_15_a_job_that_dies_of_age_is_claimed_meanwhile(
    store: Store, sql: Sql, dsn: str, lease: dict[str, Any]
) -> None:
    # The claim came through just before the expiry; the sweeper had read the row as queued.
    sql("INSERT INTO job (id, task, args_digest, envelope) VALUES ('dying', 't', 'd', '')")
    sql("UPDATE job SET expires_at = clock_timestamp() + interval '2 seconds' WHERE id = 'dying'")
    with paused(dsn, sql, store, "SWEEP_DYING", id=None, limit=10, actor="sweeper") as sweep:
        claim(store, "dying", "a")
        eventually(lambda: sql("SELECT 1 FROM jobs WHERE expires_at < clock_timestamp()"), 10)
    assert sweep.result() == []
    assert log(sql, "dying") == ["queued", "leased", "running"]


def test_fault_15_a_message_that_is_due_is_claimed_meanwhile(
    store: Store, sql: Sql, dsn: str, lease: dict[str, Any]
) -> None:
    sql(
        "INSERT INTO job (id, task, args_digest, envelope, next_publish_at)"
        " VALUES ('due', 't', 'd', '', clock_timestamp())"
    )
    with paused(dsn, sql, store, "DUE", **DUE) as publishing:
        claim(store, "due", "a")
    assert publishing.result() == []
    (row,) = sql("SELECT publishes, next_publish_at FROM job WHERE id = 'due'")
    assert row == {"publishes": 0, "next_publish_at": None}


def test_fault_15_a_sweeper_that_has_written_and_not_committed(
    store: Store, sql: Sql, dsn: str, lease: dict[str, Any]
) -> None:
    expire(sql)
    worker = Session(dsn)
    try:
        with psycopg.connect(dsn) as sweeper:
            assert len(sweeper.execute(store.sql["SWEEP_LEASES"].encode(), SWEEP).fetchall()) == 1
            completion = worker.start(store.sql["LEAVE"], **end(lease, "succeeded"))
            eventually(lambda: waits(sql, worker), 5, message="the completion waits")
        # Whoever comes first wins, and the other one is told.
        assert completion.result(10) == []
    finally:
        worker.close()
    assert log(sql, "job") == ["queued", "leased", "running", "queued"]


# -- 36 ----------------------------------------------------------------------------------------------------------------


def record_intent(store: Store, lease: dict[str, Any], nonce: UUID) -> None:
    (row,) = store.rows("INTENT", nonce=nonce, **lease, **intent("1"))
    assert row.held
    assert row.nonce == nonce


def parked_with_its_question(sql: Sql) -> None:
    (job,) = sql("SELECT status, open_ops, unknown_ops FROM job")
    assert job == {"status": "unknown", "open_ops": 0, "unknown_ops": 1}
    assert operation_row(sql, "job:1")["status"] == "unknown"
    assert log(sql, "job") == ["queued", "leased", "running", "unknown"]
    assert log(sql, "job", "job:1") == ["intent_recorded", "unknown"]


def test_fault_36_an_intent_between_the_sweepers_read_and_write(
    store: Store, sql: Sql, dsn: str, lease: dict[str, Any]
) -> None:
    sql("UPDATE job SET lease_until = clock_timestamp() + interval '2 seconds'")
    with paused(dsn, sql, store, "SWEEP_LEASES", **SWEEP) as sweep:
        record_intent(store, lease, uuid4())
        eventually(lambda: sql("SELECT 1 FROM jobs WHERE lease_until < clock_timestamp()"), 10)
    (row,) = sweep.result()
    assert row.status == "unknown"
    parked_with_its_question(sql)


@pytest.mark.parametrize("statement", ["LOST", "LEAVE"])
def test_fault_36_a_statement_waits_on_the_row_while_an_intent_commits(
    store: Store, sql: Sql, dsn: str, lease: dict[str, Any], statement: str
) -> None:
    params = {**LOST, "id": "job", "owner": "a"} if statement == "LOST" else end(lease, "again")
    waiting = Session(dsn)
    try:
        with psycopg.connect(dsn) as worker:
            intending = {**lease, **intent("1"), "nonce": uuid4()}
            (recorded,) = worker.execute(store.sql["INTENT"].encode(), intending).fetchall()
            assert recorded[0], "the lease is held"
            # The sweep leaves alone what somebody holds.
            assert store.rows("SWEEP_LEASES", **SWEEP) == []
            leaving = waiting.start(store.sql[statement], **params)
            eventually(lambda: waits(sql, waiting), 5, message="it waits on the row")
        (row,) = leaving.result(10)
        assert row.status == "unknown"
    finally:
        waiting.close()
    parked_with_its_question(sql)


def test_fault_36_an_intent_that_waits_on_the_end_of_its_lease_is_refused(
    store: Store, sql: Sql, dsn: str, lease: dict[str, Any]
) -> None:
    worker = Session(dsn)
    try:
        with psycopg.connect(dsn) as parent:
            parent.execute(store.sql["LOST"].encode(), {**LOST, "id": "job", "owner": "a"})
            intending = worker.start(store.sql["INTENT"], **lease, **intent("1"), nonce=uuid4())
            eventually(lambda: waits(sql, worker), 5, message="the intent waits")
        (row,) = intending.result(10)
    finally:
        worker.close()
    assert (row.held, row.nonce) == (False, None)
    assert sql("SELECT 1 FROM operations") == []
    assert log(sql, "job") == ["queued", "leased", "running", "queued"]
