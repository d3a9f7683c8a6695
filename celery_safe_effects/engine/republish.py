"""Finds messages that are lost, and publishes their jobs again.

A message is in the broker's queue, or in a worker that has not begun it, or nowhere. Workers say what they hold; of a
queue's order and length follows which jobs' messages have left it. What is in neither place, for long enough, is lost.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

from ..config import Config
from ..store.hot import Row, Store

logger = logging.getLogger(__name__)

BATCH: Final = 500
MOST: Final = 1_000_000
"""Rows of one queue that a look counts; of a longer one it sees the beginning."""


class Depth(NamedTuple):
    """What a broker's queue holds."""

    messages: int | None
    """``None``: it cannot be asked."""
    low_first: bool = False
    """Whether it hands over the lowest priority first (Redis) or the highest."""


Ask = Callable[[str], Depth]
"""Asks the broker about a queue; raises OSError when it cannot be reached."""


class Republisher:
    """Looks at each queue in which messages wait.

    Arguments:
        store, config: the database and the settings.
        ask: asks the broker.
        declare: declares a queue of the broker that may be lost, too.
        deliver: publishes rows, returns how many went out.
        count: adds to a counter, by name, label and number.
    """

    def __init__(
        self,
        store: Store,
        config: Config,
        *,
        ask: Ask,
        declare: Callable[[str], None],
        deliver: Callable[[list[Row]], int],
        count: Callable[[str, str, int], None],
    ) -> None:
        self.store = store
        self.config = config
        self.ask = ask
        self.declare = declare
        self.deliver = deliver
        self.count = count

    @property
    def grace(self) -> float:
        """Seconds in which a message that has left the broker's queue is claimed, or a worker says that it holds it."""
        return 2 * self.config.sweep_interval

    def run(self) -> int:
        """Look at the queues whose turn it is.

        Returns:
            how many messages were published again.
        """
        published = 0
        for turn in self.store.rows("LOOKS", every=self.config.sweep_interval):
            try:
                depth = self.ask(turn.queue) if turn.queue else Depth(None)
            except OSError as exc:
                logger.warning("the broker cannot be reached, so lost messages are looked for later: %r", exc)
                break
            published += self._look(turn, depth)
        return published

    def _look(self, turn: Row, depth: Depth) -> int:
        self.store.rows(
            "LOOK",
            queue=turn.queue,
            at=turn.at,
            depth=depth.messages,
            first=1 if depth.low_first else -1,
            most=MOST,
            window=3 * self.config.sweep_interval + 1,
            grace=self.grace,
        )
        published = 0
        while rows := in_order(
            self.store.rows(
                "ASTRAY",
                queue=turn.queue,
                depth=depth.messages,
                grace=self.grace,
                republish=self.config.republish_after,
                waited=stuck_after(self.config),
                limit=BATCH,
            )
        ):
            if not published:
                self.declare(turn.queue)
            sent = self.deliver(rows)
            for why, number in Counter(row.why for row in rows[:sent]).items():
                self.count("republished", why, number)
            logger.info("%d messages of queue %s were published again", sent, turn.queue or "(none)")
            published += sent
            if sent < BATCH:
                break
        return published


def in_order(rows: list[Row]) -> list[Row]:
    """Rows to publish, as they were accepted: what an update returns comes in any order."""
    return sorted(rows, key=lambda row: row.seq)


def stuck_after(config: Config) -> float:
    """Seconds after which a message that waits in a worker may be published again, so that another can take it.

    In time for ``republish_after``: what follows is one report of the worker and one look.
    """
    return max(config.republish_after - 2 * config.sweep_interval, config.republish_after / 2)
