"""Each guard of the statements, by an exact interleaving: what it refuses, and that nothing is written then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from celery_safe_effects.store.hot import Lease, Store
from tests.support.protocol import Claimed, Protocol, make_store
from tests.support.services import Sql


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    made = make_store(database_url)
    yield made
    made.connections.close()


@pytest.fixture
def protocol(store: Store) -> Protocol:
    return Protocol(store)


def snapshot(sql: Sql, job_id: str) -> list[dict[str, Any]]:
    """Everything that stands about a job."""
    return [
        *sql("SELECT * FROM job WHERE id = %s", job_id),
        *sql("SELECT * FROM operation WHERE job_id = %s ORDER BY key", job_id),
        *sql("SELECT * FROM transition WHERE job_id = %s ORDER BY id", job_id),
    ]


# -- claims ------------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "another generation": ("", {"generation": 1}),
    "another content": ("", {"digest": "other"}),
    "another task": ("", {"task": "other.task"}),
    "another number": ("", {"seq": 999_999}),
    "another tenant": ("", {"tenant": "other"}),
    "cancelled": ("cancel_requested_at = clock_timestamp()", {}),
    "no attempts left": ("attempts = max_attempts", {}),
    "not its time yet": ("run_after = clock_timestamp() + interval '1 hour'", {}),
    "expired": ("expires_at = clock_timestamp() - interval '1 s'", {}),
    "too old": ("gives_up_at = clock_timestamp() - interval '1 s'", {}),
}


@pytest.mark.parametrize("why", list(REFUSED))
def test_a_claim_is_refused(protocol: Protocol, store: Store, sql: Sql, why: str) -> None:
    changes, marked = REFUSED[why]
    job_id = protocol.accept()
    if changes:
        sql(f"UPDATE job SET {changes} WHERE id = %s", job_id)  # type: ignore[call-overload, unused-ignore]
    before = snapshot(sql, job_id)
    mark = {"generation": 0, "digest": "digest", "task": None, "seq": None, "tenant": None, **marked}
    token = uuid4()
    lease = {"id": job_id, "token": token, "owner": "b@host/1/1", "ttl": 30.0, "limits": None}
    row = store.claim("CLAIM", lease | mark)
    assert row is not None
    assert (row.status, row.lease_token) == ("queued", None)
    assert snapshot(sql, job_id) == before


def test_only_a_queued_job_is_claimed(protocol: Protocol, sql: Sql) -> None:
    """Not one that somebody else has, is over, or is parked."""
    job_id = protocol.accept()
    first = protocol.claim(job_id)
    assert first is not None
    before = snapshot(sql, job_id)
    assert Protocol(protocol.store, "b@host/1/1").claim(job_id) is None
    assert snapshot(sql, job_id) == before
    nonce = protocol.intent(first)
    assert nonce is not None
    protocol.outcome(first, nonce, "unknown")
    protocol.leave(first, "unknown")
    before = snapshot(sql, job_id)
    assert protocol.claim(job_id) is None
    assert snapshot(sql, job_id) == before


def test_a_claim_of_a_whole_body_is_refused_alike(protocol: Protocol, store: Store, sql: Sql) -> None:
    """... and records no intent."""
    job_id = protocol.accept()
    first = protocol.claim(job_id)
    assert first is not None
    before = snapshot(sql, job_id)
    values = {
        "step": "body", "ordinal": 1, "effect": "tests.task", "keyed": False, "repeatable": False, "whole_body": True,
        "nonce": uuid4(), "process": "process", "args": "{}", "args_digest": "digest", "deadline": None, "lag": 0.0,
        "idempotent_for": None, "has_lookup": False, "if_unknown": "park", "detached": False,
        "deadline_kills": False, "deadline_is_proof": False, "trace": None,
    }  # fmt: skip
    mark = {"generation": 0, "digest": "digest", "task": None, "seq": None, "tenant": None}
    token = uuid4()
    lease = {"id": job_id, "token": token, "owner": "b@host/1/1", "ttl": 30.0, "limits": None}
    row = store.claim("CLAIM_BODY", lease | mark | values)
    assert row is not None
    assert row.lease_token != token
    assert snapshot(sql, job_id) == before


# -- who writes --------------------------------------------------------------------------------------------------------


def renew(protocol: Protocol, claimed: Claimed) -> Any:
    return protocol.store.renew([(claimed.lease, 30.0)]) or None


def checkpoint(protocol: Protocol, claimed: Claimed) -> Any:
    lease = claimed.lease
    return protocol.store.row("CHECKPOINT", job=lease.job, token=lease.token, fence=lease.fence, ttl=30.0)


def went_on(protocol: Protocol, claimed: Claimed) -> Any:
    lease = claimed.lease
    return protocol.store.row("WENT_ON", id=lease.job, token=lease.token, fence=lease.fence, ordinal=1)


def more_attempts(protocol: Protocol, claimed: Claimed) -> Any:
    lease = claimed.lease
    return protocol.store.row("MORE_ATTEMPTS", id=lease.job, token=lease.token, fence=lease.fence, wanted=9)


def body_pending(protocol: Protocol, claimed: Claimed) -> Any:
    lease = claimed.lease
    values = dict.fromkeys(
        ("reason", "error", "run_at", "envelope", "digest", "retries", "expires", "queue", "priority", "settle",
         "generation", "task")
    )  # fmt: skip
    return protocol.store.row(
        "BODY_PENDING",
        id=lease.job,
        token=lease.token,
        fence=lease.fence,
        pending="failed",
        delay=0.0,
        refund=0,
        **values,
    )


def intent(protocol: Protocol, claimed: Claimed) -> Any:
    return protocol.intent(claimed, "2")


def leave(protocol: Protocol, claimed: Claimed) -> Any:
    return protocol.leave(claimed)


WRITES: dict[str, Callable[[Protocol, Claimed], Any]] = {
    "intent": intent,
    "end": leave,
    "renewal": renew,
    "checkpoint": checkpoint,
    "went on": went_on,
    "more attempts": more_attempts,
    "body's end": body_pending,
}


def forged(claimed: Claimed, what: str) -> Claimed:
    """A lease that is not the one that stands: an earlier one, or a claim that was lost and whose number is in use."""
    lease = claimed.lease
    other = (
        Lease(lease.job, uuid4(), lease.fence, lease.owner)
        if what == "token"
        else Lease(lease.job, lease.token, lease.fence + 1, lease.owner)
    )
    return Claimed(other, claimed.row)


@pytest.mark.parametrize("what", ["token", "fence"])
@pytest.mark.parametrize("write", list(WRITES))
def test_another_s_lease_writes_nothing(protocol: Protocol, sql: Sql, write: str, what: str) -> None:
    """Token and fence both: a lost claim's number can be issued again, and a number says which run a write is of."""
    job_id = protocol.accept()
    claimed = protocol.claim(job_id)
    assert claimed is not None
    before = snapshot(sql, job_id)
    assert WRITES[write](protocol, forged(claimed, what)) is None
    assert snapshot(sql, job_id) == before
    assert WRITES[write](protocol, claimed) is not None


@pytest.mark.parametrize("write", [name for name in WRITES if name != "renewal"])
def test_a_run_that_is_over_writes_nothing(protocol: Protocol, sql: Sql, write: str) -> None:
    job_id = protocol.accept()
    claimed = protocol.claim(job_id)
    assert claimed is not None
    assert protocol.leave(claimed, "again") is not None
    before = snapshot(sql, job_id)
    assert WRITES[write](protocol, claimed) is None
    assert snapshot(sql, job_id) == before


@pytest.mark.parametrize("write", ["intent", "renewal", "checkpoint"])
def test_a_lease_that_ran_out_is_not_revived(protocol: Protocol, sql: Sql, write: str) -> None:
    """Although nobody has swept it yet."""
    job_id = protocol.accept()
    claimed = protocol.claim(job_id)
    assert claimed is not None
    sql("UPDATE job SET lease_until = clock_timestamp() - interval '1 ms' WHERE id = %s", job_id)
    before = snapshot(sql, job_id)
    assert WRITES[write](protocol, claimed) is None
    assert snapshot(sql, job_id) == before


@pytest.mark.parametrize(
    ("write", "changes"),
    [
        ("intent", "cancel_requested_at = clock_timestamp()"),
        ("intent", "expires_at = clock_timestamp()"),
        ("intent", "gives_up_at = clock_timestamp()"),
        ("renewal", "gives_up_at = clock_timestamp()"),
    ],
)
def test_no_effect_begins_and_no_lease_goes_on(protocol: Protocol, sql: Sql, write: str, changes: str) -> None:
    """... in a job that was cancelled, expired, or is too old."""
    job_id = protocol.accept()
    claimed = protocol.claim(job_id)
    assert claimed is not None
    sql(f"UPDATE job SET {changes} WHERE id = %s", job_id)  # type: ignore[call-overload, unused-ignore]
    before = snapshot(sql, job_id)
    assert WRITES[write](protocol, claimed) is None
    assert snapshot(sql, job_id) == before


# -- operations --------------------------------------------------------------------------------------------------------


def begun(protocol: Protocol, **intent_options: Any) -> tuple[Claimed, Any]:
    claimed = protocol.claim(protocol.accept())
    assert claimed is not None
    nonce = protocol.intent(claimed, **intent_options)
    assert nonce is not None
    return claimed, nonce


def again(protocol: Protocol, claimed: Claimed) -> Claimed:
    """The job's next run."""
    protocol.sweep()
    found = protocol.claim(claimed.lease.job)
    assert found is not None
    return found


def test_an_outcome_is_the_callers_alone(protocol: Protocol, sql: Sql) -> None:
    """Not another call's of the same key, and not another key's."""
    claimed, nonce = begun(protocol)
    before = snapshot(sql, claimed.lease.job)
    assert protocol.outcome(claimed, uuid4()).status is None
    assert snapshot(sql, claimed.lease.job) == before
    assert protocol.outcome(claimed, nonce).status == "outcome_confirmed"


@pytest.mark.parametrize(
    ("first", "then"),
    [("refused", "outcome_confirmed"), ("outcome_confirmed", "refused"), ("outcome_confirmed", "unknown"),
     ("unknown", "unknown"), ("not_happened", "refused"), ("not_happened", "unknown")],
)  # fmt: skip
def test_what_is_known_of_a_call_does_not_change(protocol: Protocol, sql: Sql, first: str, then: str) -> None:
    claimed, nonce = begun(protocol)
    assert protocol.outcome(claimed, nonce, first).status == first
    before = snapshot(sql, claimed.lease.job)
    assert protocol.outcome(claimed, nonce, then).status is None
    assert snapshot(sql, claimed.lease.job) == before


@pytest.mark.parametrize("status", ["intent_recorded", "outcome_confirmed", "refused", "unknown"])
def test_a_step_is_sent_once(protocol: Protocol, sql: Sql, status: str) -> None:
    """Unless it provably did not happen, no second call gets an intent, whatever its nonce."""
    claimed, nonce = begun(protocol)
    if status != "intent_recorded":
        protocol.outcome(claimed, nonce, status)
    before = snapshot(sql, claimed.lease.job)
    assert protocol.intent(claimed) is None
    assert snapshot(sql, claimed.lease.job) == before


def test_what_did_not_happen_is_sent_again_as_it_was(protocol: Protocol, sql: Sql) -> None:
    """The same effect with the same arguments, in a second attempt of the operation."""
    claimed, nonce = begun(protocol)
    protocol.outcome(claimed, nonce, "not_happened")
    before = snapshot(sql, claimed.lease.job)
    assert protocol.intent(claimed, args_digest="other") is None
    assert protocol.intent(claimed, effect="tests.other") is None
    assert snapshot(sql, claimed.lease.job) == before
    assert protocol.intent(claimed) is not None
    assert sql("SELECT attempt, status FROM operation") == [{"attempt": 2, "status": "intent_recorded"}]


RETENTION = {
    "retained": (3600.0, "", True),
    "its call would end too late": (3600.0, "first_intent_at = first_intent_at - interval '3590 s'", False),
    "no longer retained": (3600.0, "first_intent_at = first_intent_at - interval '2 hours'", False),
    "never": (None, "", False),
}


@pytest.mark.parametrize("case", list(RETENTION))
def test_a_key_is_sent_again_while_the_provider_retains_it(protocol: Protocol, sql: Sql, dsn: str, case: str) -> None:
    idempotent_for, changes, sent = RETENTION[case]
    claimed, nonce = begun(protocol, idempotent_for=idempotent_for, has_lookup=False, deadline=30.0)
    protocol.outcome(claimed, nonce, "unknown")
    protocol.leave(claimed, "unknown")
    past = "deadline_at = clock_timestamp() - interval '1 s', absent_from = clock_timestamp() - interval '1 s'"
    with psycopg.connect(dsn, autocommit=True) as connection:
        # Its first intent never moves: only somebody who switches the triggers off can make it older.
        connection.execute("SET session_replication_role = replica")
        connection.execute(f"UPDATE safe_effects.operation SET {', '.join(filter(None, [past, changes]))}".encode())
    resumed = protocol.store.rows("RESUME", id=claimed.lease.job, reason="resend", actor="reconciler")
    assert bool(resumed) == sent
    assert sql("SELECT status FROM job") == [{"status": "queued" if sent else "unknown"}]


@pytest.mark.parametrize("wish", ["failed", "succeeded", "again"])
def test_what_is_sent_again_proves_nothing_of_the_call_before(protocol: Protocol, sql: Sql, wish: str) -> None:
    """The second call did not happen; the first one may have, and its question stays open."""
    claimed, nonce = begun(protocol, idempotent_for=3600.0, has_lookup=False, deadline=30.0)
    protocol.outcome(claimed, nonce, "unknown")
    protocol.leave(claimed, "unknown")
    sql("UPDATE operation SET deadline_at = clock_timestamp() - interval '1 s'")
    assert protocol.store.rows("RESUME", id=claimed.lease.job, reason="resend", actor="reconciler")
    second = protocol.claim(claimed.lease.job)
    assert second is not None
    nonce = protocol.intent(second, idempotent_for=3600.0, has_lookup=False, deadline=30.0)
    assert nonce is not None
    assert protocol.outcome(second, nonce, "not_happened").status == "unknown"
    left = protocol.leave(second, wish)
    assert left is not None
    assert left.status == "unknown"
    assert sql("SELECT attempt, status FROM operation") == [{"attempt": 2, "status": "unknown"}]


def verdict(protocol: Protocol, claimed: Claimed, **changed: Any) -> Any:
    (asked,) = protocol.store.rows("JOB", id=claimed.lease.job)
    values: dict[str, Any] = {
        "job": asked.id, "key": f"{asked.id}:1", "attempt": 1, "fence": claimed.lease.fence, "status": "not_happened",
        "ref": None, "result": None, "error": None, "evidence": None, "asked_at": None, "trusted": False,
        "actor": "lookup", "reason": "lookup",
    }  # fmt: skip
    return protocol.store.row("VERDICT", **{**values, **changed})


GROUNDS = {
    "in time, sender gone": ("gone_at = clock_timestamp()", "1 hour", {}, True),
    "asked before deadline and lag": ("gone_at = clock_timestamp()", "-1 hour", {}, False),
    "it lived when that was asked": ("gone_at = absent_from + interval '2 hours'", "1 hour", {}, False),
    "the sender may be alive": ("", "1 hour", {}, False),
    "the kernel ends it": ("deadline_is_proof = true", "1 hour", {}, True),
    "a detached effect": ("gone_at = clock_timestamp(), detached = true", "1 hour", {}, False),
    "of another attempt": ("gone_at = clock_timestamp()", "1 hour", {"attempt": 2}, False),
    "of another run": ("gone_at = clock_timestamp()", "1 hour", {"fence": 7}, False),
}


@pytest.mark.parametrize("case", list(GROUNDS))
def test_an_absence_counts_on_these_grounds_alone(protocol: Protocol, sql: Sql, case: str) -> None:
    changes, after, changed, counts = GROUNDS[case]
    claimed, nonce = begun(protocol)
    protocol.outcome(claimed, nonce, "unknown")
    protocol.leave(claimed, "unknown")
    if changes:
        sql(f"UPDATE operation SET {changes}")  # type: ignore[call-overload, unused-ignore]
    (row,) = sql("SELECT absent_from + %s::interval AS at FROM operation", after)
    found = verdict(protocol, claimed, asked_at=row["at"], **changed)
    assert (found is not None) == counts
    assert sql("SELECT status FROM operation") == [{"status": "not_happened" if counts else "unknown"}]


def test_a_verdict_answers_an_open_question_alone(protocol: Protocol, sql: Sql) -> None:
    """The call's own word goes before whatever was asked meanwhile."""
    claimed, nonce = begun(protocol)
    protocol.outcome(claimed, nonce, "unknown")
    protocol.outcome(claimed, nonce)
    before = snapshot(sql, claimed.lease.job)
    assert verdict(protocol, claimed, status="refused", asked_at=None) is None
    assert snapshot(sql, claimed.lease.job) == before


def test_the_policy_waits_for_deadline_and_lag(protocol: Protocol, sql: Sql) -> None:
    claimed, nonce = begun(protocol, if_unknown="send_again")
    protocol.outcome(claimed, nonce, "unknown")
    given = {"key": f"{claimed.lease.job}:1", "attempt": 1, "fence": claimed.lease.fence}
    assert protocol.store.rows("POLICY", **given) == []
    sql("UPDATE operation SET absent_from = clock_timestamp()")
    assert protocol.store.rows("POLICY", **{**given, "attempt": 2}) == []
    assert protocol.store.rows("POLICY", **given) != []


def test_gone_is_who_was_seen_to_be(protocol: Protocol, sql: Sql) -> None:
    claimed, nonce = begun(protocol)
    protocol.outcome(claimed, nonce, "unknown")
    assert protocol.store.rows("GONE", processes=["another process"], in_flight=60.0) == []
    assert sql("SELECT gone_at FROM operation") == [{"gone_at": None}]
    assert protocol.store.rows("GONE", processes=["process"], in_flight=60.0) != []


@pytest.mark.parametrize(
    ("deadline", "kills", "seen", "later"),
    [
        # Before its deadline, nobody outlived it; after it, only who was not ended by it.
        (20.0, False, 10.0, 20.0 + 5.0),
        (20.0, False, 30.0, 30.0 + 20.0 + 5.0),
        (20.0, True, 30.0, 20.0 + 5.0),
        (None, False, 30.0, 30.0 + 60.0 + 5.0),
    ],
)
def test_who_may_have_outlived_its_deadline_may_have_sent_until_it_was_gone(
    protocol: Protocol, sql: Sql, deadline: float | None, kills: bool, seen: float, later: float
) -> None:
    claimed, nonce = begun(protocol, deadline=deadline, deadline_kills=kills, lag=5.0)
    protocol.outcome(claimed, nonce, "unknown")
    for name in ("intent_at", "deadline_at", "absent_from"):
        sql(f"UPDATE operation SET {name} = {name} - %s * interval '1 s'", seen)
    assert protocol.store.rows("GONE", processes=["process"], in_flight=60.0) != []
    (row,) = sql("SELECT extract(epoch FROM absent_from - intent_at)::float8 AS later FROM operation")
    assert later - 1 < row["later"] < later + 10


@pytest.mark.parametrize(
    ("repeatable", "status", "begins", "ends"),
    [
        (False, "outcome_confirmed", (1, 0, 0, 1), (0, 0, 0, 1)),
        (False, "unknown", (1, 0, 0, 1), (0, 1, 0, 1)),
        (True, "outcome_confirmed", (0, 0, 1, 1), (0, 0, 0, 1)),
    ],
)
def test_a_running_job_counts_its_operations(
    protocol: Protocol, sql: Sql, repeatable: bool, status: str, begins: tuple[int, ...], ends: tuple[int, ...]
) -> None:
    """What may be asked again is counted by itself: it parks nobody."""

    def counted() -> tuple[int, ...]:
        (row,) = sql("SELECT open_ops, unknown_ops, asking_ops, operations FROM job")
        return tuple(row.values())

    claimed, nonce = begun(protocol, repeatable=repeatable)
    assert counted() == begins
    protocol.outcome(claimed, nonce, status)
    assert counted() == ends


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "to", "pending"),
    [("succeeded", "unknown", None), ("failed", "unknown", "failed"), ("cancelled", "unknown", "cancelled"),
     ("again", "unknown", None)],
)  # fmt: skip
def test_an_open_question_parks_every_end(
    protocol: Protocol, sql: Sql, wish: str, to: str, pending: str | None
) -> None:
    claimed, nonce = begun(protocol)
    protocol.outcome(claimed, nonce, "unknown")
    row = protocol.leave(claimed, wish, ref=None)
    assert row is not None
    assert row.status == to
    assert sql("SELECT pending_status FROM job") == [{"pending_status": pending}]


def test_the_last_run_ends_the_job(protocol: Protocol, sql: Sql) -> None:
    job_id = protocol.accept(limits={"max_attempts": 1})
    claimed = protocol.claim(job_id)
    assert claimed is not None
    sql("UPDATE job SET lease_until = clock_timestamp() - interval '1 ms' WHERE id = %s", job_id)
    (swept,) = protocol.sweep()
    assert (swept.status, swept.reason) == ("failed", "max_attempts")


@pytest.mark.parametrize("statement", ["SETTLE", "TELL"])
def test_celery_is_told_of_the_end_that_stands(protocol: Protocol, store: Store, sql: Sql, statement: str) -> None:
    """Not of an earlier one, which an operator's retry has overtaken; and of none that is not there."""
    claimed, nonce = begun(protocol)
    protocol.outcome(claimed, nonce)
    job_id, fence = claimed.lease.job, claimed.lease.fence

    def told(number: int) -> bool:
        if statement == "TELL":
            return bool(store.rows("TELL", id=job_id, fence=number))
        store.settle([(job_id, number)])
        return bool(sql("SELECT 1 FROM job WHERE settled_at IS NOT NULL"))

    assert not told(fence)
    protocol.leave(claimed)
    assert not told(fence - 1)
    assert told(fence)
    if statement == "TELL":
        assert not told(fence), "another delivery tells it"


# -- several at once ---------------------------------------------------------------------------------------------------

SWEEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "SWEEP_LEASES": (
        "lease_until = clock_timestamp() - interval '1 s'",
        {"limit": 10, "wish": "again", "reason": "lease_expired", "delay": 0.0, "max_delay": 0.0, "actor": "sweeper"},
    ),
    "SWEEP_DYING": ("expires_at = clock_timestamp()", {"id": None, "limit": 10, "actor": "sweeper"}),
    "DUE": (
        "next_publish_at = clock_timestamp()",
        {"ids": None, "limit": 10, "ahead": 0.0, "settle_tries": 8, "republish": 60.0},
    ),
}


@pytest.mark.parametrize("statement", list(SWEEPS))
def test_a_row_that_somebody_has_locked_holds_up_no_other(
    protocol: Protocol, store: Store, sql: Sql, dsn: str, statement: str
) -> None:
    """Whoever holds it is alive, and the next sweep sees what became of it."""
    changes, params = SWEEPS[statement]
    locked, free = protocol.accept(), protocol.accept()
    if statement == "SWEEP_LEASES":
        for job_id in (locked, free):
            assert protocol.claim(job_id) is not None
    sql(f"UPDATE job SET {changes}")  # type: ignore[call-overload, unused-ignore]
    with psycopg.connect(dsn) as connection:
        connection.execute("SELECT FROM safe_effects.job WHERE id = %s FOR UPDATE", (locked,))
        assert [row.id for row in store.rows(statement, **params)] == [free]
        connection.rollback()
    assert [row.id for row in store.rows(statement, **params)] == [locked]
