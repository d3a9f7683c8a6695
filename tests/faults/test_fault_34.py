"""Faults 34 and 35: a body that caught an effect's exception takes the same branch when it is replayed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects import Happened
from celery_safe_effects.testing import TcpProxy, eventually
from example_project.provider_client import Provider
from example_project.provider_process import ProviderProcess
from tests.support.faults2 import becomes, ledger, log, open_gate, operation_row, reached
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults

MODES = [
    pytest.param("redis", False, id="redis-early"),
    pytest.param("rabbitmq", True, id="rabbitmq-late", marks=pytest.mark.rabbitmq),
]


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    return {**app_conf, "safe_effects_lease_ttl": 1.5}


@pytest.fixture
def primary_proxy(provider_process: ProviderProcess) -> Iterator[TcpProxy]:
    """An address of the provider that can refuse connections of its own."""
    with TcpProxy("127.0.0.1", provider_process.port) as proxy:
        yield proxy


@pytest.mark.parametrize(("broker", "acks_late"), MODES, indirect=["broker"])
@pytest.mark.usefixtures("broker")
def test_fault_34_the_primary_is_not_sent_after_the_fallback(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, primary_proxy: TcpProxy, acks_late: bool
) -> None:
    primary_proxy.refuse()
    first = workers("a", acks_late=acks_late)
    url = f"http://{primary_proxy.host}:{primary_proxy.port}"
    job_id = app.tasks["tests.with_fallback"].delay(url, "gate").id
    reached(provider, "gate")
    first.kill()
    # The primary could be had now, and would be taken by a replay that only asks whether it happened.
    primary_proxy.accept()
    open_gate(provider, "gate")
    workers("b", acks_late=acks_late)
    job = becomes(sql, job_id, "succeeded")
    (row,) = ledger(provider)
    assert (row["kind"], row["key"]) == ("fallback", f"{job_id}:2")
    assert job["outcome_ref"] == row["ref"]
    assert provider.received("primary") == 0
    assert log(sql, job_id, f"{job_id}:1") == ["intent_recorded", "not_happened"]
    assert operation_row(sql, f"{job_id}:2")["attempt"] == 1


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.usefixtures("broker")
def test_fault_34_an_operators_retry_replays_too(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, primary_proxy: TcpProxy
) -> None:
    # Its attempts start anew; what is recorded does not.
    primary_proxy.refuse()
    open_gate(provider, "gate")
    workers("a")
    url = f"http://{primary_proxy.host}:{primary_proxy.port}"
    job_id = app.tasks["tests.with_fallback"].delay(url, "gate", fails=True).id
    becomes(sql, job_id, "failed")
    primary_proxy.accept()
    app.safe_effects.retry(job_id, "the bug is mended")
    job = becomes(sql, job_id, "succeeded")
    (row,) = ledger(provider)
    assert (row["kind"], row["key"]) == ("fallback", f"{job_id}:2")
    assert job["outcome_ref"] == row["ref"]
    assert provider.received("primary") == 0


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.usefixtures("broker")
def test_fault_34_a_job_that_was_sent_instead_is_a_later_step_too(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, primary_proxy: TcpProxy
) -> None:
    primary_proxy.refuse()
    first = workers("a")
    url = f"http://{primary_proxy.host}:{primary_proxy.port}"
    job_id = app.tasks["tests.with_child"].delay(url, "gate").id
    reached(provider, "gate")
    first.kill()
    primary_proxy.accept()
    open_gate(provider, "gate")
    workers("b")
    becomes(sql, job_id, "succeeded")
    (child,) = sql("SELECT id FROM jobs WHERE parent_id = %s", job_id)
    becomes(sql, child["id"], "succeeded")
    (row,) = ledger(provider)
    assert (row["kind"], row["key"]) == ("fallback", f"{child['id']}:1")
    assert provider.received("primary") == 0


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.usefixtures("broker")
def test_fault_34_a_fallback_in_doubt_leaves_the_primary_alone(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, primary_proxy: TcpProxy
) -> None:
    # Killed in the fallback's call: that one is in doubt, and the primary stays proven not to have happened.
    primary_proxy.refuse()
    provider.control(kind="fallback", delay_before=2, times=1)
    first = workers("a")
    url = f"http://{primary_proxy.host}:{primary_proxy.port}"
    job_id = app.tasks["tests.with_fallback"].delay(url, "gate").id
    eventually(lambda: provider.received("fallback"), 10, message="the fallback is under way")
    first.kill()
    primary_proxy.accept()
    workers("b")
    becomes(sql, job_id, "unknown")
    eventually(lambda: ledger(provider), 10, message="the fallback is accepted")
    assert provider.received("primary") == 0
    (row,) = ledger(provider)
    app.safe_effects.resolve(f"{job_id}:2", Happened(row["ref"]), "ann", "seen in the provider's ledger")
    open_gate(provider, "gate")
    job = becomes(sql, job_id, "succeeded")
    assert ledger(provider) == [row]
    assert (row["kind"], job["outcome_ref"]) == ("fallback", row["ref"])


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.usefixtures("broker")
def test_fault_35_a_caught_exception_takes_the_same_branch_again(
    app: Celery, workers: Workers, provider: Provider, sql: Sql
) -> None:
    cases = [
        ("refused", "declined"),
        # Whose arguments are no JSON, and which cannot be made from its arguments: as real clients have them.
        ("refused", "awkward"),
        ("refused", "picky"),
        ("not_happened", "awkward"),
        ("not_happened", "picky"),
    ]
    for kind in ("saying_no", "not_reaching"):
        provider.control(kind=kind, refuse=402)
    first = workers("a", concurrency=len(cases))
    task = app.tasks["tests.branches"]
    jobs = {case: task.delay(*case, f"gate-{n}").id for n, case in enumerate(cases)}
    for n in range(len(cases)):
        reached(provider, f"gate-{n}")
    before = ledger(provider)
    assert {row["kind"] for row in before} == {"fallback"}
    first.kill()
    # The provider would accept now.
    for kind in ("saying_no", "not_reaching"):
        provider.control(kind=kind, refuse=None)
    for n in range(len(cases)):
        open_gate(provider, f"gate-{n}")
    workers("b", concurrency=2)
    for (which, how), job_id in jobs.items():
        job = becomes(sql, job_id, "succeeded")
        (row,) = [r for r in ledger(provider) if r["key"].startswith(job_id)]
        assert (row["kind"], row["key"]) == ("fallback", f"{job_id}:2"), (which, how)
        assert row["body"]["why"] == ("refused" if which == "refused" else "not reached")
        assert job["outcome_ref"] == row["ref"]
        assert job["attempts"] == 2
        ended = "refused" if which == "refused" else "not_happened"
        assert log(sql, job_id, f"{job_id}:1") == ["intent_recorded", ended]
    assert len(ledger(provider)) == len(cases)
