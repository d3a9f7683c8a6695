"""`python3 tests/bench/simulation.py`: how many jobs a second an installation does, and what is full then.

A model of queues, fed with what one job was measured to take: a worker's main process hands messages to its children,
one after the other; a child takes its machine's processor between statements; each statement goes over the network,
takes a core of the database, and waits for the next flush where it is durable, which all that wait share. The queue is
never empty. Whatever the model leaves out (locks inside the database, caches, vacuum, the network's capacity) makes an
installation slower than it says; the first lines are the machine where the costs come from.

`--cost end=0.4` gives a cost of your own, in milliseconds; `--jobs N` how many jobs are counted.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Generator
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent


class Costs(NamedTuple):
    """Milliseconds. Of the processor while it is busy with all of them, which is twice what one alone takes.

    Attributes:
        main: a worker's main process and the broker's share, for each job.
        body, effect: a child's own part of a job, and of each of its effects.
        accept, claim, intent, outcome, end: of the database's processor; the end with its part of settling.
        flush: until a commit is on the disk.
        trip: to the database and back.
    """

    main: float = 1.09
    body: float = 0.98
    effect: float = 0.5
    accept: float = 0.5
    claim: float = 0.3
    intent: float = 0.4
    outcome: float = 0.4
    end: float = 0.45
    flush: float = 0.3
    trip: float = 0.05


class Installation(NamedTuple):
    """Machines and what runs on them.

    Attributes:
        workers, children: how many, and of each.
        cores: of each worker's machine.
        database_cores: of each database's machine; 0: everything shares the worker's.
        databases: how many; workers and jobs divide among them.
        produced: whether jobs are enqueued at the rate at which they are done.
    """

    workers: int = 1
    children: int = 8
    cores: int = 2
    database_cores: int = 0
    databases: int = 1
    produced: bool = True


class Job(NamedTuple):
    """What a job does.

    Attributes:
        effects: how many.
        provider: milliseconds that each waits.
    """

    effects: int = 0
    provider: float = 0.0


class Found(NamedTuple):
    """What was found.

    Attributes:
        rate: jobs a second.
        p50, p99: milliseconds of a run, from its claim to its end.
        busy: by resource, which part of it.
    """

    rate: float
    p50: float
    p99: float
    busy: dict[str, float]


Steps = Generator[Any, Any, None]


class Station:
    """Something that serves so many at a time, in the order in which they came."""

    def __init__(self, env: Any, places: int) -> None:
        import simpy

        self.env = env
        self.places = places
        self._queue = simpy.Resource(env, places)
        self.used = 0.0

    def serve(self, milliseconds: float) -> Steps:
        """Wait for a place, and take it for about so long."""
        took = milliseconds * random.uniform(0.5, 1.5)
        with self._queue.request() as place:
            yield place
            yield self.env.timeout(took)
        self.used += took


class Disk:
    """A log whose flushes all that wait share."""

    def __init__(self, env: Any, milliseconds: float) -> None:
        self.env = env
        self.milliseconds = milliseconds
        self.used = 0.0
        self._waiting: list[Any] = []
        self._busy = False

    def flush(self) -> Steps:
        """Wait until what was written is on the disk."""
        done = self.env.event()
        self._waiting.append(done)
        if not self._busy:
            self.env.process(self._flushes())
        yield done

    def _flushes(self) -> Steps:
        self._busy = True
        while self._waiting:
            together, self._waiting = self._waiting, []
            yield self.env.timeout(self.milliseconds)
            self.used += self.milliseconds
            for one in together:
                one.succeed()
        self._busy = False


class Model:
    """One installation at work.

    Arguments:
        installation, job, costs: what is simulated.
    """

    def __init__(self, installation: Installation, job: Job, costs: Costs) -> None:
        import simpy

        self.simpy = simpy
        self.env = simpy.Environment()
        self.job, self.costs, self.installation = job, costs, installation
        self.machines = [Station(self.env, installation.cores) for _ in range(installation.workers)]
        self.mains = [Station(self.env, 1) for _ in range(installation.workers)]
        self.processors = [
            Station(self.env, installation.database_cores) if installation.database_cores else self.machines[0]
            for _ in range(installation.databases)
        ]
        self.disks = [Disk(self.env, costs.flush) for _ in range(installation.databases)]
        self.runs: list[float] = []
        for number in range(installation.workers):
            # Celery prefetches four messages for each child.
            fetched = simpy.Store(self.env, 4 * installation.children)
            self.env.process(self._main(number, fetched))
            for _ in range(installation.children):
                self.env.process(self._child(number, fetched))

    def _main(self, number: int, fetched: Any) -> Steps:
        """The main process is one thread, and needs its machine's processor all the time that it serves."""
        while True:
            began = self.env.now
            yield from self.machines[number].serve(self.costs.main)
            self.mains[number].used += self.env.now - began
            yield fetched.put(None)

    def _child(self, number: int, fetched: Any) -> Steps:
        costs, job, machine = self.costs, self.job, self.machines[number]
        database = number % self.installation.databases
        while True:
            yield fetched.get()
            began = self.env.now
            yield from machine.serve(costs.body / 2)
            yield from self._statement(database, costs.claim)
            for _ in range(job.effects):
                yield from machine.serve(costs.effect / 2)
                yield from self._statement(database, costs.intent, durable=True)
                if job.provider:
                    yield self.env.timeout(job.provider)
                yield from machine.serve(costs.effect / 2)
                yield from self._statement(database, costs.outcome)
            yield from machine.serve(costs.body / 2)
            yield from self._statement(database, costs.end, durable=True)
            self.runs.append(self.env.now - began)
            if self.installation.produced:
                self.env.process(self._statement(database, costs.accept, durable=True))

    def _statement(self, database: int, milliseconds: float, durable: bool = False) -> Steps:
        yield self.env.timeout(self.costs.trip)
        yield from self.processors[database].serve(milliseconds)
        if durable:
            yield from self.disks[database].flush()

    def run(self, jobs: int) -> Found:
        """Go on until so many jobs are done, after a fifth as many to warm up.

        Arguments:
            jobs: how many count.
        """
        while len(self.runs) < jobs // 5:
            self.env.step()
        began, before = self.env.now, len(self.runs)
        used = self._used()
        while len(self.runs) < before + jobs:
            self.env.step()
        took = self.env.now - began
        cuts = quantiles(self.runs[before:], n=100)
        busy = {name: (spent - used[name]) / (took * places) for name, (spent, places) in self._stations().items()}
        return Found(1000 * jobs / took, cuts[49], cuts[98], busy)

    def _used(self) -> dict[str, float]:
        return {name: spent for name, (spent, _) in self._stations().items()}

    def _stations(self) -> dict[str, tuple[float, int]]:
        """What each kind of resource has done in all, and how much of it could be done at a time."""
        kinds: dict[str, list[Any]] = {"main processes": self.mains, "workers' cores": self.machines}
        if self.installation.database_cores:
            kinds["database's cores"] = self.processors
        else:
            kinds["cores"] = kinds.pop("workers' cores")
        kinds["flushes"] = self.disks
        return {
            name: (sum(one.used for one in many), sum(getattr(one, "places", 1) for one in many))
            for name, many in kinds.items()
        }


NOOP, ONE, PROVIDER = Job(), Job(1), Job(1, 50)
MEASURED = Installation(produced=False)
"""The machine and the benchmark from which the costs are: a queue that was filled before."""
SCENARIOS: dict[str, tuple[Installation, Job, dict[str, float]]] = {
    "2 cores with everything, 8 children": (MEASURED, NOOP, {}),
    "  the same, one effect": (MEASURED, ONE, {}),
    "  the same, an effect of 50 ms": (MEASURED, PROVIDER, {}),
    "database with 4 cores, 1 worker of 8": (Installation(1, 8, 2, 4), ONE, {}),
    "  4 workers of 8": (Installation(4, 8, 2, 4), ONE, {}),
    "  8 workers of 8": (Installation(8, 8, 2, 4), ONE, {}),
    "database with 16 cores, 8 workers of 8": (Installation(8, 8, 2, 16), ONE, {}),
    "  24 workers of 8": (Installation(24, 8, 2, 16), ONE, {}),
    "  48 workers of 8": (Installation(48, 8, 2, 16), ONE, {}),
    "  48 workers of 8, a disk of 2 ms": (Installation(48, 8, 2, 16), ONE, {"flush": 2.0}),
    "  48 workers of 8, 1 ms away": (Installation(48, 8, 2, 16), ONE, {"trip": 1.0}),
    "2 databases with 16 cores, 48 workers of 8": (Installation(48, 8, 2, 16, 2), ONE, {}),
    "4 databases with 4 cores, 48 workers of 8": (Installation(48, 8, 2, 4, 4), ONE, {}),
    "database with 4 cores, 4 workers of 8, 50 ms": (Installation(4, 8, 2, 4), PROVIDER, {}),
    "  4 workers of 64, 50 ms": (Installation(4, 64, 2, 4), PROVIDER, {}),
}


def main(arguments: list[str]) -> None:
    """Simulate all scenarios, and print a line for each."""
    parser = argparse.ArgumentParser(prog="tests/bench/simulation.py", description=__doc__)
    parser.add_argument("--cost", action="append", default=[], metavar="NAME=MS", help="a cost of your own")
    parser.add_argument("--jobs", type=int, default=10_000, help="counted in each scenario (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    own = {name: float(value) for name, _, value in (one.partition("=") for one in given.cost)}
    try:
        costs = Costs()._replace(**own)
    except ValueError as exc:
        parser.error(f"{exc}; costs are {', '.join(Costs._fields)}")
    print(f"{'':46}{'jobs/s':>8}{'p50 ms':>8}{'p99 ms':>8}  how full")
    for name, (installation, job, changed) in SCENARIOS.items():
        random.seed(given.seed)
        found = Model(installation, job, costs._replace(**changed)).run(given.jobs)
        shown = ", ".join(f"{what} {part:.0%}" for what, part in sorted(found.busy.items(), key=lambda i: -i[1]))
        print(f"{name:46}{found.rate:8,.0f}{found.p50:8.1f}{found.p99:8.1f}  {shown}", flush=True)


if __name__ == "__main__":
    try:
        import simpy  # noqa: F401
    except ImportError:
        sys.path.insert(0, str(ROOT))
        from tests.bench.environment import installed

        python = installed(ROOT / ".venv-simulation", Path(__file__).with_suffix(".txt"))
        if python is None:
            sys.exit("error: simpy cannot be installed here")
        os.execv(python, [str(python), *sys.argv])
    main(sys.argv[1:])
