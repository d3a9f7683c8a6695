"""`python3 tests/bench_storm.py`: what happens to claims and calls when something goes wrong all at once.

100,000 leases that run out together, a transaction that somebody left open, a thousand tenants of which one has nine
tenths of the load, and one idempotency key that fifty producers hit. On a server of its own; no test, since a busy
machine says little. Exit status 1 when a figure is beyond what is promised.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__" and "--inside" not in sys.argv:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "example_project"))
    import _bootstrap  # type: ignore[import-not-found]

    _bootstrap.run("tests.bench_storm", ["--inside", *sys.argv[1:]])

SWEPT_WITHIN = 60.0
"""Seconds in which 100,000 leases that ran out at once are swept."""
HELD_UP = 2.0
"""How many times as long a claim may take beside an old open transaction."""

EXPIRED = """
INSERT INTO job (id, task, tenant, queue, args_digest, status, envelope, settle, express, attempts, fence, lease_token,
                 lease_owner, lease_until, leased_at, started_at, published_at, publishes, gives_up_at)
SELECT 'x' || i, 'bench.nothing', 't' || i %% 50, 'q' || i %% 4, 'd', 'running', %(envelope)s, true, false, 1, 1,
       gen_random_uuid(), 'gone@host/1/' || i %% 200, now() - interval '1 s', now(), now(), now(), 1,
       now() + interval '1 day'
  FROM generate_series(1, %(leases)s) i
"""


class Storm:
    """A database, an app on it, and an actor of the protocol.

    Arguments:
        server: PostgreSQL.
        name: the database's.
    """

    def __init__(self, server: Any, name: str) -> None:
        from celery import Celery

        from celery_safe_effects import SafeEffects, SafeTask
        from celery_safe_effects.store import migrate
        from tests.support.protocol import Protocol

        self.server, self.name = server, name
        url = server.create_database(name)
        migrate.upgrade(url)
        self.app = Celery("bench", set_as_current=False, broker="memory://")
        self.app.conf.update(safe_effects_database_url=url, task_ignore_result=True, safe_effects_max_connections=60)
        self.safe = SafeEffects(self.app)
        self.actor = Protocol(self.safe.store)

        @self.app.task(base=SafeTask, shared=False, name="bench.nothing", effects=[])
        def nothing() -> None:
            """Does nothing."""

        self.nothing = nothing
        self.envelope = self.safe.store.rows("STORED", id=nothing.apply_async().id)[0].envelope

    @contextmanager
    def open(self) -> Iterator[Storm]:
        try:
            yield self
        finally:
            self.safe.close()

    def cycle(self, tenant: str = "acme") -> float:
        """Milliseconds of one claim; the job is accepted before and ends after."""
        job = self.actor.accept(tenant=tenant, envelope=self.envelope, settle=False)
        began = time.perf_counter()
        claimed = self.actor.claim(job)
        took = time.perf_counter() - began
        assert claimed is not None
        self.actor.leave(claimed)
        return took * 1000

    def cycles(self, times: int, tenants: Callable[[int], str] = lambda _: "acme") -> list[float]:
        return [self.cycle(tenants(number)) for number in range(times)]


def said(name: str, values: list[float]) -> str:
    """A line: the median and the longest of some milliseconds."""
    return f"{name:58} {median(values):8.1f} ms, at most {max(values):,.0f} ms"


def leases(server: Any, count: int) -> list[str]:
    """Leases that run out at once, and claims beside their sweep."""
    with Storm(server, "leases").open() as storm:
        before = storm.cycles(100)
        with server.connect("leases") as connection:
            connection.execute("SET search_path = safe_effects")
            connection.execute("ALTER TABLE job DISABLE TRIGGER USER")
            connection.execute(EXPIRED.encode(), {"leases": count, "envelope": storm.envelope})
            connection.execute("ALTER TABLE job ENABLE TRIGGER USER")
            connection.execute("ANALYZE job")
        over = threading.Event()

        def claim() -> list[float]:
            found = []
            while not over.is_set():
                found.append(storm.cycle())
            return found

        with ThreadPoolExecutor(1) as threads:
            claims = threads.submit(claim)
            began = time.perf_counter()
            swept = storm.safe.sweep()
            took = time.perf_counter() - began
            over.set()
            during = claims.result()
        assert swept.released == count, swept
    print(f"{count:,} leases that ran out at once: swept in {took:.1f} s")
    print(said("a claim before", before))
    print(said(f"a claim meanwhile ({len(during)})", during))
    return [f"the sweep of {count:,} leases took {took:.0f} s"] if took > SWEPT_WITHIN else []


def old_transaction(server: Any, jobs: int) -> list[str]:
    """Many jobs pass while a snapshot of somebody else keeps their dead rows."""
    with Storm(server, "held").open() as storm:
        storm.cycles(100)
        without = storm.cycles(jobs)
        with server.connect("held") as holder:
            holder.autocommit = False
            holder.execute("SELECT txid_current()")
            storm.cycles(jobs)
            beside = storm.cycles(500)
            storm.safe.sweep()
    ratio = median(beside) / median(without)
    print(said(f"a claim after {jobs:,} jobs", without))
    print(said(f"a claim after {jobs:,} jobs beside an open transaction", beside))
    print(f"{'':58} {ratio:8.2f} times as long")
    return [f"an open transaction makes claims {ratio:.2f} times as long"] if ratio > HELD_UP else []


def tenants(server: Any, count: int) -> list[str]:
    """One has nine tenths of the load, the others share the rest; all have limits."""
    from celery_safe_effects import Limits

    def whose(number: int) -> str:
        return f"t{number % count}" if number % 10 == 0 else "big"

    with Storm(server, "tenants").open() as storm:
        storm.safe.set_limits(Limits(tenant_queued=1_000_000, tenant_running=1_000))
        one = storm.cycles(500)
        storm.safe.enqueue_many(storm.nothing.s().set(tenant=whose(number)) for number in range(20_000))
        many = storm.cycles(500, whose)
    print(said("a claim with limits, one tenant", one))
    print(said(f"a claim with limits, {count:,} tenants and 20,000 queued", many))
    return []


def hot_key(server: Any, producers: int) -> list[str]:
    """Everybody enqueues the same call under the same key."""
    with Storm(server, "hot").open() as storm:
        barrier = threading.Barrier(producers)

        def call(_: int) -> tuple[str, float]:
            barrier.wait()
            began = time.perf_counter()
            result = storm.nothing.apply_async(idempotency_key="hot")
            return result.id, (time.perf_counter() - began) * 1000

        with ThreadPoolExecutor(producers) as threads:
            found = list(threads.map(call, range(producers)))
        again = [call_again(storm) for _ in range(200)]
    ids = {job_id for job_id, _ in found}
    print(said(f"{producers} producers at once, one key: {len(ids)} job", [took for _, took in found]))
    print(said("the same call again, one after another", again))
    return [] if len(ids) == 1 else [f"one key became {len(ids)} jobs"]


def call_again(storm: Storm) -> float:
    """Milliseconds of a call that finds its job."""
    began = time.perf_counter()
    storm.nothing.apply_async(idempotency_key="hot")
    return (time.perf_counter() - began) * 1000


def main(arguments: Sequence[str]) -> int:
    """Measure, and print.

    Arguments:
        arguments: the command line's.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="tests/bench_storm.py", description=__doc__)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--leases", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=5_000, help="that pass beside an open transaction")
    parser.add_argument("--tenants", type=int, default=1_000)
    parser.add_argument("--producers", type=int, default=50)
    given = parser.parse_args(arguments)

    from celery_safe_effects.testing import EmbeddedPostgres

    with EmbeddedPostgres(settings={"shared_buffers": "512MB", "max_wal_size": "4GB"}) as server:
        beyond = [
            *leases(server, given.leases),
            *old_transaction(server, given.jobs),
            *tenants(server, given.tenants),
            *hot_key(server, given.producers),
        ]
    for line in beyond:
        print(f"BEYOND WHAT IS PROMISED: {line}")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
