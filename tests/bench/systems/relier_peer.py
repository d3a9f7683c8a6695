"""relier: Celery on Redis with its own app, which acknowledges late, prefetches one and records that a task started."""

from __future__ import annotations

import os
import sys

from relier import rl_task
from work import do, effect

CONCURRENCY = os.environ.get("BENCH_CONCURRENCY", "8")


@rl_task(queue="default", idempotent=False)
def job(kind: str, since: float = 0.0) -> None:
    """Do the effects of a kind of job."""
    do(kind, effect, since)


def prepare() -> None:
    """Nothing to prepare."""


def enqueue(kind: str, count: int, bulk: bool) -> None:
    """Push tasks."""
    for _ in range(count):
        job.push(kind=kind)


def worker() -> None:
    """Become the worker that its documentation starts."""
    command = [
        "celery",
        "-A",
        "relier.tasks.app",
        "worker",
        "-c",
        CONCURRENCY,
        "-Q",
        "default",
        "--include=relier_peer",
    ]
    os.execv(sys.executable, [sys.executable, "-m", *command, "-l", "error"])
