"""`python3 tests/mutants.py`: takes each guard of the protocol away, and shows which test fails without it.

One guard at a time, on copies of the checkout in a temporary folder, with one PostgreSQL server for all of them. A
mutant that no test notices is a missing test, and the exit status is 1. `--list` tells the guards, a word chooses some.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "celery_safe_effects"
STATEMENTS = "store/statements.py"
SCHEMA = "store/migrations/0001_initial.sql"
IGNORED = shutil.ignore_patterns(".git", ".venv*", ".matrix", "__pycache__", ".*_cache")
SECONDS = 400
"""A mutant that hangs its tests for so long is noticed, too."""


@dataclass(frozen=True)
class Mutant:
    """A guard that is taken away.

    Args:
        guard: what it is.
        path: the file, within the package.
        old: its text there.
        new: what stands in its place.
        tests: pytest's arguments: those of which one must fail.
        times: how often the text occurs; it is taken away everywhere.
    """

    guard: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    times: int = 1


EXACT = "tests/integration/test_guards.py"
JOBS = (EXACT, "tests/integration/test_jobs.py")
GUARDS = (EXACT, "tests/integration/test_schema_guards.py")
LOST = ("tests/integration/test_republish.py",)
RESTORED = ("tests/integration/test_rebuild.py",)
GRANTS = "tests/integration/test_grants.py"
CROSSING = "tests/integration/test_crossing.py"
LIMITS = ("tests/integration/test_limits.py",)
STALE = (EXACT, "tests/faults/test_fault_16.py::test_fault_16_a_stale_lease_touches_no_row")
SWEEPS = (EXACT, "tests/faults/test_fault_15.py")
TRUST = ("tests/acceptance/test_trust.py",)
RETRIES = ("tests/integration/test_retries.py",)

MUTANTS = (
    # -- leases and fences ---------------------------------------------------------------------------------------------
    Mutant(
        "claim: only of a queued row",
        STATEMENTS,
        "WHERE j.id = %(id)s AND j.status || '' = 'queued' AND j.generation = %(generation)s\n   AND set_config",
        "WHERE j.id = %(id)s AND j.status IN ('queued', 'leased', 'running') AND j.generation = %(generation)s\n"
        "   AND set_config",
        (*JOBS, *GUARDS),
    ),
    Mutant(
        "claim: generation",
        STATEMENTS,
        "AND j.status || '' = 'queued' AND j.generation = %(generation)s\n   AND set_config",
        "AND j.status || '' = 'queued'\n   AND set_config",
        (EXACT, "tests/integration/test_replace.py"),
    ),
    Mutant(
        "claim: fingerprint",
        STATEMENTS,
        "AND j.args_digest = coalesce(%(digest)s, j.args_digest) AND j.task",
        "AND j.task",
        (*TRUST, *JOBS),
    ),
    Mutant(
        "claim: mark's number",
        STATEMENTS,
        "AND j.seq = coalesce(%(seq)s, j.seq) AND j.tenant",
        "AND j.tenant",
        (*TRUST, "tests/faults/test_fault_37.py"),
    ),
    Mutant(
        "claim: cancelled", STATEMENTS, "AND j.cancel_requested_at IS NULL AND j.attempts <", "AND j.attempts <", JOBS
    ),
    Mutant(
        "claim: attempts",
        STATEMENTS,
        "AND j.cancel_requested_at IS NULL AND j.attempts < j.max_attempts\n",
        "AND j.cancel_requested_at IS NULL\n",
        (*JOBS, *RETRIES, *LIMITS),
    ),
    Mutant(
        "claim: not before its time",
        STATEMENTS,
        "   AND (j.run_after IS NULL OR j.run_after <= clock_timestamp())\n",
        "",
        (*JOBS, *RETRIES, "tests/faults/test_fault_02.py"),
    ),
    Mutant(
        "claim: expiry and age",
        STATEMENTS,
        "   AND (j.run_after IS NULL OR j.run_after <= clock_timestamp())\n"
        "   AND coalesce(LEAST(j.expires_at, j.gives_up_at) > clock_timestamp(), true)\n",
        "   AND (j.run_after IS NULL OR j.run_after <= clock_timestamp())\n",
        (*JOBS, *LIMITS),
    ),
    Mutant(
        "claim: a new fence",
        SCHEMA,
        "        RAISE EXCEPTION 'the fence of job % never shrinks', OLD.id USING ERRCODE = 'SE003';\n",
        "        NULL;\n",
        GUARDS,
    ),
    Mutant(
        "claim: a new token",
        SCHEMA,
        "            RAISE EXCEPTION 'a claim of job % takes a new token and a higher fence', OLD.id USING ERRCODE = 'SE003';\n",
        "            NULL;\n",
        GUARDS,
    ),
    Mutant(
        "intent: fence and token",
        STATEMENTS,
        "WHERE j.id = %(job)s AND j.lease_token = %(token)s AND j.fence = %(fence)s AND j.status || '' = 'running'\n"
        "       AND j.lease_until > clock_timestamp() AND j.cancel_requested_at IS NULL\n",
        "WHERE j.id = %(job)s AND j.status || '' = 'running'\n"
        "       AND j.lease_until > clock_timestamp() AND j.cancel_requested_at IS NULL\n",
        STALE,
    ),
    Mutant(
        "intent: token",
        STATEMENTS,
        "WHERE j.id = %(job)s AND j.lease_token = %(token)s AND j.fence = %(fence)s AND j.status || '' = 'running'\n"
        "       AND j.lease_until > clock_timestamp() AND j.cancel_requested_at IS NULL\n",
        "WHERE j.id = %(job)s AND j.fence = %(fence)s AND j.status || '' = 'running'\n"
        "       AND j.lease_until > clock_timestamp() AND j.cancel_requested_at IS NULL\n",
        (*STALE, *JOBS),
    ),
    Mutant(
        "intent: live lease",
        STATEMENTS,
        "       AND j.lease_until > clock_timestamp() AND j.cancel_requested_at IS NULL\n       AND coalesce(LEAST",
        "       AND j.cancel_requested_at IS NULL\n       AND coalesce(LEAST",
        (*STALE, *SWEEPS),
    ),
    Mutant(
        "intent: cancelled",
        STATEMENTS,
        "       AND j.lease_until > clock_timestamp() AND j.cancel_requested_at IS NULL\n       AND coalesce(LEAST",
        "       AND j.lease_until > clock_timestamp()\n       AND coalesce(LEAST",
        JOBS,
    ),
    Mutant(
        "intent: expiry and age",
        STATEMENTS,
        "AND j.cancel_requested_at IS NULL\n       AND coalesce(LEAST(j.expires_at, j.gives_up_at) > clock_timestamp(), true)\n"
        "       FOR NO KEY UPDATE",
        "AND j.cancel_requested_at IS NULL\n       FOR NO KEY UPDATE",
        (*LIMITS, *JOBS),
    ),
    Mutant(
        "intent: the row is locked",
        STATEMENTS,
        "AND coalesce(LEAST(j.expires_at, j.gives_up_at) > clock_timestamp(), true)\n       FOR NO KEY UPDATE\n",
        "AND coalesce(LEAST(j.expires_at, j.gives_up_at) > clock_timestamp(), true)\n",
        SWEEPS,
    ),
    Mutant(
        "intent: sent again only if it may be",
        STATEMENTS,
        "       AND (o.status = 'not_happened' OR (o.job_id = excluded.job_id AND {s}.sendable(o)))",
        "",
        (*GUARDS, *JOBS),
    ),
    Mutant(
        "intent: same arguments",
        STATEMENTS,
        "       AND (o.args_digest = excluded.args_digest OR (o.whole_body AND o.status = 'not_happened'))\n",
        "",
        (*JOBS, "tests/faults/test_fault_28.py", "tests/integration/test_map.py"),
    ),
    Mutant(
        "end: fence and token",
        STATEMENTS,
        " WHERE j.id = %(id)s AND j.lease_token = %(token)s AND j.fence = %(fence)s AND j.status || '' = 'running'\n"
        "RETURNING j.status, j.reason\n",
        " WHERE j.id = %(id)s AND j.status || '' = 'running'\nRETURNING j.status, j.reason\n",
        STALE,
    ),
    Mutant(
        "renewal: token",
        STATEMENTS,
        "     WHERE j.lease_token = l.token AND l.fence IN (0, j.fence) AND j.status || '' IN ('leased', 'running')\n",
        "     WHERE j.status || '' IN ('leased', 'running')\n",
        STALE,
    ),
    Mutant(
        "renewal: no lease that ran out",
        STATEMENTS,
        "       AND j.lease_until > clock_timestamp() AND coalesce(j.gives_up_at > clock_timestamp(), true)\n",
        "       AND coalesce(j.gives_up_at > clock_timestamp(), true)\n",
        (*STALE, *JOBS),
    ),
    Mutant(
        "renewal: not past its age",
        STATEMENTS,
        "       AND j.lease_until > clock_timestamp() AND coalesce(j.gives_up_at > clock_timestamp(), true)\n",
        "       AND j.lease_until > clock_timestamp()\n",
        (*LIMITS, *JOBS),
    ),
    Mutant(
        "checkpoint: fence and token",
        STATEMENTS,
        " WHERE j.id = %(job)s AND j.lease_token = %(token)s AND j.fence = %(fence)s AND j.status || '' = 'running'\n"
        "   AND j.lease_until",
        " WHERE j.id = %(job)s AND j.status || '' = 'running'\n   AND j.lease_until",
        (*STALE, *JOBS),
    ),
    Mutant(
        "worker: its own trust in the lease",
        "engine/lease.py",
        "return not self.lost and clock() < self.renewed + self.ttl - self.margin",
        "return not self.lost",
        ("tests/unit/test_lease.py",),
    ),
    # -- outcomes ------------------------------------------------------------------------------------------------------
    Mutant(
        "outcome: nonce",
        STATEMENTS,
        "     WHERE o.key = %(key)s AND o.nonce = %(nonce)s\n       AND (o.status = 'intent_recorded'",
        "     WHERE o.key = %(key)s\n       AND (o.status = 'intent_recorded'",
        (*STALE, *JOBS, "tests/faults/test_fault_16.py"),
    ),
    Mutant(
        "outcome: never overwrites",
        STATEMENTS,
        "       AND (o.status = 'intent_recorded' OR (o.status = 'unknown' AND {said} <> 'unknown')\n"
        "            OR (o.status = 'not_happened' AND %(status)s = 'outcome_confirmed'))\n",
        "",
        (*JOBS, *GUARDS),
    ),
    Mutant(
        "late outcome: said loudly",
        STATEMENTS,
        "double_at = CASE WHEN o.status = 'outcome_confirmed' AND (o.idempotent_for IS NULL OR o.provider_ref <> %(ref)s)\n"
        "                        THEN coalesce(o.double_at, clock_timestamp()) ELSE o.double_at END",
        "double_at = o.double_at",
        ("tests/faults/test_fault_16.py::test_fault_17_a_double_effect_is_said_loudly",),
    ),
    Mutant(
        "effect: anything not proven is unknown",
        "engine/outcomes.py",
        "        return Op.NOT_HAPPENED\n    return Op.UNKNOWN\n",
        "        return Op.NOT_HAPPENED\n    return Op.NOT_HAPPENED\n",
        JOBS,
    ),
    Mutant(
        "effect: not begun after its deadline",
        "engine/calls.py",
        "if (self._expires is not None and clock() >= self._expires) or not self.job.held.trusted():",
        "if not self.job.held.trusted():",
        ("tests/integration/test_deadline.py", *JOBS),
    ),
    # -- parking and ends ----------------------------------------------------------------------------------------------
    Mutant(
        "end: an open question parks",
        SCHEMA,
        "        WHEN wish = 'held' OR j.open_ops + j.unknown_ops > 0 THEN 'unknown'\n",
        "        WHEN wish = 'held' THEN 'unknown'\n",
        (*GUARDS, *JOBS),
    ),
    Mutant(
        "end: the pending end is kept",
        SCHEMA,
        "        WHEN wish IN ('failed', 'cancelled') THEN wish\n",
        "",
        (*JOBS, *RETRIES),
    ),
    Mutant(
        "end: runs are bounded",
        SCHEMA,
        "        WHEN wish = 'again' AND j.attempts >= j.max_attempts THEN 'failed'\n",
        "",
        (*JOBS, *RETRIES),
    ),
    Mutant(
        "sweep: skip locked",
        STATEMENTS,
        '     ORDER BY j.seq LIMIT %(limit)s FOR NO KEY UPDATE SKIP LOCKED\n)\nUPDATE {s}.job j"""\n    + _GIVEN_UP_SET',
        '     ORDER BY j.seq LIMIT %(limit)s FOR NO KEY UPDATE\n)\nUPDATE {s}.job j"""\n    + _GIVEN_UP_SET',
        (*SWEEPS, "tests/acceptance/test_periodic.py"),
    ),
    Mutant(
        "settle: fence",
        STATEMENTS,
        " WHERE j.id = l.id AND j.fence = l.fence AND j.status IN ('succeeded', 'failed', 'cancelled') AND j.settled_at IS NULL\n",
        " WHERE j.id = l.id AND j.status IN ('succeeded', 'failed', 'cancelled') AND j.settled_at IS NULL\n",
        (*JOBS, *RETRIES),
    ),
    # -- verdicts ------------------------------------------------------------------------------------------------------
    Mutant(
        "verdict: of the attempt that was asked about",
        STATEMENTS,
        "     WHERE o.key = %(key)s AND o.attempt = %(attempt)s AND o.fence = %(fence)s AND o.status || '' = 'unknown'\n"
        "       AND (%(status)s <> 'not_happened'",
        "     WHERE o.key = %(key)s AND o.status || '' = 'unknown'\n       AND (%(status)s <> 'not_happened'",
        (*JOBS, *GUARDS, "tests/faults/test_failure_injection.py"),
    ),
    Mutant(
        "verdict: absence only after deadline and lag",
        STATEMENTS,
        "OR (%(asked_at)s::timestamptz >= o.absent_from AND NOT o.detached\n",
        "OR (NOT o.detached\n",
        (*JOBS, "tests/faults/test_fault_21.py", "tests/faults/test_fault_08.py"),
    ),
    Mutant(
        "verdict: no absence of a detached effect",
        STATEMENTS,
        "OR (%(asked_at)s::timestamptz >= o.absent_from AND NOT o.detached\n",
        "OR (%(asked_at)s::timestamptz >= o.absent_from\n",
        (*JOBS, "tests/faults/test_fault_37.py"),
    ),
    Mutant(
        "verdict: no absence while the sender may live",
        STATEMENTS,
        "AND (o.gone_at <= %(asked_at)s::timestamptz\n                     OR (",
        "AND (true\n                     OR (",
        (*JOBS, "tests/faults/test_fault_16.py"),
    ),
    Mutant(
        "verdict: no absence that was asked before the sender was gone",
        STATEMENTS,
        "AND (o.gone_at <= %(asked_at)s::timestamptz\n                     OR (",
        "AND (o.gone_at IS NOT NULL\n                     OR (",
        JOBS,
    ),
    Mutant(
        "outcome: what is sent again proves nothing of the call before",
        STATEMENTS,
        "in_doubt = o.status = 'unknown',",
        "in_doubt = false,",
        JOBS,
    ),
    Mutant(
        "outcome: a refusal proves nothing of the call before, but where the key does",
        STATEMENTS,
        " OR (%(status)s = 'refused' AND o.idempotent_for IS NULL)",
        "",
        JOBS,
    ),
    Mutant(
        "resend: only while the key is retained",
        SCHEMA,
        "        AND clock_timestamp() + coalesce(o.deadline, interval '0') < o.first_intent_at + o.idempotent_for",
        "",
        (*JOBS, "tests/faults/test_fault_21.py"),
    ),
    Mutant(
        "resume: every open question may be sent again",
        STATEMENTS,
        "   AND NOT EXISTS (SELECT FROM {s}.operation o WHERE o.job_id = j.id AND o.status = 'unknown' AND NOT {s}.sendable(o))\n"
        "RETURNING j.id, j.task, j.status\n",
        "RETURNING j.id, j.task, j.status\n",
        (*JOBS, *GUARDS),
    ),
    Mutant(
        "policy: only after deadline and lag",
        STATEMENTS,
        "   AND o.if_unknown = 'send_again' AND clock_timestamp() >= o.absent_from\n",
        "   AND o.if_unknown = 'send_again'\n",
        JOBS,
    ),
    Mutant(
        "gone: seen, or never",
        STATEMENTS,
        " WHERE o.process = ANY (%(processes)s) AND o.status = 'unknown' AND o.gone_at IS NULL AND NOT o.detached\n",
        " WHERE o.status = 'unknown' AND o.gone_at IS NULL AND NOT o.detached\n",
        (*JOBS, "tests/integration/test_processes.py", "tests/faults/test_fault_16.py"),
    ),
    Mutant(
        "gone: who may have outlived its deadline may have sent until then",
        STATEMENTS,
        "           ELSE clock_timestamp() + coalesce(o.deadline, %(in_flight)s::float8 * interval '1 second') + o.lag END\n",
        "           ELSE coalesce(o.absent_from, clock_timestamp() + %(in_flight)s::float8 * interval '1 second' + o.lag) END\n",
        (*GUARDS, "tests/machine"),
    ),
    Mutant(
        "cancel: at the next checkpoint or effect, not in a running job",
        STATEMENTS,
        "status = CASE WHEN j.status = 'running' THEN j.status ELSE {s}.leaves_to(j, 'cancelled') END",
        "status = {s}.leaves_to(j, 'cancelled')",
        (*JOBS, "tests/acceptance/test_cancel.py"),
    ),
    # -- messages and marks --------------------------------------------------------------------------------------------
    Mutant(
        "mark: a number that the database never gave is parked",
        STATEMENTS,
        "(SELECT last_value < %(seq)s OR NOT is_called FROM {s}.job_seq_seq)\n",
        "false\n",
        ("tests/faults/test_fault_37.py",),
    ),
    Mutant(
        "accept: a tombstone counts as a row",
        STATEMENTS,
        "   AND NOT EXISTS (SELECT FROM {s}.tombstone t WHERE t.tenant = r.tenant AND t.idempotency_key = r.key)\n",
        "",
        ("tests/integration/test_prune.py", *JOBS),
    ),
    Mutant(
        "accept: a pruned id never comes again",
        STATEMENTS,
        "   AND NOT EXISTS (SELECT FROM {s}.tombstone t WHERE t.id = r.id)\n",
        "",
        ("tests/integration/test_prune.py", *JOBS, "tests/faults/test_fault_37.py"),
    ),
    Mutant(
        "log: append-only",
        SCHEMA,
        "    RAISE EXCEPTION 'the log of transitions is append-only' USING ERRCODE = 'SE004';\n",
        "    RETURN coalesce(NEW, OLD);\n",
        GUARDS,
    ),
    Mutant(
        "rows: ends do not change",
        SCHEMA,
        "            RAISE EXCEPTION 'job % is %, and terminal rows do not change', OLD.id, OLD.status USING ERRCODE = 'SE002';\n",
        "            NULL;\n",
        GUARDS,
    ),
    Mutant(
        "rows: counters follow the operations",
        SCHEMA,
        "    RAISE EXCEPTION 'the counters of job % follow its operations and are not written by hand', OLD.id\n",
        "    RETURN NEW; RAISE NOTICE '%', OLD.id\n",
        GUARDS,
    ),
    # -- replay --------------------------------------------------------------------------------------------------------
    Mutant(
        "replay: same effect and arguments",
        "engine/replay.py",
        "if record.effect != effect.name or record.args_digest != digest:",
        "if record.effect != effect.name:",
        JOBS,
    ),
    Mutant(
        "replay: what did not happen stays so",
        "engine/replay.py",
        "        if record.status == Op.NOT_HAPPENED and error is not None and behind:\n",
        "        if False:\n",
        (*JOBS, "tests/faults/test_fault_34.py"),
    ),
    # -- messages ------------------------------------------------------------------------------------------------------
    Mutant(
        "lost: messages of the last second are on their way",
        STATEMENTS,
        "           AND j.published_at < %(at)s::timestamptz - interval '1 second'\n         LIMIT %(most)s",
        "         LIMIT %(most)s",
        LOST,
    ),
    Mutant(
        "lost: not what a worker holds",
        STATEMENTS,
        "            OR j.published_at < (SELECT w.at FROM worker w))\n       AND j.id NOT IN (SELECT h.id FROM held h)\n",
        "            OR j.published_at < (SELECT w.at FROM worker w))\n",
        LOST,
    ),
    Mutant(
        "lost: backs off", STATEMENTS, "* LEAST(3600, %(grace)s::float8 * 2 ^ LEAST(j.publishes - 1, 16))", "* 0", LOST
    ),
    Mutant(
        "lost: a worker that started ends the wait",
        STATEMENTS,
        "\n            OR j.published_at < (SELECT w.at FROM worker w))",
        ")",
        LOST,
    ),
    Mutant(
        "lost: only behind the head, for a while",
        STATEMENTS,
        "j.published_at < l.passed",
        "j.published_at <= l.head",
        LOST,
    ),
    Mutant(
        "stuck: only what waits behind something",
        STATEMENTS,
        "       AND coalesce(%(depth)s::bigint, 0) = 0\n",
        "",
        LOST,
    ),
    Mutant(
        "held: a worker is believed for a while",
        STATEMENTS,
        "    SELECT unnest(h.jobs || h.stuck) AS id FROM {s}.held h WHERE h.until > clock_timestamp()\n",
        "    SELECT unnest(h.jobs || h.stuck) AS id FROM {s}.held h\n",
        LOST,
    ),
    Mutant(
        "looks: one sweep a turn",
        STATEMENTS,
        " WHERE l.next_at <= clock_timestamp() + 0.1 * %(every)s::float8 * interval '1 second'\nRETURNING l.queue",
        "RETURNING l.queue",
        LOST,
    ),
    # -- limits --------------------------------------------------------------------------------------------------------
    Mutant(
        "limit: counted by one at a time",
        SCHEMA,
        "    SELECT pg_advisory_xact_lock('{schema}.job'::regclass::oid::integer, hashtext(scope))\n",
        "    SELECT NULL::void\n",
        LIMITS,
    ),
    Mutant(
        "limit: reservations count",
        SCHEMA,
        "\n         + (SELECT count(*) FROM {schema}.reservation r WHERE r.tenant = of_tenant) INTO taken;",
        " INTO taken;",
        LIMITS,
    ),
    Mutant(
        "limit: reservations lapse",
        SCHEMA,
        "         WHERE r.tenant = of_tenant AND r.lapses_at <= clock_timestamp() FOR UPDATE SKIP LOCKED);\n",
        "         WHERE false FOR UPDATE SKIP LOCKED);\n",
        LIMITS,
    ),
    Mutant(
        "limit: a woken job has its slot",
        SCHEMA,
        "              AND j.status || '' = 'queued' AND j.seq < for_seq LIMIT most) woken;\n",
        "              AND false LIMIT most) woken;\n",
        LIMITS,
    ),
    Mutant(
        "limit: live leases hold slots",
        SCHEMA,
        "            WHERE j.pool = substr(scope, 11) AND j.status IN ('leased', 'running') LIMIT most) live;\n",
        "            WHERE false LIMIT most) live;\n",
        LIMITS,
    ),
    Mutant(
        "fair: gives way not without end", SCHEMA, "LIMIT 64) waiting) < 64;\n", "LIMIT 64) waiting) < 65;\n", LIMITS
    ),
    Mutant(
        "canvas: a member stands under its id",
        "glue/acceptance.py",
        "        if verdict.job_id != candidate.id:\n            raise IdempotencyConflict(\n",
        "        if False:\n            raise IdempotencyConflict(\n",
        ("tests/integration/test_canvas.py",),
    ),
    Mutant(
        "canvas: one refusal refuses the whole",
        "glue/acceptance.py",
        "        if verdict.error is not None:\n            raise verdict.error\n        if verdict.job_id",
        "        if verdict.job_id",
        ("tests/integration/test_canvas.py",),
    ),
    # -- Celery's own handlers -----------------------------------------------------------------------------------------
    Mutant(
        "request: what is not the tracer's word ends nothing",
        "glue/request.py",
        "        if not ours and not isinstance(exc, (Ignore, Reject, Retry, MemoryError)):\n",
        "        if False:\n",
        ("tests/integration/test_requests.py",),
    ),
    Mutant(
        "request: a lost child is no failure",
        "glue/request.py",
        "        if isinstance(exc, LOST):\n",
        "        if False:\n",
        ("tests/faults/test_fault_04.py",),
    ),
    # -- roles and crossing transactions -------------------------------------------------------------------------------
    Mutant(
        "roles: the log is written in the owner's name",
        SCHEMA,
        "job_before_update() RETURNS trigger LANGUAGE plpgsql\nSECURITY DEFINER SET search_path = {schema}, pg_temp AS",
        "job_before_update() RETURNS trigger LANGUAGE plpgsql\nSET search_path = {schema}, pg_temp AS",
        (GRANTS, "tests/acceptance/test_roles.py"),
    ),
    Mutant(
        "roles: what runs as the owner looks nowhere else",
        SCHEMA,
        "wake_free(scope text, given jsonb) RETURNS integer LANGUAGE plpgsql\n"
        "SECURITY DEFINER SET search_path = {schema}, pg_temp AS",
        "wake_free(scope text, given jsonb) RETURNS integer LANGUAGE plpgsql\nSECURITY DEFINER AS",
        (GRANTS,),
    ),
    Mutant("roles: nothing is PUBLIC's", "store/migrate.py", "        if applied:\n", "        if False:\n", (GRANTS,)),
    Mutant(
        "roles: what another hand gave is taken away",
        "store/grants.py",
        "        _take_all(cursor, schema, role)\n        for kind in kinds:",
        "        for kind in kinds:",
        (GRANTS,),
    ),
    Mutant(
        "roles: the owner keeps what it has",
        "store/grants.py",
        "        if cursor.fetchone() is not None:\n",
        "        if False:\n",
        (GRANTS,),
    ),
    Mutant(
        "roles: a worker does not start with less",
        "doctor/database.py",
        "CERTAIN: Final = (rights, fsync,",
        "CERTAIN: Final = (fsync,",
        (GRANTS,),
    ),
    Mutant(
        "crossing: keys that another caller holds are not waited for",
        "glue/acceptance.py",
        "if door.enlisted is not None else (set(), False)",
        "if False else (set(), False)",
        (CROSSING,),
    ),
    Mutant(
        "crossing: nor by large batches",
        "glue/acceptance.py",
        'LOCK_TIMEOUT_ENLISTED: Final = "50ms"',
        'LOCK_TIMEOUT_ENLISTED: Final = "30s"',
        (f"{CROSSING}::test_a_large_batch_with_a_busy_key_keeps_no_place_twice",),
    ),
    Mutant(
        "crossing: nor with the tenant's lock in hand",
        STATEMENTS,
        "AND NOT pg_try_advisory_xact_lock_shared({key_lock})",
        "AND false",
        (CROSSING,),
    ),
    Mutant(
        "crossing: a refused call gives its places back",
        "glue/acceptance.py",
        "                    self.safe.admission.release(free)\n",
        "",
        (CROSSING,),
    ),
    # -- a restored database -------------------------------------------------------------------------------------------
    Mutant(
        "epoch: a lower number without a row is a lost job",
        STATEMENTS,
        "\n       OR EXISTS (SELECT FROM {s}.epoch e WHERE e.first_seq > %(seq)s) AS lost",
        " AS lost",
        RESTORED,
    ),
    Mutant(
        "epoch: numbers that no lost state can have given",
        STATEMENTS,
        "SELECT greatest(q.last_value + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint), (",
        "SELECT q.last_value + 1, (",
        RESTORED,
    ),
    Mutant(
        "restored: a cancel that is asked for is no reason to hold",
        STATEMENTS,
        "AND NOT j.held AND j.cancel_requested_at IS NULL\n",
        "AND NOT j.held\n",
        RESTORED,
    ),
    Mutant(
        "restored: jobs of before the epoch alone",
        STATEMENTS,
        "AND j.seq < %(epoch)s AND j.task",
        "AND j.task",
        RESTORED,
    ),
    Mutant(
        "restored: tasks that can have done nothing go on",
        STATEMENTS,
        "AND j.seq < %(epoch)s AND j.task <> ALL (%(spared)s::text[])\n",
        "AND j.seq < %(epoch)s\n",
        RESTORED,
    ),
    Mutant(
        "restored: what has not come due can have done nothing",
        STATEMENTS,
        "       AND coalesce(j.run_after <= clock_timestamp(), true)\n       AND NOT EXISTS",
        "       AND NOT EXISTS",
        RESTORED,
    ),
    Mutant(
        "restored: a whole body's question is for its lookup",
        STATEMENTS,
        "WHERE o.job_id = j.id AND o.whole_body AND o.status IN ('intent_recorded', 'unknown'))\n     LIMIT",
        "WHERE o.job_id = j.id AND o.whole_body AND o.status IN ('refused'))\n     LIMIT",
        RESTORED,
    ),
    Mutant(
        "republish all: each message once",
        STATEMENTS,
        "AND j.published_at < %(at)s::timestamptz\n     ORDER BY j.published_at LIMIT",
        "\n     ORDER BY j.published_at LIMIT",
        RESTORED,
    ),
)


def text_of(one: Mutant, root: Path = ROOT) -> str:
    """The file of a mutant, as it is.

    Args:
        one: the mutant.
        root: the checkout.
    """
    return (root / PACKAGE / one.path).read_text()


def mutate(one: Mutant, root: Path) -> None:
    """Take a guard away in a checkout.

    Args:
        one: the mutant.
        root: the checkout.

    Raises:
        ValueError: the guard's text is not there as often as it should be.
    """
    text = text_of(one, root)
    if text.count(one.old) != one.times:
        raise ValueError(f"{one.guard}: its text occurs {text.count(one.old)} times in {one.path}, not {one.times}")
    (root / PACKAGE / one.path).write_text(text.replace(one.old, one.new))


def try_one(one: Mutant, root: Path, environment: dict[str, str]) -> str:
    """Run the tests of a mutant.

    Args:
        one: the mutant.
        root: a checkout in which its guard is gone.
        environment: of the tests.

    Returns:
        The test that failed; empty if all passed.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *one.tests]
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS} s"
    if done.returncode == 0:
        return ""
    told = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (told or [f"pytest ended with {done.returncode}"])[0].split(" - ")[0]


def main(arguments: Sequence[str]) -> int:
    """Run what the command line asks for.

    Args:
        arguments: without the program's name.

    Returns:
        The exit status: 0 only if some test failed for each mutant.
    """
    parser = argparse.ArgumentParser(prog="tests/mutants.py")
    parser.add_argument("words", nargs="*", help="only guards with one of these words in their name")
    parser.add_argument("--list", action="store_true", help="tell the guards, run nothing")
    options = parser.parse_args(arguments)
    chosen = [one for one in MUTANTS if not options.words or any(word in one.guard for word in options.words)]
    if options.list:
        for one in chosen:
            print(f"{one.guard:56} {one.path}")
        return 0
    if not chosen:
        parser.error("there is no such guard; see --list")
    sys.path.insert(0, str(ROOT))
    from celery_safe_effects.testing import EmbeddedPostgres

    survivors = []
    with EmbeddedPostgres(settings={"max_connections": 300}) as server, tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "SAFE_EFFECTS_TEST_DATABASE_URL": server.url("postgres")}
        for number, one in enumerate(chosen):
            root = Path(folder) / str(number)
            shutil.copytree(ROOT, root, ignore=IGNORED)
            mutate(one, root)
            began = time.monotonic()
            failed = try_one(one, root, {**environment, "PYTHONPATH": str(root)})
            shutil.rmtree(root)
            print(f"{one.guard:56} {failed or 'SURVIVED'} ({time.monotonic() - began:.0f} s)", flush=True)
            if not failed:
                survivors.append(one.guard)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} guards are missed by a test when they are gone")
    return 1 if survivors else 0


if __name__ == "__main__":
    if not any(word in sys.argv for word in ("--list", "-h", "--help")) and "SAFE_EFFECTS_MUTANTS" not in os.environ:
        sys.path.insert(0, str(ROOT / "example_project"))
        import _bootstrap  # type: ignore[import-not-found]

        os.environ["SAFE_EFFECTS_MUTANTS"] = "1"
        _bootstrap.run("tests.mutants", sys.argv[1:])
    sys.exit(main(sys.argv[1:]))
