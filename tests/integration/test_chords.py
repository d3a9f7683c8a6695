"""Chords that Celery cannot finish: what the sweep does about them, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import chain, chord, group
from celery.backends.base import BaseKeyValueStoreBackend as Backend

from celery_safe_effects import Limits
from celery_safe_effects.errors import StoreUnavailable
from celery_safe_effects.glue.continuations import UNLOCK
from celery_safe_effects.glue.wire import Message
from tests.support.services import Sql
from tests.support.shop import Shop


@pytest.fixture
def counts() -> bool:
    """Whether the result backend counts members."""
    return False


@pytest.fixture
def shop(shops: Callable[..., Shop], monkeypatch: pytest.MonkeyPatch, counts: bool) -> Shop:
    if not counts:
        monkeypatch.setattr(Backend, "on_chord_part_return", lambda *args, **kwargs: None)
    made = shops(
        result_backend="cache+memory://", safe_effects_limits=Limits(tenants={"full": Limits(tenant_queued=1)})
    )
    made.task("part", lambda self, value: value, effects=[])
    made.task("body", lambda self, values: values, effects=[])
    made.task("errback", lambda self, failed: failed, effects=[])

    @made.app.task(shared=False, name="shop.plain_part")
    def plain_part(value: Any) -> Any:
        return value

    return made


def s(shop: Shop, name: str, *args: Any) -> Any:
    return shop.app.tasks[f"shop.{name}"].s(*args)


def jobs(sql: Sql, name: str) -> list[dict[str, Any]]:
    return sql("SELECT id, status, result FROM jobs WHERE task = %s ORDER BY created_at", f"shop.{name}")


def sweep(shop: Shop, sql: Sql, hours: int = 1) -> int:
    """Sweep some time later."""
    shop.safe.flush()
    sql("UPDATE job SET settled_at = settled_at - %s * interval '1 hour'", hours)
    sql("UPDATE chord SET next_check_at = clock_timestamp() - interval '1 s', created_at = created_at - interval '1 h'")
    return int(shop.safe.sweep().chords)


def test_the_sweep_sends_a_body_once(shop: Shop, sql: Sql) -> None:
    header = [s(shop, "part", 1), chain(s(shop, "part", 2), s(shop, "body")), s(shop, "plain_part", 3)]
    result = chord(header, s(shop, "body")).apply_async()
    assert sweep(shop, sql) == 0, "nobody has ended"
    shop.work()
    assert [row["id"] for row in jobs(sql, "body")] == [result.parent[1].id]
    assert sweep(shop, sql) == 1
    shop.work()
    assert jobs(sql, "body")[-1] == {"id": result.id, "status": "succeeded", "result": [1, 2, 3]}
    assert sql("SELECT id FROM chord") == sql("SELECT id FROM chord_member") == []
    assert sweep(shop, sql) == 0


def test_there_is_a_grace(shop: Shop, sql: Sql) -> None:
    chord([s(shop, "part", 1)], s(shop, "body")).apply_async()
    shop.work()
    assert sweep(shop, sql, hours=0) == 0
    assert sweep(shop, sql) == 1


def test_an_end_that_celery_will_hear_of_is_waited_for(shop: Shop, sql: Sql) -> None:
    """It may count that member yet; not for longer than it is told."""
    chord([s(shop, "part", 1)], s(shop, "body")).apply_async()
    shop.work()
    shop.safe.flush()
    sql("ALTER TABLE job DISABLE TRIGGER USER")
    sql("UPDATE job SET settled_at = NULL, finished_at = finished_at - interval '1 hour'")
    sql("UPDATE job SET next_publish_at = clock_timestamp() + interval '1 hour'")
    sql("ALTER TABLE job ENABLE TRIGGER USER")
    assert sweep(shop, sql) == 0
    sql("UPDATE job SET next_publish_at = NULL")
    assert sweep(shop, sql) == 1


def test_what_only_fails_now_is_tried_again(shop: Shop, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    result = chord([s(shop, "part", 1)], s(shop, "body").on_error(s(shop, "errback"))).apply_async()
    shop.work()

    def unavailable(*args: Any, **kwargs: Any) -> Any:
        raise StoreUnavailable("not now")

    with monkeypatch.context() as patch:
        patch.setattr(shop.safe.publisher.acceptance, "accept", unavailable)
        assert sweep(shop, sql) == 0
        patch.setattr(shop.app, "send_task", lambda *args, **kwargs: 1 / 0)  # a result backend's own error, say
        assert sweep(shop, sql) == 0
    assert result.state == "PENDING"
    assert sweep(shop, sql) == 1
    shop.work()
    assert [row["status"] for row in jobs(sql, "body")] == ["succeeded"]
    assert jobs(sql, "errback") == []


def test_what_can_never_be_sent_is_an_error(shop: Shop, sql: Sql) -> None:
    header = [s(shop, "part", "x" * 60_000), s(shop, "part", "y" * 60_000)]
    result = chord(header, s(shop, "body").on_error(s(shop, "errback"))).apply_async()
    shop.work()
    assert sweep(shop, sql) == 1
    shop.work()
    assert result.state == "FAILURE"
    assert "too large" in str(result.result) or "bytes" in str(result.result)
    assert [row["result"] for row in jobs(sql, "errback")] == [result.id]
    assert (jobs(sql, "body"), sql("SELECT id FROM chord")) == ([], [])


def test_a_backend_that_does_not_answer_says_nothing(shop: Shop, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    chord([s(shop, "part", 1), s(shop, "plain_part", 2)], s(shop, "body")).apply_async()
    shop.work()

    def silent(*args: Any) -> Any:
        raise ConnectionError("no backend")

    with monkeypatch.context() as patch:
        patch.setattr(shop.app.backend, "get_task_meta", silent)
        assert sweep(shop, sql, hours=1000) == 0
    assert sql("SELECT next_check_at IS NULL AS given_up FROM chord") == [{"given_up": False}]
    assert sweep(shop, sql) == 1


def test_nobody_waits_for_ever(shop: Shop, sql: Sql) -> None:
    """The members' rows may go in the end, and so may the chord's."""
    result = chord([s(shop, "part", 1), s(shop, "plain_part", 2)], s(shop, "body")).apply_async()
    shop.work()
    shop.app.backend.forget(result.parent[1].id)
    assert sweep(shop, sql) == 0
    assert len(sql("SELECT id FROM chord_member")) == 2
    assert sweep(shop, sql, hours=80) == 0
    assert sql("SELECT next_check_at FROM chord") == [{"next_check_at": None}]
    assert sql("SELECT id FROM chord_member") == []
    sql("UPDATE chord SET created_at = created_at - interval '31 days'")
    shop.safe.prune()
    assert sql("SELECT id FROM chord") == []


def test_no_limit_refuses_a_body(shop: Shop, sql: Sql) -> None:
    """It is work that was accepted with the members, whoever sends it."""
    chord([s(shop, "part", 1)], s(shop, "body")).apply_async(tenant="full")
    shop.work()
    shop.bill.apply_async((1,), tenant="full")
    assert sweep(shop, sql) == 1
    assert len(jobs(sql, "body")) == 1


@pytest.mark.parametrize("counts", [True])
def test_what_celery_cannot_send_now_is_no_failure(shop: Shop, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery takes any error in sending the body for the body's."""
    result = chord([s(shop, "part", 1)], s(shop, "body").on_error(s(shop, "errback"))).apply_async()
    accept = shop.safe.publisher.acceptance.accept

    def unavailable(candidates: Any, *args: Any, **kwargs: Any) -> Any:
        if candidates[0].envelope.task == "shop.body":
            raise StoreUnavailable("not now")
        return accept(candidates, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(shop.safe.publisher.acceptance, "accept", unavailable)
        shop.work()
    assert (result.state, jobs(sql, "errback"), jobs(sql, "body")) == ("PENDING", [], [])
    assert sweep(shop, sql) == 1
    shop.work()
    assert [row["status"] for row in jobs(sql, "body")] == ["succeeded"]


@pytest.mark.parametrize("counts", [True])
@pytest.mark.parametrize("broken", [False, True], ids=["forgotten", "unreadable"])
def test_a_backend_that_lost_the_group_fails_no_chord(
    shop: Shop, sql: Sql, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """Celery counts, and then cannot tell whose results the body gets."""
    result = chord([s(shop, "part", 1), s(shop, "part", 2)], s(shop, "body")).apply_async()

    def unreadable(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("what is this?")

    with monkeypatch.context() as patch:
        if broken:
            patch.setattr(shop.app.backend, "restore_group", unreadable)
        else:
            shop.app.backend.delete_group(result.parent.id)
        shop.work()
    assert jobs(sql, "body") == []
    assert result.state == "PENDING"
    assert sweep(shop, sql) == 1
    shop.work()
    assert jobs(sql, "body") == [{"id": result.id, "status": "succeeded", "result": [1, 2]}]


@pytest.mark.parametrize("counts", [True])
def test_a_chord_that_celery_finishes_is_left_alone(shop: Shop, sql: Sql) -> None:
    for body in (s(shop, "body"), s(shop, "plain_part"), chain(s(shop, "plain_part"), s(shop, "body"))):
        chord([s(shop, "part", 1), s(shop, "plain_part", 2)], body).apply_async()
    (group(s(shop, "part", 1), s(shop, "part", 2)) | group(s(shop, "body"), s(shop, "plain_part"))).apply_async()
    assert len(sql("SELECT id FROM chord")) == 4
    shop.work()
    assert sql("SELECT id FROM chord") == []
    assert [row["status"] for row in jobs(sql, "body")] == ["succeeded"] * 3


def test_chords_that_are_celerys_alone_are_not_written_down(shop: Shop, sql: Sql) -> None:
    chord([s(shop, "plain_part", 1)], s(shop, "body")).apply_async()
    chord([s(shop, "plain_part", 1)], s(shop, "plain_part")).apply_async()
    chord([], s(shop, "body")).apply_async()
    assert sql("SELECT id FROM chord") == []


def test_celery_stops_looking_at_a_chord_that_is_over(shop: Shop, sql: Sql) -> None:
    """Its members' results may be gone, and it would look for ever."""
    result = chord([s(shop, "part", 1)], s(shop, "body")).apply_async()
    body = shop.messages()[0][1][2]["chord"]
    waits = shop.safe.publisher._waits_in_vain

    def look(retries: int, signature: Any, chord_id: str = result.parent.id) -> Message:
        return Message(UNLOCK, ({"id": "u", "retries": retries}, {}, ((chord_id, signature), {}, {}), None), {})

    assert not waits(look(1, body))
    sql("DELETE FROM chord")
    assert waits(look(1, body))
    assert not waits(look(0, body)), "the first look is the chord's own"
    assert not waits(look(1, dict(s(shop, "body")))), "nobody has written this one down"
