"""The way out: every task message passes here, and the row of a safe one is durable before it is published."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import psycopg
from celery import current_task, states
from celery.result import EagerResult
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.exceptions import EncodeError
from kombu.exceptions import OperationalError as BrokerError

from .. import canonical, signals
from ..engine import current
from ..engine.job import ActiveJob
from ..engine.lease import clock
from ..errors import (
    AcceptanceUnknown,
    AdmissionRejected,
    IdempotencyConflict,
    PayloadInvalid,
    PayloadTooLarge,
    ReplayMismatch,
    SafeEffectsError,
    SchemaMismatch,
    StoreUnavailable,
)
from ..states import TERMINAL, UNKNOWN_STATE
from ..store.enlist import Enlisted, enlist
from ..values import seconds
from .envelope import MARK, Envelope, Mark, arguments_digest, routing_options, with_stable_ids
from .task import OURS, SafeTask

if TYPE_CHECKING:
    from celery import Celery

    from ..app import SafeEffects

logger = logging.getLogger(__name__)

DEFAULT_TENANT: Final = "default"
UNBOUNDED_ATTEMPTS: Final = 2**31 - 1
ACCEPT_TRIES: Final = 3
KNOWN_FOR: Final = 30.0
"""Seconds for which a task name that no worker has declared is taken for a plain one."""


class _AlreadyAccepted(Exception):
    """Internal: the id or key belongs to an existing job; nothing is published."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id)
        self.job_id = job_id


EAGER_STATES: Final = {
    "succeeded": states.SUCCESS,
    "failed": states.FAILURE,
    "cancelled": states.REVOKED,
    "running": states.STARTED,
    "unknown": UNKNOWN_STATE,
}
"""What a job's status is in Celery's words."""

_publishing_as_is: ContextVar[bool] = ContextVar("safe_effects_as_is", default=False)


@contextlib.contextmanager
def as_is() -> Iterator[None]:
    """Within this block, messages are published without a row being written: they have one."""
    token = _publishing_as_is.set(True)
    try:
        yield
    finally:
        _publishing_as_is.reset(token)


class Publisher:
    """Wraps an app's sending of task messages.

    Arguments:
        safe: the composition root.
    """

    def __init__(self, safe: SafeEffects) -> None:
        self.safe = safe
        self.app: Celery = safe.app
        self._known: dict[str, tuple[bool, float]] = {}

    # -- installation --------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Wrap ``app.send_task`` and ``app.amqp.send_task_message``, whichever of them exist already."""
        _derive_canvas_ids()
        app = self.app
        send_task = app.send_task

        def safe_send_task(name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
            return self.send_task(send_task, name, args, kwargs, options)

        app.send_task = safe_send_task
        original_cls = app.amqp_cls
        publisher = self

        from celery.utils.imports import symbol_by_name
        from kombu.utils.objects import cached_property

        base: Any = symbol_by_name(original_cls) if isinstance(original_cls, str) else original_cls

        class SafeAMQP(base):
            @cached_property
            def send_task_message(self) -> Callable[..., Any]:
                return publisher.wrap(base._create_task_sender(self))

        app.amqp_cls = SafeAMQP
        existing = app.__dict__.get("amqp")
        if existing is not None:
            existing.send_task_message = self.wrap(existing._create_task_sender())

    def wrap(self, send: Callable[..., Any]) -> Callable[..., Any]:
        """The wrapped ``send_task_message``."""
        self.send_as_is = send

        def send_task_message(producer: Any, name: str, message: Any, **options: Any) -> Any:
            return self.send_task_message(send, producer, name, message, options)

        return send_task_message

    # -- from app.send_task to the row ---------------------------------------------------------------------------------

    def send_task(self, send: Callable[..., Any], name: str, args: Any, kwargs: Any, options: dict[str, Any]) -> Any:
        """``app.send_task`` with ids that a replay finds again, and existing jobs in place of new ones."""
        job = current.job()
        if job is not None and options.get("task_id") != job.id:
            job.pass_over()
            if not options.get("task_id"):
                options["task_id"] = job.child_id()
        try:
            return send(name, args, kwargs, **options)
        except IdempotencyConflict as exc:
            if job is None or exc.job_id != options.get("task_id"):
                raise
            job.mismatch = ReplayMismatch(
                f"message {job.children} of job {job.id} went out with another task or arguments before; the body "
                "must send the same messages each time it runs",
                job_id=job.id,
            )
            raise job.mismatch from exc
        except _AlreadyAccepted as found:
            result_cls = options.get("result_cls") or self.app.AsyncResult
            result = result_cls(found.job_id)
            if not options.get("ignore_result") and options.get("add_to_parent", True):
                parent = current_task
                if parent and getattr(parent, "request", None) is not None and parent.request.id:
                    parent.add_trail(result)
            return result

    def is_safe(self, name: str) -> bool:
        """Whether a task of this name is a SafeTask: registered here, or known to the database from a worker."""
        task = self.app.tasks.get(name)
        if task is not None:
            return isinstance(task, SafeTask)
        known, until = self._known.get(name, (False, 0.0))
        if not known and clock() >= until:
            try:
                row = self.safe.store.row("KNOWN_TASK", name=name)
                known = bool(row and row[0])
            except (SafeEffectsError, psycopg.Error):
                logger.debug("whether %s is a SafeTask could not be asked", name, exc_info=True)
            self._known[name] = (known, clock() + KNOWN_FOR)
        return known

    def send_task_message(
        self, send: Callable[..., Any], producer: Any, name: str, message: Any, options: dict[str, Any]
    ) -> Any:
        """Write the row of a safe message, then publish it."""
        ours: dict[str, Any] = {key: options.pop(key) for key in OURS if key in options}
        transaction = options.pop("transaction", None)
        if _publishing_as_is.get() or not isinstance(message[2], tuple):
            return send(producer, name, message, **options)
        job = current.job()
        own = job is not None and job.id == message[0]["id"]
        if not (own or ours.get("idempotency_key") or transaction is not None or self.is_safe(name)):
            return send(producer, name, message, **options)
        headers, properties, body, sent_event = message
        extra = options.pop("headers", None)
        if extra:
            headers.update(extra)
        options.pop("expiration", None)  # the database judges expiry; a hint has no time to live
        body = with_stable_ids(headers["id"], body)
        envelope = Envelope(
            {key: value for key, value in headers.items() if key != MARK}, properties, body, routing_options(options)
        )
        if own and job is not None:
            # A retry, or a replacement: written when the body has unwound, with the end of this run.
            job.outgoing = envelope
            return None
        enlisted = enlist(transaction) if transaction is not None else None
        try:
            seq, publish, digest = self.accept(envelope, ours, parent=job, enlisted=enlisted, admitted=_continues(job))
        except AdmissionRejected as exc:
            self.safe.count("admission_refusals", exc.reason)
            signals.admission_rejected.send(sender=name, error=exc)
            raise
        if enlisted is not None:
            # The row says who is due; rolled back, with a savepoint or as a whole, it says nothing.
            enlisted.after_commit(functools.partial(self.deliver_now, envelope.id))
            return None
        mark = Mark(seq, 0, digest, self._tenant(ours, name))
        if not publish:
            return None
        marked = envelope.marked(mark, eta=_time(self.app, envelope.headers.get("eta")))
        return self._publish(send, producer, name, (marked.headers, properties, body, sent_event), options, envelope.id)

    def _publish(
        self, send: Callable[..., Any], producer: Any, name: str, message: Any, options: dict[str, Any], job_id: str
    ) -> Any:
        try:
            return send(producer, name, message, **options)
        except (BrokerError, OSError) as exc:
            # Accepted is accepted: the message is only a hint, and the sweeper will give it again.
            logger.warning("job %s is accepted, but its message could not be published: %r", job_id, exc)
            self.soon(job_id)
            return None

    def soon(self, *job_ids: str) -> None:
        """Ask the sweeper to publish messages soon; losing this costs only time."""
        try:
            self.safe.store.rows("PUBLISH_SOON", ids=list(job_ids))
        except (StoreUnavailable, psycopg.Error):
            logger.debug("%d jobs wait for their republication", len(job_ids), exc_info=True)

    def _tenant(self, ours: dict[str, Any], name: str) -> str:
        """Given, else inherited from the job that sends it, else the task's, else the default."""
        if ours.get("tenant"):
            return str(ours["tenant"])
        job = current.job()
        if job is not None:
            return job.tenant
        sender = current_task
        if sender:
            mark = Mark.of(getattr(sender.request, MARK, None))
            if mark is not None:
                return mark.tenant
        task = self.app.tasks.get(name)
        return str(getattr(task, "tenant", None) or DEFAULT_TENANT)

    def accept(
        self,
        envelope: Envelope,
        ours: dict[str, Any],
        *,
        parent: ActiveJob | None = None,
        actor: str = "producer",
        limit: int | None = None,
        enlisted: Enlisted | None = None,
        tries: int = ACCEPT_TRIES,
        admitted: bool = False,
    ) -> tuple[int, bool, str]:
        """Make a job's row durable.

        Returns:
            its sequence number, whether its message goes out now (a later ETA waits in PostgreSQL), and its digest.

        Raises:
            PayloadInvalid, AdmissionRejected, IdempotencyConflict, StoreUnavailable: nothing was written.
            AcceptanceUnknown: the database did not say.

        Arguments:
            admitted: whether it is work that was accepted before, which no limit refuses.
        """
        config = self.safe.config
        _check_options(ours)
        task = self.app.tasks.get(envelope.task)
        serializer = envelope.options.get("serializer") or self.app.conf.task_serializer
        try:
            data = envelope.encode(serializer)
        except (EncodeError, TypeError, ValueError) as exc:
            raise PayloadInvalid(
                f"the arguments of {envelope.task} cannot be encoded as {serializer}: {exc}; nothing was enqueued"
            ) from exc
        if len(data) > (limit or config.max_payload):
            raise PayloadTooLarge(
                f"the message of {envelope.task} is {len(data)} bytes, more than safe_effects_max_payload "
                f"({config.max_payload}); nothing was enqueued: pass a reference instead of the data",
                reason="payload_too_large",
                limit=config.max_payload,
                current=len(data),
            )
        digest = envelope.digest(data)
        tenant = self._tenant(ours, envelope.task)
        params = {
            "id": envelope.id,
            "task": envelope.task,
            "tenant": tenant,
            "pool": ours.get("pool") or getattr(task, "pool", None),
            "queue": _queue_name(self.app, envelope.options),
            "key": _key(ours.get("idempotency_key"), envelope.headers),
            "digest": digest,
            "parent": parent.id if parent is not None else envelope.headers.get("parent_id"),
            "retries": int(envelope.headers.get("retries") or 0),
            "eta": _time(self.app, envelope.headers.get("eta")),
            "expires": _time(self.app, envelope.headers.get("expires")),
            "limits": self.safe.admission.given(
                {
                    "max_attempts": _max_attempts(ours, task, self.safe.admission.common["max_attempts"]),
                    "max_age": seconds(ours.get("max_age") or getattr(task, "max_age", None)),
                },
            ),
            "admitted": admitted,
            "enlisted": enlisted is not None,
            "envelope": data,
            "settle": envelope.needs_settling,
            "actor": actor,
            "lead": config.sweep_interval,
            # An enlisted job is due as soon as its commit makes it visible.
            "republish": config.republish_after if enlisted is None else 0.0,
        }
        row = self._insert(params, tries) if enlisted is None else self._insert_enlisted(enlisted, params)
        if row is not None:
            self.safe.announce(actor, envelope.id)
            return row.seq, row.publish, digest
        raise self._not_accepted(params, enlisted)

    def adopt(
        self,
        envelope: Envelope,
        owner: str,
        patience: float = float("inf"),
        ours: dict[str, Any] | None = None,
    ) -> None:
        """Persist a message whose producer wrote no row; an existing row of the same call is fine.

        Raises:
            IdempotencyConflict: the id belongs to another call.
            StoreUnavailable, AcceptanceUnknown: after ``patience`` seconds.
        """
        give_up = clock() + patience
        while True:
            try:
                # It is in the broker already: a size limit would only lose it.
                self.accept(
                    envelope,
                    ours or {},
                    actor=owner,
                    limit=sys.maxsize,
                    admitted=True,
                    tries=1 if patience == 0 else ACCEPT_TRIES,
                )
            except _AlreadyAccepted:
                return
            except (StoreUnavailable, AcceptanceUnknown, AdmissionRejected, SchemaMismatch, psycopg.Error) as exc:
                if clock() >= give_up:
                    raise
                logger.warning("message %s waits to be persisted: %s", envelope.id, exc)
                time.sleep(min(1.0, patience))
            else:
                return

    def eager_result(self, task: Any, args: Any, kwargs: Any, ours: dict[str, Any]) -> EagerResult | None:
        """The result of the job that holds an idempotency key already, for a call that would run at once.

        Raises:
            IdempotencyConflict: the key belongs to another call.
        """
        key = _key(ours.get("idempotency_key"), {})
        if key is None:
            return None
        holder = self.safe.store.row("HOLDER", id="", tenant=self._tenant(ours, task.name), key=key)
        if holder is None:
            return None
        if holder.task != task.name or holder.args_digest != arguments_digest(task.name, args, kwargs):
            raise IdempotencyConflict(
                f"idempotency key {key!r} belongs to job {holder.id} ({holder.task}, {holder.status}) with another "
                "task or other arguments; nothing was run",
                job_id=holder.id,
            )
        row = self.safe.store.row("JOB", id=holder.id)
        result = canonical.decode(row.result) if row is not None else None
        return EagerResult(holder.id, result, EAGER_STATES.get(holder.status, states.PENDING), name=task.name)

    def _insert(self, params: dict[str, Any], tries: int) -> Any:
        """The accepting statement; repeated under the same id if its reply was lost."""
        sent = False
        for attempt in range(tries):
            try:
                row = self.safe.store.row("ACCEPT", **params)
                if row is None and sent:
                    holder = self.safe.store.row("HOLDER", id=params["id"], tenant=params["tenant"], key=params["key"])
                    if holder is not None and holder.id == params["id"] and holder.args_digest == params["digest"]:
                        return _Accepted(holder.seq, True)  # the first try got through; only its reply was lost
                return row
            except psycopg.errors.LockNotAvailable as exc:
                raise _key_busy(params) from exc
            except StoreUnavailable as exc:
                if not sent:
                    raise
                raise self._acceptance_unknown(params["id"], exc) from exc
            except psycopg.OperationalError as exc:
                sent = True
                if attempt == tries - 1 or isinstance(exc, psycopg.errors.QueryCanceled):
                    raise self._acceptance_unknown(params["id"], exc) from exc
            except psycopg.DataError as exc:
                raise PayloadInvalid(
                    f"the database cannot store the job: {str(exc).strip()}; nothing was enqueued"
                ) from exc
        raise AssertionError("unreachable")

    def _acceptance_unknown(self, job_id: str, exc: BaseException) -> AcceptanceUnknown:
        return AcceptanceUnknown(
            f"the database did not confirm job {job_id} ({str(exc).strip()}); enqueue again with task_id={job_id!r} "
            "or the same idempotency key: if it was accepted, the same job is returned",
            job_id=job_id,
        )

    def _insert_enlisted(self, enlisted: Enlisted, params: dict[str, Any]) -> Any:
        try:
            rows = self.safe.store.enlisted_rows(enlisted, "ACCEPT", **params)
            if not rows and self._holder(params, enlisted) is None and self.safe.admission.reserve(params):
                rows = self.safe.store.enlisted_rows(enlisted, "ACCEPT_RESERVED", **params)
        except psycopg.errors.LockNotAvailable as exc:
            raise _key_busy(params) from exc
        except psycopg.DataError as exc:
            raise PayloadInvalid(f"the job cannot be stored: {str(exc).strip()}; nothing was enqueued") from exc
        return rows[0] if rows else None

    def _holder(self, params: dict[str, Any], enlisted: Enlisted | None) -> Any:
        keys = {name: params[name] for name in ("id", "tenant", "key")}
        if enlisted is None:
            return self.safe.store.row("HOLDER", **keys)
        return next(iter(self.safe.store.enlisted_rows(enlisted, "HOLDER", **keys)), None)

    def _not_accepted(self, params: dict[str, Any], enlisted: Enlisted | None) -> Exception:
        """Why the accepting statement took nothing: a job holds the id or the key, or a limit is reached."""
        holder = self._holder(params, enlisted)
        if holder is None:
            refused = None if params["admitted"] else self.safe.admission.refusal(params)
            return refused or StoreUnavailable("the key is being taken or released at this very moment; try again")
        if holder.task != params["task"] or holder.args_digest != params["digest"]:
            what = f"idempotency key {params['key']!r}" if params["key"] and holder.id != params["id"] else "task id"
            return IdempotencyConflict(
                f"{what} belongs to job {holder.id} ({holder.task}, {holder.status}) with another task or other "
                "arguments; that job is unchanged, and nothing was enqueued",
                job_id=holder.id,
            )
        if (
            enlisted is None
            and holder.status in {s.value for s in TERMINAL}
            and holder.settled
            and holder.seq is not None
        ):
            self._refresh_result(holder.id)
        return _AlreadyAccepted(holder.id)

    def _refresh_result(self, job_id: str) -> None:
        """The backend may have forgotten a finished job's result: deliver its end once more."""
        try:
            if self.app.backend.get_state(job_id) == states.PENDING and not self._ignores(job_id):
                self.safe.store.rows("UNSETTLE", id=job_id)
        except Exception:
            logger.debug("the result of job %s could not be checked", job_id, exc_info=True)

    def _ignores(self, job_id: str) -> bool:
        row = self.safe.store.row("JOB", id=job_id)
        return row is None or not row.settle

    # -- from the row to the broker ------------------------------------------------------------------------------------

    def deliver(self, rows: list[Any]) -> int:
        """Publish stored envelopes; the rows already say when to try next.

        Returns:
            how many were published: fewer than given when the broker could not be reached, and the rest is due again.
        """
        for done, row in enumerate(rows):
            try:
                self._deliver(row)
            except (BrokerError, OSError) as exc:
                logger.warning("publishing job %s and %d more is put off: %r", row.id, len(rows) - done - 1, exc)
                self.soon(*(later.id for later in rows[done:]))
                return done
            except Exception:
                logger.exception("publishing job %s failed", row.id)
        return len(rows)

    def _deliver(self, row: Any) -> None:
        stored = Envelope.decode(row.envelope, self.app.conf.accept_content)
        mark = Mark(row.seq, row.generation, row.args_digest, row.tenant)
        envelope = stored.marked(mark, eta=row.run_after, retries=row.retries)
        options = dict(envelope.options)
        if options.get("exchange") == "" or not options.get("exchange"):
            options.pop("exchange", None)
        _ = self.app.amqp.send_task_message  # made at its first use, when wrap() learns the original
        with self.app.producer_pool.acquire(block=True) as producer, as_is():
            self.send_as_is(producer, row.task, (envelope.headers, envelope.properties, envelope.body, None), **options)

    def send_envelope(self, envelope: Envelope) -> None:
        """Publish a message that is none of ours: the plain replacement of a job that has ended."""
        message = (envelope.headers, envelope.properties, envelope.body, None)
        _ = self.app.amqp.send_task_message
        with self.app.producer_pool.acquire(block=True) as producer:
            self.send_as_is(producer, envelope.task, message, **envelope.options)

    def deliver_woken(self, slots: list[str]) -> None:
        """Publish who was woken for slots that have just become free; the sweep would, too, a little later."""
        try:
            woken = [row.id for row in self.safe.store.rows("WOKEN", scopes=slots)]
        except (StoreUnavailable, psycopg.Error):
            logger.warning("publishing who waits for %s is left to the sweeper", ", ".join(slots), exc_info=True)
            return
        if woken:
            self.deliver_now(*woken)

    def deliver_now(self, *job_ids: str) -> int:
        """Publish what is due of these jobs, a little ahead of its time if need be."""
        config = self.safe.config
        try:
            rows = self.safe.store.rows(
                "DUE",
                ids=list(job_ids),
                limit=len(job_ids),
                ahead=config.sweep_interval,
                settle_tries=self.safe.SETTLE_TRIES,
                republish=config.republish_after,
            )
        except (StoreUnavailable, psycopg.Error):
            logger.warning("publishing %s is left to the sweeper", ", ".join(job_ids), exc_info=True)
            return 0
        return self.deliver(rows)


def _derive_canvas_ids() -> None:
    """Groups, chains and chords that a job's body makes get ids that follow from the job, as its single messages do.

    Celery's canvas takes every id from one function of its module and offers no other place to give them.
    """
    from celery import canvas

    original = canvas.uuid
    if getattr(original, "_safe_effects", False):
        return

    def uuid(*args: Any, **kwargs: Any) -> str:
        job = current.job()
        return job.child_id() if job is not None else original(*args, **kwargs)

    uuid._safe_effects = True  # type: ignore[attr-defined]
    canvas.uuid = uuid


def _continues(job: ActiveJob | None) -> bool:
    """Whether Celery sends this after a job's end: the continuation of work that was accepted with it."""
    sender = current_task
    if job is not None or not isinstance(sender and sender._get_current_object(), SafeTask):
        return False
    return bool(sender.request.id and not sender.request.called_directly)


def _key_busy(params: dict[str, Any]) -> AdmissionRejected:
    return AdmissionRejected(
        f"idempotency key {params['key']!r} (or task id) is held by a transaction that has not ended; nothing was "
        "enqueued: try again when it has",
        reason="idempotency_key_busy",
        retry_after=1.0,
    )


class _Accepted:
    def __init__(self, seq: int, publish: bool) -> None:
        self.seq = seq
        self.publish = publish


def _key(key: Any, headers: Mapping[str, Any]) -> str | None:
    """The idempotency key; a key given to a group names the canvas, and its members get ``<key>:<index>``."""
    if key is None:
        return None
    if isinstance(key, str) and key and headers.get("group") and headers.get("group_index") is not None:
        key = f"{key}:{headers['group_index']}"
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


def _max_attempts(ours: dict[str, Any], task: Any, default: int) -> int:
    """Explicit, else enough for a ``max_retries`` that the task sets itself, else the setting."""
    given = ours.get("max_attempts") or getattr(task, "max_attempts", None)
    if given:
        return int(given)
    if task is None:
        return default
    if not any("max_retries" in vars(cls) for cls in type(task).__mro__ if not cls.__module__.startswith("celery.")):
        return default  # Celery's own default says nothing about this task
    return UNBOUNDED_ATTEMPTS if task.max_retries is None else max(default, int(task.max_retries) + 1)


def _time(app: Celery, value: Any) -> datetime | None:
    if value is None:
        return None
    try:
        found = maybe_iso8601(value)
        return maybe_make_aware(found, app.timezone if not app.conf.enable_utc else None)  # type: ignore[no-any-return]
    except (TypeError, ValueError, AttributeError) as exc:
        raise PayloadInvalid(f"{value!r} is not a time ({exc}); nothing was enqueued") from exc


def _queue_name(app: Celery, options: dict[str, Any]) -> str | None:
    queue = options.get("queue")
    if queue is None and not options.get("exchange"):
        queue = app.conf.task_default_queue
    return str(queue) if queue else str(options.get("routing_key") or "") or None


__all__ = ["Publisher", "as_is"]
