"""Sweep, reconciliation and pruning as Celery tasks on their own queue, sent by beat beside the user's own entries."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from celery import Task

if TYPE_CHECKING:
    from celery import Celery

    from ..app import SafeEffects

SWEEP: Final = "celery_safe_effects.sweep"
RECONCILE: Final = "celery_safe_effects.reconcile"
PRUNE: Final = "celery_safe_effects.prune"
PRUNE_INTERVAL: Final = 3600.0


def install(safe: SafeEffects, app: Celery) -> None:
    """Register the tasks, and their beat entries once the app is configured."""

    def sweep(self: Any) -> dict[str, Any]:
        """Recover leases that ran out, publish what is due."""
        return asdict(safe.sweeper.run(f"{safe.owner(self.request.hostname)}/sweep"))

    def reconcile(self: Any) -> dict[str, Any]:
        """Ask providers about operations whose outcome is unknown."""
        return asdict(safe.reconciler.run(f"{safe.owner(self.request.hostname)}/reconcile"))

    def prune(self: Any) -> dict[str, Any]:
        """Delete finished jobs past their retention."""
        return asdict(safe.pruner.run(f"{safe.owner(self.request.hostname)}/prune"))

    options = {"base": Task, "bind": True, "ignore_result": True, "shared": False, "acks_late": False, "max_retries": 0}
    app.task(sweep, name=SWEEP, **options)
    app.task(reconcile, name=RECONCILE, **options)
    app.task(prune, name=PRUNE, **options)

    def add_entries(sender: Any = None, **_: Any) -> None:
        config = safe.config
        intervals = {SWEEP: config.sweep_interval, RECONCILE: config.reconcile_interval, PRUNE: PRUNE_INTERVAL}
        for name, interval in intervals.items():
            # An entry that could not run in time is worthless: the next one does the same. Said by the task, since not
            # every scheduler keeps an entry's options.
            sender.tasks[name].expires = max(2 * interval, 10.0)
            sender.conf.beat_schedule.setdefault(
                name, {"task": name, "schedule": interval, "options": {"queue": config.queue}}
            )

    safe.keep(add_entries)
    app.on_after_finalize.connect(add_entries, weak=False)
