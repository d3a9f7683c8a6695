"""`python3 tests/bench_growth.py`: what things cost beside 10 million finished jobs and 100,000 queued ones.

On a server of its own, which takes about 25 GB of disk and a quarter of an hour to fill. No test, since a busy machine
says little; `tests/integration/test_growth.py` guards the statements themselves. Each figure is a median, beside the
same for a database that has seen nothing. Exit status 1 when a scrape or `status` takes longer than `--most`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__" and "--inside" not in sys.argv:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "example_project"))
    import _bootstrap  # type: ignore[import-not-found]

    _bootstrap.run("tests.bench_growth", ["--inside", *sys.argv[1:]])

WATCHED = ("scrape", "status")
OLD = 20_000
"""Finished jobs that are due for pruning."""


def took(run: Callable[[], object], times: int) -> tuple[float, float]:
    """The median and the longest of some runs, in milliseconds, after one that warms up."""
    run()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        found.append((time.perf_counter() - began) * 1000)
    return median(found), max(found)


def figures(url: str, times: int) -> dict[str, tuple[float, float]]:
    """What each thing costs in a database."""
    from celery import Celery

    from celery_safe_effects import SafeEffects, SafeTask
    from celery_safe_effects.contrib import prometheus
    from celery_safe_effects.contrib.console import looks
    from tests.support.protocol import Claimed, Protocol

    app = Celery("bench", set_as_current=False, broker="memory://")
    app.conf.safe_effects_database_url = url
    safe = SafeEffects(app)
    actor = Protocol(safe.store)

    @app.task(base=SafeTask, shared=False, name="bench.nothing", effects=[])
    def nothing() -> None:
        """Does nothing."""

    envelope = safe.store.rows("STORED", id=nothing.apply_async().id)[0].envelope

    def accept() -> str:
        return actor.accept(envelope=envelope, task="bench.nothing")

    made = [accept() for _ in range(4 * (times + 1))]
    waiting, cycles, ends = iter(made[: times + 1]), iter(made[times + 1 : 2 * (times + 1)]), iter(made[-times - 1 :])

    def claimed(jobs: Any) -> Claimed:
        found = actor.claim(next(jobs))
        assert found is not None
        return found

    def effect() -> None:
        lease = leases.pop()
        nonce = actor.intent(lease)
        assert nonce is not None
        actor.outcome(lease, nonce)

    found = {
        "scrape": took(lambda: prometheus.text(safe), times),
        "status": took(safe.overview, times),
        "console, first page": took(lambda: looks.pressure(safe), times),
        "jobs": took(lambda: safe.jobs(limit=51), times),
        "jobs --status failed": took(lambda: safe.jobs(status="failed", limit=51), times),
        "jobs --tenant t7": took(lambda: safe.jobs(tenant="t7", limit=51), times),
        "jobs --tenant nobody": took(lambda: safe.jobs(tenant="nobody", limit=51), times),
        "jobs --task nothing": took(lambda: safe.jobs(task="nothing", limit=51), times),
        "operations": took(lambda: safe.operations(limit=51), times),
        "operations --status unknown": took(lambda: safe.operations(status="unknown", limit=51), times),
        "jobs --follow": took(safe.in_flight, times),
        "doctor": took(safe.doctor, 3),
        "enqueue": took(accept, times),
        "claim": took(lambda: claimed(waiting), times),
    }
    leases = [claimed(cycles) for _ in range(times + 1)]
    found["effect (intent, outcome)"] = took(effect, times)
    leases = [claimed(ends) for _ in range(times + 1)]
    found["end"] = took(lambda: actor.leave(leases.pop()), times)
    found["renew"] = took(lambda: safe.store.renew([]), times)
    found["sweep"] = took(safe.sweep, 5)
    found["reconcile"] = took(safe.reconcile, 5)
    found["prune, 500 jobs"] = took(lambda: safe.store.prune(500), min(times, OLD // 500 - 1))
    safe.close()
    return found


def main(arguments: Sequence[str]) -> int:
    """Fill, measure, and print.

    Args:
        arguments: the command line's.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="tests/bench_growth.py", description=__doc__)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--finished", type=int, default=10_000_000)
    parser.add_argument("--queued", type=int, default=100_000)
    parser.add_argument("--parked", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--most", type=float, default=100.0, help="milliseconds that are promised")
    parser.add_argument("--folder", help="keep the filled server there, and take it from there the next time")
    given = parser.parse_args(arguments)

    from celery_safe_effects.store import migrate
    from celery_safe_effects.testing import EmbeddedPostgres
    from tests.support.filling import Filling, fill

    filled = given.folder is not None and Path(given.folder).exists()
    settings: dict[str, str | int | bool] = {"shared_buffers": "1GB", "max_wal_size": "8GB", "autovacuum": False}
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedPostgres(given.folder, settings))
        few = Filling(finished=OLD, old=OLD)
        many = Filling(finished=given.finished, queued=given.queued, later=1000, parked=given.parked, old=OLD)
        for name, filling in (("small", few), ("big", many)):
            if not filled:
                began = time.monotonic()
                migrate.upgrade(server.create_database(name), "safe_effects")
                with server.connect(name) as connection:
                    fill(connection, filling)
                print(f"{name}: {filling.finished:,} finished jobs, filled in {time.monotonic() - began:,.0f} s")
        small, big = (figures(server.url(name), given.rounds) for name in ("small", "big"))
        with server.connect("big") as connection:
            sizes = connection.execute(
                "SELECT relname, pg_table_size(oid) / 1e9, pg_indexes_size(oid) / 1e9 FROM pg_class"
                " WHERE relkind = 'r' AND pg_table_size(oid) > 1e7 ORDER BY 2 DESC"
            ).fetchall()
    print(f"{'milliseconds, median (longest)':32}{'empty':>20}{'filled':>20}")
    for name, (middle, longest) in big.items():
        print(f"{name:32}{small[name][0]:12.1f} {f'({small[name][1]:.1f})':>7}{middle:12.1f} {f'({longest:.1f})':>7}")
    for name, table, indexes in sizes:
        print(f"{name:32}{table:6.2f} GB, indexes {indexes:.2f} GB")
    slow = [name for name in WATCHED if big[name][0] > given.most]
    print(f"over {given.most:g} ms: {', '.join(slow)}" if slow else f"{' and '.join(WATCHED)}: under {given.most:g} ms")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
