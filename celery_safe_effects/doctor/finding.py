"""What a check finds, and what it looks at."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from ..store.grants import OBSERVER, WORKER

if TYPE_CHECKING:
    from ..app import SafeEffects
    from ..config import Config

Severity = Literal["problem", "warning"]

SAMPLE: Final = 1_000
"""Rows of a kind that a check looks at, at most."""


@dataclass(frozen=True)
class Finding:
    """Something that will hurt.

    Attributes:
        code: a stable identifier.
        severity: ``problem`` (a promise is broken, or will be) or ``warning``.
        what: what was found.
        mend: what to do.
        refuses: a worker does not start with it, unless ``safe_effects_accept_risks`` names its code.
    """

    code: str
    severity: Severity
    what: str
    mend: str
    refuses: bool = False

    @property
    def message(self) -> str:
        """Both in one."""
        return f"{self.what}; {self.mend}" if self.mend else self.what


def problem(code: str, what: str, mend: str, *, refuses: bool = False) -> Finding:
    """A finding that breaks a promise."""
    return Finding(code, "problem", what, mend, refuses)


def warning(code: str, what: str, mend: str) -> Finding:
    """A finding that costs something, or will."""
    return Finding(code, "warning", what, mend)


class Patient:
    """An app and its surroundings, each looked at once, when a check asks.

    Arguments:
        safe: the app's SafeEffects.
        kinds: what its database role has to be, one of these; the doctor only looks.
    """

    def __init__(self, safe: SafeEffects, kinds: tuple[str, ...] = (OBSERVER, WORKER)) -> None:
        self.safe = safe
        self.kinds = kinds
        self.app: Any = safe.app

    @property
    def conf(self) -> Any:
        """Celery's settings."""
        return self.app.conf

    @property
    def config(self) -> Config:
        """Our settings."""
        return self.safe.config

    @functools.cached_property
    def database(self) -> Any:
        """The server's settings, its clock and its connections."""
        return self.safe.store.rows("DOCTOR_DATABASE")[0]

    @functools.cached_property
    def state(self) -> Any:
        """How the jobs stand."""
        return self.safe.store.rows("DOCTOR_STATE", most=SAMPLE)[0]

    @functools.cached_property
    def workers(self) -> list[Any]:
        """The workers that were seen within a minute."""
        rows = self.safe.store.rows("METRICS_WORKERS", most=SAMPLE)
        return [row for row in rows if not row.stopped and row.silent < 60]

    @functools.cached_property
    def pause(self) -> float:
        """By how many seconds a renewal of leases came too late at most, within a day."""
        return max((row.longest_pause for row in self.safe.store.rows("METRICS_WORKERS", most=SAMPLE)), default=0.0)

    @functools.cached_property
    def longest(self) -> float:
        """Seconds of the longest run lately."""
        return float(self.safe.store.rows("DOCTOR_LONGEST", most=SAMPLE)[0].seconds or 0.0)

    @property
    def safe_tasks(self) -> list[Any]:
        """The app's SafeTasks."""
        return [self.app.tasks[name] for name in self.safe.task_names()]


Check = Callable[[Patient], Iterable[Finding]]


def names(found: Iterable[str]) -> str:
    """The first few of some names."""
    listed = sorted(found)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
