"""Canvases on a real worker: what the tests of them share.

A test module imports the fixtures by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from celery.result import AsyncResult

from celery_safe_effects import Happened
from celery_safe_effects.testing import eventually
from tests.support.brokers import Broker, module_rabbitmq, module_redis
from tests.support.services import PostgresServer, fresh_database, queries
from tests.support.site import Site


@pytest.fixture(scope="module", params=["redis", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
def module_broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """Redis as broker and backend; RabbitMQ with the results in a database."""
    with {"redis": module_redis, "rabbitmq": module_rabbitmq}[request.param](request) as broker:
        yield broker


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest,
    module_broker: Broker,
    postgres_server: PostgresServer,
    _templates: dict[int, tuple[PostgresServer, str]],
) -> Iterator[str]:
    """A result backend of its own, which may be emptied."""
    if module_broker.kind == "redis":
        with module_redis(request) as backend:
            yield backend.url
    else:
        with fresh_database(postgres_server, _templates) as url:
            yield f"db+{url}"


@pytest.fixture(scope="module")
def site_conf(results: str) -> dict[str, Any]:
    return {"imports": ["tests.support.canvas_tasks"], "result_backend": results, "result_chord_join_timeout": 1}


def forget(site: Site) -> None:
    """Let the result backend lose everything."""
    url = site.conf["result_backend"]
    if url.startswith("redis"):
        Broker("redis", url, None).purge()
    else:
        with queries(url.removeprefix("db+").replace("+psycopg", "", 1)) as sql:
            sql("DELETE FROM public.celery_taskmeta")
            sql("DELETE FROM public.celery_tasksetmeta")


def parked(site: Site, customer: str) -> Any:
    """A member that waits for a verdict."""
    site.provider.control(kind="charge_plain", times=1, drop_reply=True)
    return site.app.tasks["tests.charge_plain"].si(customer, 5).set(task_id=str(uuid4()))


def decide(site: Site, member: Any) -> str:
    """The verdict; what the member will then return."""
    key = f"{member.options['task_id']}:1"
    site.ends(site.app.AsyncResult(member.options["task_id"]), "unknown")
    ref = str(site.provider.ledger(key=key)[0]["ref"])
    site.safe.resolve(key, Happened(ref), "ann", "asked the provider")
    return ref


def s(site: Site, name: str, *args: Any, **kwargs: Any) -> Any:
    return site.app.tasks[f"tests.{name}"].s(*args, **kwargs)


def ran(site: Site, name: str) -> list[str]:
    """What a body or an errback of this name was called with, each time."""
    kinds = ("deploy", "collected", "mail", "explained")
    found = [row["body"]["argument"] for row in site.provider.ledger() if row["kind"] in kinds]
    return [argument for argument in found if argument.startswith(f"['{name}', ")]


def settled(site: Site, *members: AsyncResult[Any] | str) -> None:
    ids = [getattr(one, "id", one) for one in members]
    query = "SELECT id FROM jobs WHERE id = ANY (%s) AND settled_at IS NOT NULL"
    eventually(lambda: len(site.sql(query, ids)) == len(ids), 30, message="Celery knows of the members' ends")


def over(site: Site, chord_id: str) -> None:
    """Wait until nobody looks after a chord any more, and until what was sent before that has run."""
    eventually(lambda: not site.sql("SELECT id FROM chord WHERE id = %s", chord_id), 30, message="the chord is over")
    site.ends(site.send("pure"))
