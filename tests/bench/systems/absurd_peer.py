"""Absurd: a durable task in PostgreSQL whose effects are steps. One process; its threads claim in batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psycopg
from absurd_sdk import Absurd
from work import KINDS, done, effect

URL = os.environ["BENCH_DATABASE"].replace("+psycopg", "")
CONCURRENCY = int(os.environ.get("BENCH_CONCURRENCY", "8"))


def _app() -> Any:
    app = Absurd(URL, queue_name="bench")

    @app.register_task(name="job")
    def job(params: Any, ctx: Any) -> None:
        times, seconds = KINDS[params["kind"]]
        for number in range(times):
            ctx.step(f"effect-{number}", lambda: effect(seconds))
        done(params.get("since", 0.0))

    return app


def prepare() -> None:
    """Install the schema, which the SDK does not bring along."""
    with psycopg.connect(URL, autocommit=True) as connection:
        connection.execute(Path(os.environ["BENCH_ABSURD_SQL"]).read_text())
    _app().create_queue("bench")


def enqueue(kind: str, count: int, bulk: bool) -> None:
    """Spawn tasks."""
    app = _app()
    for _ in range(count):
        app.spawn("job", {"kind": kind})


def worker() -> None:
    """Run until killed."""
    _app().start_worker(concurrency=CONCURRENCY, batch_size=CONCURRENCY, poll_interval=0.05)
