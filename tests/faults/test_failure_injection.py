"""The failure-injection test: a tool of two seconds under a lease of one and a half, and everything that may go wrong.

The tool is the provider, told to accept each call two seconds after it arrived, whether or not the caller still lives.
It is judged by the provider's ledger and by the whole log of transitions.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects import SafeEffectsError
from celery_safe_effects.testing import EmbeddedPostgres, WorkerProcess, eventually
from celery_safe_effects.testing.process import patience
from example_project.provider_client import Provider
from tests.support.checks import (
    assert_invariants,
    assert_ledger,
    assert_log,
    job,
    log,
    operation,
    wait_status,
)
from tests.support.processes import Beats, Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults

TOOL = 2.0
LEASE = 1.5

CLAIMED = [
    "job - > queued #0",
    "job queued > leased #1",
    "job leased > running #1",
    "1 - > intent_recorded #1",
]
PARKED = [
    *CLAIMED,
    "job running > unknown #1 (lease_expired)",
    "1 intent_recorded > unknown #1 (lease_expired)",
]
CONFIRMED = [
    *PARKED,
    "1 unknown > outcome_confirmed #1 (lookup)",
    "job unknown > queued #1 (resolved:~:1)",
    "job queued > leased #2",
    "job leased > running #2",
]


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    """A lease that is shorter than the tool."""
    app_conf.update(
        safe_effects_lease_ttl=LEASE,
        safe_effects_sweep_interval=0.5,
        safe_effects_reconcile_interval=0.5,
    )
    return app_conf


@pytest.fixture
def pair(workers: Workers, acks_late: bool) -> Callable[..., dict[str, WorkerProcess]]:
    """Start two workers; returns them by node name."""

    def start(**options: Any) -> dict[str, WorkerProcess]:
        made = [workers(name, acks_late=acks_late, ready=False, **options) for name in "ab"]
        for worker in made:
            worker.wait_ready()
        return {worker.node: worker for worker in made}

    return start


@pytest.fixture
def tool(provider: Provider) -> Provider:
    """The provider, which takes two seconds for each charge."""
    provider.control(kind="charge", delay_before=TOOL)
    return provider


def started(sql: Sql, provider: Provider, job_id: str, times: int = 1) -> str:
    """Wait until the provider got the call, and tell the node name of the worker that made it."""
    eventually(lambda: provider.received("charge") == times, 10, message="the provider received the call")
    return str(job(sql, job_id)["lease_owner"]).partition("/")[0]


def succeeded_once(sql: Sql, provider: Provider, job_id: str) -> None:
    """One job, one key, one call, one row in the ledger, and its reference as the job's outcome."""
    row = assert_ledger(provider, sql, job_id)
    assert provider.received("charge") == 1
    assert [o["key"] for o in sql("SELECT key FROM operations")] == [f"{job_id}:1"]
    found = job(sql, job_id)
    assert found["status"] == "succeeded"
    assert found["outcome_ref"] == row["ref"]
    assert found["result"] == row["ref"]
    assert_invariants(sql, provider)


def test_a_worker_is_killed_and_another_takes_over(
    app: Celery, pair: Callable[..., dict[str, WorkerProcess]], beat: Beats, tool: Provider, sql: Sql, acks_late: bool
) -> None:
    both = pair()
    beat()
    result = app.tasks["tests.charge"].apply_async(("cus_1", 500), idempotency_key="order-1")
    both.pop(started(sql, tool, result.id)).kill()

    wait_status(sql, result.id, "succeeded")

    assert_log(sql, result.id, [*CONFIRMED, "job running > succeeded #2"])
    succeeded_once(sql, tool, result.id)
    (survivor,) = both
    actors = sql("SELECT actor, to_status FROM transitions WHERE job_id = %s AND fence = 2", result.id)
    assert all(row["actor"].startswith(f"{survivor}/") for row in actors), actors
    # The same key again is the same job.
    again = app.tasks["tests.charge"].apply_async(("cus_1", 500), idempotency_key="order-1")
    assert again.id == result.id
    assert eventually(lambda: again.state == "SUCCESS", 10)
    assert len(tool.ledger()) == 1


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.usefixtures("broker")
def test_the_lookup_is_asked_before_the_provider_accepts(
    app: Celery, pair: Callable[..., dict[str, WorkerProcess]], provider: Provider, sql: Sql, acks_late: bool
) -> None:
    """Then its "not found" proves nothing: the call is still under way."""
    provider.control(kind="charge", delay_before=3 * TOOL)
    both = pair(env={"SAFE_EFFECTS_TEST_DEADLINE": "10"})
    result = app.tasks["tests.charge"].apply_async(("cus_1", 500))
    both.pop(started(sql, provider, result.id)).kill()
    eventually(lambda: provider.stats()["totals"]["lookups"], 10)
    assert provider.ledger() == []

    wait_status(sql, result.id, "succeeded")
    assert_log(sql, result.id, [*CONFIRMED, "job running > succeeded #2"])
    succeeded_once(sql, provider, result.id)


def test_cancelled_while_the_effect_runs(
    app: Celery, workers: Workers, tool: Provider, sql: Sql, acks_late: bool
) -> None:
    workers("a", acks_late=acks_late)
    result = app.tasks["tests.charge_then_mail"].apply_async(("cus_1", 500))
    started(sql, tool, result.id)

    during: Any = app.safe_effects
    assert during.cancel(result.id, "the customer left").status == "running"

    wait_status(sql, result.id, "cancelled")
    assert_log(
        sql,
        result.id,
        [
            *CLAIMED,
            "1 intent_recorded > outcome_confirmed #1",
            "job running > cancelled #1 (the customer left)",
        ],
    )
    assert_ledger(tool, sql, result.id)
    assert tool.received("charge") == 1
    assert tool.received("entered_after_the_checkpoint") == 0
    assert tool.received("mail") == 0
    assert_invariants(sql, tool)
    assert eventually(lambda: result.state == "REVOKED", 10)


def test_cancelled_while_the_effect_runs_and_its_worker_killed(
    app: Celery, pair: Callable[..., dict[str, WorkerProcess]], tool: Provider, sql: Sql, acks_late: bool
) -> None:
    both = pair()
    result = app.tasks["tests.charge_then_mail"].apply_async(("cus_1", 500))
    first = both.pop(started(sql, tool, result.id))
    during: Any = app.safe_effects
    during.cancel(result.id, "the customer left")
    first.kill()

    wait_status(sql, result.id, "cancelled")
    assert_log(
        sql,
        result.id,
        [
            *CLAIMED,
            "job running > unknown #1 (lease_expired)",
            "1 intent_recorded > unknown #1 (lease_expired)",
            "1 unknown > outcome_confirmed #1 (lookup)",
            "job unknown > cancelled #1 (the customer left)",
        ],
    )
    assert_ledger(tool, sql, result.id)
    assert tool.received("charge") == 1
    assert tool.received("entered_after_the_checkpoint") == 0
    assert tool.received("mail") == 0
    assert_invariants(sql, tool)
    assert eventually(lambda: result.state == "REVOKED", 10)


def test_the_database_is_down_while_a_worker_is_killed(
    app: Celery,
    pair: Callable[..., dict[str, WorkerProcess]],
    own_postgres: EmbeddedPostgres,
    tool: Provider,
    sql: Sql,
    acks_late: bool,
) -> None:
    both = pair()
    result = app.tasks["tests.charge"].apply_async(("cus_1", 500))
    first = both.pop(started(sql, tool, result.id))
    own_postgres.stop("immediate")
    first.kill()
    own_postgres.start()

    wait_status(sql, result.id, "succeeded")
    assert_log(sql, result.id, [*CONFIRMED, "job running > succeeded #2"])
    succeeded_once(sql, tool, result.id)
    assert eventually(lambda: result.state == "SUCCESS", 10)


def test_the_database_is_away_for_longer_than_the_lease(
    app: Celery,
    pair: Callable[..., dict[str, WorkerProcess]],
    own_postgres: EmbeddedPostgres,
    tool: Provider,
    sql: Sql,
    acks_late: bool,
) -> None:
    """The worker lives, and holds an outcome that it cannot write for as long."""
    pair()
    result = app.tasks["tests.charge"].apply_async(("cus_1", 500))
    started(sql, tool, result.id)
    until = job(sql, result.id)["lease_until"]
    own_postgres.stop("immediate")
    eventually(tool.ledger, 10, message="the tool is done")
    eventually(lambda: datetime.now(timezone.utc) > until, 10, message="the lease is over")
    own_postgres.start()
    assert sql("SELECT clock_timestamp() > %s AS over", until)[0]["over"]

    wait_status(sql, result.id, "succeeded")
    # Whoever comes first: the worker with its outcome, a sweep, or (after a sweep) the look-up.
    swept = [*PARKED, "1 unknown > outcome_confirmed #1 (lookup)", *CONFIRMED[7:], "job running > succeeded #2"]
    evidence = [line.replace(" (lookup)", "") for line in swept]
    kept = [*CLAIMED, "1 intent_recorded > outcome_confirmed #1", "job running > succeeded #1"]
    fenced = [
        *CLAIMED,
        "1 intent_recorded > outcome_confirmed #1",
        "job running > queued #1 (lease_expired)",
        *CONFIRMED[8:],
        "job running > succeeded #2",
    ]
    assert_log(sql, result.id, kept, swept, evidence, fenced)
    succeeded_once(sql, tool, result.id)


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.usefixtures("broker")
def test_the_database_is_read_only_for_a_while(
    app: Celery, workers: Workers, tool: Provider, sql: Sql, acks_late: bool
) -> None:
    """As in a failover, while the server at hand is no primary any more: one job has an outcome, another arrives."""

    def read_only(value: str) -> None:
        (row,) = sql("SELECT current_database() AS name")
        sql(f"ALTER DATABASE {row['name']} SET default_transaction_read_only = {value}")
        sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

    tool.control(kind="charge", delay_before=2 * TOOL)
    env = {"SAFE_EFFECTS_TEST_DEADLINE": "10"}
    worker = workers("a", acks_late=acks_late, concurrency=2, conf={"safe_effects_lease_ttl": 20}, env=env)
    first = app.tasks["tests.charge"].apply_async(("cus_1", 500))
    started(sql, tool, first.id)
    worker.pause("parent")
    errback = app.tasks["tests.errback"].s()
    second = app.tasks["tests.mortal"].apply_async(("order-1",), link_error=errback)
    read_only("on")
    worker.resume("parent")
    with pytest.raises(SafeEffectsError):
        app.tasks["tests.charge"].apply_async(("cus_2", 500))
    eventually(tool.ledger, 10, message="the tool is done")
    eventually(lambda: f"[{second.id}] received" in worker.log(), 10, message="the second job was delivered")
    with pytest.raises(AssertionError):
        eventually(lambda: {first.state, second.state} & {"FAILURE", "SUCCESS"}, 1.5, message="an end that no row has")
    assert tool.received("refund") == 0, "called without an intent"
    read_only("off")

    kept = [*CLAIMED, "1 intent_recorded > outcome_confirmed #1", "job running > succeeded #1"]
    for result, kind in ((first, "charge"), (second, "refund")):
        wait_status(sql, result.id, "succeeded")
        assert_log(sql, result.id, kept)
        assert_ledger(tool, sql, result.id)
        assert tool.received(kind) == 1
    eventually(lambda: {first.state, second.state} == {"SUCCESS"}, 10)
    assert {row["id"] for row in sql("SELECT id FROM jobs")} == {first.id, second.id}, (
        "an errback, or a half-written job"
    )
    assert_invariants(sql, tool)


def test_a_lookup_hangs(app: Celery, workers: Workers, beat: Beats, tool: Provider, sql: Sql, acks_late: bool) -> None:
    tool.control(kind="refund", delay_before=TOOL)
    tool.control(kind="charge", lookup_hang=60, delay_before=1.5 * TOOL)
    limit = 1.5
    env = {"SAFE_EFFECTS_TEST_LOOKUP_TIMEOUT": str(limit)}
    first = workers("a", acks_late=acks_late, concurrency=2, env=env)
    blocked = app.tasks["tests.waits_charge"].apply_async(("cus_1", 500, 0))
    started(sql, tool, blocked.id)
    other = app.tasks["tests.mortal"].apply_async(("order-1",))
    eventually(lambda: tool.received("refund") == 1, 10)
    first.kill()
    workers("b", acks_late=acks_late, concurrency=3, env=env)
    beat()

    wait_status(sql, other.id, "succeeded", timeout=20)
    assert job(sql, blocked.id)["status"] == "unknown"
    asked = eventually(lambda: tool.stats()["lookups"].get(f"{blocked.id}:1"), 15, message="the other one is asked")
    eventually(lambda: tool.stats()["lookups"][f"{blocked.id}:1"] > asked, 15, message="it is asked again")
    assert_log(sql, blocked.id, PARKED)
    eventually(lambda: (operation(sql, f"{blocked.id}:1")["evidence"] or {}).get("lookup") == "unresolved", 5)
    # One question at a time: the next is asked when the one before has had its time.
    lookups = tool.stats()["lookups"][f"{blocked.id}:1"]
    (open_for,) = sql(
        "SELECT extract(epoch FROM clock_timestamp() - at)::float8 AS s FROM transitions"
        " WHERE job_id = %s AND operation_key IS NOT NULL AND to_status = 'unknown'",
        blocked.id,
    )
    assert lookups <= open_for["s"] / limit + 1

    tool.control(kind="charge", lookup_hang=None)
    wait_status(sql, blocked.id, "succeeded")
    for one, kind in ((blocked, "charge"), (other, "refund")):
        assert_log(sql, one.id, [*CONFIRMED, "job running > succeeded #2"])
        assert job(sql, one.id)["outcome_ref"] == assert_ledger(tool, sql, one.id)["ref"]
        assert tool.received(kind) == 1
    assert_invariants(sql, tool)


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.usefixtures("broker")
def test_many_lookups_hang(app: Celery, workers: Workers, provider: Provider, sql: Sql) -> None:
    """A provider whose look-ups hang delays neither another provider's look-up nor the sweep."""
    limit, slack = 4.0, 3.0 * patience()
    provider.control(drop_reply=True)
    provider.control(kind="charge", lookup_hang=60)
    workers("a", concurrency=4, env={"SAFE_EFFECTS_TEST_LOOKUP_TIMEOUT": str(limit)})
    task = app.tasks["tests.waits_charge"]
    hanging = [task.apply_async(("cus_1", n, 0)).id for n in range(24)]
    eventually(lambda: len(sql("SELECT id FROM jobs WHERE status = 'unknown'")) == len(hanging), 30)
    eventually(lambda: provider.stats()["totals"]["lookups"] >= 8, 15, message="the look-ups hang")

    later = app.tasks["tests.pure"].apply_async((1,), countdown=2.5)
    other = app.tasks["tests.mortal"].apply_async(("order-1",))
    wait_status(sql, other.id, "succeeded", timeout=40)
    wait_status(sql, later.id, "succeeded", timeout=40)

    (waited,) = sql(
        "SELECT extract(epoch FROM o.resolved_at - t.at)::float8 AS s FROM operations o"
        " JOIN transitions t ON t.operation_key = o.key AND t.to_status = 'unknown' WHERE o.job_id = %s",
        other.id,
    )
    (late,) = sql("SELECT extract(epoch FROM started_at - eta)::float8 AS s FROM jobs WHERE id = %s", later.id)
    found = (waited["s"] < limit + slack, 0 <= late["s"] < slack)
    assert found == (True, True), (waited, late)
    assert {job(sql, one)["status"] for one in hanging} == {"unknown"}
    assert_invariants(sql, provider)


def test_a_worker_pauses_and_goes_on_after_its_lease(
    app: Celery, pair: Callable[..., dict[str, WorkerProcess]], tool: Provider, sql: Sql, acks_late: bool
) -> None:
    # The deadline would end the paused process; here it shall go on.
    both = pair(env={"SAFE_EFFECTS_TEST_DEADLINE": "60"})
    result = app.tasks["tests.charge_then_mail"].apply_async(("cus_1", 500))
    paused = both.pop(started(sql, tool, result.id))
    paused.pause()

    wait_status(sql, result.id, "succeeded")
    whole = [
        *CONFIRMED,
        "2 - > intent_recorded #2",
        "2 intent_recorded > outcome_confirmed #2",
        "job running > succeeded #2",
    ]
    assert_log(sql, result.id, whole)
    eventually(lambda: job(sql, result.id)["settled_at"], 10, message="Celery was told")
    rows = (
        "SELECT xmin::text, * FROM job",
        "SELECT xmin::text, * FROM operation",
        "SELECT xmin::text, * FROM transition",
    )
    before = [sql(query) for query in rows]

    paused.resume()
    eventually(lambda: "is no longer ours" in paused.log(), 15, message="the first worker found out")
    # It is fit for other work, which is also how we know that it is done with this one.
    next_job = app.tasks["tests.pure"].apply_async((1,))
    wait_status(sql, next_job.id, "succeeded")
    others = [[r for r in sql(q) if next_job.id not in (r.get("id"), r.get("job_id"))] for q in rows]
    assert others == before, "a fenced-out worker changed a row"

    assert tool.received("charge") == 1
    assert [row["body"]["pid"] for row in tool.ledger(kind="mail")] != [
        row["body"]["pid"] for row in tool.ledger(kind="charge")
    ]
    assert tool.received("mail") == 1
    assert_ledger(tool, sql, result.id, "1", "charge")
    assert_ledger(tool, sql, result.id, "2", "mail")
    assert_invariants(sql, tool)
    assert log(sql, result.id) == whole
    assert eventually(lambda: result.state == "SUCCESS", 10)


# Pairwise, since it takes long.
@pytest.mark.parametrize(
    ("broker", "acks_late"),
    [
        pytest.param("redis", True, id="redis-late"),
        pytest.param("rabbitmq", False, id="rabbitmq-early", marks=pytest.mark.rabbitmq),
    ],
    indirect=["broker"],
)
@pytest.mark.usefixtures("broker")
def test_a_worker_pauses_between_effects(
    app: Celery, pair: Callable[..., dict[str, WorkerProcess]], provider: Provider, sql: Sql, acks_late: bool
) -> None:
    """It goes on while the other one runs the same jobs: it neither ends one of them nor starts an effect."""
    both = pair(concurrency=2)
    plain = app.tasks["tests.sleeps"].apply_async((12, 5))
    owner = wait_status(sql, plain.id, "running")["lease_owner"]
    name = owner.partition("/")[0]
    paused = both.pop(name)
    (other,) = both.values()
    # The other job has to run on the same worker, also if its message goes to the one that stands still first.
    other.pause("parent")
    charged = app.tasks["tests.sleep_then_charge"].apply_async((12, "cus_1", 500, 5))
    wait_status(sql, charged.id, "running")
    paused.pause()
    other.resume("parent")

    for result in (plain, charged):
        eventually(lambda: job(sql, result.id)["fence"] == 2, 15, message="taken over")  # noqa: B023
    paused.resume()
    eventually(lambda: paused.log().count("is no longer ours") == 2, 25, message="it found out, twice")
    for result in (plain, charged):
        wait_status(sql, result.id, "succeeded")
    taken_over = [
        *CLAIMED[:3],
        "job running > queued #1 (lease_expired)",
        "job queued > leased #2",
        "job leased > running #2",
    ]
    assert_log(sql, plain.id, [*taken_over, "job running > succeeded #2"])
    assert_log(
        sql,
        charged.id,
        [
            *taken_over,
            "1 - > intent_recorded #2",
            "1 intent_recorded > outcome_confirmed #2",
            "job running > succeeded #2",
        ],
    )
    actors = sql("SELECT actor FROM transitions WHERE fence = 2")
    assert all(row["actor"].startswith(f"{other.node}/") for row in actors), actors
    (ended,) = sql(
        "SELECT extract(epoch FROM max(at) - min(at))::float8 AS s FROM transitions WHERE job_id = %s AND fence = 2",
        plain.id,
    )
    assert ended["s"] >= 5, "the other one's run was ended before its time"
    assert provider.received("charge") == 1
    assert_ledger(provider, sql, charged.id)
    assert_invariants(sql, provider)
