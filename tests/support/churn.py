"""Jobs that go through the tables in large batches: the same moves of rows as by workers, with all triggers."""

from __future__ import annotations

from typing import Any, Final

import psycopg

PARTS: Final = ("job", "operation", "transition", "tombstone")

LIFE: Final = (
    """
INSERT INTO job (id, task, tenant, queue, idempotency_key, args_digest, envelope, settle, express, gives_up_at,
                 next_publish_at)
SELECT gen_random_uuid(), 'task', 't' || n % 50, 'celery', gen_random_uuid(), 'd',
       convert_to(repeat('{"a":1}', 30), 'UTF8'), true, false, now() + interval '1 day', now() + interval '1 minute'
  FROM generate_series(1, {batch}) n
""",
    """
UPDATE job SET next_publish_at = NULL, published_at = clock_timestamp(), publishes = 1 WHERE status = 'queued'
""",
    """
UPDATE job SET status = 'running', fence = fence + 1, attempts = 1, lease_token = gen_random_uuid(),
       lease_owner = 'w/1/1', lease_until = now() + interval '1 minute', leased_at = now(), started_at = now(),
       actor = 'w/1/1'
 WHERE status = 'queued'
""",
    """
INSERT INTO operation (key, job_id, step, ordinal, effect, status, fence, nonce, args_digest, recorded_by)
SELECT id || ':1', id, '1', 1, 'effect', 'intent_recorded', fence, gen_random_uuid(), 'd', 'w/1/1'
  FROM job WHERE status = 'running'
""",
    "UPDATE job SET lease_until = now() + interval '2 minutes' WHERE status = 'running'",
    """
UPDATE operation SET status = 'outcome_confirmed', provider_ref = key, resolved_at = now(), resolved_by = 'w/1/1',
       actor = 'w/1/1' WHERE status = 'intent_recorded'
""",
    """
UPDATE job SET status = 'succeeded', outcome_ref = id, result = '1', lease_until = NULL, lease_owner = NULL,
       finished_at = clock_timestamp(), actor = 'w/1/1' WHERE status = 'running'
""",
    """
UPDATE job SET settled_at = clock_timestamp()
 WHERE status = 'succeeded' AND settled_at IS NULL AND finished_at > {since}
""",
)
"""What happens to a batch: accept, publish, claim and start, intent, renew, outcome, end, settle."""


def live(connection: psycopg.Connection[Any], batch: int) -> None:
    """Let a batch of jobs succeed, each with one effect.

    Arguments:
        connection: in autocommit mode, the schema in its search path.
        batch: how many; nothing else may be under way.
    """
    (began,) = connection.execute("SELECT clock_timestamp()::text").fetchone() or ("",)
    for statement in LIFE:
        words = statement.replace("{batch}", str(batch)).replace("{since}", f"'{began}'::timestamptz")
        connection.execute(words.encode())


def sizes(connection: psycopg.Connection[Any]) -> dict[str, int]:
    """Bytes of each table (with TOAST) and of each of its indexes, by name."""
    found = connection.execute(
        "SELECT relname, pg_table_size(oid) FROM pg_class WHERE oid = ANY (%(parts)s::regclass[])"
        " UNION ALL SELECT i.relname, pg_relation_size(i.oid) FROM pg_class i JOIN pg_index x ON x.indexrelid = i.oid"
        " WHERE x.indrelid = ANY (%(parts)s::regclass[]) ORDER BY 1",
        {"parts": list(PARTS)},
    )
    return dict(found.fetchall())


def rebuilt(connection: psycopg.Connection[Any]) -> dict[str, int]:
    """The same after everything was written anew: what the live rows take."""
    for part in PARTS:
        connection.execute(f"VACUUM (FULL, ANALYZE) {part}".encode())
    return sizes(connection)


def ratios(now: dict[str, int], live: dict[str, int]) -> dict[str, float]:
    """How many times its live size each table takes, and its indexes together: those of what is under way are empty."""
    found = {}
    for part in PARTS:
        indexes = [name for name in now if name.startswith(f"{part}_")]
        found[part] = now[part] / max(live[part], 1)
        found[f"indexes of {part}"] = sum(now[name] for name in indexes) / max(sum(live[name] for name in indexes), 1)
    return found


__all__ = ["PARTS", "live", "ratios", "rebuilt", "sizes"]
