"""The system's own threads, locks and waits, also in a process where gevent or eventlet put theirs in their place.

What keeps leases alive must not wait for greenlets to give way: it runs in a thread of the system and uses nothing that
a greenlet library has replaced.
"""

from __future__ import annotations

import _thread
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any


def original(module: str, name: str) -> Any:
    """An attribute of a standard module as it was before a greenlet library replaced it.

    Arguments:
        module, name: such as ``"time"`` and ``"sleep"``.
    """
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None:
        return gevent.get_original(module, name)
    return getattr(_eventlet_original(module) or importlib.import_module(module), name)


def _eventlet_original(module: str) -> Any:
    patcher = sys.modules.get("eventlet.patcher")
    return patcher.original(module) if patcher is not None and getattr(patcher, "already_patched", None) else None


def threads_are_greenlets() -> bool:
    """Whether ``threading.Thread`` makes greenlets in this process."""
    return original("_thread", "start_new_thread") is not _thread.start_new_thread


def start(run: Callable[[], None], name: str) -> None:
    """Run something in a daemon thread of the system."""
    if threads_are_greenlets():
        original("_thread", "start_new_thread")(run, ())
    else:
        threading.Thread(target=run, name=name, daemon=True).start()
