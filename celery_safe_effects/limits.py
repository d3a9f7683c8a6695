"""``Limits``: how much is admitted, and how much runs at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from .errors import ConfigurationError
from .values import seconds


@dataclass(frozen=True)
class Limits:
    """Limits of the app, a task or a tenant; ``None`` means unlimited (or the next wider limit).

    Attributes:
        tenant_queued: accepted jobs of a tenant that have not ended.
        tenant_running: live leases of a tenant.
        pool_running: live leases by named concurrency pool (not Celery's ``-P``).
        max_operations: recorded operations of one job.
        max_age: seconds (or a timedelta) from acceptance until a job ends by itself.
        max_attempts: runs of a job.
        tenants: limits by tenant.
    """

    tenant_queued: int | None = None
    tenant_running: int | None = None
    pool_running: Mapping[str, int] = field(default_factory=dict)
    max_operations: int | None = None
    max_age: float | timedelta | None = None
    max_attempts: int | None = None
    tenants: Mapping[str, Limits] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tenant_queued", "tenant_running", "max_operations", "max_attempts"):
            _check(name, getattr(self, name))
        for pool, value in self.pool_running.items():
            _check(f"pool_running[{pool!r}]", value)
        age = seconds(self.max_age)
        if age is not None and not age > 0:
            raise ConfigurationError(f"Limits.max_age must be greater than 0, not {self.max_age!r}")
        for tenant, limits in self.tenants.items():
            if not isinstance(limits, Limits) or limits.tenants:
                raise ConfigurationError(f"Limits.tenants[{tenant!r}] must be Limits without tenants of its own")


def _check(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ConfigurationError(f"Limits.{name} must be a whole number or None, not {value!r}")
