"""Retries on a real worker: one message a run, the same id, and an end that Celery shows as its users know it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery.exceptions import MaxRetriesExceededError

from celery_safe_effects.testing import eventually
from tests.support.retry_tasks import KINDS
from tests.support.site import Site

pytestmark = pytest.mark.parametrize("kind", list(KINDS))


@pytest.fixture(scope="module")
def site_conf() -> dict[str, Any]:
    # What the sweep publishes again must not be what the tests count.
    return {"imports": ["tests.support.retry_tasks"], "safe_effects_republish_after": 60}


def started(site: Site, job: str) -> list[datetime]:
    rows = site.sql("SELECT at FROM transitions WHERE job_id = %s AND to_status = 'running' ORDER BY id", job)
    return [row["at"] for row in rows]


WHEN: dict[str, Callable[[], dict[str, Any]]] = {
    "countdown": lambda: {"countdown": 1.5},
    "eta": lambda: {"eta": (datetime.now(timezone.utc) + timedelta(seconds=1.5)).isoformat()},
}


def test_when_and_with_what(site: Site, kind: str) -> None:
    before = datetime.now(timezone.utc)
    sent = {how: site.send(f"retries_with_{kind}", "o-1", {**when(), "args": [how, {}]}) for how, when in WHEN.items()}
    for how, result in sent.items():
        row = site.ends(result)
        (effect,) = site.provider.ledger(key=f"{result.id}:{'body' if kind == 'whole' else '1'}")
        assert result.get(timeout=10) == row["result"] == [how, 1, effect["ref"]]
        assert effect["body"]["argument"] == how
        first, second = started(site, result.id)
        since = first if how == "countdown" else before
        assert 1.4 <= (second - since).total_seconds() < 20


@pytest.mark.parametrize("then", ["raise", "return", "swallow"])
def test_what_was_asked_for_stands(site: Site, kind: str, then: str) -> None:
    result = site.send(f"retries_with_{kind}", "o-1", {"countdown": 3}, then)
    eventually(lambda: result.state == "RETRY", 10, 0.02, message="Celery shows the retry")
    assert site.ends(result)["attempts"] == 2
    assert result.get(timeout=10)[:2] == ["o-1", 1]


@pytest.mark.parametrize("how", ["plain", "exc", "unpicklable", "catch"])
def test_when_retries_are_over(site: Site, kind: str, how: str) -> None:
    result = site.send(f"gives_up_{kind}", how)
    row = site.ends(result, "succeeded" if how == "catch" else "failed")
    assert row["attempts"] == 2
    if how == "catch":
        assert result.get(timeout=10) == row["result"]
        return
    expected = {"plain": "MaxRetriesExceededError", "exc": "LookupError", "unpicklable": "Unpicklable"}[how]
    assert (row["reason"], row["last_error"].partition(":")[0]) == ("max_retries", expected)
    eventually(lambda: result.state == "FAILURE", 10)
    # Celery shows what pickle cannot keep in a class of its own.
    assert type(result.result).__name__ == ("UnpickleableExceptionWrapper" if how == "unpicklable" else expected)
    if how == "plain":
        with pytest.raises(MaxRetriesExceededError):
            result.get(timeout=10)
    assert eventually(lambda: site.sql("SELECT 1 FROM jobs WHERE id = %s AND settled_at IS NOT NULL", result.id), 10)


def test_autoretry(site: Site, kind: str) -> None:
    """Six retries are more than the default of five runs: retry_kwargs say so. A whole body is not guessed about."""
    result = site.send(f"autoretries_{kind}", "o-1")
    if kind == "whole":
        assert site.ends(result, "unknown")["attempts"] == 1
        assert eventually(lambda: result.state == "UNKNOWN", 10)
        return
    assert site.ends(result)["attempts"] == 7
    assert len(site.provider.ledger(key=f"{result.id}:1")) == 1
