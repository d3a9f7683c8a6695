"""A kernel timer that ends a process which was paused inside a provider call, before it can run again.

A POSIX timer on CLOCK_BOOTTIME whose signal is SIGKILL: it fires for a stopped process too, and no user code can
swallow it. Armed before the intent is sent and disarmed when the call returned. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

CLOCK_BOOTTIME = 7
SIGEV_SIGNAL = 0


class _SigEvent(ctypes.Structure):
    # sigev_value, sigev_signo, sigev_notify, then a union that SIGEV_SIGNAL does not read.
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("pad", ctypes.c_byte * 48),
    )


class _TimeSpec(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))


class _ITimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    if sys.platform == "linux":
        for name in (None, "librt.so.1"):
            with contextlib.suppress(OSError):
                library = ctypes.CDLL(name, use_errno=True)
                if hasattr(library, "timer_create") and hasattr(library, "timer_settime"):
                    return library
    return None


class _Timers(threading.local):
    """One timer a thread, made once: arming it is a single system call. Timers do not survive a fork."""

    pid = 0
    timer: ctypes.c_void_p | None = None
    expires: float | None = None

    def get(self, library: ctypes.CDLL) -> ctypes.c_void_p | None:
        if self.pid != os.getpid():
            self.pid = os.getpid()
            self.expires = None
            timer = ctypes.c_void_p()
            event = _SigEvent(None, signal.SIGKILL, SIGEV_SIGNAL)
            made = library.timer_create(CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(timer)) == 0
            self.timer = timer if made else None
        return self.timer

    def arm(self, library: ctypes.CDLL, expires: float | None) -> bool:
        """Let the timer fire at a moment of CLOCK_BOOTTIME; ``None`` disarms it."""
        self.expires = expires
        left = 0.0 if expires is None else max(expires - time.clock_gettime(CLOCK_BOOTTIME), 1e-6)
        whole = int(left)
        spec = _ITimerSpec(_TimeSpec(0, 0), _TimeSpec(whole, int((left - whole) * 1e9)))
        return bool(library.timer_settime(self.timer, 0, ctypes.byref(spec), None) == 0)


_timers = _Timers()


def available() -> bool:
    """Whether this system has such timers."""
    return _library() is not None


@contextlib.contextmanager
def killed_after(seconds: float | None) -> Iterator[bool]:
    """End this process with SIGKILL if the block takes longer. Nested blocks of a thread keep the earlier end.

    Arguments:
        seconds: ``None`` arms nothing.

    Yields:
        whether a timer is armed.
    """
    library = _library() if seconds is not None else None
    if library is None or seconds is None or _timers.get(library) is None:
        yield False
        return
    outer = _timers.expires
    expires = time.clock_gettime(CLOCK_BOOTTIME) + seconds
    try:
        yield _timers.arm(library, expires if outer is None else min(outer, expires))
    finally:
        _timers.arm(library, outer)
