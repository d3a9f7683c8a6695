"""When `status` says unhealthy."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_safe_effects.config import Config
from celery_safe_effects.doctor import health
from celery_safe_effects.states import JobStatus, OperationStatus

NOW = datetime(2026, 1, 2, tzinfo=timezone.utc)
CONFIG = Config("postgresql://", sweep_interval=5, reconcile_interval=10)


def overview(**changes: Any) -> dict[str, Any]:
    return {
        "at": NOW,
        "jobs": {},
        "operations": {},
        "sweep_finished_at": None,
        "reconcile_started_at": None,
        "double_effects": 0,
        "double_effect_keys": [],
        **changes,
    }


def codes(**changes: Any) -> tuple[list[str], list[str]]:
    problems, warnings = health.judge(overview(**changes), CONFIG)
    return [p.code for p in problems], [w.code for w in warnings]


def test_an_empty_system_that_nobody_swept_is_well() -> None:
    assert codes() == ([], [])


@pytest.mark.parametrize("status", list(JobStatus))
def test_jobs_that_nobody_sweeps(status: JobStatus) -> None:
    done = status in {JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED}
    assert codes(jobs={status.value: 1}) == ([] if done else ["sweep_stale"], [])


@pytest.mark.parametrize(("seconds", "stale"), [(0, False), (29, False), (31, True)])
def test_a_sweep_is_stale_after_several_intervals(seconds: float, stale: bool) -> None:
    found = codes(jobs={"queued": 1}, sweep_finished_at=NOW - timedelta(seconds=seconds))
    assert found == (["sweep_stale"] if stale else [], [])


def test_a_double_effect_is_named() -> None:
    problems, _ = health.judge(overview(double_effects=11, double_effect_keys=["a:1", "b:1"]), CONFIG)
    assert [p.code for p in problems] == ["double_effect"]
    assert "a:1, b:1, …" in problems[0].message


@pytest.mark.parametrize(("seconds", "stale"), [(59, False), (61, True)])
def test_unknown_operations_that_nobody_asks_about_are_a_warning(seconds: float, stale: bool) -> None:
    found = codes(operations={OperationStatus.UNKNOWN.value: 1}, reconcile_started_at=NOW - timedelta(seconds=seconds))
    assert found == ([], ["reconcile_stale"] if stale else [])
