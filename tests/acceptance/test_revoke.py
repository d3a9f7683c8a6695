"""``revoke``: the row is cancelled, which outlives the worker that heard it, and Celery is told what the row says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, group
from celery.exceptions import TaskRevokedError

from celery_safe_effects import Happened
from celery_safe_effects.testing import EmbeddedPostgres, eventually
from example_project.provider_client import Provider
from tests.support.brokers import Broker
from tests.support.checks import assert_invariants, assert_log, job, log, wait_status
from tests.support.pools import one_worker_each
from tests.support.processes import Workers
from tests.support.services import Sql

ACCEPTED = "job - > queued #0"
REVOKED = "job queued > cancelled #0 (revoked)"
STARTED = [ACCEPTED, "job queued > leased #1", "job leased > running #1"]


@pytest.fixture(autouse=True)
def _told_of_revokes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers tell the provider what they hear of revokes."""
    monkeypatch.setenv("SAFE_EFFECTS_TEST_REVOKES", "1")


@pytest.fixture
def broker(redis_broker: Broker) -> Broker:
    """What a worker hears is no matter of the broker's."""
    return redis_broker


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    """Nothing here waits for a lease to run out."""
    return {**app_conf, "safe_effects_lease_ttl": 60}


def settled(sql: Sql, job_id: str, status: str = "cancelled", timeout: float = 30) -> None:
    eventually(
        lambda: sql(
            "SELECT 1 AS ok FROM jobs WHERE id = %s AND status = %s AND settled_at IS NOT NULL", job_id, status
        ),
        timeout=timeout,
        message=f"job {job_id} is {status} and settled",
    )


@contextmanager
def listening(app: Celery) -> Iterator[list[tuple[str, str]]]:
    """Celery's events, as Flower gets them: kinds and ids."""
    heard: list[tuple[str, str]] = []
    ready, over = threading.Event(), threading.Event()

    def listen() -> None:
        with app.connection_for_read() as connection:
            receiver = app.events.Receiver(
                connection, handlers={"*": lambda event: heard.append((event["type"], event.get("uuid", "")))}
            )
            with receiver.consumer_context() as (own, _, _):
                while not over.is_set():
                    with suppress(TimeoutError):
                        own.drain_events(timeout=0.2)
                    ready.set()  # Redis is asked for events at the first look

    thread = threading.Thread(target=listen)
    thread.start()
    assert ready.wait(10)
    try:
        yield heard
    finally:
        over.set()
        thread.join()


def test_jobs_that_wait(app: Celery, workers: Workers, sql: Sql, provider: Provider) -> None:
    """Two busy workers hear it: one cancels, Celery is told at once, and workers that never heard it obey."""
    both = [workers(name, concurrency=1) for name in "ab"]
    charge, pure = app.tasks["tests.charge"], app.tasks["tests.pure"]
    done = pure.delay(1)
    settled(sql, done.id, "succeeded")
    blockers = [app.tasks["tests.sleep"].delay(120) for _ in both]
    for blocker in blockers:
        wait_status(sql, blocker.id, "running")
    prefetched = charge.delay("prefetched", 1)
    eventually(lambda: any(prefetched.id in worker.log() for worker in both), 10)
    soon, late = charge.apply_async(("soon", 1), countdown=3), charge.apply_async(("late", 1), countdown=3600)
    several = group(charge.s("group", n) for n in range(3)).apply_async()
    plain_id = str(uuid4())
    expiring = charge.apply_async(("expires", 1), countdown=3600, expires=7200)

    prefetched.revoke()
    app.control.revoke([soon.id, late.id, done.id, plain_id, "nobody's"])
    several.revoke()
    app.control.revoke_by_stamped_headers({"no": ["such"]})
    app.control.terminate(expiring.id, signal="KILL")

    waiting = [prefetched, soon, late, *several.results, expiring]
    for result in waiting:
        settled(sql, result.id, timeout=15)
        assert_log(sql, result.id, [ACCEPTED, REVOKED])
        eventually(lambda r=result: r.state == "REVOKED", 10)  # type: ignore[misc]
        with pytest.raises(TaskRevokedError):
            result.get(timeout=10)
        assert provider.received(f"entered_revoked_{result.id}") == 1
    actors = {row["actor"].partition("/")[0] for row in sql("SELECT actor FROM transitions WHERE reason = 'revoked'")}
    assert actors <= {worker.node for worker in both}
    assert done.state == "SUCCESS"
    # Celery looks at a message's arrival: all workers are to have heard it by then.
    inspect = app.control.inspect(timeout=1)
    eventually(lambda: [plain_id in ids for ids in (inspect.revoked() or {}).values()] == [True, True], 20)
    plain = app.tasks["tests.plain"].apply_async((5,), task_id=plain_id)
    eventually(lambda: plain.state == "REVOKED", 10)
    assert {job(sql, blocker.id)["status"] for blocker in blockers} == {"running"}

    remembered = {job_id for ids in app.control.inspect(timeout=5).revoked().values() for job_id in ids}
    assert plain_id in remembered
    assert not remembered & {result.id for result in waiting}, "the rows are what is remembered"

    # Said twice, it changes nothing; an operator's retry is not undone by what some worker remembers.
    for result in waiting:
        result.revoke()
    app.safe_effects.cancel(blockers[0].id, "makes room")
    for worker in both:
        worker.kill()
    one = workers("c")
    app.safe_effects.retry(late.id, "it was meant after all")
    wait_status(sql, late.id, "succeeded", timeout=20)
    assert one.running
    for result in waiting:
        if result is not late:
            assert_log(sql, result.id, [ACCEPTED, REVOKED])
    assert [row["key"] for row in provider.ledger(kind="charge")] == [f"{late.id}:1"]
    assert_invariants(sql, provider)


def test_without_a_worker_nobody_hears_it(app: Celery, workers: Workers, sql: Sql) -> None:
    """As in Celery. Who cancels needs none."""
    unheard, cancelled = (app.tasks["tests.pure"].delay(n) for n in range(2))
    unheard.revoke()
    assert app.safe_effects.cancel(cancelled.id, "not wanted").status == "cancelled"
    assert job(sql, unheard.id)["status"] == "queued"
    workers("a")
    wait_status(sql, unheard.id, "succeeded")
    assert job(sql, cancelled.id)["attempts"] == 0


KINDS: dict[str, dict[str, Any]] = {
    "prefork": {},
    "prefork-kill": {},
    "threads": {},
    "gevent": {},
    "eventlet": {},
}


def test_jobs_that_run_in_every_pool(
    app: Celery, workers: Workers, sql: Sql, provider: Provider, request: pytest.FixtureRequest
) -> None:
    """Ended between two effects: cancelled. Ended inside one: parked, and cancelled when its outcome is known."""
    # Answered before its run has left, a question parks no job: so nothing answers until all are parked.
    provider.control(kind="refund", delay_after=10, lookup_status=503)
    env = {"SAFE_EFFECTS_TEST_DEADLINE": "30"}
    made = one_worker_each(request, workers, KINDS, concurrency=3, env=env)
    between = {kind: app.tasks["tests.charge_slowly"].apply_async((kind, 11), queue=kind) for kind in KINDS}
    inside = {kind: app.tasks["tests.refunds"].apply_async((kind,), queue=kind) for kind in KINDS}
    parked = {kind: result for kind, result in inside.items() if kind != "threads"}  # which cannot be ended
    stubborn = app.tasks["tests.ignores_signals"].apply_async((10,), queue="prefork")
    everybody = {one.id: one for one in (*between.values(), *inside.values(), stubborn)}
    seen: dict[str, list[tuple[str, str]]] = {job_id: [] for job_id in everybody}
    for result in (*between.values(), *inside.values()):
        eventually(lambda r=result: provider.ledger(key=f"{r.id}:1"), 20)  # type: ignore[misc]
    eventually(lambda: provider.received("entered_ignores_signals"), 10)
    with listening(app) as heard:
        for kind in KINDS:
            signal = "KILL" if kind == "prefork-kill" else "SIGTERM"
            app.control.revoke([between[kind].id, inside[kind].id], terminate=True, signal=signal)
        stubborn.revoke(terminate=True)

        def look() -> None:
            for job_id, result in everybody.items():
                # In this order: a state that is stored after the look at the row may be a later one's.
                state = result.state
                seen[job_id].append((job(sql, job_id)["status"], state))

        def all_parked() -> bool:
            look()
            return all(seen[result.id][-1] == ("unknown", "UNKNOWN") for result in parked.values())

        def over() -> bool:
            look()
            return not sql("SELECT id FROM jobs WHERE settled_at IS NULL")

        eventually(all_parked, 20, message="those that were ended inside an effect are parked")
        provider.control(kind="refund", lookup_status=None)
        eventually(over, 40, message="all of them have come to an end, and Celery knows")
        eventually(lambda: all(r.state in ("REVOKED", "SUCCESS") for r in everybody.values()), 10)
        told = {("task-revoked", result.id) for result in between.values()}
        told |= {("task-unknown", result.id) for result in parked.values()}
        eventually(lambda: told <= set(heard), 10, message="monitors were told")

    for kind, result in between.items():
        assert job(sql, result.id)["status"] == "cancelled", (kind, log(sql, result.id))
        assert result.state == "REVOKED"
        assert [len(provider.ledger(key=f"{result.id}:{step}")) for step in "12"] == [1, 0], kind
        assert ("task-succeeded", result.id) not in heard, kind
    for kind, result in inside.items():
        # A thread cannot be ended: its effect comes to its end, and so does the body behind it.
        wanted = "succeeded" if kind == "threads" else "cancelled"
        assert job(sql, result.id)["status"] == wanted, (kind, log(sql, result.id))
        assert len(provider.ledger(key=f"{result.id}:1")) == 1
        if kind in parked:
            assert [line.split("#")[0] for line in log(sql, result.id) if line.startswith("job")][-2:] == [
                "job running > unknown ",
                "job unknown > cancelled ",
            ], kind
            assert ("task-succeeded", result.id) not in heard, kind
    # The body ignored the signal and wanted to go on; its attempt was over.
    assert (job(sql, stubborn.id)["status"], provider.ledger(key=f"{stubborn.id}:1")) == ("cancelled", [])
    for job_id, pairs in seen.items():
        assert not [pair for pair in pairs if pair[1] in ("REVOKED", "FAILURE") and pair[0] == "unknown"], job_id
    assert provider.received("refund") == len(inside)
    for kind, worker in made.items():
        assert worker.running
        wait_status(sql, app.tasks["tests.pure"].apply_async(queue=kind).id, "succeeded", timeout=15)
    assert_invariants(sql, provider)


def test_without_terminate_a_running_job_ends_at_its_next_effect(
    app: Celery, workers: Workers, sql: Sql, provider: Provider
) -> None:
    """And one that is parked, when its question is answered."""
    workers("a", concurrency=2)
    provider.control(kind="charge_plain", drop_reply=True)
    parked = app.tasks["tests.charge_plain"].delay("cus_1", 1)
    wait_status(sql, parked.id, "unknown")
    running = app.tasks["tests.charge_slowly"].delay("cus_1", 5)
    eventually(lambda: provider.ledger(key=f"{running.id}:1"), 15)
    app.control.revoke([running.id, parked.id])
    eventually(lambda: job(sql, parked.id)["cancel_requested_at"], 10)
    eventually(lambda: parked.state == "UNKNOWN", 10)
    assert job(sql, parked.id)["status"] == "unknown"
    settled(sql, running.id)
    assert provider.ledger(key=f"{running.id}:2") == []
    (row,) = provider.ledger(key=f"{parked.id}:1")
    app.safe_effects.resolve(f"{parked.id}:1", Happened(row["ref"]), "me", "seen in the provider's books")
    settled(sql, parked.id)
    eventually(lambda: (running.state, parked.state) == ("REVOKED", "REVOKED"), 10)
    assert_invariants(sql, provider)


def test_by_stamps(app: Celery, workers: Workers, sql: Sql, provider: Provider, tmp_path: Any) -> None:
    """What is there is cancelled in its row, with a state database or without; the worker remembers for the rest."""
    extra = [f"--statedb={tmp_path / 'state'}"]
    first = workers("a", concurrency=2, extra=extra)
    charge = app.tasks["tests.charge"]

    def send(batch: Any, task: Any = None, **options: Any) -> Any:
        signature = task or charge.s("cus_1", 1)
        signature.stamp(batch=batch)
        return signature.apply_async(**options)

    running = send("42", app.tasks["tests.charge_slowly"].s("running", 30))
    eventually(lambda: provider.ledger(key=f"{running.id}:1"), 15)
    late = [send(batch, countdown=wait) for batch, wait in (("42", 3600), (["41", "42"], 3600), ("43", 10))]
    app.control.revoke_by_stamped_headers({"batch": ["42", "44"]}, terminate=True)
    for result in (running, *late[:2]):
        settled(sql, result.id)
        eventually(lambda r=result: r.state == "REVOKED", 10)  # type: ignore[misc]
    assert provider.ledger(key=f"{running.id}:2") == []
    # As in Celery, for jobs that are enqueued later it is the workers' memory that counts.
    after = send("42")
    settled(sql, after.id)
    first.kill()
    workers("b", extra=extra)
    wait_status(sql, late[2].id, "succeeded", timeout=20)
    assert [job(sql, result.id)["status"] for result in (running, *late[:2], after)] == ["cancelled"] * 4
    assert len(provider.ledger(kind="charge")) == 2
    assert_invariants(sql, provider)


def test_a_message_that_has_no_row_yet(
    app: Celery, workers: Workers, sql: Sql, provider: Provider, app_conf: dict[str, Any]
) -> None:
    """From a producer without the library: revoked while it waits in the worker, it gets a row, and that says so."""
    first = workers("a")
    blocker = app.tasks["tests.sleep"].delay(10)
    wait_status(sql, blocker.id, "running")
    with Celery("foreign", broker=app_conf["broker_url"], set_as_current=False) as foreign:
        result = foreign.send_task("tests.charge", ("cus_1", 1))
    eventually(lambda: result.id in first.log(), 10)
    app.control.revoke(result.id)
    settled(sql, result.id)
    assert_log(sql, result.id, [ACCEPTED, REVOKED])
    # One after the other in the same breath: nobody could have taken it in between.
    (gap,) = sql(
        "SELECT max(at) - min(at) < interval '5 seconds' AS short FROM transitions WHERE job_id = %s", result.id
    )
    assert gap["short"]
    first.kill()
    workers("b")
    settled(sql, app.tasks["tests.pure"].delay().id, "succeeded")
    assert app.AsyncResult(result.id).state == "REVOKED"
    assert provider.ledger(kind="charge") == []


def test_while_the_database_is_away(
    own_postgres: EmbeddedPostgres, app: Celery, workers: Workers, sql: Sql, provider: Provider
) -> None:
    """The worker remembers it for the time being, and the row knows as soon as it can."""
    worker = workers("a")
    result = app.tasks["tests.charge"].apply_async(("cus_1", 1), countdown=3600)
    own_postgres.stop("immediate")
    result.revoke()
    eventually(lambda: "a revoke waits for the database" in worker.log(), 15)
    own_postgres.start()
    settled(sql, result.id)
    assert_log(sql, result.id, [ACCEPTED, REVOKED])
    eventually(lambda: result.state == "REVOKED", 10)
    assert provider.ledger(kind="charge") == []
