"""Every statement of the protocol, each with the invariant that it keeps.

``{s}`` is the quoted schema, ``{now}`` the time as a condition that an index can be asked with (a volatile function is
compared row by row), and ``{async}`` an expression that lets the statement's own transaction commit without
waiting for the disk (``NULL`` under ``safe_effects_strict_durability``). Each statement is one round trip and one
transaction. Lock order: job, then operation. Every write reads what it returned.
"""

from __future__ import annotations

from typing import Final

JOB_FACTS: Final = """
    j.id, j.seq, j.task, j.status, j.reason, j.tenant, j.pool, j.fence, j.lease_token, j.attempts, j.max_attempts,
    j.retries, j.generation, j.args_digest,
    coalesce(j.publishes > 0 OR j.next_publish_at <= clock_timestamp(), false) AS settle_due,
    j.cancel_requested_at IS NOT NULL AS cancelled, j.outcome_ref,
    j.result::text AS result, j.error::text AS error, j.settled_at IS NOT NULL AS settled, j.settle, j.held,
    j.open_ops + j.unknown_ops AS unresolved, j.passed, j.new_keys::text AS new_keys, j.waiting_for, j.slots,
    j.operations, j.max_operations,
    CASE WHEN j.expires_at <= clock_timestamp() THEN 'expired'
         WHEN j.gives_up_at <= clock_timestamp() THEN 'max_age' END AS dying,
    extract(epoch FROM j.run_after - clock_timestamp())::float8 AS wait_s"""

OPERATION_FACTS: Final = """
    o.key, o.job_id, o.step, o.ordinal, o.effect, o.status, o.attempt, o.fence, o.nonce, o.args_digest, o.repeatable,
    o.keyed, o.provider_ref, o.result::text AS result, o.error::text AS error, o.first_intent_at, o.intent_at,
    o.deadline_at"""

# Where a row is found by its key, its status is only a condition, and written so that no index fits it: status || ''.
# The words of the indexes (status || ':waits', ...) are explained where those are made.

SCHEMA_VERSION: Final = "SELECT max(version) AS version, max(oldest_code) AS oldest_code FROM {s}.schema_version"

# Which roles were granted what.
ROLES: Final = "SELECT role, array_agg(kind ORDER BY kind) AS kinds FROM {s}.role_grant GROUP BY role ORDER BY role"

# Which database this is, whatever name or pooler leads to it.
IDENTITY: Final = """
SELECT current_database() AS name, (SELECT oid::text FROM pg_database WHERE datname = current_database()) AS id,
       pg_postmaster_start_time()::text AS started
"""

# Running workers: one that has said so lately, and did not say that it stopped; or a live lease.
WORKERS_SEEN: Final = """
SELECT w.who, extract(epoch FROM clock_timestamp() - w.at)::float8 AS ago_s
  FROM (SELECT lease_owner AS who, clock_timestamp() AS at FROM {s}.job WHERE lease_until > clock_timestamp()
         UNION ALL
        SELECT node, seen_at FROM {s}.worker WHERE stopped_at IS NULL) w
 WHERE w.at > clock_timestamp() - %(seen_for)s::float8 * interval '1 second'
 ORDER BY w.at DESC LIMIT 1
"""

ACCEPTED_COLUMNS: Final = {
    "id": "text", "task": "text", "tenant": "text", "pool": "text", "queue": "text", "priority": "smallint",
    "key": "text", "digest": "text", "parent": "text", "retries": "integer", "eta": "timestamptz",
    "expires": "timestamptz", "limits": "jsonb", "envelope": "bytea", "settle": "boolean", "fair": "boolean",
    "stamps": "jsonb",
}  # fmt: skip
"""What ACCEPT is told of each job; the rest of its parameters is said once for all of them."""
_COLUMNS: Final = ", ".join(ACCEPTED_COLUMNS)

_KEY_LOCK: Final = "'{s}.tombstone'::regclass::oid::integer, hashtext({r}.tenant || '/' || {r}.key)"

# 1: one row per tenant and idempotency key, and per id; a tombstone counts as a row. Durable before it is visible. 10:
# and only if the tenant's queue has room, which is counted under the tenant's lock. `publish`: the caller sends the
# message now; else it is due at the ETA, or in `due` seconds, or at once in the express lane.
_ACCEPT: Final = """
INSERT INTO {s}.job AS j (id, task, tenant, pool, queue, express, priority, idempotency_key, args_digest, parent_id,
    retries, max_attempts, attempts_fixed, eta, run_after, expires_at, max_age, gives_up_at, envelope, settle,
    created_by, stamps, next_publish_at, published_at, publishes)
SELECT r.id, r.task, r.tenant, r.pool,
    CASE WHEN r.express AND NOT r.later THEN {s}.express_of(r.queue) ELSE r.queue END,
    CASE WHEN r.fair THEN r.express AND NOT r.later END,
    r.priority, r.key, r.digest, r.parent, r.retries,
    (r.given ->> 'max_attempts')::integer,
    r.limits ? 'attempts_fixed' OR r.given -> 'max_attempts' IS DISTINCT FROM r.limits -> 'max_attempts',
    r.eta, r.eta, r.expires,
    (r.given ->> 'max_age')::float8 * interval '1 second',
    clock_timestamp() + (r.given ->> 'max_age')::float8 * interval '1 second', r.envelope, r.settle, %(actor)s,
    r.stamps,
    CASE WHEN r.later THEN r.eta WHEN r.express THEN clock_timestamp()
         ELSE clock_timestamp() + %(due)s::float8 * interval '1 second' END,
    CASE WHEN NOT (r.later OR r.express) AND %(due)s::float8 IS NULL THEN clock_timestamp() END,
    (NOT (r.later OR r.express) AND %(due)s::float8 IS NULL)::int
  FROM (SELECT a.*, {given} AS given,
               coalesce(a.eta > clock_timestamp() + %(lead)s::float8 * interval '1 second', false) AS later,
               coalesce(a.fair AND {express}, false) AS express
          FROM {asked} OFFSET 0) r
 WHERE set_config('lock_timeout', %(patience)s, true) IS NOT NULL  -- a key in an open transaction: do not hang
   AND NOT EXISTS (SELECT FROM {s}.tombstone t WHERE t.id = r.id)
   AND NOT EXISTS (SELECT FROM {s}.tombstone t WHERE t.tenant = r.tenant AND t.idempotency_key = r.key)
   AND {room}
ON CONFLICT DO NOTHING
RETURNING j.id, j.seq, j.publishes > 0 AS publish, coalesce(j.express, false) AS express
"""
# The same statement over one row and over arrays. What it returns is accepted; who holds the id or the key of the
# others, HOLDERS says, and which limit refused them, QUEUED.
_ONE: Final = "(SELECT " + ", ".join(f"%({name})s::{kind} AS {name}" for name, kind in ACCEPTED_COLUMNS.items()) + ")"
# Arrays go over in the binary format: as text, psycopg quotes each member, which takes twenty times as long.
_ARRAYS: Final = {"text": "%({})b::text[]", "bytea": "%({})b::bytea[]", "jsonb": "%({})b::text[]::jsonb[]"}
_MANY: Final = (
    "SELECT * FROM unnest("
    + ", ".join(_ARRAYS.get(kind, f"%({{}})s::{kind}[]").format(name) for name, kind in ACCEPTED_COLUMNS.items())
    + f")\n        WITH ORDINALITY AS a ({_COLUMNS}, n)"
)
# Places in the queues of limited tenants, for those who are new. In one order of tenants, or two batches could wait
# for each other.
_ROOM: Final = """
free AS MATERIALIZED (
    SELECT t.tenant, {s}.queue_room(t.tenant, t.most) AS places
      FROM (SELECT k.tenant,
                   min(({s}.limits_for(k.tenant, k.task, NULL, k.limits) ->> 'tenant_queued')::integer) AS most
              FROM (SELECT DISTINCT a.tenant, a.task, a.limits FROM asked a) k GROUP BY k.tenant ORDER BY k.tenant) t
     WHERE t.most IS NOT NULL AND NOT {waived}
), place AS MATERIALIZED (
    SELECT a.n, count(*) OVER (PARTITION BY a.tenant ORDER BY a.n) <= f.places AS is_free
      FROM asked a JOIN free f ON f.tenant = a.tenant
     WHERE NOT EXISTS (SELECT FROM {s}.job j WHERE j.id = a.id)
       AND NOT EXISTS (SELECT FROM {s}.job j WHERE j.tenant = a.tenant AND j.idempotency_key = a.key)
)"""
_HAS_PLACE: Final = """(NOT EXISTS (SELECT FROM free f WHERE f.tenant = r.tenant)
        OR EXISTS (SELECT FROM place p WHERE p.n = r.n AND p.is_free))"""
# What is the same for many of them is found out once: their limits, and that a tenant with ten before has a backlog.
_SHARED: Final = """
shared AS MATERIALIZED (
    SELECT k.*, {s}.limits_for(k.tenant, k.task, NULL, k.limits) AS given
      FROM (SELECT DISTINCT a.tenant, a.task, a.limits FROM asked a) k
),"""
_BEFORE: Final = "(row_number() OVER (PARTITION BY a.tenant, a.queue ORDER BY a.n) - 1)::integer"
_ACCEPT_MANY: Final = (
    _ACCEPT.replace("{asked}", "asked a JOIN shared s USING (tenant, task, limits)")
    .replace("{given}", "s.given")
    .replace("{express}", f"{_BEFORE} < 10 AND {{s}}.goes_express(a.tenant, a.queue, {_BEFORE})")
)
ACCEPT: Final = (
    _ACCEPT.replace("{asked}", _ONE + " a")
    .replace("{given}", "{s}.limits_for(a.tenant, a.task, NULL, a.limits)")
    .replace("{express}", "{s}.goes_express(a.tenant, a.queue, 0)")
    .replace(
        "{room}",
        # Nobody waits for a key with the tenant's lock in hand: see TAKE_KEYS.
        """CASE WHEN r.key IS NOT NULL AND NOT %(enlisted)s AND NOT pg_try_advisory_xact_lock_shared({key_lock})
            THEN false
            WHEN %(admitted)s OR r.given ->> 'tenant_queued' IS NULL THEN true
            WHEN %(enlisted)s THEN false  -- its lock would be held as long as the caller's transaction: see RESERVE
            ELSE {s}.queue_room(r.tenant, (r.given ->> 'tenant_queued')::integer) > 0 END""".replace(
            "{key_lock}", _KEY_LOCK.format(s="{s}", r="r")
        ),
    )
)
ACCEPT_MANY: Final = (
    "WITH asked AS MATERIALIZED ("
    + _MANY
    + "),"
    + _SHARED
    + _ROOM.replace("{waived}", "(%(admitted)s OR %(enlisted)s)")
    + _ACCEPT_MANY.replace(
        "{room}", "CASE WHEN %(enlisted)s AND NOT %(admitted)s THEN r.given ->> 'tenant_queued' IS NULL\n"
        "            ELSE " + _HAS_PLACE + " END"
    )
)  # fmt: skip

# Inside a caller's transaction nobody waits for a key that another caller's transaction holds: that one may be waiting
# for a row of the caller's, and PostgreSQL would break one of the two. Which of the keys are not held so: they have a
# row already, or are this transaction's now.
TAKE_KEYS: Final = """
SELECT a.n::integer - 1 AS n FROM unnest(%(tenant)s::text[], %(key)s::text[]) WITH ORDINALITY AS a (tenant, key, n)
 WHERE CASE WHEN EXISTS (SELECT FROM {s}.job j WHERE j.tenant = a.tenant AND j.idempotency_key = a.key) THEN true
            ELSE pg_try_advisory_xact_lock({key_lock}) END
""".replace("{key_lock}", _KEY_LOCK.format(s="{s}", r="a"))

# 10: places in the tenants' queues for jobs that a caller's transaction will insert: committed before, on their own.
RESERVE: Final = (
    """
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest(%(id)s::text[], %(tenant)s::text[], %(task)s::text[], %(key)s::text[], %(limits)s::jsonb[])
        WITH ORDINALITY AS a (id, tenant, task, key, limits, n)
),"""
    + _ROOM.replace("{waived}", "false")
    + """
INSERT INTO {s}.reservation (job_id, tenant, lapses_at)
SELECT r.id, r.tenant, clock_timestamp() + %(lapse)s::float8 * interval '1 second' FROM asked r
 WHERE """
    + _HAS_PLACE
    + """
ON CONFLICT (job_id) DO UPDATE SET lapses_at = excluded.lapses_at
RETURNING job_id, {async} AS a
"""
)
ACCEPT_RESERVED: Final = (
    "WITH kept AS (DELETE FROM {s}.reservation r WHERE r.job_id = ANY (%(id)b::text[]) RETURNING r.job_id),\nasked AS ("
    + _MANY
    + "),"
    + _SHARED[:-1]
    + _ACCEPT_MANY.replace("{room}", "EXISTS (SELECT FROM kept k WHERE k.job_id = r.id)")
)
# The caller's transaction could not insert these after all.
UNRESERVE: Final = """
DELETE FROM {s}.reservation WHERE job_id IN (
    SELECT r.job_id FROM {s}.reservation r WHERE r.job_id = ANY (%(ids)s) FOR UPDATE SKIP LOCKED)
RETURNING job_id, {async} AS a
"""
# Nobody came for these.
REAP_RESERVATIONS: Final = """
DELETE FROM {s}.reservation WHERE job_id IN (
    SELECT r.job_id FROM {s}.reservation r WHERE r.lapses_at <= clock_timestamp()
     LIMIT %(limit)s FOR UPDATE SKIP LOCKED)
RETURNING job_id, {async} AS a
"""

# Why ACCEPT took nothing: the limit, and what stands against it.
QUEUED: Final = """
SELECT ({s}.limits_for(%(tenant)s, %(task)s, NULL, %(limits)s::jsonb) ->> 'tenant_queued')::integer AS most,
       (SELECT count(*) FROM {s}.job j WHERE j.tenant = %(tenant)s AND j.status = 'queued')
       + (SELECT count(*) FROM {s}.reservation r WHERE r.tenant = %(tenant)s) AS taken
"""

# 10: slots that are free and jobs that wait for them, after a limit was changed or a wake-up was lost. In the order in
# which claims lock: tenants, then pools.
WAKE_FREE: Final = """
WITH RECURSIVE scope (name) AS (
    (SELECT j.waiting_for FROM {s}.job j WHERE j.waiting_for >= 'slot/' AND j.waiting_for < 'slot0'
      ORDER BY j.waiting_for DESC LIMIT 1)
    UNION ALL
    SELECT (SELECT j.waiting_for FROM {s}.job j WHERE j.waiting_for >= 'slot/' AND j.waiting_for < s.name
             ORDER BY j.waiting_for DESC LIMIT 1)
      FROM scope s WHERE s.name IS NOT NULL
)
SELECT s.name, {s}.wake_free(s.name, %(limits)s::jsonb) AS woken FROM scope s WHERE s.name IS NOT NULL
"""
# Jobs of tenants that have few queued, behind a long queue since before a worker consumed its express lane.
PROMOTE: Final = """
WITH RECURSIVE pair (tenant, queue) AS (
    (SELECT j.tenant, j.queue FROM {s}.job j WHERE j.status = 'queued' AND j.queue IS NOT NULL
      ORDER BY j.tenant, j.queue LIMIT 1)
    UNION ALL
    SELECT n.tenant, n.queue FROM pair p CROSS JOIN LATERAL (
        SELECT j.tenant, j.queue FROM {s}.job j
         WHERE j.status = 'queued' AND j.queue IS NOT NULL AND (j.tenant, j.queue) > (p.tenant, p.queue)
         ORDER BY j.tenant, j.queue LIMIT 1) n
), chosen AS (
    SELECT c.id FROM pair p
      JOIN {s}.express e ON e.queue = p.queue AND e.until > clock_timestamp()
     CROSS JOIN LATERAL (
        SELECT j.id FROM {s}.job j
         WHERE j.tenant = p.tenant AND j.queue = p.queue AND j.status = 'queued' AND NOT j.express
           AND j.next_publish_at IS NULL AND j.published_at IS NOT NULL
           AND {s}.goes_express(p.tenant, p.queue, 0)
         ORDER BY j.seq LIMIT 10 FOR NO KEY UPDATE SKIP LOCKED) c
     LIMIT %(limit)s
)
UPDATE {s}.job j
   SET queue = {s}.express_of(j.queue), express = true, next_publish_at = clock_timestamp(), published_at = NULL,
       publishes = 0
  FROM chosen WHERE j.id = chosen.id AND j.status || '' = 'queued' AND NOT j.express
RETURNING j.id, {async} AS a
"""
# A worker consumes the express lanes of these queues.
EXPRESS: Final = """
INSERT INTO {s}.express AS e (queue, until)
SELECT q, clock_timestamp() + %(until)s::float8 * interval '1 second' FROM unnest(%(queues)s::text[]) q ORDER BY q
ON CONFLICT (queue) DO UPDATE SET until = greatest(e.until, excluded.until) RETURNING queue, {async} AS a
"""
# Who was woken by the end of a run just now.
WOKEN: Final = """
SELECT j.id FROM {s}.job j
 WHERE j.waiting_for = ANY (%(scopes)s) AND j.woken_at > clock_timestamp() - interval '10 seconds'
   AND j.status || '' = 'queued' AND j.publishes = 0 LIMIT 100
"""

# All scopes of one call, together; a scope without limits is removed.
SET_LIMITS: Final = """
WITH given AS (SELECT * FROM unnest(%(scopes)s::text[], %(values)s::text[]) AS g (scope, value)),
removed AS (
    DELETE FROM {s}.limits l WHERE %(all)s OR l.scope IN (SELECT g.scope FROM given g WHERE g.value IS NULL)
)
INSERT INTO {s}.limits AS l (scope, value, updated_by)
SELECT g.scope, g.value::jsonb, %(actor)s FROM given g WHERE g.value IS NOT NULL
ON CONFLICT (scope) DO UPDATE
   SET value = excluded.value, updated_at = clock_timestamp(), updated_by = excluded.updated_by
RETURNING scope
"""
# What stands against the limits now.
USE: Final = """
SELECT 'tenant' AS kind, j.tenant AS name, count(*) FILTER (WHERE j.status = 'queued') AS queued,
       count(*) FILTER (WHERE j.status <> 'queued') AS running
  FROM {s}.job j WHERE j.status IN ('queued', 'leased', 'running') GROUP BY j.tenant
UNION ALL
SELECT 'pool', j.pool, 0, count(*) FROM {s}.job j
 WHERE j.status IN ('leased', 'running') AND j.pool IS NOT NULL GROUP BY j.pool
"""
LIMITS: Final = "SELECT scope, value::text AS value, updated_at, updated_by FROM {s}.limits ORDER BY scope"

# Who holds the ids or the keys that ACCEPT did not get; in the order of the question.
HOLDERS: Final = """
SELECT r.n::integer - 1 AS n, h.*
  FROM unnest(%(id)s::text[], %(tenant)s::text[], %(key)s::text[]) WITH ORDINALITY AS r (id, tenant, key, n)
 CROSS JOIN LATERAL (
    SELECT j.id, j.task, j.args_digest, j.status, j.seq, j.settled_at IS NOT NULL AS settled
      FROM {s}.job j WHERE j.id = r.id OR (j.tenant = r.tenant AND j.idempotency_key = r.key)
    UNION ALL
    SELECT t.id, t.task, t.args_digest, t.status, NULL, true
      FROM {s}.tombstone t WHERE t.id = r.id OR (t.tenant = r.tenant AND t.idempotency_key = r.key)
    LIMIT 1) h
"""

# The first delivery did not happen, or another is asked for: let the sweeper try soon.
PUBLISH_SOON: Final = """
UPDATE {s}.job SET next_publish_at = greatest(clock_timestamp(), run_after), publishes = 0
 WHERE id = ANY (%(ids)s) AND (status || '' = 'queued' OR next_publish_at IS NOT NULL) RETURNING id
"""

# 2: a claim takes a new random token and a higher fence, only of a queued row, only on the database's clock; claim and
# start are two log rows (the trigger's). May be lost by a crash: no later statement then matches. 10: the trigger also
# decides about limits, under the row's lock; a claim that finds no free slot gives the row back as queued.
_CLAIM: Final = """
UPDATE {s}.job j
   SET status = 'running', fence = j.fence + 1, lease_token = %(token)s, lease_owner = %(owner)s,
       lease_until = clock_timestamp() + %(ttl)s::float8 * interval '1 second', attempts = j.attempts + 1,
       tried = 0, started_at = coalesce(j.started_at, clock_timestamp()), reason = NULL, actor = %(owner)s
 WHERE j.id = %(id)s AND j.status || '' = 'queued' AND j.generation = %(generation)s
   AND set_config('safe_effects.limits', coalesce(%(limits)s, ''), true) IS NOT NULL  -- what take_slots() goes by
   AND j.args_digest = coalesce(%(digest)s, j.args_digest) AND j.task = coalesce(%(task)s, j.task)
   AND j.seq = coalesce(%(seq)s, j.seq) AND j.tenant = coalesce(%(tenant)s, j.tenant)
   AND j.cancel_requested_at IS NULL AND j.attempts < j.max_attempts
   AND (j.run_after IS NULL OR j.run_after <= clock_timestamp())
   AND coalesce(LEAST(j.expires_at, j.gives_up_at) > clock_timestamp(), true)
RETURNING """
# What a run needs of its row, and no more: each column costs.
_RUN: Final = """j.id, j.status, j.tenant, j.pool, j.fence, j.lease_token, j.attempts, j.max_attempts, j.retries,
    j.generation, j.passed, j.new_keys::text AS new_keys, j.slots"""
CLAIM: Final = _CLAIM + _RUN + ", {async} AS a"

_INTENT_COLUMNS: Final = """(key, job_id, step, ordinal, effect, status, keyed, repeatable, whole_body, fence, nonce,
        process, args, args_digest, deadline, lag, deadline_at, absent_from, idempotent_for, has_lookup, if_unknown,
        detached, deadline_kills, deadline_is_proof, trace, recorded_by)"""
_INTENT_VALUES: Final = """%(key)s, j.id, %(step)s, %(ordinal)s, %(effect)s, 'intent_recorded', %(keyed)s,
        %(repeatable)s, %(whole_body)s, j.fence, %(nonce)s::uuid, %(process)s, %(args)s::json, %(args_digest)s,
        %(deadline)s::float8 * interval '1 second', %(lag)s::float8 * interval '1 second',
        clock_timestamp() + %(deadline)s::float8 * interval '1 second',
        clock_timestamp() + (%(deadline)s::float8 + %(lag)s::float8) * interval '1 second',
        %(idempotent_for)s::float8 * interval '1 second', %(has_lookup)s, %(if_unknown)s, %(detached)s,
        %(deadline_kills)s, %(deadline_is_proof)s, %(trace)s, %(owner)s"""
# 4: a new intent on an existing key only when it provably did not happen, or by the resend rule or declared policy.
# A whole body that did not happen may begin anew with other arguments: the author's retry(args=...) gave them.
_INTENT_AGAIN: Final = """ON CONFLICT (key) DO UPDATE
       SET status = 'intent_recorded', job_id = excluded.job_id, ordinal = excluded.ordinal, attempt = o.attempt + 1,
           fence = excluded.fence, nonce = excluded.nonce, process = excluded.process,
           args = excluded.args, args_digest = excluded.args_digest,
           intent_at = clock_timestamp(), deadline = excluded.deadline, lag = excluded.lag,
           deadline_at = excluded.deadline_at, absent_from = excluded.absent_from, has_lookup = excluded.has_lookup,
           if_unknown = excluded.if_unknown, detached = excluded.detached,
           deadline_kills = excluded.deadline_kills, deadline_is_proof = excluded.deadline_is_proof,
           trace = excluded.trace,
           gone_at = NULL, absent_at = NULL, policy_at = NULL, in_doubt = o.status = 'unknown',
           error = NULL, resolved_at = NULL, resolved_by = NULL, next_reconcile_at = NULL, asking_until = NULL,
           actor = %(owner)s,
           reason = CASE WHEN o.status = 'not_happened' THEN 'not_happened'
                         WHEN o.policy_at IS NOT NULL THEN 'policy:send_again' ELSE 'resend' END
     WHERE o.effect = excluded.effect
       AND (o.args_digest = excluded.args_digest OR (o.whole_body AND o.status = 'not_happened'))
       AND (o.status = 'not_happened' OR (o.job_id = excluded.job_id AND {s}.sendable(o)))"""

_BODY_KEY: Final = "j.id || CASE WHEN j.generation > 0 THEN ':' || j.generation ELSE '' END || ':body'"
# The same, and the intent of a whole-body effect with it: durable.
CLAIM_BODY: Final = (
    "WITH c AS ("
    + _CLAIM
    + _RUN
    + """
), i AS (
    INSERT INTO {s}.operation AS o """
    + _INTENT_COLUMNS
    + """
    SELECT """
    + _INTENT_VALUES.replace("%(key)s", _BODY_KEY, 1)
    + """
      FROM c j WHERE j.status = 'running'
    """
    + _INTENT_AGAIN
    + """
    RETURNING o.nonce, o.attempt, o.intent_at, o.deadline_at
)
SELECT c.*, i.nonce, i.attempt AS op_attempt, i.intent_at, i.deadline_at FROM c LEFT JOIN i ON true
"""
)
# The row of a claim that moved nothing: another's, or one's own, whose reply was lost.
CLAIMED: Final = (
    "SELECT "
    + JOB_FACTS
    + """, o.nonce, o.attempt AS op_attempt, o.intent_at, o.deadline_at
  FROM {s}.job j LEFT JOIN {s}.operation o ON o.key = """
    + _BODY_KEY
    + """ AND o.status = 'intent_recorded'
 WHERE j.id = %(id)s
"""
)

JOB: Final = "SELECT " + JOB_FACTS + " FROM {s}.job j WHERE j.id = %(id)s"

# 15: is this database older than the message? Or was it, when its epoch began?
MISSING: Final = """
SELECT EXISTS (SELECT FROM {s}.tombstone WHERE id = %(id)s) AS pruned,
       (SELECT last_value < %(seq)s OR NOT is_called FROM {s}.job_seq_seq)
       OR EXISTS (SELECT FROM {s}.epoch e WHERE e.first_seq > %(seq)s) AS lost
"""

# How many numbers were given to jobs, in all epochs.
_GIVEN: Final = """
SELECT coalesce((SELECT e.given - e.first_seq + 1 FROM {s}.epoch e ORDER BY e.first_seq DESC LIMIT 1), 0)
       + q.last_value - (NOT q.is_called)::int FROM {s}.job_seq_seq q"""
# 15: numbers that no lost state of this database can have given: by the clock, a million for each second.
NEW_EPOCH: Final = (
    """
INSERT INTO {s}.epoch AS e (first_seq, given, actor)
SELECT greatest(q.last_value + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint), ("""
    + _GIVEN
    + """), %(actor)s
  FROM {s}.job_seq_seq q
RETURNING e.first_seq, setval('{s}.job_seq_seq'::regclass, e.first_seq, false) AS a
"""
)
EPOCH: Final = "SELECT max(e.first_seq) AS first_seq FROM {s}.epoch e"
# 6, 15: what was not over in a restored state may have gone on after it, and nothing here tells how far. A whole body
# that asks its one question is left to its lookup; a parked job keeps its questions, but does not go on by itself.
PARK_RESTORED: Final = """
WITH due AS (
    SELECT j.id FROM {s}.job j
     WHERE j.status IN ('queued', 'leased', 'running', 'unknown') AND NOT j.held AND j.cancel_requested_at IS NULL
       AND j.pending_status IS NULL AND j.seq < %(epoch)s AND j.task <> ALL (%(spared)s::text[])
       AND coalesce(j.run_after <= clock_timestamp(), true)
       AND NOT EXISTS (SELECT FROM {s}.operation o
                        WHERE o.job_id = j.id AND o.whole_body AND o.status IN ('intent_recorded', 'unknown'))
     LIMIT %(limit)s FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE {s}.job j
   SET status = 'unknown', held = true, reason = 'restored', waiting_for = NULL, actor = %(actor)s
  FROM due WHERE j.id = due.id AND NOT j.held
RETURNING j.id, j.task, j.status, j.reason, j.fence
"""

# 15: the database was restored from an older state: park, since nothing tells how far the job had come.
INSERT_MISSING: Final = """
INSERT INTO {s}.job (id, task, status, reason, tenant, queue, args_digest, envelope, created_by, held)
VALUES (%(id)s, %(task)s, 'unknown', 'row_missing', %(tenant)s, %(queue)s, %(digest)s, %(envelope)s, %(owner)s, true)
ON CONFLICT DO NOTHING RETURNING id
"""

# What a replay needs: everything that earlier attempts recorded.
RECORDED: Final = (
    "SELECT "
    + OPERATION_FACTS
    + """
  FROM {s}.operation o WHERE o.job_id = %(id)s ORDER BY o.ordinal, o.first_intent_at"""
)
INTENT_OF: Final = """
SELECT o.nonce, o.attempt, o.intent_at, o.deadline_at FROM {s}.operation o WHERE o.key = %(key)s
"""
OPERATION: Final = "SELECT " + OPERATION_FACTS + " FROM {s}.operation o WHERE o.key = %(key)s"

# 3: the intent exists only if the lease is live and the job neither cancelled nor too old, all judged on the locked
# row, on the database's clock. Durable, unless the effect has no outside effect.
_INTENT: Final = (
    """
WITH j AS MATERIALIZED (
    SELECT j.id, j.fence, j.operations, j.max_operations{sync} FROM {s}.job j
     WHERE j.id = %(job)s AND j.lease_token = %(token)s AND j.fence = %(fence)s AND j.status || '' = 'running'
       AND j.lease_until > clock_timestamp() AND j.cancel_requested_at IS NULL
       AND coalesce(LEAST(j.expires_at, j.gives_up_at) > clock_timestamp(), true)
       FOR NO KEY UPDATE
), i AS (
    INSERT INTO {s}.operation AS o """
    + _INTENT_COLUMNS
    + """
    SELECT """
    + _INTENT_VALUES
    + """ FROM j
     WHERE j.max_operations IS NULL OR j.operations < j.max_operations
        OR EXISTS (SELECT FROM {s}.operation r WHERE r.key = %(key)s)
    """
    + _INTENT_AGAIN
    + """
    RETURNING o.nonce, o.attempt, o.intent_at, o.deadline_at
)
SELECT h.held, i.nonce, i.attempt, i.intent_at, i.deadline_at
  FROM (SELECT EXISTS (SELECT FROM j) AS held) h LEFT JOIN i ON true
"""
)
INTENT: Final = _INTENT.replace("{sync}", "")
INTENT_REPEATABLE: Final = _INTENT.replace("{sync}", ", {async} AS a")

# 9: an outcome belongs to the call that holds the nonce; a fenced-out worker may still confirm its own operation. A
# step that did not happen stands, in the order of calls, where that became known: what had begun before is no
# consequence of it. 6: of a call that was sent again, that it did not happen says nothing of the one before,
# nor that it was refused, unless its provider answers a repeated key with the first result.
_OUTCOME: Final = """
WITH j AS MATERIALIZED (
    SELECT j.id, (j.lease_token = %(token)s AND j.fence = %(fence)s AND j.status = 'running') AS held,
           coalesce(j.pending_status, '') AS pending{sync}
      FROM {s}.job j WHERE j.id = %(job)s FOR NO KEY UPDATE
), o AS (
    UPDATE {s}.operation o
       SET status = {said}, provider_ref = %(ref)s, result = %(result)s::json, error = %(error)s::json,
           evidence = coalesce(%(evidence)s::json, o.evidence),
           resolved_at = CASE WHEN {said} <> 'unknown' THEN clock_timestamp() END,
           resolved_by = CASE WHEN {said} <> 'unknown' THEN %(owner)s END,
           double_at = CASE WHEN %(status)s = 'outcome_confirmed' AND o.late_outcomes IS NOT NULL
                             AND (o.idempotent_for IS NULL OR o.late_outcomes::jsonb -> 0 ->> 'ref' <> %(ref)s)
                            THEN clock_timestamp() END,
           next_reconcile_at = CASE WHEN {said} = 'unknown' THEN clock_timestamp() END,
           ordinal = greatest(o.ordinal, %(position)s), actor = %(owner)s, reason = %(reason)s
      FROM j
     WHERE o.key = %(key)s AND o.nonce = %(nonce)s
       AND (o.status = 'intent_recorded' OR (o.status = 'unknown' AND {said} <> 'unknown')
            OR (o.status = 'not_happened' AND %(status)s = 'outcome_confirmed'))
    RETURNING o.status, o.double_at IS NOT NULL AS doubled
)
SELECT j.held, o.status, o.doubled FROM j LEFT JOIN o ON true
""".replace(
    "{said}",
    "CASE WHEN o.in_doubt AND (%(status)s = 'not_happened' OR (%(status)s = 'refused' AND o.idempotent_for IS NULL))\n"
    "             AND (NOT o.whole_body OR j.pending = 'failed') THEN 'unknown' ELSE %(status)s END",
)
OUTCOME: Final = _OUTCOME.replace("{sync}", "")
OUTCOME_ASYNC: Final = _OUTCOME.replace("{sync}", ", {async} AS a")

# 9: evidence of a call whose operation has since been sent again; it never overwrites.
LATE_OUTCOME: Final = """
UPDATE {s}.operation o
   SET late_outcomes = coalesce(o.late_outcomes::jsonb, '[]'::jsonb) || jsonb_build_array(jsonb_build_object(
           'ref', %(ref)s::text, 'nonce', %(nonce)s::text, 'fence', %(fence)s::bigint, 'by', %(owner)s::text,
           'at', clock_timestamp())),
       double_at = CASE WHEN o.status = 'outcome_confirmed' AND (o.idempotent_for IS NULL OR o.provider_ref <> %(ref)s)
                        THEN coalesce(o.double_at, clock_timestamp()) ELSE o.double_at END
 WHERE o.key = %(key)s AND o.nonce <> %(nonce)s
RETURNING o.double_at IS NOT NULL AS doubled
"""

# 5, 6: outcome and status in one guarded statement; an open question parks the job with its pending end. Every way
# out of a run goes through here. Durable: it stands before Celery is told.
_LEAVE_SET: Final = """
       SET status = {s}.leaves_to(j, %(wish)s), held = %(wish)s = 'held',
           pending_status = {s}.pending_end(j, %(wish)s),
           pending_reason = CASE WHEN j.cancel_requested_at IS NOT NULL THEN coalesce(j.cancel_reason, %(reason)s)
                                 ELSE %(reason)s END,
           reason = CASE WHEN %(wish)s = 'again' AND {s}.leaves_to(j, 'again') = 'failed' THEN 'max_attempts'
                         WHEN {s}.leaves_to(j, %(wish)s) = 'cancelled' THEN coalesce(j.cancel_reason, %(reason)s)
                         ELSE %(reason)s END,
           run_after = CASE WHEN {s}.leaves_to(j, %(wish)s) = 'queued'
                            THEN {when} END,
           actor = %(actor)s"""
_WHEN: Final = "coalesce(%(run_at)s::timestamptz, clock_timestamp() + %(delay)s::float8 * interval '1 second')"
# The same without the worker's own word: spaced by a back-off, and once the runs are over, with an error that says so.
_GIVEN_UP_SET: Final = (
    _LEAVE_SET.replace(
        "{when}",
        "clock_timestamp() + interval '1 second'"
        " * LEAST(%(delay)s::float8 * 2 ^ LEAST(j.attempts - 1, 16), %(max_delay)s::float8)",
    )
    + """,
           error = CASE WHEN {s}.leaves_to(j, %(wish)s) = 'failed' THEN (
               SELECT json_build_object('type', 'AttemptsExhausted', 'module', 'celery_safe_effects.errors',
                                        'args', json_build_array(m.text), 'text', m.text)
                 FROM (SELECT format('failed after %%s attempts; the last one ended by: %%s', j.attempts,
                                     %(reason)s::text) AS text) m) ELSE j.error END"""
)
LEAVE: Final = (
    """
UPDATE {s}.job j"""
    + _LEAVE_SET.replace("{when}", _WHEN)
    + """,
           outcome_ref = coalesce(%(ref)s, j.outcome_ref), result = %(result)s::json, error = %(error)s::json,
           attempts = j.attempts - %(refund)s, waiting_for = %(waiting_for)s,
           -- The question was answered before the run could end as unknown: its replay is no run too many.
           max_attempts = CASE WHEN %(wish)s = 'unknown' AND {s}.leaves_to(j, %(wish)s) = 'queued'
                               THEN greatest(j.max_attempts, j.attempts + 1) ELSE j.max_attempts END,
           settle = coalesce(%(settle)s, j.settle),
           envelope = coalesce(%(envelope)s, j.envelope), args_digest = coalesce(%(digest)s, j.args_digest),
           retries = coalesce(%(retries)s, j.retries), generation = coalesce(%(generation)s, j.generation),
           expires_at = coalesce(%(expires)s::timestamptz, j.expires_at),
           queue = CASE WHEN %(envelope)s::bytea IS NULL THEN j.queue ELSE %(queue)s END,
           priority = coalesce(%(priority)s::smallint, j.priority),
           task = coalesce(%(task)s, j.task),
           next_publish_at = CASE WHEN %(waiting_for)s::text IS NOT NULL AND EXISTS (
                                      SELECT FROM {s}.operation o WHERE o.key = %(waiting_for)s
                                         AND o.status IN ('intent_recorded', 'unknown'))
                                  THEN clock_timestamp() + %(patience)s::float8 * interval '1 second'
                                  WHEN %(hold)s::float8 IS NOT NULL
                                  THEN clock_timestamp() + %(hold)s::float8 * interval '1 second' END
 WHERE j.id = %(id)s AND j.lease_token = %(token)s AND j.fence = %(fence)s AND j.status || '' = 'running'
RETURNING j.status, j.reason
"""
)

# The end of a whole-body job is the end of its one operation; a retry or an error only prepares what follows from it.
BODY_PENDING: Final = (
    """
UPDATE {s}.job j
   SET pending_status = %(pending)s, pending_reason = %(reason)s, error = %(error)s::json,
       run_after = """
    + _WHEN
    + """,
       envelope = coalesce(%(envelope)s, j.envelope), args_digest = coalesce(%(digest)s, j.args_digest),
       retries = coalesce(%(retries)s, j.retries), expires_at = coalesce(%(expires)s::timestamptz, j.expires_at),
       queue = CASE WHEN %(envelope)s::bytea IS NULL THEN j.queue ELSE %(queue)s END,
       priority = coalesce(%(priority)s::smallint, j.priority),
       attempts = j.attempts - %(refund)s, settle = coalesce(%(settle)s, j.settle),
       generation = coalesce(%(generation)s, j.generation), task = coalesce(%(task)s, j.task)
 WHERE j.id = %(id)s AND j.lease_token = %(token)s AND j.fence = %(fence)s AND j.status || '' = 'running'
RETURNING j.attempts < j.max_attempts AS again
"""
)

# The body went on from a step that did not happen: a replay must do so too, and not send that step. Durable, before
# whatever it does instead; where that is another effect of the job, its intent says the same.
WENT_ON: Final = """
UPDATE {s}.job j SET passed = greatest(j.passed, %(ordinal)s)
 WHERE j.id = %(id)s AND j.lease_token = %(token)s AND j.fence = %(fence)s AND j.status || '' = 'running'
RETURNING j.passed
"""

# A retry asks for more runs than were accepted; limits and a given max_attempts go before it.
MORE_ATTEMPTS: Final = """
UPDATE {s}.job j
   SET max_attempts = CASE WHEN j.attempts_fixed THEN j.max_attempts ELSE greatest(j.max_attempts, %(wanted)s) END
 WHERE j.id = %(id)s AND j.lease_token = %(token)s AND j.fence = %(fence)s AND j.status || '' = 'running'
RETURNING j.max_attempts
"""

# 11: is the lease still ours, the job not cancelled, not too old? Renews it with the same word.
CHECKPOINT: Final = """
UPDATE {s}.job j
   SET lease_until = greatest(j.lease_until, clock_timestamp() + %(ttl)s::float8 * interval '1 second')
 WHERE j.id = %(job)s AND j.lease_token = %(token)s AND j.fence = %(fence)s AND j.status || '' = 'running'
   AND j.lease_until > clock_timestamp()
RETURNING j.cancel_requested_at IS NOT NULL AS cancelled,
          CASE WHEN j.expires_at <= clock_timestamp() THEN 'expired'
               WHEN j.gives_up_at <= clock_timestamp() THEN 'max_age' END AS dying, {async} AS a
"""

# 11: all leases of a process in one statement; one that ran out is not revived, and one that is too old not renewed.
# The fence of a claim whose answer has not been read yet is 0: its token tells it. A row that somebody has locked (a
# confirmation in the user's own transaction) is left out, so that the other leases do not wait for it.
RENEW: Final = """
WITH l AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::text[], %(tokens)s::uuid[], %(fences)s::bigint[], %(ttls)s::float8[])
        AS l (id, token, fence, ttl)
), mine AS MATERIALIZED (
    SELECT j.id, j.lease_token, j.cancel_requested_at IS NOT NULL AS cancelled, l.ttl
      FROM l JOIN {s}.job j ON j.id = l.id
     WHERE j.lease_token = l.token AND l.fence IN (0, j.fence) AND j.status || '' IN ('leased', 'running')
), free AS MATERIALIZED (
    SELECT j.id FROM {s}.job j JOIN mine ON j.id = mine.id ORDER BY j.id FOR NO KEY UPDATE OF j SKIP LOCKED
), renewed AS (
    UPDATE {s}.job j
       SET lease_until = clock_timestamp() + mine.ttl * interval '1 second'
      FROM mine JOIN free ON free.id = mine.id
     WHERE j.id = mine.id AND j.lease_token = mine.lease_token AND j.status || '' IN ('leased', 'running')
       AND j.lease_until > clock_timestamp() AND coalesce(j.gives_up_at > clock_timestamp(), true)
    RETURNING j.id, j.lease_token, j.cancel_requested_at IS NOT NULL AS cancelled
)
SELECT r.lease_token, r.cancelled, true AS renewed, {async} AS a FROM renewed r
UNION ALL
SELECT m.lease_token, m.cancelled, false, NULL FROM mine m WHERE NOT EXISTS (SELECT FROM free f WHERE f.id = m.id)
"""

# An end that Celery was not told is told by one delivery at a time.
TELL: Final = """
UPDATE {s}.job j SET telling_until = clock_timestamp() + interval '30 seconds'
 WHERE j.id = %(id)s AND j.fence = %(fence)s AND j.status IN ('succeeded', 'failed', 'cancelled')
   AND j.settled_at IS NULL AND coalesce(j.telling_until < clock_timestamp(), true)
RETURNING j.id
"""

# Celery has been told: the result is stored, the continuations are out.
SETTLE: Final = """
UPDATE {s}.job j SET settled_at = clock_timestamp(), next_publish_at = NULL, telling_until = NULL
  FROM unnest(%(ids)s::text[], %(fences)s::bigint[]) AS l (id, fence)
 WHERE j.id = l.id AND j.fence = l.fence AND j.status IN ('succeeded', 'failed', 'cancelled') AND j.settled_at IS NULL
RETURNING j.id, {async} AS a
"""
# What the backend holds may be older than the row: deliver once more.
UNSETTLE: Final = """
UPDATE {s}.job SET settled_at = NULL, next_publish_at = clock_timestamp()
 WHERE id = %(id)s AND status IN ('succeeded', 'failed', 'cancelled') RETURNING id
"""

# The same for an enqueue that found its job ended: only where somebody waits for the end.
REMIND: Final = """
UPDATE {s}.job SET settled_at = NULL, next_publish_at = clock_timestamp()
 WHERE id = %(id)s AND status IN ('succeeded', 'failed', 'cancelled') AND settle RETURNING id
"""

# 8: leases that ran out. SKIP LOCKED: several sweepers share the work; what holds the row's lock is alive.
SWEEP_LEASES: Final = (
    """
WITH due AS (
    SELECT j.id FROM {s}.job j WHERE j.status IN ('leased', 'running') AND j.lease_until < clock_timestamp()
     ORDER BY j.seq LIMIT %(limit)s FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE {s}.job j"""
    + _GIVEN_UP_SET
    + """
  FROM due WHERE j.id = due.id AND j.status || '' IN ('leased', 'running') AND j.lease_until < clock_timestamp()
RETURNING j.id, j.task, j.status, j.reason, j.fence
"""
)
# *Death*: the parent saw its child go, or is about to end it. Fences first: nothing of that attempt matches any more.
# An attempt that the worker's own stop ends, with nothing open, costs none.
LOST: Final = (
    """
UPDATE {s}.job j"""
    + _GIVEN_UP_SET
    + """,
           attempts = j.attempts - CASE WHEN {s}.leaves_to(j, %(wish)s) = 'queued' THEN %(refund)s ELSE 0 END
 WHERE j.id = %(id)s AND j.status || '' IN ('leased', 'running') AND starts_with(j.lease_owner, %(owner)s)
RETURNING j.id, j.task, j.status, j.reason, j.fence, j.slots
"""
)

# Attempts are counted before anything of a job can fail. Deliveries that come to nothing before a claim are counted
# for themselves, each before its message is read, and taken back once that went well.
_TRIES: Final = """CASE WHEN j.status = 'queued'
            THEN greatest(LEAST(j.max_attempts - j.attempts, %(most)s::integer), 1) ELSE %(most)s::integer END"""
READING: Final = (
    """
UPDATE {s}.job j SET tried = j.tried + 1
 WHERE j.id = %(id)s AND j.status IN ('queued', 'succeeded', 'failed', 'cancelled') AND j.settled_at IS NULL
   AND j.tried < """
    + _TRIES
    + """
RETURNING j.tried
"""
)
STORED: Final = "SELECT j.envelope FROM {s}.job j WHERE j.id = %(id)s"
READ: Final = "UPDATE {s}.job j SET tried = j.tried - 1 WHERE j.id = %(id)s AND j.tried > 0 RETURNING {async} AS a"
# ... or it could not be read, or whoever was to claim the job died before (`owner`: not one who had done so). Spaced by
# a back-off, and over after as many as the job has runs.
UNREAD: Final = (
    """
WITH due AS (
    SELECT j.id, j.tried + %(by)s AS tried, j.tried + %(by)s >= """
    + _TRIES
    + """ AS over FROM {s}.job j
     WHERE j.id = %(id)s AND j.status || '' = 'queued' AND j.generation = %(generation)s
       AND NOT coalesce(starts_with(j.last_actor, %(owner)s), false)
       FOR NO KEY UPDATE
)
UPDATE {s}.job j
   SET tried = due.tried, actor = %(actor)s,
       status = CASE WHEN due.over THEN {s}.leaves_to(j, 'failed') ELSE j.status END,
       pending_status = CASE WHEN due.over THEN {s}.pending_end(j, 'failed') ELSE j.pending_status END,
       pending_reason = CASE WHEN due.over THEN 'max_attempts' ELSE j.pending_reason END,
       reason = CASE WHEN due.over THEN 'max_attempts' ELSE %(reason)s END,
       error = CASE WHEN due.over THEN %(error)s::json ELSE j.error END,
       run_after = CASE WHEN due.over THEN j.run_after ELSE greatest(j.run_after, clock_timestamp()
           + LEAST(%(delay)s::float8 * 2 ^ LEAST(due.tried - 1, 16), %(max_delay)s::float8) * interval '1 second') END,
       next_publish_at = CASE WHEN due.over THEN j.next_publish_at ELSE greatest(j.run_after, clock_timestamp()
           + LEAST(%(delay)s::float8 * 2 ^ LEAST(due.tried - 1, 16), %(max_delay)s::float8) * interval '1 second') END,
       publishes = CASE WHEN due.over THEN j.publishes ELSE 0 END
  FROM due WHERE j.id = due.id
RETURNING j.id, j.status, j.fence
"""
)

# Queued jobs past their expiry or their age.
SWEEP_DYING: Final = """
WITH due AS (
    SELECT j.id FROM {s}.job j WHERE j.status || ':dies' = 'queued:dies' AND LEAST(j.expires_at, j.gives_up_at) <= {now}
       AND (%(id)s::text IS NULL OR j.id = %(id)s)
     ORDER BY LEAST(j.expires_at, j.gives_up_at) LIMIT %(limit)s FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE {s}.job j
   SET status = {s}.leaves_to(j, CASE WHEN j.expires_at <= clock_timestamp() THEN 'cancelled' ELSE 'failed' END),
       pending_status = {s}.pending_end(
           j, CASE WHEN j.expires_at <= clock_timestamp() THEN 'cancelled' ELSE 'failed' END),
       reason = CASE WHEN j.expires_at <= clock_timestamp() THEN 'expired' ELSE 'max_age' END,
       pending_reason = CASE WHEN j.expires_at <= clock_timestamp() THEN 'expired' ELSE 'max_age' END,
       error = CASE WHEN j.expires_at <= clock_timestamp() THEN j.error
                    ELSE json_build_object('text', 'the job is older than its max_age') END,
       actor = %(actor)s
 WHERE j.id = ANY (ARRAY(SELECT due.id FROM due)) AND j.status || '' = 'queued'
   AND LEAST(j.expires_at, j.gives_up_at) <= clock_timestamp()
RETURNING j.id, j.task, j.status, j.reason, j.fence
"""

# What a row gives for its publication.
_PUBLICATION: Final = """j.id, j.seq, j.task, j.status, j.envelope, j.generation, j.args_digest, j.retries, j.publishes,
          j.tenant, CASE WHEN j.express AND j.status = 'queued' THEN j.queue END AS lane,
          CASE WHEN j.status = 'queued' AND j.run_after > clock_timestamp() THEN j.run_after END AS run_after,
          {async} AS a"""
# What has to be published now, whatever the broker holds: jobs whose time has come, jobs that came back from a run,
# and ends that Celery has not been told (those back off). Written before the message goes out: a crash in between
# leaves a message that is found to be lost.
DUE: Final = (
    """
WITH due AS (
    SELECT j.id FROM {s}.job j
     WHERE j.next_publish_at <= {now} + %(ahead)s::float8 * interval '1 second'
       AND (%(ids)s::text[] IS NULL OR j.id = ANY (%(ids)s))
     ORDER BY j.next_publish_at LIMIT %(limit)s FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE {s}.job j
   SET publishes = j.publishes + 1, published_at = clock_timestamp(),
       next_publish_at = CASE WHEN j.status <> 'queued' AND j.publishes < %(settle_tries)s
           THEN clock_timestamp()
                + interval '1 second' * LEAST(3600, 2 ^ LEAST(j.publishes, 16) * %(republish)s::float8) END
  FROM due WHERE j.id = due.id
RETURNING """
    + _PUBLICATION
)

# Where messages of jobs are out, as far as the rows know, and how many.
REPUBLISH_LANES: Final = """
SELECT coalesce(j.queue, '') AS queue, j.priority, count(*) AS jobs, clock_timestamp() AS at
  FROM {s}.job j
 WHERE j.status || ':waits' = 'queued:waits' AND j.next_publish_at IS NULL AND j.published_at IS NOT NULL
 GROUP BY 1, 2 ORDER BY 1, 2
"""
# All of them once more, in their order. What waits for its time, a key or a slot has no message out.
REPUBLISH: Final = (
    """
WITH due AS (
    SELECT j.id, j.published_at AS was FROM {s}.job j
     WHERE coalesce(j.queue, '') = %(queue)s AND j.priority = %(priority)s
       AND j.status || ':waits' = 'queued:waits' AND j.next_publish_at IS NULL
       AND j.published_at >= coalesce(%(since)s::timestamptz, '-infinity') AND j.published_at < %(at)s::timestamptz
     ORDER BY j.published_at LIMIT %(limit)s FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE {s}.job j SET publishes = j.publishes + 1, published_at = clock_timestamp()
  FROM due WHERE j.id = due.id AND j.status || '' = 'queued' AND j.next_publish_at IS NULL
RETURNING due.was, """
    + _PUBLICATION
)

# Which queues' turn it is to be looked at; taking the turn is part of the question.
LOOKS: Final = """
WITH RECURSIVE q (queue) AS (
    (SELECT coalesce(j.queue, '') FROM {s}.job j
      WHERE j.status || ':waits' = 'queued:waits' AND j.next_publish_at IS NULL AND j.published_at IS NOT NULL
      ORDER BY coalesce(j.queue, '') LIMIT 1)
    UNION ALL
    SELECT (SELECT coalesce(j.queue, '') FROM {s}.job j
             WHERE j.status || ':waits' = 'queued:waits' AND j.next_publish_at IS NULL AND j.published_at IS NOT NULL
               AND coalesce(j.queue, '') > q.queue
             ORDER BY coalesce(j.queue, '') LIMIT 1)
      FROM q WHERE q.queue IS NOT NULL
)
INSERT INTO {s}.look AS l (queue, next_at)
SELECT q.queue, clock_timestamp() + %(every)s::float8 * interval '1 second' FROM q WHERE q.queue IS NOT NULL
ON CONFLICT (queue) DO UPDATE SET next_at = excluded.next_at
 WHERE l.next_at <= clock_timestamp() + 0.1 * %(every)s::float8 * interval '1 second'
RETURNING l.queue, clock_timestamp() AS at, {async} AS a
"""

# How far the broker has handed over what was published into a queue, by priority: as many of the rows as have no
# message in it are gone from its head (`depth`: what it holds; NULL: it cannot be asked), and so is whatever was
# published before a job that has been claimed since. Rows of the last second are left out: their message may be on
# its way. Whatever errs, errs towards "still there".
LOOK: Final = """
WITH waiting AS MATERIALIZED (
    SELECT w.priority, count(*) AS n FROM (
        SELECT j.priority FROM {s}.job j
         WHERE coalesce(j.queue, '') = %(queue)s AND j.status || ':waits' = 'queued:waits' AND j.next_publish_at IS NULL
           AND j.published_at < %(at)s::timestamptz - interval '1 second'
         LIMIT %(most)s) w GROUP BY w.priority
), gone AS (
    SELECT w.priority, LEAST(w.n, sum(w.n) OVER () - %(depth)s::bigint - coalesce(sum(w.n) OVER (
               ORDER BY w.priority * %(first)s ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0))::bigint AS n
      FROM waiting w WHERE %(depth)s::bigint IS NOT NULL
), seen AS (
    SELECT g.priority, coalesce((
        SELECT j.published_at FROM {s}.job j
         WHERE coalesce(j.queue, '') = %(queue)s AND j.priority = g.priority AND j.status || ':waits' = 'queued:waits'
           AND j.next_publish_at IS NULL AND j.published_at IS NOT NULL
         ORDER BY j.published_at OFFSET g.n LIMIT 1), (
        SELECT j.published_at + interval '1 microsecond' FROM {s}.job j
         WHERE coalesce(j.queue, '') = %(queue)s AND j.priority = g.priority AND j.status || ':waits' = 'queued:waits'
           AND j.next_publish_at IS NULL AND j.published_at IS NOT NULL
         ORDER BY j.published_at DESC LIMIT 1)) AS head
      FROM gone g WHERE g.n > 0
    UNION ALL
    SELECT j.priority, j.published_at FROM {s}.job j
     WHERE j.status IN ('leased', 'running') AND j.queue = %(queue)s
    UNION ALL
    SELECT f.priority, f.published_at FROM unnest(ARRAY['succeeded', 'failed', 'cancelled']) AS e (status)
     CROSS JOIN LATERAL (
        SELECT j.priority, j.published_at, j.queue FROM {s}.job j
         WHERE j.status = e.status
           AND j.finished_at > %(at)s::timestamptz - %(window)s::float8 * interval '1 second'
         ORDER BY j.finished_at DESC LIMIT 10000) f
     WHERE f.queue = %(queue)s
), heads AS (
    SELECT p.priority, max(s.head) AS head
      FROM (SELECT w.priority FROM waiting w UNION SELECT l.priority FROM {s}.lane l WHERE l.queue = %(queue)s) p
      LEFT JOIN seen s USING (priority) GROUP BY p.priority
), lanes AS (
    INSERT INTO {s}.lane AS l (queue, priority, head)
    SELECT %(queue)s, h.priority, h.head FROM heads h
    ON CONFLICT (queue, priority) DO UPDATE
       SET moved_at = CASE WHEN excluded.head > l.head THEN clock_timestamp() ELSE l.moved_at END,
           probes = CASE WHEN excluded.head > l.head THEN 0 ELSE l.probes END,
           passed = CASE WHEN l.head_at <= clock_timestamp() - %(grace)s::float8 * interval '1 second'
                         THEN l.head ELSE l.passed END,
           head = CASE WHEN l.head_at <= clock_timestamp() - %(grace)s::float8 * interval '1 second' OR l.head IS NULL
                       THEN greatest(l.head, excluded.head) ELSE l.head END,
           head_at = CASE WHEN l.head_at <= clock_timestamp() - %(grace)s::float8 * interval '1 second'
                            OR l.head IS NULL THEN clock_timestamp() ELSE l.head_at END
)
UPDATE {s}.look l
   SET next_at = greatest(l.next_at, clock_timestamp() + (w.n / 20000.0) * interval '1 second')
  FROM (SELECT coalesce(sum(n), 0) AS n FROM waiting) w WHERE l.queue = %(queue)s
RETURNING w.n, {async} AS a
"""

# Jobs whose message is taken to be lost, in one queue: it left the broker long enough ago, and nobody claimed the job
# or holds the message (`lost`); a worker holds it behind something long, and another might take it at once (`stuck`);
# nothing tells (`unasked`, `probe`). Backs off with each publication; a worker that has started since ends the wait,
# since the message may have gone to workers that could not run it.
ASTRAY: Final = (
    """
WITH held AS MATERIALIZED (
    SELECT unnest(h.jobs || h.stuck) AS id FROM {s}.held h WHERE h.until > clock_timestamp()
), worker AS MATERIALIZED (
    SELECT m.last_started_at AS at FROM {s}.maintenance m WHERE m.name = 'worker'
), lost AS (
    SELECT j.id FROM {s}.lane l
      JOIN {s}.job j ON coalesce(j.queue, '') = l.queue AND j.priority = l.priority AND j.published_at < l.passed
     WHERE l.queue = %(queue)s AND j.status || ':waits' = 'queued:waits' AND j.next_publish_at IS NULL
       AND (j.published_at <= clock_timestamp() - interval '1 second'
                * LEAST(3600, %(grace)s::float8 * 2 ^ LEAST(j.publishes - 1, 16))
            OR j.published_at < (SELECT w.at FROM worker w))
       AND j.id NOT IN (SELECT h.id FROM held h)
     ORDER BY j.published_at LIMIT %(limit)s FOR NO KEY UPDATE OF j SKIP LOCKED
), stuck AS (
    SELECT j.id FROM {s}.job j
     WHERE j.id IN (SELECT unnest(h.stuck) FROM {s}.held h WHERE h.until > clock_timestamp())
       AND coalesce(j.queue, '') = %(queue)s AND j.status || '' = 'queued' AND j.next_publish_at IS NULL
       AND coalesce(%(depth)s::bigint, 0) = 0
       AND j.published_at <= clock_timestamp() - interval '1 second' * (%(waited)s::float8
               + LEAST(3600, %(republish)s::float8 * (2 ^ LEAST(j.publishes - 1, 16) - 1)))
     LIMIT %(limit)s FOR NO KEY UPDATE OF j SKIP LOCKED
), resting AS (
    SELECT l.priority, l.probed_at, l.probes FROM {s}.lane l
     WHERE l.queue = %(queue)s
       AND coalesce(l.moved_at < clock_timestamp() - %(republish)s::float8 * interval '1 second', true)
), unasked AS (
    SELECT j.id FROM {s}.job j
     WHERE %(depth)s::bigint IS NULL AND coalesce(j.queue, '') = %(queue)s
       AND j.priority IN (SELECT r.priority FROM resting r)
       AND j.status || ':waits' = 'queued:waits' AND j.next_publish_at IS NULL
       AND j.published_at <= clock_timestamp() - interval '1 second'
               * LEAST(3600, %(republish)s::float8 * 2 ^ LEAST(j.publishes - 1, 16))
       AND j.id NOT IN (SELECT h.id FROM held h)
     ORDER BY j.published_at LIMIT %(limit)s FOR NO KEY UPDATE OF j SKIP LOCKED
), probe AS (
    SELECT o.id, r.priority FROM resting r CROSS JOIN LATERAL (
        SELECT j.id FROM {s}.job j
         WHERE coalesce(j.queue, '') = %(queue)s AND j.priority = r.priority
           AND j.status || ':waits' = 'queued:waits' AND j.next_publish_at IS NULL
           AND j.published_at <= clock_timestamp() - %(republish)s::float8 * interval '1 second'
           AND j.id NOT IN (SELECT h.id FROM held h)
         ORDER BY j.published_at LIMIT 1 FOR NO KEY UPDATE OF j SKIP LOCKED) o
     WHERE %(depth)s::bigint IS NOT NULL
       AND r.probed_at <= clock_timestamp() - interval '1 second'
               * LEAST(3600, %(republish)s::float8 * 2 ^ LEAST(r.probes, 16))
), probed AS (
    UPDATE {s}.lane l SET probed_at = clock_timestamp(), probes = l.probes + 1
      FROM probe p WHERE l.queue = %(queue)s AND l.priority = p.priority
), due AS (
    SELECT x.id, min(x.why) AS why FROM (
        SELECT id, 'lost' AS why FROM lost UNION ALL SELECT id, 'stuck' FROM stuck
        UNION ALL SELECT id, 'unasked' FROM unasked UNION ALL SELECT id, 'probe' FROM probe) x GROUP BY x.id
)
UPDATE {s}.job j SET publishes = j.publishes + 1, published_at = clock_timestamp()
  FROM due WHERE j.id = due.id AND j.status || '' = 'queued' AND j.next_publish_at IS NULL
RETURNING due.why, """
    + _PUBLICATION
)

# What a worker's main process holds without having begun it.
HELD: Final = """
WITH forgotten AS (
    DELETE FROM {s}.held h WHERE h.until < clock_timestamp() - interval '1 hour' AND h.worker <> %(worker)s
)
INSERT INTO {s}.held AS h (worker, until, jobs, stuck)
VALUES (%(worker)s, clock_timestamp() + %(believed)s::float8 * interval '1 second', %(jobs)s, %(stuck)s)
ON CONFLICT (worker) DO UPDATE SET until = excluded.until, jobs = excluded.jobs, stuck = excluded.stuck
RETURNING h.worker, {async} AS a
"""

# 14: whoever asks takes the question for longer than any lookup may take; the time of asking is the database's, from
# before the lookup.
RECONCILE_DUE: Final = (
    """
WITH due AS (
    SELECT o.key FROM {s}.operation o WHERE o.status || ':due' = 'unknown:due'
       AND o.next_reconcile_at <= CASE WHEN %(keys)s::text[] IS NULL THEN {now} ELSE 'infinity' END
       AND CASE WHEN %(keys)s::text[] IS NULL THEN coalesce(o.asking_until <= clock_timestamp(), true)
                ELSE o.key = ANY (%(keys)s) END
       AND o.effect <> ALL (%(busy)s::text[])
     ORDER BY o.next_reconcile_at LIMIT %(limit)s FOR NO KEY UPDATE SKIP LOCKED
), counted AS (
    INSERT INTO {s}.tally (name, value) SELECT 'reconcile_attempts', count(*) FROM due HAVING count(*) > 0
)
UPDATE {s}.operation o
   SET reconcile_attempts = o.reconcile_attempts + 1,
       next_reconcile_at = clock_timestamp() + %(hold)s::float8 * interval '1 second',
       asking_until = clock_timestamp() + %(hold)s::float8 * interval '1 second'
  FROM due, {s}.job j WHERE o.key = due.key AND j.id = o.job_id
RETURNING """
    + OPERATION_FACTS
    + """, o.args, o.trace, o.has_lookup, o.if_unknown, o.idempotent_for, o.absent_from,
          o.reconcile_attempts, j.tenant, j.task, clock_timestamp() AS asked_at, {s}.sendable(o) AS sendable,
          coalesce(o.absent_from <= clock_timestamp(), false) AS past_deadline, {async} AS a
"""
)

# 14: a verdict belongs to one attempt, and absence counts only if asked late enough, of a sender that was gone by then.
VERDICT: Final = """
WITH j AS MATERIALIZED (SELECT j.id FROM {s}.job j WHERE j.id = %(job)s FOR NO KEY UPDATE),
o AS (
    UPDATE {s}.operation o
       SET status = %(status)s, provider_ref = coalesce(%(ref)s, o.provider_ref), result = %(result)s::json,
           error = %(error)s::json, evidence = coalesce(%(evidence)s::json, o.evidence),
           resolved_at = clock_timestamp(), resolved_by = %(actor)s, actor = %(actor)s, reason = %(reason)s,
           next_reconcile_at = NULL
      FROM j
     WHERE o.key = %(key)s AND o.attempt = %(attempt)s AND o.fence = %(fence)s AND o.status || '' = 'unknown'
       AND (%(status)s <> 'not_happened' OR %(trusted)s
            OR (%(asked_at)s::timestamptz >= o.absent_from AND NOT o.detached
                AND (o.gone_at <= %(asked_at)s::timestamptz
                     OR (o.deadline_is_proof AND %(asked_at)s::timestamptz >= o.deadline_at))))
    RETURNING o.key, o.job_id
)
SELECT o.key, o.job_id, j.status, j.task FROM o JOIN {s}.job j ON j.id = o.job_id
"""

# The lookup found nothing, late enough: with a key that the provider still retains, it may be sent again.
ABSENT: Final = """
UPDATE {s}.operation o SET absent_at = %(asked_at)s::timestamptz, evidence = coalesce(%(evidence)s::json, o.evidence)
 WHERE o.key = %(key)s AND o.attempt = %(attempt)s AND o.fence = %(fence)s AND o.status || '' = 'unknown'
   AND %(asked_at)s::timestamptz >= o.absent_from
RETURNING o.key
"""
# The author's declared policy applies from now on, since nothing else answers.
POLICY: Final = """
UPDATE {s}.operation o SET policy_at = clock_timestamp()
 WHERE o.key = %(key)s AND o.attempt = %(attempt)s AND o.fence = %(fence)s AND o.status || '' = 'unknown'
   AND o.if_unknown = 'send_again' AND clock_timestamp() >= o.absent_from
RETURNING o.key
"""
ASK_AT: Final = """
UPDATE {s}.operation o
   SET asking_until = NULL, next_reconcile_at = greatest(clock_timestamp() + interval '50 milliseconds',
           LEAST(%(at)s::timestamptz, clock_timestamp() + %(after)s::float8 * interval '1 second')),
       evidence = coalesce(%(evidence)s::json, o.evidence)
 WHERE o.key = %(key)s AND o.attempt = %(attempt)s AND o.status || '' = 'unknown' RETURNING o.key
"""

# 4: back to work only if every open question of the job may be sent again; the trigger asks the same once more.
RESUME: Final = """
UPDATE {s}.job j SET status = 'queued', reason = %(reason)s, run_after = NULL, actor = %(actor)s
 WHERE j.id = %(id)s AND j.status || '' = 'unknown' AND NOT j.held AND j.pending_status IS NULL AND j.open_ops = 0
   AND (j.attempts < j.max_attempts OR NOT EXISTS (
        SELECT FROM {s}.operation o WHERE o.job_id = j.id AND o.status = 'unknown' AND NOT {s}.retained(o)))
   AND j.cancel_requested_at IS NULL
   AND NOT EXISTS (SELECT FROM {s}.operation o WHERE o.job_id = j.id AND o.status = 'unknown' AND NOT {s}.sendable(o))
RETURNING j.id, j.task, j.status
"""

# *Gone* is an observed fact: which senders of open questions ran on this machine since it booted?
SENDERS_HERE: Final = """
SELECT DISTINCT o.process FROM {s}.operation o
 WHERE o.status = 'unknown' AND o.gone_at IS NULL AND NOT o.detached AND starts_with(o.process, %(here)s)
"""
# Where no timer ends a call, its sender may have outlived the deadline, and sent the request in its last moment.
GONE: Final = """
UPDATE {s}.operation o
   SET gone_at = clock_timestamp(), next_reconcile_at = clock_timestamp(),
       absent_from = CASE WHEN o.deadline_kills OR o.deadline_at > clock_timestamp() THEN o.absent_from
           ELSE clock_timestamp() + coalesce(o.deadline, %(in_flight)s::float8 * interval '1 second') + o.lag END
 WHERE o.process = ANY (%(processes)s) AND o.status = 'unknown' AND o.gone_at IS NULL AND NOT o.detached
RETURNING o.key
"""

# Ends at once where nobody works on it; a running job sees it at its next checkpoint or effect.
_CANCEL_SET: Final = """
   SET cancel_requested_at = coalesce(j.cancel_requested_at, clock_timestamp()),
       cancel_reason = coalesce(j.cancel_reason, %(reason)s),
       status = CASE WHEN j.status = 'running' THEN j.status ELSE {s}.leaves_to(j, 'cancelled') END,
       held = CASE WHEN j.unknown_ops + j.open_ops = 0 THEN false ELSE j.held END,
       pending_status = CASE WHEN j.status = 'running' THEN j.pending_status ELSE {s}.pending_end(j, 'cancelled') END,
       pending_reason = CASE WHEN j.status = 'running' THEN j.pending_reason ELSE %(reason)s END,
       reason = CASE WHEN j.status = 'running' THEN j.reason ELSE %(reason)s END,
       actor = %(actor)s"""
CANCEL: Final = (
    """
UPDATE {s}.job j"""
    + _CANCEL_SET
    + """
 WHERE j.id = %(id)s AND j.status IN ('queued', 'leased', 'running', 'unknown')
RETURNING j.id, j.status
"""
)
# The same for a revoke, which every worker hears: the first one does it, and each learns which of the ids are jobs.
_REVOKE: Final = (
    """
WITH due AS MATERIALIZED (
    SELECT j.id FROM {s}.job j
     WHERE {which} AND j.status IN ('queued', 'leased', 'running', 'unknown') AND j.cancel_requested_at IS NULL
     ORDER BY j.id FOR NO KEY UPDATE
), c AS (
    UPDATE {s}.job j"""
    + _CANCEL_SET
    + """
      FROM due WHERE j.id = due.id RETURNING j.id, j.task, j.status, j.reason, j.fence, j.settled_at, j.envelope
)"""
)
REVOKE: Final = (
    _REVOKE.replace("{which}", "j.id = ANY (%(ids)s::text[])")
    + """
SELECT c.id, c.task, c.status, c.reason, c.fence, c.settled_at IS NOT NULL AS settled, c.envelope, true AS moved FROM c
UNION ALL
SELECT j.id, NULL, NULL, NULL, NULL, NULL, NULL, false FROM {s}.job j
 WHERE j.id = ANY (%(ids)s::text[]) AND NOT EXISTS (SELECT FROM c WHERE c.id = j.id)
UNION ALL
SELECT t.id, NULL, NULL, NULL, NULL, NULL, NULL, false FROM {s}.tombstone t WHERE t.id = ANY (%(ids)s::text[])
"""
)
REVOKE_STAMPED: Final = (
    _REVOKE.replace("{which}", "j.stamps ?| %(stamps)s::text[]")
    + """
SELECT c.id, c.task, c.status, c.reason, c.fence, c.settled_at IS NOT NULL AS settled, c.envelope, true AS moved FROM c
"""
)

# Attempts start anew; a job with an open question is not retried, it is resolved.
RETRY: Final = """
UPDATE {s}.job j
   SET status = 'queued', reason = %(reason)s, attempts = 0, held = false, cancel_requested_at = NULL,
       cancel_reason = NULL, run_after = NULL, expires_at = NULL, error = NULL,
       new_keys = CASE WHEN %(new_keys)s::jsonb IS NULL THEN j.new_keys
                       ELSE coalesce(j.new_keys, '{}') || %(new_keys)s::jsonb END,
       gives_up_at = clock_timestamp() + j.max_age, actor = %(actor)s
 WHERE j.id = %(id)s AND (j.status IN ('failed', 'cancelled')
       OR (j.status = 'unknown' AND j.open_ops = 0 AND j.unknown_ops = 0))
RETURNING j.id, j.status
"""

# Messages of plain tasks that belong to what is accepted here: kept until they are out, so that a crash between commit
# and publish loses none. At least once: what is out and not struck off goes out again, under its own id.
POST: Final = """
INSERT INTO {s}.outbox (id, task, envelope, next_publish_at)
SELECT m.id, m.task, m.envelope, clock_timestamp() + %(due)s::float8 * interval '1 second'
  FROM unnest(%(ids)s::text[], %(tasks)s::text[], %(envelopes)b::bytea[]) AS m (id, task, envelope)
ON CONFLICT DO NOTHING RETURNING id
"""
POSTED: Final = "DELETE FROM {s}.outbox WHERE id = ANY (%(ids)s) RETURNING id, {async} AS a"
POST_DUE: Final = """
WITH due AS (
    SELECT o.id FROM {s}.outbox o WHERE o.next_publish_at <= clock_timestamp()
     ORDER BY o.next_publish_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED
)
UPDATE {s}.outbox o
   SET publishes = o.publishes + 1,
       next_publish_at = clock_timestamp()
           + interval '1 second' * LEAST(3600, %(again)s::float8 * 2 ^ LEAST(o.publishes, 16))
  FROM due WHERE o.id = due.id
RETURNING o.id, o.task, o.envelope, {async} AS a
"""

# 8: chords, written with their first members. A named canvas that is there already is not written again.
CHORD: Final = """
WITH c AS (
    INSERT INTO {s}.chord (id, envelope, next_check_at)
    VALUES (%(id)s, %(envelope)s, clock_timestamp() + %(grace)s::float8 * interval '1 second')
    ON CONFLICT DO NOTHING RETURNING id
)
INSERT INTO {s}.chord_member (chord_id, id, before)
SELECT c.id, m.id, ARRAY(SELECT json_array_elements_text(m.before::json))
  FROM c, unnest(%(members)s::text[], %(before)s::text[]) WITH ORDINALITY AS m (id, before, n) ORDER BY m.n
ON CONFLICT DO NOTHING RETURNING id
"""
# A member that a body adds, once Celery counts it and before it is sent. Of a chord that nobody wrote down, its own row
# tells.
CHORD_HAS: Final = """
SELECT EXISTS (SELECT FROM {s}.chord_member m WHERE m.chord_id = %(id)s AND m.id = %(member)s)
    OR EXISTS (SELECT FROM {s}.job j WHERE j.id = %(member)s) AS known
"""
CHORD_ADD: Final = """
INSERT INTO {s}.chord_member (chord_id, id, before, added)
SELECT c.id, %(member)s, '{}', true FROM {s}.chord c WHERE c.id = %(id)s
ON CONFLICT DO NOTHING RETURNING id
"""
# The result of a member that its own row does not tell.
CHORD_OUTCOME: Final = """
UPDATE {s}.chord_member m SET outcome = %(outcome)s::json WHERE m.id = %(member)s RETURNING m.id
"""
# The body is out, or its errbacks are: nobody needs to look after the chord any more.
CHORD_DONE: Final = "DELETE FROM {s}.chord c WHERE c.id = ANY (%(ids)s) RETURNING c.id"
CHORD_OPEN: Final = "SELECT EXISTS (SELECT FROM {s}.chord c WHERE c.id = %(id)s)"
# Whose turn it is to be looked at; ready where all members have ended, and Celery has been told of it for a while.
# Members that have no row yet, or never will, are asked for elsewhere.
CHORDS_DUE: Final = """
WITH due AS (
    SELECT c.id FROM {s}.chord c WHERE c.next_check_at <= {now}
     ORDER BY c.next_check_at LIMIT %(limit)s FOR NO KEY UPDATE SKIP LOCKED
), looked AS (
    UPDATE {s}.chord c
       SET checks = c.checks + 1, next_check_at = clock_timestamp() + interval '1 second'
               * %(grace)s::float8 * LEAST(%(slowest)s::float8, 2 ^ LEAST(c.checks / 4, 16))
      FROM due WHERE c.id = due.id RETURNING c.id, c.envelope, c.created_at
), told AS (
    SELECT l.id, count(j.id) FILTER (WHERE j.finished_at IS NULL) = 0 AS ended,
           count(j.id) FILTER (WHERE j.settled_at IS NULL AND j.next_publish_at IS NOT NULL) = 0 AS told,
           coalesce(max(coalesce(j.settled_at, j.finished_at)), min(l.created_at)) AS at
      FROM looked l
      LEFT JOIN {s}.chord_member m ON m.chord_id = l.id
      LEFT JOIN {s}.job j ON j.id = ANY (m.before || m.id)
     GROUP BY l.id
)
SELECT l.id, CASE WHEN r.ready THEN l.envelope END AS envelope, r.ready,
       extract(epoch FROM clock_timestamp() - t.at)::float8 AS ended_for, {async} AS a
  FROM looked l JOIN told t ON t.id = l.id
 CROSS JOIN LATERAL (SELECT t.ended AND t.told
       AND t.at < clock_timestamp() - %(grace)s::float8 * interval '1 second' AS ready) r
"""
CHORD_MEMBERS: Final = """
SELECT m.id, m.outcome::text AS outcome, m.added, j.status, j.reason, j.outcome_ref,
       j.result::text AS result, j.error::text AS error, b.id AS failed_before, b.error AS error_before
  FROM {s}.chord_member m
  LEFT JOIN {s}.job j ON j.id = m.id
  LEFT JOIN LATERAL (
      SELECT f.id, f.error::text AS error FROM {s}.job f
       WHERE f.id = ANY (m.before) AND f.status IN ('failed', 'cancelled') ORDER BY f.seq LIMIT 1) b ON true
 WHERE m.chord_id = %(id)s ORDER BY m.seq
"""
# Nobody can tell any more: its members' rows need not wait for it.
CHORD_GIVEN_UP: Final = """
WITH m AS (DELETE FROM {s}.chord_member m WHERE m.chord_id = %(id)s)
UPDATE {s}.chord c SET next_check_at = NULL WHERE c.id = %(id)s RETURNING c.id
"""

# Finished jobs past their retention, never one whose operation's key a provider still retains, or whose result the
# body of a chord waits for. What remains is a tombstone, so that neither its id nor its key begins anew. The log may go
# once its job is gone: one transaction.
PRUNE: Final = """
WITH due AS (
    SELECT f.id FROM (VALUES ('succeeded', %(succeeded)s::float8), ('failed', %(failed)s), ('cancelled', %(cancelled)s))
           AS r (status, kept)
     CROSS JOIN LATERAL (
        SELECT j.id FROM {s}.job j
         WHERE j.status = r.status AND j.finished_at < {now} - interval '1 second' * r.kept
           AND NOT EXISTS (SELECT FROM {s}.operation o WHERE o.job_id = j.id
                              AND o.first_intent_at + o.idempotent_for > clock_timestamp())
           AND NOT EXISTS (SELECT FROM {s}.chord_member m WHERE m.id = j.id)
         ORDER BY j.finished_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED) f
     LIMIT %(limit)s
), operations AS (
    DELETE FROM {s}.operation o USING due WHERE o.job_id = due.id
), jobs AS (
    DELETE FROM {s}.job j USING due WHERE j.id = due.id
    RETURNING j.id, j.tenant, j.idempotency_key, j.task, j.args_digest, j.status
)
INSERT INTO {s}.tombstone (id, tenant, idempotency_key, task, args_digest, status) SELECT * FROM jobs
ON CONFLICT DO NOTHING RETURNING id, {async} AS a
"""
# How many of them there are, counted no further than a bar needs.
PRUNE_LEFT: Final = """
SELECT count(*) AS jobs
  FROM (VALUES ('succeeded', %(succeeded)s::float8), ('failed', %(failed)s), ('cancelled', %(cancelled)s))
       AS r (status, kept)
 CROSS JOIN LATERAL (
    SELECT FROM {s}.job j WHERE j.status = r.status AND j.finished_at < {now} - interval '1 second' * r.kept
     LIMIT %(most)s) due
"""
PRUNE_LOG: Final = "SELECT {s}.prune_log(%(ids)s::text[]) AS pruned, {async} AS a"
PRUNE_TOMBSTONES: Final = """
DELETE FROM {s}.tombstone t USING (
    SELECT id FROM {s}.tombstone WHERE pruned_at < {now} - interval '1 second' * %(retention)s::float8
     ORDER BY pruned_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED) due
 WHERE t.id = due.id RETURNING t.id, {async} AS a
"""

PRUNE_CHORDS: Final = """
DELETE FROM {s}.chord c
 WHERE c.next_check_at IS NULL AND c.created_at < {now} - interval '1 second' * %(retention)s::float8
RETURNING c.id, {async} AS a
"""

MAINTENANCE_BEGIN: Final = """
UPDATE {s}.maintenance SET last_started_at = clock_timestamp(), last_by = %(by)s, runs = runs + 1
 WHERE name = %(name)s AND (%(idle_for)s::float8 IS NULL OR last_started_at IS NULL
       OR last_started_at < clock_timestamp() - %(idle_for)s::float8 * interval '1 second')
RETURNING runs, {async} AS a
"""
# A worker's main process is alive.
WORKER_SEEN: Final = """
INSERT INTO {s}.worker AS w (node, pid, version, pool, concurrency, connections, queues)
VALUES (%(node)s, %(pid)s, %(version)s, %(pool)s, %(concurrency)s, %(connections)s, %(queues)s)
ON CONFLICT (node) DO UPDATE
   SET pid = excluded.pid, version = excluded.version, pool = excluded.pool, concurrency = excluded.concurrency,
       connections = excluded.connections, queues = excluded.queues, seen_at = clock_timestamp(), stopped_at = NULL,
       started_at = CASE WHEN w.pid = excluded.pid AND w.stopped_at IS NULL THEN w.started_at ELSE clock_timestamp() END
RETURNING w.node
"""
# Several processes may stand in for beat: one of them gets each turn. Whoever stood in last goes on at the usual pace.
_TURN: Final = """
UPDATE {s}.maintenance m SET last_started_at = clock_timestamp(), last_by = %(by)s, runs = runs + 1
 WHERE m.name = ANY (%(names)s)
   AND coalesce(m.last_started_at, '-infinity') < clock_timestamp() - interval '1 second'
       * CASE m.name WHEN 'sweep' THEN %(sweep)s::float8 ELSE %(reconcile)s::float8 END
       * CASE WHEN m.last_by LIKE '%%/stand-in' OR m.last_by IS NULL THEN 0.9 ELSE %(missed)s::float8 END
RETURNING m.name"""
STAND_IN: Final = _TURN
# The one statement of a worker at rest, at every heartbeat: its main process is alive, and takes turns that are due.
WATCH: Final = (
    "WITH seen AS ("
    + WORKER_SEEN
    + "), turn AS ("
    + _TURN
    + """)
SELECT t.name, {async} AS a FROM turn t
"""
)
MAINTENANCE_END: Final = """
UPDATE {s}.maintenance SET last_finished_at = clock_timestamp() WHERE name = %(name)s RETURNING {async} AS a
"""

# Whoever counts adds a row, and waits for nobody.
COUNT: Final = """
INSERT INTO {s}.tally (name, label, value) VALUES (%(name)s, %(label)s, %(by)s) RETURNING {async} AS a
"""
# A crash loses both halves of this or none.
FOLD: Final = """
WITH taken AS (
    DELETE FROM {s}.tally WHERE id IN (
        SELECT t.id FROM {s}.tally t ORDER BY t.id LIMIT %(limit)s FOR UPDATE SKIP LOCKED)
    RETURNING name, label, value
), kept AS (
    INSERT INTO {s}.folded AS f (name, label, value)
    SELECT name, label, sum(value) FROM taken GROUP BY name, label ORDER BY name, label
    ON CONFLICT (name, label) DO UPDATE SET value = f.value + excluded.value
    RETURNING f.name
)
SELECT count(*) AS rows, {async} AS a FROM taken
"""

# It went by itself; and those that nobody has seen for long are forgotten.
WORKER_STOPPED: Final = """
WITH forgotten AS (
    DELETE FROM {s}.worker w WHERE w.seen_at < clock_timestamp() - interval '1 day' AND w.node <> %(node)s
)
UPDATE {s}.worker SET stopped_at = clock_timestamp() WHERE node = %(node)s AND pid = %(pid)s
RETURNING node, {async} AS a
"""
# A process of that worker came back to its leases late: the longest such pause of a day.
WORKER_PAUSED: Final = """
UPDATE {s}.worker w
   SET longest_pause = CASE WHEN w.paused_at > clock_timestamp() - interval '1 day'
                            THEN greatest(w.longest_pause, %(seconds)s::float8) ELSE %(seconds)s::float8 END,
       paused_at = clock_timestamp()
 WHERE w.node = {s}.node_of(%(owner)s) RETURNING w.node, {async} AS a
"""

LEARN_TASKS: Final = """
INSERT INTO {s}.known_task (name) SELECT unnest(%(names)s::text[])
ON CONFLICT (name) DO NOTHING RETURNING name
"""
# 8: accepted work ends. Tasks that are plain ones now: forgotten, unless jobs are left that only a SafeTask could run.
UNLEARN_TASKS: Final = """
WITH left_over AS (
    SELECT j.task, j.status, count(*) AS n FROM {s}.job j JOIN {s}.known_task k ON k.name = j.task
     WHERE j.task = ANY (%(names)s::text[]) AND j.status IN ('queued', 'leased', 'running', 'unknown')
     GROUP BY j.task, j.status),
forgotten AS (
    DELETE FROM {s}.known_task k
     WHERE k.name = ANY (%(names)s::text[]) AND NOT EXISTS (SELECT FROM left_over WHERE left_over.task = k.name))
SELECT task, status, n FROM left_over ORDER BY task, status
"""
KNOWN_TASK: Final = "SELECT EXISTS (SELECT FROM {s}.known_task WHERE name = %(name)s)"

# What one actor wrote into the log of some jobs.
WRITTEN_BY: Final = """
SELECT t.id, t.at, t.job_id, t.operation_key, t.from_status, t.to_status, t.fence, t.actor, t.reason, j.task
  FROM {s}.transition t JOIN {s}.job j ON j.id = t.job_id
 WHERE t.job_id = ANY (%(ids)s) AND t.id > %(after)s AND t.actor = %(actor)s ORDER BY t.id
"""

# The views are the stable contract; operators and the command line read nothing else. Lists walk an index, of each
# status the newest jobs or the oldest operations first, and all but unknown ones only so far: `looked`.
_JOB_COLUMNS: Final = """
SELECT v.id, v.task, v.status, v.reason, v.tenant, v.pool, v.queue, v.idempotency_key, v.parent_id, v.attempts, v.fence,
       v.lease_owner, v.lease_until, v.cancel_requested_at, v.eta, v.expires_at, v.outcome_ref, v.result, v.last_error,
       v.created_at, v.started_at, v.finished_at, v.settled_at
  FROM {s}.jobs v"""
VIEW_JOB: Final = _JOB_COLUMNS + " WHERE v.id = %(id)s"
# Besides: a tenant's few queued jobs behind the many of others, and parked jobs, of which none is passed over.
VIEW_JOBS: Final = (
    _JOB_COLUMNS
    + """ JOIN (
    SELECT f.id, f.seq FROM unnest(%(statuses)s::text[]) AS s (status) CROSS JOIN LATERAL (
        SELECT n.id, n.seq FROM (
            SELECT j.id, j.seq, j.tenant, j.task FROM {s}.job j WHERE j.status COLLATE "C" = s.status
             ORDER BY j.seq DESC LIMIT %(looked)s) n
         WHERE (%(tenant)s::text IS NULL OR n.tenant = %(tenant)s) AND (%(task)s::text IS NULL OR n.task = %(task)s)
         ORDER BY n.seq DESC LIMIT %(limit)s) f
    UNION
    (SELECT q.id, q.seq FROM (
        SELECT j.id, j.seq, j.task FROM {s}.job j
         WHERE j.status = 'queued' AND j.tenant = %(tenant)s AND 'queued' = ANY (%(statuses)s::text[])
         ORDER BY j.queue, j.seq LIMIT %(looked)s) q
      WHERE %(task)s::text IS NULL OR q.task = %(task)s ORDER BY q.seq DESC LIMIT %(limit)s)
    UNION
    (SELECT j.id, j.seq FROM {s}.job j
      WHERE j.status COLLATE "C" = 'unknown' AND 'unknown' = ANY (%(statuses)s::text[])
        AND (%(tenant)s::text IS NULL OR j.tenant = %(tenant)s) AND (%(task)s::text IS NULL OR j.task = %(task)s)
      ORDER BY j.seq DESC LIMIT %(limit)s)
    ORDER BY seq DESC LIMIT %(limit)s) l ON l.id = v.id
 ORDER BY l.seq DESC
"""
)
# Whether there is a finished job further back than a list has looked.
VIEW_JOBS_BEYOND: Final = """
SELECT EXISTS (SELECT FROM unnest(%(statuses)s::text[]) AS s (status) CROSS JOIN LATERAL (
    SELECT FROM {s}.job j WHERE j.status COLLATE "C" = s.status AND s.status <> 'unknown'
     ORDER BY j.seq DESC OFFSET %(looked)s LIMIT 1) b) AS beyond
"""
_OPERATION_COLUMNS: Final = """
SELECT o.key, o.job_id, o.step, o.effect, o.status, o.attempt, o.fence, o.args, o.provider_ref, o.result, o.error,
       o.first_intent_at, o.intent_at, o.deadline_at, o.resolved_at, o.resolved_by, o.evidence, o.reconcile_attempts,
       o.next_reconcile_at
  FROM {s}.operations o"""
_OPERATION_IS: Final = """(%(effect)s::text IS NULL OR o.effect = %(effect)s)
   AND (%(older)s::float8 IS NULL OR o.intent_at < clock_timestamp() - %(older)s::float8 * interval '1 second')
   AND (%(tenant)s::text IS NULL
        OR EXISTS (SELECT FROM {s}.job j WHERE j.id = o.job_id AND j.tenant = %(tenant)s))"""
VIEW_OPERATION: Final = _OPERATION_COLUMNS + " WHERE o.key = %(key)s"
VIEW_OPERATIONS_OF_JOB: Final = (
    _OPERATION_COLUMNS
    + " WHERE o.job_id = %(job)s AND o.status = ANY (%(statuses)s::text[]) AND "
    + _OPERATION_IS
    + " ORDER BY o.first_intent_at LIMIT %(limit)s"
)
VIEW_OPERATIONS: Final = (
    _OPERATION_COLUMNS
    + """ JOIN (
    SELECT f.key, f.first_intent_at FROM unnest(%(statuses)s::text[]) AS s (status) CROSS JOIN LATERAL (
        SELECT o.key, o.first_intent_at FROM (
            SELECT o.key, o.job_id, o.effect, o.intent_at, o.first_intent_at FROM {s}.operation o
             WHERE o.status COLLATE "C" = s.status ORDER BY o.first_intent_at LIMIT %(looked)s) o
         WHERE """
    + _OPERATION_IS
    + """
         ORDER BY o.first_intent_at LIMIT %(limit)s) f
    UNION
    (SELECT o.key, o.first_intent_at FROM {s}.operation o
      WHERE o.status COLLATE "C" = 'unknown' AND 'unknown' = ANY (%(statuses)s::text[]) AND """
    + _OPERATION_IS
    + """
      ORDER BY o.first_intent_at LIMIT %(limit)s)
    ORDER BY first_intent_at LIMIT %(limit)s) l ON l.key = o.key
 ORDER BY l.first_intent_at
"""
)
# What workers own: as few rows as there are children, by the index job_live.
VIEW_LIVE: Final = """
SELECT v.id, v.task, v.status, v.tenant, v.lease_owner,
       extract(epoch FROM clock_timestamp() - j.leased_at)::float8 AS held_s,
       extract(epoch FROM v.lease_until - clock_timestamp())::float8 AS left_s,
       v.attempts, v.cancel_requested_at IS NOT NULL AS cancelled
  FROM {s}.job j JOIN {s}.jobs v ON v.id = j.id
 WHERE j.status IN ('leased', 'running')
   AND (%(tenant)s::text IS NULL OR j.tenant = %(tenant)s) AND (%(task)s::text IS NULL OR j.task = %(task)s)
 ORDER BY j.leased_at LIMIT %(limit)s
"""
VIEW_TRANSITIONS: Final = """
SELECT id, at, job_id, operation_key, from_status, to_status, fence, actor, reason FROM {s}.transitions
 WHERE job_id = %(id)s AND id > %(after)s ORDER BY id
"""
# One look at everything, for `status`. A job that waits for its time is not late.
# Counts end at `most` and `ended`, each by an index of its own: a look costs the same however much is finished.
_SOME: Final = "SELECT '{name}' AS status, count(*) AS n FROM (SELECT FROM {s}.job j WHERE {where} LIMIT %({most})s) x"
_JOBS_BY_STATUS: Final = " UNION ALL ".join(
    _SOME.replace("{name}", name).replace("{where}", where.replace("{name}", name)).replace("{most}", most)
    for names, where, most in (
        (("queued", "leased", "running", "unknown"), "j.status COLLATE \"C\" = '{name}'", "most"),
        (("succeeded", "failed", "cancelled"), "j.status = '{name}' AND j.finished_at IS NOT NULL", "ended"),
    )
    for name in names
)
_OPERATIONS_BY_STATUS: Final = """
    SELECT 'intent_recorded' AS status, coalesce(sum(j.open_ops), 0) AS n
      FROM {s}.job j WHERE j.status IN ('leased', 'running')
    UNION ALL """ + " UNION ALL ".join(
    _SOME.replace("{s}.job j", "{s}.operation o")
    .replace("{name}", name)
    .replace("{where}", f"o.status COLLATE \"C\" = '{name}'")
    .replace("{most}", "most" if name == "unknown" else "ended")
    for name in ("outcome_confirmed", "refused", "not_happened", "unknown")
)
_READY: Final = "j.status >= 'queued' AND j.status <= 'queued'"
_QUEUES: Final = """
WITH RECURSIVE queue (name, n) AS (
    (SELECT j.queue, 1 FROM {s}.job j WHERE {queued} AND j.queue IS NOT NULL ORDER BY j.queue LIMIT 1)
    UNION ALL
    SELECT (SELECT j.queue FROM {s}.job j WHERE {queued} AND j.queue > q.name ORDER BY j.queue LIMIT 1), q.n + 1
      FROM queue q WHERE q.name IS NOT NULL{bound}
)""".replace("{queued}", _READY)
"""The queues that have queued jobs, one after the other by an index."""
# Queue by queue, the one that could have started first. now(): a volatile time is no bound for an index.
_OLDEST_READY: Final = (
    _QUEUES.replace("{bound}", "")
    + """
        SELECT min(o.at) FROM (
            SELECT (SELECT greatest(j.created_at, j.run_after) FROM {s}.job j
                     WHERE {queued} AND j.queue = q.name AND greatest(j.created_at, j.run_after) <= now()
                     ORDER BY greatest(j.created_at, j.run_after) LIMIT 1) AS at
              FROM queue q WHERE q.name IS NOT NULL
            UNION ALL
            SELECT (SELECT greatest(j.created_at, j.run_after) FROM {s}.job j
                     WHERE {queued} AND j.queue IS NULL AND greatest(j.created_at, j.run_after) <= now()
                     ORDER BY greatest(j.created_at, j.run_after) LIMIT 1)) o""".replace("{queued}", _READY)
)
VIEW_OVERVIEW: Final = (
    """
SELECT clock_timestamp() AS at, (SELECT max(version) FROM {s}.schema_version) AS schema_version,
       (SELECT json_object_agg(c.status, c.n) FROM ("""
    + _JOBS_BY_STATUS
    + """) c WHERE c.n > 0) AS jobs,
       (SELECT json_object_agg(c.status, c.n) FROM ("""
    + _OPERATIONS_BY_STATUS
    + """) c WHERE c.n > 0) AS operations,
       ("""
    + _OLDEST_READY
    + """) AS oldest_queued_at,
       (SELECT min(t.at) FROM (SELECT p.id FROM {s}.job p WHERE p.status COLLATE "C" = 'unknown' ORDER BY p.seq
                             LIMIT LEAST(1000, %(most)s)) j
         CROSS JOIN LATERAL (
            SELECT t.at FROM {s}.transition t
             WHERE t.job_id = j.id AND t.operation_key IS NULL AND t.to_status = 'unknown' ORDER BY t.id DESC LIMIT 1) t
       ) AS oldest_unknown_at,
       sweep.last_started_at AS sweep_started_at, sweep.last_finished_at AS sweep_finished_at,
       sweep.last_by AS sweep_by, sweep.runs AS sweep_runs,
       reconcile.last_started_at AS reconcile_started_at, reconcile.last_finished_at AS reconcile_finished_at,
       reconcile.last_by AS reconcile_by, reconcile.runs AS reconcile_runs,
       (SELECT count(*) FROM (SELECT FROM {s}.operation o WHERE o.double_at IS NOT NULL LIMIT %(most)s) d)
           AS double_effects,
       ARRAY(SELECT key FROM {s}.operation WHERE double_at IS NOT NULL ORDER BY double_at DESC LIMIT 10)
           AS double_effect_keys
  FROM (SELECT) one
  LEFT JOIN {s}.maintenance sweep ON sweep.name = 'sweep'
  LEFT JOIN {s}.maintenance reconcile ON reconcile.name = 'reconcile'
"""
)

# -- metrics: each reads a bounded number of rows by an index, whatever the tables hold ------------------------------

# For one transaction. The bounds are parameters, of which a generic plan knows nothing; and compiling such statements
# would take longer than running them.
METRICS_BEGIN: Final = """
SELECT set_config('plan_cache_mode', 'force_custom_plan', true) AS plans, set_config('jit', 'off', true) AS jit
"""
# The queues, and of each the oldest jobs that could have started. now(): a volatile time is no bound for an index.
METRICS_QUEUES: Final = (
    _QUEUES.replace("{bound}", " AND q.n < %(queues)s")
    + """,
oldest AS (
    SELECT q.name AS queue, o.* FROM queue q LEFT JOIN LATERAL (
        SELECT j.tenant, greatest(j.created_at, j.run_after) AS ready_at,
               j.started_at IS NULL AND j.waiting_for IS NULL AS never_started
          FROM {s}.job j
         WHERE {queued} AND j.queue = q.name AND greatest(j.created_at, j.run_after) <= now()
         ORDER BY greatest(j.created_at, j.run_after) LIMIT %(sample)s) o ON true
    WHERE q.name IS NOT NULL
    UNION ALL
    (SELECT '', j.tenant, greatest(j.created_at, j.run_after),
            j.started_at IS NULL AND j.waiting_for IS NULL
       FROM {s}.job j
      WHERE {queued} AND j.queue IS NULL AND greatest(j.created_at, j.run_after) <= now()
      ORDER BY greatest(j.created_at, j.run_after) LIMIT %(sample)s)
)
SELECT o.queue, o.tenant, extract(epoch FROM now() - min(o.ready_at))::float8 AS age,
       extract(epoch FROM now() - min(o.ready_at) FILTER (WHERE o.never_started))::float8 AS never_started_age,
       count(*) FILTER (WHERE o.never_started AND o.ready_at < now() - %(patience)s::float8 * interval '1 second')
           AS never_started
  FROM oldest o GROUP BY o.queue, o.tenant
"""
).replace("{queued}", _READY)
METRICS_DEPTHS: Final = """
SELECT q.name, (SELECT count(*) FROM (
           SELECT FROM {s}.job j WHERE j.status = 'queued' AND j.queue = q.name LIMIT %(most)s) c) AS jobs
  FROM unnest(%(queues)s::text[]) AS q (name)
""".replace("j.status = 'queued'", _READY)
# Queued and running jobs of some tenants and pools, counted up to a bound.
METRICS_USE: Final = """
SELECT 'tenant' AS kind, t.name,
       (SELECT count(*) FROM (SELECT FROM {s}.job j
          WHERE j.status = 'queued' AND j.tenant = t.name LIMIT %(most)s) c) AS queued,
       (SELECT count(*) FROM (SELECT FROM {s}.job j
          WHERE j.status IN ('leased', 'running') AND j.tenant = t.name LIMIT %(most)s) c) AS running
  FROM unnest(%(tenants)s::text[]) AS t (name)
UNION ALL
SELECT 'pool', p.name, 0, (SELECT count(*) FROM (SELECT FROM {s}.job j
          WHERE j.status IN ('leased', 'running') AND j.pool = p.name LIMIT %(most)s) c)
  FROM unnest(%(pools)s::text[]) AS p (name)
"""
METRICS_LIVE: Final = """
SELECT l.tenant, l.status, count(*) AS jobs, extract(epoch FROM now() - min(l.leased_at))::float8 AS age,
       count(*) FILTER (WHERE l.lease_until < now()) AS overdue
  FROM (SELECT j.tenant, j.status, j.leased_at, j.lease_until FROM {s}.job j
         WHERE j.status IN ('leased', 'running') LIMIT %(most)s) l
 GROUP BY l.tenant, l.status
"""
METRICS_UNKNOWN: Final = """
SELECT u.effect, count(*) AS operations, extract(epoch FROM now() - min(u.intent_at))::float8 AS age
  FROM (SELECT o.effect, o.intent_at FROM {s}.operation o
         WHERE o.status = 'unknown' ORDER BY o.intent_at LIMIT %(most)s) u
 GROUP BY u.effect
"""
METRICS_PARKED: Final = """
SELECT {s}.reason_class(p.reason, NULL) AS reason, count(*) AS jobs
  FROM (SELECT j.reason FROM {s}.job j
         WHERE j.status COLLATE "C" = 'unknown' ORDER BY j.seq LIMIT %(most)s) p GROUP BY 1
"""
METRICS_WAITING: Final = """
SELECT {s}.reason_class(w.reason, NULL) AS reason, count(*) AS jobs
  FROM (SELECT j.reason FROM {s}.job j WHERE j.waiting_for IS NOT NULL LIMIT %(most)s) w GROUP BY 1
"""
METRICS_COUNTERS: Final = """
SELECT c.name, c.label, sum(c.value)::bigint AS value
  FROM ((SELECT name, label, value FROM {s}.folded ORDER BY name, label LIMIT %(most)s)
        UNION ALL (SELECT name, label, value FROM {s}.tally ORDER BY id LIMIT %(most)s)) c
 GROUP BY c.name, c.label
"""
METRICS_MAINTENANCE: Final = """
SELECT name, extract(epoch FROM last_finished_at)::float8 AS finished, runs FROM {s}.maintenance ORDER BY name
"""
METRICS_WORKERS: Final = """
SELECT node, pid, version, pool, concurrency, connections, queues, longest_pause, paused_at, seen_at, started_at,
       extract(epoch FROM now() - seen_at)::float8 AS silent, stopped_at IS NOT NULL AS stopped
  FROM {s}.worker ORDER BY node LIMIT %(most)s
"""
METRICS_REST: Final = (
    """
SELECT ("""
    + _GIVEN
    + """) AS accepted,
       (SELECT count(*) FROM (SELECT FROM {s}.operation o WHERE o.double_at IS NOT NULL LIMIT %(most)s) d) AS doubled,
       (SELECT extract(epoch FROM now() - o.next_reconcile_at)::float8 FROM {s}.operation o
         WHERE o.status || ':due' = 'unknown:due' ORDER BY o.next_reconcile_at LIMIT 1) AS reconcile_lag,
       (SELECT extract(epoch FROM now() - j.next_publish_at)::float8 FROM {s}.job j
         WHERE j.next_publish_at IS NOT NULL ORDER BY j.next_publish_at LIMIT 1) AS publish_lag
"""
)

# -- the doctor's questions -----------------------------------------------------------------------------------------

DOCTOR_DATABASE: Final = """
SELECT extract(epoch FROM clock_timestamp())::float8 AS clock, current_setting('fsync') AS fsync,
       current_setting('synchronous_commit') AS synchronous_commit,
       current_setting('synchronous_standby_names') AS standby_names,
       current_setting('full_page_writes') AS full_page_writes,
       current_setting('default_transaction_isolation') AS isolation,
       current_setting('transaction_read_only') AS read_only, current_setting('server_encoding') AS encoding,
       current_setting('server_version_num')::integer AS version, current_setting('autovacuum') AS autovacuum,
       current_setting('max_connections')::integer
           - current_setting('superuser_reserved_connections')::integer
           - coalesce(current_setting('reserved_connections', true)::integer, 0) AS connections,
       (SELECT coalesce(sum(numbackends), 0)::integer FROM pg_stat_database) AS connected,
       (SELECT count(*)::integer FROM pg_stat_activity WHERE application_name = 'celery-safe-effects') AS ours
"""
# Which of these rights our role does not have; no right is needed for asking, not even on the schema.
DOCTOR_RIGHTS: Final = """
SELECT a.n::integer - 1 AS n
  FROM unnest(%(privilege)s::text[], %(on)s::text[], %(name)s::text[], %(column)s::text[]) WITH ORDINALITY
           AS a (privilege, kind, name, attribute, n)
  LEFT JOIN pg_namespace s ON s.nspname = %(schema)s
  LEFT JOIN pg_class c ON c.relnamespace = s.oid AND c.relname = a.name AND a.kind = 'relation'
  LEFT JOIN pg_proc p ON p.pronamespace = s.oid AND p.proname = a.name AND a.kind = 'function'
 WHERE NOT coalesce(
    CASE a.kind WHEN 'schema' THEN has_schema_privilege(s.oid, a.privilege)
                WHEN 'function' THEN has_function_privilege(p.oid, a.privilege)
                ELSE CASE a.attribute WHEN '*' THEN has_table_privilege(c.oid, a.privilege)
                                      ELSE has_column_privilege(c.oid, a.attribute, a.privilege) END END, false)
 ORDER BY a.n
"""
# How the jobs stand, counted no further than needed.
DOCTOR_STATE: Final = """
SELECT clock_timestamp() AS at,
       (SELECT count(*) FROM (SELECT FROM {s}.job j WHERE j.status COLLATE "C" = 'queued' LIMIT %(most)s) q) AS queued,
       (SELECT count(*) FROM (SELECT FROM {s}.job j
          WHERE j.status IN ('leased', 'running') LIMIT %(most)s) l) AS running,
       (SELECT count(*) FROM (SELECT FROM {s}.operation o WHERE o.status = 'unknown' LIMIT %(most)s) u) AS unknown,
       (SELECT extract(epoch FROM now() - p.created_at)::float8 FROM {s}.job p
         WHERE p.status COLLATE "C" = 'unknown' ORDER BY p.seq LIMIT 1) AS oldest_parked,
       (SELECT count(*) FROM (SELECT FROM {s}.operation o WHERE o.double_at IS NOT NULL LIMIT %(most)s) d) AS doubled,
       ARRAY(SELECT o.key FROM {s}.operation o WHERE o.double_at IS NOT NULL
              ORDER BY o.double_at DESC LIMIT 10) AS doubled_keys,
       sweep.last_finished_at AS sweep_finished_at, sweep.last_by AS sweep_by,
       reconcile.last_started_at AS reconcile_started_at
  FROM (SELECT) one
  LEFT JOIN {s}.maintenance sweep ON sweep.name = 'sweep'
  LEFT JOIN {s}.maintenance reconcile ON reconcile.name = 'reconcile'
"""
# The longest run among the live ones and the last that ended.
DOCTOR_LONGEST: Final = """
SELECT max(r.seconds)::float8 AS seconds FROM (
    (SELECT extract(epoch FROM now() - j.leased_at) AS seconds FROM {s}.job j
      WHERE j.status IN ('leased', 'running') LIMIT %(most)s)
    UNION ALL
    (SELECT extract(epoch FROM j.finished_at - j.leased_at) FROM {s}.job j
      WHERE j.finished_at IS NOT NULL AND j.status = 'succeeded' ORDER BY j.finished_at DESC LIMIT %(most)s)) r
"""
DOCTOR_TASKS: Final = """
SELECT t.name, EXISTS (SELECT FROM {s}.known_task k WHERE k.name = t.name) AS known
  FROM unnest(%(names)s::text[]) AS t (name)
"""
DOCTOR_EFFECTS: Final = """
SELECT DISTINCT u.effect, u.task FROM (
    SELECT o.effect, j.task FROM {s}.operation o JOIN {s}.job j ON j.id = o.job_id
     WHERE o.status = 'unknown' ORDER BY o.intent_at LIMIT %(most)s) u
"""
