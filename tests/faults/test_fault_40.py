"""Celery cannot be told of an end: it never reads FAILURE, and is told later, a bounded number of times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from sqlalchemy.engine import make_url

from celery_safe_effects.testing import TcpProxy, eventually
from example_project.provider_client import Provider
from tests.support import backend_tasks
from tests.support.checks import assert_invariants, job, wait_status
from tests.support.processes import Workers
from tests.support.services import Sql

pytestmark = [pytest.mark.faults, pytest.mark.slow]

TRIES = 3


@pytest.fixture
def backend(result_backend_url: str) -> Iterator[TcpProxy]:
    """What stands between the worker and its result backend."""
    url = make_url(result_backend_url)
    proxy = TcpProxy(str(url.host), int(url.port or 6379))
    proxy.start()
    yield proxy
    proxy.stop()


@pytest.fixture
def app_conf(app_conf: dict[str, Any], backend: TcpProxy) -> dict[str, Any]:
    return {
        **app_conf,
        "imports": ["tests.support.backend_tasks"],
        "safe_effects_republish_after": 0.5,
        "result_backend_transport_options": {"retry_policy": {"max_retries": 1, "interval_start": 0}},
    }


@pytest.fixture
def app(app: Celery) -> Celery:
    backend_tasks.add_tasks(app)
    return app


def settled(sql: Sql, job_id: str) -> bool:
    return job(sql, job_id)["settled_at"] is not None


def test_fault_40(
    app: Celery,
    app_conf: dict[str, Any],
    workers: Workers,
    backend: TcpProxy,
    provider: Provider,
    sql: Sql,
    acks_late: bool,
) -> None:
    """The worker's way to the backend is cut while it has to tell; then it has a result that it cannot encode."""
    direct = make_url(app_conf["result_backend"])
    through = direct.set(host=backend.host, port=backend.port).render_as_string(hide_password=False)
    picky = {"result_serializer": "picky", "result_accept_content": ["picky"]}
    env = {backend_tasks.TRIES_VARIABLE: str(TRIES)}
    worker = workers("a", acks_late=acks_late, env=env, conf={"result_backend": through, **picky})
    app.conf.update(picky)
    tells = app.tasks["tests.tells"]
    links = {"link": app.signature("tests.follow"), "link_error": app.signature("tests.errback")}

    # The backend is down.
    backend.refuse()
    good = tells.apply_async(("order-1", "done"), **links)
    bad = tells.apply_async(("order-2", None, True), **links)
    wait_status(sql, good.id, "succeeded")
    wait_status(sql, bad.id, "failed")
    eventually(lambda: sql("SELECT 1 FROM counter WHERE name = 'untold' AND value > 1"), 20, message="were not told")
    assert {good.state, bad.state} == {"PENDING"}
    assert not settled(sql, good.id) | settled(sql, bad.id)
    assert provider.received("entered_on_failure") == provider.received("entered_on_success") == 0

    backend.accept()
    eventually(lambda: settled(sql, good.id) & settled(sql, bad.id), 30, message="told later")
    assert good.get(timeout=5) == "done"
    with pytest.raises(LookupError, match="order-2"):
        bad.get(timeout=5)
    assert provider.received("entered_on_failure") == provider.received("entered_on_success") == 1
    for sender, name in ((good, "tests.follow"), (bad, "tests.errback")):
        (continuation,) = sql("SELECT id, task FROM jobs WHERE parent_id = %s", sender.id)
        assert continuation["task"] == name
        wait_status(sql, continuation["id"], "succeeded")

    # The backend's serializer cannot encode the result, which the row has.
    odd = tells.apply_async(("order-3", "unencodable"), link_error=app.signature("tests.errback"))
    wait_status(sql, odd.id, "succeeded")
    given_up = "SELECT 1 FROM job WHERE id = %s AND publishes > %s AND next_publish_at IS NULL"
    eventually(lambda: sql(given_up, odd.id, TRIES), 40, message="given up")
    assert job(sql, odd.id)["result"] == "unencodable"
    assert not settled(sql, odd.id)
    assert 1 + TRIES <= worker.log().count(f"tests.tells[{odd.id}] received") <= 2 + TRIES
    assert app.backend.get(app.backend.get_key_for_task(odd.id)) is None
    assert provider.received("entered_on_failure") == 1
    assert sql("SELECT id FROM jobs WHERE parent_id = %s", odd.id) == []
    assert len([row for row in provider.ledger() if row["key"] is not None]) == 3 + 2
    assert_invariants(sql, provider)
