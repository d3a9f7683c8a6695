"""Who may do what: the rights of a producer's, a worker's and an observer's database role, as data.

A producer accepts and publishes. An observer looks. A worker does everything else besides, but what triggers and
functions in the owner's name do for all of them: the log, the counters, the limits' locks. No kind may change the log,
the schema, or what a job was accepted as.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from psycopg import sql as pg

from ..address import quote_schema
from ..errors import ConfigurationError
from .statements import ROLES

logger = logging.getLogger(__name__)

PRODUCER: Final = "producer"
WORKER: Final = "worker"
OBSERVER: Final = "observer"
KINDS: Final = (PRODUCER, WORKER, OBSERVER)

Grants = Mapping[str, str | Iterable[str]]
"""Roles by kind."""

ALL: Final = "*"
"""Every column, those of later migrations too."""


class Right(NamedTuple):
    """A privilege on a relation (of some columns, or of all), on a function, or on the schema.

    Attributes:
        privilege: as in GRANT.
        on: ``schema``, ``relation`` or ``function``.
        name: the relation's or the function's.
        column: one of its columns; ``ALL``: the whole.
    """

    privilege: str
    on: str
    name: str
    column: str


_Tables = dict[str, dict[str, str]]

_OF_EVERYBODY: Final[_Tables] = {
    "schema_version": {"SELECT": ALL},
    "known_task": {"SELECT": ALL},
    "transition": {"SELECT": ALL},
    "limits": {"SELECT": ALL},
}

_OF_PRODUCERS: Final[_Tables] = {
    "job": {
        # Not what became of a job: no result, no error, no lease.
        "SELECT": """id seq task status tenant queue express idempotency_key args_digest generation retries
            run_after settle envelope next_publish_at published_at publishes settled_at""",
        "INSERT": """id task tenant pool queue express priority idempotency_key args_digest parent_id retries
            max_attempts attempts_fixed eta run_after expires_at max_age gives_up_at envelope settle created_by stamps
            next_publish_at published_at publishes""",
        "UPDATE": "next_publish_at published_at publishes settled_at",
    },
    "tombstone": {"SELECT": ALL},
    "reservation": {"SELECT": ALL, "INSERT": "job_id tenant lapses_at", "UPDATE": "lapses_at", "DELETE": ALL},
    "express": {"SELECT": ALL},
    "outbox": {
        "SELECT": ALL,
        "INSERT": "id task envelope next_publish_at",
        "UPDATE": "next_publish_at publishes",
        "DELETE": ALL,
    },
    "chord": {"SELECT": "id", "INSERT": "id envelope next_check_at"},
    "chord_member": {"SELECT": "id", "INSERT": "chord_id id before"},
    "tally": {"INSERT": "name label value"},
}

_OF_OBSERVERS: Final[_Tables] = {
    "jobs": {"SELECT": ALL},
    "operations": {"SELECT": ALL},
    "transitions": {"SELECT": ALL},
    # For what the views cannot answer by an index. Never the envelope, which holds redacted arguments.
    "job": {
        "SELECT": """id seq task status reason tenant pool queue created_at run_after started_at finished_at leased_at
            lease_until lease_owner next_publish_at waiting_for open_ops"""
    },
    "operation": {
        "SELECT": "key job_id effect status first_intent_at intent_at double_at next_reconcile_at",
    },
    "maintenance": {"SELECT": ALL},
    "worker": {"SELECT": ALL},
    "folded": {"SELECT": ALL},
    "tally": {"SELECT": ALL},
    "epoch": {"SELECT": ALL},
    "job_seq_seq": {"SELECT": ALL},
}

_OF_WORKERS: Final[_Tables] = {
    "job": {
        "SELECT": ALL,
        "INSERT": "status reason held",  # a job whose row a restored database has lost
        "UPDATE": """task status reason queue express priority args_digest generation retries attempts max_attempts
            tried fence lease_token lease_owner lease_until cancel_requested_at cancel_reason pending_status
            pending_reason held passed new_keys waiting_for run_after expires_at gives_up_at outcome_ref result error
            envelope settle next_publish_at published_at publishes started_at settled_at telling_until actor""",
        "DELETE": ALL,
    },
    "operation": {
        "SELECT": ALL,
        "INSERT": """key job_id step ordinal effect status keyed repeatable whole_body fence nonce process trace args
            args_digest deadline lag deadline_at absent_from idempotent_for has_lookup if_unknown detached
            deadline_kills deadline_is_proof recorded_by""",
        "UPDATE": """job_id ordinal status attempt fence nonce process trace args args_digest provider_ref result error
            intent_at deadline lag deadline_at absent_from has_lookup if_unknown detached deadline_kills
            deadline_is_proof gone_at absent_at policy_at in_doubt resolved_at resolved_by evidence late_outcomes
            double_at reconcile_attempts next_reconcile_at asking_until actor reason""",
        "DELETE": ALL,
    },
    "chord": {"SELECT": ALL, "UPDATE": "next_check_at checks", "DELETE": ALL},
    "chord_member": {"SELECT": ALL, "INSERT": "added", "UPDATE": "outcome", "DELETE": ALL},
    # The UPDATE of tombstone and tally is what FOR UPDATE asks for.
    "tombstone": {
        "INSERT": "id tenant idempotency_key task args_digest status",
        "UPDATE": "pruned_at",
        "DELETE": ALL,
    },
    "tally": {"SELECT": ALL, "UPDATE": "value", "DELETE": ALL},
    "folded": {"SELECT": ALL, "INSERT": "name label value", "UPDATE": "value"},
    "maintenance": {"UPDATE": "last_started_at last_finished_at last_by runs"},
    "look": {"SELECT": ALL, "INSERT": "queue next_at", "UPDATE": "next_at"},
    "lane": {
        "SELECT": ALL,
        "INSERT": "queue priority head",
        "UPDATE": "head head_at passed moved_at probed_at probes",
    },
    "express": {"INSERT": "queue until", "UPDATE": "until"},
    "held": {"SELECT": ALL, "INSERT": ALL, "UPDATE": "until jobs stuck", "DELETE": ALL},
    "worker": {
        "INSERT": "node pid version pool concurrency connections queues",
        "UPDATE": """pid version pool concurrency connections queues started_at seen_at stopped_at longest_pause
            paused_at""",
        "DELETE": ALL,
    },
    "limits": {"INSERT": "scope value updated_by", "UPDATE": "value updated_at updated_by", "DELETE": ALL},
    "known_task": {"INSERT": "name", "DELETE": ALL},
}

TABLES: Final[dict[str, tuple[_Tables, ...]]] = {
    PRODUCER: (_OF_EVERYBODY, _OF_PRODUCERS),
    OBSERVER: (_OF_EVERYBODY, _OF_OBSERVERS),
    WORKER: (_OF_EVERYBODY, _OF_PRODUCERS, _OF_OBSERVERS, _OF_WORKERS),
}

FUNCTIONS: Final = {
    PRODUCER: ("limits_for", "queue_room", "express_of", "goes_express", "has_backlog"),
    OBSERVER: ("reason_class",),
    WORKER: (
        "limits_for", "queue_room", "express_of", "goes_express", "has_backlog", "reason_class", "leaves_to",
        "pending_end", "retained", "sendable", "wake_free", "node_of", "prune_log",
    ),
}  # fmt: skip
"""Triggers' functions run in the owner's name, or need nothing; nobody is granted them."""

# -- whose statement is whose ----------------------------------------------------------------------------------------

_BY_KIND: Final = {
    (PRODUCER, WORKER, OBSERVER): "SCHEMA_VERSION IDENTITY KNOWN_TASK LIMITS METRICS_BEGIN DOCTOR_DATABASE DOCTOR_TASKS"
    " DOCTOR_RIGHTS WRITTEN_BY METRICS_DEPTHS VIEW_JOBS_BEYOND",
    (): "ROLES NEW_EPOCH",  # the owner's
    (PRODUCER, WORKER): "TAKE_KEYS ACCEPT ACCEPT_MANY RESERVE ACCEPT_RESERVED UNRESERVE QUEUED HOLDERS PUBLISH_SOON"
    " REMIND UNSETTLE DUE POST POSTED POST_DUE COUNT STORED REAP_RESERVATIONS CHORD CHORD_OPEN",
    (
        OBSERVER,
        WORKER,
    ): "VIEW_JOB VIEW_JOBS VIEW_LIVE VIEW_OPERATION VIEW_OPERATIONS VIEW_OPERATIONS_OF_JOB"
    " VIEW_TRANSITIONS VIEW_OVERVIEW PRUNE_LEFT USE WORKERS_SEEN"
    " METRICS_QUEUES METRICS_USE METRICS_LIVE METRICS_UNKNOWN METRICS_PARKED METRICS_WAITING METRICS_COUNTERS"
    " METRICS_MAINTENANCE METRICS_WORKERS METRICS_REST DOCTOR_STATE DOCTOR_LONGEST DOCTOR_EFFECTS"
    " EPOCH",
    (WORKER,): "WAKE_FREE PROMOTE EXPRESS WOKEN SET_LIMITS CLAIM CLAIM_BODY CLAIMED JOB MISSING INSERT_MISSING RECORDED"
    " INTENT_OF OPERATION INTENT INTENT_REPEATABLE OUTCOME OUTCOME_ASYNC LATE_OUTCOME LEAVE BODY_PENDING WENT_ON"
    " MORE_ATTEMPTS CHECKPOINT RENEW TELL SETTLE SWEEP_LEASES LOST READING READ UNREAD SWEEP_DYING LOOKS LOOK ASTRAY"
    " HELD RECONCILE_DUE VERDICT ABSENT POLICY ASK_AT RESUME SENDERS_HERE GONE CANCEL REVOKE REVOKE_STAMPED RETRY PRUNE"
    " PRUNE_LOG PRUNE_TOMBSTONES MAINTENANCE_BEGIN MAINTENANCE_END WORKER_SEEN STAND_IN WATCH FOLD WORKER_STOPPED"
    " WORKER_PAUSED LEARN_TASKS UNLEARN_TASKS PARK_RESTORED REPUBLISH_LANES REPUBLISH"
    " CHORD_ADD CHORD_HAS CHORD_OUTCOME CHORD_DONE CHORDS_DUE CHORD_MEMBERS CHORD_GIVEN_UP PRUNE_CHORDS",
}
STATEMENTS: Final[dict[str, tuple[str, ...]]] = {
    name: kinds for kinds, names in _BY_KIND.items() for name in names.split()
}
"""Which kinds of roles may run each of the protocol's statements; no other kind can."""


def needed(statement: str, role: str) -> str:
    """What a role needs for a statement, in words, with the command that grants it."""
    kinds = STATEMENTS[statement]
    if not kinds:
        return f"only the schema's owner may do this, and the role {role!r} is not: do it with the owner's URL"
    return (
        f"this takes the rights of {' or '.join(kinds)}, which the role {role!r} does not have; as the schema's owner, "
        f"run `celery -A yourproject safe-effects upgrade --grant {kinds[0]}={role}`"
    )


def rights(kind: str) -> Iterator[Right]:
    """Every right that a kind of role needs, a column at a time."""
    yield Right("USAGE", "schema", "", ALL)
    for name, privileges in _merged(kind).items():
        for privilege, columns in privileges.items():
            for column in [ALL] if ALL in columns else sorted(columns):
                yield Right(privilege, "relation", name, column)
    for name in FUNCTIONS[kind]:
        yield Right("EXECUTE", "function", name, ALL)


def _merged(kind: str) -> dict[str, dict[str, set[str]]]:
    found: dict[str, dict[str, set[str]]] = {}
    for tables in TABLES[kind]:
        for name, privileges in tables.items():
            for privilege, columns in privileges.items():
                found.setdefault(name, {}).setdefault(privilege, set()).update(columns.split())
    return found


# -- granting --------------------------------------------------------------------------------------------------------


def checked(grants: Grants) -> list[tuple[str, str]]:
    """Pairs of role and kind.

    Raises:
        ConfigurationError: for a kind that there is not.
    """
    pairs = []
    for kind, roles in grants.items():
        if kind not in KINDS:
            raise ConfigurationError(f"there is no kind of role {kind!r}; it is one of {', '.join(KINDS)}")
        pairs += [(role, kind) for role in ([roles] if isinstance(roles, str) else roles)]
    return pairs


def close(cursor: Any, schema: str) -> None:
    """What migrations have made is nobody's but its owner's, whatever the database's defaults say."""
    for what in ("TABLES", "SEQUENCES", "ROUTINES"):
        _run(cursor, "REVOKE ALL ON ALL {what} IN SCHEMA {schema} FROM PUBLIC", schema, what=pg.SQL(what))


def apply(cursor: Any, schema: str, given: list[tuple[str, str]], revoked: Collection[str]) -> None:
    """Take away, grant, and grant again what was granted before, so that it fits the schema as it is now.

    Arguments:
        cursor: in the transaction of the upgrade, as the schema's owner.
        schema: its name.
        given: roles and kinds to add.
        revoked: roles that lose everything that they have in the schema.

    Raises:
        ConfigurationError: for a role that does not exist or owns the schema's tables; nothing was changed.
    """
    for role in {role for role, _ in given} | set(revoked):
        _check(cursor, schema, role, must_exist=role not in revoked)
    for role in revoked:
        _run(cursor, "DELETE FROM {schema}.role_grant WHERE role = %s", schema, role)
        if _exists(cursor, role):
            _take_all(cursor, schema, role)
    for role, kind in given:
        insert = "INSERT INTO {schema}.role_grant (role, kind) VALUES (%s, %s) ON CONFLICT DO NOTHING"
        _run(cursor, insert, schema, role, kind)
    cursor.execute(ROLES.replace("{s}", quote_schema(schema)))
    for role, kinds in cursor.fetchall():
        if not _exists(cursor, role):
            logger.warning("role %r was granted what a %s needs, and does not exist here", role, " and a ".join(kinds))
            continue
        _take_all(cursor, schema, role)
        for kind in kinds:
            _grant(cursor, schema, role, kind)


def _grant(cursor: Any, schema: str, role: str, kind: str) -> None:
    to = pg.Identifier(role)
    _run(cursor, "GRANT USAGE ON SCHEMA {schema} TO {role}", schema, role=to)
    for name, privileges in _merged(kind).items():
        parts = []
        for privilege, columns in privileges.items():
            some = pg.SQL("") if ALL in columns else pg.SQL(" ({})").format(_names(sorted(columns)))
            parts.append(pg.SQL(privilege) + some)
        _run(cursor, "GRANT {what} ON {schema}.{name} TO {role}", schema,
             what=pg.SQL(", ").join(parts), name=pg.Identifier(name), role=to)  # fmt: skip
    for name in FUNCTIONS[kind]:
        _run(cursor, "GRANT EXECUTE ON FUNCTION {schema}.{name} TO {role}", schema, name=pg.Identifier(name), role=to)


def _names(columns: list[str]) -> pg.Composed:
    return pg.SQL(", ").join(map(pg.Identifier, columns))


def _take_all(cursor: Any, schema: str, role: str) -> None:
    for what in ("TABLES", "SEQUENCES", "ROUTINES"):
        revoke = "REVOKE ALL ON ALL {what} IN SCHEMA {schema} FROM {role}"
        _run(cursor, revoke, schema, what=pg.SQL(what), role=pg.Identifier(role))
    _run(cursor, "REVOKE ALL ON SCHEMA {schema} FROM {role}", schema, role=pg.Identifier(role))


def _check(cursor: Any, schema: str, role: str, *, must_exist: bool) -> None:
    # PostgreSQL takes these two for what they mean, quoted or not.
    if must_exist and (role in ("public", "none") or not _exists(cursor, role)):
        raise ConfigurationError(
            f"there is no role {role!r} to grant anything to; make it first (CREATE ROLE … LOGIN); nothing was changed"
        )
    owns = "SELECT 1 FROM pg_class WHERE relnamespace = %s::regnamespace AND relowner::regrole = %s::regrole LIMIT 1"
    if _exists(cursor, role):
        cursor.execute(owns, (pg.Identifier(schema).as_string(cursor), pg.Identifier(role).as_string(cursor)))
        if cursor.fetchone() is not None:
            raise ConfigurationError(
                f"role {role!r} owns the schema {schema!r}, and may do everything in it already: that is not granted "
                "and not taken away; make a role for each kind of process; nothing was changed"
            )


def _exists(cursor: Any, role: str) -> bool:
    cursor.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (role,))
    return cursor.fetchone() is not None


def _run(cursor: Any, query: str, schema: str, *params: str, **names: pg.Composable) -> None:
    cursor.execute(pg.SQL(query).format(schema=pg.Identifier(schema), **names), params or None)
