"""Bad input: each a clear error; nothing is lost, nothing is half-written, nothing is done twice."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects import AcceptanceUnknown, IdempotencyConflict
from celery_safe_effects.errors import (
    ConfigurationError,
    PayloadInvalid,
    PayloadTooLarge,
    SchemaMismatch,
    StoreUnavailable,
)
from celery_safe_effects.testing import EmbeddedPostgres, WorkerProcess, eventually
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.processes import Workers
from tests.support.services import Sql


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    return redis_broker


def refused(workers: Workers, **conf: Any) -> str:
    """Start a worker that must refuse; its log."""
    worker = workers("refused", conf=conf, ready=False)
    assert worker.wait(timeout=30) != 0
    return worker.log()


# -- the database ------------------------------------------------------------------------------------------------------


def test_an_unreachable_database(app: Celery, app_conf: dict[str, Any], workers: Workers) -> None:
    url = "postgresql+psycopg://postgres@127.0.0.1:1/nowhere"
    assert "cannot connect to PostgreSQL" in refused(workers, safe_effects_database_url=url)
    app.conf.safe_effects_database_url = url
    before = time.monotonic()
    with pytest.raises(StoreUnavailable, match="safe_effects_database_url"):
        app.tasks["tests.pure"].delay(1)
    assert time.monotonic() - before < 6


@pytest.mark.parametrize("url", ["mysql://localhost/x", "postgresql+psycopg://user:p%zz@host:port/x"])
def test_a_wrong_url(app: Celery, workers: Workers, url: str) -> None:
    assert "safe_effects_database_url" in refused(workers, safe_effects_database_url=url)
    app.conf.safe_effects_database_url = url
    with pytest.raises(ConfigurationError, match="safe_effects_database_url"):
        app.tasks["tests.pure"].delay(1)


def test_protocol_1(app: Celery, workers: Workers, sql: Sql, broker: Broker) -> None:
    """Its messages have no headers to say which row they belong to."""
    assert "task_protocol must be 2" in refused(workers, task_protocol=1)
    app.conf.task_protocol = 1
    with pytest.raises(ConfigurationError, match="task_protocol"):
        app.tasks["tests.pure"].delay(1)
    app.tasks["tests.plain"].delay(1)
    assert (sql("SELECT id FROM jobs"), broker.depth()) == ([], 1)


def test_a_missing_schema(app: Celery, workers: Workers, empty_database_url: str, broker: Broker) -> None:
    log = refused(workers, safe_effects_database_url=empty_database_url)
    assert "safe-effects upgrade" in log
    app.conf.safe_effects_database_url = empty_database_url
    with pytest.raises(SchemaMismatch, match="safe-effects upgrade"):
        app.tasks["tests.pure"].delay(1)
    assert broker.depth() == 0


@pytest.mark.parametrize(("version", "words"), [(99, "upgrade the package"), (0, "safe-effects upgrade")])
def test_a_newer_or_older_schema(workers: Workers, sql: Sql, version: int, words: str) -> None:
    (latest,) = sql("SELECT max(version) AS version FROM schema_version")
    query = "UPDATE schema_version SET version = %s, oldest_code = greatest(%s, 1) WHERE version = %s"
    sql(query, version, version, latest["version"])
    assert words in refused(workers)


def test_a_producer_during_a_restart_gets_an_error_and_writes_nothing_by_halves(
    own_postgres: EmbeddedPostgres, app: Celery, sql: Sql, workers: Workers, provider: Provider
) -> None:
    """Producers get an error within the statement timeout; workers wait and go on by themselves."""
    workers("a")
    assert app.tasks["tests.charge"].delay("c", 1).get(timeout=20)
    own_postgres.stop()
    before = time.monotonic()
    with pytest.raises((StoreUnavailable, AcceptanceUnknown)):
        app.tasks["tests.charge"].delay("c", 2)
    assert time.monotonic() - before < 6
    own_postgres.start()
    result = app.tasks["tests.charge"].delay("c", 3)
    assert result.get(timeout=20)
    assert [row["status"] for row in sql("SELECT status FROM jobs")] == ["succeeded"] * 2
    assert sorted(row["body"]["cents"] for row in provider.ledger()) == [1, 3]


def test_an_app_without_safe_effects(workers: Workers, tmp_path: Path, app_conf: dict[str, Any]) -> None:
    """A worker that could only fail every delivery does not start."""
    (tmp_path / "bare_app.py").write_text(
        "from celery import Celery\n"
        "from celery_safe_effects import SafeTask\n"
        f"app = Celery('bare', broker={app_conf['broker_url']!r})\n"
        "@app.task(base=SafeTask, effects=[])\n"
        "def task(): pass\n"
    )
    worker = WorkerProcess("bare_app:app", name="bare", cwd=tmp_path, log_path=tmp_path / "log")
    worker.start(ready=False)
    try:
        assert worker.wait(timeout=30) != 0
        assert "add `SafeEffects(app)`" in worker.log()
    finally:
        worker.kill()


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [object(), {1, 2}.__iter__(), b"\xff".__class__])
def test_arguments_that_are_no_json(app: Celery, sql: Sql, broker: Broker, value: Any) -> None:
    with pytest.raises(PayloadInvalid, match="cannot be encoded"):
        app.tasks["tests.pure"].delay(value)
    assert sql("SELECT id FROM jobs") == []
    assert broker.depth() == 0


def test_arguments_that_are_too_large(app: Celery, sql: Sql, broker: Broker) -> None:
    with pytest.raises(PayloadTooLarge, match="safe_effects_max_payload") as caught:
        app.tasks["tests.pure"].delay("x" * 1_100_000)
    assert caught.value.limit == 1_000_000
    assert sql("SELECT id FROM jobs") == []
    assert broker.depth() == 0


@pytest.mark.parametrize("key", ["", 5, "a\x00b"])
def test_a_bad_idempotency_key(app: Celery, sql: Sql, key: Any) -> None:
    with pytest.raises(PayloadInvalid, match="idempotency_key"):
        app.tasks["tests.pure"].apply_async((1,), idempotency_key=key)
    assert sql("SELECT id FROM jobs") == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("tenant", 5), ("tenant", ""), ("pool", 4), ("max_attempts", 0), ("max_attempts", "x"), ("max_age", -1)],
)
def test_a_bad_option_is_refused_by_name(app: Celery, sql: Sql, name: str, value: Any) -> None:
    with pytest.raises(PayloadInvalid, match=name):
        app.tasks["tests.pure"].apply_async((1,), **{name: value})
    assert sql("SELECT id FROM jobs") == []


def test_one_key_for_two_calls(app: Celery, sql: Sql, broker: Broker) -> None:
    first = app.tasks["tests.pure"].apply_async(({"a": 1, "b": 2},), idempotency_key="k")
    row = sql("SELECT * FROM job")
    assert app.tasks["tests.pure"].apply_async(({"b": 2, "a": 1},), idempotency_key="k").id == first.id
    with pytest.raises(IdempotencyConflict, match=first.id):
        app.tasks["tests.pure"].apply_async(({"a": 1, "b": 3},), idempotency_key="k")
    with pytest.raises(IdempotencyConflict):
        app.tasks["tests.charge"].apply_async(("c", 1), idempotency_key="k")
    assert app.tasks["tests.pure"].apply_async(({"a": 9},), idempotency_key="k", tenant="other").id != first.id
    assert [r for r in sql("SELECT * FROM job") if r["id"] == first.id] == row
    assert broker.depth() == 2


def test_text_with_a_nul_survives(app: Celery, workers: Workers) -> None:
    workers("a")
    assert app.tasks["tests.pure"].delay("a\x00b").get(timeout=20) == "a\x00b"


# -- what effects, bodies and lookups return ---------------------------------------------------------------------------


def ended(sql: Sql, job: str, status: str) -> dict[str, Any]:
    eventually(
        lambda: sql("SELECT status FROM jobs WHERE id = %s", job)[0]["status"] == status,
        timeout=30,
        message=f"job {job} did not become {status}",
    )
    return sql("SELECT * FROM jobs WHERE id = %s", job)[0]


@pytest.mark.parametrize(
    ("what", "words"),
    [("object", "not JSON"), ("nan", "not JSON"), ("empty_ref", "reference"), ("ref_type", "reference")],
)
def test_an_effect_that_returns_nonsense_has_happened_and_is_not_run_again(
    app: Celery, workers: Workers, sql: Sql, provider: Provider, what: str, words: str
) -> None:
    workers("a")
    job = app.tasks["tests.returns"].delay(what).id
    row = ended(sql, job, "failed")
    assert words in row["last_error"]
    operation = sql("SELECT * FROM operations WHERE job_id = %s", job)[0]
    assert operation["status"] == "outcome_confirmed"
    assert operation["provider_ref"]
    # An operator's retry replays the record: the same error, and no second call.
    app.__dict__["_safe_effects"].retry(job, "again")
    eventually(lambda: sql("SELECT attempts FROM jobs WHERE id = %s", job)[0]["attempts"] == 1, timeout=20)
    ended(sql, job, "failed")
    assert len(provider.ledger()) == 1


def test_a_body_that_returns_no_json_fails_with_its_effects_recorded(
    app: Celery, workers: Workers, sql: Sql, provider: Provider
) -> None:
    workers("a")
    job = app.tasks["tests.body_returns_no_json"].delay().id
    assert "not JSON" in ended(sql, job, "failed")["last_error"]
    assert len(provider.ledger()) == 1


@pytest.mark.parametrize("lookup", ["raises", "hangs", "nonsense", "none", "bad_ref"])
def test_a_bad_lookup_leaves_the_operation_unknown_and_delays_no_other(
    app: Celery, workers: Workers, sql: Sql, provider: Provider, lookup: str
) -> None:
    """A hanging or broken lookup proves nothing; the good one beside it is resolved meanwhile; an operator ends it."""
    workers("a")
    provider.control(drop_reply=True)
    bad = app.tasks["tests.bad_lookup"].delay(lookup).id
    ended(sql, bad, "unknown")
    good = app.tasks["tests.charge"].delay("c", 1).id
    eventually(
        lambda: sql("SELECT evidence FROM operations WHERE job_id = %s", bad)[0]["evidence"] is not None,
        timeout=30,
        message="the bad lookup was not asked",
    )
    provider.control(drop_reply=None)
    ended(sql, good, "succeeded")
    assert sql("SELECT status FROM jobs WHERE id = %s", bad)[0]["status"] == "unknown"
    evidence = sql("SELECT evidence FROM operations WHERE job_id = %s", bad)[0]["evidence"]
    assert evidence["lookup"] == "unresolved"
    from celery_safe_effects import Happened

    app.__dict__["_safe_effects"].resolve(f"{bad}:1", Happened("seen"), actor="ops", reason="seen in the bank's list")
    assert ended(sql, bad, "succeeded")["outcome_ref"] == "seen"
    assert len([r for r in provider.ledger() if r["key"] == f"{bad}:1"]) == 1
