"""Without a worker: ``apply()`` and ``task_always_eager`` run real jobs; their callers are told what the rows say."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest
from celery import chain, chord, exceptions, group
from celery.exceptions import Ignore, Retry

from celery_safe_effects import Happened, IdempotencyConflict, NoActiveJob
from tests.support.lab import Declined, Lab

DOWN = "redis://127.0.0.1:1/0"


@pytest.fixture(params=["apply", "always_eager"])
def run(request: pytest.FixtureRequest, lab: Lab) -> Any:
    """Runs a task here and now, in a process whose broker and result backend are down."""
    lab.app.conf.update(broker_url=DOWN, broker_transport_options={"max_retries": 0}, result_backend=DOWN)
    if request.param == "apply":
        return lambda task, *args, **options: task.apply(args, **options)
    lab.app.conf.task_always_eager = True
    return lambda task, *args, **options: task.apply_async(args, **options)


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
def test_a_job_that_succeeds_or_fails(lab: Lab, run: Any, whole: bool) -> None:
    a = lab.effect("a")

    def body(self: Any, fails: bool) -> Any:
        ref = "whole" if whole else a().ref
        if fails:
            raise Declined("no")
        return {"ref": ref, "tuple": (1, 2)}

    task = lab.task(body, throws=(Declined,), **({} if whole else {"effects": [a]}))
    good, bad = run(task, False), run(task, True)
    assert (good.state, good.get()["tuple"], lab.status(good.id)) == ("SUCCESS", [1, 2], "succeeded")
    assert (bad.state, lab.status(bad.id)) == ("FAILURE", "failed")
    with pytest.raises(Declined):
        bad.get()
    lab.safe.flush()
    assert lab.sql("SELECT id FROM jobs WHERE settled_at IS NULL") == []


def test_a_job_that_parks_has_no_result(lab: Lab, run: Any) -> None:
    """Its state says so, and waiting for it does not pass for a result."""
    a = lab.effect("a")
    lab.behaviour["a"] = ValueError("?")
    task = lab.task(lambda self: a().ref, effects=[a])
    result = run(task)
    assert (result.state, result.ready(), result.successful(), lab.status(result.id)) == (
        "UNKNOWN",
        False,
        False,
        "unknown",
    )
    with pytest.raises(exceptions.TimeoutError, match="outcome_unknown"):
        result.get()
    lab.safe.resolve(f"{result.id}:1", Happened("seen"), actor="ops", reason="seen")
    again = run(task, task_id=result.id)
    assert (again.get(), len(lab.calls)) == ("seen", 1)


def test_what_did_not_happen_waits_for_a_worker(lab: Lab, run: Any) -> None:
    a = lab.effect("a", not_happened_on=ConnectionRefusedError)
    lab.behaviour["a"] = ConnectionRefusedError(111, "refused")
    lab.app.conf.task_routes = {"eager.routed": {"queue": "slow"}}
    result = run(lab.task(lambda self: a().ref, effects=[a], name="eager.routed"))
    assert (result.state, lab.status(result.id), lab.row(result.id)["queue"]) == ("RETRY", "queued", "slow")
    with pytest.raises(exceptions.TimeoutError, match="not_happened"):
        result.get()


def test_a_cancelled_job_and_an_ignored_one(lab: Lab, run: Any) -> None:
    def cancelled(self: Any) -> Any:
        lab.safe.cancel(self.job.id, "not wanted")
        self.job.checkpoint()

    def ignored(self: Any) -> Any:
        raise Ignore

    result = run(lab.task(cancelled, effects=[]))
    assert (result.state, lab.status(result.id)) == ("REVOKED", "cancelled")
    with pytest.raises(exceptions.TaskRevokedError):
        result.get()
    result = run(lab.task(ignored, effects=[]))
    assert (result.state, result.get(), lab.row(result.id)["reason"]) == ("IGNORED", None, "ignored")


@pytest.mark.parametrize("how", ["option", "setting"])
def test_errors_that_propagate(lab: Lab, run: Any, how: str) -> None:
    """As in Celery: raised to the caller, who then knows. A retry is raised, too, and left to a worker."""
    lab.app.conf.task_eager_propagates = how == "setting"
    options = {"throw": True} if how == "option" else {}

    def body(self: Any, retries: bool) -> Any:
        if retries:
            raise self.retry(countdown=1)
        raise KeyError("no")

    task = lab.task(body, effects=[])
    with pytest.raises(KeyError):
        run(task, False, **options)
    (row,) = lab.sql("SELECT status, settled_at FROM jobs")
    assert row["status"] == "failed"
    assert row["settled_at"] is not None
    with pytest.raises(Retry):
        run(task, True, **options)
    assert len(lab.sql("SELECT id FROM jobs WHERE status = 'queued'")) == 1


def test_stored_eager_results(lab: Lab) -> None:
    a = lab.effect("a")
    lab.app.conf.update(task_always_eager=True, task_store_eager_result=True)
    task = lab.task(lambda self, n: a(n).ref, effects=[a])
    good = task.delay(1)
    assert lab.app.backend.get_task_meta(good.id)["result"] == "a-1"
    lab.behaviour["a"] = ValueError("?")
    parked = task.delay(2)
    assert lab.app.backend.get_task_meta(parked.id)["status"] == "UNKNOWN"


# -- the same call twice -----------------------------------------------------------------------------------------------


def test_an_id_is_one_job(lab: Lab, run: Any) -> None:
    a = lab.effect("a")
    task = lab.task(lambda self, n: a(n).ref, effects=[a])
    job = str(uuid4())
    assert [run(task, 1, task_id=job).get() for _ in range(2)] == ["a-1", "a-1"]
    with pytest.raises(IdempotencyConflict, match=job):
        run(task, 2, task_id=job)
    assert len(lab.calls) == 1


def test_a_job_that_runs_another_one_here_runs_it_once(lab: Lab, run: Any) -> None:
    a, b = lab.effect("a"), lab.effect("b")
    inner = lab.task(lambda self, n: a(n).ref, effects=[a])

    def body(self: Any) -> Any:
        first = run(inner, 1).get(disable_sync_subtasks=False)
        second = run(inner, 2).get(disable_sync_subtasks=False)
        if self.job.attempt == 1:
            lab.crash(self)
        return [first, second, b().ref]

    outer = lab.task(body, effects=[b])
    job = str(uuid4())
    with contextlib.suppress(SystemExit):
        outer.apply(task_id=job)
    assert outer.apply(task_id=job).get() == ["a-1", "a-2", "b-3"]
    assert [name for name, _ in lab.calls] == ["a", "a", "b"]
    assert len(lab.safe.jobs()) == 3
    assert {row.parent_id for row in lab.safe.jobs() if row.id != job} == {job}


# -- canvases ----------------------------------------------------------------------------------------------------------


def test_canvases(lab: Lab) -> None:
    lab.app.conf.task_always_eager = True
    a = lab.effect("a")
    one = lab.task(lambda self, *args: a(*args).result, effects=[a])
    total = lab.task(lambda self, found: len(found), effects=[])
    assert chain(one.s(1), one.s(2)).apply_async().get() == [[1], 2]
    assert group(one.s(1), one.s(2)).apply_async().get() == [[1], [2]]
    assert chord([one.s(1), one.s(2)], total.s()).apply_async().get() == 2
    assert one.apply_async((5,), link=one.s(6)).get() == [5]
    lab.safe.flush()
    assert {row.status for row in lab.safe.jobs()} == {"succeeded"}
    assert len(lab.safe.jobs()) == 2 + 2 + 3 + 2


@pytest.mark.parametrize("canvas", ["chain", "chord", "link"])
def test_nothing_goes_on_from_a_parked_job(lab: Lab, canvas: str) -> None:
    lab.app.conf.task_always_eager = True
    a, b = lab.effect("a"), lab.effect("b")
    lab.behaviour["a"] = ValueError("?")
    parks, follows = lab.task(lambda self: a().ref, effects=[a]), lab.task(lambda self, x: b().ref, effects=[b])
    if canvas == "link":
        assert parks.apply_async(link=follows.s()).state == "UNKNOWN"
    else:
        made = chain(parks.s(), follows.s()) if canvas == "chain" else chord([parks.s()], follows.s())
        with pytest.raises(exceptions.TimeoutError):
            made.apply_async()
    assert [name for name, _ in lab.calls] == ["a"]


# -- outside of any job ------------------------------------------------------------------------------------------------


def test_an_effect_outside_of_any_job(lab: Lab) -> None:
    a = lab.effect("a")

    @lab.app.task(shared=False, name="eager.plain")
    def plain() -> Any:
        return a().ref

    task = lab.task(lambda self: a().ref, effects=[a])
    for call in (a, plain, task, task.run, lambda: plain.apply().get()):
        with pytest.raises(NoActiveJob):
            call()
    assert (lab.calls, lab.safe.jobs()) == ([], [])
    # A plain task that a job's body calls is a part of that job.
    assert lab.row(lab.run(lab.task(lambda self: plain(), effects=[a])))["result"] == "a-1"


def test_threads_of_a_body_and_older_ones(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a prefork child, what a job starts belongs to it; what an earlier job left behind does not."""
    monkeypatch.setattr(type(lab.safe), "prefork", True)
    a = lab.effect("a", kill_at_deadline=False)
    go, found = threading.Event(), []

    def left_behind() -> None:
        go.wait(20)
        try:
            found.append(a())
        except NoActiveJob as exc:
            found.append(exc)

    def first(self: Any) -> Any:
        threading.Thread(target=left_behind).start()
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(a).result(20).ref

    def second(self: Any) -> Any:
        go.set()
        while not found:
            threading.Event().wait(0.01)
        return a().ref

    one, other = lab.run(lab.task(first, effects=[a])), lab.run(lab.task(second, effects=[a]))
    assert [key for _, key in lab.calls] == [f"{one}:1", f"{other}:1"]
    assert isinstance(found[0], NoActiveJob)
