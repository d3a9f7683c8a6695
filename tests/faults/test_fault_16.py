"""Faults 16 and 17: a worker stands still past its lease, between two effects or inside one, and then goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery

from celery_safe_effects import NotHappened
from celery_safe_effects.config import from_conf
from celery_safe_effects.store import statements
from celery_safe_effects.store.hot import Store
from celery_safe_effects.testing import eventually
from example_project.provider_client import Provider
from tests.support.faults2 import (
    KILL_VARIABLE,
    becomes,
    counted,
    job_row,
    ledger,
    log,
    open_gate,
    operation_row,
    reached,
)
from tests.support.processes import ROOT, Workers
from tests.support.services import Sql

pytestmark = pytest.mark.faults

TTL = 2
MODES = [
    pytest.param("redis", False, id="redis-early"),
    pytest.param("rabbitmq", True, id="rabbitmq-late", marks=pytest.mark.rabbitmq),
]


@pytest.fixture
def app_conf(app_conf: dict[str, Any]) -> dict[str, Any]:
    quick = {"safe_effects_sweep_interval": 0.3, "safe_effects_reconcile_interval": 0.3}
    return {**app_conf, "safe_effects_lease_ttl": TTL, "safe_effects_republish_after": 2, **quick}


@pytest.mark.parametrize(("broker", "acks_late"), MODES, indirect=["broker"])
@pytest.mark.usefixtures("broker")
def test_fault_16_a_paused_worker_starts_no_further_effect(
    app: Celery, workers: Workers, provider: Provider, sql: Sql, acks_late: bool
) -> None:
    first = workers("a", acks_late=acks_late)
    job_id = app.tasks["tests.two_steps"].delay("gate").id
    reached(provider, "gate")
    first.pause()
    open_gate(provider, "gate")
    workers("b", acks_late=acks_late)
    job = becomes(sql, job_id, "succeeded")
    assert (job["attempts"], job["fence"]) == (2, 2)

    def everything() -> list[Any]:
        tables = ("jobs", "operations", "transitions")
        return [sql(f"SELECT * FROM {table} ORDER BY 1") for table in tables]

    eventually(lambda: job_row(sql, job_id)["settled_at"], 10, message="Celery was told")
    before = everything()
    first.resume()
    eventually(lambda: counted(sql, "leases_lost"), 10, message="the paused worker noticed")
    eventually(lambda: "is no longer ours" in first.log(), 10, message="the paused worker stopped")
    assert everything() == before
    rows = ledger(provider)
    assert [row["key"] for row in rows] == [f"{job_id}:1", f"{job_id}:2"]
    assert provider.received("charge") == 2
    assert job["outcome_ref"] == rows[1]["ref"]
    assert log(sql, job_id) == ["queued", "leased", "running", "queued", "leased", "running", "succeeded"]
    assert app.AsyncResult(job_id).get(timeout=5) == rows[1]["ref"]


# -- the statements themselves, which no pause of a process reaches one by one -----------------------------------------


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    made = Store(from_conf({"safe_effects_database_url": database_url, "safe_effects_lease_ttl": 30}))
    yield made
    made.connections.close()


def claim(store: Store, job_id: str, owner: str) -> dict[str, Any]:
    token = uuid4()
    mark = {"generation": 0, "digest": None, "task": None, "seq": None, "tenant": None}
    (row,) = store.rows("CLAIM", id=job_id, token=token, owner=owner, ttl=30.0, limits=None, **mark)
    assert row.status == "running"
    assert row.lease_token == token
    return {"job": job_id, "token": token, "fence": row.fence, "owner": owner}


def intent(step: str, **changes: Any) -> dict[str, Any]:
    return {
        "key": f"job:{step}",
        "step": step,
        "ordinal": int(step),
        "effect": "e",
        "keyed": False,
        "repeatable": False,
        "args": "{}",
        "args_digest": "d",
        "whole_body": False,
        "deadline": 30.0,
        "lag": 0.0,
        "idempotent_for": None,
        "has_lookup": True,
        "if_unknown": "park",
        "detached": False,
        "deadline_kills": True,
        "deadline_is_proof": False,
        "trace": None,
        "process": "",
        **changes,
    }


def end(lease: dict[str, Any], wish: str) -> dict[str, Any]:
    """The parameters of LEAVE, most of which are left empty."""
    return {
        **dict.fromkeys(re.findall(r"%\((\w+)\)s", statements.LEAVE)),
        "id": lease["job"],
        "token": lease["token"],
        "fence": lease["fence"],
        "actor": lease["owner"],
        "wish": wish,
        "reason": "stale",
        "ref": "stale",
        "result": '"stale"',
        "delay": 0.0,
        "refund": 0,
        "patience": 1.0,
    }


def stale_writes(store: Store, lease: dict[str, Any], nonce: Any) -> dict[str, list[Any]]:
    """Every write of a worker, with one lease; what each of them returned, empty ones left out."""
    renewal = {"ids": [lease["job"]], "tokens": [lease["token"]], "fences": [lease["fence"]], "ttls": [30.0]}
    pending = {"pending": "queued", "reason": "stale", "error": "{}", "delay": 0.0}
    guard = {"id": lease["job"], "token": lease["token"], "fence": lease["fence"]}
    tried = {
        "RENEW": store.rows("RENEW", **renewal),
        "CHECKPOINT": store.rows("CHECKPOINT", ttl=30.0, **lease),
        "INTENT": [
            row
            for name in ("INTENT", "INTENT_REPEATABLE")
            for row in store.rows(name, nonce=uuid4(), **lease, **intent("2", repeatable=name != "INTENT"))
            if row.held or row.nonce
        ],
        "OUTCOME": [
            row
            for status in ("outcome_confirmed", "unknown", "not_happened", "refused")
            for row in store.rows(
                "OUTCOME",
                key="job:1",
                nonce=nonce,
                status=status,
                ref="stale",
                result=None,
                error=None,
                evidence=None,
                reason=None,
                position=None,
                **lease,
            )
            if row.held or row.status
        ],
        "BODY_PENDING": store.rows(
            "BODY_PENDING",
            **{**dict.fromkeys(re.findall(r"%\((\w+)\)s", statements.BODY_PENDING)), **guard, **pending},
        ),
        "LEAVE": [
            row
            for wish in ("succeeded", "failed", "again", "queued", "unknown", "held", "cancelled")
            for row in store.rows("LEAVE", **end(lease, wish))
        ],
    }
    return {name: rows for name, rows in tried.items() if rows}


def test_fault_16_a_stale_lease_touches_no_row(store: Store, sql: Sql) -> None:
    sql("INSERT INTO job (id, task, args_digest, envelope) VALUES ('job', 't', 'd', '')")
    first, first_nonce = claim(store, "job", "a"), uuid4()
    store.rows("INTENT", nonce=first_nonce, **first, **intent("1"))
    sql("UPDATE job SET lease_until = now() - interval '1 second'")

    def everything() -> list[Any]:
        return [sql(f"SELECT * FROM {table} ORDER BY 1") for table in ("job", "operation", "transition")]

    # Run out, though not yet swept: the job may still be ended, but nothing may begin and nothing is prolonged.
    before = everything()
    renewal = {"ids": ["job"], "tokens": [first["token"]], "fences": [1], "ttls": [30.0]}
    assert store.rows("RENEW", **renewal) == []
    assert store.rows("CHECKPOINT", ttl=30.0, **first) == []
    (row,) = store.rows("INTENT", nonce=uuid4(), **first, **intent("2"))
    assert (row.held, row.nonce) == (False, None)
    assert everything() == before

    sweep = {
        "limit": 10,
        "wish": "again",
        "reason": "lease_expired",
        "delay": 0.0,
        "max_delay": 0.0,
        "actor": "sweeper",
    }
    (swept,) = store.rows("SWEEP_LEASES", **sweep)
    assert swept.status == "unknown"
    verdict = {"key": "job:1", "attempt": 1, "fence": 1, "status": "not_happened", "ref": None, "result": None}
    verdict |= {"error": None, "evidence": None, "asked_at": None, "trusted": True, "actor": "operator:ann"}
    assert store.rows("VERDICT", job="job", reason="told", **verdict)
    second, second_nonce = claim(store, "job", "b"), uuid4()
    (row,) = store.rows("INTENT", nonce=second_nonce, **second, **intent("1"))
    assert row.attempt == 2

    before = everything()
    stale = [
        (first, first_nonce),
        # A lost claim's number can be issued again, and a token alone is not enough either.
        ({**first, "fence": second["fence"]}, first_nonce),
        ({**second, "fence": first["fence"], "owner": "a"}, first_nonce),
    ]
    for lease, nonce in stale:
        assert stale_writes(store, lease, nonce) == {}
        assert everything() == before
    # What the first call brings home late is evidence: written beside the record, and loud if it differs.
    (late,) = store.rows("LATE_OUTCOME", key="job:1", nonce=first_nonce, ref="late", fence=1, owner="a")
    assert not late.doubled
    assert operation_row(sql, "job:1")["status"] == "intent_recorded"
    (job,) = sql("SELECT status, fence, lease_owner FROM jobs")
    assert job == {"status": "running", "fence": 2, "lease_owner": "b"}
    # Without keys it now happened twice, and the second outcome says so.
    outcome = {"key": "job:1", "nonce": second_nonce, "status": "outcome_confirmed", "ref": "second"}
    (row,) = store.rows(
        "OUTCOME", **outcome, **dict.fromkeys(("result", "error", "evidence", "reason", "position")), **second
    )
    assert row.doubled


# -- 17 ----------------------------------------------------------------------------------------------------------------

INSIDE = [
    pytest.param("late_charge", False, "redis", False, id="lookup-alive"),
    pytest.param("late_charge", True, "redis", True, id="lookup-killed"),
    pytest.param("late_charge_both", False, "redis", True, id="key-alive"),
    pytest.param("late_charge_both", True, "rabbitmq", False, id="key-killed", marks=pytest.mark.rabbitmq),
]


@pytest.mark.parametrize(("effect", "killed", "broker", "acks_late"), INSIDE, indirect=["broker"])
@pytest.mark.usefixtures("broker")
def test_fault_17_a_worker_paused_inside_the_call(
    app: Celery,
    workers: Workers,
    provider: Provider,
    sql: Sql,
    effect: str,
    killed: bool,
    acks_late: bool,
) -> None:
    env = {KILL_VARIABLE: "1" if killed else "0", "SAFE_EFFECTS_TEST_DEADLINE": "2"}
    if effect == "late_charge":
        provider.control(kind=effect, dedupe=False)
    first = workers("a", acks_late=acks_late, env=env)
    job_id = app.tasks[f"tests.{effect}"].delay("gate").id
    key = f"{job_id}:1"
    reached(provider, "gate")
    (child, *_) = [pid for pid in first.pause() if pid != first.pid]
    open_gate(provider, "gate")
    workers("b", acks_late=acks_late, env=env)

    if effect == "late_charge" and not killed:
        # Absent, and late enough to be believed; but the one who was to send it may still do so, and does.
        becomes(sql, job_id, "unknown")
        asked = operation_row(sql, key)["deadline_at"]

        def believed() -> bool:
            row = operation_row(sql, key)
            return bool(row["evidence"] and row["evidence"]["lookup"] == "not_found" and row["reconcile_attempts"] >= 4)

        eventually(believed, 15, message="the provider was asked several times")
        (late_enough,) = sql("SELECT now() > %s AS yes", asked)
        assert late_enough["yes"]
        assert job_row(sql, job_id)["status"] == "unknown"
        assert provider.received(effect) == 0
        first.resume()
        job = becomes(sql, job_id, "succeeded")
        assert log(sql, job_id, key) == ["intent_recorded", "unknown", "outcome_confirmed"]
        sent = 1
    else:
        job = becomes(sql, job_id, "succeeded")
        assert operation_row(sql, key)["attempt"] == 2
        first.resume()
        sent = 1 if killed else 2
        if killed:
            eventually(lambda: child not in first.children(), 10, message="the timer ended the child")
        else:
            eventually(lambda: provider.received(effect) == 2, 10, message="the paused one went on")
            eventually(lambda: "is no longer ours" in first.log(), 10, message="and found out")
        again = ["intent_recorded", "unknown", "intent_recorded", "outcome_confirmed"]
        # The kernel ended the sender: what the provider did not see by then never happened.
        proven = [*again[:2], "not_happened", *again[2:]]
        ways = [proven] if effect == "late_charge" else [again]
        if killed and effect != "late_charge":
            ways.append(proven)  # unless it was asked before anybody saw that; then the same key is sent again
        assert log(sql, job_id, key) in ways

    (row,) = ledger(provider)
    assert row["key"] == key
    assert provider.received(effect) == sent
    assert job["outcome_ref"] == row["ref"]
    assert job_row(sql, job_id)["status"] == "succeeded"
    assert counted(sql, "double_effects") == 0
    assert sql("SELECT 1 FROM operation WHERE double_at IS NOT NULL") == []


@pytest.mark.skipif(sys.platform != "linux", reason="such timers exist on Linux only")
@pytest.mark.parametrize(("outer", "inner", "stops"), [(0.5, 30, "inside"), (30, 0.5, "inside"), (0.5, 30, "after")])
def test_fault_17_the_timer_survives_a_call_inside_the_call(outer: float, inner: float, stops: str) -> None:
    script = (
        "import os, signal\n"
        "from celery_safe_effects.engine.deadline import killed_after\n"
        f"with killed_after({outer}):\n"
        f"    with killed_after({inner}):\n"
        f"        if {stops == 'inside'}: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "print('went on')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, timeout=20, capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, ""), done.stderr


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.usefixtures("broker")
def test_fault_17_a_double_effect_is_said_loudly(app: Celery, workers: Workers, provider: Provider, sql: Sql) -> None:
    # An operator is wrong: it is under way, and happens after the second one.
    env = {KILL_VARIABLE: "0", "SAFE_EFFECTS_TEST_DEADLINE": "1"}
    provider.control(kind="late_charge", dedupe=False)
    first = workers("a", env=env)
    job_id = app.tasks["tests.late_charge"].delay("gate").id
    key = f"{job_id}:1"
    reached(provider, "gate")
    first.pause()
    workers("b", env=env)
    becomes(sql, job_id, "unknown")
    app.safe_effects.resolve(key, NotHappened(), "ann", "cannot find it")
    job = becomes(sql, job_id, "succeeded")
    (second,) = ledger(provider)
    open_gate(provider, "gate")
    first.resume()
    eventually(lambda: counted(sql, "double_effects") == 1, 10, message="it is counted")
    eventually(lambda: "double effect" in first.log(), 5, message="and logged")
    assert [row["key"] for row in ledger(provider)] == [key, key]
    (row,) = sql("SELECT provider_ref, late_outcomes, double_at FROM operation")
    assert row["provider_ref"] == job["outcome_ref"] == second["ref"]
    assert [late["ref"] for late in row["late_outcomes"]] == [ledger(provider)[1]["ref"]]
    assert row["double_at"] is not None
    assert becomes(sql, job_id, "succeeded")["outcome_ref"] == second["ref"]
