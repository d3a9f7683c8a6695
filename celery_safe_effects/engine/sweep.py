"""The sweep: leases that ran out, jobs past their time, deliveries that are due, senders that are gone.

Bounded batches with SKIP LOCKED: several sweeps at once share the work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .. import faults
from ..config import Config
from ..faults import Point
from ..store.hot import Row, Store
from . import process
from .republish import Ask, Republisher, in_order

logger = logging.getLogger(__name__)

BACKOFF, MAX_BACKOFF = 1.0, 60.0
"""Seconds before a job whose worker died runs again; doubles with each attempt."""
FOLD_BATCH = 10_000
"""Counted events that are joined in one statement."""
IN_FLIGHT = 60.0
"""Seconds for which a request without a deadline may still be under way after its sender is gone."""


@dataclass
class Swept:
    """What one sweep did."""

    released: int = 0
    parked: int = 0
    ended: int = 0
    published: int = 0
    republished: int = 0
    gone: int = 0
    woken: int = 0
    chords: int = 0
    jobs: list[str] = field(default_factory=list)


class Sweeper:
    """One sweep at a time.

    Arguments:
        store, config: the database and the settings.
        deliver: publishes rows and returns how many went out.
        deliver_posted: publishes what is kept for plain tasks, and returns how much went out.
        finish_chords: sends the bodies of chords that Celery did not send, and returns how many.
        ask, declare, count: for the :class:`~celery_safe_effects.engine.republish.Republisher`.
        on_parked: told of each job that the sweep parked.
        on_moved: told of who moved which jobs.
        settle_tries: deliveries of an end that Celery was not told, before giving up.
        limits: the settings' limits, as the statements take them.
    """

    BATCH = 500

    def __init__(
        self,
        store: Store,
        config: Config,
        *,
        deliver: Callable[[list[Row]], int],
        deliver_posted: Callable[[], int],
        finish_chords: Callable[[], int],
        ask: Ask,
        declare: Callable[[str], None],
        count: Callable[[str, str, int], None],
        on_parked: Callable[[Row], None],
        on_moved: Callable[..., None],
        settle_tries: int,
        limits: str,
    ) -> None:
        self.store = store
        self.config = config
        self.deliver = deliver
        self.deliver_posted = deliver_posted
        self.finish_chords = finish_chords
        self.republisher = Republisher(store, config, ask=ask, declare=declare, deliver=deliver, count=count)
        self.on_parked = on_parked
        self.on_moved = on_moved
        self.settle_tries = settle_tries
        self.limits = limits

    def run(self, by: str) -> Swept:
        """Sweep everything that is due now.

        Arguments:
            by: who sweeps, for the log of transitions.

        Returns:
            what was done.
        """
        self.store.row("MAINTENANCE_BEGIN", name="sweep", by=by, idle_for=None)
        return self.sweep(by)

    def sweep(self, by: str) -> Swept:
        """The sweep itself, for a caller that has already taken its turn."""
        with faults.acting("sweeper"):
            if faults.armed is not None:
                faults.at(Point.BEFORE_SWEEP)
            swept = self._sweep(by)
            if faults.armed is not None:
                faults.at(Point.AFTER_SWEEP)
        return swept

    def _sweep(self, by: str) -> Swept:
        swept = Swept()
        while rows := self.store.rows(
            "SWEEP_LEASES",
            limit=self.BATCH,
            wish="again",
            reason="lease_expired",
            delay=BACKOFF,
            max_delay=MAX_BACKOFF,
            actor=by,
        ):
            self._left(swept, rows, by)
            if len(rows) < self.BATCH:
                break
        while rows := self.dying(None, by):
            self._left(swept, rows, by)
            if len(rows) < self.BATCH:
                break
        swept.gone = self.observe_gone()
        self.store.rows("REAP_RESERVATIONS", limit=self.BATCH)
        swept.woken = sum(row.woken for row in self.store.rows("WAKE_FREE", limits=self.limits))
        self.store.rows("PROMOTE", limit=self.BATCH)
        swept.published = self.publish() + self.deliver_posted()
        swept.republished = self.republisher.run()
        swept.chords = self.finish_chords()  # the last, since it may have to wait for the result backend
        self.fold_counters()
        self.store.row("MAINTENANCE_END", name="sweep")
        return swept

    def _left(self, swept: Swept, rows: list[Row], by: str) -> None:
        self.on_moved(by, *(row.id for row in rows))
        for row in rows:
            swept.jobs.append(row.id)
            if row.status == "unknown":
                swept.parked += 1
                self.on_parked(row)
            elif row.status == "queued":
                swept.released += 1
            else:
                swept.ended += 1

    def dying(self, job_id: str | None, by: str) -> list[Row]:
        """End queued jobs that are past their expiry or age; one of them, or a batch."""
        return self.store.rows("SWEEP_DYING", id=job_id, limit=self.BATCH, actor=by)

    def publish(self) -> int:
        """Publish what is due whatever the broker holds, in batches."""
        published = 0
        while rows := self.store.rows(
            "DUE",
            ids=None,
            limit=self.BATCH,
            ahead=self.config.sweep_interval,
            settle_tries=self.settle_tries,
            republish=self.config.republish_after,
        ):
            sent = self.deliver(in_order(rows))
            published += sent
            if sent < self.BATCH:
                break
        return published

    def fold_counters(self) -> None:
        """Join what was counted since the last sweep."""
        while self.store.rows("FOLD", limit=FOLD_BATCH)[0].rows == FOLD_BATCH:
            pass

    def observe_gone(self) -> int:
        """Record which senders of open questions are observably no more, where this process can tell."""
        here = process.here()
        if not here:
            return 0
        senders: list[Any] = self.store.rows("SENDERS_HERE", here=here)
        dead = [row.process for row in senders if process.is_gone(row.process)]
        if not dead:
            return 0
        return len(self.store.rows("GONE", processes=dead, in_flight=IN_FLIGHT))
