"""Faults 21, 24, 25 and 26: ambiguous answers, a provider that forgets, an index that lags, an enqueue repeated."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.faults2 import becomes, job_row, ledger, log, operation_row
from tests.support.names import PROVIDER_VARIABLE
from tests.support.processes import FAST, Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults

TTL = 2
MODES = [
    pytest.param("redis", False, id="redis-early"),
    pytest.param("rabbitmq", True, id="rabbitmq-late", marks=pytest.mark.rabbitmq),
]


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    return {**app_conf, "safe_effects_lease_ttl": TTL}


def refuses(provider: Provider) -> bool:
    """Whether a connection is refused by now; one that is reset leaves open what happened."""
    try:
        provider.stats()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


@pytest.mark.parametrize(("broker", "acks_late"), MODES, indirect=["broker"])
@pytest.mark.usefixtures("broker")
def test_fault_21_answers_that_leave_it_open(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, acks_late: bool
) -> None:
    # Without keys (a second request would be a second charge) and with a look-up.
    workers("a", acks_late=acks_late, env={"SAFE_EFFECTS_TEST_DEADLINE": "2"})
    charge = app.tasks["tests.charge"]

    for fault in ({"drop_reply": True}, {"status_after": 500}):
        provider.control(kind="charge", times=1, **fault)
        job_id = charge.delay("cus_1", 500).id
        becomes(sql, job_id, "succeeded")
        (row,) = provider.ledger(f"{job_id}:1")
        assert provider.received("charge", f"{job_id}:1") == 1
        assert log(sql, job_id, f"{job_id}:1") == ["intent_recorded", "unknown", "outcome_confirmed"]
        assert "unknown" in log(sql, job_id)
        assert job_row(sql, job_id)["outcome_ref"] == row["ref"]

    provider.control(down=4)
    eventually(lambda: refuses(provider), 5, interval=0.01, message="nothing listens any more")
    job_id = charge.delay("cus_1", 500).id
    refused = "SELECT 1 FROM transitions WHERE job_id = %s AND to_status = 'not_happened'"
    eventually(lambda: sql(refused, job_id), 10, message="the connection is refused")
    becomes(sql, job_id, "succeeded")
    (row,) = provider.ledger(f"{job_id}:1")
    assert job_row(sql, job_id)["outcome_ref"] == row["ref"]
    statuses = log(sql, job_id, f"{job_id}:1")
    # Proven not to have happened, as often as it was refused; never in doubt.
    assert statuses == ["intent_recorded", "not_happened"] * (len(statuses) // 2 - 1) + [
        "intent_recorded",
        "outcome_confirmed",
    ]
    assert "unknown" not in log(sql, job_id)
    assert len(ledger(provider)) == 3


def killed_after_acceptance(app: Celery, workers: Workers, provider: Provider, task: str, env: dict[str, str]) -> str:
    """A job whose worker is killed while the provider, which has accepted, still holds back its answer."""
    provider.control(kind=task, times=1, delay_after=5)
    first = workers("a", env=env)
    job_id = str(app.tasks[f"tests.{task}"].delay("cus_1", 500).id)
    eventually(lambda: provider.ledger(f"{job_id}:1"), 10, message="the provider accepted")
    first.kill()
    return job_id


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.usefixtures("broker")
def test_fault_24_the_provider_forgets_the_key_while_lookups_are_down(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider.control(kind="charge_both", forget_after=5)
    provider.control(lookup_status=503)
    env = {"SAFE_EFFECTS_TEST_DEADLINE": "1", "SAFE_EFFECTS_TEST_IDEMPOTENT_FOR": "5"}
    job_id = killed_after_acceptance(app, workers, provider, "charge_both", env)
    key = f"{job_id}:1"
    workers("b", env=env)
    becomes(sql, job_id, "unknown")
    # Past the retention, and asked since: neither was it sent, nor is the silence taken for an answer.
    asked_late = (
        "SELECT 1 FROM operations WHERE key = %s AND (evidence->>'asked_at')::timestamptz > first_intent_at + %s"
    )
    eventually(lambda: sql(asked_late, key, "5 seconds"), 25, message="asked after the key was forgotten")
    row = operation_row(sql, key)
    assert (row["status"], row["evidence"]["lookup"]) == ("unknown", "unresolved")
    assert job_row(sql, job_id)["status"] == "unknown"
    assert provider.received("charge_both") == 1

    provider.control(lookup_status=None)
    monkeypatch.setenv(PROVIDER_VARIABLE, provider.url)
    app.safe_effects.reconcile([key])
    # Unless the worker is asking at this moment.
    eventually(lambda: operation_row(sql, key)["status"] == "outcome_confirmed", 20, message="it is found")
    job = becomes(sql, job_id, "succeeded")
    (charged,) = ledger(provider)
    assert job["outcome_ref"] == charged["ref"]
    assert provider.received("charge_both") == 1
    assert log(sql, job_id, key) == ["intent_recorded", "unknown", "outcome_confirmed"]


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.parametrize("effect", ["charge", "charge_both"])
@pytest.mark.usefixtures("broker")
def test_fault_25_the_index_of_the_lookup_lags(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, effect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The declared lag is what the index may need; the test says when it really has caught up.
    provider.control(kind=effect, lookup_lag=3600)
    env = {"SAFE_EFFECTS_TEST_DEADLINE": "1", "SAFE_EFFECTS_TEST_LOOKUP_LAG": "60"}
    job_id = killed_after_acceptance(app, workers, provider, effect, env)
    key = f"{job_id}:1"
    workers("b", env=env)

    def told_nothing_after_the_deadline() -> bool:
        row = operation_row(sql, key)
        assert row["status"] == "unknown"
        found_nothing = row["evidence"] and row["evidence"]["lookup"] == "not_found"
        return bool(found_nothing and datetime.fromisoformat(row["evidence"]["asked_at"]) > row["deadline_at"])

    eventually(told_nothing_after_the_deadline, 20, message="asked before the lag is over, and told of nothing")
    assert (job_row(sql, job_id)["status"], provider.received(effect)) == ("unknown", 1)
    provider.control(kind=effect, lookup_lag=None)
    monkeypatch.setenv(PROVIDER_VARIABLE, provider.url)
    app.safe_effects.reconcile([key])
    job = becomes(sql, job_id, "succeeded")
    (charged,) = ledger(provider)
    assert job["outcome_ref"] == charged["ref"]
    assert provider.received(effect) == 1
    assert log(sql, job_id, key) == ["intent_recorded", "unknown", "outcome_confirmed"]


@pytest.mark.parametrize(("broker", "acks_late"), MODES, indirect=["broker"])
@pytest.mark.usefixtures("broker")
def test_fault_26_enqueued_again_while_nobody_knows(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, acks_late: bool
) -> None:
    task = app.tasks["tests.charge"]
    provider.control(kind="charge", times=1, delay_before=2)
    first = workers("a", acks_late=acks_late)
    result = task.apply_async(("cus_1", 500), idempotency_key="order-1")
    eventually(lambda: provider.received("charge"), 10, message="the call is under way")
    assert operation_row(sql, f"{result.id}:1")["status"] == "intent_recorded"
    first.kill()
    assert task.apply_async(("cus_1", 500), idempotency_key="order-1").id == result.id
    workers("b", acks_late=acks_late)
    assert task.apply_async(kwargs={}, args=["cus_1", 500], idempotency_key="order-1").id == result.id
    # Lease, two sweeps and one reconciliation; the stand-in for beat waits for three intervals.
    bound = TTL + 6 * FAST["safe_effects_sweep_interval"] + 3 * FAST["safe_effects_reconcile_interval"] + 10
    job = becomes(sql, result.id, "succeeded", timeout=bound)
    assert task.apply_async(("cus_1", 500), idempotency_key="order-1").id == result.id
    (charged,) = ledger(provider)
    assert job["outcome_ref"] == charged["ref"]
    assert provider.received("charge") == 1
    assert len(sql("SELECT 1 FROM jobs")) == 1
    assert result.get(timeout=10) == charged["ref"]
