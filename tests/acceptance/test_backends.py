"""Result backends and serializers on real workers: what is told, what is kept, and what an enqueue does not need."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from celery import Celery
from kombu.compression import encoders

from celery_safe_effects import Happened, IdempotencyConflict
from celery_safe_effects.errors import PayloadInvalid
from celery_safe_effects.testing import eventually
from tests.support import backend_tasks
from tests.support.checks import wait_status
from tests.support.loud import skip_loudly
from tests.support.site import Site
from tests.support.tasks import create_app

ACCEPT = ["json", "yaml", "msgpack", "pickle"]


@pytest.fixture(scope="module")
def site_conf() -> dict[str, Any]:
    return {
        "imports": ["tests.support.backend_tasks"],
        "accept_content": ACCEPT,
        "task_track_started": True,
        "result_extended": True,
    }


# Celery starts no worker that accepts pickle as root, which tests in a container may be.
ENV = {"C_FORCE_ROOT": "1"}


@pytest.fixture(scope="module")
def site_worker() -> dict[str, Any]:
    return {"env": ENV}


class Told(NamedTuple):
    """An application with another result backend, and its producer."""

    kind: str
    app: Celery

    def send(self, name: str, *args: Any, **options: Any) -> Any:
        return self.app.tasks[f"tests.{name}"].apply_async(args, queue=self.kind, **options)


@pytest.fixture(scope="module", params=["redis", "database", "rpc", "none"])
def told(request: pytest.FixtureRequest, site: Site) -> Iterator[Told]:
    """Each backend with a worker of its own, in one database."""
    kind: str = request.param
    backend = {
        "redis": site.conf["result_backend"],
        "database": f"db+{site.conf['safe_effects_database_url']}",
        "rpc": "rpc://",
        "none": None,
    }[kind]
    conf = {"result_backend": backend}
    app = create_app({**site.conf, **conf, "imports": []})
    backend_tasks.add_tasks(app)
    with site.start(f"told-{kind}", conf=conf, env=ENV, queues=[kind]):
        yield Told(kind, app)
    app.__dict__["_safe_effects"].close()
    app.close()


def again(site: Site, job: str) -> None:
    """Celery was not told, as far as the row knows."""
    eventually(lambda: site.sql("SELECT 1 FROM job WHERE id = %s AND settled_at IS NOT NULL", job), 20)
    site.sql("UPDATE job SET settled_at = NULL, next_publish_at = clock_timestamp() WHERE id = %s", job)
    eventually(lambda: site.sql("SELECT 1 FROM job WHERE id = %s AND settled_at IS NOT NULL", job), 20)


def test_what_a_backend_is_told(site: Site, told: Told) -> None:
    good = told.send("tells", "order-1", {"n": [1, 2]})
    bad = told.send("tells", "order-2", None, True)
    site.provider.control(kind="charge_plain", drop_reply=True, times=1)
    parked = told.send("charge_plain", "cus_1", 5)
    assert wait_status(site.sql, good.id, "succeeded")["result"] == {"n": [1, 2]}
    wait_status(site.sql, bad.id, "failed")
    wait_status(site.sql, parked.id, "unknown")
    if told.kind == "none":
        eventually(lambda: len(site.sql("SELECT 1 FROM jobs WHERE settled_at IS NOT NULL AND id IN (%s, %s)",
                                        good.id, bad.id)) == 2, 20)  # fmt: skip
    else:
        assert good.get(timeout=20) == {"n": [1, 2]}
        with pytest.raises(LookupError, match="order-2"):
            bad.get(timeout=20)
        eventually(lambda: parked.state == "UNKNOWN", 20, message="the parked one is shown")
        assert not parked.ready()
    for result in (good, bad):
        again(site, result.id)
    if told.kind in ("redis", "database"):
        meta = told.app.backend.get_task_meta(good.id, cache=False)
        assert (meta["status"], meta["result"], meta["name"]) == ("SUCCESS", {"n": [1, 2]}, "tests.tells")
        assert told.app.backend.get_task_meta(bad.id, cache=False)["status"] == "FAILURE"
    (happened,) = site.provider.ledger(key=f"{parked.id}:1")
    site.safe.resolve(f"{parked.id}:1", Happened(happened["ref"]), actor="ops", reason="seen in the bank's list")
    wait_status(site.sql, parked.id, "succeeded")
    if told.kind != "none":
        assert parked.get(timeout=20) == happened["ref"]


def test_started_is_shown_after_the_claim(site: Site) -> None:
    result = site.send("sleep", 4.0)
    eventually(lambda: result.state == "STARTED", 10, 0.02)
    assert site.sql("SELECT status FROM jobs WHERE id = %s", result.id) == [{"status": "running"}]
    assert result.get(timeout=20) == 4.0


@pytest.mark.parametrize("how", ["call", "task", "errors even if ignored"])
def test_ignored_results(site: Site, how: str) -> None:
    """Nothing is stored, also not STARTED, and nothing is left to tell."""
    task = site.app.tasks["tests.tells"]
    if how == "call":
        result = task.apply_async(("order-1", 5), ignore_result=True)
        site.ends(result)
    else:
        result = site.send("ignored" if how == "task" else "ignored_but_errors", "order-1")
        site.ends(result, "failed" if how.startswith("errors") else "succeeded")
    eventually(lambda: site.sql("SELECT 1 FROM jobs WHERE id = %s AND settled_at IS NOT NULL", result.id), 20)
    expected = "FAILURE" if how.startswith("errors") else "PENDING"
    assert eventually(lambda: site.app.backend.get_state(result.id) == expected, 5)
    assert site.sql("SELECT settle FROM job WHERE id = %s", result.id) == [{"settle": how != "task"}]


def test_a_result_that_the_backend_forgot_is_stored_again(site: Site) -> None:
    first = site.send("pure", 5, idempotency_key="forgotten")
    assert first.get(timeout=20) == 5
    eventually(lambda: site.sql("SELECT 1 FROM jobs WHERE id = %s AND settled_at IS NOT NULL", first.id), 20)
    site.app.backend.delete(site.app.backend.get_key_for_task(first.id))
    same = site.send("pure", 5, idempotency_key="forgotten")
    assert same.id == first.id
    site.app.backend._cache.clear()
    assert same.get(timeout=20) == 5


def test_a_result_that_expired_is_stored_again(site: Site) -> None:
    """By the backend's own clock; while it is gone, the row still has it."""
    conf = {"result_expires": 1, "result_compression": "gzip"}
    app = create_app({**site.conf, **conf, "imports": []})
    with site.start("forgets", conf=conf, env=ENV, queues=["forgets"]):

        def send() -> Any:
            return app.tasks["tests.pure"].apply_async(({"n": 5},), idempotency_key="expires", queue="forgets")

        first = send()
        assert first.get(timeout=20) == {"n": 5}
        eventually(lambda: site.sql("SELECT 1 FROM jobs WHERE id = %s AND settled_at IS NOT NULL", first.id), 20)
        app.backend._cache.clear()
        eventually(lambda: app.AsyncResult(first.id).state == "PENDING", 10, message="it has expired")
        same = send()
        assert (same.id, same.get(timeout=20)) == (first.id, {"n": 5})
        assert wait_status(site.sql, first.id, "succeeded")["attempts"] == 1
    app.__dict__["_safe_effects"].close()
    app.close()


# -- serializers -------------------------------------------------------------------------------------------------------

KINDS: dict[str, Any] = {
    "datetime": datetime(2026, 3, 29, 2, 30, 15, 123456, tzinfo=timezone.utc),
    "date": date(2026, 3, 29),
    "decimal": Decimal("10.50"),
    "uuid": UUID(int=7),
    "bytes": b"\xff\x00",
    "nested": {"a": [1, 2.5, None, True, "ü"], "b": {"c": []}},
}
BY = {"json": set(KINDS), "yaml": {"datetime", "date", "bytes", "nested"}, "msgpack": {"bytes", "nested"},
      "pickle": set(KINDS)}  # fmt: skip


@pytest.mark.parametrize("serializer", ACCEPT)
@pytest.mark.parametrize("compression", [None, "gzip", "lzma", "zstd"])
def test_arguments_by_every_serializer(
    request: pytest.FixtureRequest, site: Site, serializer: str, compression: str | None
) -> None:
    """Each runs; one key and the same arguments are one job; other arguments are a conflict."""
    if compression == "zstd" and "application/zstd" not in encoders():
        skip_loudly(request, "needs zstd: pip install backports.zstd")
    sent = {}
    for kind, value in KINDS.items():
        key = f"{serializer}-{compression}-{kind}"
        options = {"serializer": serializer, "compression": compression, "idempotency_key": key}
        if kind not in BY[serializer]:
            with pytest.raises(PayloadInvalid, match=f"cannot be encoded as {serializer}"):
                site.send("echo", value, **options)
            continue
        sent[kind] = site.send("echo", value, **options)
        assert site.send("echo", value, **options).id == sent[kind].id
        with pytest.raises(IdempotencyConflict):
            site.send("echo", value, 1, **options)
    for kind, result in sent.items():
        shown, args, _ = result.get(timeout=20)
        assert shown == repr((KINDS[kind],))
        assert args == [KINDS[kind]]


def test_pickled_arguments_that_are_no_json(site: Site) -> None:
    """The call's fingerprint is then of the pickle; the row alone brings the message back."""
    results = [site.send("echo", {3, 1, 2}, serializer="pickle", idempotency_key="set") for _ in range(2)]
    assert results[0].id == results[1].id
    assert results[0].get(timeout=20)[0] == "([1, 2, 3],)"
    with pytest.raises(IdempotencyConflict):
        site.send("echo", {4}, serializer="pickle", idempotency_key="set")
    again(site, results[0].id)


def test_a_worker_that_does_not_accept_the_content(site: Site) -> None:
    """It says so, and loses nothing: the job waits for one that does. Also of a producer without the library."""
    strict = {"accept_content": ["json"], "safe_effects_republish_after": 0.5}
    with site.start("strict", conf=strict, queues=["strict"]) as worker:
        marked = site.app.tasks["tests.echo"].apply_async(({1},), serializer="pickle", queue="strict")
        plain = Celery("plain", broker=site.broker.url, set_as_current=False)
        unmarked = plain.send_task("tests.echo", ({2},), serializer="pickle", queue="strict")
        for job in (marked.id, unmarked.id):
            eventually(lambda job=job: f"the message of job {job} cannot be read" in worker.log(), 30)  # type: ignore[misc]
            eventually(lambda job=job: site.sql("SELECT 1 FROM jobs WHERE id = %s AND reason = 'unreadable'", job), 10)  # type: ignore[misc]
            assert wait_status(site.sql, job, "queued")["attempts"] == 0
        assert "untrusted content of type pickle" in worker.log()
        assert {marked.state, site.app.AsyncResult(unmarked.id).state} == {"PENDING"}
        plain.close()
    with site.start("liberal", conf={"safe_effects_republish_after": 0.5}, env=ENV, queues=["strict"]):
        for job in (marked.id, unmarked.id):
            wait_status(site.sql, job, "succeeded")
        assert site.app.AsyncResult(unmarked.id).get(timeout=20)[0] == "([2],)"


def test_results_are_json_whatever_the_backend_takes(site: Site) -> None:
    """As it is told again, so it is told the first time; and what JSON cannot say is no result."""
    conf = {"result_serializer": "pickle", "result_accept_content": ["pickle", "json"]}
    app = create_app({**site.conf, **conf, "imports": []})
    backend_tasks.add_tasks(app)
    with site.start("pickles", conf=conf, env=ENV, queues=["pickles"]):
        value = {"when": KINDS["datetime"], "cents": Decimal(5), "list": [1, 2]}
        told = app.tasks["tests.tells"].apply_async(("order-1", value), queue="pickles")
        pair = app.tasks["tests.pair"].apply_async(queue="pickles")
        assert pair.get(timeout=20) == [1, 2]
        odd = app.tasks["tests.returns_set"].apply_async(queue="pickles")
        assert told.get(timeout=20) == value
        again(site, told.id)
        assert app.backend.get_task_meta(told.id, cache=False)["result"] == value
        row = wait_status(site.sql, odd.id, "failed")
        assert "not JSON" in row["last_error"]
        for _ in range(2):
            assert eventually(lambda: app.backend.get_task_meta(odd.id, cache=False)["status"] == "FAILURE", 10)
            again(site, odd.id)
    app.__dict__["_safe_effects"].close()
    app.close()


def test_a_body_may_return_a_result_of_celerys(site: Site) -> None:
    outer = site.send("returns_result")
    (inner, _), _ = outer.get(timeout=20)
    assert site.app.AsyncResult(inner).get(timeout=20) == 5


# -- enqueueing without the backend ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["redis://127.0.0.1:1/0", "rpc://", "db+postgresql+psycopg://127.0.0.1:1/x"])
def test_an_enqueue_needs_no_result_backend(site: Site, backend: str) -> None:
    app = create_app({**site.conf, "result_backend": backend, "imports": []})
    charge = app.tasks["tests.charge"]
    charge.apply_async(("cus_1", 1))  # some backends take their time to say that they are down
    before = time.monotonic()
    result = charge.apply_async(("cus_1", 500), idempotency_key=f"no backend {backend}")
    assert charge.apply_async(("cus_1", 500), idempotency_key=f"no backend {backend}").id == result.id
    assert time.monotonic() - before < 5
    wait_status(site.sql, result.id, "succeeded")
    app.__dict__["_safe_effects"].close()
    app.close()
