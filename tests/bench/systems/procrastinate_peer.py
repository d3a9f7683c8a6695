"""procrastinate: a queue in PostgreSQL; it has no effects that it would remember."""

from __future__ import annotations

import asyncio
import os

import procrastinate
from work import do, effect

URL = os.environ["BENCH_DATABASE"].replace("+psycopg", "")
CONCURRENCY = int(os.environ.get("BENCH_CONCURRENCY", "8"))
app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=URL, min_size=2, max_size=CONCURRENCY + 4))


@app.task(name="job", queue="bench")
def job(kind: str, since: float = 0.0) -> None:
    """Do the effects of a kind of job."""
    do(kind, effect, since)


async def _prepare() -> None:
    async with app.open_async():
        await app.schema_manager.apply_schema_async()


def prepare() -> None:
    """Make the schema."""
    asyncio.run(_prepare())


async def _enqueue(kind: str, count: int, bulk: bool) -> None:
    async with app.open_async():
        if bulk:
            await job.batch_defer_async(*({"kind": kind} for _ in range(count)))
        else:
            for _ in range(count):
                await job.defer_async(kind=kind)


def enqueue(kind: str, count: int, bulk: bool) -> None:
    """Enqueue one by one, or many at once."""
    asyncio.run(_enqueue(kind, count, bulk))


async def _work() -> None:
    async with app.open_async():
        await app.run_worker_async(queues=["bench"], concurrency=CONCURRENCY, delete_jobs="never")


def worker() -> None:
    """Run until killed."""
    asyncio.run(_work())
