"""Ours: the same task as a SafeTask, each effect with its intent and its outcome."""

from __future__ import annotations

import os

from celery_safe_effects import Operation, SafeEffects, SafeTask
from celery_safe_effects import effect as safe_effect
from tests.bench.systems.celery_app import make
from tests.bench.systems.work import do, effect

app = make("bench_safe", safe_effects_database_url=os.environ["BENCH_DATABASE"])
safe = SafeEffects(app)


@safe_effect(idempotent_for=86400)
def outside(op: Operation, seconds: float) -> int:
    """The effect."""
    return effect(seconds)


@app.task(base=SafeTask, name="bench.job", effects=[outside])
def job(kind: str, since: float = 0.0) -> None:
    """Do the effects of a kind of job."""
    do(kind, outside, since)


def prepare() -> None:
    """Make the schema."""
    safe.upgrade()


def enqueue(kind: str, count: int, bulk: bool) -> None:
    """Enqueue one by one, or many at once."""
    if bulk:
        found = safe.enqueue_many(job.s(kind) for _ in range(count))
        assert {one.status for one in found} == {"accepted"}
    else:
        for _ in range(count):
            job.apply_async((kind,))
