"""Tasks for the faults of many effects in one job, and of jobs that only one at a time may run."""

from __future__ import annotations

import contextvars
import threading
import time
from typing import Any

from celery import Celery

from celery_safe_effects import OperationBusy, SafeTask
from tests.support.faults2 import gate
from tests.support.tasks import charge, provider

BEGUN = "holder_begun"
"""The kind of the provider's rows that say who came inside."""


def add_tasks(app: Celery) -> None:
    """Add the tasks of this module to the test application."""

    def task(name: str) -> Any:
        return app.task(base=SafeTask, bind=True, shared=False, name=f"tests.{name}", effects=[charge])

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.newsletter", effects=[charge])
    def newsletter(self: Any, recipients: int, stop_before: int, name: str) -> int:
        """One effect for each recipient, and a gate before one of them."""
        for number in range(1, recipients + 1):
            if number == stop_before:
                gate(name)
            charge(f"recipient-{number}", number)
        return recipients

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.holder", effects=[charge], pool="one")
    def holder(self: Any, seconds: float) -> str:
        """Hold the only slot for a while in its first run, then have an effect.

        A process that stood still for more than a second goes straight on to the effect, as if nothing had been.
        """
        provider().call(BEGUN, None, {"job": self.job.id, "fence": self.job.fence})
        now = time.monotonic()
        end = now + (seconds if self.job.fence == 1 else 0)
        while (before := now) < end:
            time.sleep(0.1)
            now = time.monotonic()
            if now - before > 1:
                break
        return str(charge("holder", 1).ref)

    @task("invoice")
    def invoice(self: Any, customer: str, cents: int) -> list[Any]:
        """Charge under a business key that other jobs use too."""
        outcome = charge.keyed(f"invoice-{customer}")(customer, cents)
        return [outcome.ref, outcome.replayed]

    @task("invoice_twice")
    def invoice_twice(self: Any, customer: str, cents: int) -> list[str]:
        """The same business key by two threads of one job, while the first call is under way."""
        keyed = charge.keyed(f"invoice-{customer}")
        said: list[str] = []

        def call() -> None:
            try:
                said.append(str(keyed(customer, cents).ref))
            except OperationBusy:
                said.append("busy")

        threads = [threading.Thread(target=contextvars.copy_context().run, args=(call,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(said)
