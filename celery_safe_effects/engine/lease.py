"""Leases of this process, and the one thread that renews them.

A worker's own trust in its lease ends, on its monotonic clock, at the start of the last good renewal + ttl - margin:
earlier than the database's, whatever either clock shows.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from ..store.hot import RETRYABLE, Lease, Store

logger = logging.getLogger(__name__)

_CLOCK = getattr(time, "CLOCK_BOOTTIME", None)


def clock() -> float:
    """Seconds on a clock that never goes back and also counts while the machine sleeps, where there is one."""
    return time.clock_gettime(_CLOCK) if _CLOCK is not None else time.monotonic()


class HeldLease:
    """One lease as its holder knows it.

    Arguments:
        lease: what the claim returned.
        ttl: seconds.
        since: :func:`clock` before the claim was sent.
    """

    __slots__ = ("cancelled", "lease", "lost", "margin", "renewed", "ttl")

    def __init__(self, lease: Lease, ttl: float, since: float) -> None:
        self.lease = lease
        self.ttl = ttl
        self.margin = min(1.0, ttl * 0.1)
        self.renewed = since
        self.lost = False
        self.cancelled = False

    def trusted(self) -> bool:
        """Whether the lease is surely still ours."""
        return not self.lost and clock() < self.renewed + self.ttl - self.margin


class LeaseKeeper:
    """Renews all leases of this process in one statement, and settles finished jobs in batches.

    Arguments:
        store: the database.
        interval: seconds between renewals.
        on_lost: called with a lease that a renewal found lost.
        on_late: called with a lease and the seconds by which its renewal came too late, where these are many.
    """

    TICK = 0.5
    LATE = 1.0
    """Seconds: a process that was paused, starved, or cut off from the database."""

    def __init__(
        self,
        store: Store,
        interval: float,
        on_lost: Callable[[Lease], None] | None = None,
        on_late: Callable[[Lease, float], None] | None = None,
    ) -> None:
        self.store = store
        self.interval = interval
        self.on_lost = on_lost
        self.on_late = on_late
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._held: dict[HeldLease, None] = {}
        self._ended: list[tuple[str, int]] = []
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._last = 0.0

    def _here(self) -> None:
        if self._pid != os.getpid():
            self._reset()

    def hold(self, lease: Lease, ttl: float, since: float) -> HeldLease:
        """Begin to renew a lease."""
        self._here()
        held = HeldLease(lease, ttl, since)
        self._held[held] = None
        self._start()
        return held

    def _start(self) -> None:
        if self._thread is None:
            self._last = clock()
            self._thread = threading.Thread(target=self._run, name="safe-effects-leases", daemon=True)
            self._thread.start()

    def drop(self, held: HeldLease) -> None:
        """Stop renewing a lease."""
        self._held.pop(held, None)

    def held(self) -> list[HeldLease]:
        """The leases of this process."""
        self._here()
        return list(self._held)

    def settle(self, job: str, fence: int) -> None:
        """Note that Celery was told of a job's end; written in the next batch."""
        self._here()
        self._ended.append((job, fence))
        self._start()

    def flush(self) -> None:
        """Write the noted settlements now."""
        ended, self._ended = self._ended, []
        try:
            self.store.settle(ended)
        except Exception:
            # Losing it is safe: the sweeper delivers the end once more.
            logger.warning("settling %d jobs failed; they will be delivered once more", len(ended), exc_info=True)

    def _run(self) -> None:
        while self._pid == os.getpid():
            # A task may have a shorter ttl than the setting that the interval follows.
            every = min([self.interval, *(held.ttl / 3 for held in list(self._held))])
            tick = min(self.TICK, every / 2)
            self._wake.wait(tick)
            try:
                if self._ended:
                    self.flush()
                if clock() - self._last >= every - tick / 2:
                    self._last = clock()
                    self.renew()
            except Exception:
                # Without this thread every lease of the process would run out.
                logger.exception("renewing leases failed; trying again")

    def renew(self) -> None:
        """Renew every lease once; what the statement does not return is lost."""
        leases = [held for held in list(self._held) if not held.lost]
        if not leases:
            return
        since = clock()
        try:
            alive = self.store.renew([(held.lease, held.ttl) for held in leases])
        except RETRYABLE as exc:
            logger.warning("renewing %d leases failed, trying again: %s", len(leases), exc)
            self._last = since - self.interval + min(1.0, self.interval / 4)
            return
        except Exception:
            logger.exception("renewing %d leases failed", len(leases))
            return
        late = max(since - held.renewed - min(self.interval, held.ttl / 3) for held in leases)
        for held in leases:
            cancelled = alive.get(held.lease.token)
            if cancelled is not None:
                held.renewed = max(held.renewed, since)
                held.cancelled = held.cancelled or cancelled
            elif held in self._held:
                held.lost = True
                logger.warning("lease of job %s (fence %d) is lost", held.lease.job, held.lease.fence)
                if self.on_lost is not None:
                    self.on_lost(held.lease)
        if late > self.LATE and self.on_late is not None:
            self.on_late(leases[0].lease, late)
