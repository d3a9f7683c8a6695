"""Enlisted in a caller's transaction, job and business rows commit or vanish together (FAULTS 9)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from celery import Celery
from sqlalchemy import create_engine, pool, text
from sqlalchemy.orm import Session

from celery_safe_effects import AdmissionRejected, IdempotencyConflict
from celery_safe_effects.errors import ConfigurationError
from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.processes import Workers
from tests.support.services import Sql


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    return redis_broker


@pytest.fixture
def engine(database_url: str, sql: Sql) -> Iterator[Any]:
    sql("CREATE TABLE public.orders (id text PRIMARY KEY)")
    made = create_engine(database_url, poolclass=pool.NullPool)
    yield made
    made.dispose()


def place(session: Session, order: str) -> None:
    session.execute(text("INSERT INTO public.orders VALUES (:id)"), {"id": order})


def charge(app: Celery, order: str, transaction: Any, **options: Any) -> str:
    return str(app.tasks["tests.charge"].apply_async((order, 5), transaction=transaction, **options).id)


def test_09_commits_rolls_back_and_savepoints(
    app: Celery, engine: Any, sql: Sql, broker: Broker, workers: Workers, provider: Provider
) -> None:
    """Never started before the commit; rolled back, as a whole or to a savepoint, neither row nor message."""
    workers("a")
    with Session(engine) as session:
        place(session, "kept")
        kept = charge(app, "kept", session)
        with session.begin_nested() as savepoint:
            lost = charge(app, "lost", session)
            savepoint.rollback()
        with session.begin_nested():
            released = charge(app, "released", session)
        assert broker.depth() == 0
        assert sql("SELECT id FROM jobs") == []
        session.commit()
    eventually(
        lambda: {r["id"] for r in sql("SELECT id FROM jobs WHERE status = 'succeeded'")} == {kept, released},
        timeout=20,
        message="the committed jobs did not run",
    )
    with Session(engine) as session:
        place(session, "rolled back")
        gone = charge(app, "gone", session)
        session.rollback()
    assert sql("SELECT id FROM jobs WHERE id = ANY (%s)", [lost, gone]) == []
    assert [r["id"] for r in sql("SELECT id FROM public.orders")] == ["kept"]
    assert sorted(r["body"]["customer"] for r in provider.ledger()) == ["kept", "released"]


@pytest.mark.parametrize("kind", ["connection", "psycopg"])
def test_other_kinds_of_transactions_are_published_by_the_sweep(
    app: Celery, engine: Any, dsn: str, sql: Sql, workers: Workers, kind: str
) -> None:
    workers("a")
    if kind == "connection":
        with engine.connect() as connection:
            job = charge(app, "order", connection)
            connection.commit()
    else:
        with psycopg.connect(dsn) as connection:
            job = charge(app, "order", connection)
    eventually(
        lambda: [r["status"] for r in sql("SELECT status FROM jobs WHERE id = %s", job)] == ["succeeded"],
        timeout=20,
        message="the job did not run",
    )


def test_a_conflict_leaves_the_callers_transaction_usable(app: Celery, engine: Any, sql: Sql) -> None:
    app.tasks["tests.charge"].apply_async(("a", 1), idempotency_key="k")
    with Session(engine) as session:
        place(session, "order")
        with pytest.raises(IdempotencyConflict):
            charge(app, "other", session, idempotency_key="k")
        place(session, "second")
        mine = charge(app, "own", session, idempotency_key="own")
        assert charge(app, "own", session, idempotency_key="own") == mine
        session.commit()
    assert len(sql("SELECT id FROM public.orders")) == 2
    assert len(sql("SELECT id FROM jobs")) == 2


def test_a_key_in_an_open_transaction_is_a_refusal_that_may_be_tried_again(app: Celery, engine: Any, sql: Sql) -> None:
    with Session(engine) as one, Session(engine) as two:
        job = charge(app, "a", one, idempotency_key="k")
        place(two, "order")
        with pytest.raises(AdmissionRejected) as caught:
            charge(app, "a", two, idempotency_key="k")
        assert caught.value.reason == "idempotency_key_busy"
        assert caught.value.retry_after
        with pytest.raises(AdmissionRejected):
            app.tasks["tests.charge"].apply_async(("a", 5), idempotency_key="k")
        one.commit()
        assert charge(app, "a", two, idempotency_key="k") == job
        two.commit()
    assert len(sql("SELECT id FROM jobs")) == 1


def test_twenty_open_transactions_do_not_hold_each_other_up(app: Celery, database_url: str, sql: Sql) -> None:
    """All are open at the same time, which the barrier proves: a lock between them would break it."""
    made = create_engine(database_url, poolclass=pool.NullPool)
    barrier = threading.Barrier(20, timeout=20)
    broken: list[BaseException] = []

    def caller(n: int) -> None:
        try:
            with Session(made) as session:
                charge(app, f"order-{n}", session, tenant="acme")
                barrier.wait()
                session.commit()
        except BaseException as exc:
            broken.append(exc)

    threads = [threading.Thread(target=caller, args=(n,)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    made.dispose()
    assert not broken
    assert len(sql("SELECT id FROM jobs WHERE tenant = 'acme'")) == 20


@pytest.mark.parametrize("transaction", [object(), 5])
def test_anything_else_is_refused(app: Celery, sql: Sql, transaction: Any) -> None:
    with pytest.raises(ConfigurationError, match="transaction="):
        charge(app, "a", transaction)
    assert sql("SELECT id FROM jobs") == []


def test_an_autocommit_connection_is_refused(app: Celery, dsn: str, sql: Sql) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection, pytest.raises(ConfigurationError, match="autocommit"):
        charge(app, "a", connection)
    assert sql("SELECT id FROM jobs") == []
