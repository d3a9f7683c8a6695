"""A parent that sends fifty children is killed half-way and runs again: there are fifty."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest
from celery import Celery

from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.brokers import EACH_BROKER_AND_ACKS
from tests.support.checks import assert_invariants, job, wait_status
from tests.support.names import DEATH_VARIABLE
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults


def _run(app: Celery, workers: Workers, sql: Sql, folder: Path, acks_late: bool, how: str, accepted: int) -> str:
    parent, marker = str(uuid4()), folder / "died"
    env = {DEATH_VARIABLE: f"half_way|{parent}|{marker}"}
    first = workers("a", acks_late=acks_late, env=env)
    app.tasks["tests.parent"].apply_async((how,), task_id=parent)
    eventually(lambda: not first.running, 30, message="the worker died")
    assert marker.exists()
    assert len(sql("SELECT id FROM jobs WHERE parent_id = %s", parent)) == accepted
    workers("b", acks_late=acks_late, env=env)
    assert wait_status(sql, parent, "succeeded")["attempts"] == 2
    query = "SELECT id FROM jobs WHERE settled_at IS NULL"
    eventually(lambda: not sql(query), 60, message="all have ended, and Celery knows")
    return parent


def _fifty(sql: Sql, provider: Provider) -> None:
    children = sql("SELECT status, attempts FROM jobs WHERE task = 'tests.child'")
    assert [(row["status"], row["attempts"]) for row in children] == [("succeeded", 1)] * 50
    refunds = [row["body"]["argument"] for row in provider.ledger(kind="refund")]
    assert sorted(refunds) == [f"{number:02}" for number in range(50)]
    assert provider.received("refund") == 50
    assert_invariants(sql, provider)


def test_06_killed_after_half_of_its_children(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, tmp_path: Path, acks_late: bool
) -> None:
    parent = _run(app, workers, sql, tmp_path, acks_late, "one by one", 25)
    assert len(sql("SELECT id FROM jobs WHERE parent_id = %s", parent)) == 50
    _fifty(sql, provider)


@EACH_BROKER_AND_ACKS
def test_06_killed_between_two_canvases(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, tmp_path: Path, acks_late: bool
) -> None:
    _run(app, workers, sql, tmp_path, acks_late, "two canvases", 25)
    _fifty(sql, provider)
    bodies = sql("SELECT result FROM jobs WHERE task = 'tests.follow'")
    assert len(bodies) == 2
    given = [row["body"]["argument"] for row in provider.ledger(kind="deploy")]
    assert sorted(given) == sorted([repr(list(range(25))), repr(list(range(26, 50)))])
    eventually(lambda: not sql("SELECT id FROM chord"), 10, message="nobody looks after the chord")


@EACH_BROKER_AND_ACKS
def test_06_killed_while_a_canvas_goes_out(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, tmp_path: Path, acks_late: bool
) -> None:
    """It is accepted whole before its first message goes out."""
    parent = _run(app, workers, sql, tmp_path, acks_late, "a canvas that goes out", 50)
    assert job(sql, parent)["fence"] == 2
    _fifty(sql, provider)
