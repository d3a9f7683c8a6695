"""Bodies in unit tests: effects that answer what they are told, and bodies that do something else the next time."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects import (
    EffectRefused,
    NoActiveJob,
    OutcomeUnknown,
    SafeEffects,
    SafeTask,
    StepNameRequired,
    UndeclaredEffect,
    effect,
)
from celery_safe_effects.testing import JOB_ID, NotReplayable, assert_replayable, stub_effects
from celery_safe_effects.values import Operation, Outcome

names = (f"stubs.{n}" for n in itertools.count())


class Declined(Exception):
    pass


def made(**options: Any) -> Any:
    @effect(name=next(names), **options)
    def one(op: Operation, value: Any = None, secret: str = "") -> Any:
        raise AssertionError("really called")

    return one


@pytest.fixture(scope="module")
def app() -> Celery:
    app = Celery("stubs", broker="memory://", set_as_current=False)  # and no database
    SafeEffects(app)
    return app


def task_of(app: Celery, body: Any, **options: Any) -> Any:
    body.__name__ = "body"
    return app.task(base=SafeTask, bind=True, shared=False, name=next(names), **options)(body)


charge = made(refused_on=(Declined,), not_happened_on=(ConnectionRefusedError,))
mail = made(redact=("secret",))


def test_effects_answer_and_are_recorded(app: Celery) -> None:
    def body(self: Any, cents: int) -> Any:
        done = charge(cents)
        self.job.checkpoint()
        mail(done.ref, secret="word")
        return done.result

    task = task_of(app, body, effects=[charge, mail])
    with stub_effects(task, {charge: Outcome("ch_1", {"cents": 5}), mail: None}) as job:
        assert task(500) == {"cents": 5}
    assert [(call.effect, call.step, call.key, call.status) for call in job.calls] == [
        (charge.name, "1", f"{JOB_ID}:1", "outcome_confirmed"),
        (mail.name, "2", f"{JOB_ID}:2", "outcome_confirmed"),
    ]
    assert job.of(mail)[0].arguments == {"value": "ch_1"}
    assert job.checkpoints == 1


def test_answers_may_be_exceptions_functions_and_lists(app: Celery) -> None:
    def body(self: Any) -> Any:
        try:
            charge()
        except EffectRefused as refused:
            return charge.step("again")(type(refused.__cause__).__name__).ref

    task = task_of(app, body, effects=[charge])
    with stub_effects(task, {charge: [Declined, lambda op, value, *_: f"{op.step} {value}"]}) as job:
        assert task() == "again Declined"
    assert [call.status for call in job.calls] == ["refused", "outcome_confirmed"]
    with stub_effects(task, {charge: ConnectionError("lost")}), pytest.raises(OutcomeUnknown):
        task()
    with stub_effects(task, {charge: ConnectionRefusedError("nobody")}), pytest.raises(ConnectionRefusedError):
        task()
    with stub_effects(task, {charge: [Declined]}), pytest.raises(OutcomeUnknown) as found:
        task()
    assert "more often" in str(found.value.__cause__)


def test_the_rules_of_a_job_hold(app: Celery) -> None:
    with stub_effects(task_of(app, lambda self: mail(), effects=[charge])), pytest.raises(UndeclaredEffect):
        mail()
    task = task_of(app, lambda self: charge().ref, effects=[charge])
    with stub_effects(task), pytest.raises(OutcomeUnknown) as found:
        task()
    assert "has no answer" in str(found.value.__cause__)
    with stub_effects(task, {charge: lambda op, *_a, **_k: charge()}), pytest.raises(OutcomeUnknown) as found:
        task()
    assert isinstance(found.value.__cause__, StepNameRequired)
    with pytest.raises(NoActiveJob):
        charge()  # afterwards, nothing is left behind


def test_messages_go_nowhere_and_are_recorded(app: Celery) -> None:
    other = task_of(app, lambda self, n: n, effects=[])

    def body(self: Any) -> Any:
        return [other.delay(1).id, other.apply_async((2,), countdown=5).id]

    task = task_of(app, body, effects=[])
    with stub_effects(task) as job:
        ids = task()
    assert [(one.task, one.args, one.id) for one in job.messages] == [
        (other.name, (1,), ids[0]),
        (other.name, (2,), ids[1]),
    ]
    assert len(set(ids)) == 2
    with stub_effects(task):
        assert task() == ids, "as in a job that runs again"


def test_a_whole_body_has_its_operation(app: Celery) -> None:
    task = task_of(app, lambda self: self.job.operation.key)
    with stub_effects(task):
        assert task() == f"{JOB_ID}:body"


def test_async_effects_are_awaited(app: Celery) -> None:
    @effect(name=next(names))
    async def ask(op: Operation, value: int) -> int:
        raise AssertionError("really called")

    async def body(self: Any) -> Any:
        return (await ask(1)).result

    task = task_of(app, body, effects=[ask])
    with stub_effects(task, {ask: 7}):
        assert task._invoke() == 7
    assert assert_replayable(task, answers={ask: 7}).of(ask)[0].result == 7


# -- does it do the same again? ----------------------------------------------------------------------------------------


def test_a_body_that_does_the_same_is_replayable(app: Celery) -> None:
    def body(self: Any, n: int) -> Any:
        for one in range(n):
            try:
                charge(one)
            except (EffectRefused, ConnectionRefusedError):
                mail(one)

    task = task_of(app, body, effects=[charge, mail])
    job = assert_replayable(task, (3,), answers={charge: [None, Declined, ConnectionRefusedError], mail: None})
    assert [call.step for call in job.calls] == ["1", "2", "3", "4", "5"]


def test_what_is_really_called_is_called_once(app: Celery) -> None:
    times: list[float] = []

    @effect(name=next(names), repeatable=True)
    def clock(op: Operation) -> float:
        times.append(time.time())
        return times[-1]

    task = task_of(app, lambda self: charge(clock().result).ref, effects=[clock, charge])
    assert_replayable(task, answers={charge: "ch"})
    assert len(times) == 1


def _fails(app: Celery, body: Any, says: str, **answers: Any) -> None:
    task = task_of(app, body, effects=[charge, mail])
    with pytest.raises(NotReplayable, match=says):
        assert_replayable(task, answers={charge: "ch", mail: "m"})


def test_another_argument_is_found(app: Celery) -> None:
    _fails(app, lambda self: charge(random.random()), r"step '1' \(\S+\) has other arguments: value was 0\.\d+ and is")


def test_another_redacted_argument_is_found_and_not_shown(app: Celery) -> None:
    _fails(app, lambda self: mail(secret=str(random.random())), "in a redacted one")


def test_another_key_is_found(app: Celery) -> None:
    def body(self: Any) -> None:
        charge.step(f"s{random.random()}")()

    _fails(app, body, "appears")


def test_an_operation_that_appears_is_found(app: Celery) -> None:
    runs = itertools.count()
    _fails(app, lambda self: [charge(n) for n in range(1 + next(runs))], r"step '2' \(\S+\) appears: .*value=1")


def test_an_operation_that_vanishes_is_found(app: Celery) -> None:
    runs = itertools.count()
    _fails(app, lambda self: [charge(n) for n in range(2 - next(runs))], r"step '2' \(\S+\) vanishes: .*value=1")


def test_another_effect_is_found(app: Celery) -> None:
    runs = itertools.count()
    _fails(app, lambda self: [charge, mail][next(runs) % 2](1), "step '1' was stubs.* and is stubs")


def test_another_message_is_found(app: Celery) -> None:
    runs = itertools.count()
    other = task_of(app, lambda self, n: n, effects=[])
    _fails(app, lambda self: other.delay(next(runs)), r"message 1 was stubs\.\d+ \(0,\) \{\} and is stubs\.\d+ \(1,\)")


def test_another_end_is_found(app: Celery) -> None:
    runs = itertools.count()

    def body(self: Any) -> None:
        charge(1)
        if next(runs):
            raise LookupError

    _fails(app, body, "the body ended with LookupError and not with its return")
