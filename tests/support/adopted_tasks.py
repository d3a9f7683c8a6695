"""What a test's workers know the tasks as: without one of them, or with one as a plain task.

A worker gets it by `imports=["tests.support.adopted_tasks"]` and the environment.
"""

from __future__ import annotations

import os
from typing import Any

from tests.support.tasks import provider

PLAIN_VARIABLE = "SAFE_EFFECTS_TEST_PLAIN"  # the names of tasks that are plain ones, with commas
ABSENT_VARIABLE = "SAFE_EFFECTS_TEST_ABSENT"  # the names of tasks that are not there, with commas


def _names(variable: str) -> list[str]:
    return [name for name in os.environ.get(variable, "").split(",") if name]


def change(app: Any) -> None:
    """Make the app what the environment says.

    Args:
        app: the application of the tests.
    """
    for name in _names(ABSENT_VARIABLE):
        app.tasks.unregister(name)
    for name in _names(PLAIN_VARIABLE):
        app.tasks.unregister(name)
        kind = name.rpartition(".")[2]

        @app.task(shared=False, name=name)
        def charge(customer: str, cents: int, kind: str = kind) -> Any:
            """What the task was before its adoption: no key, no record."""
            return provider().call(kind, None, {"customer": customer, "cents": cents, "plain": True})["ref"]


if _names(PLAIN_VARIABLE) or _names(ABSENT_VARIABLE):
    from tests.support.app import app as worker_app

    change(worker_app)
