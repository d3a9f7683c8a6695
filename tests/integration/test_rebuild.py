"""The broker rebuilt from the database, and what a restored database says of jobs that it does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from celery_safe_effects import Happened, Limits, Operation, Outcome, effect
from celery_safe_effects.engine import rebuild
from celery_safe_effects.errors import NotAllowed
from celery_safe_effects.glue.envelope import MARK, Envelope, Mark
from celery_safe_effects.store.hot import Intent, Lease
from tests.support.services import Sql
from tests.support.shop import Shop


@effect(name="rebuild.pay", idempotent_for=None)
def pay(op: Operation, what: str) -> Outcome[None]:
    return Outcome(op.key)


@effect(name="rebuild.ask", repeatable=True)
def ask(op: Operation, what: str) -> Outcome[None]:
    return Outcome(op.key)


def claim(shop: Shop, job_id: str) -> Lease:
    """Somebody runs the job."""
    token, mark = uuid4(), dict.fromkeys(("digest", "task", "seq", "tenant"))
    row = shop.safe.store.row(
        "CLAIM",
        id=job_id,
        token=token,
        owner="w@h/1/1",
        ttl=60.0,
        limits=shop.safe.admission.given(),
        generation=0,
        **mark,
    )
    assert row is not None
    return Lease(job_id, token, row.fence, "w@h/1/1")


def intend(shop: Shop, lease: Lease, **changed: Any) -> None:
    values: dict[str, Any] = {
        "key": f"{lease.job}:1", "step": "1", "ordinal": 1, "effect": "rebuild.pay", "keyed": False,
        "repeatable": False, "whole_body": False, "args": "{}", "args_digest": "args", "deadline": 60.0, "lag": 0.0,
        "idempotent_for": None, "has_lookup": True, "if_unknown": "park", "detached": False,
        "deadline_kills": True, "deadline_is_proof": False,
    }  # fmt: skip
    assert shop.safe.store.intent(lease, Intent(**{**values, **changed}), uuid4(), "process", lambda: False)[0]


# -- the broker ------------------------------------------------------------------------------------------------------


def test_all_messages_go_out_again_in_their_order_and_in_batches(
    shop: Shop, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuild, "BATCH", 3)
    jobs = [shop.bill.delay(n).id for n in range(8)]
    assert shop.published() == jobs
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        told.append((done, total))
        assert done <= total

    found = shop.safe.republish(all=True, progress=progress)
    assert (found, found.missed) == (8, 0)
    assert told == [(3, 8), (6, 8), (8, 8)]
    assert shop.published() == jobs
    assert sql("SELECT DISTINCT publishes, status FROM job") == [{"publishes": 2, "status": "queued"}]
    # Each message is the first one's, mark and all: it runs.
    assert shop.safe.republish(all=True) == 8
    assert shop.work() == ["shop.bill"] * 8
    assert sql("SELECT count(*) AS n FROM jobs WHERE status = 'succeeded' AND attempts = 1") == [{"n": 8}]


def test_what_is_held_waits_for_its_own_time_and_what_runs_is_left_alone(shop: Shop, sql: Sql) -> None:
    shop.safe.set_limits(Limits(tenant_running=1), tenant="acme")
    later = shop.bill.apply_async((1,), countdown=3600).id
    running, slotless = (shop.bill.apply_async((n,), tenant="acme").id for n in (2, 3))
    keyed, finished, plain = (shop.bill.delay(n).id for n in (4, 5, 6))
    claim(shop, running)
    token = uuid4()
    mark = dict.fromkeys(("digest", "task", "seq", "tenant"))
    given = shop.safe.admission.given()
    shop.safe.store.row(
        "CLAIM", id=slotless, token=token, owner="w@h/1/1", ttl=60.0, limits=given, generation=0, **mark
    )
    assert shop.safe.job(slotless).reason == "tenant_running_limit"
    sql(
        "UPDATE job SET waiting_for = 'default/pay/x', next_publish_at = clock_timestamp() + interval '1 min'"
        " WHERE id = %s",
        keyed,
    )
    waiting = shop.published()
    shop.safe.cancel(finished, "not needed")  # an end that Celery was not told: due, and told again
    shop.published()
    assert sorted(waiting) == sorted([running, slotless, keyed, finished, plain])
    before = sql("SELECT * FROM job WHERE id = ANY (%s) ORDER BY id", [later, running, slotless, keyed])
    sql("UPDATE job SET next_publish_at = clock_timestamp() WHERE id = %s", finished)
    assert shop.safe.republish(all=True) == 2
    assert shop.published() == [plain, finished]
    assert sql("SELECT * FROM job WHERE id = ANY (%s) ORDER BY id", [later, running, slotless, keyed]) == before


def test_a_broker_that_does_not_answer_is_not_waited_for(shop: Shop, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebuild, "BATCH", 3)
    jobs = [shop.bill.delay(n).id for n in range(8)]
    shop.published()
    tries: list[int] = []

    def gone(rows: list[Any]) -> int:
        tries.append(len(rows))
        return 1

    made = shop.safe.rebuilder
    made.deliver = gone
    found = made.publish()
    assert (found, found.missed, tries) == (1, 7, [3])
    assert len(jobs) == 8


def test_jobs_or_all(shop: Shop) -> None:
    with pytest.raises(NotAllowed):
        shop.safe.republish("a", all=True)


# -- a database that was restored ------------------------------------------------------------------------------------


def arrives(shop: Shop, seq: int) -> str:
    """A message with this number comes, of a job that the database does not know; what becomes of it."""
    job_id = str(uuid4())
    shop.bill.apply_async(("lost",), task_id=job_id)
    ((headers, body),) = shop.messages()
    mark = Mark.of(headers[MARK])
    assert mark is not None
    # As if it had never been: only a superuser can.
    run = shop.safe.store.rows
    envelope = Envelope(headers, {"correlation_id": job_id}, tuple(body), {})
    with shop.safe.store.connections.connection() as connection:
        connection.execute("SET session_replication_role = replica")
        connection.execute("DELETE FROM safe_effects.job WHERE id = %s", (job_id,))
        connection.execute("SET session_replication_role = DEFAULT")
        connection.commit()
    parked = shop.safe.publisher.park_missing(run, envelope, Mark(seq, 0, mark.digest, mark.tenant), "w")
    return shop.safe.job(job_id).status if parked else "stale"


def test_numbers_of_lost_jobs_are_known_for_good(shop: Shop, sql: Sql) -> None:
    for n in range(3):
        shop.bill.delay(n)
    shop.published()
    assert arrives(shop, 4) == "stale"  # a number that was given: rolled back, or pruned
    assert arrives(shop, 100) == "unknown"
    first = shop.safe.new_epoch(actor="ops")
    jobs = [shop.bill.delay(n).id for n in range(3)]
    shop.published()
    numbers = [row["seq"] for row in sql("SELECT seq FROM job WHERE id = ANY (%s) ORDER BY seq", jobs)]
    assert numbers == [first, first + 1, first + 2]
    for lost in (1, 4, 100, first - 1):
        assert arrives(shop, lost) == "unknown", lost
    assert arrives(shop, first + 1) == "stale"
    assert sql("SELECT first_seq, actor FROM epoch") == [{"first_seq": first, "actor": "operator:ops"}]
    # Restored again, and to a state before: no number is given twice.
    assert shop.safe.new_epoch() > first + 2
    sql("SELECT setval('job_seq_seq', 5)")
    sql("DELETE FROM epoch")
    assert shop.safe.new_epoch() > first + 2


def test_a_pruned_job_is_no_lost_one(shop: Shop, sql: Sql) -> None:
    job = shop.bill.delay(1).id
    ((headers, body),) = shop.messages()
    shop.safe.cancel(job, "over")
    sql("INSERT INTO tombstone SELECT id, tenant, idempotency_key, task, args_digest, status FROM job")
    shop.safe.new_epoch()
    mark = Mark.of(headers[MARK])
    assert mark is not None
    assert not shop.safe.publisher.park_missing(shop.safe.store.rows, Envelope(headers, {}, tuple(body), {}), mark, "w")


def test_accepted_jobs_are_counted_across_epochs(shop: Shop) -> None:
    def accepted() -> float:
        (found,) = [m for m in shop.safe.metrics() if m.name == "safe_effects_jobs_accepted_total"]
        return found.samples[0].value

    assert accepted() == 0
    for n in range(3):
        shop.bill.delay(n)
    assert accepted() == 3
    shop.safe.new_epoch()
    assert accepted() == 3
    shop.bill.delay(4)
    shop.bill.delay(5)
    assert accepted() == 5
    shop.safe.new_epoch()
    shop.bill.delay(6)
    assert accepted() == 6


def test_what_may_have_gone_on_after_the_restored_state_is_parked(shops: Callable[..., Shop], sql: Sql) -> None:
    shop = shops()
    buy = shop.task("buy", lambda self, what: pay(what).ref, effects=[pay])
    think = shop.task("think", lambda self, what: ask(what).ref, effects=[ask])
    whole = shop.task("whole", lambda self, what: what)
    with pytest.raises(NotAllowed, match="new_epoch"):
        shop.safe.park_restored()
    names = ("queued", "running", "open", "unknown", "cancelling")
    jobs = {name: buy.delay(name).id for name in names}
    claim(shop, jobs["running"])
    intend(shop, claim(shop, jobs["open"]))
    intend(shop, claim(shop, jobs["unknown"]))
    sql("UPDATE job SET lease_until = clock_timestamp() - interval '1 s' WHERE id = %s", jobs["unknown"])
    shop.safe.sweep()
    claim(shop, jobs["cancelling"])
    shop.safe.cancel(jobs["cancelling"], "enough")
    jobs["body"] = whole.delay(1).id
    jobs["body_open"] = whole.delay(2).id
    intend(shop, claim(shop, jobs["body_open"]), whole_body=True)
    left = {
        "later": buy.apply_async(("later",), countdown=3600).id,
        "thinking": think.delay("x").id,
        "harmless": shop.bill.delay(1).id,
        "mapped": shop.bill.map([1]).apply_async().id,
        "spared": shop.mail.delay(1).id,
    }
    assert shop.safe.job(jobs["unknown"]).status == "unknown"
    shop.safe.new_epoch()
    fresh = buy.delay("fresh").id

    before = {name: shop.safe.job(one).status for name, one in left.items()}
    parked = shop.safe.park_restored(actor="ops")
    now = {name: (shop.safe.job(one).status, shop.safe.job(one).reason) for name, one in jobs.items()}
    restored = ("unknown", "restored")
    assert now == {
        "queued": restored, "running": restored, "open": restored, "unknown": restored, "body": restored,
        "cancelling": ("running", None), "body_open": ("running", None),
    }  # fmt: skip
    assert parked == 5
    assert {name: shop.safe.job(one).status for name, one in left.items()} == before
    assert shop.safe.job(fresh).status == "queued"
    assert shop.safe.park_restored() == 0
    assert [(t.to_status, t.actor, t.reason) for t in shop.safe.transitions(jobs["queued"])][-1] == (
        "unknown", "operator:ops", "restored",
    )  # fmt: skip

    # A question is still answered, and the job does not go on by itself; whoever knows lets it.
    key = f"{jobs['open']}:1"
    shop.safe.resolve(key, Happened("ch_1"), "ops", "in their list")
    assert shop.safe.operation(key).status == "outcome_confirmed"
    assert shop.safe.job(jobs["open"]).status == "unknown"
    assert shop.safe.retry(jobs["open"], "goes on").status == "queued"
    assert shop.safe.cancel(jobs["queued"], "was sent already").status == "cancelled"


def test_a_task_may_be_spared(shop: Shop) -> None:
    whole = shop.task("whole", lambda self, what: what)
    job = whole.delay(1).id
    shop.safe.new_epoch()
    assert shop.safe.park_restored(spare=["shop.whole"]) == 0
    assert shop.safe.job(job).status == "queued"
