"""A worker says that it is there, and asks whether it is its turn to stand in for beat: one statement a heartbeat.

That it is there tells a lease that ran out with its worker from one that ran out under it.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import psycopg

from ..errors import SafeEffectsError

if TYPE_CHECKING:
    from ..app import SafeEffects

logger = logging.getLogger(__name__)

OF_ITS_OWN = 3
"""Connections of a worker's main process for itself: sweep, reconciliation, and this."""


class Presence(threading.Thread):
    """Writes the worker's row as often as leases are renewed.

    Arguments:
        safe: the composition root.
        worker: Celery's worker controller.
        turns: what the statement is told to ask for turns.
        take: what to call for a turn, by its name.
    """

    def __init__(
        self, safe: SafeEffects, worker: Any, turns: Mapping[str, Any], take: Mapping[str, Callable[[], None]]
    ) -> None:
        super().__init__(name="safe-effects-presence", daemon=True)
        self.safe = safe
        self.worker = worker
        self.turns = turns
        self.take = take
        self._over = threading.Event()

    def stop(self) -> None:
        """End the thread, and say that the worker went by itself."""
        self._over.set()
        self._write("WORKER_STOPPED", node=self.worker.hostname, pid=os.getpid())

    def run(self) -> None:
        said = self.facts()
        pause = 0.0
        while not self._over.wait(pause):
            for row in self._write("WATCH", **said, **self.turns):
                self.take[row.name]()
            pause = self.safe.config.heartbeat_interval

    def facts(self) -> dict[str, Any]:
        """The worker's row."""
        pool = str(getattr(self.worker.pool_cls, "__module__", self.worker.pool_cls)).rpartition(".")[2]
        concurrency = int(self.worker.concurrency or 1)
        config = self.safe.config
        here = config.connections(alone=False)
        if pool == "prefork":
            connections = concurrency * (config.connections(alone=True) + 1) + min(OF_ITS_OWN, here)
        else:
            connections = min(concurrency + OF_ITS_OWN, here) + 1
        return {
            "node": self.worker.hostname,
            "pid": os.getpid(),
            "version": importlib.metadata.version("celery-safe-effects"),
            "pool": pool,
            "concurrency": concurrency,
            "connections": connections,
            "queues": sorted(self.worker.app.amqp.queues.consume_from),
        }

    def _write(self, statement: str, **params: Any) -> list[Any]:
        try:
            return self.safe.store.rows(statement, **params)
        except (SafeEffectsError, psycopg.Error) as exc:
            logger.debug("%s could not be written: %s", statement, exc)
            return []


__all__ = ["Presence"]
