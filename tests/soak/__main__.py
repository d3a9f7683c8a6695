"""`python3 tests/soak`: everything goes wrong at once, for as long as you like; then the books are checked.

Real workers, beat, both brokers, PostgreSQL and a provider, loaded all along; a schedule of kills, pauses, restarts,
broken connections, wrong clocks, provider faults, cancels and deploys, drawn from a seed. At the end everything is
mended, and what is promised must hold. Writes `soak.json` and `soak.svg`. Exit status 1 when a promise is broken.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

if __name__ == "__main__" and "--inside" not in sys.argv:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "example_project"))
    import _bootstrap  # type: ignore[import-not-found]

    _bootstrap.run("tests.soak", ["--inside", *sys.argv[1:]])

SETTLED_WITHIN = 120.0
"""Seconds after the last fault in which all that was accepted must have come to its end."""


def soak(
    brokers: Sequence[str], seconds: float, *, seed: str, folder: Path, rate: float = 4.0, gap: float = 6.0
) -> dict[str, dict[str, list[str]]]:
    """Break everything for a while, mend it, and check the books.

    Arguments:
        brokers: kinds of brokers.
        seconds: how long.
        seed: what every chance comes from.
        folder: for logs and the report.
        rate: jobs and canvases that each site enqueues a second.
        gap: seconds between two faults of a worker, the mean.

    Returns:
        For each site and promise what broke it; empty where it was kept.
    """
    from tests.soak import report
    from tests.soak.judge import judge
    from tests.soak.lanes import never
    from tests.soak.world import World

    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, list[str]]] = {}
    with World(brokers, folder, seed) as world:
        try:
            world.run(seconds, rate, gap)
        except KeyboardInterrupt:
            print("ended early; the books are checked all the same", flush=True)
        world.heal()
        for site in world.sites:
            found[site.kind] = judge(site, SETTLED_WITHIN)
        found["all"] = {"everything was tried": never(world.events) if world.events else ["nothing went wrong"]}
        report.write(folder, world, found)
        print(summary(world.about(), [event.what for event in world.events], found), flush=True)
    return found


def summary(about: dict[str, object], events: list[str], found: dict[str, dict[str, list[str]]]) -> str:
    """The report in a few lines."""
    lines = [f"seed {about['seed']}: {about['seconds']} s, {len(events)} faults; {about['sites']}"]
    for site, promises in found.items():
        for promise, broken in promises.items():
            lines.append(f"{site}: {promise}: {'BROKEN' if broken else 'yes'}")
            lines += [f"    {one}" for one in broken[:10]]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Soak, and write the report.

    Arguments:
        arguments: the command line's.

    Returns:
        The exit status.
    """
    from celery_safe_effects.testing import RabbitMQServer
    from celery_safe_effects.testing.process import find_faketime

    parser = argparse.ArgumentParser(prog="tests/soak", description=__doc__)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long: %(default)s")
    parser.add_argument("--seed", default=uuid4().hex[:8], help="of faults and load; a new one unless given")
    parser.add_argument("--broker", default="redis,rabbitmq", help="with commas: %(default)s")
    parser.add_argument("--rate", type=float, default=4.0, help="what each site enqueues a second: %(default)s")
    parser.add_argument("--gap", type=float, default=6.0, help="seconds between two faults of a worker: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("soak-report"), help="a folder for report and logs")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=given.out / "load.log", level=logging.INFO, format="%(asctime)s %(message)s")
    brokers = given.broker.split(",")
    if "rabbitmq" in brokers and not RabbitMQServer.available():
        print("NOT SOAKED HERE: RabbitMQ; install rabbitmq-server", flush=True)
        brokers.remove("rabbitmq")
    if find_faketime() is None:
        print("NOT SOAKED HERE: wrong clocks; install libfaketime (Debian: apt-get install faketime)", flush=True)
    print(f"seed {given.seed}, {given.minutes:g} minutes", flush=True)
    found = soak(
        brokers, given.minutes * 60, seed=given.seed, folder=given.out.resolve(), rate=given.rate, gap=given.gap
    )
    print(f"written: {given.out / 'soak.json'}, {given.out / 'soak.svg'}")
    return 1 if any(broken for promises in found.values() for broken in promises.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
