"""`python3 tests/bench_enqueue.py`: how much faster `enqueue_many` is than single calls, on servers of its own.

No test, since a busy machine says little: run it on a quiet one. Rounds of both take turns, and the median of their
ratios counts; exit status 1 when it is under `--least`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__" and "--inside" not in sys.argv:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "example_project"))
    import _bootstrap  # type: ignore[import-not-found]

    _bootstrap.run("tests.bench_enqueue", ["--inside", *sys.argv[1:]])


@contextmanager
def shop(broker: str) -> Iterator[Any]:
    """An app with a task, a fresh database, and a broker."""
    from celery import Celery

    from celery_safe_effects import SafeEffects, SafeTask
    from celery_safe_effects.testing import EmbeddedPostgres, EmbeddedRedis, RabbitMQServer

    with ExitStack() as stack:
        database = stack.enter_context(EmbeddedPostgres()).create_database("bench")
        app = Celery("bench", set_as_current=False)
        if broker == "redis":
            app.conf.broker_url = stack.enter_context(EmbeddedRedis()).url(0)
        elif broker == "rabbitmq":
            server = stack.enter_context(RabbitMQServer())
            server.add_vhost("bench")
            app.conf.broker_url = server.url("bench")
        else:
            app.conf.broker_url = "memory://"
        app.conf.update(safe_effects_database_url=database, task_ignore_result=True)
        safe = SafeEffects(app)
        safe.upgrade()
        stack.callback(safe.close)

        @app.task(base=SafeTask, shared=False, name="bench.bill", effects=[])
        def bill(customer: str, cents: int) -> None:
            """Does nothing."""

        yield safe, bill


def rounds(safe: Any, bill: Any, single: int, many: int, times: int) -> Iterator[tuple[float, float]]:
    """Seconds for a job, each way, as often as asked; the first ones warm up and are left out."""
    for number in range(times + 1):
        began = time.perf_counter()
        for n in range(single):
            bill.apply_async((f"cus_{n}", n), idempotency_key=f"single-{number}-{n}")
        alone = (time.perf_counter() - began) / single
        began = time.perf_counter()
        found = safe.enqueue_many(bill.s(f"cus_{n}", n).set(idempotency_key=f"many-{number}-{n}") for n in range(many))
        together = (time.perf_counter() - began) / many
        if {one.status for one in found} != {"accepted"}:
            raise SystemExit("not everything was accepted")
        if number:
            yield alone, together


def main(arguments: Sequence[str]) -> int:
    """Measure, and print what was measured.

    Args:
        arguments: the command line's.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="tests/bench_enqueue.py", description=__doc__)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--broker", choices=("redis", "rabbitmq", "memory"), default="redis")
    parser.add_argument("--single", type=int, default=500, help="single calls a round")
    parser.add_argument("--many", type=int, default=5000, help="jobs of one enqueue_many")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--least", type=float, default=10.0, help="the ratio that is promised")
    given = parser.parse_args(arguments)
    ratios = []
    with shop(given.broker) as (safe, bill):
        for alone, together in rounds(safe, bill, given.single, given.many, given.rounds):
            ratios.append(alone / together)
            print(f"single {1 / alone:7,.0f} jobs/s   many {1 / together:7,.0f} jobs/s   ratio {ratios[-1]:5.1f}")
    print(f"{given.broker}: enqueue_many is {median(ratios):.1f} times as fast (the median of {len(ratios)} rounds)")
    return 0 if median(ratios) >= given.least else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
