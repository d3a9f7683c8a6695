"""Whether the worker is being stopped: an attempt that ends by that costs none of the job's."""

from __future__ import annotations

import mmap
import time
from typing import Any

GRACE = 3.0
"""Seconds in which a signal that reached a pool child reaches its parent, too, if the whole worker is meant."""


class Stopping:
    """Known to the main process, and through shared memory to the prefork children."""

    def __init__(self) -> None:
        self._shared: mmap.mmap | None = None

    def share(self) -> None:
        """In the main process, before the pool forks."""
        self._shared = mmap.mmap(-1, 1)

    def begin(self, **_: Any) -> None:
        """The worker is being stopped. Called by signal handlers, too: does nothing that could wait."""
        if self._shared is not None:
            self._shared[0] = 1

    def now(self) -> bool:
        """Whether it is being stopped.

        A service manager signals all processes of a worker at once, and a child may be the first to notice.
        """
        from billiard import common

        until = time.monotonic() + GRACE
        while not self._known():
            signalled = self._shared is not None and common._should_have_exited[0]
            if not signalled or time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def _known(self) -> bool:
        from celery.worker import state

        flags = (state.should_stop, state.should_terminate)
        here = any(flag is not None and flag is not False for flag in flags)  # an exit status of 0 counts
        return here or (self._shared is not None and self._shared[0] == 1)
