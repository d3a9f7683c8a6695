"""A handler that kills its own process: a bounded number of runs, spaced, then failed or parked; never a loop."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.checks import assert_invariants, assert_ledger, assert_log, wait_status
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults

RUNS = 3
REASON = "worker_lost"


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    """Three attempts, and a lease that is not what ends them."""
    app_conf.update(safe_effects_max_attempts=RUNS, safe_effects_lease_ttl=20)
    return app_conf


# Early acknowledgement leaves `reject_on_worker_lost` without a meaning.
@pytest.mark.parametrize(
    ("acks_late", "reject"), [(False, False), (True, False), (True, True)], ids=["early", "late", "late-reject"]
)
def test_04_a_handler_that_kills_its_own_process(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, acks_late: bool, reject: bool
) -> None:
    workers("a", acks_late=acks_late, concurrency=3, conf={"task_reject_on_worker_lost": reject})
    pure = app.tasks["tests.kills_itself"].apply_async()
    effect = app.tasks["tests.kills_itself_in_effect"].apply_async()
    body = app.tasks["tests.kills_itself_undeclared"].apply_async()

    found = wait_status(sql, pure.id, "failed", timeout=40)
    assert (found["attempts"], found["reason"]) == (RUNS, "max_attempts")
    runs = [
        [f"job queued > leased #{n}", f"job leased > running #{n}", f"job running > queued #{n} ({REASON})"]
        for n in range(1, RUNS + 1)
    ]
    assert_log(
        sql,
        pure.id,
        ["job - > queued #0", *runs[0], *runs[1], *runs[2][:2], f"job running > failed #{RUNS} (max_attempts)"],
    )
    assert provider.received("entered_kills_itself") == RUNS
    # The pauses grow: one second, then two.
    gaps = sql(
        "SELECT extract(epoch FROM n.at - t.at)::float8 AS s FROM transitions t, LATERAL (SELECT min(at) AS at"
        " FROM transitions x WHERE x.job_id = t.job_id AND x.id > t.id AND x.to_status = 'leased') n"
        " WHERE t.job_id = %s AND t.from_status = 'running' AND t.to_status = 'queued' ORDER BY t.id",
        pure.id,
    )
    assert [gap["s"] > pause - 0.1 for gap, pause in zip(gaps, (1, 2), strict=True)] == [True, True], gaps
    assert eventually(lambda: pure.state == "FAILURE", 10)

    # Its effect happened: it is found, and the replay does not die of it again.
    found = wait_status(sql, effect.id, "succeeded", timeout=20)
    assert_log(
        sql,
        effect.id,
        [
            "job - > queued #0",
            "job queued > leased #1",
            "job leased > running #1",
            "1 - > intent_recorded #1",
            f"job running > unknown #1 ({REASON})",
            f"1 intent_recorded > unknown #1 ({REASON})",
            "1 unknown > outcome_confirmed #1 (lookup)",
            "job unknown > queued #1 (resolved:~:1)",
            "job queued > leased #2",
            "job leased > running #2",
            "job running > succeeded #2",
        ],
    )
    assert provider.received("fatal") == 1
    assert_ledger(provider, sql, effect.id)

    # Nobody can tell what the undeclared body did: parked, and not run again.
    wait_status(sql, body.id, "unknown")
    assert_log(
        sql,
        body.id,
        [
            "job - > queued #0",
            "body - > intent_recorded #1",
            "job queued > leased #1",
            "job leased > running #1",
            f"job running > unknown #1 ({REASON})",
            f"body intent_recorded > unknown #1 ({REASON})",
        ],
        [
            "job - > queued #0",
            "job queued > leased #1",
            "job leased > running #1",
            "body - > intent_recorded #1",
            f"job running > unknown #1 ({REASON})",
            f"body intent_recorded > unknown #1 ({REASON})",
        ],
    )
    assert provider.received("entered_kills_itself_undeclared") == 1
    assert eventually(lambda: body.state == "UNKNOWN", 10)
    assert_invariants(sql, provider)
