"""An application of Celery alone, with which the process helpers are tested."""

from __future__ import annotations

import os
import time
from datetime import datetime, timezone

from celery import Celery

app = Celery(
    "plain",
    broker=os.environ.get("PLAIN_BROKER"),
    backend=os.environ.get("PLAIN_BACKEND", os.environ.get("PLAIN_BROKER")),
    set_as_current=False,
)
app.conf.broker_connection_retry_on_startup = True
app.conf.beat_schedule = {"tick": {"task": "plain.tick", "schedule": 0.5}}


@app.task(name="plain.pid")
def pid() -> int:
    """Tell which process runs it."""
    return os.getpid()


@app.task(name="plain.clock")
def clock() -> list[float]:
    """Tell the wall clock and the monotonic one."""
    return [datetime.now(timezone.utc).timestamp(), time.monotonic()]


@app.task(name="plain.tick")
def tick() -> None:
    """What beat sends."""
    app.backend.client.incr("ticks")


@app.task(name="plain.sleep")
def sleep(seconds: float) -> float:
    """Take a while."""
    time.sleep(seconds)
    return seconds
