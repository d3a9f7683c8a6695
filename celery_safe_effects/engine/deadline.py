"""A kernel timer that ends a process which was paused inside a provider call, before it can run again.

A POSIX timer on CLOCK_BOOTTIME whose signal is SIGKILL: it fires for a stopped process too, and no user code can
swallow it. Armed before the intent is sent and disarmed when the call returned. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import threading
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


_lock = threading.Lock()
_libc: ctypes.CDLL | None = None
_loaded = False


def _library() -> ctypes.CDLL | None:
    global _libc, _loaded
    with _lock:
        if not _loaded:
            _loaded = True
            if sys.platform == "linux":
                for name in (None, "librt.so.1"):
                    with contextlib.suppress(OSError, AttributeError):
                        library = ctypes.CDLL(name, use_errno=True)
                        library.timer_create, library.timer_settime, library.timer_delete  # noqa: B018
                        _libc = library
                        break
        return _libc


def available() -> bool:
    """Whether this system has such timers."""
    return _library() is not None


@contextlib.contextmanager
def killed_after(seconds: float | None) -> Iterator[bool]:
    """End this process with SIGKILL if the block takes longer.

    Arguments:
        seconds: ``None`` arms nothing.

    Yields:
        whether a timer is armed.
    """
    library = _library() if seconds is not None else None
    if library is None or seconds is None:
        yield False
        return
    timer = ctypes.c_void_p()
    event = _SigEvent(None, signal.SIGKILL, SIGEV_SIGNAL)
    if library.timer_create(CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(timer)) != 0:
        yield False
        return
    try:
        whole = int(seconds)
        spec = _ITimerSpec(_TimeSpec(0, 0), _TimeSpec(whole, max(1, int((seconds - whole) * 1e9))))
        armed = library.timer_settime(timer, 0, ctypes.byref(spec), None) == 0
        yield armed
    finally:
        library.timer_delete(timer)
