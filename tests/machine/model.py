"""What the world is, apart from the database: the provider with its ledger, the clock, and who was promised what.

Plain Python that knows nothing of the statements: it judges their answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

HOUR: Final = 3600.0
TTL, DEADLINE, LAG, RETENTION, MAX_AGE = 2.5 * HOUR, 1.5 * HOUR, 1.0 * HOUR, 6.5 * HOUR, 15.2 * HOUR
"""Seconds; the clock moves by whole hours, so that no two limits ever fall together and no real second counts."""

_USUAL: Final[dict[str, Any]] = {
    "idempotent_for": None, "has_lookup": False, "if_unknown": "park", "deadline_kills": True,
}  # fmt: skip
KINDS: Final[dict[str, dict[str, Any]]] = {
    "key": {**_USUAL, "idempotent_for": RETENTION},
    "both": {**_USUAL, "idempotent_for": RETENTION, "has_lookup": True},
    "lookup": {**_USUAL, "has_lookup": True},
    "untimed": {**_USUAL, "has_lookup": True, "deadline_kills": False},
    "neither": _USUAL,
    "again": {**_USUAL, "has_lookup": True, "if_unknown": "send_again"},
}
"""What a provider can do and its effect declares; and whether a timer ends the call at its deadline."""


@dataclass
class Request:
    """One call of the provider, from when it is sent until nobody can tell any more that it may still arrive."""

    key: str
    kind: str
    deadline_at: float
    first_intent: float
    sender: Process
    dead: bool = False
    ref: str | None = None

    def may_arrive(self, now: float) -> bool:
        """Whether the network, or a sender that stood still, may still bring it to the provider.

        A provider that knows keys is promised that nothing comes when it has forgotten them: the deadline's kill.
        """
        if self.dead or self.ref is not None:
            return False
        if now < self.deadline_at:
            return True
        if KINDS[self.kind]["idempotent_for"] is not None:
            return False
        if KINDS[self.kind]["deadline_kills"]:
            return self.sender.alive
        # Nothing ended it: what it sent in its last moment is under way for as long as any request may be.
        return self.sender.died_at is None or now < self.sender.died_at + DEADLINE


@dataclass
class Process:
    """A worker's process: its name in the database, and whether it lives."""

    name: str
    died_at: float | None = None
    seen_dead: bool = False

    @property
    def alive(self) -> bool:
        """Whether it lives."""
        return self.died_at is None


@dataclass
class Provider:
    """The judge: what really happened, by key."""

    accepted: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    number: int = 0

    def accept(self, request: Request, now: float) -> str:
        """Do it, unless the key is known: then the first answer once more."""
        rows = self.accepted.setdefault(request.key, [])
        retention = KINDS[request.kind]["idempotent_for"]
        if retention is not None and rows and now < rows[-1][0] + retention:
            request.ref = rows[-1][1]
        else:
            self.number += 1
            request.ref = f"ref-{self.number}"
            rows.append((now, request.ref))
        return request.ref

    def knows(self, key: str, now: float, lagging: bool) -> str | None:
        """What a look-up finds; with a lagging index, only what is old enough."""
        rows = self.accepted.get(key, [])
        return rows[0][1] if rows and (not lagging or rows[0][0] + LAG <= now) else None


@dataclass
class Operation:
    """What was promised for one key."""

    key: str
    kind: str
    first_intent: float
    attempt: int = 0
    nonce: Any = None
    fence: int = 0
    deadline_at: float = 0.0
    absent_from: float = 0.0
    sender: Process | None = None
    gone_noted: bool = False
    absent: bool = False
    policy: int = 0

    def begin(self, nonce: Any, fence: int, now: float, sender: Process) -> None:
        """A new attempt: what was known of the one before is known no more."""
        self.attempt += 1
        self.nonce, self.fence, self.sender = nonce, fence, sender
        self.deadline_at = now + DEADLINE
        self.absent_from = self.deadline_at + LAG
        self.gone_noted = self.absent = False

    def note_gone(self, now: float) -> None:
        """Its sender is no more; where nothing ended it at its deadline, it may have sent until now."""
        if not self.gone_noted and not KINDS[self.kind]["deadline_kills"] and now >= self.deadline_at:
            self.absent_from = now + DEADLINE + LAG
        self.gone_noted = True

    @property
    def gone(self) -> bool:
        """Whether its sender was seen to be no more."""
        return self.gone_noted

    def may_be_resent(self, now: float) -> bool:
        """The resend rule: retained until a new call's deadline, the old one over, and not found."""
        options = KINDS[self.kind]
        return (
            options["idempotent_for"] is not None
            and now + DEADLINE < self.first_intent + RETENTION
            and (self.gone or now >= self.deadline_at)
            and (not options["has_lookup"] or self.absent)
        )

    def policy_allows(self, now: float) -> bool:
        """The author said: send again, once nothing else can answer."""
        return KINDS[self.kind]["if_unknown"] == "send_again" and now >= self.absent_from


@dataclass
class Job:
    """What was promised for one job."""

    id: str
    tenant: str
    key: str | None
    digest: str
    kinds: tuple[str, ...]
    pool: str | None
    expires_at: float | None
    gives_up_at: float
    fence: int = 0
    token: Any = None
    lease_until: float = 0.0
    cancelled: bool = False

    def dying(self, now: float) -> bool:
        """Past its expiry or its age."""
        return now >= min(self.gives_up_at, self.expires_at if self.expires_at is not None else self.gives_up_at)


@dataclass
class Run:
    """A worker's memory of the job that it has, or thinks that it has."""

    job: Job
    token: Any
    fence: int
    process: Process
    step: int = 0
    nonce: Any = None
    request: Request | None = None
    swallowed: bool = False

    @property
    def key(self) -> str:
        """Of the step at which it is."""
        return f"{self.job.id}:{self.step + 1}"

    def holds(self, now: float) -> bool:
        """Whether the lease is its own, and lives."""
        return self.owns() and now < self.job.lease_until

    def owns(self) -> bool:
        """Whether nobody has claimed the job since."""
        return self.job.token == self.token and self.job.fence == self.fence


@dataclass
class Question:
    """Something that a reconciler was told by a provider, and has not written down yet."""

    row: Any
    asked_at: float
    attempt: int
    ref: str | None
    answered: bool
