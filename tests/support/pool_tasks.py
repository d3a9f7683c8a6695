"""Tasks that show what a pool does with a job: threads and greenlets of the body's own, loops that never give way."""

from __future__ import annotations

import contextvars
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from celery import Celery
from celery.signals import task_revoked

from celery_safe_effects import NoActiveJob, SafeTask, native
from tests.support import tasks
from tests.support.fault_tasks import entered


def _spawned(run: Callable[[], Any]) -> Any:
    """Run something in a greenlet of the library that patched this process; a thread where none did."""
    if "gevent.monkey" in sys.modules:
        import gevent

        return gevent.spawn(run).get()
    if "eventlet" in sys.modules:
        import eventlet

        return eventlet.spawn(run).wait()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    return found[0]


def add_tasks(app: Celery) -> None:
    """Add the tasks, named `tests.<name>`.

    Args:
        app: the application of the tests.
    """

    def task(name: str, effects: list[Any], **options: Any) -> Any:
        return app.task(base=SafeTask, bind=True, shared=False, name=f"tests.{name}", effects=effects, **options)

    @task("blocks", [])
    def blocks(self: Any, seconds: float) -> float:
        """Wait as a C library does: other threads run, other greenlets do not."""
        native.original("time", "sleep")(seconds)
        return seconds

    @task("from_threads", [tasks.charge])
    def from_threads(self: Any) -> dict[str, str]:
        """Call a named effect from threads and greenlets of the body's own, with and without its context."""

        def call(step: str) -> str:
            try:
                return str(tasks.charge.step(step)("cus_1", 1).ref)
            except NoActiveJob:
                return "NoActiveJob"

        with ThreadPoolExecutor(1) as executor:
            context = contextvars.copy_context()
            return {
                "executor": executor.submit(call, "a").result(),
                "executor with its context": executor.submit(context.run, call, "b").result(),
                "spawned": _spawned(lambda: call("c")),
                "spawned with its context": _spawned(lambda: contextvars.copy_context().run(call, "d"))
                if "eventlet" not in sys.modules
                else _spawned(lambda: context.run(call, "d")),
            }

    @task("exits", [], max_attempts=2)
    def exits(self: Any) -> None:
        """Ends its process, as far as that goes here."""
        entered("exits")
        sys.exit(3)

    @task("process", [])
    def process(self: Any) -> list[int]:
        """Where it runs."""
        return [os.getpid(), threading.get_native_id()]

    @task("charge_slowly", [tasks.charge, tasks.mail])
    def charge_slowly(self: Any, name: str, seconds: float = 0) -> Any:
        """Two effects and time between them."""
        ref = tasks.charge(name, 1).ref
        time.sleep(seconds)
        return tasks.mail(f"{name} {ref}").ref

    @task("refunds", [tasks.refund])
    def refunds(self: Any, order: str) -> Any:
        """One effect of a provider that knows keys and a lookup."""
        return tasks.refund(order).ref

    @task("ignores_signals", [tasks.charge])
    def ignores_signals(self: Any, seconds: float) -> Any:
        """Does not let itself be ended, and then wants to do something more."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        entered("ignores_signals")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.05)
        return tasks.charge("ignores", 1).ref


def tell_of_revokes() -> None:
    """In a worker: let the provider count what ``task_revoked`` tells."""

    def revoked(sender: Any = None, request: Any = None, **_: Any) -> None:
        entered(f"revoked_{request.id}")

    task_revoked.connect(revoked, weak=False)
