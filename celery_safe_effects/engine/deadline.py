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
                if hasattr(library, "timer_create") and hasattr(library, "timer_delete"):
                    return library
    return None


class _Timer:
    """A timer of this process that is armed until it is deleted; it does not survive a fork."""

    def __init__(self, library: ctypes.CDLL, seconds: float) -> None:
        self._library = library
        self._pid = os.getpid()
        self._timer = ctypes.c_void_p()
        event = _SigEvent(None, signal.SIGKILL, SIGEV_SIGNAL)
        self.armed = library.timer_create(CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(self._timer)) == 0
        if self.armed:
            whole = int(max(seconds, 1e-6))
            left = _TimeSpec(whole, int((max(seconds, 1e-6) - whole) * 1e9))
            spec = _ITimerSpec(_TimeSpec(0, 0), left)
            self.armed = library.timer_settime(self._timer, 0, ctypes.byref(spec), None) == 0

    def delete(self) -> None:
        # A child that was forked off meanwhile has none, or another one of the same number.
        if self.armed and self._pid == os.getpid():
            self._library.timer_delete(self._timer)


@contextlib.contextmanager
def killed_after(seconds: float | None) -> Iterator[bool]:
    """End this process with SIGKILL if the block takes longer.

    Each block has a timer of its own, so that blocks may be nested and may overlap, and may end in another thread than
    they began in; the earliest end counts.

    Arguments:
        seconds: ``None`` arms nothing.

    Yields:
        whether a timer is armed.
    """
    library = _library() if seconds is not None else None
    if library is None or seconds is None:
        yield False
        return
    timer = _Timer(library, seconds)
    try:
        yield timer.armed
    finally:
        timer.delete()
