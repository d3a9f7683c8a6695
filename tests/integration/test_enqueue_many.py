"""``enqueue_many``: a verdict for each call, few statements for all of them, and none hurts another."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from celery import Celery, group
from celery import signals as celery_signals
from celery.app.amqp import AMQP
from kombu import serialization
from sqlalchemy import text
from sqlalchemy.orm import Session

from celery_safe_effects import (
    AcceptanceUnknown,
    AdmissionRejected,
    Enqueued,
    IdempotencyConflict,
    Limits,
    SafeEffects,
    SafeTask,
    signals,
)
from celery_safe_effects.engine.tracing import Tracing
from celery_safe_effects.errors import ConfigurationError, StoreUnavailable
from celery_safe_effects.glue.envelope import arguments_digest
from celery_safe_effects.glue.many import PART, Many
from celery_safe_effects.glue.mould import Moulds, Shown
from tests.support.services import Sql
from tests.support.shop import Shop


def statuses(found: list[Enqueued]) -> list[str]:
    return [one.status for one in found]


# -- what it is ------------------------------------------------------------------------------------------------------


def test_signatures_and_tuples_with_their_options(shop: Shop, sql: Sql) -> None:
    eta = datetime.now(timezone.utc) + timedelta(hours=1)
    task_id = str(uuid4())
    found = shop.safe.enqueue_many(
        [
            shop.bill.s("a", cents=1).set(idempotency_key="order-a", tenant="acme", max_attempts=2),
            shop.bill.s("b").set(countdown=3600, queue="other"),
            shop.bill.s("c").set(eta=eta, task_id=task_id),
            (shop.mail, ("d",)),
            ("shop.bill", ["e"], {"cents": 5}, {"tenant": "acme", "expires": 60}),
            dict(shop.bill.s("f")),
        ]
    )
    assert statuses(found) == ["accepted"] * 6
    assert all(one.error is None and one.reason is None for one in found)
    rows = {row["id"]: row for row in sql("SELECT * FROM jobs")}
    a, b, c, d, e, f = (rows[str(one.job_id)] for one in found)
    assert (a["tenant"], a["idempotency_key"], a["task"], a["queue"]) == ("acme", "order-a", "shop.bill", shop.queue)
    assert sql("SELECT max_attempts FROM job WHERE id = %s", a["id"]) == [{"max_attempts": 2}]
    assert b["queue"] == "other"
    assert b["eta"] > datetime.now(timezone.utc) + timedelta(minutes=50)
    assert (c["eta"], c["id"]) == (eta, task_id)
    assert (d["tenant"], d["task"]) == ("mailers", "shop.mail")
    assert (e["tenant"], e["expires_at"] is not None) == ("acme", True)
    assert f["tenant"] == "default"
    assert shop.published() == [a["id"], d["id"], e["id"], f["id"]], "in order; the later ones wait in the database"


def test_nothing_is_nothing(shop: Shop) -> None:
    assert shop.safe.enqueue_many([]) == []
    assert shop.statements == []


def test_thousands_take_a_handful_of_statements(shop: Shop, sql: Sql) -> None:
    """How fast that is, `tests/bench_enqueue.py` measures."""
    shop.bill.delay("warm")
    shop.statements.clear()
    number, single = 2 * PART, 100
    for n in range(single):
        shop.bill.apply_async((n,), idempotency_key=f"single-{n}")
    assert shop.statements == ["ACCEPT"] * single
    shop.statements.clear()
    found = shop.safe.enqueue_many(shop.bill.s(n).set(idempotency_key=f"order-{n}") for n in range(number))
    assert statuses(found) == ["accepted"] * number
    assert shop.statements == ["ACCEPT_MANY"] * 2
    rows = sql("SELECT id FROM job WHERE idempotency_key LIKE 'order-%' ORDER BY seq")
    assert [row["id"] for row in rows] == [one.job_id for one in found], "the first enqueued is the first in the queue"
    assert len(shop.published()) == number + single + 1


def test_a_statement_holds_no_more_than_it_can_take(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_safe_effects.glue.many.PART", 3)
    found = shop.safe.enqueue_many(shop.bill.s(n) for n in range(20))
    assert statuses(found) == ["accepted"] * 20
    assert shop.statements == ["ACCEPT_MANY"] * 7
    assert shop.published() == [one.job_id for one in found]


# -- verdicts --------------------------------------------------------------------------------------------------------


def test_existing_and_conflicting_ones_beside_new_ones(shop: Shop, sql: Sql) -> None:
    first = shop.bill.apply_async(("a",), idempotency_key="a")
    shop.published()
    found = shop.safe.enqueue_many(
        [
            shop.bill.s("a").set(idempotency_key="a"),
            shop.bill.s("other").set(idempotency_key="a"),
            shop.mail.s("a").set(idempotency_key="a", tenant="default"),
            shop.bill.s("a").set(idempotency_key="a", tenant="acme"),
            shop.bill.s("b"),
            shop.bill.s("b").set(task_id=first.id),
        ]
    )
    assert statuses(found) == ["existing", "refused", "refused", "accepted", "accepted", "refused"]
    assert found[0].job_id == first.id
    for place in (1, 2, 5):
        error = found[place].error
        assert isinstance(error, IdempotencyConflict)
        assert error.job_id == first.id
        assert found[place].reason == "idempotency_conflict"
    assert shop.published() == [found[3].job_id, found[4].job_id]
    assert len(sql("SELECT id FROM jobs")) == 3


def test_duplicates_are_as_two_calls_in_order(shop: Shop, sql: Sql) -> None:
    task_id = str(uuid4())
    found = shop.safe.enqueue_many(
        [
            shop.bill.s("a").set(idempotency_key="a"),
            shop.bill.s("a").set(idempotency_key="a"),
            shop.bill.s("not a").set(idempotency_key="a"),
            shop.bill.s("b").set(task_id=task_id),
            shop.bill.s("b").set(task_id=task_id),
            shop.bill.s("not b").set(task_id=task_id, idempotency_key="a"),
        ]
    )
    assert statuses(found) == ["accepted", "existing", "refused", "accepted", "existing", "refused"]
    assert found[0].job_id == found[1].job_id
    assert len(sql("SELECT id FROM jobs")) == 2
    assert shop.published() == [found[0].job_id, task_id]


class Odd:
    """Is no JSON."""


def bad_calls(shop: Shop) -> list[tuple[Any, str, str]]:
    """Each with what is wrong with it, and the reason's text."""
    return [
        (None, "payload_invalid", "no call"),
        ("shop.bill", "payload_invalid", "no call"),
        ({"args": (1,)}, "payload_invalid", "no call"),
        ((), "payload_invalid", "no call"),
        ((7, (1,)), "payload_invalid", "neither a task"),
        ((shop.bill, "abc"), "payload_invalid", "two mappings"),
        ((shop.bill, (1,), [1]), "payload_invalid", "two mappings"),
        (shop.plain.s(1), "payload_invalid", "no SafeTask"),
        (("shop.nobody", (1,)), "payload_invalid", "not registered here"),
        (group(shop.bill.s(1), shop.bill.s(2)), "payload_invalid", "no single call"),
        (shop.bill.s(1) | shop.bill.s(2), "payload_invalid", "no single call"),
        (shop.bill.s(1).set(transaction=object()), "payload_invalid", "transaction="),
        (shop.bill.s(1, 2, 3), "TypeError", ""),
        (shop.bill.s(Odd()), "payload_invalid", "cannot be encoded"),
        (shop.bill.s(1).set(idempotency_key=""), "payload_invalid", "idempotency_key"),
        (shop.bill.s(1).set(idempotency_key="a\x00b"), "payload_invalid", "idempotency_key"),
        (shop.bill.s(1).set(tenant=7), "payload_invalid", "tenant"),
        (shop.bill.s(1).set(max_attempts=0), "payload_invalid", "max_attempts"),
        (shop.bill.s(1).set(queue="a\x00b"), "payload_invalid", "cannot store"),
        (shop.bill.s("x" * 200_000), "payload_too_large", "bytes"),
    ]


def test_bad_ones_are_refused_by_name_and_hurt_no_other(shop: Shop, sql: Sql) -> None:
    bad = bad_calls(shop)
    calls: list[Any] = [shop.bill.s("first")]
    for call, _, _ in bad:
        calls += [call, shop.bill.s("good")]
    found = shop.safe.enqueue_many(calls)
    for (call, reason, told), one in zip(bad, found[1::2], strict=True):
        assert (one.status, one.reason) == ("refused", reason), (call, one)
        assert told in str(one.error), one
    assert statuses(found[::2]) == ["accepted"] * (len(bad) + 1)
    assert len(sql("SELECT id FROM jobs")) == len(bad) + 1
    assert shop.published() == [one.job_id for one in found[::2]]


def test_a_limit_refuses_what_is_beyond_it_and_counts_no_existing_one(shops: Callable[..., Shop], sql: Sql) -> None:
    shop = shops(safe_effects_limits=Limits(tenant_queued=3, tenants={"big": Limits(tenant_queued=100)}))
    told: list[str] = []

    def receiver(sender: Any = None, error: Any = None, **_: Any) -> None:
        told.append(f"{sender}: {error.reason}")

    signals.admission_rejected.connect(receiver)
    old = shop.bill.apply_async(("old",), idempotency_key="old")
    found = shop.safe.enqueue_many(
        [
            shop.bill.s("old").set(idempotency_key="old"),
            *(shop.bill.s(n) for n in range(4)),
            *(shop.bill.s(n).set(tenant="big") for n in range(4)),
        ]
    )
    assert statuses(found) == ["existing", "accepted", "accepted", "refused", "refused", *["accepted"] * 4]
    assert found[0].job_id == old.id
    error = found[3].error
    assert isinstance(error, AdmissionRejected)
    assert (error.reason, error.limit, error.current, error.retry_after) == ("tenant_queue_limit", 3, 3, 1.0)
    assert told == ["shop.bill: tenant_queue_limit"] * 2
    assert sql("SELECT value FROM counter WHERE name = 'admission_refusals'") == [{"value": 2}]
    assert statuses(shop.safe.enqueue_many([shop.bill.s("more")])) == ["refused"]


def test_batches_of_several_tenants_under_limits_do_not_deadlock_and_are_exact(
    shops: Callable[..., Shop], sql: Sql
) -> None:
    shop = shops(safe_effects_limits=Limits(tenant_queued=25), safe_effects_max_connections=8)
    tenants = [f"t{n}" for n in range(6)]
    barrier = threading.Barrier(4, timeout=20)
    found: list[list[Enqueued]] = []

    def caller(turn: int) -> None:
        order = tenants[turn:] + tenants[:turn]
        barrier.wait()
        found.append(shop.safe.enqueue_many(shop.bill.s(n).set(tenant=t) for n in range(10) for t in order))

    threads = [threading.Thread(target=caller, args=(turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {one.reason for part in found for one in part} == {None, "tenant_queue_limit"}
    counts = sql("SELECT count(*) AS n FROM jobs GROUP BY tenant")
    assert [row["n"] for row in counts] == [25] * 6


# -- the database ------------------------------------------------------------------------------------------------------


def test_together_with_the_callers_rows(shop: Shop, engine: Any, sql: Sql) -> None:
    shop.bill.apply_async(("taken",), idempotency_key="taken")
    shop.published()
    calls = [
        shop.bill.s("a").set(idempotency_key="a"),
        shop.bill.s("a").set(idempotency_key="a"),
        shop.bill.s("other").set(idempotency_key="taken"),
        shop.bill.s(Odd()),
        shop.bill.s("b"),
    ]
    for ends in ("rollback", "commit"):
        with Session(engine) as session:
            session.execute(text("INSERT INTO public.orders VALUES (:id)"), {"id": "order"})
            found = shop.safe.enqueue_many(calls, transaction=session)
            assert statuses(found) == ["accepted", "existing", "refused", "refused", "accepted"]
            session.execute(text("INSERT INTO public.orders VALUES (:id)"), {"id": "still usable"})
            assert shop.published() == []
            assert len(sql("SELECT id FROM jobs")) == 1
            getattr(session, ends)()
        if ends == "rollback":
            assert len(sql("SELECT id FROM jobs")) == 1
            assert sql("SELECT id FROM public.orders") == []
    assert {row["id"] for row in sql("SELECT id FROM jobs")} > {found[0].job_id, found[4].job_id}
    assert sorted(shop.published()) == sorted([str(found[0].job_id), str(found[4].job_id)])
    assert len(sql("SELECT id FROM public.orders")) == 2


def test_limits_within_a_callers_transaction(shops: Callable[..., Shop], engine: Any, sql: Sql) -> None:
    shop = shops(safe_effects_limits=Limits(tenant_queued=3), safe_effects_max_connections=4)
    with Session(engine) as one, Session(engine) as two:
        assert statuses(shop.safe.enqueue_many([shop.bill.s(n) for n in range(2)], transaction=one)) == ["accepted"] * 2
        found = shop.safe.enqueue_many([shop.bill.s(n) for n in range(3)], transaction=two)
        assert statuses(found) == ["accepted", "refused", "refused"], "places are kept for the transaction that is open"
        one.commit()
        two.commit()
    assert len(sql("SELECT id FROM jobs")) == 3
    assert sql("SELECT job_id FROM reservation") == []


def test_what_is_no_transaction_is_refused(shop: Shop, sql: Sql) -> None:
    with pytest.raises(ConfigurationError, match="transaction="):
        shop.safe.enqueue_many([shop.bill.s(1)], transaction=object())
    assert sql("SELECT id FROM jobs") == []


def test_a_key_in_anothers_open_transaction_holds_up_no_other(shop: Shop, engine: Any, sql: Sql) -> None:
    with Session(engine) as session:
        shop.bill.apply_async(("busy",), idempotency_key="busy", transaction=session)
        found = shop.safe.enqueue_many(
            shop.bill.s("busy" if n == 31 else n).set(idempotency_key="busy" if n == 31 else f"order-{n}")
            for n in range(64)
        )
        assert statuses(found) == ["refused" if n == 31 else "accepted" for n in range(64)]
        error = found[31].error
        assert isinstance(error, AdmissionRejected)
        assert (error.reason, error.retry_after) == ("idempotency_key_busy", 1.0)
        session.commit()
    assert statuses(shop.safe.enqueue_many([shop.bill.s("busy").set(idempotency_key="busy")])) == ["existing"]


def test_many_busy_keys_end_the_search_in_time(shop: Shop, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever enqueues the same batch while the first is open gets an answer, not a wait for each key."""
    monkeypatch.setattr("celery_safe_effects.glue.acceptance.PATIENCE_WITH_KEYS", 0.5)
    calls = [shop.bill.s(n).set(idempotency_key=f"order-{n}") for n in range(200)]
    with Session(engine) as session:
        assert statuses(shop.safe.enqueue_many(calls, transaction=session)) == ["accepted"] * 200
        started = time.monotonic()
        found = shop.safe.enqueue_many([*calls, shop.bill.s("free")])
        assert {one.reason for one in found[:200]} == {"idempotency_key_busy"}
        assert time.monotonic() - started < 20
        session.rollback()


def test_a_database_that_is_away_or_does_not_say(shop: Shop, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    store = shop.safe.store
    run = store._execute

    def failing(conn: Any, statement: str, params: Any) -> Any:
        raise StoreUnavailable("away")

    monkeypatch.setattr(store, "_execute", failing)
    found = shop.safe.enqueue_many([shop.bill.s(1), shop.bill.s(2)])
    assert [(one.status, one.reason) for one in found] == [("refused", "store_unavailable")] * 2

    def losing(conn: Any, statement: str, params: Any) -> Any:
        run(conn, statement, params)
        raise psycopg.OperationalError("the reply is lost")

    monkeypatch.setattr(store, "_execute", losing)
    found = shop.safe.enqueue_many([shop.bill.s(1), shop.bill.s(2)])
    assert statuses(found) == ["unknown"] * 2
    assert all(isinstance(one.error, AcceptanceUnknown) and one.error.job_id == one.job_id for one in found)
    assert {row["id"] for row in sql("SELECT id FROM jobs")} == {one.job_id for one in found}
    assert shop.published() == []

    lost: list[str] = []

    def losing_once(conn: Any, statement: str, params: Any) -> Any:
        found = run(conn, statement, params)
        if statement == "ACCEPT_MANY" and not lost:
            lost.append(statement)
            raise psycopg.OperationalError("the reply is lost")
        return found

    monkeypatch.setattr(store, "_execute", losing_once)
    again = shop.safe.enqueue_many([shop.bill.s(3), shop.bill.s(4)])
    assert (statuses(again), lost) == (["accepted"] * 2, ["ACCEPT_MANY"])
    assert shop.published() == [one.job_id for one in again], "it found out that it got through, and publishes"


def test_an_unreachable_broker_leaves_accepted_work_to_the_sweep(shop: Shop, sql: Sql) -> None:
    send, down = shop.safe.publisher.wire.send, [True]
    assert send is None or callable(send)
    _ = shop.app.amqp.send_task_message
    send = shop.safe.publisher.wire.send
    assert send is not None

    def unreachable(*args: Any, **kwargs: Any) -> Any:
        if down:
            raise ConnectionRefusedError("no broker")
        return send(*args, **kwargs)

    shop.safe.publisher.wire.send = unreachable
    found = shop.safe.enqueue_many([shop.bill.s(n) for n in range(3)])
    assert statuses(found) == ["accepted"] * 3
    assert shop.published() == []
    down.clear()
    shop.safe.sweep()
    assert sorted(shop.published()) == sorted(str(one.job_id) for one in found)


# -- in a job, and at once ---------------------------------------------------------------------------------------------


def test_in_a_job_that_runs_again_it_is_the_same_jobs(shop: Shop, sql: Sql) -> None:
    answers: list[list[Enqueued]] = []

    @shop.app.task(base=SafeTask, bind=True, shared=False, name="shop.parent", effects=[])
    def parent(self: Any) -> None:
        answers.append(shop.safe.enqueue_many(shop.bill.s(n) for n in range(3)))
        if self.job.attempt == 1:
            sql("UPDATE job SET lease_until = clock_timestamp() - interval '1 s' WHERE id = %s", self.job.id)
            shop.safe.sweep()
            sql("UPDATE job SET run_after = NULL WHERE id = %s", self.job.id)
            raise SystemExit

    job = str(uuid4())
    for _ in range(2):
        parent.apply(task_id=job)
    assert answers[0] == answers[1]
    assert statuses(answers[0]) == ["accepted"] * 3
    rows = sql("SELECT id, tenant, parent_id FROM jobs WHERE task = 'shop.bill'")
    assert {row["id"] for row in rows} == {one.job_id for one in answers[0]}
    assert {row["parent_id"] for row in rows} == {job}


def test_eager_calls_run_at_once(shops: Callable[..., Shop], sql: Sql) -> None:
    shop = shops(task_always_eager=True)
    found = shop.safe.enqueue_many([shop.bill.s(1), shop.plain.s(1), shop.bill.s(2).set(idempotency_key="a")])
    assert statuses(found) == ["accepted", "refused", "accepted"]
    rows = sql("SELECT id, status FROM jobs")
    assert {row["id"]: row["status"] for row in rows} == {found[0].job_id: "succeeded", found[2].job_id: "succeeded"}
    with pytest.raises(ConfigurationError, match="task_always_eager"):
        shop.safe.enqueue_many([shop.bill.s(1)], transaction=object())


def test_a_short_way_to_show_arguments_shows_the_same(shop: Shop) -> None:
    """Flower and logs show what Celery's own way shows; whatever may differ goes that way."""
    for args, kwargs in (
        ((), {}),
        ((1, "a b", None, True, 1.5), {"cents": 3}),
        (("ü",), {"cents": -1}),
        (("it's",), {}),
        (("a\n", '"', "\\"), {}),
        (([1, {"a": 2}],), {}),
        (("x" * 5000,), {}),
    ):
        signature = shop.bill.signature(args, kwargs)
        shown = Shown.of(signature.args, signature.kwargs, shop.app.amqp.argsrepr_maxsize)
        message = shop.app.amqp.as_task_v2("id", "shop.bill", args, kwargs)
        if shown is not None:
            assert shown.reprs["argsrepr"] == message.headers["argsrepr"]
            assert shown.reprs["kwargsrepr"] == message.headers["kwargsrepr"]
            assert shown.body("null") == serialization.dumps((args, kwargs, None), "json")[2]
            assert shown.digest('"shop.bill"') == arguments_digest("shop.bill", args, kwargs)
    assert Shown.of(("plain", True, 0.5, None, 10**30), {"b": 1, "a": 2}, 1024)
    for odd in (float("nan"), float("inf"), [1], "it's", signal.SIGTERM):
        assert Shown.of((odd,), {}, 1024) is None


# -- messages of one form ----------------------------------------------------------------------------------------------


class Casts:
    """Counts the calls that were cast after the first of their form."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        self.off = False
        really = Moulds.cast

        def cast(moulds: Moulds, *args: Any) -> Any:
            found = None if self.off else really(moulds, *args)
            self.number += found is not None
            return found

        monkeypatch.setattr(Moulds, "cast", cast)


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> Casts:
    return Casts(monkeypatch)


def gathered(shop: Shop, calls: list[Any]) -> list[dict[str, Any]]:
    """What would be accepted and published, whatever its ids."""
    found = []
    for item in Many(shop.safe.publisher, None)._make(calls):
        assert item.gathered is not None, item.error
        hint, candidate = item.gathered
        if isinstance(hint.parts[2], str):  # encoded already
            encoded = hint.options.pop("content_type"), hint.options.pop("content_encoding"), hint.parts[2]
            assert encoded == serialization.dumps(candidate.envelope.body, "json")
            hint = hint._replace(parts=(*hint.parts[:2], candidate.envelope.body, None))
        envelope, params = (
            candidate.envelope,
            {**candidate.params, "envelope": json.loads(candidate.params["envelope"])},
        )
        everything = {
            "hint": [hint.name, list(hint.parts), {k: repr(v) for k, v in hint.options.items()}],
            "envelope": [envelope.headers, envelope.properties, envelope.body, repr(sorted(envelope.options.items()))],
            "params": params,
        }
        text = json.dumps(everything, sort_keys=True, default=repr)
        assert candidate.id in text
        found.append(json.loads(text.replace(candidate.id, "the id")))
    return found


@pytest.mark.parametrize(
    "conf",
    [{}, {"result_backend": "rpc://"}, {"task_ignore_result": True, "task_routes": {"shop.*": {"priority": 3}}}],
    ids=["plain", "rpc", "routes"],
)
def test_what_is_cast_is_what_celery_makes(shops: Callable[..., Shop], casts: Casts, conf: dict[str, Any]) -> None:
    shop = shops(**conf)
    forms: list[dict[str, Any]] = [
        {},
        {"idempotency_key": "k"},
        {"tenant": "acme"},
        {"tenant": "acme", "pool": "p", "max_attempts": 2, "max_age": 60},
        {"queue": "other", "priority": 4},
        {"queue": shop.queue, "tenant": "b"},
    ]
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = [(("a",), {}), ((1.5,), {"cents": 2}), (("b", True), {})]
    calls = [task.signature(a, k).set(**o) for task in (shop.bill, shop.mail) for o in forms for a, k in arguments[:2]]
    calls += [(shop.bill, a, k, {"tenant": "tuple"}) for a, k in arguments]
    calls = [call for call in calls if not (isinstance(call, dict) and call["task"] == "shop.mail" and call["kwargs"])]
    cast = gathered(shop, calls)
    number = casts.number
    assert number >= len(calls) // 2
    casts.off = True
    for one, other in zip(cast, gathered(shop, calls), strict=True):
        assert one == other
    assert casts.number == number


def test_what_may_depend_on_its_arguments_goes_all_the_way(shops: Callable[..., Shop], casts: Casts) -> None:
    shop = shops()

    def twice(shop: Shop, task: Any, *args: Any, **options: Any) -> None:
        found = shop.safe.enqueue_many([task.s(*args).set(**options) for _ in range(2)])
        assert statuses(found) == ["accepted", "accepted"], (args, options, found)
        assert casts.number == 0, (args, options)

    twice(shop, shop.bill, [1])
    twice(shop, shop.bill, "it's")
    twice(shop, shop.bill, 1, countdown=60)
    twice(shop, shop.bill, 1, expires=60)
    twice(shop, shop.bill, 1, link=shop.mail.s())
    twice(shop, shop.bill, 1, headers={"a": 1})

    class Own(SafeTask):
        def apply_async(self, args: Any = None, *more: Any, **options: Any) -> Any:
            return super().apply_async((f"{args[0]}!",), *more, **options)

    class Shadowed(SafeTask):
        def shadow_name(self, args: Any, kwargs: Any, options: Any) -> str:
            return str(args)

    def body(x: Any) -> None:
        """Does nothing."""

    for base in (Own, Shadowed):
        task = shop.app.task(base=base, shared=False, name=f"shop.{base.__name__}", effects=[])(body)
        twice(shop, task, "a")

    secret = shop.app.task(base=SafeTask, shared=False, name="shop.secret", effects=[], redact=["x"])(body)
    shop.published()
    twice(shop, secret, "4111")
    assert not [headers for headers, _ in shop.messages() if "4111" in headers["argsrepr"]]

    class Traced(Tracing):
        def sends(self, headers: dict[str, Any], again_of: Any) -> None:
            headers["traceparent"] = headers["id"]

    shop.safe.hooks = replace(shop.safe.hooks, tracing=Traced())
    twice(shop, shop.bill, 1)
    assert {headers["traceparent"] == headers["id"] for headers, _ in shop.messages()} == {True}

    class OwnAmqp(AMQP):
        def as_task_v2(self, task_id: str, name: str, args: Any = None, *more: Any, **options: Any) -> Any:
            return super().as_task_v2(task_id, name, [f"{args[0]}!"], *more, **options)

    class OwnCelery(Celery):
        def send_task(self, name: str, args: Any = None, *more: Any, **options: Any) -> Any:
            return super().send_task(name, [f"{args[0]}!"], *more, **options)

    for app in (Celery(amqp=OwnAmqp, set_as_current=False), OwnCelery(set_as_current=False)):
        app.conf.update(shop.app.conf.changes, broker_url="memory://")
        safe = SafeEffects(app)
        task = app.task(base=SafeTask, shared=False, name="shop.bill", effects=[])(body)
        assert statuses(safe.enqueue_many([task.s("a"), task.s("b")])) == ["accepted"] * 2
        safe.close()
        assert [body[0] for _, body in shop.messages()] == [["a!"], ["b!"]]

    def router(name: str, args: Any, *_: Any, **__: Any) -> Any:
        return {"priority": args[0]}

    for conf in ({"task_routes": [router]}, {"task_send_sent_event": True}):
        other = shops(**conf)
        twice(other, other.bill, 1)


def test_a_form_of_another_serializer_goes_all_the_way(shops: Callable[..., Shop], casts: Casts) -> None:
    """Messages are cast as JSON, so a form has to make the same message as the one that went all the way."""
    other = shops(task_serializer="yaml", accept_content=["yaml", "json"])
    assert statuses(other.safe.enqueue_many([other.bill.s(n) for n in range(3)])) == ["accepted"] * 3
    assert casts.number == 0


def test_who_looks_at_messages_on_their_way_sees_their_arguments(shop: Shop, casts: Casts) -> None:
    seen: list[Any] = []

    def look(body: Any = None, **_: Any) -> None:
        seen.append(body)

    celery_signals.before_task_publish.connect(look)
    try:
        shop.safe.enqueue_many([shop.bill.s(n) for n in range(3)])
    finally:
        celery_signals.before_task_publish.disconnect(look)
    assert casts.number == 2
    assert [tuple(args) for args, *_ in seen] == [(0,), (1,), (2,)]


def test_a_cast_message_is_measured_too(shops: Callable[..., Shop], casts: Casts) -> None:
    shop = shops(safe_effects_max_payload=2000)
    found = shop.safe.enqueue_many([shop.bill.s("a"), shop.bill.s("b"), shop.bill.s("x" * 900)])
    assert [one.reason for one in found] == [None, None, "payload_too_large"]
    assert casts.number == 1


def test_a_callers_connection_may_write_values_into_its_statements(shop: Shop, database_url: str, sql: Sql) -> None:
    """As Django's does, though statements of ours ask for the binary format."""
    dsn = database_url.replace("+psycopg", "")
    with psycopg.connect(dsn, cursor_factory=psycopg.ClientCursor) as connection:
        found = shop.safe.enqueue_many([shop.bill.s(n) for n in range(3)], transaction=connection)
    assert statuses(found) == ["accepted"] * 3
    assert len(sql("SELECT id FROM jobs")) == 3


def test_bad_ones_of_a_form_are_refused_as_others(shop: Shop, casts: Casts) -> None:
    calls = [
        shop.bill.s("good"),
        shop.bill.s("good", 1, 2, 3),
        shop.bill.s("x" * 900).set(idempotency_key=""),
        shop.bill.s("good").set(idempotency_key=7),
        shop.bill.s("good").set(idempotency_key="a"),
    ]
    found = shop.safe.enqueue_many(calls)
    assert casts.number == 1
    casts.off = True
    shop.published()
    again = shop.safe.enqueue_many(calls)
    assert statuses(found) == ["accepted", *["refused"] * 3, "accepted"]
    assert [(one.reason, str(one.error)) for one in found[:-1]] == [(one.reason, str(one.error)) for one in again[:-1]]
    assert again[-1] == Enqueued("existing", found[-1].job_id, None)
