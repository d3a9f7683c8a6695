"""What the pages show, read from the database; nothing here knows of a web server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

from ...doctor import health
from ...engine.metrics import PREFIX, counted_to
from ...states import TERMINAL, JobStatus, OperationStatus
from ...words import age, since

if TYPE_CHECKING:
    from ...app import SafeEffects
    from ...doctor.finding import Finding
    from ...engine.metrics import Metric
    from ...values import JobRow, OperationRow, TransitionRow

LISTED: Final = 50
"""Rows of a table, at most."""
LOGGED: Final = 200
"""Transitions of a time line, at most: the last ones."""


@dataclass(frozen=True)
class Tile:
    """One figure at a glance.

    Attributes:
        name: what it counts.
        value: the figure, in words.
        note: what else belongs to it.
        bad: whether it asks for attention.
        status: the jobs' status that it counts; a link to their list.
    """

    name: str
    value: str
    note: str = ""
    bad: bool = False
    status: str | None = None


@dataclass(frozen=True)
class Pressure:
    """The first page.

    Attributes:
        problems, warnings: what is wrong, as ``safe-effects status`` tells it.
        tiles: the figures.
        queues: name, jobs, age of the oldest in words.
        limits: scope, limit, value, what stands against it, whether it is reached.
        unknown: operations whose outcome is unknown, the oldest first.
        parked: parked jobs without an open question of their own.
        more: whether there are more unknown operations than are shown.
        at: the database's time.
    """

    problems: list[Finding]
    warnings: list[Finding]
    tiles: list[Tile]
    queues: list[tuple[str, int, str]]
    limits: list[tuple[str, str, str, str, bool]]
    unknown: list[OperationRow]
    parked: list[JobRow]
    more: bool
    at: datetime


@dataclass(frozen=True)
class Story:
    """One job's page.

    Attributes:
        job: its row.
        operations: its operations.
        log: its last transitions.
        dropped: how many earlier ones are not shown.
        open: its operations that wait for a verdict.
        may_cancel, may_retry: what its state allows.
    """

    job: JobRow
    operations: list[OperationRow]
    log: list[TransitionRow]
    dropped: int
    open: list[OperationRow]
    may_cancel: bool
    may_retry: bool


def pressure(safe: SafeEffects) -> Pressure:
    """Read the first page.

    Arguments:
        safe: the app's SafeEffects.

    Raises:
        StoreUnavailable, SchemaMismatch: the database cannot be asked.
    """
    found = safe.overview()
    problems, warnings = health.judge(found, safe.config)
    metrics = {metric.name.removeprefix(PREFIX): metric for metric in safe.metrics()}
    unknown = safe.operations(status=OperationStatus.UNKNOWN, limit=LISTED + 1)
    asked = {operation.job_id for operation in unknown}
    parked = [job for job in safe.jobs(status=JobStatus.UNKNOWN, limit=LISTED) if job.id not in asked]
    if len(unknown) > LISTED:
        parked = []  # they may have questions of which none is listed
    # Not safe.limits(): a page counts no further than a scrape does.
    in_use = {(s.labels["scope"], s.labels["limit"]): s.value for s in metrics["limit_in_use"].samples}
    oldest = _oldest(metrics["queue_oldest_age_seconds"])
    queues = [
        (sample.labels["queue"], int(sample.value), age(oldest.get(sample.labels["queue"])))
        for sample in sorted(metrics["queued_jobs"].samples, key=lambda one: -one.value)
    ]
    return Pressure(
        problems,
        warnings,
        _tiles(found),
        queues[:LISTED],
        [
            (scope, limit, f"{value:g}", "" if now is None else f"{now:g}", now is not None and now >= value)
            for scope, limit, value, _ in safe.admission.in_force()
            for now in (in_use.get((scope, limit)),)
        ],
        unknown[:LISTED],
        parked,
        len(unknown) > LISTED,
        found["at"],
    )


def _oldest(metric: Metric) -> dict[str, float]:
    found: dict[str, float] = {}
    for sample in metric.samples:
        queue = sample.labels["queue"]
        found[queue] = max(found.get(queue, 0.0), sample.value)
    return found


def _tiles(found: Mapping[str, Any]) -> list[Tile]:
    jobs = found["jobs"]

    def counted(name: str) -> str:
        number, most = jobs.get(name, 0), counted_to(name)
        return f"{number:,}" if number <= most else f"{most:,}+"

    queued, unknown = since(found, "oldest_queued_at"), since(found, "oldest_unknown_at")
    swept, asked = since(found, "sweep_finished_at"), since(found, "reconcile_finished_at")
    return [
        Tile("queued", counted("queued"), f"oldest {age(queued)}" if queued is not None else "", status="queued"),
        Tile("running", counted("running"), status="running"),
        Tile(
            "unknown",
            counted("unknown"),
            f"oldest {age(unknown)}" if unknown is not None else "",
            bad=bool(jobs.get("unknown")),
            status="unknown",
        ),
        Tile("failed", counted("failed"), status="failed"),
        Tile("cancelled", counted("cancelled"), status="cancelled"),
        Tile("succeeded", counted("succeeded"), status="succeeded"),
        Tile("double effects", str(found["double_effects"]), bad=bool(found["double_effects"])),
        Tile("last sweep", "never" if swept is None else f"{age(swept)} ago", found["sweep_by"] or ""),
        Tile("last reconcile", "never" if asked is None else f"{age(asked)} ago", found["reconcile_by"] or ""),
    ]


def story(safe: SafeEffects, job_id: str) -> Story:
    """Read one job's page.

    Arguments:
        safe: the app's SafeEffects.
        job_id: the job.

    Raises:
        NotFound: there is none.
        StoreUnavailable, SchemaMismatch: the database cannot be asked.
    """
    job = safe.job(job_id)
    operations = safe.operations(job_id=job_id, limit=LISTED)
    log = safe.transitions(job_id)
    questions = [one for one in operations if one.status == OperationStatus.UNKNOWN]
    ended = job.status in {status.value for status in TERMINAL}
    return Story(
        job,
        operations,
        log[-LOGGED:],
        max(0, len(log) - LOGGED),
        questions,
        may_cancel=not ended and job.cancel_requested_at is None,
        may_retry=job.status in (JobStatus.FAILED, JobStatus.CANCELLED)
        or (job.status == JobStatus.UNKNOWN and not questions),
    )


def ago(at: datetime | None) -> str:
    """How long ago a time was, in words; ``-`` for none."""
    return "-" if at is None else age((datetime.now(timezone.utc) - at).total_seconds())


def clock(at: datetime) -> str:
    """A time in UTC, to the millisecond."""
    at = at.astimezone(timezone.utc)
    return f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03d} UTC"


def states() -> list[str]:
    """The statuses by which jobs may be listed."""
    return [status.value for status in JobStatus]
