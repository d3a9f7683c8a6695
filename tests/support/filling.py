"""A database that has seen much: rows as they would be by now, written without the triggers."""

from __future__ import annotations

from typing import Final, NamedTuple

import psycopg

SCHEMA: Final = "safe_effects"
AT_ONCE: Final = 1_000_000


class Filling(NamedTuple):
    """How many rows of each kind; nothing of it is due, ``old`` finished jobs aside, which are past their retention."""

    finished: int = 0
    queued: int = 0
    later: int = 0
    parked: int = 0
    old: int = 0


FINISHED = """
INSERT INTO job (id, task, tenant, queue, args_digest, status, outcome_ref, envelope, settle, created_at, leased_at,
                 started_at, finished_at, settled_at, attempts, fence)
SELECT gen_random_uuid(), 'task.' || i %% 7, 't' || i %% 50, 'q' || i %% 4, 'd',
       CASE WHEN i %% 1000 = 0 THEN 'cancelled' WHEN i %% 100 = 0 THEN 'failed' ELSE 'succeeded' END, 'r',
       convert_to(repeat('{"a":1}', 30), 'UTF8'), false, at, at, at, at, at, 1, 1
  FROM generate_series(%(first)s::bigint, %(last)s::bigint) i
 CROSS JOIN LATERAL (SELECT now() - interval '1 hour' - (%(all)s::bigint - i) * interval '5 ms' AS at) t
"""
EFFECTS = """
INSERT INTO operation (key, job_id, step, ordinal, effect, status, fence, nonce, args_digest, provider_ref,
                       first_intent_at, intent_at)
SELECT id || ':1', id, '1', 1, 'effect.' || seq %% 5, 'outcome_confirmed', 1, gen_random_uuid(), 'd', 'r', created_at,
       created_at FROM job WHERE seq BETWEEN %(first)s AND %(last)s
"""
LOG = """
INSERT INTO transition (at, job_id, from_status, to_status, fence, actor)
SELECT j.created_at, j.id, m.was, m.now, 1, 'worker@host/1/1'
  FROM job j CROSS JOIN (VALUES (NULL, 'queued'), ('running', 'succeeded')) AS m (was, now)
 WHERE j.seq BETWEEN %(first)s AND %(last)s
"""
"""Two rows of six: nothing reads this table but by job."""
WAITING = """
INSERT INTO job (id, task, tenant, queue, args_digest, status, envelope, published_at, publishes, express, gives_up_at)
SELECT 'q' || i, 'task.' || i %% 7, CASE WHEN i %% 10 = 0 THEN 't' || i %% 50 ELSE 'big' END, 'q' || i %% 4, 'd',
       'queued', 'x', now() - interval '1 hour' + i * interval '1 ms', 1, false, now() + interval '1 day'
  FROM generate_series(1, %(queued)s) i;
"""
LATER = """
INSERT INTO job (id, task, tenant, queue, args_digest, status, envelope, eta, run_after, next_publish_at, gives_up_at)
SELECT 'l' || i, 't', 'big', 'q0', 'd', 'queued', 'x', t.at, t.at, t.at, t.at + interval '1 day'
  FROM generate_series(1, %(later)s) i CROSS JOIN LATERAL (SELECT now() + interval '1 day' + i * interval '1 s' AS at) t
"""
PARKED = """
INSERT INTO job (id, task, tenant, queue, args_digest, status, reason, envelope, unknown_ops, express)
SELECT 'u' || i, 't', 'big', 'q0', 'd', 'unknown', 'lease_expired', 'x', 1, false
  FROM generate_series(1, %(parked)s) i
"""
QUESTIONS = """
INSERT INTO operation (key, job_id, step, ordinal, effect, status, fence, nonce, args_digest, next_reconcile_at)
SELECT 'u' || i || ':1', 'u' || i, '1', 1, 'e', 'unknown', 1, gen_random_uuid(), 'd', now() + interval '1 hour'
  FROM generate_series(1, %(parked)s) i
"""
PARKINGS = """
INSERT INTO transition (job_id, from_status, to_status, fence, actor, reason)
SELECT 'u' || i, 'running', 'unknown', 1, 'sweep', 'lease_expired' FROM generate_series(1, %(parked)s) i
"""
TOMBSTONES = """
INSERT INTO tombstone (id, tenant, task, args_digest, status)
SELECT gen_random_uuid(), 't', 't', 'd', 'succeeded' FROM generate_series(1, %(finished)s) i
"""
OLD = """
UPDATE job SET finished_at = finished_at - interval '90 days'
 WHERE seq IN (SELECT seq FROM job WHERE status = 'succeeded' ORDER BY finished_at LIMIT %(old)s)
"""


def fill(connection: psycopg.Connection, filling: Filling) -> None:
    """Fill an empty schema, and let PostgreSQL look at what it has.

    Arguments:
        connection: in autocommit mode, of the schema's owner.
        filling: how much of what.
    """
    execute = connection.execute
    execute(f"SET search_path = {SCHEMA}".encode())
    tables = ("job", "operation", "transition", "tombstone")
    for table in tables[:2]:
        execute(f"ALTER TABLE {table} DISABLE TRIGGER USER".encode())
    rebuilt = _without_indexes(connection) if filling.finished > AT_ONCE else []
    for first in range(1, filling.finished + 1, AT_ONCE):
        part = {"first": first, "last": min(first + AT_ONCE - 1, filling.finished), "all": filling.finished}
        execute(FINISHED.encode(), part)
        for statement in (EFFECTS, LOG):
            execute(statement.encode(), part)
    for statement in (WAITING, LATER, PARKED, QUESTIONS, PARKINGS, TOMBSTONES):
        execute(statement.encode(), filling._asdict())
    for statement in rebuilt:
        execute(statement.encode())
    if filling.old:
        execute(OLD.encode(), filling._asdict())
    for table in tables[:2]:
        execute(f"ALTER TABLE {table} ENABLE TRIGGER USER".encode())
    execute("VACUUM ANALYZE")


def _without_indexes(connection: psycopg.Connection) -> list[str]:
    """Drop the indexes; what makes them again, which is faster than adding to them."""
    connection.execute("SET maintenance_work_mem = '1GB'")
    keys = connection.execute(
        "SELECT conrelid::regclass, conname, pg_get_constraintdef(oid) FROM pg_constraint"
        " WHERE contype = 'p' AND conrelid = ANY (ARRAY['job', 'operation', 'transition', 'tombstone']::regclass[])"
    ).fetchall()
    others = connection.execute(
        "SELECT indexrelid::regclass, pg_get_indexdef(indexrelid) FROM pg_index"
        " WHERE NOT indisprimary AND indrelid = ANY (ARRAY['job', 'operation', 'transition', 'tombstone']::regclass[])"
    ).fetchall()
    for table, name, _ in keys:
        connection.execute(f"ALTER TABLE {table} DROP CONSTRAINT {name}".encode())
    for name, _ in others:
        connection.execute(f"DROP INDEX {name}".encode())
    return [f"ALTER TABLE {table} ADD CONSTRAINT {name} {made}" for table, name, made in keys] + [
        made for _, made in others
    ]


__all__ = ["Filling", "fill"]
