"""Plain Celery: the task does its work, and what happens in a crash is nobody's business."""

from __future__ import annotations

from tests.bench.systems.celery_app import make
from tests.bench.systems.work import do, effect

app = make("bench_plain", task_acks_late=True)


@app.task(name="bench.job")
def job(kind: str, since: float = 0.0) -> None:
    """Do the effects of a kind of job."""
    do(kind, effect, since)


def prepare() -> None:
    """Nothing to prepare."""


def enqueue(kind: str, count: int, bulk: bool) -> None:
    """Send messages; there is no way to send many at once."""
    with app.producer_or_acquire() as producer:
        for _ in range(count):
            job.apply_async((kind,), producer=producer)
