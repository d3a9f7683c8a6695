"""What must hold over the views and the provider's ledger, whatever was killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from celery_safe_effects.states import (
    JOB_TRANSITIONS,
    OPERATION_TRANSITIONS,
    TERMINAL,
    UNRESOLVED,
    JobStatus,
    OperationStatus,
)
from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.services import Sql

Record = dict[str, Any]


def job(sql: Sql, job_id: str) -> Record:
    """Read one row of the view of jobs.

    Args:
        sql: queries.
        job_id: the job.

    Returns:
        The row.
    """
    (row,) = sql("SELECT * FROM jobs WHERE id = %s", job_id)
    return row


def operation(sql: Sql, key: str) -> Record:
    """Read one row of the view of operations.

    Args:
        sql: queries.
        key: its key.

    Returns:
        The row.
    """
    (row,) = sql("SELECT * FROM operations WHERE key = %s", key)
    return row


def wait_status(sql: Sql, job_id: str, *statuses: str, timeout: float = 30.0) -> Record:
    """Wait until a job has one of some statuses.

    Args:
        sql: queries.
        job_id: the job.
        *statuses: the statuses.
        timeout: seconds.

    Returns:
        The job's row.
    """

    def reached() -> Record | None:
        row = job(sql, job_id)
        assert row["status"] in statuses, (row["status"], row["reason"], log(sql, job_id))
        return row

    found = eventually(reached, timeout, message=f"job {job_id} is {' or '.join(statuses)}")
    assert found is not None
    return found


def log(sql: Sql, job_id: str) -> list[str]:
    """Read the log of transitions of a job.

    Args:
        sql: queries.
        job_id: the job.

    Returns:
        A line for each row: `job queued > leased #1` or `1 unknown > outcome_confirmed #1 (lookup)`: the job or
        the step, the two states, the fence, the reason. `~` stands for the job's id.
    """
    rows = sql("SELECT * FROM transitions WHERE job_id = %s ORDER BY id", job_id)
    lines = []
    for row in rows:
        subject = row["operation_key"].removeprefix(f"{job_id}:") if row["operation_key"] else "job"
        reason = f" ({row['reason'].replace(job_id, '~')})" if row["reason"] else ""
        lines.append(
            f"{subject} {row['from_status'] or '-'} > {row['to_status']} #{row['fence']}{reason}".replace(job_id, "~")
        )
    return lines


def assert_log(sql: Sql, job_id: str, *expected: Sequence[str]) -> None:
    """Hold a job's whole log against what it must be.

    Args:
        sql: queries.
        job_id: the job.
        *expected: the log's lines, as `log` writes them; several where a race has several right ends.
    """
    found = log(sql, job_id)
    if len(expected) == 1:
        assert found == list(expected[0])
    assert found in [list(lines) for lines in expected]


def assert_ledger(provider: Provider, sql: Sql, job_id: str, step: str = "1", kind: str | None = None) -> Record:
    """Hold one confirmed operation against the ledger: one row, under its key, with its reference.

    Args:
        provider: the judge.
        sql: queries.
        job_id: the job.
        step: its step.
        kind: the ledger's kind; None takes every kind.

    Returns:
        The ledger's row.
    """
    key = f"{job_id}:{step}"
    (row,) = provider.ledger(key=key, kind=kind)
    found = operation(sql, key)
    assert found["status"] == OperationStatus.OUTCOME_CONFIRMED
    assert found["provider_ref"] == row["ref"]
    return row


def assert_invariants(sql: Sql, provider: Provider) -> None:
    """Hold every row of the three views, and of the ledger, against what always holds.

    Args:
        sql: queries.
        provider: the judge.
    """

    def looked() -> tuple[dict[str, Record], dict[str, Record], list[Record], list[Record], list[Record]] | None:
        before = sql("SELECT max(id) AS last FROM transitions")
        jobs = {row["id"]: row for row in sql("SELECT * FROM jobs")}
        operations = {
            row["key"]: row for row in sql("SELECT o.*, p.repeatable FROM operations o JOIN operation p USING (key)")
        }
        transitions = sql("SELECT * FROM transitions ORDER BY id")
        counters = sql("SELECT id, open_ops, unknown_ops, asking_ops FROM job")
        ledger = provider.ledger()
        still = before == sql("SELECT max(id) AS last FROM transitions")
        return (jobs, operations, transitions, counters, ledger) if still else None

    seen = eventually(looked, message="nothing moves while it is looked at")
    assert seen is not None
    jobs, operations, transitions, counters, ledger = seen
    _check_log(jobs, operations, transitions)
    _check_jobs(jobs, operations)
    _check_counters(counters, operations)
    _check_ledger(jobs, operations, ledger)


def _check_log(jobs: dict[str, Record], operations: dict[str, Record], transitions: list[Record]) -> None:
    last: dict[str, str] = {}
    fences: dict[str, int] = {}
    claims: Counter[str] = Counter()
    for row in transitions:
        assert row["actor"], row
        assert row["job_id"] in jobs, row
        before, after = row["from_status"], row["to_status"]
        if row["operation_key"] is not None:
            subject = f"operation {row['operation_key']}"
            assert row["operation_key"] in operations, row
            if before is None:
                assert after == OperationStatus.INTENT_RECORDED, row
            else:
                assert after in OPERATION_TRANSITIONS[OperationStatus(before)], row
        else:
            subject = f"job {row['job_id']}"
            if before is None:
                assert after == JobStatus.QUEUED or row["reason"] == "row_missing", row
            else:
                assert after in JOB_TRANSITIONS[JobStatus(before)], row
            fence = fences.setdefault(row["job_id"], 0)
            if after == JobStatus.LEASED:
                assert row["fence"] > fence, f"a claim without a higher fence: {row}"
                claims[row["job_id"]] += 1
            else:
                assert row["fence"] == fence, f"a fence that no claim took: {row}"
            if after == JobStatus.RUNNING:
                assert before == JobStatus.LEASED, f"a start without its claim: {row}"
            fences[row["job_id"]] = row["fence"]
        assert last.get(subject) == before, f"the log has a gap before {row}"
        last[subject] = after
    for row in jobs.values():
        assert last[f"job {row['id']}"] == row["status"], row
        assert fences[row["id"]] == row["fence"], row
        assert claims[row["id"]] == row["fence"], row
    for row in operations.values():
        assert last[f"operation {row['key']}"] == row["status"], row


def _check_jobs(jobs: dict[str, Record], operations: dict[str, Record]) -> None:
    keys = Counter((row["tenant"], row["idempotency_key"]) for row in jobs.values() if row["idempotency_key"])
    assert not [key for key, times in keys.items() if times > 1]
    for row in jobs.values():
        own = [o for o in operations.values() if o["job_id"] == row["id"]]
        if row["status"] == JobStatus.SUCCEEDED:
            assert row["outcome_ref"], row
        if row["status"] in TERMINAL:
            assert not [o for o in own if o["status"] in UNRESOLVED], row
        if row["status"] in {JobStatus.LEASED, JobStatus.RUNNING}:
            assert row["lease_owner"], row
            assert row["lease_until"], row
        else:
            assert not [o for o in own if o["status"] == OperationStatus.INTENT_RECORDED], row


def _check_counters(counters: list[Record], operations: dict[str, Record]) -> None:
    for row in counters:
        own = [o for o in operations.values() if o["job_id"] == row["id"]]
        started = [o for o in own if o["status"] == OperationStatus.INTENT_RECORDED]
        assert row["open_ops"] == len([o for o in started if not o["repeatable"]]), row
        assert row["asking_ops"] == len([o for o in started if o["repeatable"]]), row
        assert row["unknown_ops"] == len([o for o in own if o["status"] == OperationStatus.UNKNOWN]), row


def _check_ledger(jobs: dict[str, Record], operations: dict[str, Record], ledger: list[Record]) -> None:
    by_key: dict[tuple[str, str], Record] = {}
    for row in ledger:
        if row["key"] is None:
            continue
        assert (row["kind"], row["key"]) not in by_key, f"happened twice: {row}"
        by_key[row["kind"], row["key"]] = row
        assert row["key"] in operations, f"happened without an intent: {row}"
        found = operations[row["key"]]
        assert found["status"] not in {OperationStatus.NOT_HAPPENED, OperationStatus.REFUSED}, (row, found)
        if found["status"] == OperationStatus.OUTCOME_CONFIRMED:
            assert found["provider_ref"] == row["ref"], (row, found)
