"""PostgreSQL: does it keep what it was told, does it answer as the protocol needs it, are there connections enough?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

import psycopg

from ..store.grants import Right
from .finding import Finding, Patient, names, problem, warning

SLOW_CLOCK: Final = 5.0
WRONG_CLOCK: Final = 60.0
OLDEST_SERVER: Final = 140000


def fsync(p: Patient) -> Iterator[Finding]:
    """A commit that the disk never had is lost with the machine, and with it an intent whose effect happened."""
    if p.database.fsync != "on":
        yield problem(
            "fsync_off",
            "the database has fsync = off: a crash of its machine loses jobs and intents that were committed, and "
            "their "
            "effects happen again",
            "set fsync = on in postgresql.conf",
            refuses=True,
        )


def synchronous_commit(p: Patient) -> Iterator[Finding]:
    """The protocol says itself which commits may be lost; all others must not."""
    if p.database.synchronous_commit == "off":
        yield problem(
            "synchronous_commit_off",
            "this role's or database's synchronous_commit is off: a crash loses the last intents, and their effects "
            "happen again",
            "ALTER ROLE ... SET synchronous_commit = 'on' (or the same for the database); the library lets single "
            "commits go unwaited where that is safe",
            refuses=True,
        )
    elif p.database.standby_names and p.database.synchronous_commit == "local":
        yield warning(
            "synchronous_commit_local",
            "synchronous standbys are set up, and synchronous_commit = local does not wait for them: a failover loses "
            "the last commits",
            "set synchronous_commit = on for this role",
        )


def full_page_writes(p: Patient) -> Iterator[Finding]:
    """Safe only where the file system never writes half a page."""
    if p.database.full_page_writes != "on":
        yield warning(
            "full_page_writes_off",
            "the database has full_page_writes = off: after a crash a half-written page may be beyond recovery",
            "set full_page_writes = on, unless the file system writes whole pages or none (ZFS)",
        )


def isolation(p: Patient) -> Iterator[Finding]:
    """Counting under a lock needs a snapshot of after the lock was taken."""
    if p.database.isolation != "read committed":
        yield problem(
            "isolation_level",
            f"the default isolation level is {p.database.isolation!r}: limits are counted on old snapshots and "
            "exceeded, "
            "and statements fail for each other",
            "ALTER ROLE ... SET default_transaction_isolation = 'read committed' for the role of the URL",
            refuses=True,
        )


def read_only(p: Patient) -> Iterator[Finding]:
    """A standby answers questions and takes nothing."""
    if p.database.read_only == "on":
        yield problem(
            "read_only",
            "the database takes no writes: it is a standby, or default_transaction_read_only is on",
            "let safe_effects_database_url name the primary (target_session_attrs=read-write)",
            refuses=True,
        )


def encoding(p: Patient) -> Iterator[Finding]:
    """Arguments are any text."""
    if p.database.encoding != "UTF8":
        yield problem(
            "encoding",
            f"the database's encoding is {p.database.encoding}: arguments with other characters are refused",
            "use a database with the encoding UTF8",
        )


def version(p: Patient) -> Iterator[Finding]:
    """What nobody tests."""
    if p.database.version < OLDEST_SERVER:
        yield warning(
            "old_postgresql",
            f"PostgreSQL {p.database.version // 10000} is older than any that this library is tested with",
            f"upgrade to PostgreSQL {OLDEST_SERVER // 10000} or newer",
        )


def autovacuum(p: Patient) -> Iterator[Finding]:
    """Rows are updated several times a job."""
    if p.database.autovacuum != "on":
        yield warning(
            "autovacuum_off",
            "autovacuum is off: the tables of jobs grow and every statement becomes slower",
            "set autovacuum = on",
        )


def clock(p: Patient) -> Iterator[Finding]:
    """Leases trust no worker's clock; times that producers compute (countdown, expires) do."""
    before = time.time()
    row = p.safe.store.rows("DOCTOR_DATABASE")[0]
    after = time.time()
    off = max(before - row.clock, row.clock - after, 0.0)
    if off > SLOW_CLOCK:
        make = problem if off > WRONG_CLOCK else warning
        yield make(
            "clock",
            f"this machine's clock and the database's differ by {off:.0f} s: countdown and expires of what is sent "
            "here "
            "are off by that",
            "synchronise both clocks (chrony, systemd-timesyncd)",
        )


def connections(p: Patient) -> Iterator[Finding]:
    """A worker that gets no connection loses its leases."""
    with p.safe.store.connections.connection() as conn:
        if conn.pooled:
            return  # the pooler's limits are its own
    needed = sum(row.connections for row in p.workers)
    room = p.database.connections - max(0, p.database.connected - p.database.ours)
    if needed > room:
        yield problem(
            "connections",
            f"the workers that are there need up to {needed} connections, and max_connections leaves {max(room, 0)}: "
            "under load some cannot renew their leases",
            "raise max_connections, lower the concurrency, or put a pooler in transaction mode between",
        )
    elif needed > 0.8 * room:
        yield warning(
            "connections_tight",
            f"the workers that are there need up to {needed} of the {room} connections that max_connections leaves",
            "raise max_connections before you add workers",
        )


def pooler(p: Patient) -> Iterator[Finding]:
    """Statement mode breaks what needs more than one statement; prepared statements need a pooler that knows them."""
    with p.safe.store.connections.connection() as conn:
        pooled = conn.pooled or conn.execute("SELECT pg_backend_pid()", prepare=False).fetchone() != (
            conn.info.backend_pid,
        )
    if pooled and p.config.prepare == "on":
        yield warning(
            "pooler_prepared",
            "safe_effects_prepare is 'on' behind a pooler in transaction mode: statements fail, unless it keeps "
            "track of "
            "prepared statements",
            "leave safe_effects_prepare at 'detected', or set max_prepared_statements of PgBouncer 1.21 or newer",
        )
    try:
        with p.safe.store.connections.connection() as conn, conn.transaction():
            conn.execute("SELECT 1", prepare=False)
    except psycopg.Error as exc:
        yield problem(
            "pooler_statement_mode",
            f"a transaction of two statements fails ({str(exc).strip().splitlines()[0]}): pruning and upgrades do not "
            "work behind a pooler in statement mode",
            "set the pooler's mode to transaction",
        )


def rights(p: Patient) -> Iterator[Finding]:
    """A role that may do what this process does: a worker's work, or looking."""
    lacking = p.safe.store.lacking()
    if any(not lacking[kind] for kind in p.kinds):
        return
    kind = min(p.kinds, key=lambda kind: len(lacking[kind]))
    with p.safe.store.connections.connection() as conn:
        role = conn.info.user
    has = " and ".join(found for found, missing in lacking.items() if not missing)
    yield problem(
        "permission_missing",
        f"the role {role!r} " + (f"has the rights of {has} and " if has else "") + f"lacks what {kind} needs "
        f"({names({_in_words(right) for right in lacking[kind]})})",
        f"as the schema's owner, run `celery -A yourproject safe-effects upgrade --grant {kind}={role}`",
        refuses=True,
    )


def _in_words(right: Right) -> str:
    if right.on == "schema":
        return f"{right.privilege} of the schema"
    return f"{right.privilege} {'of' if right.on == 'function' else 'on'} {right.name}"


CERTAIN: Final = (rights, fsync, synchronous_commit, isolation, read_only)
"""What may refuse a worker's start."""
CHECKS: Final = (*CERTAIN[1:], full_page_writes, encoding, version, autovacuum, clock, connections, pooler)
