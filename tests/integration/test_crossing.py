"""Enqueues in callers' transactions that cross, by tenants, keys and rows: none deadlocks, or waits long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any

import psycopg
import pytest
from celery import group
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import create_engine, pool, text
from sqlalchemy.orm import Session

from celery_safe_effects import AdmissionRejected, Limits
from celery_safe_effects.errors import StoreUnavailable
from celery_safe_effects.glue import acceptance
from celery_safe_effects.testing import eventually
from celery_safe_effects.testing.process import patience
from tests.support.services import Sql
from tests.support.shop import Shop

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the database during app initialization:RuntimeWarning")

ALIAS = "crossing"
KINDS = ["psycopg", "session", "connection", "django connection", "django alias"]

Run = Callable[[str], Any]


class Business:
    """Opens callers' transactions of one kind."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.dsn = url.replace("+psycopg", "", 1)
        self.engine = create_engine(url, poolclass=pool.NullPool)

    @contextmanager
    def begin(self) -> Iterator[tuple[Any, Run]]:
        """Give what `transaction=` takes, and what runs the caller's own SQL; it commits in the end."""
        if self.kind == "psycopg":
            with psycopg.connect(self.dsn) as connection:
                yield connection, lambda query: connection.execute(query.encode())
        elif self.kind == "session":
            with Session(self.engine) as session:
                yield session, lambda query: session.execute(text(query))
                session.commit()
        elif self.kind == "connection":
            with self.engine.begin() as connection:
                yield connection, lambda query: connection.execute(text(query))
        else:
            with self._django() as connection:
                yield ALIAS if self.kind == "django alias" else connection, lambda q: connection.cursor().execute(q)

    @contextmanager
    def _django(self) -> Iterator[Any]:
        from django.db import connections, transaction
        from django.db.utils import ConnectionHandler

        to = conninfo_to_dict(self.dsn)
        fields = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host", "PORT": "port"}
        database = {field: to.get(name, "") for field, name in fields.items()}
        handler = ConnectionHandler({"default": {}, ALIAS: {"ENGINE": "django.db.backends.postgresql", **database}})
        made = handler.create_connection(ALIAS)
        connections[ALIAS] = made  # of this thread
        try:
            with transaction.atomic(using=ALIAS):
                yield made
        finally:
            made.close()
            del connections[ALIAS]


@pytest.fixture(params=KINDS)
def business(request: pytest.FixtureRequest, database_url: str) -> Iterator[Business]:
    made = Business(request.param, database_url)
    yield made
    made.engine.dispose()


@pytest.fixture
def shop(shops: Callable[..., Shop], sql: Sql) -> Shop:
    sql("CREATE TABLE public.stock (id text PRIMARY KEY, n int NOT NULL)")
    sql("INSERT INTO public.stock VALUES ('one', 0), ('two', 0)")
    quickly = "ALTER DATABASE {} SET deadlock_timeout = '300ms'"  # a wait of ours is bounded by half of it
    sql(quickly.format(sql("SELECT quote_ident(current_database()) AS name")[0]["name"]))
    return shops(safe_effects_limits=Limits(tenant_queued=100_000), safe_effects_max_connections=8)


def deadlocks(sql: Sql) -> int:
    """How many the server has had to break; it tells once those who met in one have gone."""
    sql("SELECT pg_stat_clear_snapshot()")
    return int(sql("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")[0]["deadlocks"])


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run them at the same time; what they return, or raise."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [done.result(60) for done in [threads.submit(call) for call in calls]]


def test_crossing_tenants_and_keys_many_times(business: Business, shop: Shop, sql: Sql) -> None:
    """A then B, and B then A; the keys cross half of the time. Refused or accepted, each transaction commits."""
    rounds, numbers = 12, count()
    busy: list[str] = []
    barrier = threading.Barrier(2, timeout=30)

    def caller(order: str, me: str, turn: int) -> int:
        accepted = 0
        with business.begin() as (transaction, run):
            run(f"UPDATE public.stock SET n = n + 1 WHERE id = '{me}'")
            for tenant in order:
                barrier.wait()  # each holds its first before it asks for its second
                key = f"{tenant}-{turn}" if turn % 2 else f"{tenant}-{turn}-{next(numbers)}"
                try:
                    shop.bill.apply_async((turn,), tenant=tenant, idempotency_key=key, transaction=transaction)
                    accepted += 1
                except AdmissionRejected as exc:
                    busy.append(exc.reason)
            run(f"UPDATE public.stock SET n = n + 1 WHERE id = '{me}'")
        return accepted

    accepted, longest = 0, 0.0
    for turn in range(rounds):
        start = time.monotonic()
        accepted += sum(together(partial(caller, "AB", "one", turn), partial(caller, "BA", "two", turn)))
        longest = max(longest, time.monotonic() - start)
    assert longest < 10, "nobody waits for the other's end"
    assert set(busy) == {"idempotency_key_busy"}, "the crossing keys met"
    assert accepted >= rounds * 2
    assert sql("SELECT sum(n) AS n FROM public.stock") == [{"n": rounds * 4}], "each transaction committed"
    jobs = sql("SELECT count(*) AS n FROM jobs")[0]["n"]
    assert jobs <= accepted, "of two that were told of one key, one may have found the other's"
    assert jobs >= rounds + rounds // 2 * 2
    assert sql("SELECT * FROM reservation") == [], "a refused call keeps no place"
    assert deadlocks(sql) == 0


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
@pytest.mark.parametrize("business", ["psycopg", "session", "django alias"], indirect=True)
def test_a_key_and_the_callers_own_rows_cross(business: Business, shop: Shop, sql: Sql, many: bool) -> None:
    """One holds the key and wants the row; the other holds the row and wants the key: it is told, and goes on."""
    told: list[str] = []

    for turn, pause in enumerate((0.0, 0.05, 0.1, 0.2)):
        held = threading.Barrier(2, timeout=30)

        def first(turn: int, pause: float, held: threading.Barrier) -> None:
            with business.begin() as (transaction, run):
                shop.bill.apply_async((turn,), tenant="A", idempotency_key=f"k-{turn}", transaction=transaction)
                held.wait()
                time.sleep(pause)
                run("UPDATE public.stock SET n = n + 1 WHERE id = 'one'")

        def second(turn: int, pause: float, held: threading.Barrier) -> None:
            with business.begin() as (transaction, run):
                run("UPDATE public.stock SET n = n + 1 WHERE id = 'one'")
                held.wait()
                time.sleep(0.2 - pause)
                try:
                    if many:
                        calls = [
                            shop.bill.s(turn).set(tenant="A", idempotency_key=f"k-{turn}" if n == 21 else f"{turn}-{n}")
                            for n in range(40)
                        ]
                        found = shop.safe.enqueue_many(calls, transaction=transaction)
                        told.extend(one.reason for one in found if one.reason)
                    else:
                        shop.bill.apply_async((turn,), tenant="A", idempotency_key=f"k-{turn}", transaction=transaction)
                except AdmissionRejected as exc:
                    told.append(exc.reason)
                run("UPDATE public.stock SET n = n + 1 WHERE id = 'two'")

        together(partial(first, turn, pause, held), partial(second, turn, pause, held))
    assert set(told) == {"idempotency_key_busy"}
    assert sql("SELECT id, n FROM public.stock ORDER BY id") == [{"id": "one", "n": 8}, {"id": "two", "n": 4}]
    assert deadlocks(sql) == 0


@pytest.mark.parametrize("business", ["session"], indirect=True)
def test_twenty_open_callers_of_one_tenant_with_keys_and_limits(
    business: Business, shop: Shop, sql: Sql, shops: Callable[..., Shop]
) -> None:
    """Each has a key of its own and asks for one that all want; others without a transaction ask for it meanwhile."""
    narrow = shops(safe_effects_limits=Limits(tenant_queued=15), safe_effects_max_connections=30)
    over = threading.Event()
    times: list[float] = []
    barrier, inside = (threading.Barrier(20, lambda: times.append(time.monotonic()), timeout=30) for _ in range(2))

    def caller(number: int) -> list[str]:
        told = []
        with business.begin() as (transaction, _):
            barrier.wait()
            for key in ("shared", f"own-{number}"):
                try:
                    narrow.bill.apply_async((1,), tenant="acme", idempotency_key=key, transaction=transaction)
                    told.append("accepted")
                except AdmissionRejected as exc:
                    told.append(exc.reason)
            inside.wait()  # each has its answers while all others are open
            time.sleep(3)
        return told

    def outside() -> None:
        while not over.wait(0.1):
            with suppress(AdmissionRejected, StoreUnavailable):
                narrow.bill.apply_async((1,), tenant="acme", idempotency_key="shared")

    with ThreadPoolExecutor(24) as threads:
        others = [threads.submit(outside) for _ in range(2)]
        try:
            found = [done.result(60) for done in [threads.submit(caller, n) for n in range(20)]]
        finally:
            over.set()
        for one in others:
            one.result(60)
    begun, answered = times
    assert answered - begun < 2 * patience(), "each open for 3 s, all are over within 5"
    own = [told[1] for told in found]
    assert set(own) == {"accepted", "tenant_queue_limit"}
    assert {told[0] for told in found} <= {"accepted", "idempotency_key_busy", "tenant_queue_limit"}
    assert len(sql("SELECT id FROM jobs WHERE tenant = 'acme'")) == 15
    assert sql("SELECT * FROM reservation") == []
    assert deadlocks(sql) == 0


@pytest.mark.parametrize("business", ["session"], indirect=True)
def test_who_waits_for_a_key_keeps_no_one_from_sending(
    business: Business, shop: Shop, shops: Callable[..., Shop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An app has `broker_pool_limit` producers; a call that has nothing to send yet takes none of them."""
    monkeypatch.setattr(acceptance, "PATIENCE_ENLISTED", 4.0)  # the sender has so long
    narrow = shops(broker_pool_limit=1)
    waiting, done = threading.Barrier(3, timeout=30), threading.Event()
    told: list[str] = []

    def waiter() -> None:
        with business.begin() as (transaction, _):
            waiting.wait()
            try:
                narrow.bill.apply_async((1,), tenant="A", idempotency_key="held", transaction=transaction)
            except AdmissionRejected as exc:
                told.append("before" if not done.is_set() else exc.reason)

    def sender() -> None:
        waiting.wait()
        for n in range(5):
            narrow.bill.apply_async((n,))
        done.set()

    with business.begin() as (transaction, _):
        shop.bill.apply_async((1,), tenant="A", idempotency_key="held", transaction=transaction)
        together(waiter, waiter, sender)
    assert told == ["idempotency_key_busy"] * 2


def test_one_without_a_transaction_finds_what_an_open_one_leaves(
    shop: Shop, database_url: str, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a key without the tenant's lock in hand, and gets the job if it is there then, or its own."""
    monkeypatch.setattr(acceptance, "LOCK_TIMEOUT", "30s")  # it still waits when its neighbour comes
    monkeypatch.setattr(acceptance, "PATIENCE", 30.0)
    waits = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    business = Business("session", database_url)
    for ends in ("commit", "rollback"):
        held, passed = threading.Event(), threading.Event()
        made: list[str] = []
        shop.statements.clear()

        def holder(ends: str, held: threading.Event, passed: threading.Event, made: list[str]) -> None:
            with Session(business.engine) as session:
                job = shop.bill.apply_async((1,), tenant="A", idempotency_key=ends, transaction=session)
                made.append(job.id)
                held.set()
                assert passed.wait(15), "the tenant's lock is not held by whoever waits for a key"
                getattr(session, ends)()

        def outsider(ends: str, held: threading.Event) -> str:
            held.wait(10)
            return str(shop.bill.apply_async((1,), tenant="A", idempotency_key=ends).id)

        def neighbour(held: threading.Event, passed: threading.Event) -> None:
            held.wait(10)
            asks = shop.statements.count
            eventually(lambda: asks("TAKE_KEYS") > 1 or sql(waits), 10, message="the outsider waits, or asks again")
            shop.bill.apply_async((1,), tenant="A")
            passed.set()

        _, found, _ = together(
            partial(holder, ends, held, passed, made), partial(outsider, ends, held), partial(neighbour, held, passed)
        )
        assert (found == made[0]) == (ends == "commit")
        assert len(sql("SELECT id FROM jobs WHERE idempotency_key = %s", ends)) == 1
    business.engine.dispose()


def test_a_large_batch_with_a_busy_key_keeps_no_place_twice(
    shops: Callable[..., Shop], database_url: str, sql: Sql
) -> None:
    """More keys than are asked for one by one: the statement gives way, and what it had reserved is given back."""
    shop = shops(safe_effects_limits=Limits(tenant_queued=120), safe_effects_max_connections=8)
    business = Business("session", database_url)
    with Session(business.engine) as one, Session(business.engine) as two:
        shop.bill.apply_async((0,), tenant="A", idempotency_key="busy", transaction=one)
        calls = [
            shop.bill.s(n).set(tenant="A", idempotency_key="busy" if n == 57 else f"order-{n}") for n in range(100)
        ]
        found = shop.safe.enqueue_many(calls, transaction=two)
        assert {n: done.reason for n, done in enumerate(found) if done.reason} == {57: "idempotency_key_busy"}
        two.commit()
        one.commit()
    assert len(sql("SELECT id FROM jobs")) == 100
    assert sql("SELECT * FROM reservation") == []
    assert deadlocks(sql) == 0
    business.engine.dispose()


def test_named_canvases_cross(shop: Shop, database_url: str, sql: Sql) -> None:
    """A canvas is refused as a whole; what the caller did before stands."""
    business = Business("session", database_url)
    barrier = threading.Barrier(2, timeout=30)

    def caller(order: str) -> list[str]:
        told = []
        with business.begin() as (transaction, run):
            for name in order:
                barrier.wait()
                canvas = group(shop.bill.s(name, n) for n in range(3))
                try:
                    canvas.apply_async(transaction=transaction, idempotency_key=name)
                    told.append("accepted")
                except AdmissionRejected as exc:
                    told.append(exc.reason)
            barrier.wait()  # nobody has ended while the other asks
            run("UPDATE public.stock SET n = n + 1 WHERE id = 'one'")
        return told

    told = together(partial(caller, "AB"), partial(caller, "BA"))
    assert all(one[0] == "accepted" for one in told)
    assert {one[1] for one in told} == {"idempotency_key_busy"}
    assert len(sql("SELECT id FROM jobs")) == 2 * 3
    assert sql("SELECT n FROM public.stock WHERE id = 'one'") == [{"n": 2}]
    assert deadlocks(sql) == 0
    business.engine.dispose()
