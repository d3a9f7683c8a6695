"""Limits on real PostgreSQL: exact under concurrency, without leaks, at the door and at the claim."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from celery_safe_effects import AdmissionRejected, Limits, SafeEffects, SafeTask, effect, signals
from celery_safe_effects.errors import ConfigurationError
from celery_safe_effects.states import EXPRESS
from celery_safe_effects.store.hot import Store
from tests.support.protocol import Protocol, make_store
from tests.support.services import Sql

RUNNING = "SELECT count(*) AS n FROM jobs WHERE status IN ('leased', 'running')"


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    made = make_store(database_url, max_connections=24)
    yield made
    made.connections.close()


@pytest.fixture
def protocol(store: Store) -> Protocol:
    return Protocol(store)


def same(n: int = 0) -> int:
    return n


class Door:
    """An app that only enqueues."""

    def __init__(self, database_url: str, limits: Limits | None = None) -> None:
        self.app = Celery("door", broker="memory://", set_as_current=False)
        self.app.conf.update(
            safe_effects_database_url=database_url, safe_effects_max_connections=24, task_ignore_result=True
        )
        if limits is not None:
            self.app.conf.safe_effects_limits = limits
        self.safe = SafeEffects(self.app)
        self.task: Any = self.app.task(base=SafeTask, effects=[], name=f"door.{uuid4().hex}", shared=False)(same)

    def __call__(self, n: int = 0, **options: Any) -> Any:
        return self.task.apply_async((n,), **options)


@pytest.fixture
def door(database_url: str) -> Iterator[Callable[..., Door]]:
    made: list[Door] = []

    def make(limits: Limits | None = None) -> Door:
        made.append(Door(database_url, limits))
        return made[-1]

    yield make
    for one in made:
        one.safe.close()
        one.app.close()


def set_limits(store: Store, scope: str, value: str | None) -> None:
    store.rows("SET_LIMITS", scopes=[scope], values=[value], actor="test", all=False)


# -- at the claim ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["tenant", "pool"])
def test_a_limit_is_never_exceeded_however_many_claim_at_once(store: Store, sql: Sql, scope: str) -> None:
    limit = {"tenant": ("tenant:acme", '{"tenant_running": 2}'), "pool": ("pool:gpu", '{"pool": 2}')}[scope]
    set_limits(store, *limit)
    jobs = [Protocol(store).accept(tenant="acme", pool="gpu") for _ in range(24)]
    most, over = 0, threading.Event()

    def sample() -> None:
        nonlocal most
        while not over.is_set():
            most = max(most, sql(RUNNING)[0]["n"])

    def work(job: str) -> bool:
        protocol = Protocol(store, f"w@host/{job}/1")
        claimed = protocol.claim(job)
        if claimed is None:
            return False
        time.sleep(0.05)  # long enough to be met
        assert protocol.leave(claimed) is not None
        return True

    sampler = threading.Thread(target=sample)
    sampler.start()
    claims = 0
    done: set[str] = set()
    deadline = time.monotonic() + 60
    with ThreadPoolExecutor(12) as pool:
        due = jobs
        while len(done) < len(jobs) and time.monotonic() < deadline:
            claims += len(due)
            done |= {job for job, ran in zip(due, pool.map(work, due), strict=True) if ran}
            due = [
                row["id"]
                for row in sql("SELECT id FROM job WHERE status = 'queued' AND woken_at IS NOT NULL ORDER BY seq")
            ]
    over.set()
    sampler.join()
    assert len(done) == len(jobs)
    assert most == 2, "the limit is used, and never exceeded"
    # Each job is tried once when it arrives and, if refused, at most twice for the slot that woke it.
    assert claims <= len(jobs) + 2 * len(jobs)
    assert sql("SELECT count(*) AS n FROM jobs WHERE status = 'succeeded' AND attempts = 1")[0]["n"] == len(jobs)


def test_a_refused_claim_costs_nothing_and_says_why(protocol: Protocol, store: Store, sql: Sql) -> None:
    set_limits(store, "pool:gpu", '{"pool": 1}')
    first, second = protocol.accept(pool="gpu"), protocol.accept(pool="gpu")
    held = protocol.claim(first)
    assert held is not None
    before = sql("SELECT count(*) AS n FROM transitions")
    assert protocol.claim(second) is None
    row = sql("SELECT status, reason, attempts, fence, waiting_for, next_publish_at FROM job WHERE id = %s", second)[0]
    assert row == {
        "status": "queued", "reason": "pool_running_limit", "attempts": 0, "fence": 0, "waiting_for": "slot/pool/gpu",
        "next_publish_at": None,
    }  # fmt: skip
    assert sql("SELECT count(*) AS n FROM transitions") == before
    protocol.leave(held)
    (woken,) = sql("SELECT id FROM job WHERE next_publish_at <= clock_timestamp() AND status = 'queued'")
    assert woken["id"] == second
    assert protocol.claim(second) is not None


def test_a_refused_whole_body_records_no_intent(store: Store, sql: Sql, door: Callable[..., Door]) -> None:
    made = door(Limits(tenant_running=0))
    task: Any = made.app.task(base=SafeTask, name=f"whole.{uuid4().hex}", shared=False)(same)
    result = task.apply(task_id=str(uuid4()))
    assert result.state != "SUCCESS"
    assert sql("SELECT status, reason FROM jobs") == [{"status": "queued", "reason": "tenant_running_limit"}]
    assert sql("SELECT * FROM operations") == []


def test_a_slot_of_a_dead_worker_is_freed_by_the_sweep_and_only_once(
    protocol: Protocol, store: Store, sql: Sql
) -> None:
    set_limits(store, "*", '{"tenant_running": 1}')
    dead, waiting, other = (protocol.accept() for _ in range(3))
    assert protocol.claim(dead) is not None
    assert protocol.claim(waiting) is None
    assert protocol.claim(other) is None
    sql("UPDATE job SET lease_until = clock_timestamp() - interval '1 s' WHERE id = %s", dead)
    assert protocol.claim(other) is None, "an expired lease counts until it is swept: its holder may still be at work"
    protocol.sweep()
    woken = sql("SELECT id FROM job WHERE woken_at IS NOT NULL")
    assert [row["id"] for row in woken] == [waiting], "one slot, one job: the one that has waited longest"
    assert protocol.claim(other) is None, "the slot is kept for the one that was woken"
    assert protocol.claim(waiting) is not None


def test_a_wake_up_that_came_to_nothing_is_made_good_by_the_sweep(protocol: Protocol, store: Store, sql: Sql) -> None:
    set_limits(store, "tenant:default", '{"tenant_running": 1}')
    first, second, third = (protocol.accept() for _ in range(3))
    held = protocol.claim(first)
    assert held is not None
    assert protocol.claim(second) is None
    assert protocol.claim(third) is None
    protocol.leave(held)
    store.rows("CANCEL", id=second, reason="not needed", actor="operator:test")
    assert store.rows("WAKE_FREE", limits="{}")[0].woken == 1
    assert protocol.claim(third) is not None


def test_a_raised_limit_wakes_and_a_removed_one_wakes_all(protocol: Protocol, store: Store, sql: Sql) -> None:
    set_limits(store, "*", '{"tenant_running": 0}')
    jobs = [protocol.accept() for _ in range(4)]
    assert [protocol.claim(job) for job in jobs] == [None] * 4
    set_limits(store, "tenant:default", '{"tenant_running": 1}')
    assert [row.woken for row in store.rows("WAKE_FREE", limits="{}")] == [1]
    set_limits(store, "tenant:default", None)
    set_limits(store, "*", None)
    assert [row.woken for row in store.rows("WAKE_FREE", limits="{}")] == [3]


def test_claims_of_two_tenants_in_two_pools_never_deadlock(store: Store, sql: Sql) -> None:
    for tenant in ("a", "b"):
        set_limits(store, f"tenant:{tenant}", '{"tenant_running": 3}')
    for pool in ("x", "y"):
        set_limits(store, f"pool:{pool}", '{"pool": 3}')
    jobs = [Protocol(store).accept(tenant=t, pool=p) for t in "ab" for p in "xy" for _ in range(10)]

    def work(job: str) -> None:
        protocol = Protocol(store, f"w@host/{job}/1")
        for _ in range(200):
            claimed = protocol.claim(job)
            if claimed is not None:
                protocol.leave(claimed)
                return
            store.rows("WAKE_FREE", limits="{}")

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(work, jobs))
    assert sql("SELECT count(*) AS n FROM jobs WHERE status = 'succeeded'")[0]["n"] == len(jobs)


# -- at the door -------------------------------------------------------------------------------------------------------


def test_the_queue_limit_is_exact_and_the_refusal_says_everything(door: Callable[..., Door], sql: Sql) -> None:
    made = door(Limits(tenant_queued=5))
    told: list[Any] = []

    def receiver(sender: str, error: AdmissionRejected, **_: Any) -> None:
        told.append((sender, error.reason))

    signals.admission_rejected.connect(receiver)

    def enqueue(n: int) -> AdmissionRejected | None:
        try:
            made(n, tenant="acme")
        except AdmissionRejected as exc:
            return exc
        return None

    with ThreadPoolExecutor(12) as pool:
        refused = [exc for exc in pool.map(enqueue, range(30)) if exc is not None]
    assert sql("SELECT count(*) AS n FROM jobs")[0]["n"] == 5
    assert len(refused) == 25
    first = refused[0]
    assert (first.reason, first.limit, first.current) == ("tenant_queue_limit", 5, 5)
    assert first.retry_after is not None
    assert first.retry_after > 0
    assert told == [(made.task.name, "tenant_queue_limit")] * 25
    assert sql("SELECT label, value FROM counter WHERE name = 'admission_refusals'") == [
        {"label": "tenant_queue_limit", "value": 25}
    ]
    made(1, tenant="other")


def test_an_existing_job_is_returned_also_when_the_queue_is_full(door: Callable[..., Door]) -> None:
    made = door(Limits(tenant_queued=1))
    first = made(1, idempotency_key="k")
    assert made(1, idempotency_key="k").id == first.id
    with pytest.raises(AdmissionRejected):
        made(2)


def test_stored_limits_go_before_the_tenants_and_these_before_the_others(door: Callable[..., Door]) -> None:
    made = door(Limits(tenant_queued=1, tenants={"big": Limits(tenant_queued=2)}))
    made(1, tenant="big")
    made(2, tenant="big")
    with pytest.raises(AdmissionRejected) as refused:
        made(3, tenant="big")
    assert refused.value.limit == 2
    made.safe.set_limits(Limits(tenant_queued=3), tenant="big")
    made(3, tenant="big")
    made.safe.set_limits(Limits(tenant_queued=0))
    with pytest.raises(AdmissionRejected) as refused:
        made(4, tenant="small")
    assert refused.value.limit == 0
    made.safe.set_limits(None)
    made(4, tenant="small")
    assert made.safe.stored_limits() == []


def test_attempts_age_and_operations_follow_the_same_order(door: Callable[..., Door], sql: Sql) -> None:
    made = door(Limits(max_attempts=7, tenants={"acme": Limits(max_attempts=3)}))

    def attempts(**options: Any) -> Any:
        return sql("SELECT max_attempts FROM job WHERE id = %s", made(**options).id)[0]["max_attempts"]

    assert attempts() == 7
    assert attempts(max_attempts=2) == 2
    assert attempts(tenant="acme", max_attempts=9) == 3
    made.safe.set_limits(Limits(max_attempts=4, max_age=60), task=made.task.name)
    assert attempts(tenant="acme") == 4
    job = made().id
    (age,) = sql("SELECT extract(epoch FROM gives_up_at - created_at)::float8 AS s FROM job WHERE id = %s", job)
    assert age["s"] == pytest.approx(60, abs=1)


def test_each_retry_gives_a_job_its_age_anew(door: Callable[..., Door], sql: Sql) -> None:
    """No more than that: what had passed before an earlier retry is not added."""
    made = door(Limits(max_age=60))
    job = made().id
    for _ in range(2):
        made.safe.cancel(job, "not now")
        sql("UPDATE job SET created_at = created_at - interval '1 hour' WHERE id = %s", job)
        made.safe.retry(job, "once more")
        (left,) = sql("SELECT extract(epoch FROM gives_up_at - now())::float8 AS s FROM job WHERE id = %s", job)
        assert left["s"] == pytest.approx(60, abs=10)


@pytest.mark.parametrize(
    ("limits", "scope"),
    [
        (Limits(tenant_queued=1), {"task": "x"}),
        (Limits(pool_running={"gpu": 1}), {"tenant": "x"}),
        (Limits(tenants={"a": Limits()}), {"tenant": "x"}),
        (Limits(max_age=1), {"tenant": "x", "task": "y"}),
        (Limits(max_age=1), {"tenant": ""}),
        ({"tenant_queued": 1}, {}),
    ],
)
def test_limits_that_mean_nothing_are_refused_and_not_stored(
    door: Callable[..., Door], limits: Any, scope: dict[str, str]
) -> None:
    made = door()
    with pytest.raises(ConfigurationError, match="nothing was stored"):
        made.safe.set_limits(limits, **scope)
    assert made.safe.stored_limits() == []


def test_a_jobs_operations_are_bounded(door: Callable[..., Door], sql: Sql) -> None:
    made = door()
    calls: list[int] = []

    @effect(name=f"limits.{uuid4().hex}")
    def touch(op: Any, n: int) -> None:
        calls.append(n)

    @made.app.task(base=SafeTask, effects=[touch], max_operations=3, name=f"many.{uuid4().hex}", shared=False)
    def many(n: int) -> None:
        for i in range(n):
            touch(i)

    assert many.apply((3,)).state == "SUCCESS"
    result = many.apply((5,))
    assert result.state == "FAILURE"
    assert isinstance(result.result, AdmissionRejected)
    assert (result.result.reason, result.result.limit, result.result.current) == ("operations_limit", 3, 3)
    assert calls == [0, 1, 2, 0, 1, 2]
    assert sql("SELECT reason FROM jobs WHERE status = 'failed'") == [{"reason": "operations_limit"}]
    assert sql("SELECT count(*) AS n FROM operations WHERE status = 'outcome_confirmed'")[0]["n"] == 6


# -- inside a caller's transaction -------------------------------------------------------------------------------------


@pytest.fixture
def engine(database_url: str) -> Iterator[Any]:
    made = create_engine(database_url, pool_size=30)
    yield made
    made.dispose()


def test_enlisted_callers_of_one_tenant_do_not_wait_for_each_other(
    door: Callable[..., Door], engine: Any, sql: Sql
) -> None:
    made = door(Limits(tenant_queued=15))
    inside = threading.Barrier(15, timeout=30)

    def enlisted(n: int) -> bool:
        with Session(engine) as session:
            try:
                made(n, tenant="acme", transaction=session)
            except AdmissionRejected:
                return False
            inside.wait()  # all others are accepted while each is open
            session.commit()
            return True

    with ThreadPoolExecutor(20) as pool:
        accepted = sum(pool.map(enlisted, range(20)))
    assert accepted == 15
    assert sql("SELECT count(*) AS n FROM jobs")[0]["n"] == 15
    assert sql("SELECT * FROM reservation") == []


def test_a_rolled_back_callers_place_lapses_and_one_that_is_open_keeps_its_place(
    door: Callable[..., Door], engine: Any, sql: Sql
) -> None:
    made = door(Limits(tenant_queued=1))
    with Session(engine) as session:
        made(1, transaction=session)
        session.rollback()
    with pytest.raises(AdmissionRejected):
        made(2)
    sql("UPDATE reservation SET lapses_at = clock_timestamp()")
    with Session(engine) as session:
        made(2, transaction=session)
        # Past its time, but not gone: the transaction that inserts the job is open.
        made.safe.sweep()
        with pytest.raises(AdmissionRejected):
            made(3)
        session.commit()
    assert sql("SELECT count(*) AS n FROM jobs")[0]["n"] == 1
    with pytest.raises(AdmissionRejected):
        made(3)


def test_a_refused_caller_goes_on_with_its_transaction(door: Callable[..., Door], engine: Any, sql: Sql) -> None:
    made = door(Limits(tenant_queued=0))
    sql("CREATE TABLE public.orders (id int)")
    with Session(engine) as session:
        connection = session.connection()
        connection.exec_driver_sql("INSERT INTO public.orders VALUES (1)")
        with pytest.raises(AdmissionRejected):
            made(1, transaction=session)
        connection.exec_driver_sql("INSERT INTO public.orders VALUES (2)")
        session.commit()
    assert sql("SELECT count(*) AS n FROM public.orders")[0]["n"] == 2
    assert sql("SELECT * FROM jobs") == []


# -- age and expiry ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "status", "reason"), [("expires_at", "cancelled", "expired"), ("gives_up_at", "failed", "max_age")]
)
@pytest.mark.parametrize("when", ["before it starts", "at its checkpoint", "at its next effect", "in its effect"])
def test_a_job_past_its_time_ends_with_that_reason_and_never_in_an_operation(
    door: Callable[..., Door], sql: Sql, column: str, status: str, reason: str, when: str
) -> None:
    made = door()
    calls: list[str] = []

    def late(job: str) -> None:
        sql(f"UPDATE job SET {column} = clock_timestamp() WHERE id = %s", job)

    @effect(name=f"late.{uuid4().hex}")
    def first(op: Any) -> None:
        calls.append("first")
        if when == "in its effect":
            late(op.job_id)

    @effect(name=f"late.{uuid4().hex}")
    def second(op: Any) -> None:
        calls.append("second")

    @made.app.task(base=SafeTask, bind=True, effects=[first, second], name=f"late.{uuid4().hex}", shared=False)
    def body(self: Any) -> None:
        first()
        if when != "in its effect":
            late(self.job.id)
        if when == "at its checkpoint":
            self.job.checkpoint()
        second()

    job = body.apply_async().id
    if when == "before it starts":
        late(job)
        made.safe.sweep()
    else:
        body.apply(task_id=job)
    assert sql("SELECT status, reason FROM jobs WHERE id = %s", job) == [{"status": status, "reason": reason}]
    assert calls == ([] if when == "before it starts" else ["first"])
    confirmed = sql("SELECT count(*) AS n FROM operations WHERE status = 'outcome_confirmed'")[0]["n"]
    assert confirmed == len(calls), "what was under way keeps its true outcome"


def test_http_is_told_what_it_is() -> None:
    refused = AdmissionRejected("no", reason="tenant_queue_limit", limit=1, current=1, retry_after=0.2)
    assert (refused.status_code, refused.headers) == (429, {"Retry-After": "1"})
    large = AdmissionRejected("no", reason="payload_too_large")
    assert (large.status_code, large.headers) == (413, {})


# -- fairness ----------------------------------------------------------------------------------------------------------


def test_the_express_lanes_name_is_one_here_and_in_the_database(sql: Sql) -> None:
    assert sql("SELECT express_of('celery') AS name") == [{"name": "celery" + EXPRESS}]


def express(sql: Sql) -> dict[str, int]:
    rows = sql("SELECT tenant, count(*) AS n FROM job WHERE express GROUP BY tenant")
    return {row["tenant"]: row["n"] for row in rows}


def test_only_a_tenant_with_few_jobs_behind_a_long_queue_goes_express(store: Store, sql: Sql) -> None:
    protocol = Protocol(store)
    for _ in range(25):
        protocol.accept(tenant="big", due=None)
    protocol.accept(tenant="small", due=None)
    assert express(sql) == {}, "nobody consumes the lane"
    store.rows("EXPRESS", queues=["celery"], until=60.0)
    for _ in range(15):
        protocol.accept(tenant="small", due=None)
    protocol.accept(tenant="big", due=None)
    late = protocol.accept(tenant="late", due=None)
    sql("UPDATE job SET express = false, queue = 'celery' WHERE id = %s", late)
    sql("UPDATE job SET published_at = clock_timestamp(), next_publish_at = NULL WHERE id = %s", late)
    protocol.accept(tenant="apart", due=None, fair=False)
    assert express(sql) == {"small": 9}, "nine of its first ten; the very first was there before"
    assert [row.id for row in store.rows("PROMOTE", limit=100)] == [late]


def test_a_backlog_gives_way_once_and_not_without_end(store: Store, sql: Sql) -> None:
    protocol = Protocol(store)
    big = [protocol.accept(tenant="big", due=None) for _ in range(80)]
    store.rows("EXPRESS", queues=["celery"], until=60.0)
    small = protocol.accept(tenant="small", due=None)
    sql("UPDATE job SET published_at = clock_timestamp(), next_publish_at = NULL WHERE id = %s", small)
    claims = [protocol.claim(job) is not None for job in big]
    assert claims == [False] * 64 + [True] * 16
    assert sql("SELECT DISTINCT reason, attempts, fence FROM job WHERE tenant = 'big' AND express") == [
        {"reason": "fair_share", "attempts": 0, "fence": 0}
    ]
    assert protocol.claim(big[0]) is not None, "once"
    assert protocol.claim(small) is not None


def test_a_question_that_is_answered_before_the_last_run_ends_leaves_a_run_for_its_replay(
    protocol: Protocol, sql: Sql
) -> None:
    job = protocol.accept(limits={"max_attempts": 1})
    claimed = protocol.claim(job)
    assert claimed is not None
    nonce = protocol.intent(claimed)
    assert nonce is not None
    protocol.outcome(claimed, nonce, "unknown")
    protocol.outcome(claimed, nonce, "outcome_confirmed")  # late, by the call's own thread
    left = protocol.leave(claimed, "unknown", result=None)
    assert left is not None
    assert left.status == "queued"
    assert protocol.claim(job) is not None
