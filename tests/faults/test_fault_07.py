"""The worker dies between the end of a job and Celery's bookkeeping: the continuation runs once."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, chain, chord, group

from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.checks import assert_invariants, assert_ledger, assert_log, job, wait_status
from tests.support.names import DEATH_VARIABLE
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults

PLACES = ("before_dispatch", "before_store", "before_settling")
ONCE = [
    "job - > queued #0",
    "job queued > leased #1",
    "job leased > running #1",
    "1 - > intent_recorded #1",
    "1 intent_recorded > outcome_confirmed #1",
    "job running > succeeded #1",
]


def _cases() -> list[Any]:
    """Every place with every canvas; the brokers and acknowledgements take turns (each pair occurs)."""
    wanted = [(canvas, place) for canvas in ("chain", "link", "chord") for place in PLACES]
    wanted += [("chord", place) for place in ("before_chord", "before_body", "before_done")]
    wanted.append(("links", "before_store"))
    return _in_turn(wanted)


def _failures() -> list[Any]:
    kinds = ["link_error", "link_error of three arguments", "chord"]
    wanted = [(kind, place) for kind in kinds for place in ("before_failure", "before_errbacks", "before_settling")]
    return _in_turn([*wanted, ("chord", "before_done")])


def _in_turn(wanted: list[tuple[str, str]]) -> list[Any]:
    kinds = [("redis", False), ("rabbitmq", True), ("redis", True), ("rabbitmq", False)]
    cases = []
    for number, (canvas, place) in enumerate(wanted):
        broker, acks_late = kinds[number % 4]
        name = f"{canvas}-{place}-{broker}-{'late' if acks_late else 'early'}"
        marks = [pytest.mark.rabbitmq] if broker == "rabbitmq" else []
        cases.append(pytest.param(canvas, place, broker, acks_late, id=name, marks=marks))
    return cases


@pytest.mark.parametrize(("canvas", "place", "broker", "acks_late"), _cases(), indirect=["broker"])
def test_07_killed_before_celery_knew_of_the_end(
    app: Celery,
    workers: Workers,
    provider: Provider,
    sql: Sql,
    tmp_path: Path,
    canvas: str,
    place: str,
    acks_late: bool,
) -> None:
    victim, marker = str(uuid4()), tmp_path / "died"
    env = {DEATH_VARIABLE: f"{place}|{victim}|{marker}"}
    first = workers("a", acks_late=acks_late, env=env)
    mortal, follow = app.tasks["tests.mortal"], app.tasks["tests.follow"]
    head = mortal.s("order-1").set(task_id=victim)
    members = [victim]
    if canvas == "chain":
        last = chain(head, follow.s()).apply_async()
    elif canvas == "link":
        head.apply_async(link=follow.s())
        last = None
    elif canvas == "links":
        head.apply_async(link=[group(follow.s(), follow.s()), chain(follow.s(), follow.si())])
        _all_run(app, sql, provider, workers, first, env, acks_late, victim)
        return
    else:
        other = str(uuid4())
        second = mortal.s("order-2").set(task_id=other)
        # The last one to end sends the body.
        ids = {"order-1": other, "order-2": victim} if place in ("before_body", "before_done") else {}
        header = [one.set(task_id=ids.get(one.args[0], one.id)) for one in (head, second)]
        members = [one.id for one in header]
        last = chord(header, follow.s()).apply_async()
    eventually(lambda: not first.running, 20, message="the worker died")
    assert marker.exists()
    assert job(sql, victim)["status"] == "succeeded"
    assert not job(sql, victim)["settled_at"]

    workers("b", acks_late=acks_late, env=env)
    (body,) = eventually(
        lambda: sql("SELECT id FROM jobs WHERE task = 'tests.follow' AND status = 'succeeded'"),
        30,
        message="the continuation ran",
    )
    eventually(lambda: not sql("SELECT id FROM jobs WHERE settled_at IS NULL"), 20, message="Celery knows of every end")

    assert {row["id"] for row in sql("SELECT id FROM jobs")} == {*members, body["id"]}
    for member in members:
        assert_log(sql, member, ONCE)
        assert_ledger(provider, sql, member, kind="refund")
    assert_log(sql, body["id"], ONCE)
    deployed = assert_ledger(provider, sql, body["id"], kind="deploy")
    refs = [job(sql, member)["outcome_ref"] for member in members]
    assert deployed["body"]["argument"] == repr(refs if canvas == "chord" else refs[0])
    assert provider.received("deploy") == 1
    assert provider.received("refund") == len(members)
    assert wait_status(sql, body["id"], "succeeded")["attempts"] == 1
    if last is not None:
        assert last.id == body["id"]
        assert last.get(timeout=10) == deployed["ref"]
    assert app.AsyncResult(victim).state == "SUCCESS"
    assert_invariants(sql, provider)


def _all_run(
    app: Celery,
    sql: Sql,
    provider: Provider,
    workers: Workers,
    first: Any,
    env: dict[str, str],
    acks_late: bool,
    victim: str,
) -> None:
    """Four continuations, two of them in a group and two in a chain."""
    eventually(lambda: not first.running, 20, message="the worker died")
    workers("b", acks_late=acks_late, env=env)
    ended = "SELECT id FROM jobs WHERE task = 'tests.follow' AND settled_at IS NOT NULL"
    eventually(lambda: len(sql(ended)) == 4, 30, message="the continuations ran")
    eventually(lambda: not sql("SELECT id FROM jobs WHERE settled_at IS NULL"), 20, message="Celery knows of every end")
    assert len(sql("SELECT id FROM jobs")) == 5
    assert (provider.received("refund"), provider.received("deploy")) == (1, 4)
    assert_log(sql, victim, ONCE)
    assert_invariants(sql, provider)


@pytest.mark.parametrize(("canvas", "place", "broker", "acks_late"), _failures(), indirect=["broker"])
def test_07_killed_before_celery_knew_of_a_failure(
    app: Celery,
    workers: Workers,
    provider: Provider,
    sql: Sql,
    tmp_path: Path,
    canvas: str,
    place: str,
    acks_late: bool,
) -> None:
    """The errback runs once."""
    victim, marker = str(uuid4()), tmp_path / "died"
    env = {DEATH_VARIABLE: f"{place}|{victim}|{marker}"}
    first = workers("a", acks_late=acks_late, env=env)
    failing = app.tasks["tests.mortal"].s("order-1", True).set(task_id=victim)
    errback, told = app.tasks["tests.errback"].s(), victim
    if canvas == "chord":
        result = chord([failing], app.tasks["tests.follow"].s().on_error(errback)).apply_async()
        told = result.id
    elif canvas == "link_error":
        failing.apply_async(link_error=errback)
    else:
        errback = app.tasks["tests.explaining"].s()
        failing.apply_async(link_error=errback)
    eventually(lambda: not first.running, 20, message="the worker died")
    assert marker.exists()
    assert job(sql, victim)["status"] == "failed"
    assert not job(sql, victim)["settled_at"]

    workers("b", acks_late=acks_late, env=env)
    query = "SELECT id, status FROM jobs WHERE task = %s AND settled_at IS NOT NULL"
    (ran,) = eventually(lambda: sql(query, errback.task), 30, message="the errback ran")
    eventually(lambda: not sql("SELECT id FROM jobs WHERE settled_at IS NULL"), 20, message="Celery knows of every end")
    eventually(lambda: not sql("SELECT id FROM chord"), 20, message="nobody looks after the chord")
    assert {row["id"] for row in sql("SELECT id FROM jobs")} == {victim, ran["id"]}
    assert_log(sql, victim, [*ONCE[:-1], "job running > failed #1 (error)"])
    (mail,) = provider.ledger(kind="mail")
    assert mail["body"]["argument"] == f"{told} failed"
    assert (provider.received("refund"), provider.received("mail")) == (1, 1)
    assert app.AsyncResult(victim).state == app.AsyncResult(told).state == "FAILURE"
    assert_invariants(sql, provider)
