"""How Celery delivers jobs, on one kind of broker: the modules of the tests say which, and take what it may change."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import pytest
from celery.result import AsyncResult
from kombu import Connection

from celery_safe_effects.testing import eventually
from celery_safe_effects.testing.process import patience
from tests.support.brokers import Broker, module_rabbitmq, module_redis
from tests.support.checks import job
from tests.support.delivery_tasks import LET_GO
from tests.support.site import Site

MORE = {"tests_queues": True}
"""For a worker that consumes a queue of `delivery_tasks.add_queues`."""
LATE = 2.0 * patience()
"""Seconds by which a job may start after its time."""


@pytest.fixture(scope="module")
def redis_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with module_redis(request) as broker:
        yield broker.url


@pytest.fixture(scope="module")
def module_broker(request: pytest.FixtureRequest, kind: str) -> Iterator[Broker]:
    with module_redis(request) if kind == "redis" else module_rabbitmq(request) as broker:
        forget(broker)
        yield broker
        forget(broker)


QUEUES = (
    "celery", "safe_effects", "h4_quorum", "h4_prio", "h4_topic", "h4_alone", "h4_pair", "h4_many", "h4_limited",
)  # fmt: skip


def forget(broker: Broker) -> None:
    """Queues of one kind must not be met by workers of another."""
    if broker.kind == "rabbitmq":
        with Connection(broker.url) as connection:
            for name in (*QUEUES, *(f"{one}.express" for one in QUEUES), "h4_media"):
                with suppress(Exception), connection.channel() as channel:
                    channel.queue_delete(name)
                with suppress(Exception), connection.channel() as channel:
                    channel.exchange_delete(name)


@pytest.fixture(scope="module")
def site_conf(kind: str, redis_url: str) -> dict[str, Any]:
    conf: dict[str, Any] = {
        "imports": ["tests.support.delivery_tasks"],
        "result_backend": redis_url,
        "safe_effects_republish_after": 2,
        "task_send_sent_event": True,
    }
    if kind == "redis":
        conf["broker_transport_options"] = {"global_keyprefix": "shop:"}
    elif kind == "classic":
        conf["task_queue_max_priority"] = 10
    else:
        # As Celery's documentation says: quorum queues, and a topic exchange for their native delayed delivery.
        conf |= {
            "task_default_queue": "h4_quorum",
            "task_default_exchange": "h4_quorum",
            "task_default_exchange_type": "topic",
            "task_default_routing_key": "h4_quorum",
            "task_default_queue_type": "quorum",
            "task_create_missing_queue_type": "quorum",
            "task_create_missing_queue_exchange_type": "topic",
            "broker_transport_options": {"confirm_publish": True},
        }
    return conf


@pytest.fixture(scope="module")
def site_worker() -> dict[str, Any]:
    return {"concurrency": 2}


def started(site: Site, job_id: str) -> list[datetime]:
    rows = site.sql("SELECT at FROM transitions WHERE job_id = %s AND to_status = 'leased' ORDER BY id", job_id)
    return [row["at"] for row in rows]


def noted(site: Site, *names: str) -> list[str]:
    """Which of these bodies ran, in their order."""
    return [name for row in site.provider.ledger(kind="noted") if (name := row["body"]["name"]) in names]


def counted(site: Site, name: str, label: str | None = None) -> int:
    rows = site.sql(
        "SELECT coalesce(sum(value), 0)::int AS n FROM counter WHERE name = %s AND label = coalesce(%s, label)",
        name,
        label,
    )
    return int(rows[0]["n"])


def waiting(site: Site, queue: str) -> int:
    depth = site.safe.publisher.ask(queue).messages
    return int(depth or 0)


def test_eta_and_countdown(site: Site) -> None:
    """Held in PostgreSQL until shortly before; never early, and soon after."""
    now = datetime.now(timezone.utc)
    sent = [site.send("pure", 1, countdown=seconds) for seconds in (0.3, 1.2, 2.5)]
    sent += [site.send("pure", 2, eta=now + timedelta(seconds=3))]
    sent += [site.send("pure", 3, eta=(now + timedelta(seconds=2)).astimezone(timezone(timedelta(hours=5))))]
    for result in sent:
        row = site.ends(result)
        (at,) = started(site, result.id)
        assert row["eta"] <= at <= row["eta"] + timedelta(seconds=LATE)


def test_a_retry_s_countdown(site: Site) -> None:
    """Also less than a second, which Celery's own delays on quorum queues cannot do."""
    sent = {countdown: site.send("retries_after", countdown) for countdown in (0, 0.4, 1, 2.5)}
    for countdown, result in sent.items():
        assert site.ends(result)["attempts"] == 2
        first, second = started(site, result.id)
        assert countdown - 0.1 <= (second - first).total_seconds() <= countdown + LATE
        assert result.get(timeout=10) == 1


@contextmanager
def held(site: Site, jobs: int, **options: Any) -> Iterator[list[AsyncResult[Any]]]:
    """As many processes as jobs are busy within: whatever is sent to them waits in their worker."""
    name = str(uuid4())
    busy = [site.send("holds", name, **options) for _ in range(jobs)]
    try:
        for one in busy:
            site.ends(one, "running")
        yield busy
    finally:
        site.provider.call(LET_GO, None, {"name": name})
    for one in busy:
        site.ends(one)


def test_expires(site: Site) -> None:
    """By the database's clock: on arrival, and while it waits in a worker; what has time left runs."""
    past = site.send("notes", "past", expires=datetime.now(timezone.utc) - timedelta(minutes=1))
    with held(site, 2):
        soon = site.send("notes", "soon", expires=1)
        later = site.send("notes", "later", expires=60)
        expired = "SELECT 1 FROM jobs WHERE id = %s AND expires_at < clock_timestamp()"
        eventually(lambda: site.sql(expired, soon.id), 10)
    for result in (past, soon):
        row = site.ends(result, "cancelled")
        assert (row["reason"], row["attempts"]) == ("expired", 0)
        assert eventually(lambda: result.state == "REVOKED", 10)  # noqa: B023 - called here and now
    site.ends(later)
    assert noted(site, "past", "soon", "later") == ["later"]


def test_time_limits_of_one_call(site: Site) -> None:
    soft = site.send("sleep", 30, soft_time_limit=2, max_attempts=1)
    hard = site.send("sleep", 30, time_limit=2, max_attempts=1)
    assert site.ends(soft, "failed")["reason"] == "error"
    assert "SoftTimeLimitExceeded" in site.ends(soft, "failed")["last_error"]
    assert site.log(hard)[-1] == "job running > failed #1 (max_attempts)" if site.ends(hard, "failed") else False
    assert "time_limit" in site.ends(hard, "failed")["last_error"]


def test_ignored_results(site: Site) -> None:
    result = site.send("pure", 1, ignore_result=True)
    assert site.ends(result)["settled_at"] is not None
    time.sleep(0.3)
    assert result.state == "PENDING"


def test_a_rate_limit_is_no_loss(site: Site) -> None:
    """The messages wait in the worker, longer than `republish_after`; nothing is published again."""
    names = [f"rated-{n}" for n in range(8)]
    before = counted(site, "republished"), counted(site, "stale_deliveries")
    sent = [site.send("rated", name) for name in names]
    for result in sent:
        assert site.ends(result)["attempts"] == 1
    assert sorted(noted(site, *names)) == names
    last = max(at for result in sent for at in started(site, result.id))
    first = min(job(site.sql, result.id)["created_at"] for result in sent)
    assert (last - first).total_seconds() > 3
    assert (counted(site, "republished"), counted(site, "stale_deliveries")) == before


class Events:
    """What Celery's monitors see of some jobs."""

    def __init__(self, site: Site) -> None:
        self.seen: list[dict[str, Any]] = []
        self._over = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(site,), daemon=True)

    def __enter__(self) -> Events:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)

    def _run(self, site: Site) -> None:
        with site.app.connection_for_read() as connection:
            receiver = site.app.events.Receiver(connection, handlers={"*": self.seen.append})
            with receiver.consumer_context() as (own, _, _):
                with suppress(TimeoutError):
                    own.drain_events(timeout=0.2)  # Redis is asked for events at the first look
                self._ready.set()
                while not self._over.is_set():
                    with suppress(TimeoutError):
                        own.drain_events(timeout=0.2)

    def of(self, result: AsyncResult[Any]) -> list[str]:
        return [event["type"] for event in self.seen if event.get("uuid") == result.id]


def test_events(site: Site) -> None:
    """In Celery's order, once each, also of a job that waited for its time or was delivered twice."""
    ends = {"succeeded": ["task-succeeded"], "failed": ["task-rejected", "task-failed"]}
    with Events(site) as events:
        sent = [(site.send("pure", 1), "succeeded"), (site.send("pure", 2, countdown=1), "succeeded")]
        sent += [(site.send("fails_late", "events"), "failed")]
        for result, end in sent:
            site.ends(result, end)

            def all_seen() -> bool:
                seen = events.of(result)  # noqa: B023 - called here and now
                assert sorted(seen) == sorted(["task-sent", "task-received", "task-started", *ends[end]])  # noqa: B023
                return True

            eventually(all_seen, 10)
            # `task-sent` is sent after the message itself.
            seen = [kind for kind in events.of(result) if kind != "task-sent"]
            assert seen == ["task-received", "task-started", *ends[end]]
        with held(site, 2):
            twice = site.send("pure", 3)
            eventually(lambda: waiting(site, site.app.conf.task_default_queue) == 0, 10)
            site.safe.republish(twice.id)  # by this process, or by a sweep that was quicker
        site.ends(twice)
        eventually(lambda: events.of(twice).count("task-received") >= 2, 10)
        eventually(lambda: "task-succeeded" in events.of(twice), 10)
        time.sleep(0.5)
        assert events.of(twice).count("task-succeeded") == 1


def test_late_and_rejected(site: Site) -> None:
    """A message that is rejected is gone; the row says what becomes of the job."""
    failed = site.send("fails_late", "late")
    ended = site.send("fails_late", "long", 20, time_limit=2, max_attempts=2)
    assert site.ends(failed, "failed")["attempts"] == 1
    row = site.ends(ended, "failed", timeout=40)
    assert row["attempts"] == 2, (row, site.log(ended))
    assert sorted(noted(site, "late", "long")) == ["late", "long", "long"]
    eventually(lambda: waiting(site, site.app.conf.task_default_queue) == 0, 10)


def test_priorities(site: Site, kind: str) -> None:
    """Redis hands out the lowest number first, RabbitMQ the highest."""
    sent = [site.send("notes", f"p{priority}", queue="h4_prio", priority=priority) for priority in (3, 9, 0, 6)]
    wanted = ["p0", "p3", "p6", "p9"] if kind == "redis" else ["p9", "p6", "p3", "p0"]
    with site.start("prio", queues=["h4_prio"], conf={"worker_prefetch_multiplier": 1}):
        for result in sent:
            site.ends(result)
    assert noted(site, *wanted) == wanted


def test_a_topic_exchange(site: Site) -> None:
    with site.start("topic", queues=["h4_topic"], conf=MORE):
        direct = site.send("notes", "by exchange", exchange="h4_media", routing_key="media.video")
        named = site.send("notes", "by queue", queue="h4_topic")
        retried = site.send("retries_after", 0.2, exchange="h4_media", routing_key="media.audio")
        for result in (direct, named, retried):
            site.ends(result)
            assert site.sql("SELECT split_part(lease_owner, '/', 1) AS w FROM job WHERE id = %s", result.id)
        owners = site.sql(
            "SELECT DISTINCT split_part(actor, '@', 1) AS w FROM transitions WHERE to_status = 'leased'"
            " AND job_id = ANY (%s)",
            [result.id for result in (direct, named, retried)],
        )
        assert owners == [{"w": "topic"}]


def test_a_broadcast_is_one_job(site: Site) -> None:
    """Every worker gets the message, one runs the job; sent again, too, if no worker was there."""
    unheard = site.send("notes", "unheard", queue="h4_everybody")
    with (
        site.start("b1", queues=["h4_everybody"], conf=MORE),
        site.start("b2", queues=["h4_everybody"], conf=MORE),
    ):
        before = counted(site, "stale_deliveries")
        heard = site.send("notes", "heard", queue="h4_everybody")
        site.ends(heard)
        site.ends(unheard)
        eventually(
            lambda: counted(site, "stale_deliveries") > before, 10, message="the other worker's delivery is stale"
        )
    assert sorted(noted(site, "heard", "unheard")) == ["heard", "unheard"]


def test_a_short_job_behind_a_long_one(site: Site) -> None:
    """It was prefetched by a worker that is busy; another one takes it within `republish_after`."""
    prefetching = {"worker_prefetch_multiplier": 4}
    with (
        site.start("busy", queues=["h4_pair"], concurrency=1, conf=prefetching),
        held(site, 1, queue="h4_pair") as (long,),
    ):
        short = [site.send("notes", f"short {n}", queue="h4_pair") for n in range(3)]
        eventually(lambda: waiting(site, "h4_pair") == 0, 10, message="they are prefetched")
        with site.start("free", queues=["h4_pair"], concurrency=1):
            for result in short:
                site.ends(result, timeout=10)
            assert site.ends(long, "running", timeout=0)["attempts"] == 1
    assert len(noted(site, *(f"short {n}" for n in range(3)))) == 3


MANY: dict[str, tuple[list[str], dict[str, Any]]] = {
    "tasks_per_child": (["--max-tasks-per-child=2"], {"worker_prefetch_multiplier": 0}),
    "memory_per_child": (["--max-memory-per-child=1000"], {"worker_prefetch_multiplier": 1}),
    "autoscale": (["--autoscale=4,1"], {"worker_enable_remote_control": False}),
    "late": (["--prefetch-multiplier=1"], {"task_acks_late": True, "worker_disable_prefetch": True}),
}


@pytest.mark.parametrize("options", MANY)
def test_worker_options(site: Site, options: str) -> None:
    extra, conf = MANY[options]
    names = [f"{options} {n}" for n in range(8)]
    with site.start("many", queues=["h4_many"], concurrency=2, extra=extra, conf=conf):
        sent = [site.send("notes", name, 0.1, queue="h4_many") for name in names]
        for result in sent:
            assert site.ends(result)["attempts"] == 1
        pids = {row["body"]["pid"] for row in site.provider.ledger(kind="noted") if row["body"]["name"] in names}
    assert sorted(noted(site, *names)) == sorted(names)
    if options.endswith("per_child"):
        assert len(pids) >= 4


def test_a_killed_child_is_seen_within_worker_lost_wait(site: Site) -> None:
    with site.start("alone", queues=["h4_alone"], conf={"worker_lost_wait": 1, "safe_effects_lease_ttl": 60}) as worker:
        result = site.send("sleep", 20, queue="h4_alone", max_attempts=1)
        site.ends(result, "running")
        worker.kill_child()
        row = site.ends(result, "failed", timeout=15)
    assert "worker_lost" in row["last_error"]


def test_without_remote_control(site: Site) -> None:
    """A cancel goes through the database, and needs nobody's ear."""
    with site.start("deaf", queues=["h4_alone"], conf={"worker_enable_remote_control": False}), ExitStack():
        result = site.send("notes", "cancelled", queue="h4_alone", countdown=60)
        site.safe.cancel(result.id, "not needed")
        site.ends(result, "cancelled")
    assert noted(site, "cancelled") == []
