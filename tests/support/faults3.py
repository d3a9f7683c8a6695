"""Tasks for the faults of many effects in one job, and of jobs that only one at a time may run."""

from __future__ import annotations

import time
from typing import Any

from celery import Celery

from celery_safe_effects import SafeTask
from tests.support.faults2 import gate
from tests.support.tasks import charge, provider

BEGUN = "holder_begun"
"""The kind of the provider's rows that say who came inside."""


def add_tasks(app: Celery) -> None:
    """Add the tasks of this module to the test application."""

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
