"""Is the system well? Judged from what the database says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..config import Config
from ..states import TERMINAL, JobStatus, OperationStatus
from ..words import age, count, since
from .finding import Finding, problem, warning

SEVERAL: Final = 6
"""Intervals without a sweep that are too many; a worker stands in for a dead beat after half of them."""


def judge(found: Mapping[str, Any], config: Config) -> tuple[list[Finding], list[Finding]]:
    """Find what is wrong.

    Arguments:
        found: what :meth:`SafeEffects.overview` returned.
        config: the settings.

    Returns:
        problems, any of which makes the system unhealthy, and warnings, which do not.
    """
    problems, warnings = [], []
    alive = sum(found["jobs"].get(s.value, 0) for s in JobStatus if s not in TERMINAL)
    swept, limit = since(found, "sweep_finished_at"), SEVERAL * config.sweep_interval
    if alive and (swept is None or swept > limit):
        when = "no sweep ever finished" if swept is None else f"the last sweep finished {age(swept)} ago"
        what = f"{when}, with {count(alive, 'unfinished job')}"
        problems.append(problem("sweep_stale", what, "run a worker and beat, or `safe-effects sweep` now"))
    if found["double_effects"]:
        keys = ", ".join(found["double_effect_keys"])
        more = ", …" if found["double_effects"] > len(found["double_effect_keys"]) else ""
        what = f"by evidence, {count(found['double_effects'], 'operation')} happened twice: {keys}{more}"
        mend = "look at their evidence and undo one of the two at the provider"
        problems.append(problem("double_effect", what, mend))
    unknown = found["operations"].get(OperationStatus.UNKNOWN.value, 0)
    asked, limit = since(found, "reconcile_started_at"), SEVERAL * config.reconcile_interval
    if unknown and (asked is None or asked > limit):
        when = "nobody ever reconciled" if asked is None else f"nobody reconciled for {age(asked)}"
        what = f"{when}, and the outcome of {count(unknown, 'operation')} is unknown"
        warnings.append(warning("reconcile_stale", what, "run a worker and beat"))
    return problems, warnings
