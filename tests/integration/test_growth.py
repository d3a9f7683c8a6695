"""What the statements that run all the time touch does not grow with what has ended, waits, or is parked.

How long they take beside 10 million jobs: `python3 tests/bench_growth.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from celery_safe_effects.states import JobStatus, OperationStatus
from celery_safe_effects.store import statements
from celery_safe_effects.store.hot import Store
from tests.support.filling import PARKED, QUESTIONS, Filling, fill
from tests.support.protocol import make_store

FILLING = Filling(finished=20_000, queued=5_000, later=5_000, parked=3_000)
MOST = 200
"""Rows that a statement may look at; nothing of the filling is due."""
FEW = 15
"""What bounds the statements that count and list."""

JOBS = {"statuses": [s.value for s in JobStatus], "looked": FEW, "limit": FEW, "tenant": None, "task": None}
OPERATIONS = {
    "statuses": [s.value for s in OperationStatus if s != OperationStatus.UNKNOWN],
    "looked": FEW, "limit": FEW, "effect": None, "older": None, "tenant": None,
}  # fmt: skip
"""Unknown operations are searched to the last one, by an operator's hand alone."""

STATEMENTS: dict[str, list[dict[str, Any]]] = {
    "CLAIM": [{
        "id": "q7", "token": uuid4(), "owner": "w", "ttl": 30.0, "generation": 0, "digest": "d", "limits": None,
        "task": None, "seq": None, "tenant": None,
    }],
    "SWEEP_LEASES": [{
        "limit": 500, "wish": "again", "reason": "lease_expired", "delay": 1.0, "max_delay": 60.0, "actor": "s",
    }],
    "SWEEP_DYING": [{"id": None, "limit": 500, "actor": "s"}],
    "DUE": [{"ids": None, "limit": 500, "ahead": 5.0, "settle_tries": 8, "republish": 60.0}],
    "RECONCILE_DUE": [{"keys": None, "busy": [], "limit": 100, "hold": 30.0}],
    "PRUNE": [{"succeeded": 86400.0, "failed": 2592000.0, "cancelled": 2592000.0, "limit": 500}],
    "PRUNE_TOMBSTONES": [{"retention": 86400.0, "limit": 500}],
    "WAKE_FREE": [{"limits": "{}"}],
    "REAP_RESERVATIONS": [{"limit": 500}],
    "LOOKS": [{"every": 5.0}],
    "REPUBLISH": [{
        "queue": "q1", "priority": 0, "since": None, "at": datetime.now(timezone.utc), "limit": 50,
    }],
    # The exporter's, with its bounds made small.
    "METRICS_BEGIN": [{}],
    "METRICS_QUEUES": [{"queues": 50, "sample": FEW, "patience": 60.0}],
    "METRICS_DEPTHS": [{"queues": ["q0", "q1", "q2", "q3"], "most": FEW}],
    "METRICS_USE": [{"tenants": ["big", "t1", "t2"], "pools": ["gpu"], "most": FEW}],
    "METRICS_LIVE": [{"most": FEW}],
    "METRICS_UNKNOWN": [{"most": FEW}],
    "METRICS_PARKED": [{"most": FEW}],
    "METRICS_WAITING": [{"most": FEW}],
    "METRICS_COUNTERS": [{"most": FEW}],
    "METRICS_MAINTENANCE": [{}],
    "METRICS_WORKERS": [{"most": FEW}],
    "METRICS_REST": [{"most": FEW}],
    # What `status`, the pages and every list of the command line ask.
    "VIEW_OVERVIEW": [{"most": FEW, "ended": FEW}],
    "VIEW_JOB": [{"id": "q7"}],
    "VIEW_JOBS": [
        JOBS,
        {**JOBS, "statuses": ["succeeded"]},
        {**JOBS, "statuses": ["failed", "queued"], "tenant": "nobody"},
        {**JOBS, "statuses": ["queued"], "tenant": "big", "task": "nothing"},
    ],
    "VIEW_JOBS_BEYOND": [JOBS],
    "VIEW_LIVE": [{"tenant": None, "task": None, "limit": FEW}],
    "VIEW_OPERATION": [{"key": "u7:1"}],
    "VIEW_OPERATIONS": [
        OPERATIONS,
        {**OPERATIONS, "statuses": ["unknown"]},
        {**OPERATIONS, "statuses": ["outcome_confirmed"], "effect": "nothing"},
    ],
    "VIEW_OPERATIONS_OF_JOB": [{**OPERATIONS, "job": "u7", "statuses": ["unknown"]}],
    "VIEW_TRANSITIONS": [{"id": "u7", "after": 0}],
    "DOCTOR_STATE": [{"most": FEW}],
    "DOCTOR_LONGEST": [{"most": FEW}],
    "DOCTOR_EFFECTS": [{"most": FEW}],
}  # fmt: skip


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    made = make_store(database_url)
    yield made
    made.connections.close()


def touched(node: dict[str, Any]) -> int:
    """Rows that a plan looked at in tables, those that it threw away included: without an index, all of them."""
    found = sum(touched(child) for child in node.get("Plans", ()))
    if node["Node Type"].endswith("Scan") and "Relation Name" in node:
        rows = (
            node["Actual Rows"] + node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
        )
        found += round(rows * node["Actual Loops"])
    return found


def test_a_statement_touches_what_is_due_and_no_more(store: Store, dsn: str) -> None:
    found: dict[str, int] = {}
    with psycopg.connect(dsn, autocommit=True) as connection:
        fill(connection, FILLING)
        for name, params in ((name, params) for name, many in STATEMENTS.items() for params in many):
            with connection.transaction(force_rollback=True):
                row = connection.execute(
                    f"EXPLAIN (ANALYZE, FORMAT JSON) {store.sql[name]}".encode(), params
                ).fetchone()
            assert row is not None
            plan = row[0] if isinstance(row[0], list) else json.loads(row[0])
            found[f"{name} {params}"] = touched(plan[0]["Plan"])
    print(*(f"{rows:5} {call}" for call, rows in found.items()), sep="\n")
    assert {call: n for call, n in found.items() if n > MOST} == {}


def test_every_question_of_the_exporter_the_pages_and_the_command_line_is_among_them() -> None:
    asked = {name for name in vars(statements) if name.startswith(("METRICS_", "VIEW_", "DOCTOR_"))}
    not_of_jobs = {"DOCTOR_DATABASE", "DOCTOR_RIGHTS", "DOCTOR_TASKS"}
    assert asked - not_of_jobs - set(STATEMENTS) == set()


# -- whatever the planner believes ------------------------------------------------------------------------------------

QUEUE = """
INSERT INTO job (id, task, tenant, queue, args_digest, status, envelope, settle, published_at, publishes, express,
                 gives_up_at)
SELECT 'q' || i, 'task.0', CASE WHEN i %% 10 = 0 THEN 't' || i %% 50 ELSE 'big' END, 'q' || i %% 4, 'd',
       'queued', 'x', true, now() - interval '1 hour' + i * interval '1 ms', 1, false, now() + interval '1 day'
  FROM generate_series(%(first)s::integer, %(last)s::integer) i
"""
SAMPLES: dict[str, Any] = {
    "id": "q7", "job": "q7", "ids": ["q7", "q8"], "token": uuid4(), "tokens": [uuid4()], "fence": 1, "fences": [1, 1],
    "ttl": 30.0, "ttls": [30.0], "owner": "w/1/1", "actor": "operator:o", "by": "w", "key": "u7:1", "keys": ["u7:1"],
    "nonce": uuid4(), "generation": 0, "digest": "d", "limits": '{"tenant_running": 5, "pool": 5}', "most": 5,
    "limit": 50, "wish": "again", "reason": "tests", "delay": 1.0, "max_delay": 60.0, "refund": 0, "error": None,
    "attempt": 1, "status": "outcome_confirmed", "ref": "r", "result": None, "evidence": None, "trusted": True,
    "asked_at": datetime.now(timezone.utc), "at": datetime.now(timezone.utc), "after": 1.0, "ahead": 5.0,
    "settle_tries": 8, "republish": 60.0, "scopes": ["slot/tenant/big"], "new_keys": "{}", "wanted": 7, "ordinal": 1,
    "position": None, "busy": [], "hold": 30.0, "processes": ["p"], "in_flight": 60.0, "here": "h", "stamps": ["s"],
    "task": None, "seq": None, "tenant": None, "queue": "q1", "priority": 0, "since": None, "every": 5.0, "depth": 5000,
    "first": 1, "window": 16.0, "grace": 10.0, "waited": 50.0,
}  # fmt: skip
MANY = 20
ACCEPTED: dict[str, Any] = {
    **{name: [None] * MANY for name in statements.ACCEPTED_COLUMNS},
    "id": [f"new{n}" for n in range(MANY)], "key": [f"k{n}" for n in range(MANY)], "task": ["t"] * MANY,
    "tenant": ["t3"] * MANY, "priority": [0] * MANY, "digest": ["d"] * MANY, "retries": [0] * MANY,
    "limits": ['{"max_attempts": 5, "tenant_queued": 1000}'] * MANY, "envelope": [b"x"] * MANY,
    "settle": [True] * MANY, "fair": [False] * MANY, "actor": "p", "admitted": False, "enlisted": False,
    "patience": "2s", "lead": 5.0, "due": None,
}  # fmt: skip
"""Of a tenant that has nothing queued: what it has queued is counted for its limit."""
ENDS: dict[str, Any] = {
    "wish": "succeeded", "reason": None, "ref": "result", "result": "null", "error": None, "delay": 0.0, "run_at": None,
    "expires": None, "queue": None, "priority": None, "refund": 0, "waiting_for": None, "patience": 60.0, "hold": None,
    "settle": None, "envelope": None, "digest": None, "retries": None, "generation": None, "task": None,
}  # fmt: skip
OTHERWISE: dict[str, dict[str, Any]] = {
    "RENEW": {"ids": ["q7"], "fences": [1]}, "UNREAD": {"by": 1}, "RECONCILE_DUE": {"keys": None},
    "ACCEPT_MANY": ACCEPTED,
}  # fmt: skip
KEYED = [
    "CLAIM", "PUBLISH_SOON", "JOB", "RECORDED", "INTENT_OF", "OPERATION", "OUTCOME", "OUTCOME_ASYNC",
    "LATE_OUTCOME", "WENT_ON", "MORE_ATTEMPTS", "CHECKPOINT", "RENEW", "TELL", "SETTLE", "UNSETTLE", "REMIND",
    "LOST", "READING", "STORED", "READ", "UNREAD", "DUE", "RECONCILE_DUE", "VERDICT", "ABSENT", "POLICY", "ASK_AT",
    "RESUME", "CANCEL", "REVOKE", "REVOKE_STAMPED", "RETRY", "WOKEN", "SWEEP_LEASES", "SWEEP_DYING", "WAKE_FREE",
    "PROMOTE", "LOOKS", "LOOK", "ASTRAY", "REPUBLISH", "ACCEPT_MANY",
]  # fmt: skip
"""Those that look for rows by a key, or for few that are due; who sent unknown operations is asked of all of them."""


LIVE = """
INSERT INTO job (id, task, tenant, queue, args_digest, status, envelope, attempts, fence, lease_token, lease_owner,
                 lease_until, leased_at, started_at, published_at, publishes, gives_up_at)
SELECT 'x' || i, 'task.0', 't' || i %% 50, 'q' || i %% 4, 'd', 'running', 'x', 1, 1, %(token)s, 'w/1/1',
       now() + interval '1 hour', now(), now(), now(), 1, now() + interval '1 day'
  FROM generate_series(%(first)s::integer, %(last)s::integer) i
"""
OF_A_RUN: dict[str, dict[str, Any]] = {
    "INTENT": {
        "step": "1", "effect": "tests.effect", "keyed": False, "repeatable": False, "whole_body": False, "args": "{}",
        "args_digest": "d", "deadline": 60.0, "lag": 0.0, "idempotent_for": None, "has_lookup": True,
        "if_unknown": "park", "detached": False, "deadline_kills": True, "deadline_is_proof": False, "trace": None,
        "process": "p", "key": "x1:1",
    },
    "OUTCOME": {"key": "x1:1"},
    "CHECKPOINT": {}, "WENT_ON": {}, "MORE_ATTEMPTS": {}, "LOST": {},
    "RENEW": {"ids": ["x1"], "tokens": [SAMPLES["token"]], "fences": [1]},
    "BODY_PENDING": {**ENDS, "pending": "queued"},
    "LEAVE": ENDS,
}  # fmt: skip
"""What a worker says of a job that runs."""


class Reads:
    """Counts the rows that statements read, whose plans the connection makes once."""

    def __init__(self, connection: psycopg.Connection[Any], store: Store) -> None:
        self.connection = connection
        self.sql = store.sql

    def _so_far(self) -> int:
        row = self.connection.execute(
            "SELECT sum(seq_tup_read + idx_tup_fetch)::bigint FROM pg_stat_xact_user_tables WHERE relname <> 'limits'"
        ).fetchone()
        assert row is not None
        return int(row[0] or 0)

    def of(self, *calls: tuple[str, dict[str, Any]], find: bool = False) -> int:
        """How many, by statements in one transaction that is rolled back; each must find its row where `find` says."""
        with self.connection.transaction(force_rollback=True):
            before = self._so_far()
            for name, params in calls:
                row = self.connection.execute(self.sql[name].encode(), {**SAMPLES, **params}, prepare=True).fetchone()
                assert row is not None or not find, name
            return self._so_far() - before


def test_a_connection_plans_each_statement_once(store: Store) -> None:
    """Or the larger ones are planned anew each time; what asks for plans of its values says so in its transaction."""
    with store.connections.connection() as connection:
        assert connection.execute("SHOW plan_cache_mode").fetchone() == ("force_generic_plan",)
    with store.transaction() as run:
        assert run("METRICS_BEGIN")[0].plans == "force_custom_plan"
    with store.connections.connection() as connection:
        assert connection.execute("SHOW plan_cache_mode").fetchone() == ("force_generic_plan",)


def test_plans_that_were_made_when_nothing_ran_do_not_read_all_that_runs(store: Store, dsn: str) -> None:
    """With thousands of leases, the row of one job is one row."""
    mine = {"id": "x1", "job": "x1"}
    calls = {name: {**mine, **params} for name, params in OF_A_RUN.items()}
    with psycopg.connect(dsn, autocommit=True) as connection, psycopg.connect(dsn, autocommit=True) as other:
        fill(other, Filling(finished=20_000))
        other.execute("ALTER TABLE job SET (autovacuum_enabled = off)")
        other.execute("ANALYZE")
        other.execute("SET session_replication_role = replica")
        connection.execute("SET plan_cache_mode = force_generic_plan")
        reads = Reads(connection, store)
        for name, params in calls.items():
            reads.of((name, params))
        other.execute(LIVE.encode(), {"first": 1, "last": 5_000, "token": SAMPLES["token"]})
        found = {name: reads.of((name, params), find=name != "OUTCOME") for name, params in calls.items()}
    print(*(f"{rows:6} {name}" for name, rows in found.items()), sep="\n")
    assert {name: n for name, n in found.items() if n > FEW} == {}


def test_plans_that_were_made_when_nothing_was_queued_do_not_read_a_whole_queue(store: Store, dsn: str) -> None:
    """A connection keeps its plans, and beside many finished jobs it takes a large burst to have the table analysed."""
    calls = {name: [(name, OTHERWISE.get(name, {}))] for name in KEYED}
    a_run = [("CLAIM", {}), ("LEAVE", ENDS)]  # under limits: its end wakes whoever waits for its slot
    with psycopg.connect(dsn, autocommit=True) as connection, psycopg.connect(dsn, autocommit=True) as other:
        fill(other, Filling(finished=20_000))
        for table in ("job", "operation"):
            other.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)".encode())
        other.execute("ANALYZE")
        other.execute("SET session_replication_role = replica")
        other.execute(QUEUE.encode(), {"first": 1, "last": 9})
        connection.execute("SET plan_cache_mode = force_generic_plan")
        reads = Reads(connection, store)
        for call in calls.values():
            reads.of(*call)
        reads.of(*a_run, find=True)
        other.execute(QUEUE.encode(), {"first": 10, "last": 20_000})
        for statement in (PARKED, QUESTIONS):
            other.execute(statement.encode(), {"parked": 5_000})
        found = {name: reads.of(*call) for name, call in calls.items()}
        found["CLAIM, LEAVE"] = reads.of(*a_run, find=True)
    print(*(f"{rows:6} {name}" for name, rows in found.items()), sep="\n")
    assert {name: n for name, n in found.items() if n > MOST} == {}
