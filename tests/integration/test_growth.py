"""What the statements that run all the time touch does not grow with what has ended, waits, or is parked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from celery_safe_effects.store.hot import Store
from tests.support.protocol import make_store

FINISHED, QUEUED, LATER, PARKED = 20_000, 5_000, 5_000, 3_000
MOST = 200
"""Rows that a statement may look at; nothing of the filling is due."""

FILL = f"""
ALTER TABLE job DISABLE TRIGGER USER;
ALTER TABLE operation DISABLE TRIGGER USER;
INSERT INTO job (id, task, tenant, queue, args_digest, status, outcome_ref, envelope, settle, finished_at, settled_at)
SELECT 'f' || i, 't', 't' || i % 50, 'celery', 'd', CASE WHEN i % 10 = 0 THEN 'failed' ELSE 'succeeded' END, 'r', 'x',
       false, now() - interval '1 hour' - i * interval '1 second', now() FROM generate_series(1, {FINISHED}) i;
INSERT INTO job (id, task, tenant, queue, args_digest, status, envelope, published_at, publishes, express, gives_up_at)
SELECT 'q' || i, 't', 'big', 'celery', 'd', 'queued', 'x', now() - interval '1 hour' + i * interval '1 ms', 1, false,
       now() + interval '1 day' FROM generate_series(1, {QUEUED}) i;
INSERT INTO job (id, task, tenant, queue, args_digest, status, envelope, eta, run_after, next_publish_at, gives_up_at)
SELECT 'l' || i, 't', 'big', 'celery', 'd', 'queued', 'x', t.at, t.at, t.at, t.at + interval '1 day'
  FROM generate_series(1, {LATER}) i CROSS JOIN LATERAL (SELECT now() + interval '1 day' + i * interval '1 s' AS at) t;
INSERT INTO job (id, task, tenant, queue, args_digest, status, envelope, unknown_ops, express)
SELECT 'u' || i, 't', 'big', 'celery', 'd', 'unknown', 'x', 1, false FROM generate_series(1, {PARKED}) i;
INSERT INTO operation (key, job_id, step, ordinal, effect, status, fence, nonce, args_digest, next_reconcile_at)
SELECT 'u' || i || ':1', 'u' || i, '1', 1, 'e', 'unknown', 1, gen_random_uuid(), 'd', now() + interval '1 hour'
  FROM generate_series(1, {PARKED}) i;
INSERT INTO tombstone (id, tenant, task, args_digest, status)
SELECT 'd' || i, 't', 't', 'd', 'succeeded' FROM generate_series(1, {FINISHED}) i;
ALTER TABLE job ENABLE TRIGGER USER;
ALTER TABLE operation ENABLE TRIGGER USER;
"""

STATEMENTS: dict[str, dict[str, Any]] = {
    "CLAIM": {
        "id": "q7", "token": uuid4(), "owner": "w", "ttl": 30.0, "generation": 0, "digest": "d", "limits": None,
        "task": None, "seq": None, "tenant": None,
    },
    "SWEEP_LEASES": {
        "limit": 500, "wish": "again", "reason": "lease_expired", "delay": 1.0, "max_delay": 60.0, "actor": "s",
    },
    "SWEEP_DYING": {"id": None, "limit": 500, "actor": "s"},
    "DUE": {"ids": None, "limit": 500, "ahead": 5.0, "settle_tries": 8, "republish": 60.0},
    "RECONCILE_DUE": {"keys": None, "busy": [], "limit": 100, "hold": 30.0},
    "PRUNE": {"succeeded": 86400.0, "failed": 2592000.0, "cancelled": 2592000.0, "limit": 500},
    "PRUNE_TOMBSTONES": {"retention": 86400.0, "limit": 500},
    "WAKE_FREE": {"limits": "{}"},
    "REAP_RESERVATIONS": {"limit": 500},
    "LOOKS": {"every": 5.0},
    "REPUBLISH": {"queue": "celery", "priority": 0, "since": None, "at": datetime.now(timezone.utc), "limit": 50},
}  # fmt: skip


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    made = make_store(database_url)
    yield made
    made.connections.close()


def touched(node: dict[str, Any]) -> int:
    """Rows that a plan looked at in tables, those that it threw away included."""
    found = sum(touched(child) for child in node.get("Plans", ()))
    if node["Node Type"].endswith("Scan") and "Relation Name" in node:
        rows = (
            node["Actual Rows"] + node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
        )
        found += round(rows * node["Actual Loops"])
    return found


def test_a_statement_touches_what_is_due_and_no_more(store: Store, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET search_path = safe_effects")
        connection.execute(FILL.encode())
        connection.execute("VACUUM ANALYZE")
        most = {}
        for name, params in STATEMENTS.items():
            with connection.transaction(force_rollback=True):
                row = connection.execute(
                    f"EXPLAIN (ANALYZE, FORMAT JSON) {store.sql[name]}".encode(), params
                ).fetchone()
            assert row is not None
            plan = row[0] if isinstance(row[0], list) else json.loads(row[0])
            most[name] = touched(plan[0]["Plan"])
    assert {name: rows for name, rows in most.items() if rows > MOST} == {}
