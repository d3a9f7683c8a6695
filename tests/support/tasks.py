"""The application of the tests: effects of every kind, and a task for each.

`create_app` makes it anew for every test; the workers run the one in `tests.support.app`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from celery import Celery

from celery_safe_effects import (
    Happened,
    NotHappened,
    Operation,
    Outcome,
    SafeEffects,
    SafeTask,
    effect,
)
from example_project.provider_client import Declined, Provider, Row
from tests.support.names import PROVIDER_VARIABLE

# The effects' options, which a test sets through a worker's environment.
DEADLINE = float(os.environ.get("SAFE_EFFECTS_TEST_DEADLINE", "4"))
LOOKUP_LAG = float(os.environ.get("SAFE_EFFECTS_TEST_LOOKUP_LAG", "0"))
IDEMPOTENT_FOR = timedelta(seconds=float(os.environ.get("SAFE_EFFECTS_TEST_IDEMPOTENT_FOR", "3600")))


def provider() -> Provider:
    """The provider that the environment names."""
    return Provider(os.environ[PROVIDER_VARIABLE])


def _call(kind: str, op: Operation, payload: Row) -> Outcome[Row]:
    row = provider().call(kind, op.key, {**payload, "pid": os.getpid()}, timeout=op.remaining())
    return Outcome(ref=row["ref"], result={"kind": kind, **payload})


def _look_up(kind: str, op: Operation) -> Happened | NotHappened:
    row = provider().lookup(op.key, kind, timeout=5)
    if row is None:
        return NotHappened(evidence="the provider knows of no such key")
    body = {k: v for k, v in row["body"].items() if k not in {"key", "pid"}}
    return Happened(row["ref"], {"kind": kind, **body})


@effect(
    name="charge",
    deadline=DEADLINE,
    lookup_lag=LOOKUP_LAG,
    refused_on=(Declined,),
    not_happened_on=(ConnectionRefusedError,),
)
def charge(op: Operation, customer: str, cents: int) -> Outcome[Row]:
    """A provider with a look-up and without keys."""
    return _call("charge", op, {"customer": customer, "cents": cents})


@charge.lookup
def find_charge(op: Operation) -> Happened | NotHappened:
    return _look_up("charge", op)


@effect(
    name="charge_keyed",
    idempotent_for=IDEMPOTENT_FOR,
    deadline=DEADLINE,
    refused_on=(Declined,),
    not_happened_on=(ConnectionRefusedError,),
)
def charge_keyed(op: Operation, customer: str, cents: int) -> Outcome[Row]:
    """A provider with keys and without a look-up."""
    return _call("charge_keyed", op, {"customer": customer, "cents": cents})


@effect(
    name="charge_both",
    idempotent_for=IDEMPOTENT_FOR,
    deadline=DEADLINE,
    lookup_lag=LOOKUP_LAG,
    refused_on=(Declined,),
    not_happened_on=(ConnectionRefusedError,),
)
def charge_both(op: Operation, customer: str, cents: int) -> Outcome[Row]:
    """A provider with keys and a look-up."""
    return _call("charge_both", op, {"customer": customer, "cents": cents})


@charge_both.lookup
def find_charge_both(op: Operation) -> Happened | NotHappened:
    return _look_up("charge_both", op)


@effect(
    name="charge_plain",
    deadline=DEADLINE,
    refused_on=(Declined,),
    not_happened_on=(ConnectionRefusedError,),
)
def charge_plain(op: Operation, customer: str, cents: int) -> Outcome[Row]:
    """A provider with neither."""
    return _call("charge_plain", op, {"customer": customer, "cents": cents})


@effect(name="ask_model", repeatable=True)
def ask_model(op: Operation, prompt: str) -> Outcome[Row]:
    """A question that may be asked again; each asking is counted by the provider."""
    row = provider().call("ask_model", None, {"prompt": prompt})
    return Outcome(ref=row["ref"], result={"answer": f"{prompt}: asked as {row['ref']}"})


def _tool(name: str) -> Any:
    @effect(name=name, idempotent_for=IDEMPOTENT_FOR, deadline=DEADLINE, refused_on=(Declined,))
    def tool(op: Operation, argument: str) -> Outcome[Row]:
        return _call(name, op, {"argument": argument})

    @tool.lookup
    def find(op: Operation) -> Happened | NotHappened:
        return _look_up(name, op)

    return tool


refund, mail, deploy = _tool("refund"), _tool("mail"), _tool("deploy")


def create_app(conf: Mapping[str, Any]) -> Celery:
    """Make the application.

    Args:
        conf: Celery's settings and ours.

    Returns:
        The app; its tasks are named `tests.<name>`, its SafeEffects is `app.safe_effects`.
    """
    app = Celery("tests", set_as_current=False)
    app.conf.update(conf)
    app.safe_effects = SafeEffects(app)
    # shared=False: else every app made later gets these tasks too.
    for one in (charge, charge_keyed, charge_both, charge_plain):
        _charging_task(app, one)

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.agent", effects=[ask_model, refund, mail, deploy])
    def agent(self: Any, order: str) -> Any:
        """Ask, then three tools; any of them may be the place of a crash."""
        plan = ask_model(f"what to do about {order}").result["answer"]
        refund(order)
        mail(plan)
        return deploy(order).ref

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.whole_body")
    def whole_body(self: Any, customer: str, cents: int) -> Any:
        """No declared effects: the body is the effect."""
        key = self.job.operation.key
        return provider().call("whole_body", key, {"customer": customer, "cents": cents})["ref"]

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.pure", effects=[])
    def pure(self: Any, value: Any = None) -> Any:
        """Declared free of effects."""
        return value

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.sleep", effects=[])
    def sleep(self: Any, seconds: float) -> float:
        """Wait, giving way to other threads."""
        time.sleep(seconds)
        return seconds

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.burn", effects=[])
    def burn(self: Any, seconds: float) -> int:
        """Compute, giving way to other threads only where the interpreter makes it."""
        rounds, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            rounds += sum(range(1000)) > 0
        return rounds

    from tests.support import async_tasks, bad_tasks, fault_tasks, faults2, faults3, point_tasks, pool_tasks

    fault_tasks.add_tasks(app)
    bad_tasks.add_tasks(app)
    faults2.add_tasks(app)
    faults3.add_tasks(app)
    pool_tasks.add_tasks(app)
    async_tasks.add_tasks(app)
    point_tasks.add_tasks(app)

    @app.task(shared=False, name="tests.plain")
    def plain(value: Any = None) -> Any:
        """A task of Celery alone."""
        return value

    return app


def _charging_task(app: Celery, one: Any) -> None:
    @app.task(base=SafeTask, bind=True, shared=False, name=f"tests.{one.name}", effects=[one])
    def bill(self: Any, customer: str, cents: int) -> Any:
        """Charge once, and end with the provider's reference."""
        return one(customer, cents).ref
