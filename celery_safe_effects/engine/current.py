"""Which job is running here?"""

from __future__ import annotations

import os
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .job import ActiveJob

    Scope = tuple[Token[ActiveJob | None], ActiveJob | None]

_current: ContextVar[ActiveJob | None] = ContextVar("safe_effects_job", default=None)
_alone: dict[int, ActiveJob] = {}


def job() -> ActiveJob | None:
    """The running job of this context."""
    return _current.get()


def job_here() -> ActiveJob | None:
    """The running job of this context, or of this process where it runs one job at a time.

    Context variables do not reach executor threads by themselves; in a prefork child, whatever runs belongs to the
    one job.
    """
    return _current.get() or _alone.get(os.getpid())


def begin(active: ActiveJob, *, alone: bool) -> Scope:
    """Make a job the current one; give what this returns to :func:`end`."""
    outer = _alone.get(os.getpid())
    if alone:
        _alone[os.getpid()] = active
    return _current.set(active), outer


def end(scope: Scope) -> None:
    """The job runs no more; the one that ran it by ``apply()``, if any, goes on."""
    token, outer = scope
    if outer is None:
        _alone.pop(os.getpid(), None)
    else:
        _alone[os.getpid()] = outer
    _current.reset(token)
