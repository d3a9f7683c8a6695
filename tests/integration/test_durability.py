"""Invariant 12, on the server's own WAL positions: what waits for the disk, and what does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest

from celery_safe_effects.store import migrate
from celery_safe_effects.store.hot import Store
from celery_safe_effects.testing import EmbeddedPostgres
from tests.support.protocol import Claimed, Protocol, make_store


@pytest.fixture(scope="module")
def lazy_postgres() -> Iterator[EmbeddedPostgres]:
    """Nothing is flushed by the server on its own account: only commits that wait are."""
    settings = {"wal_writer_delay": "10s", "wal_writer_flush_after": "1GB", "autovacuum": "off"}
    with EmbeddedPostgres(settings=settings) as server:
        yield server


@pytest.fixture
def database_url(lazy_postgres: EmbeddedPostgres) -> Iterator[str]:
    url = lazy_postgres.create_database("durability")
    migrate.upgrade(url)
    yield url
    lazy_postgres.drop_database("durability")


Flushed = Callable[[], bool]


@pytest.fixture
def flushed(database_url: str) -> Iterator[Flushed]:
    """Whether everything written so far is on disk."""
    with psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True) as conn:

        def look() -> bool:
            row = conn.execute("SELECT pg_current_wal_flush_lsn() >= pg_current_wal_insert_lsn()").fetchone()
            assert row is not None
            return bool(row[0])

        yield look


def steps(store: Store, flushed: Flushed) -> dict[str, bool]:
    """Run a job with one effect; for each statement, whether it was on disk when it returned."""
    actor = Protocol(store)
    seen: dict[str, bool] = {}
    job = actor.accept()
    seen["accept"] = flushed()
    claimed = actor.claim(job)
    assert isinstance(claimed, Claimed)
    seen["claim"] = flushed()
    nonce = actor.intent(claimed)
    assert nonce is not None
    seen["intent"] = flushed()
    actor.outcome(claimed, nonce, statement="OUTCOME_ASYNC")
    seen["outcome with a key or a lookup"] = flushed()
    store.renew([(claimed.lease, 30.0)])
    seen["renewal"] = flushed()
    nonce = actor.intent(claimed, "2", has_lookup=False)
    assert nonce is not None
    actor.outcome(claimed, nonce, step="2")
    seen["outcome with neither"] = flushed()
    nonce = actor.intent(claimed, "3", repeatable=True)
    assert nonce is not None
    seen["repeatable intent"] = flushed()
    actor.outcome(claimed, nonce, step="3", statement="OUTCOME_ASYNC")
    assert actor.leave(claimed) is not None
    seen["end"] = flushed()
    store.settle([(job, claimed.lease.fence)])
    seen["settling"] = flushed()
    return seen


def test_what_must_be_durable_is_flushed_and_the_rest_is_not(database_url: str, flushed: Flushed) -> None:
    store = make_store(database_url)
    steps(store, flushed)  # catalogue reads and first statements write WAL of their own
    wanted = {
        "accept": True,
        "claim": False,
        "intent": True,
        "outcome with a key or a lookup": False,
        "renewal": False,
        "outcome with neither": True,
        "repeatable intent": False,
        "end": True,
        "settling": False,
    }
    # Now and then, the server writes or flushes something of its own in between.
    seen = [steps(store, flushed) for _ in range(3)]
    assert wanted in seen
    store.connections.close()


def test_strict_durability_waits_each_time(database_url: str, flushed: Flushed) -> None:
    store = make_store(database_url, strict_durability=True)
    steps(store, flushed)
    seen = [steps(store, flushed) for _ in range(3)]
    assert any(all(one.values()) for one in seen), seen
    store.connections.close()
