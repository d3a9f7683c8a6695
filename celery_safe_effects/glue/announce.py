"""Tells receivers of ``job_transition`` and ``operation_transition`` what this process wrote into the log."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from .. import signals
from ..values import TransitionRow

if TYPE_CHECKING:
    from ..app import SafeEffects

logger = logging.getLogger(__name__)

REMEMBERED: Final = 1000
"""Jobs of which a process remembers how far it has told."""


class Announcer:
    """Sends the log's rows as signals; without receivers, it does nothing and reads nothing.

    Arguments:
        safe: the composition root.
    """

    def __init__(self, safe: SafeEffects) -> None:
        self.safe = safe
        self._told: OrderedDict[str, int] = OrderedDict()

    def announce(self, actor: str, *job_ids: str) -> None:
        """Send what ``actor`` wrote about these jobs since the last time. Never raises."""
        if not job_ids or not (signals.job_transition.receivers or signals.operation_transition.receivers):
            return
        try:
            after = min(self._told.get(job, 0) for job in job_ids)
            rows = self.safe.store.rows("WRITTEN_BY", ids=list(job_ids), after=after, actor=actor)
        except Exception:
            logger.warning("the transitions of %d jobs could not be announced", len(job_ids), exc_info=True)
            return
        for row in rows:
            *columns, task = row
            told = TransitionRow(*columns)
            if told.id <= self._told.get(told.job_id, 0):
                continue
            self._told[told.job_id] = told.id
            self._told.move_to_end(told.job_id)
            signal = signals.job_transition if told.operation_key is None else signals.operation_transition
            signal.send(sender=task, row=told)
        while len(self._told) > REMEMBERED:
            self._told.popitem(last=False)
