"""Plays histories, on a server of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from celery_safe_effects.store import migrate
from celery_safe_effects.testing import EmbeddedPostgres
from tests.machine.machine import Machine
from tests.support.protocol import make_store

STEPS = 30


@contextmanager
def server() -> Iterator[type[Machine]]:
    """The machine on a PostgreSQL server which need not survive a crash."""
    quick: dict[str, str | int | bool] = {
        "fsync": False,
        "synchronous_commit": "off",
        "full_page_writes": False,
        "autovacuum_naptime": "5s",
    }
    with EmbeddedPostgres(settings={**quick, "jit": False}) as postgres:
        url = postgres.create_database("machine")
        migrate.upgrade(url)
        Machine.store = make_store(url, statement_timeout=30)
        Machine.counts = Counter()
        with psycopg.connect(postgres.dsn("machine"), autocommit=True) as Machine.sql:
            Machine.sql.prepare_threshold = 0
            yield Machine
        Machine.store.connections.close()


def run(machine: type[Machine], histories: int, chosen: int, *phases: Phase) -> Counter[str]:
    """Play histories.

    Arguments:
        machine: the machine on its server.
        histories: how many, at least.
        chosen: the seed of every choice.
        phases: Hypothesis' own.

    Returns:
        What happened in them, how often.

    Raises:
        AssertionError, psycopg.Error: something did not hold.
    """
    machine.counts = Counter()
    how = settings(
        max_examples=histories,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        print_blob=False,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(chosen)(machine), settings=how)
    return machine.counts
