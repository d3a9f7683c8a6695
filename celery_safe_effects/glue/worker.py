"""In a worker's main process: refuse a wrong schema, consume our queue, learn names, stand in for a dead beat."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from celery import bootsteps

from ..errors import SafeEffectsError, StoreUnavailable

if TYPE_CHECKING:
    from ..app import SafeEffects

logger = logging.getLogger(__name__)


def make_step(safe: SafeEffects) -> type[bootsteps.StartStopStep]:
    """The worker step of one app."""

    class SafeEffectsStep(bootsteps.StartStopStep):
        """Checks before the pool starts, stands in for beat afterwards."""

        requires = ("celery.worker.components:Pool",)
        name = "safe_effects"

        def __init__(self, worker: Any, **kwargs: Any) -> None:
            super().__init__(worker, **kwargs)
            self.stand_in: StandIn | None = None

        def start(self, worker: Any) -> None:
            self.stand_in = StandIn(safe, worker.hostname)
            self.stand_in.start()

        def stop(self, worker: Any) -> None:
            if self.stand_in is not None:
                self.stand_in.stop()

        terminate = stop

    return SafeEffectsStep


def prepare(safe: SafeEffects, app: Any) -> None:
    """Before a worker starts: settings, schema, task names, our queue.

    Raises:
        SystemExit: when safety cannot be had, with the words that say how to mend it.
    """
    try:
        config = safe.config
        safe.check_declarations()
        safe.store.check_schema()
        names = safe.task_names()
        if names:
            safe.store.rows("LEARN_TASKS", names=names)
    except SafeEffectsError as exc:
        logger.critical("celery-safe-effects refuses to start this worker: %s", exc)
        raise SystemExit(f"celery-safe-effects refuses to start this worker: {exc}") from exc
    finally:
        safe.close()  # nothing is open when the pool forks
    if config.consume:
        app.amqp.queues.select_add(config.queue)


class StandIn(threading.Thread):
    """Sweeps and reconciles in the worker's main process when nobody else did for several intervals."""

    MISSED = 3

    def __init__(self, safe: SafeEffects, hostname: str) -> None:
        super().__init__(name="safe-effects-stand-in", daemon=True)
        self.safe = safe
        self.by = f"{hostname}/stand-in"
        self._over = threading.Event()

    def stop(self) -> None:
        """End the thread at its next turn."""
        self._over.set()

    def run(self) -> None:
        config = self.safe.config
        watching = max(config.sweep_interval, config.heartbeat_interval)
        pause = config.sweep_interval
        while not self._over.wait(pause):
            try:
                pause = config.sweep_interval if self._turn() else watching
            except StoreUnavailable as exc:
                logger.warning("standing in for the sweep: %s", exc)
            except Exception:
                logger.exception("standing in for the sweep failed")

    def _turn(self) -> bool:
        """One look, one statement; returns whether it was this process's turn to do something."""
        config = self.safe.config
        intervals = {"sweep": config.sweep_interval, "reconcile": config.reconcile_interval}
        rows = self.safe.store.rows(
            "STAND_IN", by=self.by, names=list(intervals), intervals=list(intervals.values()), missed=self.MISSED
        )
        names = {row.name for row in rows}
        if "sweep" in names:
            self.safe.sweeper.sweep(self.by)
        if "reconcile" in names:
            self.safe.reconciler.reconcile(self.by)
        return bool(names)
