"""The settings: read from ``app.conf`` once, validated, passed on as one frozen value.

Also under a Django ``namespace="CELERY"`` (``CELERY_SAFE_EFFECTS_LEASE_TTL`` …): Celery strips the namespace.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Final

from .address import conninfo_from_url, quote_schema
from .errors import ConfigurationError
from .limits import Limits

PREFIX: Final = "safe_effects_"
RISKS: Final = ("fsync_off", "synchronous_commit_off", "isolation_level")
"""The doctor's findings that refuse a worker's start unless they are accepted."""
CONNECTIONS_ALONE, CONNECTIONS_SHARED = 2, 10
"""Connections of a process, one of them for its heartbeat, unless a setting says otherwise."""


@dataclass(frozen=True)
class Retention:
    """How long finished jobs stay, in seconds; ``unknown`` ones stay for ever."""

    succeeded: float = 3 * 86400.0
    failed: float = 30 * 86400.0
    cancelled: float = 30 * 86400.0


@dataclass(frozen=True)
class Config:
    """All settings. Times are seconds.

    Attributes:
        database_url: ``safe_effects_database_url``, required.
        schema: ``safe_effects_schema``.
        lease_ttl: how long a lease lives without a renewal.
        heartbeat_interval: how often leases are renewed; a third of the ttl unless given.
        sweep_interval: how often beat sends the sweep.
        reconcile_interval: how often beat sends the reconciliation.
        republish_after: when a message that waits in a worker is published again for another to take it, and one of a
            queue that the broker cannot be asked about; doubling each time. Lost messages are found earlier.
        max_attempts: runs of a job before it fails or parks.
        max_age: a job older than this is not renewed any more and ends.
        limits: default :class:`~celery_safe_effects.Limits`.
        retention, tombstone_retention: how long finished rows and their keys stay.
        statement_timeout: no statement takes longer; a client-side cancel enforces it.
        prepare: ``detected``, ``on`` or ``off``.
        queue: the queue of the sweep and the reconciliation.
        consume: whether every worker of the app consumes that queue.
        max_payload: bytes of an encoded message.
        fair: whether tenants with few queued jobs pass another's backlog.
        strict_durability: every commit waits for the disk.
        max_connections: connections a process, one of them the heartbeat's; ``None``: see :meth:`connections`.
        accept_risks: codes of :data:`RISKS` that do not refuse a worker's start.
    """

    database_url: str
    schema: str = "safe_effects"
    lease_ttl: float = 30.0
    heartbeat_interval: float = 10.0
    sweep_interval: float = 5.0
    reconcile_interval: float = 10.0
    republish_after: float = 60.0
    max_attempts: int = 5
    max_age: float = 86400.0
    limits: Limits = field(default_factory=Limits)
    retention: Retention = field(default_factory=Retention)
    tombstone_retention: float = 30 * 86400.0
    statement_timeout: float = 5.0
    prepare: str = "detected"
    queue: str = "safe_effects"
    consume: bool = True
    max_payload: int = 1_000_000
    strict_durability: bool = False
    max_connections: int | None = None
    accept_risks: tuple[str, ...] = ()
    fair: bool = True

    def connections(self, alone: bool) -> int:
        """Connections of a process for everything but the renewal of its leases, which has one of its own.

        Arguments:
            alone: whether it does one thing at a time, as a prefork child does. Elsewhere (threads, greenlets, web
                servers) connections are opened as they are needed, up to the number that this returns.
        """
        whole = self.max_connections or (CONNECTIONS_ALONE if alone else CONNECTIONS_SHARED)
        return whole - 1


def _number(key: str, value: Any, *, least: float = 0.0) -> float:
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > least:
        raise ConfigurationError(f"{key} must be a number of seconds greater than {least:g}, not {value!r}")
    return float(value)


def _count(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{key} must be a whole number of at least 1, not {value!r}")
    return value


def _connections(key: str, value: Any) -> int:
    if _count(key, value) < CONNECTIONS_ALONE:
        raise ConfigurationError(f"{key} must be at least 2, not {value!r}: one connection is the heartbeat's alone")
    return int(value)


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{key} must be True or False, not {value!r}")
    return value


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{key} must be a non-empty string, not {value!r}")
    return value


def _schema(key: str, value: Any) -> str:
    try:
        quote_schema(_text(key, value))
    except ConfigurationError as exc:
        raise ConfigurationError(f"{key}: {exc.message}") from None
    return str(value)


def _url(key: str, value: Any) -> str:
    conninfo_from_url(_text(key, value))
    return str(value)


def _prepare(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value not in ("detected", "on", "off"):
        raise ConfigurationError(f"{key} must be 'detected', 'on' or 'off', not {value!r}")
    return str(value)


def _limits(key: str, value: Any) -> Limits:
    try:
        return Limits.of(value)
    except ConfigurationError as exc:
        raise ConfigurationError(f"{key}: {exc.message}") from None


def _retention(key: str, value: Any) -> Retention:
    if isinstance(value, Retention):
        return value
    if isinstance(value, Mapping):
        unknown = set(value) - {f.name for f in fields(Retention)}
        if unknown:
            raise ConfigurationError(f"{key} has no entry {sorted(unknown)}; it knows succeeded, failed, cancelled")
        return Retention(**{name: _number(f"{key}[{name!r}]", v) for name, v in value.items()})
    raise ConfigurationError(f"{key} must be a mapping of succeeded, failed, cancelled to times, not {value!r}")


def _risks(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple, set, frozenset)) or not set(value) <= set(RISKS):
        raise ConfigurationError(f"{key} must be a list of some of {', '.join(RISKS)}, not {value!r}")
    return tuple(value)


_READERS: Final[dict[str, Callable[[str, Any], Any]]] = {
    "database_url": _url,
    "schema": _schema,
    "lease_ttl": _number,
    "heartbeat_interval": _number,
    "sweep_interval": _number,
    "reconcile_interval": _number,
    "republish_after": _number,
    "max_attempts": _count,
    "max_age": _number,
    "limits": _limits,
    "retention": _retention,
    "tombstone_retention": _number,
    "statement_timeout": _number,
    "prepare": _prepare,
    "queue": _text,
    "consume": _flag,
    "max_payload": _count,
    "strict_durability": _flag,
    "fair": _flag,
    "max_connections": _connections,
    "accept_risks": _risks,
}


def _refuse_unknown(conf: Any) -> None:
    """A misspelled setting would otherwise be taken for its default."""
    known = {PREFIX + name for name in _READERS}
    for key in conf:
        _, found, name = str(key).lower().partition(PREFIX)
        if found and PREFIX + name not in known:
            near = difflib.get_close_matches(PREFIX + name, known, n=1)
            raise ConfigurationError(
                f"there is no setting {PREFIX + name}" + (f"; did you mean {near[0]}?" if near else "")
            )


def check_protocol(conf: Any) -> None:
    """Refuse messages that cannot carry our mark.

    Raises:
        ConfigurationError: for an app that sends protocol 1.
    """
    if conf.get("task_protocol", 2) != 2:
        raise ConfigurationError(
            f"task_protocol must be 2, Celery's default, not {conf.get('task_protocol')!r}: those of protocol 1 have "
            "no headers to say which row they belong to. Workers do understand such messages of other producers"
        )


def from_conf(conf: Any) -> Config:
    """Read and validate the settings of an app.

    Arguments:
        conf: ``app.conf``, or any mapping.

    Returns:
        the validated settings.

    Raises:
        ConfigurationError: naming the first key that is missing or wrong.
    """
    _refuse_unknown(conf)
    check_protocol(conf)
    values: dict[str, Any] = {}
    for name, read in _READERS.items():
        key = PREFIX + name
        value = conf.get(key)
        if value is not None:
            values[name] = read(key, value)
    if "database_url" not in values:
        raise ConfigurationError(
            "safe_effects_database_url is not set; set app.conf.safe_effects_database_url = "
            "'postgresql+psycopg://user:password@host/name'"
        )
    values.setdefault("heartbeat_interval", values.get("lease_ttl", Config.lease_ttl) / 3)
    config = Config(**values)
    if config.heartbeat_interval > config.lease_ttl / 2:
        raise ConfigurationError(
            f"safe_effects_heartbeat_interval ({config.heartbeat_interval:g} s) must be at most half of "
            f"safe_effects_lease_ttl ({config.lease_ttl:g} s), or one late renewal loses every lease"
        )
    return config
