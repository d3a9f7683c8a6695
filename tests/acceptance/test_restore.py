"""The drill of docs/operations.md: a dump is restored onto a clean database, and the broker is rebuilt from it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, chain
from kombu import Connection

from celery_safe_effects.testing import EmbeddedPostgres, eventually
from example_project.provider_client import Provider
from tests.support.brokers import EACH_BROKER_AND_ACKS, Broker
from tests.support.checks import assert_invariants, assert_ledger, job
from tests.support.faults2 import becomes, counted
from tests.support.processes import APP, ROOT, Workers, process_environment
from tests.support.services import Sql, queries
from tests.support.tasks import create_app

pytestmark = pytest.mark.faults


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    return {**app_conf, "safe_effects_lease_ttl": 2}


@dataclass
class Restored:
    """The same application on the restored database."""

    conf: dict[str, Any]
    app: Celery
    sql: Sql
    provider: Provider

    def command(self, *args: str) -> dict[str, Any]:
        """Run `safe-effects ARGS --json`; what it answers."""
        done = subprocess.run(
            [sys.executable, "-m", "celery", "-A", APP, "safe-effects", *args, "--json"],
            env=process_environment(self.conf, self.provider),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
        found: dict[str, Any] = json.loads(done.stdout)
        return found


Restore = Callable[[Path], Restored]


@pytest.fixture
def dump(own_postgres: EmbeddedPostgres, database_url: str, tmp_path: Path) -> Callable[[], Path]:
    def make() -> Path:
        path = tmp_path / "safe-effects.dump"
        own_postgres.dump(database_url.rpartition("/")[2], path)
        return path

    return make


@pytest.fixture
def restore(own_postgres: EmbeddedPostgres, app_conf: dict[str, Any], provider: Provider) -> Iterator[Restore]:
    with ExitStack() as stack:

        def make(path: Path) -> Restored:
            name = f"restored_{uuid4().hex[:12]}"
            stack.callback(own_postgres.drop_database, name)
            url = own_postgres.restore(path, name)
            sql = stack.enter_context(queries(url.replace("+psycopg", "", 1)))
            conf = {**app_conf, "safe_effects_database_url": url}
            made = create_app(conf)
            stack.callback(made.close)
            stack.callback(made.__dict__["_safe_effects"].close)
            return Restored(conf, made, sql, provider)

        yield make


def send(app: Celery, name: str, cents: int, **options: Any) -> str:
    return str(app.tasks[f"tests.{name}"].apply_async(("cus_1", cents), **options).id)


@EACH_BROKER_AND_ACKS
def test_a_dump_and_an_empty_broker_run_everything_that_was_accepted_once(
    app: Celery,
    workers: Workers,
    broker: Broker,
    provider: Provider,
    sql: Sql,
    dump: Callable[[], Path],
    restore: Restore,
    acks_late: bool,
) -> None:
    worker = workers("a", acks_late=acks_late, env={"SAFE_EFFECTS_TEST_DEADLINE": "30"})
    finished = send(app, "charge", 1, idempotency_key="order-1")
    becomes(sql, finished, "succeeded")
    provider.control(kind="charge_plain", times=1, drop_reply=True)
    parked = send(app, "charge_plain", 2)
    becomes(sql, parked, "unknown")
    step = app.tasks["tests.charge"]
    flow = chain(step.si("cus_1", 3), step.si("cus_1", 4).set(countdown=8), step.si("cus_1", 5))
    last = flow.apply_async()
    third, second, first = last.id, last.parent.id, last.parent.parent.id
    becomes(sql, first, "succeeded")
    eventually(lambda: sql("SELECT 1 FROM jobs WHERE id = %s", second), 10, message="the chain's second step")
    # The provider has it, and the answer does not come.
    provider.control(kind="charge_both", times=1, delay_after=60)
    under_way = send(app, "charge_both", 6)
    eventually(lambda: provider.ledger(key=f"{under_way}:1"), 15, message="the provider has accepted")
    delayed = send(app, "charge", 7, countdown=9)
    keys = {f"order-{n}": send(app, "charge", n, idempotency_key=f"order-{n}") for n in (10, 11, 12)}
    before = {row["id"]: row for row in sql("SELECT * FROM jobs")}
    statuses = {name: before[one]["status"] for name, one in (("under way", under_way), ("delayed", delayed))}
    assert statuses == {"under way": "running", "delayed": "queued"}

    path = dump()
    worker.kill()
    broker.purge()
    restored = restore(path)
    assert {row["id"] for row in restored.sql("SELECT id FROM jobs")} == set(before)
    found = restored.command("republish", "--all")
    assert found == {"published": broker.depth(), "missed": 0, "epoch": None, "parked": 0}
    assert found["published"] >= len(keys), "and what has come due meanwhile"

    workers("b", acks_late=acks_late, conf=restored.conf)
    for one in (*keys.values(), under_way, delayed, second):
        becomes(restored.sql, one, "succeeded", timeout=40)
        assert_ledger(provider, restored.sql, one)
    eventually(lambda: restored.sql("SELECT 1 FROM jobs WHERE id = %s", third), 10, message="the chain's third step")
    becomes(restored.sql, third, "succeeded")
    # What was under way was looked up; nothing was sent again.
    assert [row["to_status"] for row in restored.sql(
        "SELECT to_status FROM transitions WHERE operation_key = %s ORDER BY id", f"{under_way}:1"
    )] == ["intent_recorded", "unknown", "outcome_confirmed"]  # fmt: skip
    for one in (delayed, second):
        row = job(restored.sql, one)
        assert row["started_at"] >= row["eta"], "not early"
    # What was over stays over, and what was open stays open until somebody knows.
    assert job(restored.sql, finished) == {**before[finished], "settled_at": job(restored.sql, finished)["settled_at"]}
    assert job(restored.sql, parked)["status"] == "unknown"
    (row,) = provider.ledger(key=f"{parked}:1")
    restored.command("resolve", f"{parked}:1", "--happened", "--ref", row["ref"], "--reason", "in their list")
    becomes(restored.sql, parked, "succeeded")
    # The same key is the same job.
    again = {key: send(restored.app, "charge", int(key[6:]), idempotency_key=key) for key in (*keys, "order-1")}
    assert again == {**keys, "order-1": finished}
    ledger = [row["key"] for row in provider.ledger()]
    assert len(ledger) == len(set(ledger)) == 10
    assert all(provider.received(row["kind"], row["key"]) == 1 for row in provider.ledger())
    assert_invariants(restored.sql, provider)


def messages(broker: Broker) -> list[Any]:
    """What the broker's queue holds; it is gone then."""
    found = []
    with Connection(broker.url) as connection, connection.channel() as channel:
        while (message := channel.basic_get("celery", no_ack=True)) is not None:
            found.append(message)
    return found


def deliver(broker: Broker, kept: list[Any]) -> None:
    """A producer that was stopped, or a broker that was, comes back with messages."""
    with Connection(broker.url) as connection, connection.channel() as channel:
        producer = connection.Producer(channel)
        for message in kept:
            producer.publish(
                message.body,
                exchange="",
                routing_key="celery",
                content_type=message.content_type,
                content_encoding=message.content_encoding,
                headers=dict(message.headers),
                correlation_id=message.headers["id"],
                serializer=None,
            )


@EACH_BROKER_AND_ACKS
def test_a_dump_that_is_older_than_the_broker_loses_nothing_silently(
    app: Celery,
    workers: Workers,
    broker: Broker,
    provider: Provider,
    sql: Sql,
    dump: Callable[[], Path],
    restore: Restore,
    acks_late: bool,
) -> None:
    sent, unsent = send(app, "charge", 1), send(app, "charge", 2)
    thinking = str(app.tasks["tests.pure"].delay(3).id)
    assert eventually(lambda: broker.depth() == 3, 10)
    path = dump()
    # What happens after the dump is lost: one job runs, another is accepted and runs, two are accepted.
    sql("UPDATE job SET next_publish_at = clock_timestamp() + interval '600 s' WHERE id <> %s", sent)
    rest = messages(broker)
    deliver(broker, [one for one in rest if one.headers["id"] == sent])
    worker = workers("a", acks_late=acks_late)
    becomes(sql, sent, "succeeded")
    done_since = send(app, "charge", 4)
    becomes(sql, done_since, "succeeded")
    worker.kill()
    lost = [send(app, "charge", n) for n in (5, 6)]
    assert eventually(lambda: broker.depth() == 2, 10)
    late = messages(broker)[1:]  # it comes when its number has long been given to another

    restored = restore(path)
    found = restored.command("republish", "--all", "--new-epoch", "--park", "--actor", "ops")
    assert (found["published"], found["parked"]) == (1, 2)
    workers("b", acks_late=acks_late, conf=restored.conf)
    new = [send(restored.app, "charge", n) for n in range(20, 28)]
    for one in (thinking, *new):
        becomes(restored.sql, one, "succeeded")
    assert max(row["seq"] for row in restored.sql("SELECT seq FROM job")) > 10
    deliver(broker, late)
    row = becomes(restored.sql, lost[1], "unknown")
    assert row["reason"] == "row_missing"
    for one in (sent, unsent):
        row = job(restored.sql, one)
        assert (row["status"], row["reason"]) == ("unknown", "restored")

    # Who looks at the provider's side knows what to do.
    assert provider.ledger(key=f"{sent}:1")
    assert not provider.ledger(key=f"{unsent}:1")
    assert not provider.ledger(key=f"{lost[1]}:1")
    restored.command("cancel", sent, "--reason", "the provider has it")
    for one in (unsent, lost[1]):
        restored.command("retry", one, "--reason", "the provider has no such charge")
        becomes(restored.sql, one, "succeeded")
        assert_ledger(provider, restored.sql, one)
    # Old messages of jobs that are known run nothing twice.
    deliver(broker, [*rest, *late])
    eventually(lambda: counted(restored.sql, "stale_deliveries") >= 4, 15, message="stale deliveries")
    ledger = [row["key"] for row in provider.ledger()]
    assert len(ledger) == len(set(ledger)) == 2 + len(new) + 2
