"""Tasks for canvases: members that succeed or fail, bodies and errbacks that the provider counts.

A worker gets them by `imports=["tests.support.canvas_tasks"]`, a producer by `add_tasks`.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from celery import Celery, chain, chord, group

from celery_safe_effects import SafeTask
from tests.support import tasks
from tests.support.names import CONF_VARIABLE


class Bad(Exception):
    """What a member that fails raises."""


def _value(value: Any) -> Any:
    if value == "bad":
        raise Bad(value)
    return value


def counted(name: str, argument: Any) -> None:
    """Let the provider count a call of a plain task."""
    tasks.provider().call(name, None, {"argument": repr(argument)})


def add_tasks(app: Celery) -> None:
    """Add the tasks, named `tests.<name>`.

    Args:
        app: the application of the tests.
    """

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.part", effects=[])
    def part(self: Any, value: Any, more: Any = None) -> Any:
        """A member."""
        return _value(value) if more is None else [value, more]

    @app.task(shared=False, name="tests.plain_part")
    def plain_part(value: Any, more: Any = None) -> Any:
        """A member of Celery alone."""
        return _value(value) if more is None else [value, more]

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.collect", effects=[tasks.deploy])
    def collect(self: Any, values: Any = None, named: Any = None) -> Any:
        """A body with an effect."""
        tasks.deploy(repr([named, values]))
        return values

    @app.task(shared=False, name="tests.plain_collect")
    def plain_collect(values: Any = None, named: Any = None) -> Any:
        """A body of Celery alone."""
        counted("collected", [named, values])
        return values

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.oops", effects=[tasks.mail])
    def oops(self: Any, failed_id: str, named: Any = None) -> Any:
        """An errback that gets an id."""
        return tasks.mail(repr([named, failed_id])).ref

    @app.task(bind=True, shared=False, name="tests.plain_oops")
    def plain_oops(self: Any, failed_id: str, named: Any = None) -> None:
        """The same of Celery alone."""
        counted("explained", [named, failed_id])

    @app.task(base=SafeTask, shared=False, name="tests.explain", effects=[tasks.mail])
    def explain(request: Any, exc: Any, traceback: Any, named: Any = None) -> Any:
        """An errback that gets all that Celery knows."""
        return tasks.mail(repr([named, request.id, request.task, type(exc).__name__, str(exc), bool(traceback)])).ref

    @app.task(shared=False, name="tests.plain_explain")
    def plain_explain(request: Any, exc: Any, traceback: Any, named: Any = None) -> None:
        """The same of Celery alone."""
        counted("explained", [named, request.id, request.task, type(exc).__name__, str(exc)])

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.adds", effects=[tasks.refund])
    def adds(self: Any, value: Any, added: Any, dies: str = "") -> Any:
        """A member that adds another one to its chord, and may die once that is counted, or once it is sent."""
        first, backend = self.job.attempt == 1, self.app.backend
        count = backend.add_to_chord

        def count_then_die(*args: Any) -> None:
            count(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        if first and dies == "counted":
            backend.add_to_chord = count_then_die
        self.add_to_chord(self.app.tasks["tests.part"].s(added))
        if first and dies == "sent":
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.replaced", effects=[])
    def replaced(self: Any, by: str, value: Any) -> Any:
        """A member that something else takes the place of."""
        named = self.app.tasks
        safe, plain = named["tests.part"], named["tests.plain_part"]
        raise self.replace(
            {
                "task": safe.s(value),
                "plain": plain.s(value),
                "chain": chain(safe.s(value), plain.s("after")),
                "group": group(safe.s(value), plain.s("other")),
                "chord": chord([safe.s(value), plain.s("other")], safe.s()),
            }[by]
        )

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.nesting", effects=[])
    def nesting(self: Any, times: int) -> Any:
        """Replaces itself some times, and tells how often Celery says that it was."""
        if times:
            raise self.replace(self.app.tasks["tests.nesting"].s(times - 1))
        return self.request.replaced_task_nesting

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.stamps", effects=[])
    def stamps(self: Any, *before: Any) -> Any:
        """What its message is stamped with."""
        return {name: self.request.stamps.get(name) for name in self.request.stamped_headers or ()}

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.stamped_charge", effects=[tasks.charge_plain])
    def stamped_charge(self: Any, customer: str) -> Any:
        """The same, after an effect that may park it."""
        tasks.charge_plain(customer, 5)
        return {name: self.request.stamps.get(name) for name in self.request.stamped_headers or ()}

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.item", effects=[tasks.refund])
    def item(self: Any, name: str, number: int = 0) -> Any:
        """One of the items of a map."""
        tasks.refund(f"{name}:{number}")
        return number

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.family", effects=[])
    def family(self: Any, many: int) -> Any:
        """Sends children, and says whose child it is."""
        for number in range(many):
            self.app.tasks["tests.part"].delay(number)
        return [self.request.id, self.request.parent_id, self.request.root_id]


if CONF_VARIABLE in os.environ:
    from tests.support.app import app as _app

    add_tasks(_app)
