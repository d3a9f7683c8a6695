"""A worker dies at each fault point of the protocol and goes on: one effect a key, and every job comes to an end.

Where each death is to happen stands in one plan, and each has a job of its own; the passes are counted in a folder that
all processes share, so that whoever is started again does not die at the same place twice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery

from celery_safe_effects import Happened, NotHappened, Outcome, Unresolved, faults
from celery_safe_effects.engine import tries
from celery_safe_effects.faults import Fault, Plan, Point
from celery_safe_effects.testing import WorkerProcess, eventually
from celery_safe_effects.testing.process import patience
from example_project.provider_client import Provider
from tests.support.checks import assert_invariants, wait_status
from tests.support.lab import Lab
from tests.support.processes import ROOT, Workers, process_environment
from tests.support.services import Sql

pytestmark = [pytest.mark.faults, pytest.mark.slow]

ON_REDIS = pytest.mark.parametrize("broker", ["redis"], indirect=True)
ENDS = ("succeeded", "failed", "cancelled", "unknown")

OF_A_JOB: dict[str, list[tuple[str, str | None]]] = {
    "tests.charge_then_mail": [
        *[(boundary, None) for boundary in ("claim", "body", "checkpoint", "leave", "tell", "settle")],
        *[(boundary, "1") for boundary in ("intent", "call", "outcome")],
        ("outcome", "2"),
    ],
    "tests.points": [("accept", None), ("chord", None), ("call", "1"), ("call", "3"), ("outcome", "4")],
    "tests.one_plain": [("call", "1"), ("outcome", "1")],
    "tests.retries_itself": [("pending", None), ("outcome", "body"), ("body", None)],
}
"""Boundaries that the child of a worker passes, by task: with the step, where there is one."""
ARGUMENTS = {"tests.charge_then_mail": ("cus", 1)}


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    """Deaths are found soon."""
    app_conf.update(safe_effects_lease_ttl=2, task_acks_late=True)
    return app_conf


def deaths(parent: bool) -> tuple[list[Fault], dict[str, str]]:
    """A death for each boundary, before and after it, each in a job of its own; and these jobs' tasks."""
    planned: list[Fault] = []
    jobs: dict[str, str] = {}
    for task, boundaries in OF_A_JOB.items():
        for boundary, step in boundaries:
            for when in ("before", "after"):
                job = str(uuid4())
                jobs[job] = task
                # What a job sends is accepted under the id of the new job; the chord is one that it sends.
                job_of = None if boundary in ("accept", "chord") else job
                planned.append(Fault(Point(f"{boundary}.{when}"), role="child", job=job_of, step=step, parent=parent))
    return planned, jobs


def enqueue(app: Celery, jobs: dict[str, str]) -> None:
    for job, task in jobs.items():
        app.tasks[task].apply_async(ARGUMENTS.get(task, (job[:8],)), task_id=job)


def judge(sql: Sql, provider: Provider, plan: Plan) -> None:
    """Everything died where it was to, and everything that must hold holds."""
    missing = set(plan.faults) - set(plan.happened())
    assert not missing, f"nothing died at: {'; '.join(map(str, missing))}"
    rows = sql("SELECT id, task, status, reason, attempts FROM jobs")
    assert {row["status"] for row in rows} <= {"succeeded", "unknown"}, rows
    # Parked rightly: what nobody can tell anything about, having neither key nor lookup.
    parked = [row for row in rows if row["status"] == "unknown"]
    assert {row["task"] for row in parked} <= {"tests.one_plain", "tests.retries_itself"}, parked
    happened = Counter((row["kind"], row["key"]) for row in provider.ledger() if row["key"] is not None)
    assert {key: times for key, times in happened.items() if times > 1} == {}
    assert_invariants(sql, provider)


def over(sql: Sql, jobs: dict[str, str]) -> bool:
    """Every job, those that they sent included, has ended or waits for people; what can be asked was asked."""
    open_jobs = sql("SELECT id, task, status, reason FROM jobs WHERE status NOT IN ('succeeded', 'unknown')")
    answerable = sql(
        "SELECT o.key FROM operations o JOIN jobs j ON j.id = o.job_id"
        " WHERE j.status = 'unknown' AND j.task NOT IN ('tests.one_plain', 'tests.retries_itself')"
    )
    present = sql("SELECT count(*)::int AS n FROM jobs")[0]["n"]
    assert (open_jobs, answerable) == ([], [])
    return bool(present >= len(jobs))


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("broker")
def test_the_child_dies_at_each_point(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, tmp_path: Path, acks_late: bool
) -> None:
    planned, jobs = deaths(parent=False)
    plan = Plan(planned, tmp_path / "faults")
    plan.prepare()
    worker = workers("a", env=plan.environment(), concurrency=2, acks_late=acks_late)
    assert "FAULT POINTS ARE ARMED" in worker.log()
    enqueue(app, jobs)

    # A child may die of another job before it has settled this one, which then is settled later.
    eventually(lambda: over(sql, jobs) and plan.happened() == list(plan.faults), 150, 0.5, message="all have died")
    judge(sql, provider, plan)


def keep_running(workers: Workers, plan: Plan, done: Any, seconds: float = 120) -> int:
    """Start a worker again and again until something is true; returns how often it was started."""
    limit = time.monotonic() + seconds * patience()
    starts = 0
    worker = next((one for one in workers.started if isinstance(one, WorkerProcess) and one.running), None)
    while True:
        with contextlib.suppress(AssertionError):
            if done():
                return starts
        assert time.monotonic() < limit, f"happened: {plan.happened()}"
        if worker is None or not worker.running:
            if worker is not None:
                worker.kill()
            starts += 1
            worker = workers(f"w{len(workers.started)}", env=plan.environment(), concurrency=2, ready=False)
        time.sleep(0.2)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("broker")
def test_the_whole_worker_dies_at_each_point(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, tmp_path: Path
) -> None:
    """With its main process; also where that one acknowledges, stands in for a sweep, or tells of a lost child."""
    children, jobs = deaths(parent=True)
    wanted = {
        "tests.charge_then_mail": ["claim.after", "call.after", "tell.before"],
        "tests.points": [],
        "tests.one_plain": [],
        "tests.retries_itself": [],
    }
    chosen: list[Fault] = []
    kept: dict[str, str] = {}
    for fault, (job, task) in zip(children, jobs.items(), strict=True):
        if str(fault.point) in wanted[task] and fault.point not in {one.point for one in chosen}:
            chosen.append(fault)
            kept[job] = task
    main = [
        Fault(Point.AFTER_ACK, role="main"),
        Fault(Point.AFTER_VERDICT, role="sweeper"),
    ]
    # Last and alone, so that the main process does not die of something else meanwhile.
    lost = {str(uuid4()): "tests.charge_then_mail"}
    last = [
        Fault(Point.AFTER_CALL, role="child", job=next(iter(lost)), step="2"),
        Fault(Point.BEFORE_LOST, role="main", job=next(iter(lost))),
    ]
    plan = Plan([*chosen, *main, *last], tmp_path / "faults")
    plan.prepare()
    enqueue(app, kept)
    starts = keep_running(workers, plan, lambda: over(sql, kept) and len(plan.happened()) >= len(chosen) + len(main))
    enqueue(app, lost)
    starts += keep_running(workers, plan, lambda: over(sql, kept | lost) and plan.happened() == list(plan.faults))

    assert starts > len(chosen)
    judge(sql, provider, plan)


PRODUCER = """
import os, sys
from tests.support.app import app
for job in sys.argv[1:]:
    pid = os.fork()
    if not pid:
        app.tasks["tests.charge"].apply_async(("cus", 1), task_id=job, idempotency_key=job)
        os._exit(0)
    print(-os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.usefixtures("broker")
def test_the_producer_dies_at_each_point(
    app: Celery, app_conf: dict[str, Any], workers: Workers, provider: Provider, sql: Sql, tmp_path: Path
) -> None:
    """What it had not been told is enqueued again under the same key, and runs once."""
    points = [Point.BEFORE_ACCEPT, Point.AFTER_ACCEPT, Point.BEFORE_PUBLISH, Point.AFTER_PUBLISH]
    jobs = {point: str(uuid4()) for point in points}
    plan = Plan([Fault(point, role="producer", job=job) for point, job in jobs.items()], tmp_path / "faults")
    plan.prepare()
    env = {**os.environ, **process_environment(app_conf, provider), **plan.environment()}
    done = subprocess.run(
        [sys.executable, "-c", PRODUCER, *jobs.values()],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert [int(line) for line in done.stdout.split()] == [signal.SIGKILL] * len(points), done.stderr
    assert {row["id"] for row in sql("SELECT id FROM jobs")} == {jobs[point] for point in points[1:]}

    for job in jobs.values():
        again = app.tasks["tests.charge"].apply_async(("cus", 1), task_id=job, idempotency_key=job)
        assert again.id == job
    workers("a")
    for job in jobs.values():
        wait_status(sql, job, "succeeded")
        assert len(provider.ledger(key=f"{job}:1")) == 1
    assert_invariants(sql, provider)


# -- no point is there for nothing -------------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Plan]:
    """This process records the points that it passes."""
    plan = Plan(folder=tmp_path / "faults", record=True)
    faults.enter("producer")  # another test may have been a worker here
    faults.arm(plan)
    yield plan
    faults.disarm()


@ON_REDIS
@pytest.mark.usefixtures("broker")
def test_every_point_is_passed_by_the_protocol(
    app: Celery, workers: Workers, provider: Provider, lab: Lab, sql: Sql, recorded: Plan
) -> None:
    """A member that nobody passes would let a matrix of deaths claim what it does not try."""
    lost, untold, slow, plain = (str(uuid4()) for _ in range(4))
    dying = [
        Fault(Point.AFTER_CALL, role="child", job=plain),
        Fault(Point.AFTER_CALL, role="child", job=lost, step="1"),
        Fault(Point.BEFORE_TELL, role="child", job=untold),
    ]
    worker = workers("a", env=Plan(dying, recorded.folder, record=True).environment(), concurrency=2)
    app.tasks["tests.charge"].apply_async(("cus", 1), task_id=lost)
    app.tasks["tests.charge"].apply_async(("cus", 1), task_id=untold)
    app.tasks["tests.sleep"].apply_async((2,), task_id=slow)
    app.tasks["tests.one_plain"].apply_async(("x",), task_id=plain)
    jobs = [lost, untold, slow]
    jobs += [app.tasks[f"tests.{name}"].apply_async(("x",)).id for name in ("retries_itself", "points")]
    eventually(lambda: _settled(sql, *jobs), 60, message="the worker's jobs have ended")
    eventually(lambda: sql("SELECT 1 FROM operation WHERE job_id = %s AND gone_at IS NOT NULL", plain), 30)
    worker.kill()  # it would be given the laboratory's jobs, too, whose tasks it does not know
    _pass_in_process(lab)

    passed = {one.point for one in recorded.passes()}
    assert sorted(map(str, set(Point) - passed)) == []
    assert {one.role for one in recorded.passes()} == {"producer", "main", "child", "sweeper"}


def _settled(sql: Sql, *jobs: str) -> bool:
    return all(
        sql("SELECT 1 FROM jobs WHERE id = %s AND status = 'succeeded' AND settled_at IS NOT NULL", job) for job in jobs
    )


def _pass_in_process(lab: Lab) -> None:
    """What only operators, caller's transactions, late workers and restored databases pass."""
    a, b = lab.effect("a", lookup=True), lab.effect("b", not_happened_on=(ConnectionRefusedError,))
    k = lab.effect("k", idempotent_for=3600)
    plain = lab.task(lambda self: None, effects=[])
    asked = lab.task(lambda self: a().ref, effects=[a])
    # An outcome that comes late, and verdicts of every kind.
    job = str(uuid4())

    def late(op: Any) -> Any:
        lab.sql("UPDATE job SET lease_until = clock_timestamp() - interval '1 s' WHERE id = %s", job)
        lab.safe.sweep()
        lab.behaviour["a"] = None
        lab.safe.resolve(op.key, NotHappened(), actor="ops", reason="a wrong guess")
        lab.sql("UPDATE job SET run_after = NULL")
        other = threading.Thread(target=lab.run, args=(asked,), kwargs={"job": job})
        other.start()
        other.join()
        return Outcome("late")

    lab.behaviour["a"] = late
    lab.run(asked, job=job)
    lab.behaviour["a"] = ConnectionError("lost")
    job = lab.run(asked)
    lab.verdict = Unresolved("ask later")
    lab.reconcile()
    lab.verdict = Happened("found")
    lab.reconcile()
    assert lab.status(job) == "queued"
    # A key is sent again.
    lab.behaviour["k"] = ConnectionError("lost")
    resent = lab.run(lab.task(lambda self: k().ref, effects=[k]))
    lab.past_deadline()
    lab.reconcile()
    assert lab.status(resent) == "queued"

    # The body goes on behind what did not happen.
    def goes_on(self: Any) -> Any:
        with contextlib.suppress(ConnectionRefusedError):
            b()
        plain.apply()

    lab.behaviour["b"] = ConnectionRefusedError("nobody there")
    lab.run(lab.task(goes_on, effects=[b]))
    # Operators.
    queued = plain.apply_async(countdown=3600).id
    lab.safe.cancel(queued, "not wanted")
    lab.safe.retry(queued, "wanted after all")
    lab.safe.cancel(queued, "not wanted")
    tries.may_read(lab.safe.store, queued)
    lab.safe.prune()
    lab.safe.new_epoch()
    lab.safe.park_restored(spare=lab.safe.task_names())
