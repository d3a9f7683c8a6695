"""DBOS: a queued workflow whose effects are steps. One process, a thread for each job that runs."""

from __future__ import annotations

import os
import threading

from dbos import DBOS, DBOSClient, DBOSConfig
from work import do, effect

URL = os.environ["BENCH_DATABASE"].replace("+psycopg", "")
CONCURRENCY = int(os.environ.get("BENCH_CONCURRENCY", "8"))


@DBOS.step()
def outside(seconds: float) -> int:
    """The effect."""
    answer: int = effect(seconds)
    return answer


@DBOS.workflow(name="job")
def job(kind: str, since: float = 0.0) -> None:
    """Do the effects of a kind of job."""
    do(kind, outside, since)


def _launch() -> None:
    config: DBOSConfig = {
        "name": "bench",
        "system_database_url": URL,
        "application_version": "1",
        "log_level": "ERROR",
        "sys_db_pool_size": 20,
    }
    DBOS(config=config)
    DBOS.launch()
    # Asked more often than by default (1 s), or it would wait for work most of the time.
    DBOS.register_queue("bench", worker_concurrency=CONCURRENCY, polling_interval_sec=0.01)


def prepare() -> None:
    """Make the schema."""
    _launch()
    DBOS.destroy()


def enqueue(kind: str, count: int, bulk: bool) -> None:
    """Enqueue workflows by a client."""
    client = DBOSClient(system_database_url=URL)
    for _ in range(count):
        client.enqueue({"queue_name": "bench", "workflow_name": "job", "app_version": "1"}, kind)
    client.destroy()


def worker() -> None:
    """Run until killed."""
    _launch()
    threading.Event().wait()
