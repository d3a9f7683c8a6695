"""Commands that only look: status, jobs, show, log, operations."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

import click

from ..engine.metrics import COUNTED, counted_to
from ..engine.metrics import ENDED as COUNTED_ENDED
from ..states import TERMINAL, JobStatus, OperationStatus
from ..words import age, count, moment, since
from . import output
from .command import Answer, Console, command, describe, text
from .output import Column

if TYPE_CHECKING:
    from ..app import SafeEffects
    from ..values import InFlight, JobRow, OperationRow, TransitionRow

POLL: Final = 0.5
"""Seconds between two looks of ``log --follow``."""
LAST: Final = 10
"""Transitions that ``show`` shows."""
WIDE: Final = 110
"""From this many columns on, the log shows where a transition came from."""

ENDED: Final = frozenset(s.value for s in TERMINAL)
JOB_STATUS: Final = click.Choice([s.value for s in JobStatus])
OPERATION_STATUS: Final = click.Choice([s.value for s in OperationStatus])
JOB_COLUMNS: Final = (
    Column("JOB", keep=True),
    Column("TASK", tail=True),
    Column("STATUS", keep=True),
    Column("AGE", keep=True),
    Column("RUNS", keep=True, spare=2),
    Column("TENANT", spare=1),
    Column("REASON/REF"),
)
LIVE_COLUMNS: Final = (
    Column("JOB", keep=True),
    Column("TASK", tail=True),
    Column("WORKER"),
    Column("FOR", keep=True),
    Column("RUNS", keep=True, spare=2),
    Column("TENANT", spare=1),
    Column("NOTE"),
)
OPERATION_COLUMNS: Final = (
    Column("KEY", keep=True),
    Column("EFFECT", tail=True),
    Column("STATUS", keep=True),
    Column("SENT", keep=True, spare=3),
    Column("ASKED", keep=True, spare=2),
    Column("AGE", keep=True, spare=1),
    Column("REF/ERROR"),
)
LIMIT: Final = click.IntRange(1, 100_000)


# -- status --------------------------------------------------------------------------------------------------------


@command()
def status(console: Console, safe: SafeEffects) -> Answer:
    """Tell how everything stands, and whether it is well.

    Unhealthy (exit status 1) when the database cannot be reached or has another version's schema, when nobody sweeps
    while jobs are not finished, and when an effect happened twice.
    """
    from ..doctor import health

    found, config = safe.overview(), safe.config
    problems, warnings = health.judge(found, config)
    jobs = {s.value: found["jobs"].get(s.value, 0) for s in JobStatus}
    operations = {s.value: found["operations"].get(s.value, 0) for s in OperationStatus}
    document = {
        "healthy": not problems,
        "problems": [{"code": p.code, "message": p.message} for p in problems],
        "warnings": [{"code": w.code, "message": w.message} for w in warnings],
        "at": found["at"],
        "schema": {"name": config.schema, "version": found["schema_version"]},
        "jobs": {name: min(n, counted_to(name)) for name, n in jobs.items()},
        "operations": {name: min(n, counted_to(name)) for name, n in operations.items()},
        "counted_to": {"open": COUNTED, "ended": COUNTED_ENDED},
        "oldest_queued_s": since(found, "oldest_queued_at"),
        "oldest_unknown_s": since(found, "oldest_unknown_at"),
        "sweep": _maintenance(found, "sweep"),
        "reconcile": _maintenance(found, "reconcile"),
        "double_effects": found["double_effects"],
        "double_effect_keys": found["double_effect_keys"],
    }
    lines = output.facts(
        [
            ("", "unhealthy" if problems else "healthy"),
            *(("problem", f"[{p.code}] {p.message}") for p in problems),
            *(("warning", f"[{w.code}] {w.message}") for w in warnings),
            ("schema", f"{config.schema}, version {found['schema_version']}"),
            ("jobs", _counts(jobs)),
            ("operations", _counts(operations)),
            ("oldest queued", _ago(found, "oldest_queued_at", "none")),
            ("oldest unknown", _ago(found, "oldest_unknown_at", "none")),
            ("last sweep", _ago(found, "sweep_finished_at", "never", found["sweep_by"])),
            ("last reconcile", _ago(found, "reconcile_finished_at", "never", found["reconcile_by"])),
            ("double effects", str(found["double_effects"])),
        ]
    )
    return Answer(document, [lines[0].strip(), *lines[1:]], ok=not problems)


def _counts(found: dict[str, int]) -> str:
    def number(name: str, n: int) -> str:
        most = counted_to(name)
        return f"{n}" if n <= most else f"{most:,} or more"

    return ", ".join(f"{number(name, n)} {name}" for name, n in found.items() if n) or "none"


def _maintenance(found: dict[str, Any], name: str) -> dict[str, Any]:
    return {
        "started_at": found[f"{name}_started_at"],
        "finished_at": found[f"{name}_finished_at"],
        "age_s": since(found, f"{name}_finished_at"),
        "by": found[f"{name}_by"],
        "runs": found[f"{name}_runs"] or 0,
    }


def _ago(found: dict[str, Any], name: str, never: str, by: str | None = None) -> str:
    seconds = since(found, name)
    if seconds is None:
        return never
    return f"{age(seconds)} ago" + (f", by {by}" if by else "")


# -- jobs ----------------------------------------------------------------------------------------------------------


def _follows(follow: bool, timeout: float | None, status: str | None = None, **_: Any) -> None:
    if timeout is not None and not follow:
        raise click.UsageError("--timeout goes with --follow")
    if status is not None and follow:
        raise click.UsageError("--follow shows what is in flight: it takes no --status")


@command(check=_follows)
@click.option("--status", type=JOB_STATUS, help="Only jobs that are this.")
@click.option("--tenant", type=text, help="Only jobs of this tenant.")
@click.option("--task", type=text, help="Only jobs of the task with this name.")
@click.option("--limit", type=LIMIT, default=50, show_default=True, help="At most so many.")
@click.option("--follow", "-f", is_flag=True, help="Show what is in flight, on which worker, for how long; go on so.")
@click.option("--timeout", type=click.FloatRange(min=0), help="With --follow: seconds after which to end.")
def jobs(
    console: Console,
    safe: SafeEffects,
    status: str | None,
    tenant: str | None,
    task: str | None,
    limit: int,
    follow: bool,
    timeout: float | None,
) -> Answer:
    """List jobs, the newest first.

    With --follow: what workers own now, the longest owned first. On a terminal the table is drawn anew; else each job
    that begins (+) or ends (-) is a line, with --json a document on a line of its own.
    """
    if follow:
        _watch(console, safe, tenant, task, limit, None if timeout is None else time.monotonic() + timeout)
        return Answer(streamed=True)
    found = safe.jobs(status=status, tenant=tenant, task=task, limit=limit + 1)
    found, more = found[:limit], len(found) > limit
    lines = output.table(
        JOB_COLUMNS,
        [
            (
                j.id,
                j.task,
                j.status,
                _age(j.created_at),
                j.attempts,
                _tenant(j, found),
                j.reason or j.outcome_ref,
            )
            for j in found
        ],
    )
    searched = None if more or (tenant or task) is None else safe.searched(status, limit + 1)
    listing = _listing(lines, "jobs", bool(found), more)
    if searched is not None:
        listing.append(f"searched: the newest {searched:,} of each status; the view `jobs` has all")
    return Answer({"jobs": found, "more": more, "searched": searched}, listing)


def _watch(
    console: Console, safe: SafeEffects, tenant: str | None, task: str | None, limit: int, until: float | None
) -> None:
    """Show what is in flight until it is time, or until Ctrl-C."""
    drawn = not console.as_json and sys.stdout.isatty()
    before: dict[tuple[str, str, int], InFlight] = {}
    cut_off = False
    while True:
        try:
            found = safe.in_flight(tenant=tenant, task=task, limit=limit)
            ended = [(row, safe.job(row.id)) for key, row in before.items() if key not in {_run(one) for one in found}]
        except Exception as exc:
            told = describe(exc)
            if told is None or not before:
                raise
            if not cut_off:
                console.note(f"warning: [{told[0]}] {told[1]}; trying on")
            cut_off = True
        else:
            cut_off = False
            if drawn:
                click.clear()
                lines = output.table(LIVE_COLUMNS, map(_live, found)) if found else ["nothing is in flight"]
                console.say(f"{datetime.now(timezone.utc):%H:%M:%S} UTC, {count(len(found), 'job')} in flight", *lines)
            else:
                for row in found:
                    if _run(row) not in before:
                        _tell(console, "began", row)
                for row, job in ended:
                    _tell(console, "ended", row, job)
            before = {_run(row): row for row in found}
        if until is not None and time.monotonic() >= until:
            return
        time.sleep(POLL if until is None else max(0.0, min(POLL, until - time.monotonic())))


def _run(row: InFlight) -> tuple[str, str, int]:
    return row.id, row.worker, row.attempts


def _live(row: InFlight) -> tuple[Any, ...]:
    note = "asked to stop" if row.cancelled else "lease ran out" if row.left_s < 0 else ""
    return row.id, row.task, row.worker, age(row.held_s), row.attempts, row.tenant, note


def _tell(console: Console, event: str, row: InFlight, job: JobRow | None = None) -> None:
    if console.as_json:
        console.emit({"event": event, "in_flight": row, "job": job})
        return
    now = f"{datetime.now(timezone.utc):%H:%M:%S}"
    what = f"on {row.worker}" if job is None else f"{job.status}{f' ({job.reason})' if job.reason else ''}"
    console.say(output.clean(f"{now} {'+' if job is None else '-'} {row.id}  {row.task}  {what}"))


def _tenant(job: JobRow, rows: Sequence[JobRow]) -> str:
    """The tenants' column is worth its room only where there are several."""
    return job.tenant if any(row.tenant != rows[0].tenant for row in rows) else ""


def _age(at: datetime) -> str:
    return age((datetime.now(timezone.utc) - at).total_seconds())


def _listing(lines: list[str], what: str, some: bool, more: bool) -> list[str]:
    if not some:
        return [f"no {what}"]
    return [*lines, *(["there are more: --limit"] if more else [])]


# -- operations ----------------------------------------------------------------------------------------------------


@command()
@click.option("--status", type=OPERATION_STATUS, help="Only operations that are this.")
@click.option("--job", type=text, help="Only operations of this job.")
@click.option("--limit", type=LIMIT, default=50, show_default=True, help="At most so many.")
def operations(
    console: Console,
    safe: SafeEffects,
    status: str | None,
    job: str | None,
    limit: int,
) -> Answer:
    """List operations (recorded side effects), in the order of their first intents."""
    if job is not None:
        safe.job(job)
    found = safe.operations(job_id=job, status=status, limit=limit + 1)
    found, more = found[:limit], len(found) > limit
    return Answer(
        {"operations": found, "more": more},
        _listing(operation_table(found), "operations", bool(found), more),
    )


def operation_table(found: Sequence[OperationRow]) -> list[str]:
    """Operations as a table.

    Arguments:
        found: its rows.
    """

    def cells(o: OperationRow) -> tuple[Any, ...]:
        asked, said = o.reconcile_attempts or "", o.provider_ref or _error(o)
        return o.key, o.effect, o.status, o.attempt, asked, _age(o.intent_at), said

    return output.table(
        OPERATION_COLUMNS,
        map(cells, found),
    )


def _error(operation: OperationRow) -> str | None:
    error = operation.error
    return error.get("text") if isinstance(error, dict) else output.compact(error)


# -- show ----------------------------------------------------------------------------------------------------------


@command()
@click.argument("job", type=text)
def show(console: Console, safe: SafeEffects, job: str) -> Answer:
    """Show one JOB: its row, its operations, its last transitions, and what it waits for."""
    row = safe.job(job)
    found = safe.operations(job_id=job)
    log = safe.transitions(job)
    last = log[-LAST:]
    waits = waits_for(row, found)
    lines = output.facts(
        [
            ("job", row.id),
            ("task", row.task),
            ("status", f"{row.status} ({row.reason})" if row.reason else row.status),
            ("tenant", row.tenant),
            ("pool", row.pool),
            ("queue", row.queue),
            ("idempotency key", row.idempotency_key),
            ("parent", row.parent_id),
            ("runs", row.attempts),
            ("fence", row.fence),
            ("lease", f"{row.lease_owner} until {moment(row.lease_until)}" if row.lease_owner else None),
            ("cancel asked", moment(row.cancel_requested_at)),
            ("eta", moment(row.eta)),
            ("expires", moment(row.expires_at)),
            ("outcome", row.outcome_ref),
            ("result", output.compact(row.result)),
            ("last error", row.last_error),
            ("created", moment(row.created_at)),
            ("started", moment(row.started_at)),
            ("finished", moment(row.finished_at)),
            ("told Celery", moment(row.settled_at)),
        ]
    )
    if found:
        lines += ["", "operations", *operation_table(found)]
    shown = f"last {len(last)} of {len(log)} transitions" if len(log) > len(last) else "transitions"
    lines += ["", shown, *TimeLine(log[0].at if log else None).lines(last)]
    if waits:
        lines += ["", *output.facts([("waits for", text) for text in waits])]
    document = {"job": row, "operations": found, "transitions": last, "transitions_total": len(log), "waits_for": waits}
    return Answer(document, lines)


def waits_for(job: JobRow, operations: Sequence[OperationRow]) -> list[str]:
    """What would move a job on that stands still, in words.

    Arguments:
        job: the job's row.
        operations: its operations.

    Returns:
        a sentence for each thing; none for a job that is finished or under way.
    """
    if job.status != JobStatus.UNKNOWN:
        return []
    found = []
    for operation in operations:
        if operation.status == OperationStatus.UNKNOWN:
            at = operation.next_reconcile_at
            ask = f"the next look (at {moment(at)}) or " if at is not None else ""
            found.append(
                f"{ask}`safe-effects resolve '{operation.key}' (--happened --ref REF | --not-happened | --refused TEXT)"
                " --reason TEXT`"
            )
    return found or [f"`safe-effects retry {job.id} --reason TEXT` or `safe-effects cancel {job.id} --reason TEXT`"]


# -- log -----------------------------------------------------------------------------------------------------------


@command(check=_follows)
@click.argument("job", type=text)
@click.option("--follow", "-f", is_flag=True, help="Go on until the job succeeded, failed or was cancelled.")
@click.option(
    "--timeout", type=click.FloatRange(min=0), help="With --follow: seconds after which to give up (exit status 1)."
)
def log(console: Console, safe: SafeEffects, job: str, follow: bool, timeout: float | None) -> Answer:
    """Show the append-only log of one JOB as a time line.

    With --follow a parked job is followed on, since a look-up, a late outcome or an operator may settle it. With
    --follow and --json, each transition is a JSON document on a line of its own.
    """
    row = safe.job(job)
    if not follow:
        found = safe.transitions(job)
        lines = TimeLine(found[0].at if found else None).lines(found)
        return Answer({"job_id": job, "status": row.status, "transitions": found}, lines)
    ended = _follow(console, safe, row, None if timeout is None else time.monotonic() + timeout)
    return Answer(ok=ended, streamed=True)


def _follow(console: Console, safe: SafeEffects, row: JobRow, until: float | None) -> bool:
    """Print what is new until the job has ended, or it is too late."""
    seen: set[int] = set()
    line: TimeLine | None = None
    parked = cut_off = False
    while True:
        try:
            # The status is read first: whatever led to it is then in the log.
            row = safe.job(row.id)
            new = [t for t in safe.transitions(row.id) if t.id not in seen]
        except Exception as exc:
            found = describe(exc)
            if found is None or not seen or found[0] == "not_found":
                raise
            if not cut_off:
                console.note(f"warning: [{found[0]}] {found[1]}; trying on")
            cut_off = True
        else:
            cut_off = False
            seen |= {t.id for t in new}
            line = line or TimeLine(new[0].at if new else None)
            if console.as_json:
                for transition in new:
                    console.emit(transition)
            else:
                console.say(*line.lines(new))
            if row.status in ENDED:
                return True
            if row.status == JobStatus.UNKNOWN and not parked:
                console.note(f"job {row.id} is parked ({row.reason}); following on until it ends, Ctrl-C stops")
            parked = row.status == JobStatus.UNKNOWN
        if until is not None and time.monotonic() >= until:
            console.note(f"job {row.id} is {row.status} still")
            return False
        time.sleep(POLL if until is None else max(0.0, min(POLL, until - time.monotonic())))


class TimeLine:
    """Transitions as lines, each day under its date (UTC).

    Arguments:
        start: the moment from which the second column counts.
    """

    def __init__(self, start: datetime | None) -> None:
        self.start = start
        self.day = ""

    def lines(self, transitions: Sequence[TransitionRow]) -> list[str]:
        """The lines of some transitions, going on where the last call ended."""
        return [line for transition in transitions for line in self._lines(transition)]

    def _lines(self, transition: TransitionRow) -> list[str]:
        at = transition.at.astimezone(timezone.utc)
        after = (at - (self.start or at)).total_seconds()
        whole = output.terminal() >= WIDE
        arrow = output.arrow()
        came = f"{transition.from_status or ''} " if whole and transition.from_status else ""
        parts = [
            f"{at:%H:%M:%S}.{at.microsecond // 1000:03d}",
            f"+{after:.3f}s".rjust(10),
            output.pad(_subject(transition), 18 if whole else 10),
            output.pad(f"{came}{arrow} {transition.to_status}", 37 if whole else 19),
            f"fence {transition.fence}" if whole else "",
            output.clean(transition.reason),
            output.clean(f"by {transition.actor}"),
        ]
        line = output.cut(output.GAP.join(part for part in parts if part), output.terminal())
        day = f"{at:%Y-%m-%d} (UTC)"
        heading = [day] if day != self.day else []
        self.day = day
        return [*heading, line]


def _subject(transition: TransitionRow) -> str:
    key = transition.operation_key
    if key is None:
        return "job"
    return output.clean("step " + key.removeprefix(f"{transition.job_id}:"))


__all__ = ["ENDED", "TimeLine", "jobs", "log", "operation_table", "operations", "show", "status", "waits_for"]
