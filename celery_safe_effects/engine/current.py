"""Which job is running here?"""

from __future__ import annotations

import os
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .job import ActiveJob

_current: ContextVar[ActiveJob | None] = ContextVar("safe_effects_job", default=None)
_active: dict[int, dict[str, ActiveJob]] = {}


def job() -> ActiveJob | None:
    """The running job of this context.

    Context variables do not reach executor threads by themselves; where exactly one job runs in the process, it is
    that one.
    """
    found = _current.get()
    if found is not None:
        return found
    here = _active.get(os.getpid())
    if here and len(here) == 1:
        return next(iter(here.values()))
    return None


def begin(active: ActiveJob) -> object:
    """Make a job the current one; give what this returns to :func:`end`."""
    _active.setdefault(os.getpid(), {})[active.id] = active
    return _current.set(active)


def end(active: ActiveJob, token: object) -> None:
    """The job runs no more."""
    _active.get(os.getpid(), {}).pop(active.id, None)
    _current.reset(token)  # type: ignore[arg-type]
