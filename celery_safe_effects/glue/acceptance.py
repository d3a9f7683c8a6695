"""Acceptance: the row of a job is durable before its message is published, for one job and for thousands alike."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psycopg
from celery import current_task
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.exceptions import EncodeError

from .. import canonical, signals
from ..engine import current
from ..engine.admission import check_size
from ..engine.job import ActiveJob
from ..engine.lease import clock
from ..errors import (
    AcceptanceUnknown,
    AdmissionRejected,
    IdempotencyConflict,
    PayloadInvalid,
    PayloadTooLarge,
    SafeEffectsError,
    StoreUnavailable,
)
from ..states import TERMINAL
from ..store.enlist import Enlisted
from ..store.statements import ACCEPTED_COLUMNS
from ..values import seconds
from . import routing
from .envelope import MARK, Envelope, Mark, stamps_of
from .task import hears_of_its_end, runs_needed

if TYPE_CHECKING:
    from celery import Celery

    from ..app import SafeEffects

logger = logging.getLogger(__name__)

DEFAULT_TENANT: Final = "default"
ACCEPT_TRIES: Final = 3
LOCK_TIMEOUT: Final = "2s"
"""How long a call waits for an id or a key that another's open transaction holds."""
LOCK_TIMEOUT_OF_MANY: Final = "200ms"
"""The same in a batch, in which others wait, too."""
PATIENCE: Final = 2.0
PATIENCE_OF_MANY: Final = 0.2
PATIENCE_WITH_KEYS: Final = 5.0
"""Seconds that a batch spends on finding out which of its keys are held."""
LOCK_TIMEOUT_ENLISTED: Final = "50ms"
PATIENCE_ENLISTED: Final = 0.5
"""Inside a caller's transaction: seconds in which a call asks again for keys that are held. It does not wait for them
in the database, where another caller, that waits for this one, would be in a deadlock with it."""
ASK_AGAIN: Final = 0.05
MOST_KEYS: Final = 64
"""Keys of one call that are asked for so; each takes a place in the server's table of locks. Those of more are found to
be held by the lock's time limit."""

Run = Callable[..., list[Any]]
"""Runs a statement by its name: in a transaction of its own, in a larger one, or in a caller's."""


class Candidate(NamedTuple):
    """A message that asks for a row.

    Attributes:
        envelope: the message.
        params: what the statement ``ACCEPT`` needs to know of it.
    """

    envelope: Envelope
    params: dict[str, Any]

    @property
    def id(self) -> str:
        return self.envelope.id

    @property
    def key(self) -> tuple[str, str] | None:
        """What else is one row alone: the tenant and the idempotency key."""
        key = self.params["key"]
        return None if key is None else (self.params["tenant"], key)

    def mark(self, seq: int) -> Mark:
        return Mark(seq, 0, self.params["digest"], self.params["tenant"])


class Verdict(NamedTuple):
    """What became of a candidate.

    Attributes:
        status: ``accepted``, ``existing``, ``refused``, or ``unknown`` (the database did not say).
        job_id: the job's id; of an existing one, the id that it has had.
        seq: the row's sequence number.
        publish: whether the caller sends the message now; a later ETA waits in PostgreSQL.
        express: whether it goes into the express lane instead, as a row that is due.
        told: whether the existing job has ended, and Celery knows.
        error: why it was refused, or cannot be known.
    """

    status: str
    job_id: str
    seq: int | None = None
    publish: bool = False
    express: bool = False
    told: bool = False
    error: Exception | None = None


class Door(NamedTuple):
    """The terms on which candidates come in.

    Attributes:
        actor: who is named in the log.
        enlisted: a caller's transaction, with which they commit or vanish.
        admitted: whether it is work that was accepted before, which no limit refuses.
        due: seconds until the sweep publishes the message, unless the job was claimed; ``None``: the caller publishes
            it at once, if the verdict says so.
    """

    actor: str = "producer"
    enlisted: Enlisted | None = None
    admitted: bool = False
    due: float | None = None


class AlreadyAccepted(Exception):
    """Internal: the id or key belongs to an existing job of the same call; nothing is published."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id)
        self.job_id = job_id


class Acceptance:
    """Makes rows of messages.

    Arguments:
        safe: the composition root.
    """

    def __init__(self, safe: SafeEffects) -> None:
        self.safe = safe
        self.app: Celery = safe.app

    # -- what the statement is told ------------------------------------------------------------------------------------

    def candidate(
        self, envelope: Envelope, ours: Mapping[str, Any], *, parent: ActiveJob | None = None, limit: int | None = None
    ) -> Candidate:
        """Check and encode a message; nothing is asked of the database.

        Arguments:
            envelope: the message.
            ours: the library's own options of the call.
            parent: the job whose body sends it.
            limit: the most bytes; the setting's unless given.

        Raises:
            PayloadInvalid, PayloadTooLarge: it can never be accepted.
        """
        _check_options(ours)
        task = self.app.tasks.get(envelope.task)
        data, digest = self.encoded(envelope, limit)
        params = {
            "id": envelope.id,
            "task": envelope.task,
            "tenant": self.tenant(ours, envelope.task),
            "pool": ours.get("pool") or getattr(task, "pool", None),
            "queue": routing.lands_in(self.app, envelope.options),
            "priority": routing.priority(envelope.options),
            "key": key_of(ours.get("idempotency_key")),
            "digest": digest,
            "parent": parent.id if parent is not None else envelope.headers.get("parent_id"),
            "retries": int(envelope.headers.get("retries") or 0),
            "eta": time_of(self.app, envelope.headers.get("eta")),
            "expires": time_of(self.app, envelope.headers.get("expires")),
            "limits": self.safe.admission.given(
                {
                    **_max_attempts(ours, task, self.safe.admission.common["max_attempts"]),
                    "max_age": seconds(ours.get("max_age") or getattr(task, "max_age", None)),
                },
            ),
            "envelope": data,
            "settle": envelope.needs_settling or hears_of_its_end(task),
            "stamps": stamps_of(envelope.headers),
            "fair": self.safe.config.fair and routing.is_by_name(self.app, envelope.options),
        }
        return Candidate(envelope, params)

    def encoded(self, envelope: Envelope, limit: int | None = None) -> tuple[bytes, str]:
        """A message as its row keeps it, and the fingerprint of its call.

        Arguments:
            envelope: the message.
            limit: the most bytes; the setting's unless given.

        Raises:
            PayloadInvalid, PayloadTooLarge: it can never be accepted.
        """
        serializer = envelope.serializer or self.app.conf.task_serializer
        try:
            data = envelope.encode(serializer)
        except (EncodeError, TypeError, ValueError) as exc:
            raise PayloadInvalid(
                f"the arguments of {envelope.task} cannot be encoded as {serializer}: {exc}; nothing was enqueued"
            ) from exc
        self.must_fit(envelope.task, data, limit)
        return data, envelope.digest(serializer)

    def must_fit(self, task: str, data: bytes, limit: int | None = None) -> None:
        """Refuse a message that is too large.

        Raises:
            PayloadTooLarge: it is; the refusal is counted.
        """
        try:
            most = limit or self.safe.config.max_payload
            check_size(f"the message of {task}", len(data), most, "nothing was enqueued")
        except PayloadTooLarge as error:
            self._tell_refusals([(task, error)])
            raise

    def tenant(self, ours: Mapping[str, Any], name: str) -> str:
        """Given, else inherited from the job that sends it, else the task's, else the default."""
        task = self.app.tasks.get(name)
        return str(self.inherited(ours) or getattr(task, "tenant", None) or DEFAULT_TENANT)

    def inherited(self, ours: Mapping[str, Any]) -> str | None:
        """The tenant that a call gives or that the job at work has; ``None`` if nothing says it."""
        if ours.get("tenant"):
            return str(ours["tenant"])
        job = current.job()
        if job is not None:
            return job.tenant
        mark = Mark.of(getattr(current_task.request, MARK, None)) if current_task else None
        return mark.tenant if mark is not None else None

    # -- each for itself -----------------------------------------------------------------------------------------------

    def accept(
        self,
        candidates: Sequence[Candidate],
        door: Door | None = None,
        *,
        tries: int = ACCEPT_TRIES,
    ) -> list[Verdict]:
        """Make rows durable, each with its own verdict: none hurts another.

        Arguments:
            candidates: what asks for a row; two of one id or key are as two calls in this order.
            door: on which terms.
            tries: how often a statement is sent whose reply was lost.

        Returns:
            a verdict for each, in order.

        Raises:
            SchemaMismatch, psycopg.Error: what no candidate is to blame for.
        """
        door = door or Door()
        return self.tell(candidates, self.ask(candidates, door, tries=tries), door)

    def ask(self, candidates: Sequence[Candidate], door: Door, *, tries: int = ACCEPT_TRIES) -> list[Verdict]:
        """The database's part of :meth:`accept`, which may run beside its caller."""
        wait = LOCK_TIMEOUT if len(candidates) == 1 else LOCK_TIMEOUT_OF_MANY
        patience = PATIENCE if len(candidates) == 1 else PATIENCE_WITH_KEYS
        give_up = clock() + (patience if door.enlisted is None else PATIENCE_ENLISTED)
        return _in_order(candidates, functools.partial(self._ask, door, tries=tries, wait=wait, give_up=give_up))

    def tell(self, candidates: Sequence[Candidate], verdicts: list[Verdict], door: Door) -> list[Verdict]:
        """The rest of :meth:`accept`: signals, counters, forgotten results."""
        refused = [
            (candidate.envelope.task, verdict.error)
            for candidate, verdict in zip(candidates, verdicts, strict=True)
            if isinstance(verdict.error, AdmissionRejected)
        ]
        if refused:
            self._tell_refusals(refused)
        if door.enlisted is None:
            self.safe.announce(door.actor, *(verdict.job_id for verdict in verdicts if verdict.status == "accepted"))
            for verdict in verdicts:
                if verdict.told:
                    self._remind(verdict.job_id)
        return verdicts

    def _ask(self, door: Door, candidates: list[Candidate], *, tries: int, wait: str, give_up: float) -> list[Verdict]:
        """The accepting statement; repeated under the same ids if its reply was lost."""
        sent = False
        for attempt in range(tries):
            try:
                return self._statement(self._run(door), door, candidates, wait, sent, give_up)
            except (psycopg.errors.LockNotAvailable, psycopg.DataError) as exc:
                busy = isinstance(exc, psycopg.errors.LockNotAvailable)
                if busy and len(candidates) == 1 and door.enlisted is not None and clock() < give_up:
                    time.sleep(ASK_AGAIN)  # not for a key of another caller: a table grows, or a batch is under way
                    return self._ask(door, candidates, tries=tries, wait=wait, give_up=give_up)
                if len(candidates) == 1 or (busy and clock() >= give_up):
                    return [_refused(candidate, _blame(exc), exc) for candidate in candidates]
                # One of them cannot be stored, or waits for another's open transaction: find it, for the others' sake.
                half = len(candidates) // 2
                ask = functools.partial(self._ask, door, tries=tries, wait=wait, give_up=give_up)
                return ask(candidates[:half]) + ask(candidates[half:])
            except StoreUnavailable as exc:
                if door.enlisted is not None:
                    raise
                return [_unsaid(candidate, exc) if sent else _refused(candidate, exc) for candidate in candidates]
            except psycopg.OperationalError as exc:
                if door.enlisted is not None:
                    raise
                sent = True
                if attempt == tries - 1 or isinstance(exc, psycopg.errors.QueryCanceled):
                    return [_unsaid(candidate, exc) for candidate in candidates]
        raise AssertionError("unreachable")

    # -- all or none ---------------------------------------------------------------------------------------------------

    def accept_whole(
        self,
        candidates: Sequence[Candidate],
        door: Door | None = None,
        *,
        also: Callable[[Run, list[Verdict]], object] | None = None,
    ) -> list[Verdict]:
        """Make rows durable together; where one is refused, there is none.

        Arguments:
            candidates: what asks for a row.
            door: on which terms.
            also: writes more into the same transaction.

        Returns:
            a verdict for each, in order: ``accepted`` or ``existing``, under its own id.

        Raises:
            IdempotencyConflict, AdmissionRejected, PayloadInvalid, StoreUnavailable: nothing was written.
            AcceptanceUnknown: the database did not say; it is all or nothing nevertheless.
        """
        door = door or Door()
        sent = False
        for attempt in range(ACCEPT_TRIES):
            try:
                with self._unit(door) as run:
                    give_up = clock() + PATIENCE_ENLISTED
                    ask = functools.partial(self._statement, run, door, wait=LOCK_TIMEOUT, sent=sent, give_up=give_up)
                    found = _in_order(candidates, ask)
                    for candidate, verdict in zip(candidates, found, strict=True):
                        self._must_stand(candidate, verdict)
                    if also is not None:
                        also(run, found)
                return self.tell(candidates, found, door)
            except (psycopg.errors.LockNotAvailable, psycopg.DataError) as exc:
                busy = isinstance(exc, psycopg.errors.LockNotAvailable)
                if not busy or door.enlisted is None or attempt == ACCEPT_TRIES - 1:
                    raise _blame(exc) from exc
                time.sleep(ASK_AGAIN)
            except StoreUnavailable as exc:
                if door.enlisted is not None or not sent:
                    raise
                raise _whole_unknown(candidates, exc) from exc
            except psycopg.OperationalError as exc:
                if door.enlisted is not None:
                    raise
                sent = True
                if attempt == ACCEPT_TRIES - 1 or isinstance(exc, psycopg.errors.QueryCanceled):
                    raise _whole_unknown(candidates, exc) from exc
        raise AssertionError("unreachable")

    # -- the statement -------------------------------------------------------------------------------------------------

    def _run(self, door: Door) -> Run:
        if door.enlisted is None:
            return self.safe.store.rows
        return functools.partial(self.safe.store.enlisted_rows, door.enlisted)

    @contextlib.contextmanager
    def _unit(self, door: Door) -> Iterator[Run]:
        if door.enlisted is None:
            with self.safe.store.transaction() as run:
                yield run
        else:
            with door.enlisted.whole():
                yield self._run(door)

    def _statement(
        self, run: Run, door: Door, candidates: list[Candidate], wait: str, sent: bool, give_up: float
    ) -> list[Verdict]:
        """One row or many in one statement; then, only for those that it did not take, why."""
        busy, _ = self._busy(run, candidates, give_up) if door.enlisted is not None else (set(), False)
        free = [candidate for candidate in candidates if candidate.id not in busy]
        found = iter(self._taken(run, door, free, wait, sent, give_up) if free else ())
        return [_refused(one, _key_is_busy()) if one.id in busy else next(found) for one in candidates]

    @staticmethod
    def _busy(run: Run, candidates: list[Candidate], give_up: float) -> tuple[set[str], bool]:
        """Whose keys another caller's transaction holds, asked until it is time to give up; and whether any was."""
        asked = [candidate for candidate in candidates if candidate.key is not None]
        again = False
        while asked and len(asked) <= MOST_KEYS:
            columns = {name: [candidate.params[name] for candidate in asked] for name in ("tenant", "key")}
            ours = {row.n for row in run("TAKE_KEYS", **columns)}
            asked = [candidate for n, candidate in enumerate(asked) if n not in ours]
            if not asked or clock() >= give_up:
                return {candidate.id for candidate in asked}, again
            again = True
            time.sleep(ASK_AGAIN)
        return set(), again

    def _taken(
        self, run: Run, door: Door, candidates: list[Candidate], wait: str, sent: bool, give_up: float,
        last: bool = False,
    ) -> list[Verdict]:  # fmt: skip
        config = self.safe.config
        once = {
            "actor": door.actor,
            "admitted": door.admitted,
            "enlisted": door.enlisted is not None,
            "patience": wait if door.enlisted is None else LOCK_TIMEOUT_ENLISTED,
            "lead": config.sweep_interval,
            # An enlisted job is due as soon as its commit makes it visible.
            "due": door.due if door.enlisted is None else 0.0,
        }
        if len(candidates) == 1:
            rows = run("ACCEPT", **candidates[0].params, **once)
        else:
            rows = run("ACCEPT_MANY", **_columns(candidates), **once)
        accepted = {row.id: row for row in rows}
        others = [candidate for candidate in candidates if candidate.id not in accepted]
        holders = self._holders(run, others) if others else {}
        unheld = [candidate for candidate in others if candidate.id not in holders]
        if unheld and door.enlisted is None and len(candidates) == 1:
            # The last of a batch waits no longer than the rest of it.
            until = give_up if wait == LOCK_TIMEOUT else min(give_up, clock() + PATIENCE_OF_MANY)
            busy, again = self._busy(run, unheld, until)
            if busy:
                return [_refused(unheld[0], _key_is_busy())]
            if again or (not last and unheld[0].key is not None and not self._is_full(unheld[0], door)):
                # Whoever held it has ended, meanwhile or just now.
                return self._taken(run, door, candidates, wait, sent, give_up, last=not again)
        if unheld and door.enlisted is not None and not door.admitted:
            free = self.safe.admission.reserve([candidate.params for candidate in unheld])
            kept = _columns([candidate for candidate in unheld if candidate.id in free])
            if free:
                try:
                    rows = run("ACCEPT_RESERVED", **kept, **once)
                except psycopg.Error:
                    self.safe.admission.release(free)
                    raise
                accepted.update((row.id, row) for row in rows)
                # Another's transaction may have held the key, and have ended since.
                late = [candidate for candidate in unheld if candidate.id in free and candidate.id not in accepted]
                holders.update(self._holders(run, late) if late else {})
        verdicts = []
        refusals: dict[str, Exception | None] = {}
        for candidate in candidates:
            row, holder = accepted.get(candidate.id), holders.get(candidate.id)
            if row is not None:
                verdicts.append(Verdict("accepted", candidate.id, row.seq, row.publish, row.express))
            elif holder is not None:
                verdicts.append(_held(candidate, holder, sent))
            else:
                verdicts.append(_refused(candidate, self._why(candidate, door, refusals)))
        return verdicts

    def _is_full(self, candidate: Candidate, door: Door) -> bool:
        refusal = None if door.admitted else self.safe.admission.refusal(candidate.params)
        return refusal is not None and (refusal.current or 0) >= (refusal.limit or 0)

    def _holders(self, run: Run, candidates: list[Candidate]) -> dict[str, Any]:
        columns = {name: [candidate.params[name] for candidate in candidates] for name in ("id", "tenant", "key")}
        try:
            rows = run("HOLDERS", **columns)
        except StoreUnavailable:
            return {}  # the others are accepted, which must not be lost
        return {candidates[row.n].id: row for row in rows}

    def _why(self, candidate: Candidate, door: Door, known: dict[str, Exception | None]) -> Exception:
        """Why the statement took nothing, though nobody holds the id or the key."""
        tenant = candidate.params["tenant"]
        if tenant not in known:
            known[tenant] = None if door.admitted else self.safe.admission.refusal(candidate.params)
        return known[tenant] or StoreUnavailable("the key is being taken or released at this very moment; try again")

    def holder(self, tenant: str, key: str | None, job_id: str = "") -> Any:
        """Who holds an idempotency key, or an id; ``None`` if nobody does."""
        return self.safe.store.row("HOLDERS", id=[job_id], tenant=[tenant], key=[key])

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def _tell_refusals(self, refused: list[tuple[str, AdmissionRejected]]) -> None:
        for reason, times in Counter(error.reason for _, error in refused).items():
            self.safe.count("admission_refusals", reason, times)
        for task, error in refused:
            signals.admission_rejected.send(sender=task, error=error)

    def _must_stand(self, candidate: Candidate, verdict: Verdict) -> None:
        """In a whole, every member stands under the id by which the others know it."""
        if isinstance(verdict.error, AdmissionRejected):
            self._tell_refusals([(candidate.envelope.task, verdict.error)])
        if verdict.error is not None:
            raise verdict.error
        if verdict.job_id != candidate.id:
            raise IdempotencyConflict(
                f"idempotency key {candidate.params['key']!r} belongs to job {verdict.job_id}, which is no member of "
                "this canvas; nothing was enqueued: to find a canvas again, give idempotency_key= to the canvas itself",
                job_id=verdict.job_id,
            )

    def _remind(self, job_id: str) -> None:
        """The backend may have forgotten a finished job's result: deliver its end once more."""
        try:
            if self.safe.publisher.results.are_forgotten(job_id):
                self.safe.store.rows("REMIND", id=job_id)
        except Exception:
            logger.debug("the result of job %s could not be checked", job_id, exc_info=True)


def _in_order(candidates: Sequence[Candidate], ask: Callable[[list[Candidate]], list[Verdict]]) -> list[Verdict]:
    """Ask for all at once, but for the second of one id or key only after the first."""
    if len(candidates) == 1:
        return ask(list(candidates))
    verdicts: dict[int, Verdict] = {}
    waiting = list(enumerate(candidates))
    while waiting:
        now: list[tuple[int, Candidate]] = []
        later: list[tuple[int, Candidate]] = []
        seen: set[Any] = set()
        for place, candidate in waiting:
            names = {candidate.id, candidate.key} - {None}
            (later if names & seen else now).append((place, candidate))
            seen |= names
        found = ask([candidate for _, candidate in now])
        verdicts.update(zip((place for place, _ in now), found, strict=True))
        waiting = later
    return [verdicts[place] for place in range(len(candidates))]


def _columns(candidates: Sequence[Candidate]) -> dict[str, list[Any]]:
    return {name: [candidate.params[name] for candidate in candidates] for name in ACCEPTED_COLUMNS}


def _held(candidate: Candidate, holder: Any, sent: bool) -> Verdict:
    """The id or the key has a row already: the same call's, or another's."""
    params = candidate.params
    if holder.task != params["task"] or holder.args_digest != params["digest"]:
        what = f"idempotency key {params['key']!r}" if params["key"] and holder.id != params["id"] else "task id"
        error = IdempotencyConflict(
            f"{what} belongs to job {holder.id} ({holder.task}, {holder.status}) with another task or other "
            "arguments; that job is unchanged, and nothing was enqueued",
            job_id=holder.id,
        )
        return _refused(candidate, error)
    if sent and holder.id == candidate.id and holder.seq is not None:
        return Verdict("accepted", holder.id, holder.seq, True)  # the first try got through; only its reply was lost
    over = holder.status in {s.value for s in TERMINAL} and holder.settled and holder.seq is not None
    return Verdict("existing", holder.id, told=over)


def _refused(candidate: Candidate, error: Exception, cause: BaseException | None = None) -> Verdict:
    if cause is not None:
        error.__cause__ = cause
    return Verdict("refused", candidate.id, error=error)


def _unsaid(candidate: Candidate, exc: BaseException) -> Verdict:
    error = acceptance_unknown(candidate.id, exc)
    error.__cause__ = exc
    return Verdict("unknown", candidate.id, error=error)


def acceptance_unknown(job_id: str, exc: BaseException) -> AcceptanceUnknown:
    """The error of a call that the database has not answered."""
    return AcceptanceUnknown(
        f"the database did not confirm job {job_id} ({str(exc).strip()}); enqueue again with task_id={job_id!r} "
        "or the same idempotency key: if it was accepted, the same job is returned",
        job_id=job_id,
    )


def _whole_unknown(candidates: Sequence[Candidate], exc: BaseException) -> AcceptanceUnknown:
    return AcceptanceUnknown(
        f"the database did not confirm the canvas ({str(exc).strip()}); all of it was accepted, or nothing: "
        "apply it again under the same idempotency key of the canvas, and an accepted one is found",
        job_id=candidates[0].id if candidates else "",
    )


def _key_is_busy() -> AdmissionRejected:
    return AdmissionRejected(
        "the idempotency key or task id (in a batch: or one that was asked for together with it) is held by a "
        "transaction that has not ended; nothing was enqueued: try again when it has",
        reason="idempotency_key_busy",
        retry_after=1.0,
    )


def _blame(exc: psycopg.Error) -> SafeEffectsError:
    """What an error of the accepting statement says of its candidate, or of one of its candidates."""
    if isinstance(exc, psycopg.errors.LockNotAvailable):
        return _key_is_busy()
    return PayloadInvalid(f"the database cannot store the job: {str(exc).strip()}; nothing was enqueued")


def key_of(key: Any) -> str | None:
    """A checked idempotency key.

    Raises:
        PayloadInvalid: it is none.
    """
    if key is None:
        return None
    if not canonical.is_text(key):
        raise PayloadInvalid(f"idempotency_key must be a non-empty string, not {key!r}; nothing was enqueued")
    return str(key)


def _check_options(ours: Mapping[str, Any]) -> None:
    """Refuse options of ours that mean nothing, by name, before anything is written."""

    def bad(name: str, what: str) -> PayloadInvalid:
        return PayloadInvalid(f"{name} must be {what}, not {ours[name]!r}; nothing was enqueued")

    for name in ("tenant", "pool"):
        value = ours.get(name)
        if value is not None and not canonical.is_text(value):
            raise bad(name, "a non-empty string")
    attempts = ours.get("max_attempts")
    if attempts is not None and (isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1):
        raise bad("max_attempts", "a whole number of at least 1")
    age = seconds(ours.get("max_age"))
    if age is not None and (isinstance(age, bool) or not isinstance(age, (int, float)) or not age > 0):
        raise bad("max_age", "a number of seconds greater than 0")


def _max_attempts(ours: Mapping[str, Any], task: Any, default: int) -> dict[str, Any]:
    """Explicit, and then no retry gets more; else enough for the task's own ``max_retries``, else the setting."""
    given = ours.get("max_attempts") or getattr(task, "max_attempts", None)
    if given:
        return {"max_attempts": int(given), "attempts_fixed": True}
    return {"max_attempts": max(default, (runs_needed(task) if task is not None else None) or 0)}


def time_of(app: Celery, value: Any) -> datetime | None:
    """A time of a message.

    Raises:
        PayloadInvalid: it is none.
    """
    if value is None:
        return None
    try:
        found = maybe_iso8601(value)
        return maybe_make_aware(found, app.timezone if not app.conf.enable_utc else None)  # type: ignore[no-any-return]
    except (TypeError, ValueError, AttributeError) as exc:
        raise PayloadInvalid(f"{value!r} is not a time ({exc}); nothing was enqueued") from exc
