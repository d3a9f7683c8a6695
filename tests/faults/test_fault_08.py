"""SIGKILL of a whole worker, with a job in each place where one can be."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.checks import assert_invariants, assert_ledger, assert_log, job, operation, wait_status
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults

CLAIMED = ["job - > queued #0", "job queued > leased #1", "job leased > running #1"]
PARKED = [
    *CLAIMED,
    "1 - > intent_recorded #1",
    "job running > unknown #1 (lease_expired)",
    "1 intent_recorded > unknown #1 (lease_expired)",
]
AGAIN = ["job queued > leased #2", "job leased > running #2"]
END = "job running > succeeded #2"
LOOKED_UP = ["1 unknown > outcome_confirmed #1 (lookup)", "job unknown > queued #1 (resolved:~:1)", *AGAIN, END]
ABSENT = [
    "1 unknown > not_happened #1 (lookup)",
    "job unknown > queued #1 (resolved:~:1)",
    *AGAIN,
    "1 not_happened > intent_recorded #2 (not_happened)",
    "1 intent_recorded > outcome_confirmed #2",
    END,
]
RESENT = [
    "job unknown > queued #1 (resend:~:1)",
    *AGAIN,
    "1 unknown > intent_recorded #2 (resend)",
    "1 intent_recorded > outcome_confirmed #2",
    END,
]
ENV = {"SAFE_EFFECTS_TEST_DEADLINE": "3"}


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    """Short leases."""
    app_conf.update(safe_effects_lease_ttl=1.5)
    return app_conf


def status_of(sql: Sql, key: str) -> str | None:
    """The status of an operation, if there is one."""
    return next((row["status"] for row in sql("SELECT status FROM operations WHERE key = %s", key)), None)


def test_08a_prefetched(
    app: Celery, workers: Workers, broker: Broker, provider: Provider, sql: Sql, acks_late: bool
) -> None:
    first = workers("a", acks_late=acks_late, env=ENV)
    blocker = app.tasks["tests.sleep"].apply_async((60,))
    wait_status(sql, blocker.id, "running")
    result = app.tasks["tests.charge"].apply_async(("cus_1", 500))
    eventually(lambda: f"[{result.id}] received" in first.log(), 10, message="it is prefetched")
    assert broker.depth() == 0
    assert job(sql, result.id)["status"] == "queued"
    first.kill()
    app.safe_effects.cancel(blocker.id, "it has done its part")
    workers("b", acks_late=acks_late, env=ENV)

    assert wait_status(sql, result.id, "succeeded")["attempts"] == 1
    assert_log(
        sql,
        result.id,
        [
            *CLAIMED,
            "1 - > intent_recorded #1",
            "1 intent_recorded > outcome_confirmed #1",
            "job running > succeeded #1",
        ],
    )
    assert_ledger(provider, sql, result.id)
    assert provider.received("charge") == 1
    wait_status(sql, blocker.id, "cancelled")
    assert_invariants(sql, provider)


def test_08b_claimed(app: Celery, workers: Workers, provider: Provider, sql: Sql, acks_late: bool) -> None:
    first = workers("a", acks_late=acks_late, env=ENV)
    result = app.tasks["tests.sleep_then_charge"].apply_async((60, "cus_1", 500))
    eventually(lambda: provider.received("entered_sleep_then_charge") == 1, 10)
    first.kill()
    workers("b", acks_late=acks_late, env=ENV)

    wait_status(sql, result.id, "succeeded")
    assert_log(
        sql,
        result.id,
        [
            *CLAIMED,
            "job running > queued #1 (lease_expired)",
            *AGAIN,
            "1 - > intent_recorded #2",
            "1 intent_recorded > outcome_confirmed #2",
            END,
        ],
    )
    assert_ledger(provider, sql, result.id)
    assert provider.received("charge") == 1
    assert provider.received("entered_sleep_then_charge") == 2
    assert_invariants(sql, provider)


def test_08c_intent_committed(app: Celery, workers: Workers, provider: Provider, sql: Sql, acks_late: bool) -> None:
    """The provider was not called: its look-up says so, late enough, and the sender is gone."""
    first = workers("a", acks_late=acks_late, env=ENV)
    result = app.tasks["tests.waits_charge"].apply_async(("cus_1", 500, 2.5))
    eventually(lambda: status_of(sql, f"{result.id}:1") == "intent_recorded", 10)
    first.kill()
    assert provider.received("charge") == 0
    workers("b", acks_late=acks_late, env=ENV)

    wait_status(sql, result.id, "succeeded")
    assert_log(sql, result.id, [*PARKED, *ABSENT])
    _absence_was_asked_late(sql, result.id)
    assert_ledger(provider, sql, result.id)
    assert provider.received("charge") == 1
    assert_invariants(sql, provider)


def _absence_was_asked_late(sql: Sql, job_id: str) -> None:
    (row,) = sql(
        "SELECT (SELECT min(t.at) FROM transitions t WHERE t.job_id = o.job_id AND t.to_status = 'not_happened')"
        " >= first_intent_at + interval '3 seconds' AS late FROM operations o WHERE o.job_id = %s",
        job_id,
    )
    assert row["late"]


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.parametrize("acks_late", [False], ids=["early"])
@pytest.mark.usefixtures("broker")
def test_08c_intent_committed_for_each_kind_of_provider(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, acks_late: bool
) -> None:
    kinds = ("charge_keyed", "charge_both", "charge_plain")
    first = workers("a", acks_late=acks_late, env=ENV, concurrency=3)
    ids = {kind: app.tasks[f"tests.waits_{kind}"].apply_async(("cus_1", 500, 2.5)).id for kind in kinds}
    eventually(lambda: all(status_of(sql, f"{one}:1") == "intent_recorded" for one in ids.values()), 10)
    first.kill()
    workers("b", acks_late=acks_late, env=ENV, concurrency=3)

    for kind in ("charge_keyed", "charge_both"):
        wait_status(sql, ids[kind], "succeeded")
        assert_ledger(provider, sql, ids[kind])
        assert provider.received(kind) == 1
    assert_log(sql, ids["charge_keyed"], [*PARKED, *RESENT])
    assert_log(sql, ids["charge_both"], [*PARKED, *ABSENT], [*PARKED, *RESENT])
    # Without key and look-up nothing can prove it.
    assert_log(sql, ids["charge_plain"], PARKED)
    assert provider.received("charge_plain") == 0
    assert operation(sql, f"{ids['charge_plain']}:1")["status"] == "unknown"
    assert_invariants(sql, provider)


def test_08d_accepted_by_the_provider(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, acks_late: bool
) -> None:
    provider.control(kind="charge", delay_after=30)
    first = workers("a", acks_late=acks_late, env=ENV)
    result = app.tasks["tests.charge"].apply_async(("cus_1", 500))
    eventually(provider.ledger, 10, message="the provider accepted")
    first.kill()
    workers("b", acks_late=acks_late, env=ENV)

    wait_status(sql, result.id, "succeeded")
    assert_log(sql, result.id, [*PARKED, *LOOKED_UP])
    row = assert_ledger(provider, sql, result.id)
    assert job(sql, result.id)["outcome_ref"] == row["ref"]
    assert provider.received("charge") == 1
    assert_invariants(sql, provider)


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.parametrize("acks_late", [True], ids=["late"])
@pytest.mark.usefixtures("broker")
def test_08d_accepted_by_each_kind_of_provider(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, acks_late: bool
) -> None:
    kinds = ("charge_keyed", "charge_both", "charge_plain")
    for kind in kinds:
        provider.control(kind=kind, delay_after=30, times=1)
    first = workers("a", acks_late=acks_late, env=ENV, concurrency=3)
    ids = {kind: app.tasks[f"tests.{kind}"].apply_async(("cus_1", 500)).id for kind in kinds}
    eventually(lambda: len(provider.ledger()) == 3, 10, message="the provider accepted all")
    first.kill()
    workers("b", acks_late=acks_late, env=ENV, concurrency=3)

    for kind in ("charge_keyed", "charge_both"):
        wait_status(sql, ids[kind], "succeeded")
        assert_ledger(provider, sql, ids[kind])
    # The first result comes back for the same key; only the provider with a look-up is not asked twice.
    assert_log(sql, ids["charge_keyed"], [*PARKED, *RESENT])
    assert_log(sql, ids["charge_both"], [*PARKED, *LOOKED_UP])
    assert {kind: provider.received(kind) for kind in kinds} == {"charge_keyed": 2, "charge_both": 1, "charge_plain": 1}
    assert len(provider.ledger()) == 3
    assert_log(sql, ids["charge_plain"], PARKED)
    assert_invariants(sql, provider)
