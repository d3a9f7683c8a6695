"""Effects, bodies and lookups that return what they must not."""

from __future__ import annotations

import time
from typing import Any

from celery import Celery

from celery_safe_effects import Happened, Operation, Outcome, SafeTask, effect
from tests.support import tasks

RETURNED: dict[str, Any] = {
    "object": Outcome("ref", object()),
    "nan": Outcome("ref", float("nan")),
    "empty_ref": Outcome("", 1),
    "ref_type": Outcome(5, 1),  # type: ignore[arg-type]
}


@effect(name="returns", deadline=tasks.DEADLINE)
def returns(op: Operation, what: str) -> Any:
    """Happens, then returns nonsense."""
    tasks._call("returns", op, {"what": what})
    return RETURNED[what]


@effect(name="bad_lookup", deadline=tasks.DEADLINE, lookup_timeout=0.5)
def bad_lookup(op: Operation, how: str) -> Outcome[Any]:
    """Its lookup is broken in the way given."""
    return tasks._call("bad_lookup", op, {"how": how})


@bad_lookup.lookup
def find(op: Operation) -> Any:
    """Broken."""
    how = op.arguments["how"]
    if how == "raises":
        raise RuntimeError("the lookup is broken")
    if how == "hangs":
        time.sleep(3600)
    return {"nonsense": "yes", "bad_ref": Happened("")}.get(how)


def add_tasks(app: Celery) -> None:
    """Add the tasks, named `tests.<name>`."""

    @app.task(base=SafeTask, shared=False, name="tests.returns", effects=[returns])
    def returning(what: str) -> Any:
        return returns(what).ref

    @app.task(base=SafeTask, shared=False, name="tests.body_returns_no_json", effects=[tasks.charge])
    def body_returns_no_json() -> Any:
        tasks.charge("c", 1)
        return object()

    @app.task(base=SafeTask, shared=False, name="tests.bad_lookup", effects=[bad_lookup])
    def badly_looked_up(how: str) -> Any:
        return bad_lookup(how).ref
