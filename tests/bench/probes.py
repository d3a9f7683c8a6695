"""What is no rate: latencies beside their floor, memory, and what an idle worker asks of the database."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import psycopg

from celery_safe_effects.config import Config
from tests.bench.measure import ROOT, Bench, Cell, _descendants, _uss

CALLS: Final = 300
PAUSE: Final = 0.05
"""Seconds of idling before a call that counts as cold."""
SETTLING: Final = 8.0
"""Seconds in which a worker has done what it does at its start."""
IDLE: Final = 30.0
"""Seconds of watching."""


def probes(bench: Bench) -> dict[str, float]:
    """All of them.

    Arguments:
        bench: the servers.

    Returns:
        Figures by name; times are milliseconds.
    """
    found: dict[str, float] = {}
    cell = Cell("noop", 2, "redis")
    with bench.stage("safe", cell) as env:
        bench.run("safe", "prepare", env=env)
        found |= _inside("overhead", env)
        found |= _inside("enqueue", env)
    for name in ("plain", "safe"):
        with bench.stage(name, cell) as env:
            bench.run(name, "prepare", env=env)
            with bench.worker(name, cell, env) as process:
                found |= {f"{name}: {what}": value for what, value in _inside("latency", env, name).items()}
                children = [_uss(pid) for pid in _descendants(process.pid)]
                found[f"{name}: USS of a child, MB"] = median(children) if children else 0.0
    found["safe: statements of an idle worker a heartbeat interval"] = _idle(bench, cell)
    return found


def _inside(what: str, env: dict[str, str], *more: str) -> dict[str, float]:
    """Run a probe in a process of its own, where the app can be imported."""
    command = [sys.executable, "-m", "tests.bench.probes", what, *more]
    done = subprocess.run(command, env=env, cwd=ROOT, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _idle(bench: Bench, cell: Cell) -> float:
    """Statements of a worker that has nothing to do, for each heartbeat interval, by the server's own log.

    Sweep and reconciliation are an installation's, not a worker's: here a beat has just run them.
    """
    with bench.stage("safe", cell) as env:
        bench.run("safe", "prepare", env=env)
        database = env["BENCH_DATABASE"].rpartition("/")[2]
        with psycopg.connect(bench.postgres.dsn(database)) as connection:
            connection.execute(
                "UPDATE safe_effects.maintenance SET last_by = 'beat', last_started_at = now() + interval '1 hour'"
            )
            connection.execute(f"ALTER DATABASE {database} SET log_statement = 'all'".encode())
        with bench.worker("safe", cell, env):
            time.sleep(SETTLING)
            before = bench.postgres.log_path.stat().st_size
            time.sleep(IDLE)
            with bench.postgres.log_path.open() as log:
                log.seek(before)
                said = len(re.findall(r"LOG:  (?:execute|statement)", log.read()))
    return said / (IDLE / Config.heartbeat_interval)


# -- inside an app's process -------------------------------------------------------------------------------------------


def _said(name: str, seconds: list[float]) -> dict[str, float]:
    cuts = quantiles(seconds, n=100)
    return {f"{name} p50": cuts[49] * 1000, f"{name} p99": cuts[98] * 1000}


def _times(call: Callable[[int], Any], pause: float = 0.0, calls: int = CALLS) -> list[float]:
    found = []
    for number in range(calls):
        if pause:
            time.sleep(pause)
        began = time.perf_counter()
        call(number)
        found.append(time.perf_counter() - began)
    return found


def overhead() -> dict[str, float]:
    """An effect against the same function called bare, and against the durable commits that it cannot do without."""
    from celery_safe_effects import SafeTask
    from tests.bench.systems import safe as ours

    found: dict[str, float] = {}
    seen: dict[str, list[float]] = {}

    @ours.app.task(base=SafeTask, name="bench.probe", effects=[ours.outside])
    def probe() -> None:
        _times(lambda _: ours.outside(0.0), calls=20)
        seen["hot"] = _times(lambda _: ours.outside(0.0))
        seen["cold"] = _times(lambda _: ours.outside(0.0), PAUSE, calls=100)

    probe.apply(throw=True)
    for how, seconds in seen.items():
        found |= _said(f"effect, {how}", seconds)
    floor = _floor(os.environ["BENCH_DATABASE"].replace("+psycopg", ""))
    found |= _said("floor of an effect, hot", floor["hot"]) | _said("floor of an effect, cold", floor["cold"])
    found["effect / floor, hot p50"] = found["effect, hot p50"] / found["floor of an effect, hot p50"]
    return found


def _floor(dsn: str) -> dict[str, list[float]]:
    """A durable commit for the intent and one for the outcome, as bare prepared statements of rows as small."""
    with psycopg.connect(dsn, autocommit=True, prepare_threshold=0) as connection:
        connection.execute("CREATE TABLE floor (key text PRIMARY KEY, job text, status text, args json, outcome json)")

        def pair(number: int, name: str) -> None:
            key = f"{name}:{number}"
            connection.execute(
                "INSERT INTO floor (key, job, status, args) VALUES (%s, %s, 'intent_recorded', %s)",
                [key, name, "[0.0]"],
            )
            connection.execute("UPDATE floor SET status = 'succeeded', outcome = %s WHERE key = %s", ["1", key])

        _times(lambda number: pair(number, "warm"), calls=20)
        return {
            "hot": _times(lambda number: pair(number, "hot")),
            "cold": _times(lambda number: pair(number, "cold"), PAUSE, calls=100),
        }


def enqueue() -> dict[str, float]:
    """Single calls and many at once, in one process, as `tests/bench_enqueue.py` measures them."""
    from celery_safe_effects import SafeTask
    from tests.bench.systems import safe as ours
    from tests.bench_enqueue import rounds

    @ours.app.task(base=SafeTask, name="bench.bill", effects=[])
    def bill(customer: str, cents: int) -> None:
        """Does nothing."""

    found = list(rounds(ours.safe, bill, single=500, many=5000, times=3))
    single, many = (1 / median(times) for times in zip(*found, strict=True))
    return {
        "enqueue, single calls a second": single,
        "enqueue_many, jobs a second": many,
        "many / single": many / single,
    }


def latency(name: str) -> dict[str, float]:
    """From the call of ``apply_async`` to the first line of the body, on a worker that idles."""
    import importlib

    from tests.bench.systems.work import counted

    system = importlib.import_module(f"tests.bench.systems.{name}")
    tally = Path(os.environ["BENCH_TALLY"])
    found = []
    for number in range(120):
        before = counted(tally)
        system.job.apply_async(("noop", time.monotonic()))
        give_up = time.monotonic() + 20
        while counted(tally)[0] == before[0] and time.monotonic() < give_up:
            time.sleep(0.001)
        if number >= 20:
            found.append(counted(tally)[1] - before[1])
    return _said("enqueue to end of body", found)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
