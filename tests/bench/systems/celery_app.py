"""What both sides have in common: the app, and its settings."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery


def make(name: str, **conf: Any) -> Celery:
    """An app of the benchmark.

    Arguments:
        name: the app's.
        conf: settings that the other side does not have.
    """
    app = Celery(name, broker=os.environ["BENCH_BROKER"])
    app.conf.update(worker_enable_remote_control=False, broker_connection_retry_on_startup=True, **conf)
    if os.environ.get("BENCH_RESULTS") == "1":
        app.conf.result_backend = os.environ["BENCH_BACKEND"]
    else:
        app.conf.task_ignore_result = True
    return app
