"""``Limits``: how much is admitted, and how much runs at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

from .errors import ConfigurationError
from .values import seconds


@dataclass(frozen=True)
class Limits:
    """Limits of the app, a task or a tenant; ``None`` means unlimited (or the next wider limit).

    Attributes:
        tenant_queued: queued jobs of a tenant, delayed ones included; an enqueue beyond it is refused. Work that was
            accepted before (a retry, a chain's next step, a job that comes back from a crash) is not refused.
        tenant_running: live leases of a tenant. A job beyond it stays queued until one ends.
        pool_running: live leases by named concurrency pool (the task option ``pool``, not Celery's ``-P``).
        max_operations: recorded operations of one job.
        max_age: seconds (or a timedelta) from acceptance until a job ends by itself.
        max_attempts: runs of a job.
        tenants: limits by tenant, which go before these.

    Raises:
        ConfigurationError: naming the limit that is wrong.
    """

    tenant_queued: int | None = None
    tenant_running: int | None = None
    pool_running: Mapping[str, int] = field(default_factory=dict)
    max_operations: int | None = None
    max_age: float | timedelta | None = None
    max_attempts: int | None = None
    tenants: Mapping[str, Limits] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tenant_queued", "tenant_running", "max_operations"):
            _check(name, getattr(self, name))
        _check("max_attempts", self.max_attempts, least=1)
        if not isinstance(self.pool_running, Mapping):
            raise ConfigurationError(f"Limits.pool_running must map pools to numbers, not {self.pool_running!r}")
        for pool, value in self.pool_running.items():
            _name("pool_running", pool)
            if value is None:
                raise ConfigurationError(f"Limits.pool_running[{pool!r}] must be a whole number; leave the pool out")
            _check(f"pool_running[{pool!r}]", value)
        age = self.max_age
        if age is not None and (
            isinstance(age, bool) or not isinstance(age, (int, float, timedelta)) or not (seconds(age) or 0) > 0
        ):
            raise ConfigurationError(f"Limits.max_age must be seconds greater than 0, not {age!r}")
        if not isinstance(self.tenants, Mapping):
            raise ConfigurationError(f"Limits.tenants must map tenants to Limits, not {self.tenants!r}")
        for tenant, limits in self.tenants.items():
            _name("tenants", tenant)
            if isinstance(limits, Mapping):
                raise ConfigurationError(f"Limits.tenants[{tenant!r}] must be Limits(...), not a mapping")
            if not isinstance(limits, Limits) or limits.tenants or limits.pool_running:
                raise ConfigurationError(
                    f"Limits.tenants[{tenant!r}] must be Limits without tenants and pools of its own"
                )

    def document(self) -> dict[str, Any]:
        """As JSON, without what says nothing; times are seconds."""
        found: dict[str, Any] = {}
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if name == "tenants":
                value = {tenant: limits.document() for tenant, limits in value.items()}
            elif name == "pool_running":
                value = dict(value)
            elif name == "max_age":
                value = seconds(value)
            if value is not None and value != {}:
                found[name] = value
        return found

    @classmethod
    def of(cls, value: Any) -> Limits:
        """Limits from Limits, or from a mapping of their arguments, tenants' limits as mappings, too.

        Raises:
            ConfigurationError: for anything else.
        """
        if isinstance(value, Mapping):
            given = dict(value)
            tenants = given.get("tenants")
            if isinstance(tenants, Mapping):
                given["tenants"] = {tenant: cls.of(limits) for tenant, limits in tenants.items()}
            try:
                value = cls(**given)
            except TypeError as exc:
                raise ConfigurationError(str(exc).replace("Limits.__init__() ", "")) from None
        if not isinstance(value, Limits):
            raise ConfigurationError(f"must be Limits(...) or a mapping of its arguments, not {value!r}")
        return value


def _name(what: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"Limits.{what} has {value!r} for a name; it must be a non-empty string")


def _check(name: str, value: Any, least: int = 0) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ConfigurationError(f"Limits.{name} must be a whole number of at least {least} or None, not {value!r}")
