"""Leases of this process, and the one thread that renews them.

It is a thread of the system also under gevent and eventlet, with a connection of its own: neither a greenlet that does
not give way nor a crowd that waits for connections keeps a lease from being renewed. It shares no lock with greenlets
and speaks through a queue: a greenlet's lock, as every log handler has one there, must not be waited for in it.

A worker's own trust in its lease ends, on its monotonic clock, at the start of the last good renewal + ttl - margin:
earlier than the database's, whatever either clock shows.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from .. import native
from ..store.hot import RETRYABLE, Lease, Store

logger = logging.getLogger(__name__)

_CLOCK = getattr(time, "CLOCK_BOOTTIME", None)


def clock() -> float:
    """Seconds on a clock that never goes back and also counts while the machine sleeps, where there is one."""
    return time.clock_gettime(_CLOCK) if _CLOCK is not None else time.monotonic()


class Moment:
    """When a statement was first sent: after it waited for a connection, and before it was repeated."""

    __slots__ = ("_sent", "at")

    def __init__(self) -> None:
        self.at = clock()
        self._sent = False

    def __call__(self) -> None:
        if not self._sent:
            self.at, self._sent = clock(), True


class HeldLease:
    """One lease as its holder knows it.

    Arguments:
        lease: what is claimed; its fence is 0 until the claim's answer was read.
        ttl: seconds.
    """

    __slots__ = ("cancelled", "lease", "locked", "lost", "margin", "renewed", "ttl")

    def __init__(self, lease: Lease, ttl: float) -> None:
        self.lease = lease
        self.ttl = ttl
        self.margin = min(1.0, ttl * 0.1)
        self.renewed = float("-inf")
        self.lost = False
        self.locked = False
        self.cancelled = False

    def claimed(self, fence: int, since: float) -> None:
        """The claim was granted.

        Arguments:
            fence: its fencing token.
            since: :func:`clock` before the claim was sent.
        """
        self.lease = self.lease._replace(fence=fence)
        self.renewed = max(self.renewed, since)

    def trusted(self) -> bool:
        """Whether the lease is surely still ours."""
        return not self.lost and clock() < self.renewed + self.ttl - self.margin


class LeaseKeeper:
    """Renews all leases of this process in one statement, and settles finished jobs in batches.

    Arguments:
        store: the database, by a connection that is this thread's alone.
        interval: seconds between renewals.
        on_lost: called with a lease that a renewal found lost.
        on_late: called with a lease and the seconds by which its renewal came too late, where these are many.
    """

    TICK = 0.5
    LATE = 1.0
    """Seconds: a process that was paused, starved, or cut off from the database."""
    PATIENCE = 5.0
    """Seconds that :meth:`flush` waits for a batch that is being written."""

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
        self._ended: deque[tuple[str, int]] = deque()
        self._words: deque[Callable[[], Any]] = deque()
        self._speaker: threading.Thread | None = None
        self._started = False
        self._starting = native.original("_thread", "allocate_lock")()
        self._settling = native.original("_thread", "allocate_lock")()
        self._last = 0.0

    def _here(self) -> None:
        if self._pid != os.getpid():
            self._reset()

    def hold(self, lease: Lease, ttl: float) -> HeldLease:
        """Begin to renew a lease, before it is claimed: its greenlet may have to wait long to read the answer."""
        self._here()
        held = HeldLease(lease, ttl)
        self._held[held] = None
        self._start()
        return held

    def _start(self) -> None:
        with self._starting:
            if self._started:
                return
            self._started = True
            self._last = clock()
        native.start(self._run, "safe-effects-leases")
        if native.threads_are_greenlets():
            threading.Thread(target=self._speak_for_ever, name="safe-effects-words", daemon=True).start()

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

    def flush(self, store: Store) -> None:
        """Write the noted settlements now; a batch that is being written is waited for.

        Arguments:
            store: the database, by a connection that the calling thread may use.
        """
        ours = self._settling.acquire(True, self.PATIENCE)
        try:
            self._settle(store)
        finally:
            if ours:
                self._settling.release()

    def _settle(self, store: Store) -> None:
        ended = []
        with suppress(IndexError):
            while True:
                ended.append(self._ended.popleft())
        try:
            store.settle(ended)
        except Exception:
            # Losing it is safe: the sweeper delivers the end once more.
            self._say(f"settling {len(ended)} jobs failed; they will be delivered once more\n{traceback.format_exc()}")

    def _run(self) -> None:
        sleep = native.original("time", "sleep")
        while self._pid == os.getpid():
            # A task may have a shorter ttl than the setting that the interval follows.
            every = min([self.interval, *(held.ttl / 3 for held in list(self._held))])
            tick = min(self.TICK, every / 2)
            sleep(tick)
            try:
                if self._ended and self._settling.acquire(False):  # renewals wait for nobody
                    try:
                        self._settle(self.store)
                    finally:
                        self._settling.release()
                if clock() - self._last >= every - tick / 2:
                    self._last = clock()
                    self.renew()
                if self._words and not native.threads_are_greenlets() and not self._speaking():
                    # Telling may wait for the database, too, and leases do not wait for that.
                    self._speaker = threading.Thread(target=self.speak, name="safe-effects-words", daemon=True)
                    self._speaker.start()
            except Exception:
                # Without this thread every lease of the process would run out.
                self._say(f"renewing leases failed; trying again\n{traceback.format_exc()}", logging.ERROR)

    def renew(self) -> None:
        """Renew every lease once; what the statement does not return is lost."""
        leases = [(held, held.lease) for held in list(self._held) if not held.lost]
        if not leases:
            return
        since = clock()
        try:
            alive = self.store.renew([(lease, held.ttl) for held, lease in leases])
        except RETRYABLE as exc:
            self._say(f"renewing {len(leases)} leases failed, trying again: {exc}")
            self._soon(since)
            return
        except Exception:
            self._say(f"renewing {len(leases)} leases failed\n{traceback.format_exc()}", logging.ERROR)
            return
        # Not of those that are being claimed, or that somebody else kept us from renewing.
        free = [held for held, lease in leases if lease.fence and not held.locked]
        late = max((since - held.renewed - min(self.interval, held.ttl / 3) for held in free), default=0.0)
        for held, lease in leases:
            row = alive.get(lease.token)
            if row is not None:
                held.cancelled = held.cancelled or row.cancelled
                held.locked = not row.renewed
                if row.renewed:
                    held.renewed = max(held.renewed, since)
                else:
                    self._soon(since)
            elif lease.fence and held in self._held:  # a claim may have been under way
                held.lost = True
                self._words.append(partial(self._tell_lost, lease))
        if late > self.LATE and self.on_late is not None:
            self._words.append(partial(self.on_late, leases[0][1], late))

    def _soon(self, since: float) -> None:
        self._last = since - self.interval + min(1.0, self.interval / 4)

    def _say(self, text: str, level: int = logging.WARNING) -> None:
        self._words.append(partial(logger.log, level, text))

    def _tell_lost(self, lease: Lease) -> None:
        logger.warning("lease of job %s (fence %d) is lost", lease.job, lease.fence)
        if self.on_lost is not None:
            self.on_lost(lease)

    def speak(self) -> None:
        """Log what happened since the last time, and tell of lost and late leases."""
        while True:
            try:
                word = self._words.popleft()
            except IndexError:
                return
            try:
                word()
            except Exception:
                logger.exception("telling of a lost lease failed")

    def _speaking(self) -> bool:
        return self._speaker is not None and self._speaker.is_alive()

    def _speak_for_ever(self) -> None:
        while self._pid == os.getpid():
            time.sleep(self.TICK)
            self.speak()
