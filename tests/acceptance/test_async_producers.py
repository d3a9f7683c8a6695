"""Coroutines that enqueue: a FastAPI application does so together with its rows, and its loop is never blocked."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import psycopg
import pytest
from celery import Celery, chain, group
from fastapi import FastAPI
from kombu import Producer
from sqlalchemy import create_engine, pool, text
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from celery_safe_effects import AdmissionRejected, IdempotencyConflict, SafeEffects
from celery_safe_effects.errors import ConfigurationError
from celery_safe_effects.store.connection import DeadlineConnection
from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.processes import Workers
from tests.support.services import Sql

R = TypeVar("R")


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    return redis_broker


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    """Celery makes a result backend a thread, and these threads end with their loops: none, then."""
    app_conf.update(result_backend="disabled://")
    return app_conf


@pytest.fixture
def orders(sql: Sql) -> None:
    sql("CREATE TABLE public.orders (id text PRIMARY KEY)")


def run(database_url: str, main: Callable[[AsyncEngine], Awaitable[R]]) -> R:
    """Run a coroutine with an asynchronous engine of its own."""

    async def whole() -> R:
        engine = create_async_engine(database_url, poolclass=pool.NullPool)
        try:
            return await main(engine)
        finally:
            await engine.dispose()

    return asyncio.run(whole())


class Waits:
    """Who waits for the database, for the broker, or for a moment: the threads in which that happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: set[int] = set()
        for where, name in ((DeadlineConnection, "wait"), (Producer, "publish"), (time, "sleep")):
            monkeypatch.setattr(where, name, self._noted(getattr(where, name)))

    def _noted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.threads.add(threading.get_ident())
            return call(*args, **kwargs)

        return noted


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    return Waits(monkeypatch)


def jobs(sql: Sql) -> set[str]:
    return {row["id"] for row in sql("SELECT id FROM jobs")}


async def place(session: AsyncSession, order: str) -> None:
    await session.execute(text("INSERT INTO public.orders VALUES (:id)"), {"id": order})


# -- FastAPI -----------------------------------------------------------------------------------------------------------


def shop(app: Celery, engine: AsyncEngine) -> FastAPI:
    """An application of the usual kind: a session a request, the job in the request's transaction."""
    api = FastAPI()
    sessions = async_sessionmaker(engine)

    @api.post("/orders/{order}")
    async def create(order: str, fail: bool = False) -> dict[str, str]:
        async with sessions() as session, session.begin():
            await place(session, order)
            result = await app.tasks["tests.charge"].aapply_async(
                (order, 5), idempotency_key=order, tenant="acme", transaction=session
            )
            if fail:
                raise httpx.HTTPError("the business changed its mind")
        return {"job": result.id}

    return api


def test_an_endpoint_enqueues_with_its_transaction(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, orders: None, database_url: str, waits: Waits
) -> None:
    workers("a")

    async def main(engine: AsyncEngine) -> list[str]:
        transport = httpx.ASGITransport(shop(app, engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            with pytest.raises(httpx.HTTPError):
                await client.post("/orders/gone", params={"fail": True})
            waits.threads.clear()
            answers = await asyncio.gather(*(client.post(f"/orders/order-{n}") for n in range(12)))
            assert waits.threads
            assert threading.get_ident() not in waits.threads, "the loop's thread waits for nothing"
        return [answer.json()["job"] for answer in answers]

    accepted = run(database_url, main)
    assert jobs(sql) == set(accepted)
    assert len(sql("SELECT id FROM public.orders")) == 12
    eventually(
        lambda: len(sql("SELECT id FROM jobs WHERE status = 'succeeded'")) == 12, timeout=30, message="all of them run"
    )
    assert sorted(row["body"]["customer"] for row in provider.ledger()) == sorted(f"order-{n}" for n in range(12))


# -- transactions ------------------------------------------------------------------------------------------------------


def test_savepoints_and_rollbacks_of_an_async_session(
    app: Celery, sql: Sql, orders: None, database_url: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    charge = app.tasks["tests.charge"]
    deliver_now = app.safe_effects.publisher.deliver_now
    threads: list[threading.Thread] = []

    def delivered(*job_ids: str) -> int:
        threads.append(threading.current_thread())
        return int(deliver_now(*job_ids))

    monkeypatch.setattr(app.safe_effects.publisher, "deliver_now", delivered)

    async def main(engine: AsyncEngine) -> set[str]:
        async with AsyncSession(engine) as session:
            await place(session, "kept")
            kept = await charge.aapply_async(("kept", 5), transaction=session)
            savepoint = await session.begin_nested()
            await charge.aapply_async(("lost", 5), transaction=session)
            await savepoint.rollback()
            assert broker.depth() == 0
            assert jobs(sql) == set()
            await session.commit()
        async with AsyncSession(engine) as session:
            await charge.aapply_async(("gone", 5), transaction=session)
            await session.rollback()
        return {kept.id}

    assert run(database_url, main) == jobs(sql)
    # Its message goes out after the commit, beside the loop.
    eventually(lambda: broker.depth() == 1, 10)
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("kind", ["scoped", "connection", "psycopg", "sync session", "sync scoped"])
def test_other_kinds_of_transactions(
    app: Celery, sql: Sql, orders: None, database_url: str, dsn: str, kind: str
) -> None:
    charge = app.tasks["tests.charge"]
    sync_engine = create_engine(database_url, poolclass=pool.NullPool)

    async def twice(transaction: Any) -> Any:
        first = await charge.aapply_async(("a", 5), idempotency_key="k", transaction=transaction)
        assert (await charge.aapply_async(("a", 5), idempotency_key="k", transaction=transaction)).id == first.id
        with pytest.raises(IdempotencyConflict):
            await charge.aapply_async(("b", 5), idempotency_key="k", transaction=transaction)
        assert jobs(sql) == set()
        return first.id

    async def main(engine: AsyncEngine) -> Any:
        if kind == "scoped":
            scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
            found = await twice(scoped)
            await scoped.commit()
            await scoped.remove()
        elif kind == "connection":
            async with engine.connect() as connection:
                found = await twice(connection)
                await connection.commit()
        elif kind == "psycopg":
            async with await psycopg.AsyncConnection.connect(dsn) as raw:
                found = await twice(raw)
        else:
            with Session(sync_engine) as session:
                sync = scoped_session(sessionmaker(sync_engine)) if kind == "sync scoped" else session
                found = await twice(sync)
                sync.commit()
                sync.close()
        return found

    assert {run(database_url, main)} == jobs(sql)
    sync_engine.dispose()


def test_what_another_thread_cannot_use_is_refused(app: Celery, sql: Sql, database_url: str, dsn: str) -> None:
    charge = app.tasks["tests.charge"]

    async def main(engine: AsyncEngine) -> None:
        with pytest.raises(ConfigurationError, match="sync_to_async"):
            await charge.aapply_async(("a", 5), transaction="default")
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as raw:
            with pytest.raises(ConfigurationError, match="async with"):
                await charge.aapply_async(("a", 5), transaction=raw)
        async with AsyncSession(engine) as session:
            with pytest.raises(ConfigurationError, match="aapply_async"):
                charge.apply_async(("a", 5), transaction=session)
        with pytest.raises(ConfigurationError, match="transaction="):
            await charge.aapply_async(("a", 5), transaction=object())

    run(database_url, main)
    assert jobs(sql) == set()


@pytest.mark.parametrize("enlisted", [False, True])
def test_a_key_in_an_open_transaction_blocks_nobody_else(
    app: Celery, sql: Sql, orders: None, database_url: str, enlisted: bool, waits: Waits
) -> None:
    """The call waits for the key; the loop does not."""
    charge = app.tasks["tests.charge"]

    async def main(engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as holder, AsyncSession(engine) as other:
            first = await charge.aapply_async(("a", 5), idempotency_key="k", transaction=holder)
            await place(other, "order")
            options = {"transaction": other} if enlisted else {}
            waits.threads.clear()
            with pytest.raises(AdmissionRejected) as caught:
                await charge.aapply_async(("a", 5), idempotency_key="k", **options)
            assert caught.value.reason == "idempotency_key_busy"
            assert waits.threads
            assert threading.get_ident() not in waits.threads
            await holder.commit()
            assert (await charge.aapply_async(("a", 5), idempotency_key="k", **options)).id == first.id
            await other.commit()

    run(database_url, main)
    assert len(jobs(sql)) == 1
    assert len(sql("SELECT id FROM public.orders")) == 1


# -- cancelled ---------------------------------------------------------------------------------------------------------


def test_a_cancelled_enqueue_may_have_been_accepted(app: Celery, sql: Sql, database_url: str) -> None:
    """It returns at once; what is accepted is accepted, and the same key finds it."""
    charge = app.tasks["tests.charge"]

    async def main(engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as holder:
            await holder.execute(text("LOCK TABLE safe_effects.job IN EXCLUSIVE MODE"))
            started = time.monotonic()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(charge.aapply_async(("a", 5), idempotency_key="k"), 0.3)
            assert time.monotonic() - started < 4, "the statement itself would wait for five seconds"
            await holder.rollback()
        eventually(lambda: len(jobs(sql)) == 1, 10)
        assert {(await charge.aapply_async(("a", 5), idempotency_key="k")).id} == jobs(sql)

    run(database_url, main)
    assert len(jobs(sql)) == 1


def test_a_cancelled_enqueue_leaves_its_transaction_to_its_owner(
    app: Celery, sql: Sql, orders: None, database_url: str
) -> None:
    """The statement is over before the cancellation is raised: rolled back or committed, the session is usable."""
    charge = app.tasks["tests.charge"]

    async def main(engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as holder, AsyncSession(engine) as session:
            await charge.aapply_async(("a", 5), idempotency_key="k", transaction=holder)
            await place(session, "order")
            with pytest.raises((asyncio.TimeoutError, AdmissionRejected)):
                await asyncio.wait_for(charge.aapply_async(("a", 5), idempotency_key="k", transaction=session), 0.3)
            await place(session, "second")
            await session.commit()
            await holder.rollback()

    run(database_url, main)
    assert len(sql("SELECT id FROM public.orders")) == 2
    assert jobs(sql) == set()


def test_many_at_once(app: Celery, sql: Sql, orders: None, database_url: str) -> None:
    charge = app.tasks["tests.charge"]

    async def main(engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as session:
            await place(session, "order")
            many = [charge.s(f"c-{n % 20}", 5).set(idempotency_key=f"k-{n % 20}") for n in range(30)]
            found = await app.safe_effects.aenqueue_many(many, transaction=session)
            assert [one.status for one in found] == ["accepted"] * 20 + ["existing"] * 10
            assert jobs(sql) == set()
            await session.commit()
        await app.safe_effects.aenqueue_many([charge.s("late", 5)])

    run(database_url, main)
    assert len(jobs(sql)) == 21


# -- the rest of the surface -------------------------------------------------------------------------------------------


def test_delay_and_canvases_have_counterparts(app: Celery, sql: Sql) -> None:
    pure = app.tasks["tests.pure"]
    safe: SafeEffects = app.safe_effects

    async def main() -> Any:
        one = await pure.adelay(1)
        two = await safe.aapply_async(group(pure.s(1), pure.s(2)))
        three = await safe.aapply_async(chain(pure.s(3), pure.s()))
        four = await safe.aapply_async(pure.s(4), idempotency_key="k")
        return [one.id, *(child.id for child in two.children), three.parent.id, four.id]

    assert set(asyncio.run(main())) == jobs(sql)
    assert [row["id"] for row in sql("SELECT id FROM jobs WHERE idempotency_key = 'k'")]
