"""Jobs pass through, and leave no more than what is kept: `python3 tests/bench_retention.py` with fewer of them.

Autovacuum belongs to the server, and to its own time; here it is called by its name, when a fourteenth of what is
kept is dead: the tables ask for it at a twentieth.
"""

from __future__ import annotations

import time
from dataclasses import replace

import psycopg

from celery_safe_effects.config import Retention
from celery_safe_effects.engine.prune import Pruner
from tests.support import churn
from tests.support.protocol import Protocol, make_store
from tests.support.services import Sql

BATCH, BATCHES, KEPT = 200, 70, 14


def test_tables_and_indexes_stay_within_twice_what_is_kept(database_url: str, dsn: str, sql: Sql) -> None:
    store = make_store(database_url)
    actor = Protocol(store)
    actor.parked()
    ends: list[float] = []
    pruned = 0
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET search_path = safe_effects; SET synchronous_commit = off")
        for number in range(BATCHES):
            churn.live(connection, BATCH)
            ends.append(time.monotonic())
            if number >= KEPT:
                age = time.monotonic() - ends[number - KEPT]
                store.config = replace(store.config, retention=Retention(succeeded=age, failed=age, cancelled=age))
                pruned += Pruner(store).run("test").jobs
            connection.execute("VACUUM job, operation, transition, tombstone")
        now = churn.sizes(connection)
        live = churn.rebuilt(connection)
    # What came just after is as old by the time it is looked for, if that takes a while.
    kept = BATCHES * BATCH - pruned
    assert KEPT // 2 * BATCH < kept <= KEPT * BATCH
    assert {row["status"]: row["n"] for row in sql("SELECT status, count(*) AS n FROM jobs GROUP BY 1")} == {
        "succeeded": kept,
        "unknown": 1,
    }
    assert sql("SELECT count(*) AS n FROM tombstone") == [{"n": pruned}]
    assert sql("SELECT count(DISTINCT job_id) AS n FROM transitions") == [{"n": kept + 1}]
    ratios = churn.ratios(now, live)
    print(ratios)
    assert {name: ratio for name, ratio in ratios.items() if ratio > 2} == {}
    store.connections.close()
