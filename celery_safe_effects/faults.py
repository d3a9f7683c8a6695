"""Fault points: named places at every boundary of the protocol where a test can crash, stop, delay or fail a process.

Off, which they are unless :func:`arm` was called or the environment says so, a point is one look at one attribute of
this module: ``if faults.armed is not None``. Nothing here runs then.

A boundary has two points, one before and one after it: a commit, a message, an acknowledgement, a call of a provider or
of a lookup, a run of user code, what Celery is told. What happens at the point after a commit happens to a process that
has the answer in its hands; ``raise`` there is a lost answer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal, get_args

from .errors import ConfigurationError

logger = logging.getLogger(__name__)

VARIABLE: Final = "SAFE_EFFECTS_FAULTS"
"""The environment variable that arms a process: a plan as JSON."""
TICK: Final = 0.02
"""Seconds between two looks of ``wait``."""


class Point(str, Enum):
    """Every fault point. A boundary's two points are ``<boundary>.before`` and ``<boundary>.after``."""

    BEFORE_ACCEPT, AFTER_ACCEPT = "accept.before", "accept.after"
    BEFORE_RESERVE, AFTER_RESERVE = "reserve.before", "reserve.after"
    BEFORE_DUE, AFTER_DUE = "due.before", "due.after"
    BEFORE_OUTBOX, AFTER_OUTBOX = "outbox.before", "outbox.after"
    BEFORE_PUBLISH, AFTER_PUBLISH = "publish.before", "publish.after"
    BEFORE_ACK, AFTER_ACK = "ack.before", "ack.after"
    BEFORE_READING, AFTER_READING = "reading.before", "reading.after"
    BEFORE_CLAIM, AFTER_CLAIM = "claim.before", "claim.after"
    BEFORE_BODY, AFTER_BODY = "body.before", "body.after"
    BEFORE_INTENT, AFTER_INTENT = "intent.before", "intent.after"
    BEFORE_CALL, AFTER_CALL = "call.before", "call.after"
    BEFORE_OUTCOME, AFTER_OUTCOME = "outcome.before", "outcome.after"
    BEFORE_EVIDENCE, AFTER_EVIDENCE = "evidence.before", "evidence.after"
    BEFORE_PROGRESS, AFTER_PROGRESS = "progress.before", "progress.after"
    BEFORE_CHECKPOINT, AFTER_CHECKPOINT = "checkpoint.before", "checkpoint.after"
    BEFORE_RENEW, AFTER_RENEW = "renew.before", "renew.after"
    BEFORE_PENDING, AFTER_PENDING = "pending.before", "pending.after"
    BEFORE_LEAVE, AFTER_LEAVE = "leave.before", "leave.after"
    BEFORE_LOST, AFTER_LOST = "lost.before", "lost.after"
    BEFORE_TELL, AFTER_TELL = "tell.before", "tell.after"
    BEFORE_TELL_AGAIN, AFTER_TELL_AGAIN = "tell_again.before", "tell_again.after"
    BEFORE_SETTLE, AFTER_SETTLE = "settle.before", "settle.after"
    BEFORE_CHORD, AFTER_CHORD = "chord.before", "chord.after"
    BEFORE_SWEEP, AFTER_SWEEP = "sweep.before", "sweep.after"
    BEFORE_SWEEP_LEASES, AFTER_SWEEP_LEASES = "sweep_leases.before", "sweep_leases.after"
    BEFORE_SWEEP_DYING, AFTER_SWEEP_DYING = "sweep_dying.before", "sweep_dying.after"
    BEFORE_GONE, AFTER_GONE = "gone.before", "gone.after"
    BEFORE_WAKE, AFTER_WAKE = "wake.before", "wake.after"
    BEFORE_LOOK, AFTER_LOOK = "look.before", "look.after"
    BEFORE_RECONCILE, AFTER_RECONCILE = "reconcile.before", "reconcile.after"
    BEFORE_RECONCILE_CLAIM, AFTER_RECONCILE_CLAIM = "reconcile_claim.before", "reconcile_claim.after"
    BEFORE_LOOKUP, AFTER_LOOKUP = "lookup.before", "lookup.after"
    BEFORE_VERDICT, AFTER_VERDICT = "verdict.before", "verdict.after"
    BEFORE_RESUME, AFTER_RESUME = "resume.before", "resume.after"
    BEFORE_ASK_AGAIN, AFTER_ASK_AGAIN = "ask_again.before", "ask_again.after"
    BEFORE_CANCEL, AFTER_CANCEL = "cancel.before", "cancel.after"
    BEFORE_RETRY, AFTER_RETRY = "retry.before", "retry.after"
    BEFORE_RESTORE, AFTER_RESTORE = "restore.before", "restore.after"
    BEFORE_PRUNE, AFTER_PRUNE = "prune.before", "prune.after"

    def __str__(self) -> str:
        return str(self.value)


_COMMITS: Final = {
    "ACCEPT": "ACCEPT ACCEPT_MANY ACCEPT_RESERVED",
    "RESERVE": "RESERVE UNRESERVE REAP_RESERVATIONS",
    "DUE": "DUE ASTRAY PUBLISH_SOON REPUBLISH REPUBLISH_LANES",
    "OUTBOX": "POST POST_DUE POSTED",
    "READING": "READING READ UNREAD",
    "CLAIM": "CLAIM CLAIM_BODY",
    "INTENT": "INTENT INTENT_REPEATABLE",
    "OUTCOME": "OUTCOME OUTCOME_ASYNC",
    "EVIDENCE": "LATE_OUTCOME",
    "PROGRESS": "WENT_ON MORE_ATTEMPTS",
    "CHECKPOINT": "CHECKPOINT",
    "RENEW": "RENEW",
    "PENDING": "BODY_PENDING",
    "LEAVE": "LEAVE",
    "LOST": "LOST",
    "TELL_AGAIN": "TELL UNSETTLE REMIND",
    "SETTLE": "SETTLE",
    "CHORD": "CHORD CHORD_ADD CHORD_OUTCOME CHORD_DONE CHORDS_DUE CHORD_GIVEN_UP",
    "SWEEP_LEASES": "SWEEP_LEASES",
    "SWEEP_DYING": "SWEEP_DYING",
    "GONE": "GONE",
    "WAKE": "WAKE_FREE PROMOTE WOKEN",
    "LOOK": "LOOKS LOOK",
    "RECONCILE_CLAIM": "RECONCILE_DUE",
    "VERDICT": "VERDICT",
    "RESUME": "RESUME",
    "ASK_AGAIN": "ASK_AT ABSENT POLICY",
    "CANCEL": "CANCEL REVOKE REVOKE_STAMPED",
    "RETRY": "RETRY",
    "RESTORE": "NEW_EPOCH PARK_RESTORED INSERT_MISSING",
    "PRUNE": "PRUNE PRUNE_LOG PRUNE_TOMBSTONES PRUNE_CHORDS",
}
COMMITS: Final[dict[str, tuple[Point, Point]]] = {
    statement: (Point[f"BEFORE_{boundary}"], Point[f"AFTER_{boundary}"])
    for boundary, statements in _COMMITS.items()
    for statement in statements.split()
}
"""The points before and after each statement that decides something about a job; reads and counters have none."""
_BOOKKEEPING: Final = (
    "COUNT FOLD EXPRESS HELD MAINTENANCE_BEGIN MAINTENANCE_END WORKER_SEEN WORKER_STOPPED WORKER_PAUSED STAND_IN WATCH"
    " LEARN_TASKS UNLEARN_TASKS SET_LIMITS"
)
BOOKKEEPING: Final = frozenset(_BOOKKEEPING.split())
"""Statements that write and have no points: nothing that they write decides about a job."""

Action = Literal["crash", "pause", "wait", "delay", "raise"]
Role = Literal["producer", "main", "child", "beat", "sweeper"]
ACTIONS: Final = get_args(Action)
ROLES: Final = get_args(Role)


class InjectedFault(ConnectionError):
    """What ``raise`` raises; at a statement it becomes psycopg's error of a lost connection."""


@dataclass(frozen=True)
class Fault:
    """What happens at a point.

    Arguments:
        point: where.
        action: ``crash`` (SIGKILL to itself), ``pause`` (SIGSTOP to itself), ``wait`` (until the file ``until``
            exists), ``delay`` (``seconds``) or ``raise`` (:class:`InjectedFault`).
        role: only in a process of this role; ``sweeper`` is whoever sweeps or reconciles at that moment.
        job: only for this job, by its id.
        step: only for this step.
        on: at the n-th pass that fits, from 1.
        times: for so many passes from there on; 0 for all.
        seconds: of ``delay``.
        until: of ``wait``: a file's path.
        parent: of ``crash`` in a worker's child: the worker's main process is killed first.
    """

    point: Point
    action: Action = "crash"
    role: Role | None = None
    job: str | None = None
    step: str | None = None
    on: int = 1
    times: int = 1
    seconds: float = 0.0
    until: str | None = None
    parent: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "point", Point(self.point))
        if self.action not in ACTIONS:
            raise ValueError(f"action must be one of {', '.join(ACTIONS)}, not {self.action!r}")
        if self.role is not None and self.role not in ROLES:
            raise ValueError(f"role must be one of {', '.join(ROLES)}, not {self.role!r}")
        if self.action == "wait" and not self.until:
            raise ValueError("wait needs until=, the path of a file")
        if self.on < 1 or self.times < 0:
            raise ValueError("on is at least 1, and times at least 0")

    def __str__(self) -> str:
        only = [f"{name}={getattr(self, name)}" for name in ("role", "job", "step") if getattr(self, name)]
        return " ".join([self.action, "at", str(self.point), *only, f"pass {self.on}"])


@dataclass(frozen=True)
class Pass:
    """One pass of a point, as a plan records it."""

    point: Point
    role: str
    pid: int
    jobs: tuple[str, ...] = ()
    step: str | None = None


@dataclass
class Plan:
    """The faults of a process, or of several that share a folder.

    Arguments:
        faults: what happens where.
        folder: passes are counted here, over all processes and restarts that are given the same folder; without it,
            each process counts its own.
        record: whether each pass is written to the folder, for :meth:`passes`.
    """

    faults: Sequence[Fault] = ()
    folder: Path | None = None
    record: bool = False
    _counts: Counter[int] = field(default_factory=Counter, repr=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """A plan as :meth:`to_json` writes it.

        Raises:
            ConfigurationError: saying what is wrong with it.
        """
        try:
            given = json.loads(text)
            faults = tuple(Fault(**one) for one in given.pop("faults", ()))
            folder = given.pop("folder", None)
            made = cls(faults, Path(folder) if folder else None, bool(given.pop("record", False)))
            if given:
                raise ValueError(f"there is nothing called {', '.join(given)}")
        except (AttributeError, TypeError, ValueError) as exc:
            raise ConfigurationError(f"{VARIABLE} is no plan of faults: {exc}") from exc
        return made

    def to_json(self) -> str:
        """The plan as the environment variable carries it."""
        folder = None if self.folder is None else str(self.folder)
        return json.dumps({"faults": [asdict(one) for one in self.faults], "folder": folder, "record": self.record})

    def environment(self) -> dict[str, str]:
        """What arms a process that is started with it."""
        return {VARIABLE: self.to_json()}

    def prepare(self) -> None:
        """Make the folder, for processes that are to share it."""
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)

    def passes(self) -> list[Pass]:
        """What was recorded in the folder, oldest first."""
        if self.folder is None or not (self.folder / "passes").exists():
            return []
        rows = [json.loads(line) for line in (self.folder / "passes").read_text().splitlines()]
        return [Pass(Point(r["point"]), r["role"], r["pid"], tuple(r["jobs"]), r["step"]) for r in rows]

    def happened(self) -> list[Fault]:
        """The faults whose pass has come, as far as a folder counts them."""
        return [one for n, one in enumerate(self.faults) if self._counted(n) >= one.on]

    def pass_by(self, point: Point, jobs: Sequence[str], step: str | None) -> None:
        """A process passes a point."""
        role = role_here()
        if self.record:
            _append(self._file("passes"), json.dumps(vars(Pass(point, role, os.getpid(), tuple(jobs), step))) + "\n")
        for number, fault in enumerate(self.faults):
            if fault.point is not point or (fault.role and fault.role != role):
                continue
            if (fault.job and fault.job not in jobs) or (fault.step and fault.step != step):
                continue
            passed = self._count(number)
            if passed >= fault.on and (fault.times == 0 or passed < fault.on + fault.times):
                act(fault)

    def _file(self, name: str) -> Path:
        if self.folder is None:
            raise ConfigurationError("a plan that records its passes needs a folder")
        return self.folder / name

    def _count(self, number: int) -> int:
        if self.folder is None:
            self._counts[number] += 1
            return self._counts[number]
        return _append(self._file(f"fault-{number}"), ".")

    def _counted(self, number: int) -> int:
        if self.folder is None:
            return self._counts[number]
        path = self._file(f"fault-{number}")
        return path.stat().st_size if path.exists() else 0


armed: Plan | None = None
"""The plan; ``None``, unless somebody wants faults."""
_process: tuple[int, str] = (0, "producer")
_acting = threading.local()


def arm(plan: Plan) -> None:
    """Arm this process, and those that it forks from now on.

    Arguments:
        plan: what happens where.
    """
    global armed  # noqa: PLW0603
    plan.prepare()
    armed = plan
    warn()


def disarm() -> None:
    """No fault happens in this process any more."""
    global armed  # noqa: PLW0603
    armed = None


def arm_from_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Arm this process if the environment says so, once; an armed one says so again.

    Raises:
        ConfigurationError: when what it says is no plan.
    """
    text = environment.get(VARIABLE)
    if text and armed is None:
        arm(Plan.from_json(text))
    else:
        warn()


def warn() -> None:
    """Say loudly that this process is armed."""
    if armed is not None:
        what = "; ".join(map(str, armed.faults)) or "passes are recorded"
        logger.critical("FAULT POINTS ARE ARMED in process %d, for tests alone: %s", os.getpid(), what)


def enter(role: Role) -> None:
    """Say what this process is; those that it forks are a worker's children.

    Arguments:
        role: what.
    """
    global _process  # noqa: PLW0603
    _process = (os.getpid(), role)


def role_here() -> str:
    """What this process is, and this thread of it."""
    found = getattr(_acting, "role", None)
    if found is not None:
        return str(found)
    pid, role = _process
    return "child" if role == "main" and pid != os.getpid() else role


@contextlib.contextmanager
def acting(role: Role) -> Iterator[None]:
    """Within, this thread is of another role."""
    before = getattr(_acting, "role", None)
    _acting.role = role
    try:
        yield
    finally:
        _acting.role = before


def at(point: Point, job: str | Sequence[str] = (), step: str | None = None) -> None:
    """Pass a point; called where :data:`armed` is set.

    Arguments:
        point: which.
        job: the job's id, or several.
        step: the step.
    """
    if armed is not None:
        armed.pass_by(point, (job,) if isinstance(job, str) else job, step)


def before(statement: str, params: Mapping[str, Any]) -> None:
    """A statement is about to be sent, or a transaction with it about to be committed."""
    points = COMMITS.get(statement)
    if points is not None:
        at(points[0], *_about(params))


def after(statement: str, params: Mapping[str, Any]) -> None:
    """A statement's answer is here, or its transaction is committed."""
    points = COMMITS.get(statement)
    if points is not None:
        at(points[1], *_about(params))


def _about(params: Mapping[str, Any]) -> tuple[tuple[str, ...], str | None]:
    """The jobs, and the step, that a statement's values speak of."""
    jobs: list[str] = []
    for name in ("id", "job", "ids", "member"):
        value = params.get(name)
        jobs += [value] if isinstance(value, str) else [one for one in value or () if isinstance(one, str)]
    step, key = params.get("step"), params.get("key")
    if step is None and isinstance(key, str) and any(key.startswith(f"{job}:") for job in jobs):
        step = key.rpartition(":")[2]
    return tuple(jobs), step


def act(fault: Fault) -> None:
    """Do what a fault says.

    Raises:
        InjectedFault: for ``raise``.
    """
    # Written at once, since a logger's lines may die with the process.
    os.write(2, f"FAULT in process {os.getpid()}: {fault}\n".encode())
    if fault.action == "crash":
        if fault.parent and role_here() == "child":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # the signal is on its way
    elif fault.action == "pause":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.action == "wait":
        while not Path(str(fault.until)).exists():
            time.sleep(TICK)
    elif fault.action == "delay":
        time.sleep(fault.seconds)
    else:
        raise InjectedFault(f"injected: {fault}")


def _append(path: Path, text: str) -> int:
    """Append to a file that several processes share; returns its size then."""
    import fcntl

    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, text.encode())
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
