"""Fault points: off they cost one look at one attribute; armed, each does what its plan says, and says so."""

from __future__ import annotations

import ast
import dis
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_safe_effects import faults
from celery_safe_effects.engine.calls import Call
from celery_safe_effects.errors import ConfigurationError
from celery_safe_effects.faults import Fault, InjectedFault, Plan, Point
from celery_safe_effects.store import grants, statements
from celery_safe_effects.store.hot import Store
from celery_safe_effects.testing import eventually

PACKAGE = Path(faults.__file__).parent
WRITES = re.compile(r"\b(INSERT INTO|UPDATE \{s\}|DELETE FROM|UPDATE SET|wake_free\(|prune_log\()")


@pytest.fixture(autouse=True)
def _off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    assert faults.armed is None
    monkeypatch.setattr(faults.logger, "disabled", False)  # another test's library may have configured logging
    yield
    faults.disarm()
    faults.enter("producer")


def test_each_boundary_has_a_point_before_and_one_after_it() -> None:
    assert len({point.value for point in Point}) == len(Point)
    for point in Point:
        boundary, _, when = point.value.partition(".")
        other = {"before": "after", "after": "before"}[when]
        assert Point(f"{boundary}.{other}") is not point
        assert point.name == f"{when}_{boundary}".upper()


@pytest.mark.parametrize("name", sorted(grants.STATEMENTS))
def test_every_statement_that_decides_has_points(name: str) -> None:
    """Whoever adds a statement that writes says whether a crash around it is a boundary of the protocol."""
    if WRITES.search(getattr(statements, name)):
        assert (name in faults.COMMITS) != (name in faults.BOOKKEEPING)


def test_only_statements_have_points() -> None:
    assert {*faults.COMMITS, *faults.BOOKKEEPING} <= set(grants.STATEMENTS)


def _calls_of_points() -> list[tuple[str, int]]:
    """Every call of `faults.at` that stands under no `if faults.armed is not None`."""
    bare = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        guarded = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "faults.armed is not None"
            for inner in ast.walk(node)
        }
        bare += [
            (path.name, node.lineno)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "faults.at" and id(node) not in guarded
        ]
    return bare


def test_off_a_point_is_one_look_at_one_attribute() -> None:
    assert _calls_of_points() == []


def test_off_a_point_costs_nothing_that_can_be_measured() -> None:
    """Compared with a round trip to the database on the same machine, of about a hundred microseconds."""
    rounds = 100_000

    def with_point() -> None:
        for _ in range(rounds):
            if faults.armed is not None:
                faults.at(Point.BEFORE_CALL)

    def without() -> None:
        for _ in range(rounds):
            pass

    def best(run: object) -> float:
        assert callable(run)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        return min(times) / rounds

    assert best(with_point) - best(without) < 1e-6
    # Nothing else of this module is asked on the way of a statement or a call: no plan, no mapping of points.
    for code in (Store.send.__code__, Call.run.__code__):
        assert "COMMITS" not in code.co_names
        names = [one.argval for one in dis.get_instructions(code) if one.opname.startswith("LOAD_ATTR")]
        assert names.count("armed") == 1


def test_a_plan_goes_through_the_environment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = Plan(
        (
            Fault(Point.AFTER_CLAIM, "delay", "child", job="j1", seconds=0.5, on=2),
            Fault(Point.BEFORE_CALL, "wait", step="charge", until="/nowhere"),
            Fault(Point.BEFORE_LEAVE, parent=True),
        ),
        tmp_path / "faults",
        record=True,
    )
    with caplog.at_level(logging.CRITICAL):
        faults.arm_from_environment(plan.environment())
    armed = faults.armed
    assert armed is not None
    assert (armed.faults, armed.folder, armed.record) == (plan.faults, plan.folder, True)
    assert "FAULT POINTS ARE ARMED" in caplog.text
    assert "delay at claim.after role=child job=j1 pass 2" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.CRITICAL):
        faults.arm_from_environment({})  # a worker that is armed already says it in its own log
    assert "FAULT POINTS ARE ARMED" in caplog.text


def test_without_a_plan_nothing_is_armed(caplog: pytest.LogCaptureFixture) -> None:
    faults.arm_from_environment({})
    assert faults.armed is None
    assert caplog.text == ""


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "[]",
        '{"fault": []}',
        '{"faults": [{"point": "nowhere"}]}',
        '{"faults": [{"point": "ack.before", "on": 0}]}',
        '{"faults": [{"point": "ack.before", "action": "burn"}]}',
        '{"faults": [{"point": "ack.before", "role": "boss"}]}',
        '{"faults": [{"point": "ack.before", "action": "wait"}]}',
    ],
)
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=faults.VARIABLE):
        faults.arm_from_environment({faults.VARIABLE: text})
    assert faults.armed is None


def _raises(point: Point, job: str = "j", step: str | None = None) -> bool:
    try:
        faults.at(point, job, step)
    except InjectedFault:
        return True
    return False


def test_a_fault_happens_at_its_pass_for_its_job_step_and_role() -> None:
    only = Fault(Point.BEFORE_CALL, "raise", job="j", step="2", on=2, times=2)
    faults.arm(Plan((only,)))
    assert not _raises(Point.AFTER_CALL, "j", "2")
    assert not _raises(Point.BEFORE_CALL, "other", "2")
    assert not _raises(Point.BEFORE_CALL, "j", "1")
    assert [_raises(Point.BEFORE_CALL, "j", "2") for _ in range(5)] == [False, True, True, False, False]
    assert faults.armed is not None
    assert faults.armed.happened() == [only]


def test_a_role_is_of_a_process_or_of_a_thread() -> None:
    faults.arm(Plan((Fault(Point.BEFORE_DUE, "raise", "sweeper", times=0),)))
    assert not _raises(Point.BEFORE_DUE)
    with faults.acting("sweeper"):
        assert _raises(Point.BEFORE_DUE)
        seen: list[str] = []
        thread = threading.Thread(target=lambda: seen.append(faults.role_here()))
        thread.start()
        thread.join()
        assert seen == ["producer"]
    assert faults.role_here() == "producer"
    faults.enter("main")
    assert faults.role_here() == "main"
    faults._process = (os.getppid(), "main")
    assert faults.role_here() == "child"


def test_statements_say_which_job_and_step_they_are_about() -> None:
    assert faults._about({"job": "a", "key": "a:charge"}) == (("a",), "charge")
    assert faults._about({"job": "a", "key": "t/effect/name"}) == (("a",), None)
    assert faults._about({"ids": ["a", "b"], "key": None}) == (("a", "b"), None)
    assert faults._about({"ids": None, "id": "c", "step": "1"}) == (("c",), "1")


def _process(plan: Plan, code: str = "faults.at(Point.BEFORE_CALL, 'j')") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from celery_safe_effects import faults\nfrom celery_safe_effects.faults import Point\n"
            f"faults.arm_from_environment()\n{code}\nprint('past')",
        ],
        env={**os.environ, **plan.environment()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_crash_is_a_kill_and_comes_once_over_all_processes(tmp_path: Path) -> None:
    plan = Plan((Fault(Point.BEFORE_CALL, on=2),), tmp_path / "faults", record=True)
    ends = []
    for _ in range(3):
        process = _process(plan)
        out, err = process.communicate(timeout=60)
        ends.append((process.returncode, out.strip()))
        assert "ARMED" in err
    assert ends == [(0, "past"), (-signal.SIGKILL, ""), (0, "past")]
    assert [(one.point, one.role, one.jobs) for one in plan.passes()] == [(Point.BEFORE_CALL, "producer", ("j",))] * 3
    assert len({one.pid for one in plan.passes()}) == 3
    assert plan.happened() == list(plan.faults)


def test_a_pause_stands_until_somebody_continues_it(tmp_path: Path) -> None:
    process = _process(Plan((Fault(Point.BEFORE_CALL, "pause"),), tmp_path / "faults"))
    try:
        state = Path(f"/proc/{process.pid}/stat")
        eventually(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", 30, message="it stands still")
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=60)[0].strip() == "past"
    finally:
        process.kill()


def test_a_wait_ends_when_its_file_is_there(tmp_path: Path) -> None:
    until = tmp_path / "go"
    plan = Plan((Fault(Point.BEFORE_CALL, "wait", until=str(until)),), tmp_path / "faults")
    faults.arm(plan)
    done = threading.Event()

    def passing() -> None:
        faults.at(Point.BEFORE_CALL)
        done.set()

    thread = threading.Thread(target=passing)
    thread.start()
    eventually(plan.happened, 10)
    assert not done.is_set()
    until.touch()
    assert done.wait(10)
    thread.join()


def test_a_delay_takes_its_time() -> None:
    faults.arm(Plan((Fault(Point.BEFORE_CALL, "delay", seconds=0.2),)))
    began = time.monotonic()
    faults.at(Point.BEFORE_CALL)
    assert time.monotonic() - began >= 0.2
