"""What the database says about itself, as metrics: right whatever process died, and cheap however large the tables are.

No statement here reads more rows than a fixed number, whatever the tables hold: where there are more, a number says "at
least so many", and what stands for many tenants, queues or effects is summed up under the label ``other``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from ..states import TERMINAL, UNRESOLVED, JobStatus
from ..store.hot import Store

if TYPE_CHECKING:
    from .admission import Admission

Kind = Literal["gauge", "counter"]
PREFIX: Final = "safe_effects_"
OTHER: Final = "other"

TOP: Final = 20
"""Tenants and effects that have a label of their own: the oldest or the most, the rest is ``other``."""
QUEUES: Final = 50
LIMITS: Final = 100
SAMPLE: Final = 1_000
"""Jobs of each queue, from the oldest on, among which tenants and jobs that never started are found."""
COUNTED: Final = 100_000
OF_TENANTS: Final = 20_000
"""Where counting the jobs of queues, and of tenants, ends, all together; but each to at least ``SAMPLE``."""
ENDED: Final = 10_000
"""Where `status` ends counting those that ended, of each status; those that did not are counted to ``COUNTED``."""
LOOKED: Final = 10_000
"""Of each status, how many jobs or operations a list searches by tenant, task or effect."""
MOST: Final = 10_000
"""Where other counting ends: live jobs, unknown operations, parked and waiting jobs."""
OPEN: Final = (frozenset(JobStatus) - TERMINAL) | UNRESOLVED
SEEN_FOR: Final = 60.0
"""Seconds for which a worker that was seen counts as one."""


@dataclass(frozen=True)
class Sample:
    """One value of a metric.

    Attributes:
        labels: names to values; the same names in every sample of a metric.
        value: seconds, a Unix time in seconds, or a number.
    """

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Metric:
    """A metric with all its samples.

    Attributes:
        name: as Prometheus has it, with the prefix, the unit and, for counters, ``_total``.
        kind: ``gauge`` or ``counter``.
        help: what it means.
        samples: its values; none where there is nothing to tell.
    """

    name: str
    kind: Kind
    help: str
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class _Family:
    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    known: tuple[str, ...] = ()
    """Values of the first label that exist from the beginning, at 0: an alert sees the first event, too."""


def _gauge(name: str, help_: str, *labels: str) -> _Family:
    return _Family(PREFIX + name, "gauge", labels, help_)


def _counter(name: str, help_: str, *labels: str, known: Sequence[str] = ()) -> _Family:
    return _Family(f"{PREFIX}{name}_total", "counter", labels, help_, tuple(known))


CATALOG: Final = (
    _gauge("queued_jobs", "Jobs in a queue, delayed ones included.", "queue"),
    _gauge(
        "queue_oldest_age_seconds", "Since when the oldest job of a queue and tenant could start.", "queue", "tenant"
    ),
    _gauge("never_started_jobs", "Jobs that could start for longer than republish_after and never did.", "queue"),
    _gauge("never_started_oldest_age_seconds", "Since when the oldest job that never started could.", "queue"),
    _gauge("waiting_jobs", "Queued jobs that wait for a slot or for another job's operation.", "reason"),
    _gauge("live_jobs", "Jobs that a worker owns.", "status"),
    _gauge("live_oldest_age_seconds", "Since when the oldest of these is owned, this attempt alone.", "status"),
    _gauge("overdue_leases", "Leases that ran out and that no sweep has ended yet."),
    _gauge("tenant_jobs", "Jobs of the tenants with the oldest or the most jobs, or with limits.", "tenant", "state"),
    _gauge("limit_value", "A limit that is set on queued or running jobs.", "scope", "limit"),
    _gauge("limit_in_use", "What stands against it now.", "scope", "limit"),
    _gauge("unknown_operations", "Operations of which nobody knows whether they happened.", "effect"),
    _gauge("unknown_oldest_age_seconds", "Since when the oldest of these was sent.", "effect"),
    _gauge("parked_jobs", "Jobs whose outcome is unknown.", "reason"),
    _gauge("double_effect_operations", "Operations that happened twice by evidence."),
    _gauge("reconcile_lag_seconds", "How long the question that is due longest has been due."),
    _gauge("publish_lag_seconds", "How long the message that is due longest has been due."),
    _gauge("last_finished_timestamp_seconds", "When a sweep, reconciliation or pruning ended last.", "activity"),
    _gauge("workers", "Workers that were seen within the last minute.", "version"),
    _gauge("longest_pause_seconds", "The longest delay of a renewal of leases within a day, all workers."),
    _counter("jobs_accepted", "Jobs accepted; enqueues that found their job to exist already may count, too."),
    _counter("jobs_finished", "Jobs that ended.", "status", known=("succeeded", "failed", "cancelled")),
    _counter("jobs_parked", "Jobs that were parked as unknown.", "reason", known=("lease_expired", "outcome_unknown")),
    _counter(
        "retries",
        "Jobs that went back into the queue to run again.",
        "reason",
        known=("lease_expired", "worker_lost", "retry", "not_happened"),
    ),
    _counter("deferrals", "Deliveries of jobs that could not run yet, and cost no attempt.", "reason"),
    _counter(
        "lease_expirations",
        "Leases that ran out; active: while their worker was alive.",
        "worker",
        known=("active", "gone"),
    ),
    _counter(
        "leases_lost",
        "Leases that their own process found to be lost, at a renewal or at a write of the job.",
        "found_by",
        known=("renewal", "job"),
    ),
    _counter("stale_deliveries", "Messages that were not allowed to run.", "reason"),
    _counter("republished_messages", "Messages that the sweep published again.", "reason"),
    _counter("double_effects", "Operations found to have happened twice."),
    _counter("admission_refusals", "Enqueues that were refused.", "reason"),
    _counter("reconcile_attempts", "Questions about unknown operations taken up."),
    _counter(
        "reconcile_results", "What became of them.", "result", known=("outcome_confirmed", "not_happened", "unresolved")
    ),
    _counter("maintenance_runs", "Sweeps, reconciliations and prunings begun.", "activity"),
    _counter("events", "Anything else that is counted.", "event"),
)
"""Every metric, in the order in which they are shown."""

_COUNTERS: Final = {
    "jobs_finished": "jobs_finished",
    "jobs_parked": "jobs_parked",
    "retries": "retries",
    "deferrals": "deferrals",
    "lease_expirations": "lease_expirations",
    "stale_deliveries": "stale_deliveries",
    "republished": "republished_messages",
    "double_effects": "double_effects",
    "admission_refusals": "admission_refusals",
    "reconcile_attempts": "reconcile_attempts",
    "reconcile_results": "reconcile_results",
}
"""From names in the table of counters to metrics."""

Samples = dict[str, dict[tuple[str, ...], float]]
Run = Callable[..., list[Any]]
"""Runs a statement by its name."""


class Metrics:
    """Reads the metrics of one database.

    Arguments:
        store: the database.
        admission: the limits.
        patience: seconds after which a job that nobody started counts as never started.
    """

    def __init__(self, store: Store, admission: Admission, patience: float) -> None:
        self.store = store
        self.admission = admission
        self.patience = patience

    def collect(self) -> list[Metric]:
        """Read everything now; reads only.

        Returns:
            every metric of :data:`CATALOG`, in its order.

        Raises:
            StoreUnavailable: when the database cannot be reached.
        """
        found: Samples = {family.name: {} for family in CATALOG}
        limits = self.admission.on_jobs()[:LIMITS]
        with self.store.transaction() as rows:
            rows("METRICS_BEGIN")
            oldest = self._queues(found, rows)
            live = self._live(found, rows)
            self._limits(found, rows, limits, oldest, live)
            self._open_questions(found, rows)
            self._counters(found, rows)
            self._rest(found, rows)
        return [
            Metric(
                family.name,
                family.kind,
                family.help,
                tuple(
                    Sample(dict(zip(family.labels, labels, strict=True)), value)
                    for labels, value in found[family.name].items()
                ),
            )
            for family in CATALOG
        ]

    # -- gauges --------------------------------------------------------------------------------------------------------

    def _queues(self, found: Samples, run: Run) -> list[str]:
        rows = run("METRICS_QUEUES", queues=QUEUES, sample=SAMPLE, patience=self.patience)
        by_queue: dict[str, list[Any]] = defaultdict(list)
        oldest: dict[str, float] = {}
        for row in rows:
            by_queue[row.queue].append(row)
            if row.tenant is None:
                continue  # nothing there could start yet
            oldest[row.tenant] = max(oldest.get(row.tenant, 0.0), row.age)
        tenants = set(_top(oldest, TOP))
        for queue, mine in by_queue.items():
            never = [row.never_started_age for row in mine if row.never_started_age is not None]
            _put(found, "never_started_jobs", sum(row.never_started for row in mine), queue)
            _put(found, "never_started_oldest_age_seconds", max(never, default=0.0), queue)
            for row in (row for row in mine if row.tenant is not None):
                tenant = row.tenant if row.tenant in tenants else OTHER
                _put(found, "queue_oldest_age_seconds", row.age, queue, tenant, by=max)
        names = [queue for queue in by_queue if queue]
        for row in run("METRICS_DEPTHS", queues=names, most=_share(COUNTED, len(names))):
            _put(found, "queued_jobs", row.jobs, row.name)
        return _top(oldest, TOP)

    def _live(self, found: Samples, run: Run) -> dict[str, float]:
        tenants: dict[str, float] = defaultdict(float)
        for status in ("leased", "running"):
            _put(found, "live_jobs", 0, status)
            _put(found, "live_oldest_age_seconds", 0.0, status)
        _put(found, "overdue_leases", 0)
        for row in run("METRICS_LIVE", most=MOST):
            tenants[row.tenant] += row.jobs
            _put(found, "live_jobs", row.jobs, row.status, by=_sum)
            _put(found, "live_oldest_age_seconds", row.age or 0.0, row.status, by=max)
            _put(found, "overdue_leases", row.overdue, by=_sum)
        return tenants

    def _limits(
        self,
        found: Samples,
        run: Run,
        limits: Sequence[tuple[str, str, float]],
        oldest: Sequence[str],
        live: Mapping[str, float],
    ) -> None:
        named = [scope.partition(":")[2] for scope, _, _ in limits if scope.startswith("tenant:")]
        busiest = _top(live, TOP)
        tenants = list(dict.fromkeys([*oldest, *busiest, *named]))
        pools = list(dict.fromkeys(scope.partition(":")[2] for scope, _, _ in limits if scope.startswith("pool:")))
        rows = run("METRICS_USE", tenants=tenants, pools=pools, most=_share(OF_TENANTS, len(tenants)))
        use = {(row.kind, row.name): row for row in rows}
        of_tenants = [row for row in rows if row.kind == "tenant"]
        shown = {*oldest, *busiest, *named[:TOP]}
        for row in of_tenants:
            if row.name in shown:
                _put(found, "tenant_jobs", row.queued, row.name, "queued")
                _put(found, "tenant_jobs", row.running, row.name, "running")
        for scope, limit, value in limits:
            kind, _, name = scope.partition(":")
            column = "queued" if limit == "tenant_queued" else "running"
            against = [use[kind, name]] if name else of_tenants
            _put(found, "limit_value", value, scope, limit)
            _put(found, "limit_in_use", max((getattr(row, column) for row in against), default=0), scope, limit)

    def _open_questions(self, found: Samples, run: Run) -> None:
        rows = run("METRICS_UNKNOWN", most=MOST)
        top = set(_top({row.effect: row.operations for row in rows}, TOP))
        for row in rows:
            effect = row.effect if row.effect in top else OTHER
            _put(found, "unknown_operations", row.operations, effect, by=_sum)
            _put(found, "unknown_oldest_age_seconds", row.age, effect, by=max)
        for row in run("METRICS_PARKED", most=MOST):
            _put(found, "parked_jobs", row.jobs, row.reason)
        for row in run("METRICS_WAITING", most=MOST):
            _put(found, "waiting_jobs", row.jobs, row.reason)

    def _rest(self, found: Samples, run: Run) -> None:
        row = run("METRICS_REST", most=MOST)[0]
        _put(found, "jobs_accepted_total", row.accepted)
        _put(found, "double_effect_operations", row.doubled)
        _put(found, "reconcile_lag_seconds", max(0.0, row.reconcile_lag or 0.0))
        _put(found, "publish_lag_seconds", max(0.0, row.publish_lag or 0.0))
        for row in run("METRICS_MAINTENANCE"):
            if row.finished is not None:
                _put(found, "last_finished_timestamp_seconds", row.finished, row.name)
            _put(found, "maintenance_runs_total", row.runs, row.name)
        pause = 0.0
        for row in run("METRICS_WORKERS", most=SAMPLE):
            pause = max(pause, row.longest_pause)
            if not row.stopped and row.silent < SEEN_FOR:
                _put(found, "workers", 1, row.version, by=_sum)
        _put(found, "longest_pause_seconds", pause)

    # -- counters ------------------------------------------------------------------------------------------------------

    def _counters(self, found: Samples, run: Run) -> None:
        for family in CATALOG:
            for label in family.known:
                found[family.name][label,] = 0
            if family.kind == "counter" and not family.labels:
                found[family.name][()] = 0
        labels = {family.name: family.labels for family in CATALOG}
        for row in run("METRICS_COUNTERS", most=MOST):
            if row.name == "leases_lost":
                _put(found, "leases_lost_total", row.value, "renewal" if row.label == "renewal" else "job", by=_sum)
                continue
            name = _COUNTERS.get(row.name)
            if name is None:
                _put(found, "events_total", row.value, row.name, by=_sum)
                continue
            name += "_total"
            if not labels[PREFIX + name]:
                _put(found, name, row.value, by=_sum)
                continue
            label = row.label or OTHER
            taken = found[PREFIX + name]
            _put(found, name, row.value, label if (label,) in taken or len(taken) < LIMITS else OTHER, by=_sum)


def counted_to(status: str) -> int:
    """How far a look at everything counts the jobs or operations of a status."""
    return COUNTED if status in OPEN else ENDED


def _put(
    found: Samples, name: str, value: float, *labels: str, by: Callable[[list[float]], float] | None = None
) -> None:
    """Set a value, or join it with the one that is there already."""
    samples = found[PREFIX + name]
    samples[labels] = by([samples[labels], value]) if by is not None and labels in samples else value


def _sum(values: Iterable[float]) -> float:
    return sum(values)


def _top(values: Mapping[str, float], n: int) -> list[str]:
    return sorted(values, key=lambda name: (-values[name], name))[:n]


def _share(most: int, parts: int) -> int:
    """How far each of so many parts is counted."""
    return max(SAMPLE, most // max(parts, 1))


__all__ = ["CATALOG", "Metric", "Metrics", "Sample", "counted_to"]
