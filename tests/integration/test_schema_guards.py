"""The database refuses what the contract forbids, also from hand-written SQL, and writes the log itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, permutations
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.rows import dict_row

from celery_safe_effects.config import from_conf
from celery_safe_effects.errors import SchemaMismatch
from celery_safe_effects.states import (
    JOB_TRANSITIONS,
    OPERATION_TRANSITIONS,
    TERMINAL,
    JobStatus,
    OperationStatus,
)
from celery_safe_effects.store import migrate
from celery_safe_effects.store.hot import Store
from celery_safe_effects.testing import eventually
from tests.support.services import PostgresServer, Sql

J, Op = JobStatus, OperationStatus

ILLEGAL, TERMINAL_ROW, FENCED, READ_ONLY, CHECKED = "SE001", "SE002", "SE003", "SE004", "23514"

TAKE_LEASE = (
    "lease_token = gen_random_uuid(), lease_owner = 'hand', lease_until = clock_timestamp() + interval '1 minute',"
    " fence = fence + 1"
)
"""What a hand-written claim has to bring with it."""
JOB_NEEDS = {
    J.LEASED: TAKE_LEASE,
    J.RUNNING: TAKE_LEASE,
    J.SUCCEEDED: "outcome_ref = 'ref', reason = 'why'",
}
JOB_PATHS = {
    J.QUEUED: [],
    J.LEASED: [J.LEASED],
    J.RUNNING: [J.LEASED, J.RUNNING],
    J.SUCCEEDED: [J.LEASED, J.RUNNING, J.SUCCEEDED],
    J.FAILED: [J.FAILED],
    J.CANCELLED: [J.CANCELLED],
    J.UNKNOWN: [J.UNKNOWN],
}
OPERATION_NEEDS = {
    Op.INTENT_RECORDED: "nonce = gen_random_uuid(), attempt = attempt + 1",
    Op.OUTCOME_CONFIRMED: "provider_ref = 'ref'",
    Op.REFUSED: 'error = \'{"text": "no"}\'',
}


class Hand:
    """SQL as somebody with psql writes it, on the tables themselves."""

    _numbers = count(1)

    def __init__(self, sql: Sql) -> None:
        self.sql = sql
        self.user = str(sql("SELECT session_user AS me")[0]["me"])

    def job(self, status: JobStatus = J.QUEUED) -> str:
        """A new job, brought to a status on the shortest legal way."""
        job_id = f"job-{next(self._numbers)}"
        self.sql(
            "INSERT INTO job (id, task, idempotency_key, args_digest, envelope) VALUES (%s, 't', %s, 'd', '')",
            job_id,
            f"key-{job_id}",
        )
        for step in JOB_PATHS[status]:
            self.move(job_id, step)
        return job_id

    def move(self, job_id: str, to: JobStatus, more: str = "") -> None:
        """Write a job's status and what that status needs."""
        needs = JOB_NEEDS.get(to, "reason = 'why'") + more
        self.sql(f"UPDATE job SET status = %s, {needs} WHERE id = %s", str(to), job_id)

    def operation(self, status: OperationStatus = Op.INTENT_RECORDED, job_id: str | None = None, **columns: Any) -> str:
        """A new operation of a running job, brought to a status."""
        job_id = job_id or self.job(J.RUNNING)
        key = f"{job_id}:{next(self._numbers)}"
        extra = "".join(f", {name}" for name in columns)
        values = "".join(f", {value}" for value in columns.values())
        self.sql(
            "INSERT INTO operation (key, job_id, step, ordinal, effect, status, fence, nonce, args_digest"
            f"{extra}) VALUES (%s, %s, '1', 1, 'e', 'intent_recorded', 1, gen_random_uuid(), 'd'{values})",
            key,
            job_id,
        )
        if status != Op.INTENT_RECORDED:
            self.resolve(key, status)
        return key

    def resolve(self, key: str, to: OperationStatus, more: str = "") -> None:
        """Write an operation's status and what that status needs."""
        needs = OPERATION_NEEDS.get(to, "reason = 'why'") + more
        self.sql(f"UPDATE operation SET status = %s, {needs} WHERE key = %s", str(to), key)

    def log(self, job_id: str, key: str | None = None) -> list[tuple[Any, ...]]:
        """From, to, fence, actor and reason of a job's transitions, or of one operation's."""
        rows = self.sql(
            "SELECT from_status, to_status, fence, actor, reason FROM transitions"
            " WHERE job_id = %s AND operation_key IS NOT DISTINCT FROM %s ORDER BY id",
            job_id,
            key,
        )
        return [tuple(row.values()) for row in rows]

    def status(self, job_id: str) -> str:
        """The job's status."""
        return str(self.sql("SELECT status FROM jobs WHERE id = %s", job_id)[0]["status"])


@pytest.fixture(scope="module")
def guarded(postgres_server: PostgresServer) -> Iterator[str]:
    """One database for all guards: each test makes its own rows, and what is refused leaves none."""
    name = f"guards_{uuid4().hex[:12]}"
    migrate.upgrade(postgres_server.create_database(name))
    yield postgres_server.dsn(name)
    postgres_server.drop_database(name)


@pytest.fixture
def hand(guarded: str) -> Iterator[Hand]:
    """Somebody with psql."""
    with psycopg.connect(
        guarded, autocommit=True, row_factory=dict_row, options="-c search_path=safe_effects,public"
    ) as connection:

        def run(query: str, *params: Any) -> list[dict[str, Any]]:
            cursor = connection.execute(query.encode(), params or None)
            return cursor.fetchall() if cursor.description else []

        yield Hand(run)


def refusal_of(write: Callable[[], None]) -> str | None:
    """The SQLSTATE with which the database refuses, None where it accepts."""
    try:
        write()
    except psycopg.Error as error:
        return error.sqlstate or repr(error)
    return None


@contextmanager
def refused_with(sqlstate: str) -> Iterator[None]:
    """The database refuses with this state."""
    with pytest.raises(psycopg.Error) as refusal:
        yield
    assert refusal.value.sqlstate == sqlstate, repr(refusal.value)


# -- transitions, pair by pair -----------------------------------------------------------------------------------------


def test_the_triggers_know_exactly_the_legal_transitions_of_jobs(hand: Hand) -> None:
    accepted = set()
    for old, new in permutations(J, 2):
        job_id = hand.job(old)
        before = hand.log(job_id)
        # The operator's retry is the one transition that needs to say who it is.
        actor = ", actor = 'operator:ann'" if (old, new) in {(J.FAILED, J.QUEUED), (J.CANCELLED, J.QUEUED)} else ""
        refusal = refusal_of(lambda: hand.move(job_id, new, actor))  # noqa: B023 - called here and now
        if refusal:
            assert refusal == ILLEGAL, f"{old} -> {new}"
            assert hand.status(job_id) == old
            assert hand.log(job_id) == before
            continue
        accepted.add((old, new))
        (fence,) = hand.sql("SELECT fence FROM jobs WHERE id = %s", job_id)
        who = "operator:ann" if actor else hand.user
        why = None if new in JOB_NEEDS and new != J.SUCCEEDED else "why"
        expected = [(str(old), str(new), fence["fence"], who, why)]
        if (old, new) == (J.QUEUED, J.RUNNING):
            expected = [("queued", "leased", 1, who, None), ("leased", "running", 1, who, None)]
        assert hand.log(job_id)[len(before) :] == expected
    legal = {(old, new) for old, targets in JOB_TRANSITIONS.items() for new in targets}
    # In one statement these are two transitions, and two rows of the log.
    assert accepted == legal | {(J.QUEUED, J.RUNNING)}


def test_the_triggers_know_exactly_the_legal_transitions_of_operations(hand: Hand) -> None:
    accepted = set()
    sendable = {"idempotent_for": "'1 hour'::interval", "gone_at": "now()"}
    for old, new in permutations(Op, 2):
        key = hand.operation(old, **sendable)
        job_id = key.rpartition(":")[0]
        before = hand.log(job_id, key)
        refusal = refusal_of(lambda: hand.resolve(key, new))  # noqa: B023 - called here and now
        if refusal:
            assert refusal == ILLEGAL, f"{old} -> {new}"
            assert hand.log(job_id, key) == before
            continue
        accepted.add((old, new))
        why = None if new in OPERATION_NEEDS else "why"
        assert hand.log(job_id, key)[len(before) :] == [(str(old), str(new), 1, hand.user, why)]
    assert accepted == {(old, new) for old, targets in OPERATION_TRANSITIONS.items() for new in targets}


def test_jobs_and_operations_begin_where_the_contract_says(hand: Hand) -> None:
    insert = "INSERT INTO job (id, task, args_digest, envelope, status, reason, outcome_ref{0}) VALUES ({1})"
    for status in J:
        lease = status in {J.LEASED, J.RUNNING}
        columns = ", lease_token, lease_owner, lease_until" if lease else ""
        columns += ", finished_at" if status in TERMINAL else ""
        values = f"'{status}', 't', 'd', '', '{status}', 'why', 'ref'"
        values += ", gen_random_uuid(), 'hand', now() + interval '1 minute'" if lease else ""
        values += ", now()" if status in TERMINAL else ""
        if status == J.QUEUED:
            hand.sql(insert.format(columns, values))
            assert hand.log("queued") == [(None, "queued", 0, hand.user, "why")]
            continue
        with refused_with(ILLEGAL):
            hand.sql(insert.format(columns, values))
    hand.sql(insert.format("", "'restored', 't', 'd', '', 'unknown', 'row_missing', NULL"))

    job_id = hand.job(J.RUNNING)
    for operation_status in Op:
        if operation_status != Op.INTENT_RECORDED:
            with refused_with(ILLEGAL):
                hand.sql(
                    "INSERT INTO operation (key, job_id, step, ordinal, effect, status, fence, nonce, args_digest,"
                    " provider_ref) VALUES ('k', %s, '1', 1, 'e', %s, 1, gen_random_uuid(), 'd', 'ref')",
                    job_id,
                    str(operation_status),
                )
    with refused_with(ILLEGAL):
        hand.operation(job_id="no-such-job")


def test_a_change_is_written_down_as_the_one_who_made_it(hand: Hand) -> None:
    # The worker's own rows name the worker; whoever writes after it must not borrow its name.
    job_id = hand.job(J.QUEUED)
    hand.move(job_id, J.RUNNING, ", actor = 'w@host/1/2'")
    key = hand.operation(job_id=job_id, recorded_by="'w@host/1/2'")
    assert [row[3] for row in hand.log(job_id, key)] == ["w@host/1/2"]
    hand.resolve(key, Op.OUTCOME_CONFIRMED)
    hand.move(job_id, J.SUCCEEDED)
    assert hand.log(job_id, key)[-1][3] == hand.user
    assert hand.log(job_id)[-1][3] == hand.user


# -- what a status needs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [J.RUNNING, J.UNKNOWN])
def test_nothing_succeeds_without_a_reference(hand: Hand, start: JobStatus) -> None:
    job_id = hand.job(start)
    with refused_with(CHECKED):
        hand.sql("UPDATE job SET status = 'succeeded' WHERE id = %s", job_id)
    with refused_with(CHECKED):
        hand.sql("UPDATE job SET status = 'succeeded', outcome_ref = '' WHERE id = %s", job_id)
    assert hand.status(job_id) == start


@pytest.mark.parametrize("question", [Op.INTENT_RECORDED, Op.UNKNOWN])
@pytest.mark.parametrize("end", sorted(TERMINAL))
def test_nothing_ends_with_an_open_question(hand: Hand, question: OperationStatus, end: JobStatus) -> None:
    job_id = hand.job(J.RUNNING)
    hand.operation(question, job_id)
    with refused_with(CHECKED):
        hand.move(job_id, end)
    # Nor by way of the counters, which are the triggers' own.
    with pytest.raises(psycopg.Error):
        hand.move(job_id, end, ", open_ops = 0, unknown_ops = 0")
    with pytest.raises(psycopg.Error):
        hand.sql("UPDATE job SET open_ops = 0, unknown_ops = 0 WHERE id = %s", job_id)
    assert hand.status(job_id) == J.RUNNING
    hand.move(job_id, J.UNKNOWN)
    with refused_with(CHECKED):
        hand.move(job_id, end)
    assert hand.status(job_id) == J.UNKNOWN


def test_a_lease_that_ends_leaves_nothing_open(hand: Hand) -> None:
    job_id = hand.job(J.RUNNING)
    key = hand.operation(job_id=job_id)
    with refused_with(CHECKED):
        hand.move(job_id, J.QUEUED)
    hand.move(job_id, J.UNKNOWN)
    (row,) = hand.sql("SELECT status, next_reconcile_at FROM operations WHERE key = %s", key)
    assert row["status"] == "unknown"
    assert row["next_reconcile_at"] is not None


def test_an_intent_needs_a_job_that_runs(hand: Hand) -> None:
    # On any other job nobody would ever take it up: no lease ends, and nobody reconciles an intent.
    for status in (J.QUEUED, J.UNKNOWN, J.SUCCEEDED, J.FAILED, J.CANCELLED):
        with pytest.raises(psycopg.Error):
            hand.operation(job_id=hand.job(status))
    job_id = hand.job(J.RUNNING)
    key = hand.operation(Op.NOT_HAPPENED, job_id)
    hand.move(job_id, J.UNKNOWN)
    with pytest.raises(psycopg.Error):
        hand.resolve(key, Op.INTENT_RECORDED)


def test_a_claim_takes_a_new_token_and_a_higher_fence(hand: Hand) -> None:
    job_id = hand.job(J.RUNNING)
    hand.move(job_id, J.QUEUED)
    lease = "lease_owner = 'hand', lease_until = clock_timestamp() + interval '1 minute'"
    claim = f"UPDATE job SET status = 'running', {lease}, {{0}} WHERE id = %s"
    for how in (
        "lease_token = lease_token, fence = fence + 1",
        "lease_token = gen_random_uuid(), fence = fence",
        "lease_token = gen_random_uuid(), fence = fence - 1",
    ):
        with refused_with(FENCED):
            hand.sql(claim.format(how), job_id)
    hand.sql(claim.format("lease_token = gen_random_uuid(), fence = fence + 1"), job_id)
    with refused_with(FENCED):
        hand.sql("UPDATE job SET status = 'queued', fence = fence - 1 WHERE id = %s", job_id)


def test_a_live_job_has_a_lease_and_no_other_has(hand: Hand) -> None:
    queued, running = hand.job(J.QUEUED), hand.job(J.RUNNING)
    with refused_with(CHECKED):
        hand.sql(
            "UPDATE job SET status = 'running', lease_token = gen_random_uuid(), fence = fence + 1 WHERE id = %s",
            queued,
        )
    for column in ("lease_until", "lease_owner", "lease_token"):
        with refused_with(CHECKED):
            hand.sql(f"UPDATE job SET {column} = NULL WHERE id = %s", running)
    with refused_with(CHECKED):
        hand.sql("UPDATE job SET lease_until = now(), lease_owner = 'hand' WHERE id = %s", queued)


# -- what never changes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", J)
def test_the_keys_of_a_job_never_change(hand: Hand, status: JobStatus) -> None:
    job_id = hand.job(status)
    for change in ("id = 'other'", "tenant = 'other'", "idempotency_key = 'other'", "idempotency_key = NULL"):
        with refused_with(ILLEGAL):
            hand.sql(f"UPDATE job SET {change} WHERE id = %s", job_id)


@pytest.mark.parametrize("status", Op)
def test_the_key_of_an_operation_never_changes(hand: Hand, status: OperationStatus) -> None:
    key = hand.operation(status)
    moved = "first_intent_at = first_intent_at + interval '1 hour'"
    for change in ("key = 'other'", "effect = 'other'", moved):
        with refused_with(ILLEGAL):
            hand.sql(f"UPDATE operation SET {change} WHERE key = %s", key)


def test_keys_are_taken_once(hand: Hand) -> None:
    job_id = hand.job()
    with pytest.raises(psycopg.errors.UniqueViolation):
        hand.sql(
            "INSERT INTO job (id, task, idempotency_key, args_digest, envelope) VALUES ('other', 't', %s, 'd', '')",
            f"key-{job_id}",
        )
    hand.sql(
        "INSERT INTO job (id, tenant, task, idempotency_key, args_digest, envelope)"
        " VALUES ('other', 'acme', 't', %s, 'd', '')",
        f"key-{job_id}",
    )


@pytest.mark.parametrize("status", sorted(TERMINAL))
def test_terminal_jobs_do_not_change(hand: Hand, status: JobStatus) -> None:
    job_id = hand.job(status)
    for change in (
        "outcome_ref = 'other'",
        "result = '1'",
        "error = '{}'",
        "finished_at = now()",
        "fence = fence + 1",
        "attempts = attempts + 1",
        "reason = 'other'",
    ):
        with refused_with(TERMINAL_ROW):
            hand.sql(f"UPDATE job SET {change} WHERE id = %s", job_id)
    # Telling Celery is not a change of the job.
    hand.sql("UPDATE job SET settled_at = now(), next_publish_at = NULL WHERE id = %s", job_id)


def test_only_an_operator_retries_and_says_why(hand: Hand) -> None:
    for status in (J.FAILED, J.CANCELLED):
        job_id = hand.job(status)
        for actor in ("", ", actor = 'w@host/1/2'"):
            with refused_with(ILLEGAL):
                hand.move(job_id, J.QUEUED, actor)
        with refused_with(ILLEGAL):
            hand.sql("UPDATE job SET status = 'queued', reason = NULL, actor = 'operator:ann' WHERE id = %s", job_id)
        hand.move(job_id, J.QUEUED, ", actor = 'operator:ann'")
        assert hand.log(job_id)[-1] == (str(status), "queued", 0, "operator:ann", "why")
        assert hand.sql("SELECT finished_at FROM jobs WHERE id = %s", job_id) == [{"finished_at": None}]


@pytest.mark.parametrize("status", [Op.OUTCOME_CONFIRMED, Op.REFUSED])
def test_recorded_outcomes_do_not_change(hand: Hand, status: OperationStatus) -> None:
    key = hand.operation(status)
    for change in ("provider_ref = 'other'", "result = '1'", 'error = \'{"text": "other"}\''):
        with refused_with(TERMINAL_ROW):
            hand.sql(f"UPDATE operation SET {change} WHERE key = %s", key)


def test_a_confirmed_operation_has_a_reference(hand: Hand) -> None:
    for ref in ("", ", provider_ref = ''"):
        key = hand.operation()
        with refused_with(CHECKED):
            hand.sql(f"UPDATE operation SET status = 'outcome_confirmed'{ref} WHERE key = %s", key)


# -- the resend rule ---------------------------------------------------------------------------------------------------

RETAINED = {"idempotent_for": "'1 hour'::interval"}
OVER = {"deadline": "'1 second'::interval", "deadline_at": "now() - interval '1 second'"}
AHEAD = {"deadline": "'1 minute'::interval", "deadline_at": "now() + interval '1 minute'"}


@pytest.mark.parametrize(
    ("columns", "allowed"),
    [
        pytest.param({}, False, id="no key, no policy"),
        pytest.param(OVER | {"gone_at": "now()"}, False, id="no key, the sender is gone"),
        pytest.param(RETAINED | OVER, True, id="key retained, deadline over"),
        pytest.param(RETAINED | {"gone_at": "now()"}, True, id="key retained, sender gone"),
        pytest.param(RETAINED, False, id="key retained, still in flight for ever"),
        pytest.param(RETAINED | AHEAD, False, id="key retained, still in flight"),
        pytest.param(RETAINED | OVER | {"has_lookup": "true"}, False, id="lookup not asked"),
        pytest.param(RETAINED | OVER | {"has_lookup": "true", "absent_at": "now()"}, True, id="lookup found nothing"),
        pytest.param(
            OVER | {"idempotent_for": "'1 minute'::interval", "first_intent_at": "now() - interval '61 seconds'"},
            False,
            id="key forgotten",
        ),
        pytest.param(
            OVER
            | {
                "idempotent_for": "'1 minute'::interval",
                "deadline": "'30 seconds'::interval",
                "first_intent_at": "now() - interval '40 seconds'",
            },
            False,
            id="key forgotten before the deadline of the resend",
        ),
        pytest.param({"if_unknown": "'send_again'"}, False, id="policy, but not yet due"),
        pytest.param({"if_unknown": "'send_again'", "policy_at": "now()"}, True, id="policy in force"),
        pytest.param({"if_unknown": "'park'", "policy_at": "now()"}, False, id="another policy"),
    ],
)
def test_nothing_is_sent_again_outside_the_rule(hand: Hand, columns: dict[str, str], allowed: bool) -> None:
    key = hand.operation(Op.UNKNOWN, **columns)
    job_id = key.rpartition(":")[0]
    hand.move(job_id, J.UNKNOWN)
    if not allowed:
        # Neither does its job go back to the queue, nor is the intent recorded on the way of a job that runs.
        with refused_with(ILLEGAL):
            hand.move(job_id, J.QUEUED)
        running = hand.operation(Op.UNKNOWN, **columns)
        with refused_with(ILLEGAL):
            hand.resolve(running, Op.INTENT_RECORDED)
        return
    hand.move(job_id, J.QUEUED)
    hand.move(job_id, J.RUNNING)
    for stale in ("attempt = attempt + 1", "nonce = gen_random_uuid()"):
        with refused_with(FENCED):
            hand.sql(f"UPDATE operation SET status = 'intent_recorded', {stale} WHERE key = %s", key)
    hand.resolve(key, Op.INTENT_RECORDED)


# -- counters and consequences -----------------------------------------------------------------------------------------


def test_the_last_answer_moves_the_job_on(hand: Hand) -> None:
    job_id = hand.job(J.RUNNING)
    keys = [hand.operation(job_id=job_id) for _ in range(3)]
    hand.move(job_id, J.UNKNOWN)
    for key, answer in zip(keys, (Op.OUTCOME_CONFIRMED, Op.REFUSED, Op.NOT_HAPPENED), strict=True):
        assert hand.status(job_id) == J.UNKNOWN
        hand.resolve(key, answer)
    assert hand.status(job_id) == J.QUEUED
    assert hand.log(job_id)[-1] == ("unknown", "queued", 2, hand.user, f"resolved:{keys[-1]}")


def test_two_answers_at_one_moment_are_both_counted(hand: Hand, guarded: str) -> None:
    job_id = hand.job(J.RUNNING)
    keys = [hand.operation(job_id=job_id) for _ in range(2)]
    hand.move(job_id, J.UNKNOWN)
    answer = "UPDATE safe_effects.operation SET status = 'outcome_confirmed', provider_ref = 'ref' WHERE key = %s"
    with psycopg.connect(guarded) as one, psycopg.connect(guarded) as other:
        one.execute(answer, (keys[0],))
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(other.execute, answer, (keys[1],))
            eventually(lambda: _waits(hand.sql, other.info.backend_pid), 5, message="the second one waits")
            one.commit()
            second.result(10)
        other.commit()
    assert hand.sql("SELECT status, open_ops, unknown_ops FROM job WHERE id = %s", job_id) == [
        {"status": "queued", "open_ops": 0, "unknown_ops": 0}
    ]


def _waits(sql: Sql, pid: int) -> bool:
    return bool(sql("SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'", pid))


# -- log and views -----------------------------------------------------------------------------------------------------


def test_the_log_is_append_only(hand: Hand) -> None:
    job_id = hand.job(J.SUCCEEDED)
    before = hand.log(job_id)
    for statement in (
        "UPDATE transition SET actor = 'nobody'",
        "DELETE FROM transition",
        "TRUNCATE transition",
        "UPDATE transitions SET actor = 'nobody'",
        "DELETE FROM transitions",
    ):
        with refused_with(READ_ONLY):
            hand.sql(statement)
    assert hand.log(job_id) == before
    # Pruning is the exception: the log of a job that is no more may go.
    hand.sql("DELETE FROM job WHERE id = %s", job_id)
    hand.sql("DELETE FROM transition WHERE job_id = %s", job_id)
    assert hand.log(job_id) == []


@pytest.mark.parametrize("status", J)
def test_only_finished_jobs_are_deleted(hand: Hand, status: JobStatus) -> None:
    job_id = hand.job(status)
    if status in TERMINAL:
        hand.sql("DELETE FROM job WHERE id = %s", job_id)
        return
    with refused_with(ILLEGAL):
        hand.sql("DELETE FROM job WHERE id = %s", job_id)


@pytest.mark.parametrize("status", Op)
def test_no_operation_of_a_job_that_lives_is_deleted(hand: Hand, status: OperationStatus) -> None:
    # Without its row the same key would be sent once more.
    key = hand.operation(status)
    with pytest.raises(psycopg.Error):
        hand.sql("DELETE FROM operation WHERE key = %s", key)


def test_the_views_are_read_only(hand: Hand) -> None:
    key = hand.operation()
    job_id = key.rpartition(":")[0]
    for statement in (
        "UPDATE jobs SET status = 'queued'",
        "DELETE FROM jobs",
        "INSERT INTO jobs (id, task, status) VALUES ('x', 't', 'queued')",
        "UPDATE operations SET status = 'outcome_confirmed', provider_ref = 'ref'",
        "DELETE FROM operations",
        "INSERT INTO operations (key, job_id) VALUES ('x', 'x')",
        "INSERT INTO transitions (job_id, to_status) VALUES ('x', 'queued')",
    ):
        with refused_with(READ_ONLY):
            hand.sql(statement)
    assert hand.status(job_id) == J.RUNNING


def test_the_views_have_the_columns_of_the_contract(hand: Hand) -> None:
    columns = {
        "jobs": "id task status reason tenant pool queue idempotency_key parent_id attempts fence lease_owner"
        " lease_until cancel_requested_at eta expires_at outcome_ref result last_error created_at started_at"
        " finished_at settled_at",
        "operations": "key job_id step effect status attempt fence args provider_ref result error first_intent_at"
        " intent_at deadline_at resolved_at resolved_by evidence reconcile_attempts next_reconcile_at",
        "transitions": "id at job_id operation_key from_status to_status fence actor reason",
    }
    for view, expected in columns.items():
        rows = hand.sql(
            "SELECT column_name FROM information_schema.columns"
            " WHERE table_schema = 'safe_effects' AND table_name = %s ORDER BY ordinal_position",
            view,
        )
        assert [row["column_name"] for row in rows] == expected.split()


# -- migrations --------------------------------------------------------------------------------------------------------


@pytest.fixture
def versions(empty_database_url: str) -> Iterator[psycopg.Connection[tuple[int]]]:
    """A connection to a database without our schema."""
    with psycopg.connect(empty_database_url.replace("+psycopg", "", 1), autocommit=True) as connection:
        yield connection


def test_eight_migrations_at_once_are_one(empty_database_url: str, versions: psycopg.Connection[tuple[int]]) -> None:
    start = threading.Barrier(8)

    def upgrade(_: int) -> list[int]:
        start.wait(10)
        return migrate.upgrade(empty_database_url)

    with ThreadPoolExecutor(8) as pool:
        applied = list(pool.map(upgrade, range(8)))
    everything = [migration.version for migration in migrate.migrations()]
    assert sorted(applied) == [[]] * 7 + [everything]
    assert migrate.upgrade(empty_database_url) == []
    rows = versions.execute("SELECT version FROM safe_effects.schema_version ORDER BY version").fetchall()
    assert [row[0] for row in rows] == everything


def test_two_schemas_in_one_database_do_not_meet(
    empty_database_url: str, versions: psycopg.Connection[tuple[int]]
) -> None:
    assert migrate.upgrade(empty_database_url)
    assert migrate.upgrade(empty_database_url, "other")
    insert = "INSERT INTO {}.job (id, task, args_digest, envelope) VALUES ('one', 't', 'd', '')"
    versions.execute(insert.format("other").encode())
    for schema, rows in (("other", 1), ("safe_effects", 0)):
        found = versions.execute(f"SELECT count(*) FROM {schema}.transitions".encode()).fetchone()
        assert found == (rows,)


def test_another_schema_version_is_refused_with_the_command_to_run(
    empty_database_url: str, versions: psycopg.Connection[tuple[int]]
) -> None:
    store = Store(from_conf({"safe_effects_database_url": empty_database_url}))
    command = "`celery -A yourproject safe-effects upgrade`"
    try:
        with pytest.raises(SchemaMismatch, match=r"'safe_effects' is missing") as missing:
            store.check_schema()
        assert command in str(missing.value)

        migrate.upgrade(empty_database_url)
        store.check_schema()

        versions.execute("UPDATE safe_effects.schema_version SET version = version - 1")
        with pytest.raises(SchemaMismatch, match="older") as older:
            store.check_schema()
        assert command in str(older.value)

        versions.execute("UPDATE safe_effects.schema_version SET version = version + 100")
        store.check_schema()  # made for the older code, too
        assert migrate.upgrade(empty_database_url) == []

        versions.execute("UPDATE safe_effects.schema_version SET oldest_code = oldest_code + 100")
        with pytest.raises(SchemaMismatch, match="newer") as newer:
            store.check_schema()
        assert "upgrade the package celery-safe-effects" in str(newer.value)
        with pytest.raises(SchemaMismatch, match="upgrade celery-safe-effects"):
            migrate.upgrade(empty_database_url)
    finally:
        store.connections.close()
