"""What must hold when everything was mended, by the provider's ledger and the views of the database."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from celery_safe_effects.states import TERMINAL
from celery_safe_effects.testing.process import patience
from tests.soak.names import LOOKED, OPEN, WHY
from tests.support.checks import assert_invariants
from tests.support.services import Sql, queries

if TYPE_CHECKING:
    from tests.soak.world import Site

P: Final = "safe_effects_"
ENDS: Final = tuple(status.value for status in TERMINAL)

UNFINISHED = """
SELECT id, task, status, reason, last_error FROM jobs j WHERE NOT (status = ANY (%s)) AND NOT (status = 'unknown'
   AND NOT EXISTS (SELECT FROM operation o WHERE o.job_id = j.id AND o.status IN ('unknown', 'intent_recorded')
                      AND (o.has_lookup OR o.idempotent_for IS NOT NULL))
   AND EXISTS (SELECT FROM operation o WHERE o.job_id = j.id AND o.status = 'unknown'))
 ORDER BY created_at
"""
"""Jobs that have neither ended nor wait for what nobody can tell but people."""


def judge(site: Site, within: float) -> dict[str, list[str]]:
    """Check everything that is promised.

    Arguments:
        site: where, mended, its workers running.
        within: seconds in which all that was accepted must have come to its end; `patience` multiplies them.

    Returns:
        For each promise what breaks it; all are empty where all is well.
    """
    with queries(site.dsn) as sql:
        found = {"what was accepted comes to an end": ends(sql, within * patience())}
        # Nothing moves any more from here on: what is counted twice is the same.
        for process in site.processes:
            process.stop()
        ledger = site.provider.client.ledger()
        found |= {
            "what was accepted is there": lost(sql, site.accepted) if site.accepted else ["nothing was accepted"],
            "a job commits with its caller's rows": enlisted(sql, site.rolled_back),
            "one effect a key": twice(ledger),
            "log, rows, counters and ledger agree; fences grow": said(
                lambda: assert_invariants(sql, site.provider.client)
            ),
            "metrics are what the tables say": metrics(sql, site.app.safe_effects.metrics()),
            "no transaction is open while the provider is called": transactions(ledger),
        }
        return found


def said(check: Callable[[], None]) -> list[str]:
    """What an assertion says, if it fails."""
    try:
        check()
    except AssertionError as error:
        return [str(error)[:2000]]
    return []


def ends(sql: Sql, within: float) -> list[str]:
    """Wait until every job has ended or is rightly parked; those that have not by then."""
    limit = time.monotonic() + within
    while True:
        rows = sql(UNFINISHED, list(ENDS))
        if not rows or time.monotonic() > limit:
            return [" ".join(map(str, row.values())) for row in rows]
        time.sleep(0.5)


def lost(sql: Sql, accepted: Iterable[str]) -> list[str]:
    """Jobs that were accepted and are not in the database."""
    present = {row["id"] for row in sql("SELECT id FROM jobs")}
    return sorted(set(accepted) - present)


def enlisted(sql: Sql, rolled_back: Iterable[str]) -> list[str]:
    """Orders without a job, and jobs whose transaction was rolled back."""
    rows = sql("SELECT o.id FROM public.orders o WHERE NOT EXISTS (SELECT FROM jobs j WHERE j.id = o.id)")
    found = [f"an order without its job: {row['id']}" for row in rows]
    there = sql("SELECT id FROM jobs WHERE id = ANY (%s)", list(rolled_back))
    return found + [f"a job whose transaction was rolled back: {row['id']}" for row in there]


def twice(ledger: Iterable[dict[str, Any]]) -> list[str]:
    """Keys with more than one effect."""
    times = Counter((row["kind"], row["key"]) for row in ledger if row["key"] is not None)
    return [f"{kind} {key}: {n} times" for (kind, key), n in times.items() if n > 1]


def transactions(ledger: Iterable[dict[str, Any]]) -> list[str]:
    """What workers found open in their own processes, just before they called the provider."""
    found = [row for row in ledger if row["kind"] in (LOOKED, OPEN)]
    return [str(q) for row in found for q in row["body"]["queries"]] if found else ["nobody looked"]


def metrics(sql: Sql, collected: Iterable[Any]) -> list[str]:
    """Where metrics and tables differ."""
    told = {
        (metric.name.removeprefix(P), tuple(sample.labels.values())): sample.value
        for metric in collected
        for sample in metric.samples
    }

    def differs(name: str, counted: dict[tuple[str, ...], int]) -> list[str]:
        mine = {labels: int(value) for (metric, labels), value in told.items() if metric == name and value}
        return [] if mine == {k: n for k, n in counted.items() if n} else [f"{name}: {mine}, and by the rows {counted}"]

    def rows(query: str) -> dict[tuple[str, ...], int]:
        return {tuple(str(v) for v in row.values() if not isinstance(v, int)): row["n"] for row in sql(query)}

    # Reasons as classes: what operators write is theirs.
    classed = f"CASE reason WHEN '{WHY}' THEN '{{}}' ELSE split_part(reason, ':', 1) END AS label"
    by_status = "SELECT {} AS label, count(*)::int AS n FROM jobs WHERE {} GROUP BY 1"
    moved = "SELECT {}, count(*)::int AS n FROM transitions WHERE operation_key IS NULL AND {} GROUP BY 1"
    parked = "SELECT {}, count(*)::int AS n FROM jobs WHERE status = 'unknown' GROUP BY 1"
    unknown = "SELECT effect, count(*)::int AS n FROM operations WHERE status = 'unknown' GROUP BY 1"
    return [
        *differs("jobs_finished_total", rows(moved.format("to_status", f"to_status IN {ENDS}"))),
        *differs("jobs_parked_total", rows(moved.format(classed.format("operator"), "to_status = 'unknown'"))),
        *differs("live_jobs", rows(by_status.format("status", "lease_until IS NOT NULL"))),
        *differs("queued_jobs", rows(by_status.format("queue", "status = 'queued'"))),
        *differs("parked_jobs", rows(parked.format(classed.format("other")))),
        *differs("unknown_operations", rows(unknown)),
    ]
