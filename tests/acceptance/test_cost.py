"""What a job costs, as the server sees it: the statements in its own log, and whether each of them waits for the disk.

That a statement which does not say ``synchronous_commit`` is flushed, and one which does is not, is shown on the
server's own WAL positions in tests/integration/test_durability.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.engine.lease import LeaseKeeper
from celery_safe_effects.store import migrate
from celery_safe_effects.testing import EmbeddedPostgres, eventually
from tests.support.brokers import Broker
from tests.support.processes import Workers
from tests.support.services import Sql

JOBS = 20


@pytest.fixture(scope="module")
def logging_postgres() -> Iterator[EmbeddedPostgres]:
    settings: dict[str, Any] = {"log_statement": "all", "log_line_prefix": "<%p %a> ", "log_min_messages": "log"}
    with EmbeddedPostgres(settings=settings) as server:
        yield server


@pytest.fixture
def database_url(logging_postgres: EmbeddedPostgres) -> Iterator[str]:
    url = logging_postgres.create_database("cost")
    migrate.upgrade(url)
    yield url
    logging_postgres.drop_database("cost")


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    """The broker does not change what the database is asked."""
    return redis_broker


class Seen:
    """The statements in the server's log since the last look."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.at = log.stat().st_size

    def take(self) -> list[str]:
        with self.log.open("rb") as file:
            file.seek(self.at)
            text = file.read().decode()
            self.at += len(text.encode())
        found = re.findall(r"<\d+ celery-safe-effects> LOG:  (?:execute [^:]*|statement): (.*?)(?=\n<|\Z)", text, re.S)
        return [" ".join(statement.split()) for statement in found]


def kind(statement: str) -> str:
    """Which statement of the protocol a text is."""
    marks = {
        'INSERT INTO "safe_effects".job AS': "accept",
        "SET status = 'running'": "claim",
        'INSERT INTO "safe_effects".operation AS o': "intent",
        'UPDATE "safe_effects".operation o SET status = CASE WHEN o.in_doubt': "outcome",
        "held = $": "end",
        "SET settled_at": "settle",
        "lease_until = clock_timestamp() + l.ttl": "renew",
        "FOR NO KEY UPDATE SKIP LOCKED": "maintenance",
        "maintenance": "maintenance",
        "SELECT DISTINCT o.process": "maintenance",
        "known_task": "start",
        "schema_version": "start",
        "pg_backend_pid()": "connect",
    }
    return next((name for mark, name in marks.items() if mark in statement), statement)


def durable(statement: str) -> bool:
    return "synchronous_commit" not in statement


def run(app: Celery, task: str, args: tuple[Any, ...], sql: Sql) -> None:
    for _ in range(JOBS):
        app.tasks[task].apply_async(args)
    eventually(
        lambda: (
            sql("SELECT count(*) AS n FROM jobs WHERE status = 'succeeded' AND settled_at IS NOT NULL")[0]["n"] % JOBS
            == 0
            and not sql("SELECT id FROM jobs WHERE settled_at IS NULL")
        ),
        timeout=60,
        message="the jobs did not end",
    )


@pytest.mark.parametrize(
    ("task", "args", "commits"),
    [
        (
            "tests.charge",
            ("cus_1", 500),
            {"accept": True, "claim": False, "intent": True, "outcome": False, "end": True},
        ),
        ("tests.pure", (1,), {"accept": True, "claim": False, "end": True}),
        ("tests.whole_body", ("cus_1", 500), {"accept": True, "claim": True, "outcome": True}),
    ],
)
def test_a_job_takes_these_statements_and_no_other(
    app: Celery,
    workers: Workers,
    sql: Sql,
    logging_postgres: EmbeddedPostgres,
    task: str,
    args: tuple[Any, ...],
    commits: dict[str, bool],
) -> None:
    """Steady state: 1 round trip in the producer; claim, intent, outcome, end in the worker; the rest is batched.

    A whole body's claim carries its intent and so waits for the disk; its outcome is the job's end.
    """
    # Neither the sweep nor a renewal falls into the measured stretch.
    conf = {"safe_effects_lease_ttl": 120, "safe_effects_sweep_interval": 300, "safe_effects_reconcile_interval": 300}
    workers("cost", conf=conf)
    run(app, task, args, sql)  # connections are open and statements prepared from here on
    seen = Seen(logging_postgres.log_path)
    began = time.monotonic()
    run(app, task, args, sql)
    took = time.monotonic() - began
    statements = seen.take()
    counts: dict[str, int] = {}
    for statement in statements:
        counts[kind(statement)] = counts.get(kind(statement), 0) + 1
    assert "settle" in counts, counts
    counts.pop("connect", None)  # the thread that settles opens its own when the first is in use
    settles = counts.pop("settle")
    most = max(JOBS / 2, took / LeaseKeeper.TICK + 1)
    assert 1 <= settles <= most, f"settling is not batched: {settles} statements for {JOBS} jobs in {took:.1f} s"
    assert counts == dict.fromkeys(commits, JOBS)
    for statement in statements:
        if kind(statement) in commits:
            assert durable(statement) is commits[kind(statement)], statement
    # Each its own transaction: nobody opened a longer one.
    assert not [s for s in statements if re.match(r"(BEGIN|COMMIT|START)", s)]
