"""`crash_everywhere`: what stands it, and each kind of task that does not, told by name."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, chord

from celery_safe_effects import (
    Happened,
    NotHappened,
    Operation,
    Outcome,
    SafeEffects,
    SafeTask,
    Unresolved,
    effect,
    faults,
)
from celery_safe_effects.faults import Point
from celery_safe_effects.testing import CrashProblem, CrashReport, crash_everywhere
from tests.support.services import Sql

names = (f"crashed.{n}" for n in itertools.count())


class World:
    """What happens outside, in a file: it survives whoever made it happen."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def do(self, kind: str, key: str | None) -> str:
        with self.path.open("a") as file:
            file.write(json.dumps([kind, key]) + "\n")
        return f"{kind}-{key}"

    def rows(self) -> list[tuple[str, str]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [(kind, key) for kind, key in map(json.loads, lines)]

    def effect(self, kind: str, *, lookup: bool = True, **options: Any) -> Any:
        @effect(name=next(names), **options)
        def made(op: Operation, *args: Any) -> Outcome[Any]:
            if "idempotent_for" in options and (kind, op.key) in self.rows():
                return Outcome("again", list(args))
            return Outcome(self.do(kind, op.key), list(args))

        if lookup:

            @made.lookup
            def find(op: Operation) -> Any:
                return Happened("found") if (kind, op.key) in self.rows() else NotHappened()

        return made


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "world")


@pytest.fixture
def app(database_url: str) -> Celery:
    app = Celery("crashed", broker="redis://nowhere.invalid", backend="redis://nowhere.invalid", set_as_current=False)
    app.conf.safe_effects_database_url = database_url
    SafeEffects(app)
    return app


def task_of(app: Celery, body: Any, **options: Any) -> Any:
    body.__name__ = "body"
    return app.task(**{"base": SafeTask, "bind": True, "shared": False, "name": next(names), **options})(body)


def test_a_good_task_stands_it(app: Celery, world: World, sql: Sql) -> None:
    charge, mail = world.effect("charge"), world.effect("mail", lookup=False, idempotent_for=3600)

    def body(self: Any, cents: int) -> Any:
        done = charge(cents)
        self.job.checkpoint()
        mail(done.ref)

    task = task_of(app, body, effects=[charge, mail])
    report = crash_everywhere(task, (5,), happened=world.rows)

    assert report.problems == []
    crashed = {(str(one.point), one.step) for one in report.boundaries if one.after is None}
    assert {("accept.before", None), ("claim.after", None), ("checkpoint.after", None), ("tell.after", None)} <= crashed
    for boundary in ("intent", "call", "outcome"):
        assert {(f"{boundary}.{when}", step) for when in ("before", "after") for step in "12"} <= crashed
    recovering = {one.point for one in report.boundaries if one.after is not None}
    assert {Point.AFTER_SWEEP_LEASES, Point.BEFORE_VERDICT, Point.AFTER_LOOKUP, Point.BEFORE_RESUME} <= recovering
    assert "no runs failed" in str(report)
    assert re.search(r"ok +call\.after of step '1' \(crashed\.\d+\), in crashed\.\d+: succeeded", str(report))
    # Each run was really made: a job, and one pair of effects.
    assert len(sql("SELECT id FROM jobs")) == len(report.runs)
    assert faults.armed is None


def test_what_nobody_can_ask_about_is_parked_rightly(app: Celery, world: World) -> None:
    plain = world.effect("plain", lookup=False)
    task = task_of(app, lambda self: plain().ref, effects=[plain])
    report = crash_everywhere(task, happened=world.rows, recovery=False)
    parked = {str(run.boundary.point) for run in report.runs if run.boundary and run.jobs[0][1] == "unknown"}
    assert parked == {"intent.after", "call.before", "call.after", "outcome.before"}


def test_a_whole_body_is_parked_rightly(app: Celery, world: World) -> None:
    task = task_of(app, lambda self: world.do("body", self.job.operation.key))
    report = crash_everywhere(task, happened=world.rows, recovery=False)
    parked = {str(run.boundary.point) for run in report.runs if run.boundary and run.jobs[0][1] == "unknown"}
    assert parked == {"claim.after", "body.before", "body.after", "outcome.before"}


def test_answers_stand_in_for_providers(app: Celery) -> None:
    charge = World(Path("/nowhere")).effect("charge")
    mail = World(Path("/nowhere")).effect("mail", lookup=False, idempotent_for=3600)
    task = task_of(app, lambda self: mail(charge(1).ref).ref, effects=[charge, mail])
    answers = {charge: "ch_1", mail: lambda op, ref: f"mail {ref}"}
    report = crash_everywhere(task, answers=answers, points=SOME, recovery=False)
    assert [str(one.point) for one in report.boundaries].count("call.after") == 2


def test_messages_and_chords_stand_it(app: Celery, world: World) -> None:
    mail = world.effect("mail")
    member = task_of(app, lambda self, n: mail(n).ref, effects=[mail])
    gathered = task_of(app, lambda self, refs: mail(len(refs)).ref, effects=[mail])

    def body(self: Any) -> None:
        member.delay(0)
        chord([member.s(1), member.s(2)], gathered.s()).apply_async()

    wanted = {Point.BEFORE_CHORD, Point.AFTER_PUBLISH, Point.BEFORE_TELL}
    report = crash_everywhere(task_of(app, body, effects=[]), happened=world.rows, points=wanted, recovery=False)
    assert len(report.runs[0].jobs) == 5
    assert {one.point for one in report.boundaries} == wanted


# -- what does not stand it --------------------------------------------------------------------------------------------


SOME = [Point.AFTER_CLAIM, Point.BEFORE_INTENT, Point.AFTER_CALL, Point.BEFORE_OUTCOME, Point.BEFORE_LEAVE]


def fails(task: Any, happened: Callable[[], Any]) -> CrashReport:
    with pytest.raises(CrashProblem) as found:
        crash_everywhere(task, happened=happened, points=SOME, recovery=False)
    assert str(found.value) == str(found.value.report)
    return found.value.report


def told(report: CrashReport) -> str:
    return "\n".join(problem for run in report.problems for problem in run.problems)


def test_a_provider_that_is_called_outside_of_effects_is_found(app: Celery, world: World) -> None:
    charge = world.effect("charge")

    def body(self: Any) -> None:
        world.do("mail", self.job.id)
        charge()

    report = fails(task_of(app, body, effects=[charge]), world.rows)
    points = {str(run.boundary.point) for run in report.problems if run.boundary}
    assert {"intent.before", "call.after", "leave.before"} <= points
    assert "claim.after" not in points
    assert "happened 2 times: ('mail'," in told(report)
    assert "FAILS call.after of step '1'" in str(report)
    assert str(report).index("FAILS") < str(report).index("ok ")


def test_an_effect_with_a_key_of_its_own_making_is_found(app: Celery, world: World) -> None:
    """It gives the provider another key each time, so that this one cannot tell."""

    @effect(name=next(names), idempotent_for=3600)
    def charge(op: Operation) -> str:
        return world.do("charge", str(uuid4()))

    report = fails(task_of(app, lambda self: charge().ref, effects=[charge]), world.rows)
    assert {str(run.boundary.point) for run in report.problems if run.boundary} == {"call.after", "outcome.before"}
    assert "2 things happened, and without a crash 1" in told(report)


def test_a_wrong_promise_of_a_provider_is_found(app: Celery, world: World) -> None:
    """It is said to de-duplicate, and does not."""

    @effect(name=next(names), idempotent_for=3600)
    def charge(op: Operation) -> str:
        return world.do("charge", op.key)

    report = fails(task_of(app, lambda self: charge().ref, effects=[charge]), world.rows)
    assert "happened 2 times: ('charge'," in told(report)


def test_a_lookup_that_does_not_find_is_found(app: Celery, world: World) -> None:
    charge = world.effect("charge", lookup=False)
    charge.lookup(lambda op: NotHappened())
    report = fails(task_of(app, lambda self: charge().ref, effects=[charge]), world.rows)
    assert {str(run.boundary.point) for run in report.problems if run.boundary} == {"call.after", "outcome.before"}


def test_a_lookup_that_never_answers_is_found(app: Celery, world: World) -> None:
    charge = world.effect("charge", lookup=False)
    charge.lookup(lambda op: Unresolved("the index is down"))
    report = fails(task_of(app, lambda self: charge().ref, effects=[charge]), world.rows)
    assert "stays unknown, although it has a lookup" in told(report)
    assert "the index is down" in told(report)


def test_arguments_of_chance_are_found(app: Celery, world: World) -> None:
    charge, mail = world.effect("charge"), world.effect("mail")

    def body(self: Any) -> None:
        charge(random.random())
        mail()

    report = fails(task_of(app, body, effects=[charge, mail]), world.rows)
    assert "is unknown (replay_mismatch)" in told(report)


def test_steps_of_chance_are_found(app: Celery, world: World) -> None:
    charge, mail = world.effect("charge"), world.effect("mail")

    def body(self: Any) -> None:
        charge.step(f"s{random.random()}")()
        mail()

    report = fails(task_of(app, body, effects=[charge, mail]), world.rows)
    assert "appears: the run without a crash has none such" in told(report)
    assert "the task takes another way each time" in told(report)


def test_a_task_that_does_not_end_is_told_at_once(app: Celery, world: World) -> None:
    @effect(name=next(names))
    def charge(op: Operation) -> str:
        raise ConnectionError("lost")

    with pytest.raises(AssertionError, match="does not come to an end without a crash"):
        crash_everywhere(task_of(app, lambda self: charge().ref, effects=[charge]))


def test_a_plain_task_is_refused(app: Celery) -> None:
    @app.task(shared=False, name=next(names))
    def plain() -> None: ...

    with pytest.raises(TypeError, match="SafeTask"):
        crash_everywhere(plain)


def test_the_crash_is_a_kill(app: Celery, world: World) -> None:
    """Neither a `finally` nor an exit handler of the task runs."""
    charge = world.effect("charge")

    def body(self: Any) -> None:
        try:
            charge()
        finally:
            world.do("finally", self.job.id)

    report = fails(task_of(app, body, effects=[charge]), world.rows)
    failing = {str(run.boundary.point) for run in report.problems if run.boundary}
    assert "call.after" not in failing
    assert "leave.before" in failing
