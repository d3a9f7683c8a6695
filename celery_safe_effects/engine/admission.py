"""Admission: what is accepted, and which limits apply. The database decides; this module asks it, and says why not.

Limits that are stored with ``set_limits`` go before those of the settings, a tenant's before the task's, the task's
before everybody's. Exact under any number of callers: the database counts under a lock of the tenant or pool, which is
never held as long as a caller's transaction is open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import psycopg

from .. import canonical
from ..errors import AdmissionRejected, ConfigurationError, PayloadTooLarge, SafeEffectsError
from ..limits import Limits
from ..store.hot import Row, Store

LAPSE: Final = 15.0
"""Seconds until a place in a queue lapses that was kept for a caller's transaction which never used it."""
RETRY_AFTER: Final = 1.0
"""Seconds after which a refused caller may ask again; nothing tells when another job will start."""
REMEMBERED: Final = 1000
"""Documents of limits that a process keeps encoded; most calls have the same."""
TASK_LIMITS: Final = frozenset({"max_attempts", "max_age", "max_operations"})

OPERATIONS_LIMIT: Final = "operations_limit"
TENANT_QUEUE_LIMIT: Final = "tenant_queue_limit"


@dataclass(frozen=True)
class StoredLimits:
    """Limits of one scope, as ``set_limits`` stored them.

    Attributes:
        scope: ``*``, ``tenant:<name>``, ``task:<name>`` or ``pool:<name>``.
        limits: the limits by name; a pool's is ``pool_running``.
        updated_at, updated_by: when, and by whom.
    """

    scope: str
    limits: dict[str, Any]
    updated_at: datetime
    updated_by: str


@dataclass(frozen=True)
class LimitInUse:
    """A limit, and what stands against it now.

    Attributes:
        scope: ``*`` (every tenant, each on its own), ``tenant:<name>``, ``task:<name>`` or ``pool:<name>``.
        limit: its name in :class:`~celery_safe_effects.Limits`.
        value: the limit; times are seconds.
        current: queued or running jobs now; for ``*`` those of the tenant that has most; ``None`` where a limit is of
            one job.
        source: ``stored`` or ``settings``.
    """

    scope: str
    limit: str
    value: float
    current: int | None
    source: str


class Admission:
    """The door of one database.

    Arguments:
        store: the database.
        limits: the settings' limits.
        defaults: what applies where nothing else says anything: ``max_attempts``, ``max_age``.
    """

    def __init__(self, store: Store, limits: Limits, defaults: Mapping[str, Any]) -> None:
        self.store = store
        self.common: dict[str, Any] = {**defaults, **limits.document()}
        """What applies where neither task nor tenant nor a stored limit says anything."""
        self._given: dict[tuple[Any, ...], str] = {}

    def given(self, *narrower: Mapping[str, Any]) -> str:
        """The caller's side of the limits, as the statements take it.

        Arguments:
            narrower: limits of the task, then of the call; absent or ``None`` values say nothing.

        Returns:
            a JSON document; stored limits and the tenant's own go before it in the database.
        """
        said = tuple((name, value) for limits in narrower for name, value in limits.items() if value is not None)
        found = self._given.get(said)
        if found is None:
            if len(self._given) > REMEMBERED:
                self._given.clear()
            found = self._given[said] = canonical.encode({**self.common, **dict(said)})
        return found

    def running(self, narrower: Mapping[str, Any]) -> str | None:
        """The same for a claim, where only slots and operations matter; ``None`` without any."""
        found = {name: value for name, value in self.common.items() if name not in ("max_attempts", "max_age")}
        found.update({name: value for name, value in narrower.items() if value is not None})
        return canonical.encode(found) if found else None

    def reserve(self, wanted: Sequence[Mapping[str, Any]]) -> set[str]:
        """Keep places in tenants' queues for jobs that a caller's transaction is about to insert.

        Arguments:
            wanted: what the accepting statement is told of each.

        Returns:
            the ids of those that got one.
        """
        columns = {name: [one[name] for one in wanted] for name in ("id", "tenant", "task", "key", "limits")}
        return {row.job_id for row in self.store.rows("RESERVE", lapse=LAPSE, **columns)}

    def release(self, ids: Collection[str]) -> None:
        """Give back places that were kept in vain; losing this costs them until they lapse."""
        with contextlib.suppress(SafeEffectsError, psycopg.Error):
            self.store.rows("UNRESERVE", ids=list(ids))

    def store_limits(self, limits: Limits | None, *, tenant: str | None, task: str | None, actor: str) -> None:
        """Store the limits of a scope, or remove them.

        Raises:
            ConfigurationError: for limits that mean nothing in that scope; nothing was stored.
        """
        if limits is not None and not isinstance(limits, Limits):
            raise ConfigurationError(f"set_limits takes Limits(...) or None, not {limits!r}; nothing was stored")
        for what, name in (("tenant", tenant), ("task", task)):
            if name is not None and not canonical.is_text(name):
                raise ConfigurationError(f"{what} must be a non-empty string, not {name!r}; nothing was stored")
        if tenant is not None and task is not None:
            raise ConfigurationError("set_limits takes a tenant or a task, not both; nothing was stored")
        scope = f"tenant:{tenant}" if tenant is not None else f"task:{task}" if task is not None else "*"
        found = {} if limits is None else limits.document()
        tenants, pools = found.pop("tenants", {}), found.pop("pool_running", {})
        if scope != "*" and (tenants or pools):
            raise ConfigurationError(f"limits of {scope} cannot hold tenants or pools of their own; nothing was stored")
        if task is not None and not set(found) <= TASK_LIMITS:
            raise ConfigurationError(
                f"limits of a task are {', '.join(sorted(TASK_LIMITS))}, not {', '.join(sorted(found))}; nothing was "
                "stored"
            )
        scopes = {scope: found or None}
        scopes |= {f"tenant:{name}": value or None for name, value in tenants.items()}
        # "pool" is what limits_for() calls the limit of the pool at hand.
        scopes |= {f"pool:{name}": {"pool": value} for name, value in pools.items()}
        self._write(scopes, actor, everything=scope == "*" and limits is None)

    def _write(self, scopes: Mapping[str, Any], actor: str, *, everything: bool = False) -> None:
        values = [None if value is None else canonical.encode(value) for value in scopes.values()]
        self.store.rows("SET_LIMITS", scopes=list(scopes), values=values, actor=actor, all=everything)

    def change(self, scope: str, changed: Mapping[str, Any], *, clear: bool, actor: str) -> None:
        """Change single limits of a stored scope, or remove the scope (``*``: everything).

        Raises:
            ConfigurationError: for limits that mean nothing in that scope; nothing was stored.
        """
        kind, _, name = scope.partition(":")
        if clear:
            self._write({scope: None}, actor, everything=scope == "*")
        elif kind == "pool":
            value = changed["pool_running"]
            Limits(pool_running={name: value})  # refuses what is no limit
            self._write({scope: {"pool": value}}, actor)
        else:
            now = next((stored.limits for stored in self.stored() if stored.scope == scope), {})
            self.store_limits(
                Limits(**{**now, **changed}),
                tenant=name if kind == "tenant" else None,
                task=name if kind == "task" else None,
                actor=actor,
            )

    def stored(self) -> list[StoredLimits]:
        """What is stored, by scope."""
        found = []
        for row in self.store.rows("LIMITS"):
            value = canonical.decode(row.value)
            if row.scope.startswith("pool:"):
                value = {"pool_running": value["pool"]}
            found.append(StoredLimits(row.scope, value, row.updated_at, row.updated_by))
        return found

    def in_use(self) -> list[LimitInUse]:
        """Every limit that is set, stored ones before the settings', and what stands against it now."""
        in_force = self.in_force()
        counted = any(limit.endswith(("_queued", "_running")) for _, limit, _, _ in in_force)
        use = {(row.kind, row.name): row for row in (self.store.rows("USE") if counted else ())}
        tenants = {name: row for (kind, name), row in use.items() if kind == "tenant"}
        found = []
        for scope, limit, value, source in in_force:
            kind, _, name = scope.partition(":")
            current: int | None = None
            if limit in ("tenant_queued", "tenant_running"):
                column = limit.removeprefix("tenant_")
                rows = [tenants.get(name)] if kind == "tenant" else list(tenants.values())
                current = max((getattr(row, column) for row in rows if row is not None), default=0)
            elif limit == "pool_running":
                row = use.get(("pool", name))
                current = row.running if row is not None else 0
            found.append(LimitInUse(scope, limit, value, current, source))
        return found

    def on_jobs(self) -> list[tuple[str, str, float]]:
        """The limits of queued and running jobs that are set, as scope, name and value."""
        wanted = {"tenant_queued", "tenant_running", "pool_running"}
        return [(scope, limit, value) for scope, limit, value, _ in self.in_force() if limit in wanted]

    def in_force(self) -> list[tuple[str, str, float, str]]:
        """Scope, name, value and source of every limit that is set; stored ones hide the settings'."""
        found: dict[tuple[str, str], tuple[str, str, float, str]] = {}

        def add(scope: str, limits: Mapping[str, Any], source: str) -> None:
            for limit, value in limits.items():
                if not (limit in ("tenants", "pool_running") and isinstance(value, Mapping)):
                    found.setdefault((scope, limit), (scope, limit, value, source))

        for stored in self.stored():
            add(stored.scope, stored.limits, "stored")
        add("*", self.common, "settings")
        for name, limits in self.common.get("tenants", {}).items():
            add(f"tenant:{name}", limits, "settings")
        for name, value in self.common.get("pool_running", {}).items():
            add(f"pool:{name}", {"pool_running": value}, "settings")
        return sorted(found.values())

    def refusal(self, params: Mapping[str, Any]) -> AdmissionRejected | None:
        """Why the accepting statement took nothing, if a limit is the reason."""
        row: Row = self.store.rows("QUEUED", **{name: params[name] for name in ("tenant", "task", "limits")})[0]
        if row.most is None:
            return None
        return AdmissionRejected(
            f"tenant {params['tenant']!r} has {row.taken} jobs queued, and may have {row.most}; nothing was enqueued: "
            "try again when some have started, or raise the limit with set_limits",
            reason=TENANT_QUEUE_LIMIT,
            limit=row.most,
            current=row.taken,
            retry_after=RETRY_AFTER,
        )


def check_size(what: str, size: int, most: int, nothing: str) -> None:
    """Refuse arguments that are larger than the setting allows: a row and a message are no place for data.

    Arguments:
        what: whose arguments.
        size, most: bytes.
        nothing: what was not done.

    Raises:
        PayloadTooLarge: they are larger.
    """
    if size > most:
        raise PayloadTooLarge(
            f"{what} is {size} bytes, more than safe_effects_max_payload ({most}); {nothing}: pass a reference instead "
            "of the data",
            reason="payload_too_large",
            limit=most,
            current=size,
        )


def too_many_operations(job_id: str, limit: int, current: int) -> AdmissionRejected:
    """The error of an effect that its job has no operation left for."""
    return AdmissionRejected(
        f"job {job_id} has recorded {current} operations, and may have {limit} (max_operations); nothing was recorded "
        "or called",
        reason=OPERATIONS_LIMIT,
        limit=limit,
        current=current,
    )
