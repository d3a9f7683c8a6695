"""Canvases at the door: accepted whole or not at all, under one name, together with the caller's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from celery import chain, chord, group
from celery.canvas import maybe_signature
from sqlalchemy import text
from sqlalchemy.orm import Session

from celery_safe_effects import AcceptanceUnknown, AdmissionRejected, IdempotencyConflict, Limits, SafeTask
from celery_safe_effects.errors import ConfigurationError, PayloadInvalid
from tests.support.services import Sql
from tests.support.shop import Shop


@pytest.fixture
def shop(shops: Callable[..., Shop]) -> Shop:
    return shops(result_backend="cache+memory://")


def jobs(sql: Sql) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in sql("SELECT * FROM jobs ORDER BY created_at, id")}


def kept(sql: Sql) -> list[str]:
    """Messages of plain tasks that are not out."""
    return [row["id"] for row in sql("SELECT id FROM outbox ORDER BY id")]


def canvases(shop: Shop) -> dict[str, tuple[Any, int, int]]:
    """Canvases with SafeTasks and plain ones, and how many messages of each kind go out at once."""
    safe, plain = shop.bill.si, shop.plain.si
    return {
        "group": (group(safe(1), plain(2), safe(3)), 2, 1),
        "chain": (chain(safe(1), plain(2), safe(3)), 1, 0),
        "chain that begins plain": (chain(plain(1), safe(2)), 0, 1),
        "chord": (chord([safe(1), plain(2)], safe(3)), 1, 1),
        "chord with a plain body": (chord([safe(1), safe(2)], plain(3)), 2, 0),
        "group of chains and chords": (group(chain(safe(1), safe(2)), chord([safe(3), plain(4)], safe(5))), 2, 1),
        "chain with a group": (chain(safe(1), group(safe(2), safe(3)), safe(4)), 1, 0),
        "chain that begins with a group": (chain(group(safe(1), plain(2)), safe(3)), 1, 1),
        "chunks": (shop.plain.chunks([(1,), (2,)], 1).group() | shop.bill.si(3), 0, 2),
    }


CANVASES = [
    "group",
    "chain",
    "chain that begins plain",
    "chord",
    "chord with a plain body",
    "group of chains and chords",
    "chain with a group",
    "chain that begins with a group",
    "chunks",
]


# -- whole or not at all -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CANVASES)
def test_what_goes_out_at_once_is_accepted_together(shop: Shop, sql: Sql, name: str) -> None:
    canvas, safe, plain = canvases(shop)[name]
    shop.statements.clear()
    canvas.apply_async()
    assert len(jobs(sql)) == safe
    assert shop.statements.count("ACCEPT") + shop.statements.count("ACCEPT_MANY") == (1 if safe else 0)
    assert len(shop.published()) == safe + plain
    assert kept(sql) == [], "what is out is not kept"


def test_one_conflict_accepts_none_and_publishes_none(shop: Shop, sql: Sql) -> None:
    holder = shop.bill.apply_async((1,), idempotency_key="taken")
    shop.published()
    conflicting = [
        shop.bill.s(2).set(idempotency_key="taken"),
        shop.bill.s(1).set(idempotency_key="taken"),  # the same call, but under an id that is not this canvas's
        shop.mail.s(1).set(task_id=holder.id),
    ]
    for bad in conflicting:
        for canvas in (
            group(shop.bill.s(5), shop.plain.s(6), bad, shop.bill.s(7)),
            chord([shop.plain.s(5), bad], shop.bill.s(6)),
            chain(bad, shop.bill.s(6)),
        ):
            with pytest.raises(IdempotencyConflict) as caught:
                canvas.apply_async()
            assert caught.value.job_id == holder.id
    assert list(jobs(sql)) == [holder.id]
    assert shop.published() == []
    assert kept(sql) == []


def test_one_refusal_accepts_none_and_publishes_none(shops: Callable[..., Shop], sql: Sql) -> None:
    shop = shops(result_backend="cache+memory://", safe_effects_limits=Limits(tenant_queued=2))
    with pytest.raises(AdmissionRejected) as caught:
        group(shop.bill.s(1), shop.plain.s(2), shop.bill.s(3), shop.bill.s(4)).apply_async()
    assert caught.value.reason == "tenant_queue_limit"
    with pytest.raises(AdmissionRejected):
        group(shop.bill.s(1), shop.bill.s("x" * 200_000)).apply_async()
    with pytest.raises(PayloadInvalid):
        group(shop.bill.s(1), shop.bill.s(object())).apply_async()
    with pytest.raises(PayloadInvalid):
        group(shop.bill.s(1), shop.plain.s(object())).apply_async()
    with pytest.raises(TypeError):
        group(shop.bill.s(1), shop.bill.s(1, 2, 3)).apply_async()
    assert jobs(sql) == {}
    assert shop.published() == []
    assert kept(sql) == []
    group(shop.bill.s(1), shop.plain.s(2), shop.bill.s(3)).apply_async()
    assert len(jobs(sql)) == 2
    assert sql("SELECT value FROM counter WHERE name = 'admission_refusals' ORDER BY label") == [
        {"value": 1},
        {"value": 1},
    ]


def test_a_key_in_anothers_open_transaction_refuses_the_whole(shop: Shop, engine: Any, sql: Sql) -> None:
    with Session(engine) as session:
        shop.bill.apply_async((1,), idempotency_key="busy", transaction=session)
        with pytest.raises(AdmissionRejected) as caught:
            group(shop.bill.s(2), shop.bill.s(1).set(idempotency_key="busy")).apply_async()
        assert caught.value.reason == "idempotency_key_busy"
        session.rollback()
    assert jobs(sql) == {}


def test_a_lost_reply_is_asked_for_again_and_else_said(shop: Shop, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    store, transaction = shop.safe.store, shop.safe.store.transaction
    lost: list[str] = []

    def losing(times: int) -> Callable[..., Any]:
        class Losing:
            def __enter__(self) -> Any:
                self.inner = transaction()
                return self.inner.__enter__()

            def __exit__(self, *exc: Any) -> None:
                self.inner.__exit__(*exc)
                if len(lost) < times and exc[0] is None:
                    lost.append("the reply")
                    raise psycopg.OperationalError("the reply is lost")

        return Losing

    monkeypatch.setattr(store, "transaction", losing(1))
    group(shop.bill.s(1), shop.plain.s(2), shop.bill.s(3)).apply_async()
    assert (len(lost), len(jobs(sql))) == (1, 2)
    assert len(shop.published()) == 3
    assert kept(sql) == []

    lost.clear()
    monkeypatch.setattr(store, "transaction", losing(99))
    with pytest.raises(AcceptanceUnknown) as caught:
        group(shop.bill.s(1), shop.bill.s(2)).apply_async(idempotency_key="named")
    assert caught.value.job_id in jobs(sql)
    assert shop.published() == []
    monkeypatch.undo()
    found = group(shop.bill.s(1), shop.bill.s(2)).apply_async(idempotency_key="named")
    assert caught.value.job_id in {one.id for one in found}
    assert len(jobs(sql)) == 4


def test_a_crash_between_commit_and_publish_loses_nothing(shop: Shop, sql: Sql) -> None:
    _ = shop.app.amqp.send_task_message
    send = shop.safe.publisher.wire.send

    def dies(*args: Any, **kwargs: Any) -> None:
        raise SystemExit

    shop.safe.publisher.wire.send = dies
    with pytest.raises(SystemExit):
        group(shop.plain.s(1), shop.bill.s(2), shop.bill.s(3)).apply_async()
    shop.safe.publisher.wire.send = send
    assert (len(jobs(sql)), len(kept(sql)), shop.published()) == (2, 1, [])
    sql("UPDATE job SET next_publish_at = clock_timestamp()")
    sql("UPDATE outbox SET next_publish_at = clock_timestamp()")
    assert shop.safe.sweep().published == 3
    assert len(shop.published()) == 3
    assert kept(sql) == []


def test_an_unreachable_broker_is_no_error(shop: Shop, sql: Sql) -> None:
    """Accepted is accepted; plain members that belong to it are as durable."""
    _ = shop.app.amqp.send_task_message
    send = shop.safe.publisher.wire.send

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionRefusedError("no broker")

    shop.safe.publisher.wire.send = unreachable
    group(shop.plain.s(1), shop.bill.s(2)).apply_async()
    shop.safe.publisher.wire.send = send
    assert (len(jobs(sql)), len(kept(sql))) == (1, 1)
    sql("UPDATE outbox SET next_publish_at = clock_timestamp()")
    assert shop.safe.sweep().published == 2
    assert len(shop.published()) == 2


def test_canvases_without_safe_tasks_are_celerys_alone(shop: Shop, sql: Sql) -> None:
    shop.statements.clear()
    group(shop.plain.s(1), shop.plain.s(2)).apply_async()
    chord([shop.plain.s(1)], shop.plain.si(2)).apply_async(tenant="acme")
    chain(shop.plain.s(1), shop.plain.si(2)).apply_async()
    assert shop.statements == []
    assert len(shop.published()) == 4


def test_the_callers_canvas_is_not_changed(shop: Shop, sql: Sql) -> None:
    canvas = group(shop.bill.s(1), chain(shop.bill.s(2), shop.bill.si(3)), chord([shop.bill.s(4)], shop.bill.si(5)))
    before = repr([dict(one) for one in canvas.tasks])
    canvas.apply_async(idempotency_key="named", tenant="acme")
    assert repr([dict(one) for one in canvas.tasks]) == before


def test_a_lazy_group_is_accepted_whole(shop: Shop, sql: Sql) -> None:
    result = group(shop.bill.s(n) for n in range(5)).apply_async(idempotency_key="lazy")
    assert set(jobs(sql)) == {one.id for one in result}
    assert {row["idempotency_key"] for row in jobs(sql).values()} == {f"lazy:{n}" for n in range(5)}


# -- together with the caller's rows -----------------------------------------------------------------------------------


def place(session: Session, order: str) -> None:
    session.execute(text("INSERT INTO public.orders VALUES (:id)"), {"id": order})


@pytest.mark.parametrize("name", CANVASES)
def test_canvases_in_a_transaction(shop: Shop, engine: Any, sql: Sql, name: str) -> None:
    canvas, safe, plain = canvases(shop)[name]
    with Session(engine) as session:
        place(session, "rolled back")
        canvas.apply_async(transaction=session)
        session.rollback()
    assert (jobs(sql), kept(sql), shop.published()) == ({}, [], [])
    with Session(engine) as session:
        place(session, "kept")
        with session.begin_nested() as savepoint:
            canvas.clone().apply_async(transaction=session)
            savepoint.rollback()
        canvas.apply_async(transaction=session)
        assert (jobs(sql), kept(sql), shop.published()) == ({}, [], [])
        session.commit()
    assert len(jobs(sql)) == safe
    assert len(shop.published()) == safe + plain
    assert kept(sql) == []


def test_a_refused_canvas_leaves_the_callers_transaction_usable(shop: Shop, engine: Any, sql: Sql) -> None:
    shop.bill.apply_async((1,), idempotency_key="taken")
    shop.published()
    with Session(engine) as session:
        place(session, "order")
        with pytest.raises(IdempotencyConflict):
            group(
                shop.plain.s(1), shop.bill.s(2), shop.bill.s(3).set(idempotency_key="taken"), shop.bill.s(4)
            ).apply_async(transaction=session)
        place(session, "another")
        group(shop.bill.s(8), shop.bill.s(9)).apply_async(transaction=session)
        session.commit()
    assert len(sql("SELECT id FROM public.orders")) == 2
    assert len(jobs(sql)) == 3
    assert len(shop.published()) == 2
    assert kept(sql) == []


def test_limits_within_a_transaction_refuse_the_whole(shops: Callable[..., Shop], engine: Any, sql: Sql) -> None:
    shop = shops(safe_effects_limits=Limits(tenant_queued=3), safe_effects_max_connections=4)
    with Session(engine) as session:
        group(shop.bill.s(1), shop.bill.s(2)).apply_async(transaction=session)
        with pytest.raises(AdmissionRejected):
            group(shop.bill.s(3), shop.bill.s(4)).apply_async(transaction=session)
        session.commit()
    assert len(jobs(sql)) == 2


@pytest.mark.parametrize("kind", ["connection", "psycopg"])
def test_who_cannot_tell_of_the_commit_leaves_it_to_the_sweep(
    shop: Shop, engine: Any, dsn: str, sql: Sql, kind: str
) -> None:
    canvas = group(shop.plain.s(1), shop.bill.s(2))
    if kind == "connection":
        with engine.connect() as connection:
            canvas.apply_async(transaction=connection)
            connection.commit()
    else:
        with psycopg.connect(dsn) as connection:
            canvas.apply_async(transaction=connection)
    assert (len(jobs(sql)), len(kept(sql)), shop.published()) == (1, 1, [])
    shop.safe.sweep()
    assert len(shop.published()) == 2
    assert kept(sql) == []


def test_a_plain_task_takes_a_transaction_too(shop: Shop, engine: Any, sql: Sql) -> None:
    """It has no row, and goes out once, after the commit."""
    for ends, out in (("rollback", 0), ("commit", 1)):
        with Session(engine) as session:
            result = shop.plain.apply_async((1,), transaction=session)
            assert shop.published() == []
            getattr(session, ends)()
        found = shop.published()
        assert found == [result.id] * out
    assert (jobs(sql), kept(sql)) == ({}, [])


def test_what_cannot_be_kept_is_refused(shop: Shop, engine: Any, sql: Sql) -> None:
    with Session(engine) as session:
        inside = shop.bill.s(1).set(transaction=session)
        nested = chord([shop.bill.s(4)], shop.bill.si(5))
        for canvas in (
            group(inside, shop.bill.s(2)),
            chain(shop.plain.s(1), inside),
            chord([shop.plain.s(1)], shop.bill.si(2).set(transaction=session)),
            group(shop.bill.s(3), nested.clone().set(transaction=session)),
            group(shop.bill.s(3), nested.clone().set(idempotency_key="a")),
            group(shop.bill.s(3)).set(transaction=session),
        ):
            with pytest.raises(ConfigurationError, match="of the whole canvas"):
                canvas.apply_async()
    with pytest.raises(ConfigurationError, match="is no SafeTask"):
        shop.plain.apply_async((1,), idempotency_key="a")
    with pytest.raises(ConfigurationError, match="has none"):
        group(shop.plain.s(1), shop.plain.s(2)).apply_async(idempotency_key="a")
    with pytest.raises(PayloadInvalid, match="idempotency_key"):
        group(shop.bill.s(1)).apply_async(idempotency_key=7)
    with pytest.raises(ConfigurationError, match="transaction="):
        group(shop.bill.s(1), shop.bill.s(2)).apply_async(transaction=object())
    assert jobs(sql) == {}
    assert shop.published() == []


# -- names -------------------------------------------------------------------------------------------------------------


def written_keys(signature: Any) -> list[str | None]:
    """The keys of a signature and of what hangs on it."""
    signature = maybe_signature(signature)
    found = [signature.options.get("idempotency_key")] if not signature.subtask_type else []
    for inner in (signature.kwargs.get(name) for name in ("tasks", "header", "body")):
        for one in [] if inner is None else [inner] if isinstance(inner, dict) else inner:
            found += written_keys(one)
    return found


def test_members_are_numbered_in_the_order_in_which_they_are_written(shop: Shop, sql: Sql) -> None:
    safe, plain = shop.bill.si, shop.plain.si
    group(safe(1), plain(2), safe(3)).apply_async(idempotency_key="group")
    chain(safe(1), plain(2), safe(3)).apply_async(idempotency_key="chain")
    chord([safe(1), safe(2)], safe(3)).apply_async(idempotency_key="chord")
    group(chain(safe(1), safe(2)), safe(3)).apply_async(idempotency_key="nested")
    group(safe(1).set(idempotency_key="its own"), safe(2)).apply_async(idempotency_key="own")
    found = {row["idempotency_key"] for row in jobs(sql).values()}
    assert found == {
        *("group:0", "group:2", "chain:0", "chord:0", "chord:1", "nested:0:0", "nested:1", "its own", "own:1")
    }
    later = [body[2] for _, body in shop.messages()]
    chains = [
        [key for step in reversed(embed["chain"]) for key in written_keys(step)] for embed in later if embed["chain"]
    ]
    assert sorted(chains, key=str) == [["nested:0:1"], [None, "chain:2"]]
    assert [written_keys(embed["chord"]) for embed in later if embed["chord"]] == [["chord:2"]] * 2


@pytest.mark.parametrize("name", [name for name in CANVASES if name not in ("chain that begins plain", "chunks")])
def test_the_same_canvas_of_one_name_is_found_again(shop: Shop, sql: Sql, name: str) -> None:
    canvas, safe, plain = canvases(shop)[name]
    first = canvas.apply_async(idempotency_key="named", tenant="acme")
    assert len(shop.published()) == safe + plain
    before = jobs(sql)
    again = canvases(shop)[name][0].apply_async(idempotency_key="named", tenant="acme")
    assert again.as_tuple() == first.as_tuple(), "the results are the same ones"
    assert jobs(sql) == before
    assert shop.published() == [], "nothing is published, the plain members included"
    assert kept(sql) == []
    other = canvases(shop)[name][0].apply_async(idempotency_key="named", tenant="other")
    assert other.as_tuple() != first.as_tuple()
    assert len(jobs(sql)) == 2 * safe


def test_another_canvas_of_one_name_is_a_conflict(shop: Shop, sql: Sql) -> None:
    safe = shop.bill.si
    group(safe(1), safe(2)).apply_async(idempotency_key="named")
    shop.published()
    for other in (
        group(safe(1), safe(3)),
        group(safe(1), safe(2), safe(3)),
        group(safe(1)),
        group(safe(1), shop.mail.si(2)),
        chain(safe(1), safe(2)),
        chord([safe(1), safe(2)], safe(3)),
        group(safe(1), safe(2, cents=5)),
    ):
        with pytest.raises(IdempotencyConflict):
            other.apply_async(idempotency_key="named")
    with pytest.raises(IdempotencyConflict):
        group(shop.bill.s(), shop.bill.s()).apply_async((1,), idempotency_key="named")
    assert len(jobs(sql)) == 2
    assert shop.published() == []
    group(safe(1), safe(2)).set(idempotency_key="named").delay()
    assert len(jobs(sql)) == 2


def test_a_named_canvas_in_a_transaction(shop: Shop, engine: Any, sql: Sql) -> None:
    canvas = group(shop.bill.s(1), shop.plain.s(2), shop.bill.s(3))
    with Session(engine) as session:
        first = canvas.apply_async(idempotency_key="named", transaction=session)
        again = canvas.apply_async(idempotency_key="named", transaction=session)
        session.commit()
    assert first.as_tuple() == again.as_tuple()
    assert (len(jobs(sql)), len(shop.published())) == (2, 3)


def test_arguments_that_are_no_json_name_a_canvas_too(shops: Callable[..., Shop], sql: Sql) -> None:
    shop = shops(task_serializer="pickle", accept_content=["pickle", "json"])
    canvas = group(shop.bill.s({1, 2}), shop.bill.s(frozenset([3])))
    first = canvas.apply_async(idempotency_key="named")
    assert canvas.apply_async(idempotency_key="named").as_tuple() == first.as_tuple()
    with pytest.raises(IdempotencyConflict):
        group(shop.bill.s({1, 2}), shop.bill.s(frozenset([4]))).apply_async(idempotency_key="named")
    assert len(jobs(sql)) == 2


# -- tenants, bodies, eager --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CANVASES)
def test_the_tenant_reaches_every_member_and_every_continuation(shop: Shop, sql: Sql, name: str) -> None:
    canvases(shop)[name][0].apply_async(tenant="acme")
    assert {row["tenant"] for row in jobs(sql).values()} <= {"acme"}

    def tenants(signature: Any) -> list[Any]:
        signature = maybe_signature(signature)
        found = [signature.options.get("tenant")] if signature.task == "shop.bill" else []
        for inner in (signature.kwargs.get(part) for part in ("tasks", "header", "body")):
            for one in [] if inner is None else [inner] if isinstance(inner, dict) else inner:
                found += tenants(one)
        return found

    for _, (_, _, embed) in shop.messages():
        for one in [*(embed["chain"] or []), *([embed["chord"]] if embed["chord"] else [])]:
            assert set(tenants(one)) <= {"acme"}, one


def test_a_canvas_of_a_body_that_runs_again_is_the_same(shop: Shop, sql: Sql) -> None:
    """Half-way, nothing of it is there; afterwards, all of it is, once."""
    made: list[Any] = []

    @shop.app.task(base=SafeTask, bind=True, shared=False, name="shop.parent", effects=[])
    def parent(self: Any) -> None:
        canvas = chord([shop.bill.s(1), shop.plain.s(2), shop.bill.s(3)], shop.bill.si(4))
        if self.job.attempt == 1:
            accept = shop.safe.publisher.acceptance.accept_whole
            shop.safe.publisher.acceptance.accept_whole = die  # type: ignore[method-assign]
            try:
                canvas.apply_async()
            finally:
                shop.safe.publisher.acceptance.accept_whole = accept  # type: ignore[method-assign]
        made.append(canvas.apply_async())
        if self.job.attempt < 4:
            die()

    def die(*args: Any, **kwargs: Any) -> Any:
        sql("UPDATE job SET lease_until = clock_timestamp() - interval '1 s' WHERE status = 'running'")
        shop.safe.sweep()
        sql("UPDATE job SET run_after = NULL, next_publish_at = NULL")
        raise SystemExit

    job = str(uuid4())
    parent.apply(task_id=job)
    assert list(jobs(sql)) == [job]
    for _ in range(3):
        parent.apply(task_id=job)
    assert len({repr(one.as_tuple()) for one in made}) == 1
    rows = {id_: row for id_, row in jobs(sql).items() if id_ != job}
    assert len(rows) == 2
    assert {row["parent_id"] for row in rows.values()} == {job}
    assert {row["status"] for row in rows.values()} == {"queued"}
    assert len(set(shop.published()) - {job}) == 3
    assert jobs(sql)[job]["status"] == "succeeded"


def test_a_body_that_sends_another_canvas_when_it_runs_again_is_parked(shop: Shop, sql: Sql) -> None:
    @shop.app.task(base=SafeTask, bind=True, shared=False, name="shop.fickle", effects=[])
    def fickle(self: Any) -> None:
        group(shop.bill.s(1), shop.bill.s(self.job.attempt)).apply_async()
        if self.job.attempt == 1:
            sql("UPDATE job SET lease_until = clock_timestamp() - interval '1 s' WHERE status = 'running'")
            shop.safe.sweep()
            sql("UPDATE job SET run_after = NULL")
            raise SystemExit

    job = str(uuid4())
    for _ in range(2):
        fickle.apply(task_id=job)
    row = jobs(sql)[job]
    assert (row["status"], row["reason"]) == ("unknown", "replay_mismatch")
    assert len(jobs(sql)) == 3


def test_eager_canvases_keep_their_names(shops: Callable[..., Shop], sql: Sql) -> None:
    shop = shops(task_always_eager=True, result_backend="cache+memory://")
    canvas = group(shop.bill.s(1), shop.plain.s(2), shop.bill.s(3))
    first = canvas.apply_async(idempotency_key="named")
    again = canvas.apply_async(idempotency_key="named")
    assert [one.id for one in first][::2] == [one.id for one in again][::2]
    assert {row["idempotency_key"] for row in jobs(sql).values()} == {"named:0", "named:2"}
    with pytest.raises(ConfigurationError, match="task_always_eager"):
        canvas.apply_async(transaction=object())
