"""The doctor beside real workers, and a worker on a database that loses what it was told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery

from celery_safe_effects.testing import EmbeddedPostgres, eventually
from tests.support.brokers import Broker
from tests.support.processes import Workers
from tests.support.services import Sql


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    return redis_broker


@pytest.mark.slow
def test_a_worker_that_tells_nothing_of_itself_is_found(app: Celery, workers: Workers, sql: Sql) -> None:
    workers("a")
    eventually(lambda: sql("SELECT node FROM worker"), 20, message="the worker said that it is there")

    def codes() -> set[str]:
        return {finding.code for finding in app.safe_effects.doctor()}

    found = codes()
    assert not found & {"worker_without_library", "task_unknown_to_workers", "worker_version", "not_checked"}
    assert not found & {"broker_unavailable", "connections", "queue_unconsumed", "clock", "pooler_statement_mode"}
    # As if it had another database, or code without the library.
    sql("ALTER TABLE worker RENAME TO hidden")
    sql("CREATE TABLE worker (LIKE hidden INCLUDING ALL)")
    sql("CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
    sql("CREATE TRIGGER nothing BEFORE INSERT ON worker FOR EACH ROW EXECUTE FUNCTION nothing()")
    eventually(lambda: "worker_without_library" in codes(), 10, message="the worker answers in time, and is found")


@pytest.fixture
def forgetful_postgres(own_postgres: EmbeddedPostgres) -> Iterator[EmbeddedPostgres]:
    own_postgres.configure(fsync=False)
    yield own_postgres
    own_postgres.configure(fsync=True)


def test_no_worker_starts_on_a_database_without_fsync(
    forgetful_postgres: EmbeddedPostgres, workers: Workers, app: Celery
) -> None:
    eventually(lambda: app.safe_effects.store.rows("DOCTOR_DATABASE")[0].fsync == "off", 10, message="fsync is off")
    refused = workers("a", ready=False)
    assert refused.wait(30) != 0
    assert "refuses to start this worker" in refused.log()
    assert "[fsync_off]" in refused.log()
    assert "set fsync = on in postgresql.conf" in refused.log()
    workers("b", conf={"safe_effects_accept_risks": ["fsync_off"]})
