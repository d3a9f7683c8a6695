"""Every way into the queue: with the library and without it, twice, at the same moment, and while something is down."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import psycopg
import pytest
from celery import Celery
from kombu import Connection, Producer, Queue
from sqlalchemy.engine import make_url

from celery_safe_effects import AcceptanceUnknown, IdempotencyConflict, SafeEffects
from celery_safe_effects.glue.envelope import MARK, arguments_digest
from celery_safe_effects.testing import LocalServer, RabbitMQServer, TcpProxy, eventually
from celery_safe_effects.testing.process import patience
from example_project.provider_client import Provider
from tests.support import producer_tasks
from tests.support.brokers import Broker
from tests.support.checks import assert_invariants, assert_ledger, assert_log, job, log, wait_status
from tests.support.processes import ROOT, Workers, process_environment
from tests.support.services import Sql

ONE_RUN = [
    "job - > queued #0",
    "job queued > leased #1",
    "job leased > running #1",
    "1 - > intent_recorded #1",
    "1 intent_recorded > outcome_confirmed #1",
    "job running > succeeded #1",
]


@pytest.fixture(params=["redis"])
def broker(request: pytest.FixtureRequest) -> Broker:
    """Redis, unless a test asks for both."""
    found: Broker = request.getfixturevalue(f"{request.param}_broker")
    return found


BOTH_BROKERS = pytest.mark.parametrize(
    "broker", ["redis", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)], indirect=True
)
EARLY_AND_LATE = pytest.mark.parametrize("acks_late", [False, True], ids=["early", "late"])


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    """With the tasks that send messages."""
    return {**app_conf, "imports": ["tests.support.producer_tasks"]}


@pytest.fixture
def impatient(app_conf: dict[str, Any]) -> None:
    """Redis gives back what a dead worker held after two seconds; RabbitMQ does so at once."""
    if app_conf["broker_url"].startswith("redis"):
        options = {"visibility_timeout": 2, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}
        app_conf["broker_transport_options"] = options


@pytest.fixture
def app(app: Celery) -> Celery:
    producer_tasks.add_tasks(app)
    return app


# -- a producer without the library ------------------------------------------------------------------------------------

PLAIN = """
import json, sys
from celery import Celery
app = Celery("old", broker=sys.argv[1])
if sys.argv[1].startswith("amqp"):
    app.conf.broker_transport_options = {"confirm_publish": True}  # or its exit may outrun the message
for name, args, options in json.loads(sys.argv[2]):
    print(app.send_task(name, args, **options).id)
assert not [module for module in sys.modules if module.startswith("celery_safe_effects")]
"""


def send_without_library(broker: Broker, *calls: tuple[str, list[Any], dict[str, Any]]) -> list[str]:
    """Send by name from a process that has never heard of us; returns the ids."""
    command = [sys.executable, "-c", PLAIN, broker.url, json.dumps(calls)]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def unacknowledged(broker: Broker) -> int:
    """Messages that a worker holds and has not acknowledged."""
    if isinstance(broker.server, RabbitMQServer):
        vhost = broker.url.rpartition("/")[2]
        listed = broker.server.ctl("list_queues", "-q", "-p", vhost, "name", "messages_unacknowledged")
        return sum(int(line.split()[1]) for line in str(listed).splitlines() if line.startswith("celery\t"))
    import redis

    with redis.Redis.from_url(broker.url) as client:
        held = client.hvals("unacked")
    return len([one for one in held if b'"celery_safe_effects.' not in one])


def blocked(sql: Sql, kind: str) -> bool:
    """Whether the library waits for a lock, of this kind, in our database."""
    return bool(
        sql(
            "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            " AND wait_event = %s AND application_name = 'celery-safe-effects'",
            kind,
        )
    )


def end_blocked(sql: Sql) -> None:
    """End the server's side of what waits: a dead client's statement would still go through."""
    query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    sql(f"{query} WHERE datname = current_database() AND wait_event_type = 'Lock'")


@pytest.fixture
def gate(sql: Sql, dsn: str) -> Callable[..., Any]:
    """`with gate("UPDATE")`: for the while, every claim waits; `with gate("INSERT")`: every new row."""

    @contextmanager
    def closed(what: str) -> Iterator[Callable[[], None]]:
        sql(
            "CREATE OR REPLACE FUNCTION public.gate() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN NEW; END $$"
        )
        sql(
            f"CREATE TRIGGER a_gate BEFORE {what} ON job FOR EACH ROW"
            f" WHEN (NEW.status = '{'running' if what == 'UPDATE' else 'queued'}') EXECUTE FUNCTION public.gate()"
        )
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("SELECT pg_advisory_lock(7)")
            yield lambda: None if connection.closed else connection.close()

    return closed


def appears(sql: Sql, job_id: str) -> None:
    """Wait for the row of a message that came without one."""
    eventually(lambda: sql("SELECT 1 FROM jobs WHERE id = %s", job_id), 15, message=f"message {job_id} has a row")


def ran_once(sql: Sql, provider: Provider, job_id: str, kind: str = "charge") -> None:
    """One job, one run, one call, one row, and the job has its reference."""
    appears(sql, job_id)
    wait_status(sql, job_id, "succeeded", timeout=20)
    assert_log(sql, job_id, ONE_RUN)
    assert job(sql, job_id)["outcome_ref"] == assert_ledger(provider, sql, job_id, kind=kind)["ref"]
    assert provider.received(kind, f"{job_id}:1") == 1


@pytest.mark.parametrize(
    ("broker", "acks_late"),
    [
        pytest.param("redis", False, id="redis-early"),
        pytest.param("rabbitmq", True, id="rabbitmq-late", marks=pytest.mark.rabbitmq),
    ],
    indirect=["broker"],
)
def test_messages_from_before_the_adoption(
    app: Celery, workers: Workers, broker: Broker, provider: Provider, sql: Sql, acks_late: bool
) -> None:
    """They lay in the queue when the first worker with the library started: each has a row and runs once."""
    named = str(uuid4())
    (plain, later, *expired) = send_without_library(
        broker,
        ("tests.charge", ["cus_1", 500], {}),
        ("tests.charge", ["cus_2", 500], {"countdown": 2, "task_id": named}),
        # RabbitMQ itself drops what expired.
        *([("tests.charge", ["cus_3", 500], {"expires": -5})] if broker.kind == "redis" else []),
    )
    assert later == named
    assert sql("SELECT id FROM jobs") == []
    workers("a", acks_late=acks_late)

    for job_id in (plain, later):
        ran_once(sql, provider, job_id)
        assert eventually(lambda: app.AsyncResult(job_id).state == "SUCCESS", 10)  # noqa: B023 - called here and now
    assert job(sql, later)["started_at"] >= job(sql, later)["eta"]
    for job_id in expired:
        appears(sql, job_id)
        wait_status(sql, job_id, "cancelled")
        assert_log(sql, job_id, ["job - > queued #0", "job queued > cancelled #0 (expired)"])
        assert eventually(lambda: app.AsyncResult(job_id).state == "REVOKED", 10)  # noqa: B023
    first = sql("SELECT DISTINCT actor FROM transitions WHERE from_status IS NULL AND operation_key IS NULL")
    assert {row["actor"].partition("/")[0] for row in first} == {"a@test"}, "whoever received them persisted them"
    eventually(lambda: broker.depth() + unacknowledged(broker) == 0, 10, message="every message is acknowledged")
    assert len(sql("SELECT id FROM jobs")) == 2 + len(expired)
    assert len(provider.ledger()) == 2
    assert_invariants(sql, provider)


def test_the_row_is_durable_before_the_ack(
    app: Celery, workers: Workers, broker: Broker, provider: Provider, sql: Sql, gate: Callable[..., Any]
) -> None:
    """No row can be written for a while: the message stays with the broker, and all goes well afterwards."""
    workers("a")
    with gate("INSERT"):
        (job_id,) = send_without_library(broker, ("tests.charge", ["cus_1", 500], {}))
        eventually(lambda: blocked(sql, "advisory"), 10, 0.01, message="the worker wants to write the row")
        (since,) = sql("SELECT clock_timestamp() AS at")[0].values()
        # Long enough for every process that tries to be refused.
        over = "SELECT clock_timestamp() > %s + interval '5 s' AS over"
        eventually(lambda: unacknowledged(broker) == 1 and sql(over, since)[0]["over"], 10)
        assert unacknowledged(broker) == 1
        assert app.AsyncResult(job_id).state == "PENDING"
    ran_once(sql, provider, job_id)
    assert eventually(lambda: app.AsyncResult(job_id).state == "SUCCESS", 10)
    eventually(lambda: unacknowledged(broker) == 0, 10, message="the message is acknowledged")
    assert_invariants(sql, provider)


@BOTH_BROKERS
def test_a_worker_dies_before_the_row_is_there(
    impatient: None, workers: Workers, broker: Broker, provider: Provider, sql: Sql, gate: Callable[..., Any]
) -> None:
    first = workers("a")
    with gate("INSERT"):
        (job_id,) = send_without_library(broker, ("tests.charge", ["cus_1", 500], {}))
        eventually(lambda: blocked(sql, "advisory"), 10, 0.01, message="the worker wants to write the row")
        first.kill()
        end_blocked(sql)
    assert sql("SELECT id FROM jobs") == []
    workers("b")
    ran_once(sql, provider, job_id)
    assert len(provider.ledger()) == 1
    assert_invariants(sql, provider)


@EARLY_AND_LATE
def test_a_worker_dies_between_the_row_and_its_claim(
    impatient: None,
    workers: Workers,
    broker: Broker,
    provider: Provider,
    sql: Sql,
    gate: Callable[..., Any],
    acks_late: bool,
) -> None:
    first = workers("a", acks_late=acks_late)
    with gate("UPDATE"):
        (job_id,) = send_without_library(broker, ("tests.charge", ["cus_1", 500], {}))
        eventually(lambda: blocked(sql, "advisory"), 10, 0.01, message="the worker wants to claim")
        held = 1 if acks_late else 0
        eventually(lambda: unacknowledged(broker) == held, 10, message="acknowledged where that comes first")
        first.kill()
        end_blocked(sql)
    assert log(sql, job_id) == ONE_RUN[:1]
    workers("b", acks_late=acks_late)
    ran_once(sql, provider, job_id)
    assert len(provider.ledger()) == 1
    assert_invariants(sql, provider)


# -- a producer with the library that does not know the task -----------------------------------------------------------


def test_a_producer_that_knows_the_name_alone(
    app_conf: dict[str, Any], workers: Workers, broker: Broker, provider: Provider, sql: Sql
) -> None:
    """Its rows are written before the messages, as soon as one worker has told the database what is a SafeTask."""
    front = Celery("front", set_as_current=False)
    front.conf.update({**app_conf, "imports": []})
    safe = SafeEffects(front)
    try:
        assert "tests.charge" not in front.tasks
        keyed = front.send_task("tests.charge", ("cus_1", 1), idempotency_key="order-1")
        assert log(sql, keyed.id) == ONE_RUN[:1], "a key asks for a row, whatever the task is"
        early = front.send_task("tests.charge", ("cus_2", 2))
        assert sql("SELECT id FROM jobs WHERE id = %s", early.id) == [], "nobody could know"
        workers("a")
        late = front.send_task("tests.charge_both", ("cus_3", 3))  # it asks again about the other one in a while
        (row,) = sql("SELECT actor FROM transitions WHERE job_id = %s AND from_status IS NULL", late.id)
        assert row["actor"] == "producer"
        other = front.send_task("tests.plain", (1,))
        assert front.send_task("tests.charge", ("cus_1", 1), idempotency_key="order-1").id == keyed.id
        for result, kind in ((keyed, "charge"), (early, "charge"), (late, "charge_both")):
            ran_once(sql, provider, result.id, kind)
        assert other.get(timeout=10) == 1
        assert len(sql("SELECT id FROM jobs")) == 3
        assert len(provider.ledger()) == 3
    finally:
        safe.close()
        front.close()


# -- the same call twice, or at the same moment ------------------------------------------------------------------------


def test_one_task_id_is_one_job(app: Celery, broker: Broker, sql: Sql) -> None:
    charge, named = app.tasks["tests.charge"], str(uuid4())
    assert {charge.apply_async(("cus_1", 500), task_id=named).id for _ in range(3)} == {named}
    with pytest.raises(IdempotencyConflict) as caught:
        charge.apply_async(("cus_1", 501), task_id=named)
    assert caught.value.job_id == named
    with pytest.raises(IdempotencyConflict):
        app.tasks["tests.charge_both"].apply_async(("cus_1", 500), task_id=named)
    assert [row["id"] for row in sql("SELECT id FROM jobs")] == [named]
    assert broker.depth() == 1


AT_ONCE = """
import json, os, sys, threading, time
from pathlib import Path
from tests.support.app import app
gate, name = sys.argv[1:]
charge = app.tasks["tests.charge"]
charge.apply_async(("warm", 1), idempotency_key=name)  # connections are open
Path(f"{gate}.{name}").touch()
while not Path(gate).exists():
    time.sleep(0.001)
found, barrier = [], threading.Barrier(3)
def producer():
    for n in range(10):
        barrier.wait()
        found.append((n, charge.apply_async(("cus_1", n), idempotency_key=f"order-{n}", tenant="acme").id))
threads = [threading.Thread(target=producer) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps(found))
"""


def test_one_key_from_several_producers_at_the_same_moment(
    app_conf: dict[str, Any], provider: Provider, broker: Broker, sql: Sql, tmp_path: Path
) -> None:
    """Two processes with three threads each enqueue ten orders in step: each order is one job and one message."""
    start = tmp_path / "start"
    env = {**process_environment(app_conf, provider), "PATH": "/usr/bin:/bin"}
    producers = [
        subprocess.Popen([sys.executable, "-c", AT_ONCE, start, name], cwd=ROOT, env=env, stdout=subprocess.PIPE)
        for name in "ab"
    ]
    try:
        eventually(lambda: all(Path(f"{start}.{name}").exists() for name in "ab"), 30, message="all are ready")
        start.touch()
        found = [tuple(one) for p in producers for one in json.loads(p.communicate(timeout=30)[0])]
    finally:
        for process in producers:
            process.kill()
            process.wait()
    assert len(found) == 60
    rows = {row["idempotency_key"]: row["id"] for row in sql("SELECT * FROM jobs WHERE tenant = 'acme'")}
    assert {(n, rows[f"order-{n}"]) for n in range(10)} == set(found)
    assert len(sql("SELECT id FROM jobs")) == 12
    assert broker.depth() == 12


# -- a lost reply ------------------------------------------------------------------------------------------------------


class Enqueued(NamedTuple):
    id: str | None
    error: BaseException | None


@pytest.fixture
def far_app(app_conf: dict[str, Any], database_url: str, provider: Provider) -> Iterator[tuple[Celery, TcpProxy]]:
    """A producer behind a connection to the database that can be cut."""
    from tests.support.tasks import create_app

    url = make_url(database_url)
    with TcpProxy(str(url.host), int(url.port or 5432)) as proxy:
        through = url.set(host=proxy.host, port=proxy.port).render_as_string(hide_password=False)
        made: Any = create_app({**app_conf, "safe_effects_database_url": through, "imports": []})
        yield made, proxy
        made.safe_effects.close()
        made.close()


def enqueue_in_a_thread(app: Celery, *args: Any, **options: Any) -> Callable[[], Enqueued]:
    """Begin to enqueue; returns what waits for the end."""
    answers: list[Enqueued] = []

    def enqueue() -> None:
        try:
            answers.append(Enqueued(app.tasks["tests.charge"].apply_async(args, **options).id, None))
        except BaseException as error:
            answers.append(Enqueued(None, error))

    thread = threading.Thread(target=enqueue)
    thread.start()

    def wait() -> Enqueued:
        thread.join(20)
        return answers[0]

    return wait


def test_a_lost_reply_is_asked_for_again(
    far_app: tuple[Celery, TcpProxy], broker: Broker, sql: Sql, gate: Callable[..., Any]
) -> None:
    """The connection breaks after the statement was sent: the call finds out that it got through."""
    app, proxy = far_app
    with gate("INSERT") as open_gate:
        answer = enqueue_in_a_thread(app, "cus_1", 500)
        eventually(lambda: blocked(sql, "advisory"), 10, 0.01, message="the statement is at the server")
        proxy.cut()
        open_gate()
        found = answer()
    assert found.error is None
    (row,) = sql("SELECT id FROM jobs")
    assert row["id"] == found.id
    assert log(sql, str(found.id)) == ONE_RUN[:1]
    assert broker.depth() == 1


@pytest.mark.parametrize("committed", [True, False], ids=["accepted", "not accepted"])
def test_who_cannot_know_says_so_and_is_asked_again(
    far_app: tuple[Celery, TcpProxy],
    broker: Broker,
    provider: Provider,
    workers: Workers,
    sql: Sql,
    gate: Callable[..., Any],
    committed: bool,
) -> None:
    app, proxy = far_app
    with gate("INSERT") as open_gate:
        answer = enqueue_in_a_thread(app, "cus_1", 500)
        eventually(lambda: blocked(sql, "advisory"), 10, 0.01, message="the statement is at the server")
        proxy.refuse()
        if not committed:
            end_blocked(sql)
        open_gate()
        found = answer()
    assert isinstance(found.error, AcceptanceUnknown)
    named = found.error.job_id
    if committed:
        eventually(lambda: sql("SELECT id FROM jobs"), 10)
    assert [row["id"] for row in sql("SELECT id FROM jobs")] == ([named] if committed else [])
    proxy.accept()
    assert app.tasks["tests.charge"].apply_async(("cus_1", 500), task_id=named).id == named
    workers("a")
    ran_once(sql, provider, named)
    assert len(sql("SELECT id FROM jobs")) == 1


# -- messages that are not what the row says ---------------------------------------------------------------------------


class Post:
    """The queue, as somebody with access to the broker sees it."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    def take(self) -> Any:
        """Take a message out."""
        with Connection(self.broker.url) as connection, connection.channel() as channel:
            message = Queue("celery")(channel).get(no_ack=True)
            assert message is not None
            return message

    def put(self, message: Any, *, times: int = 1, args: Any = None, headers: Any = None) -> None:
        """Put it back, as often as wanted, and changed."""
        body = message.body
        if args is not None:
            body = json.dumps([args, *json.loads(body)[1:]])
        with Connection(self.broker.url) as connection, connection.channel() as channel:
            for _ in range(times):
                Producer(channel).publish(
                    body,
                    routing_key="celery",
                    content_type=message.content_type,
                    content_encoding=message.content_encoding,
                    headers=headers if headers is not None else message.headers,
                    correlation_id=message.properties["correlation_id"],
                )


def stale(sql: Sql) -> int:
    """How many deliveries were counted as stale."""
    return int(sql("SELECT coalesce(sum(value), 0) AS n FROM counter WHERE name = 'stale_deliveries'")[0]["n"])


@EARLY_AND_LATE
def test_a_changed_payload_never_runs(
    app: Celery,
    app_conf: dict[str, Any],
    workers: Workers,
    broker: Broker,
    provider: Provider,
    sql: Sql,
    acks_late: bool,
) -> None:
    result = app.tasks["tests.charge"].apply_async(("cus_1", 500))
    post = Post(broker)
    original = post.take()
    other = ["cus_1", 999]
    mark = original.headers[MARK]
    unmarked = {name: value for name, value in original.headers.items() if name != MARK}
    post.put(original, args=other)
    forged = {**mark, "digest": arguments_digest("tests.charge", other, {})}
    post.put(original, args=other, headers={**unmarked, MARK: forged})
    post.put(original, args=other, headers=unmarked)
    # Nothing brings the right one back meanwhile.
    sql("UPDATE job SET next_publish_at = clock_timestamp() + interval '600 s'")
    workers("a", acks_late=acks_late, conf={"safe_effects_republish_after": 600})

    eventually(lambda: stale(sql) == 3, 15, message="all three are counted")
    assert log(sql, result.id) == ONE_RUN[:1]
    assert provider.received("charge") == 0
    assert result.state == "PENDING"
    eventually(lambda: broker.depth() + unacknowledged(broker) == 0, 10, message="none of them comes again")
    post.put(original)
    ran_once(sql, provider, result.id)
    (row,) = provider.ledger()
    assert row["body"]["cents"] == 500


def test_six_copies_run_once(app: Celery, workers: Workers, broker: Broker, provider: Provider, sql: Sql) -> None:
    """Published five times more before a worker claims, by hand and by the operator, and once more after the end."""
    provider.control(kind="charge", delay_before=0.3)
    result = app.tasks["tests.charge"].apply_async(("cus_1", 500))
    safe: Any = app.safe_effects
    assert [safe.republish(result.id) for _ in range(2)] == [1, 1]
    post = Post(broker)
    message = post.take()
    post.put(message, times=4)
    assert broker.depth() == 6
    workers("a", concurrency=4)
    ran_once(sql, provider, result.id)
    eventually(lambda: stale(sql) == 5, 10, message="the others are counted")
    eventually(lambda: job(sql, result.id)["settled_at"], 10)
    post.put(message)
    eventually(lambda: stale(sql) == 6, 10, message="so is the one after the end")
    ran_once(sql, provider, result.id)
    assert_invariants(sql, provider)


# -- what a job sends --------------------------------------------------------------------------------------------------


def test_callbacks_run_once_though_the_end_is_told_twice(
    app: Celery, workers: Workers, broker: Broker, provider: Provider, sql: Sql
) -> None:
    """A SafeTask once; a plain task at least once, always under the same id. Whoever sent the job."""
    worker = workers("a")
    links = [app.signature(f"tests.{name}") for name in ("follow", "plain")]
    sent = [
        app.tasks["tests.mortal"].apply_async(("order-1",), link=links).id,
        *send_without_library(broker, ("tests.mortal", ["order-2"], {"link": links})),
    ]

    def times_told() -> list[int]:
        return [worker.log().count(f"Task tests.mortal[{job_id}] succeeded") for job_id in sent]

    def plain() -> Counter[str]:
        return Counter(re.findall(r"tests\.plain\[(\S+)\] succeeded", worker.log()))

    eventually(lambda: len(sql("SELECT id FROM jobs WHERE settled_at IS NOT NULL")) == 4, 15, message="all ended")
    eventually(lambda: sum(plain().values()) >= 2, 10)
    before = sql("SELECT * FROM transitions ORDER BY id")
    assert times_told() == [1, 1]

    sql("UPDATE job SET settled_at = NULL, next_publish_at = clock_timestamp() WHERE id = ANY (%s)", sent)

    eventually(lambda: times_told() == [2, 2], 15, message="Celery was told again")
    eventually(lambda: not sql("SELECT id FROM jobs WHERE settled_at IS NULL"), 10, message="and that was noted")
    assert len(plain()) == 2, "however often, under the same ids"
    callbacks = [row["id"] for row in sql("SELECT id FROM jobs WHERE task = 'tests.follow'")]
    assert len(callbacks) == 2
    for kind, ids in (("refund", sent), ("deploy", callbacks)):
        for job_id in ids:
            ran_once(sql, provider, job_id, kind)
    assert sql("SELECT * FROM transitions ORDER BY id") == before
    assert len(provider.ledger()) == 4


def test_children_keep_their_ids_when_the_body_runs_again(
    app: Celery, workers: Workers, provider: Provider, sql: Sql
) -> None:
    first = workers("a", concurrency=2)
    result = app.tasks["tests.two_children"].apply_async(("order-1",), tenant="acme")
    eventually(lambda: provider.received("entered_parent"), 15, message="it stands still")
    children = "SELECT * FROM jobs WHERE parent_id = %s ORDER BY created_at"
    sent = [row["id"] for row in sql(children, result.id)]
    assert len(sent) == 2
    first.kill()
    workers("b", concurrency=2)

    row = wait_status(sql, result.id, "succeeded", timeout=20)
    assert (row["result"], row["attempts"]) == (sent, 2)
    assert [row["id"] for row in sql(children, result.id)] == sent
    for child in sent:
        wait_status(sql, child, "succeeded", timeout=20)
        assert job(sql, child)["tenant"] == "acme"
        assert len(provider.ledger(key=f"{child}:1", kind="deploy")) == 1
    deployed = [row["body"]["argument"] for row in provider.ledger(kind="deploy")]
    # Two jobs of their own: nothing promises which of them a broker gives first.
    assert sorted(deployed) == ["'after order-1'", "'before order-1'"]
    assert provider.received("refund") == 1
    assert result.get(timeout=10) == sent
    assert_invariants(sql, provider)


def test_a_retry_and_a_replacement_keep_the_id(app: Celery, workers: Workers, provider: Provider, sql: Sql) -> None:
    workers("a")
    retried = app.tasks["tests.retries"].apply_async(("order-1", 3))
    replaced = app.tasks["tests.replaces"].apply_async(("order-2",), idempotency_key="order-2")
    eventually(lambda: retried.state == "RETRY", 10, message="Celery shows the retry")
    again = ["job queued > leased #2", "job leased > running #2"]

    row = wait_status(sql, retried.id, "succeeded", timeout=20)
    waits = "job running > queued #1 (retry: LookupError: not there yet)"
    assert_log(sql, retried.id, [*ONE_RUN[:5], waits, *again, "job running > succeeded #2"])
    refunded = assert_ledger(provider, sql, retried.id)
    assert provider.received("refund", f"{retried.id}:1") == 1
    assert row["attempts"] == 2
    assert retried.get(timeout=10) == [refunded["ref"], 1, True]
    *_, waiting, claimed, _, _ = sql("SELECT at FROM transitions WHERE job_id = %s ORDER BY id", retried.id)
    assert timedelta(seconds=3) <= claimed["at"] - waiting["at"] < timedelta(seconds=3 + (2 + 0.5 + 1) * patience())

    row = wait_status(sql, replaced.id, "succeeded", timeout=20)
    swapped = [
        "job running > queued #1 (replaced)",
        *again,
        "1:1 - > intent_recorded #2",
        "1:1 intent_recorded > outcome_confirmed #2",
    ]
    assert_log(sql, replaced.id, [*ONE_RUN[:5], *swapped, "job running > succeeded #2"])
    refunded = assert_ledger(provider, sql, replaced.id, "1", "refund")
    deployed = assert_ledger(provider, sql, replaced.id, "1:1", "deploy")
    assert deployed["body"]["argument"] == repr(refunded["ref"])
    assert (row["task"], row["outcome_ref"]) == ("tests.follow", deployed["ref"])
    assert replaced.get(timeout=10) == deployed["ref"]
    assert len(sql("SELECT id FROM jobs")) == 2
    assert_invariants(sql, provider)


# -- time --------------------------------------------------------------------------------------------------------------


def test_an_eta_is_kept(app: Celery, workers: Workers, broker: Broker, sql: Sql, provider: Provider) -> None:
    """Never early, within two seconds and a sweep; until shortly before, no message is out."""
    workers("a")
    charge = app.tasks["tests.charge"]
    near = charge.apply_async(("cus_1", 1), countdown=0.3)
    far = charge.apply_async(("cus_2", 2), eta=datetime.now(timezone.utc) + timedelta(seconds=6))
    eventually(lambda: job(sql, near.id)["status"] == "succeeded", 10)
    assert job(sql, far.id)["status"] == "queued"
    assert broker.depth() + unacknowledged(broker) == 0, "the other one waits in the database alone"
    for result in (near, far):
        ran_once(sql, provider, result.id)
        row = job(sql, result.id)
        late = (row["started_at"] - row["eta"]).total_seconds()
        assert 0 <= late <= (2 + 0.5) * patience()
    assert provider.received("charge") == 2


@BOTH_BROKERS
def test_what_expired_never_runs(app: Celery, workers: Workers, broker: Broker, provider: Provider, sql: Sql) -> None:
    """Unless an operator wants it after all; the message then has no time limit of its own."""
    charge = app.tasks["tests.charge"]
    past = charge.apply_async(("cus_1", 1), expires=datetime.now(timezone.utc) - timedelta(minutes=1))
    queued = charge.apply_async(("cus_2", 2), expires=0.5)
    kept = charge.apply_async(("cus_3", 3), expires=300)
    eventually(lambda: sql("SELECT 1 FROM jobs WHERE id = %s AND expires_at < clock_timestamp()", queued.id), 5)
    worker = workers("a")
    ran_once(sql, provider, kept.id)
    for result in (past, queued):
        wait_status(sql, result.id, "cancelled", timeout=15)
        assert_log(sql, result.id, ["job - > queued #0", "job queued > cancelled #0 (expired)"])
        assert eventually(lambda: result.state == "REVOKED", 10)  # noqa: B023 - called here and now
    assert len(provider.ledger()) == 1
    assert_invariants(sql, provider)

    worker.terminate()
    worker.wait(20)  # nothing that it took comes back to the queue
    safe: Any = app.safe_effects
    safe.retry(past.id, "the customer insists")
    eventually(lambda: broker.depth() >= 1, 10, message="its message waits for a worker")


# -- the broker is down ------------------------------------------------------------------------------------------------


def test_the_broker_is_down_during_an_enqueue(
    app_conf: dict[str, Any], workers: Workers, own_broker: LocalServer, broker: Broker, provider: Provider, sql: Sql
) -> None:
    """The call returns, and the job runs when the broker is back, without anybody enqueueing it again."""
    from tests.support.tasks import create_app

    app_conf["result_backend"] = None  # which is on the same server here
    app: Any = create_app({**app_conf, "imports": []})
    try:
        workers("a")
        own_broker.stop()
        before = time.monotonic()
        result = app.tasks["tests.charge"].apply_async(("cus_1", 500), idempotency_key="order-1")
        assert time.monotonic() - before < 8
        assert log(sql, result.id) == ONE_RUN[:1]
        own_broker.start()
        ran_once(sql, provider, result.id)
        assert len(sql("SELECT id FROM jobs")) == 1
    finally:
        own_broker.start()
        app.safe_effects.close()
        app.close()
