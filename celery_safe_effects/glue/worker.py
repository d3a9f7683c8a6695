"""In a worker's main process: refuse a wrong schema, consume our queue, learn names, stand in for a dead beat."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from celery import bootsteps
from kombu.common import Broadcast

from .. import faults
from ..engine.lease import clock
from ..engine.republish import stuck_after
from ..errors import ConfigurationError, SafeEffectsError, StoreUnavailable
from ..states import EXPRESS
from . import compat, threads
from .held import Report
from .presence import Presence

if TYPE_CHECKING:
    from ..app import SafeEffects

logger = logging.getLogger(__name__)


def make_step(safe: SafeEffects) -> type[bootsteps.StartStopStep]:
    """The worker step of one app."""

    class SafeEffectsStep(bootsteps.StartStopStep):
        """Stands in for beat, and tells what this worker holds."""

        requires = ("celery.worker.components:Pool", "celery.worker.components:Timer")
        name = "safe_effects"

        def __init__(self, worker: Any, **kwargs: Any) -> None:
            super().__init__(worker, **kwargs)
            self.threads: list[StandIn | Reporting | Presence] = []

        def start(self, worker: Any) -> None:
            safe.timer = worker.timer
            _tell_of_a_cold_stop(safe, worker)
            stand_ins = [StandIn(safe, worker.hostname, name) for name in ("sweep", "reconcile")]
            asking = turns(safe, stand_ins[0].by, *(stand_in.turn for stand_in in stand_ins))
            telling = {stand_in.turn: stand_in.take_turn for stand_in in stand_ins}
            self.threads = [*stand_ins, Reporting(safe, worker.hostname), Presence(safe, worker, asking, telling)]
            for thread in self.threads:
                thread.start()

        def stop(self, worker: Any) -> None:
            safe.stopping.begin()
            for thread in self.threads:
                thread.stop()

        def terminate(self, worker: Any) -> None:
            self.stop(worker)
            safe.flush()  # a cold stop sends no `worker_shutdown`

    return SafeEffectsStep


def make_consumer_step(safe: SafeEffects) -> type[bootsteps.StartStopStep]:
    """The consumer step of one app."""

    class SafeEffectsConsumerStep(bootsteps.StartStopStep):
        """Hears ``revoke`` before Celery does."""

        requires = ("celery.worker.consumer.control:Control",)
        name = "safe_effects_control"

        def start(self, consumer: Any) -> None:
            from .revoke import install

            install(safe, consumer)

    return SafeEffectsConsumerStep


def _tell_of_a_cold_stop(safe: SafeEffects, worker: Any) -> None:
    """A cold stop begins with this call, long before any signal of Celery's says so."""
    wait = worker.wait_for_soft_shutdown

    def wait_for_soft_shutdown() -> None:
        safe.stopping.begin()
        wait()

    worker.wait_for_soft_shutdown = wait_for_soft_shutdown


def prepare(safe: SafeEffects, app: Any, hostname: str) -> None:
    """Before a worker starts: Celery itself, settings, schema, task names, our queue.

    From now on a lost message may find its task.

    Raises:
        SystemExit: when safety cannot be had, with the words that say how to mend it.
    """
    faults.enter("main")
    try:
        compat.check()
        config = safe.config
        faults.arm_from_environment()
        safe.check_declarations()
        safe.add_companions()
        safe.store.check_schema()
        safe.refuse_risks()
        names = safe.task_names()
        _refuse_what_would_be_stranded(safe, sorted(set(app.tasks) - set(names)))
        if names:
            safe.store.rows("LEARN_TASKS", names=names)
        safe.store.row("MAINTENANCE_BEGIN", name="worker", by=safe.owner(hostname), idle_for=None)
    except SafeEffectsError as exc:
        logger.critical("celery-safe-effects refuses to start this worker: %s", exc)
        raise SystemExit(f"celery-safe-effects refuses to start this worker: {exc}") from exc
    finally:
        safe.close()  # nothing is open when the pool forks
    safe.stopping.share()
    queues = app.amqp.queues
    if config.fair:
        for name, queue in list(queues.consume_from.items()):
            if not isinstance(queue, Broadcast) and not name.endswith(EXPRESS):
                queues.select_add(safe.publisher.wire.lane(name + EXPRESS))
                safe.express.append(name)
    if config.consume:
        queues.select_add(config.queue)


def _refuse_what_would_be_stranded(safe: SafeEffects, plain: list[str]) -> None:
    """A task that was a SafeTask goes back to a plain one when its jobs have ended; then its name is forgotten.

    Raises:
        ConfigurationError: naming the tasks, and how many of their jobs have not ended.
    """
    left: dict[str, list[str]] = {}
    for row in safe.store.rows("UNLEARN_TASKS", names=plain):
        left.setdefault(row.task, []).append(f"{row.n} {row.status}")
    if left:
        what = "; ".join(f"{name!r} ({', '.join(counts)})" for name, counts in left.items())
        raise ConfigurationError(
            f"plain tasks here, with jobs as SafeTasks that have not ended: {what}. This worker would never run them: "
            "keep base=SafeTask until they have ended, or end them with `celery -A yourproject safe-effects cancel`; "
            "docs/adoption.md says how"
        )


class StandIn(threading.Thread):
    """Sweeps, or reconciles, in the worker's main process when nobody else did for several intervals.

    One thread for each: a provider that hangs must not keep the sweep from running. Each sleeps until it is told that
    it has a turn, and goes on until another has taken over.
    """

    MISSED = 3

    def __init__(self, safe: SafeEffects, hostname: str, name: str) -> None:
        super().__init__(name=f"safe-effects-{name}", daemon=True)
        self.safe = safe
        self.by = f"{hostname}/stand-in"
        self.turn = name
        self._has_turn = threading.Event()
        self._over = threading.Event()

    def stop(self) -> None:
        """End the thread at its next turn."""
        self._over.set()
        self._has_turn.set()

    def take_turn(self) -> None:
        """The database says that it is this worker's turn."""
        self._has_turn.set()

    def run(self) -> None:
        config = self.safe.config
        every = {"sweep": config.sweep_interval, "reconcile": config.reconcile_interval}[self.turn]
        while self._has_turn.wait() and not self._over.is_set():
            self._has_turn.clear()
            self._act()
            while not self._over.wait(every) and self._next():
                self._act()

    def _next(self) -> bool:
        try:
            return bool(self.safe.store.rows("STAND_IN", **turns(self.safe, self.by, self.turn)))
        except Exception as exc:
            logger.warning("standing in for the %s: %s", self.turn, exc)
            return False
        finally:
            threads.leave()

    def _act(self) -> None:
        try:
            if self.turn == "sweep":
                self.safe.sweeper.sweep(self.by)
            else:
                self.safe.reconciler.reconcile(self.by)
        except StoreUnavailable as exc:
            logger.warning("standing in for the %s: %s", self.turn, exc)
        except Exception:
            logger.exception("standing in for the %s failed", self.turn)
        finally:
            threads.leave()


def turns(safe: SafeEffects, by: str, *names: str) -> dict[str, Any]:
    """What the database is told when it is asked for turns."""
    config = safe.config
    intervals = {"sweep": config.sweep_interval, "reconcile": config.reconcile_interval}
    return {"by": by, "names": list(names), "missed": StandIn.MISSED, **intervals}


class Reporting(threading.Thread):
    """Tells the database, at every sweep interval, which messages wait in this worker, and seldom what it consumes."""

    EXPRESS_EVERY, EXPRESS_UNTIL = 60.0, 180.0
    """Seconds between two reports of the express lanes, and how long one is believed."""

    def __init__(self, safe: SafeEffects, hostname: str) -> None:
        super().__init__(name="safe-effects-held", daemon=True)
        self.safe = safe
        self.hostname = hostname
        self._over = threading.Event()

    def stop(self) -> None:
        """End the thread at its next turn."""
        self._over.set()

    def run(self) -> None:
        config = self.safe.config
        every = config.sweep_interval
        report = Report(self.safe.store, self.safe.owner(self.hostname), every, stuck_after(config))
        pause, told = 0.0, float("-inf")
        while not self._over.wait(pause):
            try:
                if self.safe.express and clock() >= told + self.EXPRESS_EVERY:
                    self.safe.store.rows("EXPRESS", queues=self.safe.express, until=self.EXPRESS_UNTIL)
                    told = clock()
                pause = report.send()
            except Exception as exc:
                pause = every
                # Its messages may be published again; that is all.
                logger.warning("what this worker holds could not be told: %s", exc)
