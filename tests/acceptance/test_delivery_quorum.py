"""Deliveries on RabbitMQ's quorum queues, with Celery's native delayed delivery."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_safe_effects.testing import RabbitMQServer, eventually
from tests.support.delivery import (  # noqa: F401 - fixtures and tests
    MORE,
    counted,
    module_broker,
    noted,
    redis_url,
    site_conf,
    site_worker,
    test_a_broadcast_is_one_job,
    test_a_retry_s_countdown,
    test_a_short_job_behind_a_long_one,
    test_a_topic_exchange,
    test_eta_and_countdown,
    test_events,
    test_late_and_rejected,
    waiting,
)
from tests.support.site import Site

pytestmark = pytest.mark.rabbitmq


@pytest.fixture(scope="module")
def kind() -> str:
    return "quorum"


def test_celery_s_native_delays_are_for_plain_tasks(site: Site) -> None:
    """A job in there could neither be cancelled nor found again, and would start a whole second late."""
    levels = [f"celery_delayed_{level}" for level in range(28)]
    job = site.send("pure", 1, countdown=30)
    assert [waiting(site, level) for level in levels] == [0] * 28
    plain = site.app.tasks["tests.plain"].apply_async((1,), countdown=4)
    assert sum(waiting(site, level) for level in levels) == 1
    assert plain.get(timeout=20) == 1
    site.safe.cancel(job.id, "seen")


def test_priorities_are_harmless(site: Site) -> None:
    """What such a queue makes of them is the broker's; they are kept, and hold up nothing."""
    sent = [site.send("notes", f"any {priority}", priority=priority) for priority in (0, 9, 255)]
    for result in sent:
        site.ends(result)
    rows = site.sql("SELECT priority FROM job WHERE id = ANY (%s) ORDER BY priority", [one.id for one in sent])
    assert [row["priority"] for row in rows] == [0, 9, 255]


@pytest.mark.slow
def test_a_delivery_limit(site: Site) -> None:
    """The broker drops a message that was delivered too often; the job goes on until its own attempts are used up."""
    result = site.send("fails_late", "limited", 20, queue="h4_limited", max_attempts=3)
    for attempt in (1, 2):
        with site.start("limited", queues=["h4_limited"], conf={"task_acks_late": True, **MORE}) as worker:
            eventually(lambda: len(noted(site, "limited")) == attempt, 20)  # noqa: B023 - called here and now
            worker.kill()
    site.safe.cancel(result.id, "it is seen")
    with site.start("limited", queues=["h4_limited"], conf={"task_acks_late": True, **MORE}):
        site.ends(result, "cancelled")
        eventually(lambda: waiting(site, "h4_limited") == 0, 10, message="no message is left")
    assert noted(site, "limited") == ["limited"] * 2


@pytest.fixture
def impatient(site: Site) -> Iterator[None]:
    """RabbitMQ takes a message away from a consumer that did not acknowledge it in two seconds."""
    server = site.broker.server
    if not isinstance(server, RabbitMQServer):
        pytest.skip("needs a RabbitMQ server of its own")
    server.ctl("eval", "application:set_env(rabbit, consumer_timeout, 2000).")
    yield
    server.ctl("eval", "application:set_env(rabbit, consumer_timeout, 1800000).")


@pytest.mark.slow
def test_a_consumer_timeout_shorter_than_the_job(site: Site, impatient: None) -> None:
    """Under late acknowledgement the broker closes the channel and gives the message again: a stale delivery.

    Celery's worker ends at that, unless it is told to go on.
    """
    before = counted(site, "stale_deliveries")
    conf = {"task_acks_late": True, "broker_channel_error_retry": True}
    with site.start("patient", queues=["h4_alone"], conf=conf):
        result = site.send("notes", "longer", 9, queue="h4_alone")
        row = site.ends(result)
        eventually(lambda: counted(site, "stale_deliveries") > before, 10, message="it was delivered again")
    assert (row["attempts"], noted(site, "longer")) == (1, ["longer"])
