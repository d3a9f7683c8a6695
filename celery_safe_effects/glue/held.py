"""What this worker's main process holds without having begun it, as it tells the database.

A message in a worker is not lost, and one that nobody vouches for is: that is how lost messages are told from those
that wait their turn behind a long job or a rate limit.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

from ..engine.lease import clock

if TYPE_CHECKING:
    from ..store.hot import Store
    from .request import SafeRequest

_received: dict[int, tuple[weakref.ref[SafeRequest], float]] = {}


class Held(NamedTuple):
    """Job ids."""

    jobs: list[str]
    stuck: list[str]
    """Held for long, though no rate limit holds them: another worker may well take them earlier."""


def received(request: SafeRequest) -> None:
    """Remember a request for as long as Celery keeps it."""
    key = id(request)
    _received[key] = (weakref.ref(request, lambda _: _received.pop(key, None)), clock())


def here(stuck_after: float) -> Held:
    """What is held now.

    Arguments:
        stuck_after: seconds.
    """
    found = Held([], [])
    now = clock()
    for reference, since in list(_received.values()):
        request = reference()
        if request is None or request.time_start is not None or not request.marked:
            continue
        stuck = now - since >= stuck_after and not request.rate_limited
        (found.stuck if stuck else found.jobs).append(request.id)
    return found


class Report:
    """Tells the database what is held, at every sweep; seldom, where that is very much.

    Arguments:
        store: the database.
        worker: who tells.
        every: seconds between two reports.
        stuck_after: seconds.
    """

    MISSED = 3
    """Reports that may fail before a worker is not believed any more."""
    AT_ONCE = 2000
    """Messages that cost one second more until the next report."""

    def __init__(self, store: Store, worker: str, every: float, stuck_after: float) -> None:
        self.store = store
        self.worker = worker
        self.every = every
        self.stuck_after = stuck_after
        self._told = False

    def send(self) -> float:
        """Report.

        Returns:
            seconds until the next report.
        """
        found = here(self.stuck_after)
        pause = max(self.every, (len(found.jobs) + len(found.stuck)) / self.AT_ONCE)
        if any(found) or self._told:
            self._told = True
            self.store.rows(
                "HELD",
                worker=self.worker,
                believed=self.MISSED * pause,
                jobs=found.jobs,
                stuck=found.stuck,
            )
            self._told = any(found)
        return pause
