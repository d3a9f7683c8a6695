"""`python3 tests/bench`: plain Celery, SafeTask and peers, side by side, on servers of their own.

Systems take turns, each round on a fresh database, and medians are compared: the ratios of one run mean something, the
figures of two machines do not. Writes `bench.json` and `bench.svg`. `--quick` takes a few minutes, everything an hour.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__" and "--inside" not in sys.argv:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "example_project"))
    import _bootstrap  # type: ignore[import-not-found]

    _bootstrap.run("tests.bench", ["--inside", *sys.argv[1:]])

import argparse
from collections.abc import Sequence

from tests.bench import report
from tests.bench.measure import Bench, Cell
from tests.bench.probes import probes
from tests.bench.systems.work import KINDS

ALL = ("plain", "safe", "dbos", "procrastinate", "relier", "absurd")
OURS = ("plain", "safe")
QUICK = [
    Cell("noop", 8, "redis"),
    Cell("one", 8, "redis"),
    Cell("io5", 8, "redis"),
    Cell("io50", 8, "redis"),
    Cell("noop", 8, "rabbitmq"),
    Cell("one", 8, "rabbitmq"),
]
WHOLE = [
    Cell(kind, concurrency, broker, results)
    for broker in ("redis", "rabbitmq")
    for results in (False, True)
    for concurrency in (8, 2)
    for kind in KINDS
]


def main(arguments: Sequence[str]) -> int:
    """Measure, and write the report.

    Arguments:
        arguments: the command line's.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="tests/bench", description=__doc__)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="a few cells and three rounds")
    parser.add_argument("--systems", default=",".join(ALL), help="with commas: %(default)s")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of jobs: %(default)s")
    parser.add_argument("--broker", default="redis,rabbitmq")
    parser.add_argument("--concurrency", default="2,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="about how long a round of one system runs")
    parser.add_argument("--fsync-ms", type=float, default=0.0, help="slow each fsync down by that much (needs gcc)")
    parser.add_argument("--no-probes", action="store_true", help="throughput only")
    parser.add_argument("--out", type=Path, default=Path("bench-report"), help="a folder for the report")
    given = parser.parse_args(arguments)
    systems = given.systems.split(",")
    kinds, brokers = given.kinds.split(","), given.broker.split(",")
    widths = [int(width) for width in given.concurrency.split(",")]
    cells = [
        cell
        for cell in (QUICK if given.quick else WHOLE)
        if cell.kind in kinds and cell.broker in brokers and cell.concurrency in widths
    ]
    rounds = min(given.rounds, 3) if given.quick else given.rounds
    found = {}
    with Bench(systems, seconds=given.seconds, fsync_ms=given.fsync_ms) as bench:
        for cell in cells:
            # Peers take part where they can: what they need PostgreSQL for does not change with our broker.
            taking = [name for name in bench.systems if name in OURS or bench.takes_part(name, cell)]
            found[cell] = bench.compare(cell, taking, rounds)
            print(report.line(cell, found[cell]), flush=True)
        probed = {} if given.no_probes else probes(bench)
        about = bench.about()
        for name, value in probed.items():
            print(f"{name}: {value:,.3f}")
    given.out.mkdir(parents=True, exist_ok=True)
    report.write(given.out, found, probed, about)
    print(f"written: {given.out / 'bench.json'}, {given.out / 'bench.svg'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
