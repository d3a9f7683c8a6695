"""Jobs that fail before they have begun: messages that cannot be read, or end whoever reads them.

A worker gets them by `imports=["tests.support.poison_tasks"]`, a producer by `add_tasks`.
"""

from __future__ import annotations

import importlib
import os
import signal
from typing import Any

from celery import Celery
from celery.signals import task_prerun

from celery_safe_effects import SafeTask
from tests.support.fault_tasks import entered, kill_own_process
from tests.support.names import CONF_VARIABLE


def _die() -> None:
    entered("unpickling")
    os.kill(os.getpid(), signal.SIGKILL)


def _fail() -> None:
    entered("unreadable")
    raise ValueError("this cannot be read")


class Fatal:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return _die, ()


class Unreadable:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return _fail, ()


def add_tasks(app: Celery) -> None:
    """Add the tasks, named `tests.<name>`."""

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.taking", effects=[])
    def taking(self: Any, value: Any = None) -> str:
        """Takes anything."""
        entered("taking")
        return repr(value)

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.dies_in_prerun", effects=[])
    def dies_in_prerun(self: Any) -> None:
        """Its process is ended by a receiver of Celery's signal, before it is called."""

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.imports", effects=[])
    def imports(self: Any, module: str) -> None:
        """Its body imports a module that may end the process."""
        importlib.import_module(module)

    class Starting(SafeTask):
        abstract = True

        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            entered("before_start")
            raise LookupError("not today")

    @app.task(base=Starting, bind=True, shared=False, name="tests.does_not_start", effects=[])
    def does_not_start(self: Any) -> None:
        """Its hook raises."""

    @app.task(base=Starting, bind=True, shared=False, name="tests.whole_does_not_start")
    def whole_does_not_start(self: Any) -> None:
        """The same, where the body is one effect."""


def _die_in_prerun(sender: Any = None, **_: Any) -> None:
    if sender.name == "tests.dies_in_prerun":
        entered("prerun")
        kill_own_process()


if CONF_VARIABLE in os.environ:
    from tests.support.app import app as worker_app

    add_tasks(worker_app)
    task_prerun.connect(_die_in_prerun, weak=False)
