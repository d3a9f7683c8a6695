"""No transaction is open, and no lock of a session is held, while a user's code or a provider's call runs."""

from __future__ import annotations

from typing import Any

import pytest

from celery_safe_effects import Happened, Outcome
from tests.support.lab import Lab

OPEN = (
    "SELECT a.state, a.query FROM pg_stat_activity a WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()"
    " AND (a.state LIKE 'idle in transaction%'"
    "      OR EXISTS (SELECT FROM pg_locks l WHERE l.pid = a.pid AND l.locktype = 'advisory'))"
)
"""The thread that renews leases may have a statement under way: that is no transaction which waits for users' code."""


@pytest.mark.parametrize("whole", [False, True], ids=["declared", "whole-body"])
def test_no_transaction_is_open_while_users_code_runs(lab: Lab, whole: bool) -> None:
    seen: list[tuple[str, Any]] = []

    def look(where: str) -> None:
        seen.append((where, lab.sql(OPEN)))

    def call(op: Any) -> Outcome[Any]:
        look("effect")
        if op.attempt == 1 and not seen_unknown:
            seen_unknown.append(op.key)
            raise ConnectionError("lost")
        return Outcome("done")

    def find(op: Any) -> Happened:
        look("lookup")
        return Happened("found")

    seen_unknown: list[str] = []
    a = lab.effect("a", lookup=True)
    lab.behaviour["a"] = call
    lab.verdict = find

    def body(self: Any) -> None:
        look("body")
        if not whole:
            self.job.checkpoint()
            a()
            look("after the effect")

    options = {} if whole else {"effects": [a]}
    task = lab.task(body, **options)
    job = lab.run(task)
    if not whole:
        lab.reconcile()
        lab.run(task, job=job)
    assert lab.status(job) == "succeeded"
    wanted = {"body"} if whole else {"body", "effect", "lookup", "after the effect"}
    assert {where for where, _ in seen} == wanted
    assert [(where, rows) for where, rows in seen if rows] == []
