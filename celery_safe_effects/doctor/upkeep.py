"""Who keeps things going: workers, beat, sweep, leases, and how long things are kept."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any, Final

from ..effects import all_effects, registered
from ..glue import periodic
from ..words import age
from . import health
from .finding import SAMPLE, Finding, Patient, names, problem, warning

NEAR: Final = 0.7
"""Of a lease: a pause this long will be too long one day."""


def schema(p: Patient) -> Iterator[Finding]:
    """Missing, older or newer: raises, with the words that mend it."""
    p.safe.store.check_schema()
    yield from ()


def maintenance(p: Patient) -> Iterator[Finding]:
    """A sweep and a reconciliation that run, and no double effect: what ``status`` says, too."""
    state = p.state
    found = {
        "at": state.at,
        "jobs": {"queued": state.queued, "running": state.running, "unknown": state.unknown},
        "operations": {"unknown": state.unknown},
        "sweep_finished_at": state.sweep_finished_at,
        "reconcile_started_at": state.reconcile_started_at,
        "double_effects": state.doubled,
        "double_effect_keys": state.doubled_keys,
    }
    for findings in health.judge(found, p.config):
        yield from findings


def beat_entries(p: Patient) -> Iterator[Finding]:
    """Our entries are beside the user's, unless the schedule was replaced later."""
    p.app.finalize(auto=True)
    planned = {entry.get("task") for entry in p.conf.beat_schedule.values()}
    missing = {periodic.SWEEP, periodic.RECONCILE, periodic.PRUNE} - planned
    if missing:
        yield warning(
            "beat_entries",
            f"the beat schedule has no entry for {names(missing)}: something replaced it after SafeEffects added its "
            "own",
            "add entries (conf.beat_schedule[...] = ...) instead of assigning a new schedule; until then a worker "
            "stands "
            "in for sweep and reconciliation, three intervals late, and nobody prunes",
        )


def beat_absent(p: Patient) -> Iterator[Finding]:
    """Workers stand in for a dead beat, later than it would."""
    if p.workers and (p.state.sweep_by or "").endswith("/stand-in"):
        yield warning(
            "beat_absent",
            f"the last sweep was a worker's, standing in ({p.state.sweep_by}): beat does not run, or nobody consumes "
            "the "
            f"queue {p.config.queue!r}",
            "run `celery beat`, one for the app",
        )


def queue_unconsumed(p: Patient) -> Iterator[Finding]:
    """Sweep and reconciliation are tasks on a queue of their own."""
    if p.workers and not any(p.config.queue in row.queues for row in p.workers):
        yield warning(
            "queue_unconsumed",
            f"no worker consumes the queue {p.config.queue!r}, where beat sends the sweep and the reconciliation",
            "leave safe_effects_consume on for some workers, or start one with -Q " + p.config.queue,
        )


def lease_too_short(p: Patient) -> Iterator[Finding]:
    """A process that stands still for longer than its lease loses its job to another."""
    shortest = min([p.config.lease_ttl, *(float(t.lease_ttl) for t in p.safe_tasks if t.lease_ttl)])
    stood = p.pause + min(p.config.heartbeat_interval, shortest / 3)
    if p.pause and stood >= NEAR * shortest:
        make = problem if stood >= shortest else warning
        yield make(
            "lease_too_short",
            f"a worker's process stood still, or had no database, so that {stood:.0f} s lay between two renewals, and "
            f"the shortest lease is {shortest:g} s",
            f"raise safe_effects_lease_ttl (or the task option lease_ttl) above {2 * stood:.0f} s, or find what stops "
            "the process: too little CPU, a C call that holds the interpreter's lock, a slow database",
        )


def versions(p: Patient) -> Iterator[Finding]:
    """Workers of another version of the library."""
    ours = importlib.metadata.version("celery-safe-effects")
    others = {row.version for row in p.workers} - {ours}
    if others:
        yield warning(
            "worker_version",
            f"workers run with celery-safe-effects {names(others)}, and this is {ours}",
            "finish the deployment; where producers send something new, workers go first",
        )


def retention(p: Patient) -> Iterator[Finding]:
    """Rows whose keys a provider still retains are kept, whatever the setting says."""
    longest = max((e.options.idempotent_for or 0.0 for e in all_effects()), default=0.0)
    shortest = min(vars(p.config.retention).values())
    if longest > shortest:
        yield warning(
            "retention_short",
            f"safe_effects_retention is {age(shortest)}, shorter than the {age(longest)} for which an effect's key is "
            "retained (idempotent_for): such jobs stay that long all the same",
            "plan for the longer time, or raise safe_effects_retention",
        )
    if p.config.tombstone_retention < longest:
        yield warning(
            "tombstones_short",
            f"safe_effects_tombstone_retention is {age(p.config.tombstone_retention)}, shorter than an effect's "
            f"idempotent_for ({age(longest)})",
            "raise safe_effects_tombstone_retention: an idempotency key that is given again after it begins a new job",
        )


def result_expires(p: Patient) -> Iterator[Finding]:
    """The backend forgets UNKNOWN while the job still is."""
    expires: Any = p.conf.result_expires
    seconds = expires.total_seconds() if hasattr(expires, "total_seconds") else expires
    parked = p.state.oldest_parked
    if seconds and parked and parked > seconds:
        yield warning(
            "result_expires",
            f"a job has been open for {age(parked)}, and results expire after {age(seconds)}: Celery reads PENDING for "
            "it, though its row says unknown",
            "resolve it (`safe-effects jobs --status unknown`), or raise result_expires",
        )


def effects_not_imported(p: Patient) -> Iterator[Finding]:
    """An effect that is not imported where the reconciliation runs cannot be asked."""
    missing = {
        row.effect
        for row in p.safe.store.rows("DOCTOR_EFFECTS", most=SAMPLE)
        if registered(row.effect) is None and p.safe.find_effect(row.effect, row.task) is None
    }
    if missing:
        yield problem(
            "effect_not_imported",
            f"operations of {names(missing)} are unknown, and no module of this app defines such an effect: nobody can "
            "ask about them",
            "import it in the workers under that name (renaming an effect orphans its operations), or resolve them by "
            "hand",
        )


CHECKS: Final = (
    maintenance,
    beat_entries,
    beat_absent,
    queue_unconsumed,
    lease_too_short,
    versions,
    retention,
    result_expires,
    effects_not_imported,
)
