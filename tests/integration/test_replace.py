"""``self.replace()``: who takes over the id, what is stored with the end, and what a crash leaves behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from celery import chain, chord, group

from celery_safe_effects import OutcomeUnknown, effect
from celery_safe_effects.errors import StoreUnavailable
from tests.support.services import Sql
from tests.support.shop import Delivery, Killed, Shop

KINDS: dict[str, dict[str, Any]] = {"effects": {"effects": []}, "whole": {}}
"""Tasks with declared effects, and tasks whose whole body is one."""


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return KINDS[request.param]


class Parts:
    """Tasks for the parts of canvases; all of them count their runs."""

    def __init__(self, shop: Shop, kind: dict[str, Any]) -> None:
        self.ran: list[str] = []

        def body(self_: Any, *args: Any) -> Any:
            self.ran.append(f"safe{args!r}")
            return sum(args[0]) if args and isinstance(args[0], list) else sum(args)

        self.safe = shop.task("safe", body, **kind)

        @shop.app.task(shared=False, name="shop.adds")
        def adds(*args: Any) -> Any:
            self.ran.append(f"plain{args!r}")
            return sum(args[0]) if args and isinstance(args[0], list) else sum(args)

        self.plain = adds


@pytest.fixture
def shop(shops: Callable[..., Shop]) -> Shop:
    return shops(result_backend="cache+memory://", safe_effects_republish_after=600)


@pytest.fixture
def parts(shop: Shop, kind: dict[str, Any]) -> Parts:
    return Parts(shop, kind)


def canvases(parts: Parts) -> dict[str, tuple[Any, Any]]:
    """What a task may replace itself by, and the result."""
    safe, plain = parts.safe, parts.plain
    return {
        "group": (group(safe.s(1), safe.s(2)), [1, 2]),
        "group of one": (group(safe.s(1)), [1]),
        "mixed group": (group(plain.s(1), safe.s(2)), [1, 2]),
        "plain group": (group(plain.s(1), plain.s(2)), [1, 2]),
        "chain": (chain(safe.s(1), safe.s(2), safe.s(3)), 6),
        "chain that ends plain": (chain(safe.s(1), plain.s(2)), 3),
        "chain that begins plain": (chain(plain.s(1), safe.s(2)), 3),
        "chain that ends with a group": (chain(safe.s(1), group(safe.s(2), safe.s(3))), [3, 4]),
        "chord": (chord([safe.s(1), safe.s(2)], safe.s()), 3),
        "chord that ends plain": (chord([safe.s(1), safe.s(2)], plain.s()), 3),
        "chord with a chain": (chord([safe.s(1), safe.s(2)], chain(safe.s(), safe.s(10))), 13),
        "group of chains": (group(chain(safe.s(1), safe.s(2)), safe.s(5)), [3, 5]),
        "map": (safe.map([1, 2]), [1, 2]),
    }


CANVASES = [
    "group",
    "group of one",
    "mixed group",
    "plain group",
    "chain",
    "chain that ends plain",
    "chain that begins plain",
    "chain that ends with a group",
    "chord",
    "chord that ends plain",
    "chord with a chain",
    "group of chains",
]


def outbox(sql: Sql) -> list[str]:
    return [row["id"] for row in sql("SELECT id FROM outbox")]


def others(sql: Sql, job: str) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in sql("SELECT * FROM jobs WHERE id <> %s ORDER BY created_at", job)}


def row(sql: Sql, job: str) -> dict[str, Any]:
    return sql("SELECT * FROM jobs WHERE id = %s", job)[0]


def by(shop: Shop, kind: dict[str, Any], made: Callable[[], Any], **options: Any) -> Any:
    """A task that replaces itself."""

    def body(self: Any, *args: Any) -> Any:
        return self.replace(made())

    return shop.task("by", body, **{**kind, **options})


# -- one task ----------------------------------------------------------------------------------------------------------


def test_a_safe_task_takes_over_id_and_row(shop: Shop, sql: Sql, kind: dict[str, Any], parts: Parts) -> None:
    """With attempts of its own: what it replaced has had its runs."""
    task = by(shop, kind, lambda: parts.safe.s(5).set(countdown=2), max_attempts=1, ignore_result=True)
    result = task.delay()
    first = shop.take()
    assert first is not None
    shop.deliver(first)
    found = row(sql, result.id)
    assert (found["status"], found["task"], found["reason"]) == ("queued", "shop.safe", "replaced")
    assert found["attempts"] == 0
    assert sql("SELECT run_after > clock_timestamp() AS later FROM job")[0]["later"], "its countdown counts"
    sql("UPDATE job SET run_after = NULL, next_publish_at = clock_timestamp()")
    shop.deliver(first)
    assert row(sql, result.id)["status"] == "queued", "a message of before the replacement is stale"
    shop.safe.sweep()
    shop.work()
    found = row(sql, result.id)
    assert (found["status"], found["result"], found["attempts"]) == ("succeeded", 5, 1)
    assert shop.app.AsyncResult(result.id).get() == 5
    keys = {r["key"].removeprefix(result.id) for r in sql("SELECT key FROM operations")}
    assert keys == (set() if kind else {":body", ":1:body"}), "keys gain the generation"
    assert parts.ran == ["safe(5,)"]


def test_a_plain_task_is_stored_with_the_end(shop: Shop, sql: Sql, kind: dict[str, Any], parts: Parts) -> None:
    result = by(shop, kind, lambda: parts.plain.s(5)).delay()
    shop.work()
    found = row(sql, result.id)
    assert (found["status"], found["outcome_ref"]) == ("succeeded", f"replaced:{result.id}")
    assert found["settled_at"] is not None
    assert parts.ran == ["plain(5,)"]
    assert shop.app.AsyncResult(result.id).get() == 5
    assert outbox(sql) == []


@pytest.mark.parametrize("what", ["plain", "group"])
def test_a_crash_between_the_end_and_the_publish(
    shop: Shop, sql: Sql, kind: dict[str, Any], parts: Parts, what: str
) -> None:
    canvas = {"plain": parts.plain.s(5), "group": group(parts.plain.s(1), parts.safe.s(2))}[what]
    result = by(shop, kind, lambda: canvas).delay()
    send = shop.safe.publisher.wire.send

    def dies(*args: Any, **kwargs: Any) -> None:
        raise Killed

    delivery = shop.take()
    assert delivery is not None
    shop.safe.publisher.wire.send = dies
    shop.deliver(delivery)
    shop.safe.publisher.wire.send = send
    assert row(sql, result.id)["status"] == "succeeded"
    assert (len(outbox(sql)), parts.ran) == (1, [])
    shop.deliver(delivery)
    assert parts.ran == [], "a second delivery is stale"
    sql("UPDATE outbox SET next_publish_at = clock_timestamp()")
    sql("UPDATE job SET next_publish_at = clock_timestamp() WHERE status = 'queued'")
    shop.safe.sweep()
    shop.work()
    assert shop.app.AsyncResult(result.id).get(timeout=5) == {"plain": 5, "group": [1, 2]}[what]
    assert len(parts.ran) == {"plain": 1, "group": 2}[what]
    assert outbox(sql) == []


# -- canvases ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CANVASES)
def test_a_canvas_goes_on_in_its_place(shop: Shop, sql: Sql, kind: dict[str, Any], parts: Parts, name: str) -> None:
    """Callbacks, the rest of a chain and the chord that it belongs to come after it, under the same ids."""
    task = by(shop, kind, lambda: canvases(parts)[name][0])
    expected = canvases(parts)[name][1]
    total = sum(expected) if isinstance(expected, list) else expected
    shown: list[Any] = []

    @shop.app.task(shared=False, name="shop.show")
    def show(*args: Any) -> Any:
        shown.append(args)

    alone = task.apply_async(link=show.s("linked"), tenant="acme")
    in_chain = chain(task.s(), parts.safe.s()).apply_async() if isinstance(expected, list) else None
    in_chord = chord([task.s(), parts.safe.s(7)], show.s()).apply_async()
    shop.work()
    assert shop.app.AsyncResult(alone.id).get(timeout=5) == expected
    assert (expected, "linked") in shown
    assert ([expected, 7],) in shown
    if in_chain is not None:
        assert in_chain.get(timeout=5) == total
        assert in_chain.parent.get(timeout=5) == expected
    assert in_chord.id
    found = row(sql, alone.id)
    assert (found["status"], found["outcome_ref"]) == ("succeeded", f"replaced:{alone.id}")
    members = [one for one in others(sql, alone.id).values() if one["parent_id"] == alone.id]
    assert {one["tenant"] for one in members} <= {"acme"}
    assert not sql("SELECT id FROM jobs WHERE status <> 'succeeded'")
    assert outbox(sql) == []


def test_within_a_replacement(shop: Shop, sql: Sql, kind: dict[str, Any], parts: Parts) -> None:
    """Replaced by what replaces itself, three levels down, inside a chord."""
    inner = by(shop, kind, lambda: group(parts.safe.s(1), parts.safe.s(2)))

    def middle_body(self: Any, *args: Any) -> Any:
        return self.replace(chain(inner.s(), parts.safe.s()))

    middle = shop.task("middle", middle_body, **kind)

    def outer_body(self: Any, *args: Any) -> Any:
        return self.replace(chord([middle.s(), parts.safe.s(4)], parts.safe.s()))

    outer = shop.task("outer", outer_body, **kind)
    result = chord([outer.s(), parts.safe.s(10)], parts.safe.s()).apply_async()
    shop.work()
    assert result.get(timeout=5) == 17
    assert not sql("SELECT id FROM jobs WHERE status <> 'succeeded'")


@pytest.mark.filterwarnings("ignore:.*task_allow_error_cb_on_chord_header")
def test_errbacks_of_the_replaced_job(shop: Shop, sql: Sql, kind: dict[str, Any]) -> None:
    told: list[str] = []

    @shop.app.task(shared=False, name="shop.told")
    def failed(job_id: str) -> None:
        told.append(job_id)

    def fails(self: Any, *args: Any) -> Any:
        raise KeyError("no")

    bad = shop.task("fails", fails, effects=[])
    result = by(shop, kind, lambda: group(bad.s(), shop.bill.si(1))).apply_async(link_error=failed.s())
    shop.work()
    assert row(sql, result.id)["outcome_ref"] == f"replaced:{result.id}"
    assert shop.app.AsyncResult(result.id).state == "FAILURE"
    assert told == [result.id]


# -- whole or not at all -----------------------------------------------------------------------------------------------


def test_the_end_and_what_goes_on_stand_or_fall_together(
    shop: Shop, sql: Sql, kind: dict[str, Any], parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database goes away in the middle, and later the reply is lost: one end, one replacement."""
    result = by(shop, kind, lambda: group(parts.safe.s(1), parts.plain.s(2))).delay()
    store, transaction = shop.safe.store, shop.safe.store.transaction
    seen: list[str] = []

    class Failing:
        def __enter__(self) -> Any:
            self.inner = transaction()
            run = self.inner.__enter__()

            def failing(statement: str, /, **params: Any) -> Any:
                if statement == "POST" and "failed" not in seen:
                    seen.append("failed")
                    raise StoreUnavailable("away")
                return run(statement, **params)

            return failing

        def __exit__(self, *exc: Any) -> None:
            self.inner.__exit__(*exc)
            if exc[0] is not None:
                assert (row(sql, result.id)["status"], others(sql, result.id)) == ("running", {})
            elif "lost" not in seen:
                seen.append("lost")
                raise psycopg.OperationalError("the reply is lost")

    delivery = shop.take()
    assert delivery is not None
    monkeypatch.setattr(store, "transaction", Failing)
    shop.deliver(delivery)
    monkeypatch.undo()
    assert seen == ["failed", "lost"]
    assert row(sql, result.id)["outcome_ref"] == f"replaced:{result.id}"
    assert (len(others(sql, result.id)), len(outbox(sql))) == (1, 1)
    sql("UPDATE outbox SET next_publish_at = clock_timestamp()")
    sql("UPDATE job SET next_publish_at = clock_timestamp() WHERE status = 'queued'")
    shop.safe.sweep()
    shop.work()
    assert shop.app.AsyncResult(result.id).get(timeout=5) == [1, 2]


def test_a_worker_that_lost_its_job_replaces_nothing(shop: Shop, sql: Sql, kind: dict[str, Any], parts: Parts) -> None:
    def body(self: Any) -> Any:
        sql("UPDATE job SET lease_until = clock_timestamp() - interval '1 s' WHERE id = %s", self.job.id)
        shop.safe.sweep()
        return self.replace(group(parts.safe.s(1), parts.plain.s(2)))

    result = shop.task("late", body, **kind).delay()
    delivery = shop.take()
    assert delivery is not None
    shop.deliver(delivery)
    assert row(sql, result.id)["status"] == ("queued" if kind else "unknown")
    assert (others(sql, result.id), outbox(sql)) == ({}, [])


def test_a_job_with_an_open_question_parks_and_replaces_nothing_yet(shop: Shop, sql: Sql, parts: Parts) -> None:
    calls: list[int] = []

    @effect(name="replace.cut")
    def cut(op: Any) -> str:
        calls.append(1)
        raise OSError("cut")

    def body(self: Any) -> Any:
        with contextlib.suppress(OutcomeUnknown):
            cut()
        return self.replace(group(parts.safe.s(1), parts.safe.s(2)))

    result = shop.task("parks", body, effects=[cut]).delay()
    shop.work()
    assert (row(sql, result.id)["status"], others(sql, result.id)) == ("unknown", {})
    from celery_safe_effects import Happened

    shop.safe.resolve(f"{result.id}:1", Happened("ref"), "me", "seen")
    shop.work()
    assert row(sql, result.id)["outcome_ref"] == f"replaced:{result.id}"
    assert shop.app.AsyncResult(result.id).get(timeout=5) == [1, 2]
    assert calls == [1]


def test_what_cannot_be_encoded_fails_the_job(shop: Shop, sql: Sql, kind: dict[str, Any], parts: Parts) -> None:
    bad = by(shop, {"effects": []}, lambda: group(parts.safe.s(1), parts.safe.s(object())))
    result = bad.delay()
    shop.work()
    assert row(sql, result.id)["status"] == "failed"
    assert (others(sql, result.id), outbox(sql)) == ({}, [])


def test_another_replacement_when_it_runs_again_is_parked(shop: Shop, sql: Sql, parts: Parts) -> None:
    """It was accepted under the same id before, by a body that sent it as a message."""

    def body(self: Any) -> Any:
        if self.job.attempt == 1:
            group(parts.safe.s(1), parts.safe.s(2)).apply_async()
            sql("UPDATE job SET lease_until = clock_timestamp() - interval '1 s' WHERE id = %s", self.job.id)
            shop.safe.sweep()
            raise Killed
        return self.replace(group(parts.safe.s(3), parts.safe.s(4)))

    result = shop.task("fickle", body, effects=[]).delay()
    delivery: Delivery | None = shop.take()
    assert delivery is not None
    shop.deliver(delivery)
    sql("UPDATE job SET run_after = NULL WHERE id = %s", result.id)
    shop.deliver(delivery)
    assert (row(sql, result.id)["status"], row(sql, result.id)["reason"]) == ("unknown", "replay_mismatch")
    assert len(others(sql, result.id)) == 2


def test_eager_replacements_run_at_once(shops: Callable[..., Shop], sql: Sql, kind: dict[str, Any]) -> None:
    """With ``apply()``; in ``delay()`` under ``task_always_eager``, Celery refuses to wait for the result."""
    shop = shops(task_always_eager=True, result_backend="cache+memory://")
    parts = Parts(shop, kind)
    for name, (_, expected) in canvases(parts).items():
        task = shop.task(f"eager {name}", lambda self, name=name: self.replace(canvases(parts)[name][0]), **kind)
        assert task.apply().get() == expected, name
    single = shop.task("eager", lambda self: self.replace(parts.safe.s(5)), **kind)
    assert single.apply().get() == 5
    assert not sql("SELECT id FROM jobs WHERE status <> 'succeeded'")
