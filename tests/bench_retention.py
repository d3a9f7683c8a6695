"""`python3 tests/bench_retention.py`: what a million jobs leave of tables and indexes while pruning goes on.

Days in minutes: jobs go through the tables in batches, on a server of its own; the newest `--keep` are kept and the
others pruned, batch by batch, and autovacuum wakes up every second instead of every minute. At the end the tables, and
the indexes of each together, are compared with what they take when they are written anew. Ctrl-C ends it early. Exit
status 1 when one is larger than `--most` times that. `tests/integration/test_retention.py` does it with fewer jobs.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__" and "--inside" not in sys.argv:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "example_project"))
    import _bootstrap  # type: ignore[import-not-found]

    _bootstrap.run("tests.bench_retention", ["--inside", *sys.argv[1:]])


def main(arguments: Sequence[str]) -> int:
    """Let the jobs go through, and print what they leave.

    Args:
        arguments: the command line's.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="tests/bench_retention.py", description=__doc__)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=1_000)
    parser.add_argument("--keep", type=int, default=50_000, help="finished jobs that are kept")
    parser.add_argument("--most", type=float, default=2.0, help="how many times the live size is promised")
    given = parser.parse_args(arguments)

    from celery_safe_effects.config import Retention
    from celery_safe_effects.engine.prune import Pruner
    from celery_safe_effects.store import migrate
    from celery_safe_effects.testing import EmbeddedPostgres
    from tests.support import churn
    from tests.support.protocol import make_store

    settings = {"autovacuum_naptime": "1s", "shared_buffers": "512MB", "fsync": "off"}
    with EmbeddedPostgres(settings=settings) as server:
        url = server.create_database("bench")
        migrate.upgrade(url, "safe_effects")
        store = make_store(url)
        ends: list[float] = []
        pruned, most = [0, 0], dict[str, int]()
        began = time.monotonic()
        with server.connect("bench") as connection:
            connection.execute("SET search_path = safe_effects; SET synchronous_commit = off")
            with contextlib.suppress(KeyboardInterrupt):
                for number in range(given.jobs // given.batch):
                    churn.live(connection, given.batch)
                    ends.append(time.monotonic())
                    if number >= (behind := given.keep // given.batch):
                        age = time.monotonic() - ends[number - behind]
                        retention = Retention(succeeded=age, failed=age, cancelled=age)
                        store.config = replace(store.config, retention=retention, tombstone_retention=2 * age)
                        found = Pruner(store).run("bench")
                        pruned = [pruned[0] + found.jobs, pruned[1] + found.tombstones]
                        store.rows("FOLD", limit=10_000)
                    if number % 25 == 24:
                        now = churn.sizes(connection)
                        most = {name: max(size, most.get(name, 0)) for name, size in now.items()}
                        print(
                            f"{(number + 1) * given.batch:9,} jobs, {time.monotonic() - began:5.0f} s,"
                            f" pruned {pruned[0]:9,}, {sum(now.values()) / 1e6:7.0f} MB"
                        )
            sizes = churn.sizes(connection)
            (rows,) = connection.execute("SELECT count(*) FROM job").fetchone() or (0,)
            live = churn.rebuilt(connection)
        store.connections.close()
    print(f"{rows:,} jobs are left; {pruned[0]:,} were pruned, and {pruned[1]:,} tombstones")
    print(f"{'':28}{'most':>10}{'now':>10}{'live':>10}{'times':>8}   MB")
    for name, size in sizes.items():
        print(
            f"{name:28}{most.get(name, 0) / 1e6:10.1f}{size / 1e6:10.1f}{live[name] / 1e6:10.1f}"
            f"{size / max(live[name], 1):8.2f}"
        )
    ratios = churn.ratios(sizes, live)
    for name, ratio in ratios.items():
        print(f"{name:28}{ratio:38.2f}")
    wide = [name for name, ratio in ratios.items() if ratio > given.most]
    print(
        f"over {given.most:g} times: {', '.join(wide)}" if wide else f"all within {given.most:g} times their live size"
    )
    return 1 if wide else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
