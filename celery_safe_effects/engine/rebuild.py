"""After a loss: the broker is rebuilt from the database, and a restored database begins a new epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

from ..errors import NotAllowed
from ..store.hot import Row, Store

logger = logging.getLogger(__name__)

BATCH: Final = 500


class Republished(int):
    """How many messages went out.

    Attributes:
        missed: how many the broker did not take.
    """

    missed: int

    def __new__(cls, published: int, missed: int = 0) -> Republished:
        made = super().__new__(cls, published)
        made.missed = missed
        return made


class Rebuilder:
    """Brings the broker, or what is left of the jobs' history, back together with the database.

    Arguments:
        store: the database.
        declare: declares a queue of the broker that may be lost, too.
        deliver: publishes rows, returns how many went out.
    """

    def __init__(self, store: Store, *, declare: Callable[[str], None], deliver: Callable[[list[Row]], int]) -> None:
        self.store = store
        self.declare = declare
        self.deliver = deliver

    def publish(self, *also: Callable[[], int], progress: Callable[[int, int], object] | None = None) -> Republished:
        """Publish the message of every job that should have one in the broker.

        Arguments:
            also: publish what else is due; each returns how much went out.
            progress: told how many of how many are out.

        Returns:
            what went out, and what did not.
        """
        lanes = self.store.rows("REPUBLISH_LANES")
        total, done, missed = sum(lane.jobs for lane in lanes), 0, 0
        for lane in lanes:
            self.declare(lane.queue)
            since = None
            while not missed and (rows := self._batch(lane, since)):
                since = rows[-1].was
                sent = self.deliver(rows)
                done += sent
                missed += len(rows) - sent
                if progress is not None:
                    progress(done, total)
        for publish in also:
            done += publish()
        logger.info("%d messages were published again", done)
        return Republished(done, missed and max(missed, total - done))

    def _batch(self, lane: Row, since: Any) -> list[Row]:
        rows: list[Row] = self.store.rows(
            "REPUBLISH", queue=lane.queue, priority=lane.priority, since=since, at=lane.at, limit=BATCH
        )
        return sorted(rows, key=lambda row: row.was)

    def new_epoch(self, actor: str) -> int:
        """Begin a new epoch of numbers.

        Arguments:
            actor: who says that the database was restored.

        Returns:
            the first number of the new epoch.
        """
        first: int = self.store.rows("NEW_EPOCH", actor=actor)[0].first_seq
        logger.warning("a new epoch begins at number %d: this database was restored from an older state", first)
        return first

    def park(self, spared: list[str], actor: str) -> Iterator[list[Row]]:
        """Park the jobs of the epoch before that were not over.

        Arguments:
            spared: names of tasks that may go on.
            actor: who says so.

        Yields:
            the rows that were parked, in batches.

        Raises:
            NotAllowed: when no epoch was begun.
        """
        epoch = self.store.rows("EPOCH")[0].first_seq
        if epoch is None:
            raise NotAllowed("no epoch was begun after a restore: call new_epoch() first; nothing was parked")
        while rows := self.store.rows("PARK_RESTORED", epoch=epoch, spared=spared, limit=BATCH, actor=actor):
            yield rows


__all__ = ["Rebuilder", "Republished"]
