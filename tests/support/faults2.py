"""Tasks that stop at a chosen place, for the tests that kill, pause and cut there.

A gate is a pair of rows in the provider's ledger: the worker writes that it has reached it and waits until the
test has opened it. The helpers below filter both kinds out of the ledger.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from celery import Celery

from celery_safe_effects import (
    EffectRefused,
    Happened,
    NotHappened,
    Operation,
    Outcome,
    SafeTask,
    effect,
)
from celery_safe_effects.testing import eventually
from example_project.provider_client import Declined, Provider, Row
from tests.support.services import Sql
from tests.support.tasks import DEADLINE, IDEMPOTENT_FOR, LOOKUP_LAG, charge, provider

KILL_VARIABLE = "SAFE_EFFECTS_TEST_KILL_AT_DEADLINE"
KILL = os.environ.get(KILL_VARIABLE, "1") == "1"
REACHED, OPEN = "gate_reached", "gate_open"


# -- what the tests use ------------------------------------------------------------------------------------------------


def ledger(at: Provider) -> list[Row]:
    """What really happened, gates left out."""
    return [row for row in at.ledger() if row["kind"] not in {REACHED, OPEN}]


def reached(at: Provider, name: str, times: int = 1) -> None:
    """Wait until a worker has come to a gate."""
    eventually(lambda: at.received(REACHED, name) >= times, 30, message=f"a worker reached {name}")


def open_gate(at: Provider, name: str) -> None:
    """Let everybody pass a gate, from now on."""
    at.call(OPEN, name)


def job_row(sql: Sql, job_id: str) -> dict[str, Any]:
    """The job, as the view shows it."""
    (row,) = sql("SELECT * FROM jobs WHERE id = %s", job_id)
    return row


def operation_row(sql: Sql, key: str) -> dict[str, Any]:
    """The operation, as the view shows it."""
    (row,) = sql("SELECT * FROM operations WHERE key = %s", key)
    return row


def becomes(sql: Sql, job_id: str, status: str, timeout: float = 30) -> dict[str, Any]:
    """Wait for a job's status; returns the job."""

    def row() -> dict[str, Any]:
        assert sql("SELECT 1 FROM jobs WHERE id = %s", job_id), "no such row yet"
        found = job_row(sql, job_id)
        assert found["status"] == status, (found["status"], found["reason"], found["last_error"])
        return found

    return eventually(row, timeout, message=f"job {job_id} is {status}")


def log(sql: Sql, job_id: str, key: str | None = None) -> list[str]:
    """The statuses that a job, or one of its operations, went through."""
    rows = sql(
        "SELECT to_status FROM transitions WHERE job_id = %s AND operation_key IS NOT DISTINCT FROM %s ORDER BY id",
        job_id,
        key,
    )
    return [row["to_status"] for row in rows]


def counted(sql: Sql, name: str, label: str | None = None) -> int:
    """A counter of the database."""
    rows = sql(
        "SELECT coalesce(sum(value), 0)::int AS n FROM counter WHERE name = %s AND (%s::text IS NULL OR label = %s)",
        name,
        label,
        label,
    )
    return int(rows[0]["n"])


# -- what the workers run ----------------------------------------------------------------------------------------------


def gate(name: str) -> None:
    """Say that we are here, and wait for the test."""
    at = provider()
    at.call(REACHED, name)
    limit = time.monotonic() + 60
    while not at.ledger(name, OPEN):
        if time.monotonic() > limit:
            raise TimeoutError(f"nobody opened {name}")
        time.sleep(0.05)


def _send(kind: str, op: Operation, **payload: Any) -> Outcome[Row]:
    # A time-out of its own: like most clients it does not care how late it is.
    row = provider().call(kind, op.key, {**payload, "attempt": op.attempt}, timeout=10)
    return Outcome(row["ref"], {"kind": kind})


def _find(kind: str, op: Operation) -> Happened | NotHappened:
    row = provider().lookup(op.key, kind, timeout=5)
    return NotHappened() if row is None else Happened(row["ref"], {"kind": kind})


@effect(name="late_charge", deadline=DEADLINE, lookup_lag=LOOKUP_LAG, kill_at_deadline=KILL)
def late_charge(op: Operation, name: str) -> Outcome[Row]:
    """Stops inside the call, before the request goes out; the provider knows no keys."""
    if op.attempt == 1:
        gate(name)
    return _send("late_charge", op)


@late_charge.lookup
def find_late_charge(op: Operation) -> Happened | NotHappened:
    return _find("late_charge", op)


@effect(name="late_charge_both", idempotent_for=IDEMPOTENT_FOR, deadline=DEADLINE, kill_at_deadline=KILL)
def late_charge_both(op: Operation, name: str) -> Outcome[Row]:
    """The same with a provider that knows keys."""
    if op.attempt == 1:
        gate(name)
    return _send("late_charge_both", op)


@late_charge_both.lookup
def find_late_charge_both(op: Operation) -> Happened | NotHappened:
    return _find("late_charge_both", op)


@effect(name="primary", deadline=DEADLINE, not_happened_on=(ConnectionRefusedError,))
def primary(op: Operation, url: str) -> Outcome[Row]:
    """The first choice, at an address of its own."""
    row = Provider(url).call("primary", op.key, timeout=op.remaining())
    return Outcome(row["ref"], {"kind": "primary"})


@effect(name="fallback", deadline=DEADLINE)
def fallback(op: Operation, why: str) -> Outcome[Row]:
    """What is done instead."""
    return _send("fallback", op, why=why)


class Awkward(Exception):
    """Its arguments are no JSON, as those of many HTTP clients' exceptions."""


class Picky(Exception):
    """Cannot be made from its args, as the exceptions of many providers' libraries."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code


@effect(name="saying_no", deadline=DEADLINE, refused_on=(Declined, Awkward, Picky))
def saying_no(op: Operation, how: str) -> Outcome[Row]:
    """The provider declines, and the client says so in its way."""
    try:
        return _send("saying_no", op)
    except Declined as declined:
        if how == "awkward":
            raise Awkward(declined) from None
        if how == "picky":
            raise Picky(402, detail="declined") from None
        raise


@effect(name="not_reaching", deadline=DEADLINE, not_happened_on=(Awkward, Picky))
def not_reaching(op: Operation, how: str) -> Outcome[Row]:
    """The provider is provably not reached, and the client says so in its way."""
    try:
        return _send("not_reaching", op)
    except Declined as declined:
        if how == "awkward":
            raise Awkward(declined) from None
        raise Picky(402, detail="declined") from None


_LATER = """
import sys, time
kind, key, url, gate, paths = sys.argv[1:]
sys.path[:0] = paths.split(":")
from example_project.provider_client import Provider
while not Provider(url).ledger(key, gate):
    time.sleep(0.1)
Provider(url).call(kind, key)
"""


def _by_another_process(kind: str, op: Operation) -> Outcome[Row]:
    # As a daemon: it belongs to nobody, survives whatever happens to the worker, and sends when the test lets it.
    command = [sys.executable, "-c", _LATER, kind, op.key, provider().url, OPEN, ":".join(sys.path)]
    subprocess.run(
        ["sh", "-c", 'setsid "$@" </dev/null >/dev/null 2>&1 &', "sh", *command], check=True, start_new_session=True
    )
    gate(op.key)
    return Outcome(op.key)


@effect(name="detached", deadline=DEADLINE, lookup_lag=LOOKUP_LAG, detached=True)
def detached(op: Operation) -> Outcome[Row]:
    """Lets another process do it, and says so."""
    return _by_another_process("detached", op)


@detached.lookup
def find_detached(op: Operation) -> Happened | NotHappened:
    return _find("detached", op)


def add_tasks(app: Celery) -> None:
    """Add the tasks of this module to the test application."""

    def task(name: str, effects: list[Any]) -> Any:
        return app.task(base=SafeTask, bind=True, shared=False, name=f"tests.{name}", effects=effects)

    for one in (late_charge, late_charge_both):
        _add_late(task, one)

    @task("two_steps", [charge])
    def two_steps(self: Any, name: str) -> Any:
        """A gate between two effects."""
        charge("first", 1)
        gate(name)
        return charge("second", 2).ref

    @task("gated_charge", [charge])
    def gated_charge(self: Any, name: str) -> Any:
        """A gate before an effect."""
        gate(name)
        return charge("gated", 1).ref

    @task("with_fallback", [primary, fallback])
    def with_fallback(self: Any, url: str, name: str, fails: bool = False) -> Any:
        """The first choice, else the second; then a gate, or a bug."""
        try:
            done = primary(url)
        except ConnectionRefusedError:
            done = fallback("refused connection")
        if fails and self.job.fence == 1:
            raise ValueError("a bug after both effects")
        gate(name)
        return done.ref

    @task("fallback", [fallback])
    def by_a_child(self: Any, why: str) -> Any:
        """The second choice, as a job of its own."""
        return fallback(why).ref

    @task("with_child", [primary])
    def with_child(self: Any, url: str, name: str) -> Any:
        """The first choice, else a job that does it; then a gate."""
        try:
            done = primary(url).ref
        except ConnectionRefusedError:
            done = by_a_child.delay("refused connection").id
        gate(name)
        return done

    @task("branches", [saying_no, not_reaching, fallback])
    def branches(self: Any, which: str, how: str, name: str) -> Any:
        """Takes the branch that the exception's class shows."""
        causes: dict[str, type[Exception]] = {"declined": Declined, "awkward": Awkward, "picky": Picky}
        try:
            branch = saying_no(how).ref if which == "refused" else not_reaching(how).ref
        except EffectRefused as refused:
            same = isinstance(refused.__cause__, causes[how])
            branch = fallback("refused" if same else f"refused by {refused.__cause__!r}").ref
        except causes[how]:
            branch = fallback("not reached").ref
        gate(name)
        return branch

    @task("detached", [detached])
    def by_another(self: Any) -> Any:
        """An effect that another process has."""
        return detached().ref

    @task("backend", [])
    def backend(self: Any) -> list[int]:
        """Our process id and that of our server process."""
        with self.safe_effects.store.connections.connection() as connection:
            row = connection.execute("SELECT pg_backend_pid()").fetchone()
        return [os.getpid(), row[0]]


def _add_late(task: Any, one: Any) -> None:
    @task(one.name, [one])
    def late(self: Any, name: str) -> Any:
        """One effect, with a gate inside."""
        return one(name).ref
