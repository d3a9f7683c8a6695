"""Retention: finished jobs go, parked ones stay, ids and keys stay taken."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from celery_safe_effects.engine.prune import Pruner
from celery_safe_effects.store.hot import Store
from tests.support.protocol import Claimed, Protocol, make_store
from tests.support.services import Sql


@pytest.fixture
def store(database_url: str) -> Any:
    made = make_store(database_url, retention={"succeeded": 3600, "failed": 7200, "cancelled": 7200})
    yield made
    made.connections.close()


def finished(store: Store, sql: Sql, hours: float, **accepted: Any) -> str:
    """A job that succeeded with one effect so many hours ago."""
    actor = Protocol(store)
    job = actor.accept(**accepted)
    claimed = actor.claim(job)
    assert isinstance(claimed, Claimed)
    nonce = actor.intent(claimed)
    assert nonce is not None
    actor.outcome(claimed, nonce)
    actor.leave(claimed)
    age(sql, job, hours)
    return job


def age(sql: Sql, job: str, hours: float) -> None:
    """Make a job's end so many hours old; the triggers would not let anybody do that."""
    sql("ALTER TABLE job DISABLE TRIGGER USER")
    sql("UPDATE job SET finished_at = finished_at - %s * interval '1 h' WHERE id = %s", hours, job)
    sql("ALTER TABLE job ENABLE TRIGGER USER")


def test_what_is_past_its_retention_goes_with_operations_and_log(store: Store, sql: Sql) -> None:
    old, young = finished(store, sql, 2, key="k-old"), finished(store, sql, 0.5)
    assert Pruner(store).run("test").jobs == 1
    assert [r["id"] for r in sql("SELECT id FROM jobs")] == [young]
    for view in ("operations", "transitions"):
        assert {r["job_id"] for r in sql(f"SELECT job_id FROM {view}")} == {young}
    assert [r["id"] for r in sql("SELECT id FROM tombstone")] == [old]


def test_a_parked_job_is_never_pruned(store: Store, sql: Sql) -> None:
    actor = Protocol(store)
    actor.parked()
    sql("ALTER TABLE job DISABLE TRIGGER USER")
    sql("UPDATE job SET created_at = created_at - interval '1 year'")
    sql("ALTER TABLE job ENABLE TRIGGER USER")
    assert Pruner(store).run("test").jobs == 0
    assert [r["status"] for r in sql("SELECT status FROM jobs")] == ["unknown"]
    with pytest.raises(psycopg.Error, match="only finished jobs"):
        sql("DELETE FROM job")


def test_an_operation_outlives_its_retention_while_the_provider_retains_its_key(store: Store, sql: Sql) -> None:
    actor = Protocol(store)
    job = actor.accept()
    claimed = actor.claim(job)
    assert claimed is not None
    nonce = actor.intent(claimed, idempotent_for=86400.0)
    assert nonce is not None
    actor.outcome(claimed, nonce)
    actor.leave(claimed)
    age(sql, job, 20)
    assert Pruner(store).run("test").jobs == 0


@pytest.mark.parametrize("by", ["id", "key"])
def test_a_tombstone_keeps_id_and_key_taken_until_it_goes(store: Store, sql: Sql, by: str) -> None:
    job = finished(store, sql, 2, key="k")
    Pruner(store).run("test")
    again: dict[str, Any] = {"job_id": job} if by == "id" else {"key": "k"}
    with pytest.raises(AssertionError):
        Protocol(store).accept(**again)
    sql("UPDATE tombstone SET pruned_at = pruned_at - interval '31 days'")
    assert Pruner(store).run("test").tombstones == 1
    Protocol(store).accept(**again)


def test_more_than_a_batch_is_pruned_in_batches(store: Store, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pruner, "BATCH", 3)
    for _ in range(7):
        finished(store, sql, 2)
    assert Pruner(store).run("test").jobs == 7
    assert sql("SELECT id FROM jobs") == []
