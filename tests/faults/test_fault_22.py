"""Tools called by an agent's job, one after the other and in parallel, by a function and by a coroutine."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.async_tasks import ASKED_FOR
from tests.support.checks import assert_invariants, job, wait_status
from tests.support.faults2 import OPEN, REACHED, reached
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = [pytest.mark.faults, pytest.mark.slow]

ENV = {"SAFE_EFFECTS_TEST_DEADLINE": "3"}


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    """Short leases."""
    app_conf.update(safe_effects_lease_ttl=1.5, **{ASKED_FOR: True})
    return app_conf


def steps(sql: Sql, job_id: str) -> dict[str, tuple[str, int]]:
    """Status and attempt of each step."""
    rows = sql("SELECT step, status, attempt FROM operations WHERE job_id = %s ORDER BY first_intent_at", job_id)
    return {row["step"]: (row["status"], row["attempt"]) for row in rows}


def test_22_killed_after_the_second_of_three_tools(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, acks_late: bool
) -> None:
    first = workers("a", acks_late=acks_late, env=ENV, concurrency=5)
    ids: dict[tuple[str, bool], str] = {}
    for name in ("sync_agent", "async_agent"):
        for changes in (False, True):
            ids[name, changes] = app.tasks[f"tests.{name}"].apply_async((f"{name}-{changes}", changes)).id
    parallel = app.tasks["tests.async_many"].apply_async((3, "parallel"))
    for name, changes in ids:
        reached(provider, f"{name}-{changes}")
    reached(provider, "parallel")
    confirmed = ("outcome_confirmed", 1)
    eventually(
        lambda: steps(sql, parallel.id) == {"tool-0": confirmed, "tool-1": ("intent_recorded", 1), "tool-2": confirmed},
        10,
    )
    first.kill()
    before = {row["key"]: row["ref"] for row in provider.ledger() if row["key"]}
    workers("b", acks_late=acks_late, env=ENV, concurrency=5)

    for (name, changes), job_id in ids.items():
        # The question and two tools are in the record; the third was not begun.
        first_three = dict.fromkeys(("1", "2", "3"), confirmed)
        if changes:
            found = wait_status(sql, job_id, "unknown")
            assert (found["reason"], steps(sql, job_id)) == ("replay_mismatch", first_three), name
        else:
            found = wait_status(sql, job_id, "succeeded")
            assert steps(sql, job_id) == {**first_three, "4": confirmed}, name
            (row,) = provider.ledger(key=f"{job_id}:4")
            assert found["outcome_ref"] == row["ref"], name
        assert found["attempts"] == 2, name
    # In parallel two of three were done; the third had its intent, and nobody had asked the provider yet.
    wait_status(sql, parallel.id, "succeeded")
    assert steps(sql, parallel.id) == {"tool-0": confirmed, "tool-1": ("outcome_confirmed", 2), "tool-2": confirmed}
    assert job(sql, parallel.id)["result"] == [
        provider.ledger(key=f"{parallel.id}:tool-{n}")[0]["ref"] for n in range(3)
    ]

    done = [row for row in provider.ledger() if row["key"] and row["kind"] not in {REACHED, OPEN}]
    assert len(done) == len({row["key"] for row in done}) == 2 * 3 + 2 * 2 + 3
    assert before.items() <= {row["key"]: row["ref"] for row in provider.ledger() if row["key"]}.items()
    # Each model was asked once: the replay had its answer.
    assert provider.received("ask_model") == 4
    assert_invariants(sql, Ungated(provider.url))


class Ungated(Provider):
    """The provider's ledger without the gates, which are no effects of a job."""

    def ledger(self, key: str | None = None, kind: str | None = None) -> list[Any]:
        return [row for row in super().ledger(key, kind) if row["kind"] not in {REACHED, OPEN}]
