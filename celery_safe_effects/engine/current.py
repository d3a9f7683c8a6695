"""Which job is running here?"""

from __future__ import annotations

import os
import threading
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .job import ActiveJob

    Scope = tuple[Token[ActiveJob | None], tuple[ActiveJob, frozenset[threading.Thread]] | None]

_current: ContextVar[ActiveJob | None] = ContextVar("safe_effects_job", default=None)
_alone: dict[int, tuple[ActiveJob, frozenset[threading.Thread]]] = {}
"""The job of a process that runs one at a time, and the threads that were there before it."""


def job() -> ActiveJob | None:
    """The running job of this context."""
    return _current.get()


def job_here() -> ActiveJob | None:
    """The running job of this context, or of this process where it runs one job at a time.

    Context variables do not reach executor threads by themselves; in a prefork child, a thread that the job has started
    belongs to it. An older one may be left over from another job, whose effect would then stand in the wrong record.
    """
    found = _current.get()
    if found is not None:
        return found
    alone = _alone.get(os.getpid())
    if alone is None or threading.current_thread() in alone[1]:
        return None
    return alone[0]


def begin(active: ActiveJob, *, alone: bool) -> Scope:
    """Make a job the current one; give what this returns to :func:`end`."""
    outer = _alone.get(os.getpid())
    if alone:
        _alone[os.getpid()] = active, frozenset(threading.enumerate()) - {threading.current_thread()}
    return _current.set(active), outer


def end(scope: Scope) -> None:
    """The job runs no more; the one that ran it by ``apply()``, if any, goes on."""
    token, outer = scope
    if outer is None:
        _alone.pop(os.getpid(), None)
    else:
        _alone[os.getpid()] = outer
    _current.reset(token)
