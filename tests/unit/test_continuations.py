"""What a message carries along: each continuation is one, and belongs to the tenant of the job that it goes on from."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, chain, chord, group

from celery_safe_effects.glue.continuations import UNLOCK, Continuations


def made(message_id: str, tenant: str | None = None, **embed: Any) -> Any:
    return Continuations(message_id, tenant, lambda name: name == "unit.add").of("t", ((), {}, embed))[2]


@pytest.fixture
def add() -> Any:
    app = Celery("unit", broker="memory://", set_as_current=False)

    @app.task(name="unit.add", shared=False)
    def add(x: int, y: int) -> int:
        return x + y

    return add


def ids(signature: Any) -> list[str]:
    found = [signature["options"]["task_id"]]
    for name in ("tasks", "header", "body") if signature.get("subtask_type") else ():
        inner = signature["kwargs"].get(name) or []
        for member in [inner] if isinstance(inner, dict) else inner:
            found += ids(member)
    return found


def test_continuations_get_ids_that_follow_from_the_job(add: Any) -> None:
    links = [add.s(1), group(add.s(1), add.s(2)), chain(add.s(1), add.s(2)), chord([add.s(1), add.s(2)], add.s(3))]
    first = made("job", callbacks=links)["callbacks"]
    second = made("job", callbacks=links)["callbacks"]
    other = made("other", callbacks=links)["callbacks"]
    assert [ids(s) for s in first] == [ids(s) for s in second]
    flat = [i for s in first for i in ids(s)]
    assert len(set(flat)) == len(flat) == 1 + 3 + 3 + 4 + isinstance(links[3].kwargs["header"], dict)
    assert not set(flat) & {i for s in other for i in ids(s)}
    assert "task_id" not in links[0].options, "the user's signature is left alone"


def test_an_id_that_is_there_stays(add: Any) -> None:
    link = add.s(1).set(task_id="mine")
    assert made("job", callbacks=[link])["callbacks"][0]["options"]["task_id"] == "mine"


def test_an_errback_of_a_chords_body_is_one_whichever_member_brings_it(add: Any) -> None:
    body = add.s(1).set(task_id="body", link_error=[add.s(2)], link=[add.s(3)])
    first = made("member 1", chord=body)["chord"]["options"]
    second = made("member 2", chord=body)["chord"]["options"]
    for what in ("link", "link_error"):
        assert first[what][0]["options"]["task_id"] == second[what][0]["options"]["task_id"]
    assert first["link"][0]["options"]["task_id"] != first["link_error"][0]["options"]["task_id"]
    assert "task_id" not in body.options["link"][0].options, "the user's signature is left alone"


def test_the_tenant_goes_to_safe_tasks_that_do_not_say_theirs(add: Any) -> None:
    app = add.app

    @app.task(name="unit.plain", shared=False)
    def plain(x: int) -> int:
        return x

    links = [add.s(1), plain.s(1), add.s(1).set(tenant="other"), group(plain.s(1), add.s(1))]
    links[0].options["link_error"] = [add.s(5)]
    found = made("job", "acme", callbacks=links)["callbacks"]
    assert [one["options"].get("tenant") for one in found] == ["acme", None, "other", None]
    assert found[0]["options"]["link_error"][0]["options"]["tenant"] == "acme"
    assert [one["options"].get("tenant") for one in found[3]["kwargs"]["tasks"]] == [None, "acme"]
    assert [one["options"].get("tenant") for one in made("job", callbacks=links)["callbacks"]][:1] == [None]


def test_a_chord_that_is_waited_for_keeps_its_tenant(add: Any) -> None:
    """Its body is sent by a plain task of Celery's, which has none."""
    body = Continuations("job", "acme", lambda name: True).of(UNLOCK, (("gid", add.s(1)), {"result": []}, {}))
    assert body[0][1]["options"]["tenant"] == "acme"
    assert body[0][0] == "gid"


def test_nothing_to_carry_is_left_alone() -> None:
    body: Any = ((1,), {}, {"callbacks": None, "chord": None})
    assert Continuations("job", "acme", lambda name: True).of("t", body) is body
