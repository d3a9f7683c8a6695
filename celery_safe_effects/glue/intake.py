"""In a worker's consumer: what comes before Celery decodes a message of a SafeTask.

Decoding may fail, and unpickling may do anything, up to ending the worker. So a delivery is counted against the job
before its message is read, wherever reading it may run code, and else as soon as reading it failed: a message that
nobody can read ends its job after a bounded number of deliveries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from celery.app.task import Context
from celery.exceptions import InvalidTaskError
from kombu.exceptions import ContentDisallowed, DecodeError

from .. import canonical, signals
from ..engine import tries
from ..errors import IdempotencyConflict
from ..states import TERMINAL, JobStatus
from .envelope import INERT, MARK, OPAQUE, Envelope, Mark, Raw, is_marked

if TYPE_CHECKING:
    from ..app import SafeEffects

logger = logging.getLogger(__name__)

PERSIST_AGAIN: Final = 2.0
"""Seconds until a message is looked at again whose row could not be written."""
UNREADABLE: Final = "unreadable"
ENDED: Final = frozenset(s.value for s in TERMINAL)


class Intake:
    """What a consumer does with the messages of one SafeTask.

    Arguments:
        safe: the composition root.
        consumer: Celery's.
        name: the task's.
        strategy: what Celery does with a message.
    """

    def __init__(self, safe: SafeEffects, consumer: Any, name: str, strategy: Callable[..., Any]) -> None:
        self.safe = safe
        self.consumer = consumer
        self.name = name
        self.strategy = strategy

    def __call__(self, message: Any, payload: Any, ack: Callable[..., Any], *more: Any) -> Any:
        headers = message.headers or {}
        if "task" not in headers:  # message protocol 1, which Celery has decoded already
            _check(self.name, payload.get("id"), [payload.get("args", []), payload.get("kwargs", {}), {}])
            return self.strategy(message, payload, ack, *more)
        if not canonical.is_text(headers.get("id")):
            raise _without_id(self.name, headers.get("id"))
        if is_marked(headers.get(MARK)) and Mark.of(headers[MARK]) is None:
            # Of a version that says more than this one knows. The sweep gives the job again, in this one's words.
            return self._drop(message, ack, "mark_of_another_version")
        runs_code = message.content_type not in INERT and _accepted(message)
        if runs_code and not self._has_row(message, payload, ack, *more):
            return None
        mark = Mark.of(headers.get(MARK))
        counted = mark is not None and runs_code
        if mark is not None and not self._may_read(message, mark, ack, count=counted):
            return None
        try:
            _check(self.name, headers.get("id"), message.payload)
        except InvalidTaskError as exc:
            if mark is None:
                raise  # Celery logs it and drops it: a call it never was
            return self._cannot_be_read(message, payload, ack, exc, counted, *more)
        except (ContentDisallowed, DecodeError) as exc:
            return self._cannot_be_read(message, payload, ack, exc, counted, *more)
        if counted:
            self._quietly(tries.was_read, self.safe.store, headers["id"])
        return self.strategy(message, payload, ack, *more)

    def _cannot_be_read(
        self, message: Any, payload: Any, ack: Callable[..., Any], exc: Exception, counted: bool, *more: Any
    ) -> None:
        """Another worker may read it, and if none can, its job fails."""
        if not self._has_row(message, payload, ack, *more):
            return
        mark = Mark.of(message.headers.get(MARK))
        logger.error("the message of job %s cannot be read: %r", message.headers.get("id"), exc)
        ack(logger, self.consumer.connection_errors)
        if mark is not None:
            self._quietly(self._unread, message, mark, exc, counted)

    # -- a message without a row ---------------------------------------------------------------------------------------

    def _has_row(self, message: Any, payload: Any, ack: Callable[..., Any], *more: Any) -> bool:
        """Make sure that a message has a row before anybody reads it: one from a producer without the library gets it.

        Returns:
            whether to go on with the message now.
        """
        headers = message.headers
        if is_marked(headers.get(MARK)):
            return True
        envelope = Envelope.unread(message)
        try:
            self.safe.publisher.adopt(envelope, self._actor, patience=0.0)
            row = self.safe.store.row("JOB", id=envelope.id)
        except IdempotencyConflict:
            self._drop(message, ack, "payload_differs")
            return False
        except Exception as exc:
            logger.warning("message %s waits to be persisted and stays unacknowledged: %s", envelope.id, exc)
            self.consumer.timer.call_after(PERSIST_AGAIN, lambda: self(message, payload, ack, *more))
            return False
        seq, tenant = (row.seq, row.tenant) if row is not None else (0, "")
        headers[MARK] = Mark(seq, 0, envelope.digest(""), tenant).header()
        return True

    # -- a message that is counted before it is read -------------------------------------------------------------------

    def _may_read(self, message: Any, mark: Mark, ack: Callable[..., Any], *, count: bool) -> bool:
        """Compare what only its bytes tell, and count a delivery that may run code.

        Returns:
            whether to read it. What need not be read, or was fatal too often, is acknowledged and left alone.
        """
        store, job_id = self.safe.store, str(message.headers["id"])
        why = None
        try:
            if mark.digest.startswith(OPAQUE):
                stored = store.row("STORED", id=job_id)
                if stored is not None and not Raw.stored(stored.envelope).same_as(_raw(message)):
                    self._drop(message, ack, "payload_differs")
                    return False
            if not count or tries.may_read(store, job_id):
                return True
            row = store.row("JOB", id=job_id)
            if row is None:
                parked = self.safe.publisher.park_missing(store.rows, Envelope.unread(message), mark, self._actor)
                why = "row_missing" if parked else "no_row"
                if parked:
                    self.safe.teller.unknown(*self._told(message), why)
            elif row.status in ENDED and row.settled:
                why = "finished"
            elif row.status not in ENDED and row.status != JobStatus.QUEUED:
                why = f"job_{row.status}"
        except Exception as exc:
            logger.error("job %s is left to the sweep: %s", job_id, exc)
            ack(logger, self.consumer.connection_errors)
            return False
        if why is not None:
            self._drop(message, ack, why)
            return False
        ack(logger, self.consumer.connection_errors)
        self._quietly(self._unread, message, mark, "its message, which ended each process that read it", True)
        return False

    def _unread(self, message: Any, mark: Mark, why: Exception | str, counted: bool) -> None:
        store, job_id = self.safe.store, str(message.headers["id"])
        tries.came_to_nothing(store, job_id, mark.generation, UNREADABLE, why, counted=counted, actor=self._actor)
        self.safe.teller.end(*self._told(message))

    def _told(self, message: Any) -> tuple[Any, str, Context]:
        """Of whom the teller tells: task, job id and request, as far as an unread message says."""
        job_id = str(message.headers["id"])
        request = Context(message.headers, id=job_id, task=self.name, hostname=self.consumer.hostname)
        return self.consumer.app.tasks[self.name], job_id, request

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _actor(self) -> str:
        return f"{self.safe.owner(self.consumer.hostname)}/main"

    def _drop(self, message: Any, ack: Callable[..., Any], why: str) -> None:
        job_id = message.headers.get("id")
        logger.warning("a message of job %s is refused unread: %s", job_id, why)
        ack(logger, self.consumer.connection_errors)
        self.safe.count("stale_deliveries", why)
        signals.stale_delivery.send(sender=self.name, job_id=job_id, reason=why)

    @staticmethod
    def _quietly(call: Callable[..., Any], *args: Any, **options: Any) -> None:
        """The consumer goes on, whatever ails the database; what is not written now, a later delivery writes."""
        try:
            call(*args, **options)
        except Exception:
            logger.warning("a delivery could not be counted", exc_info=True)


def _check(name: str, job_id: Any, body: Any) -> None:
    """A message made by hand may lack what Celery's consumer counts on: it would end the worker, again and again."""
    if not canonical.is_text(job_id):
        raise _without_id(name, job_id)
    if not (
        isinstance(body, (list, tuple))
        and len(body) == 3
        and isinstance(body[0], (list, tuple))
        and isinstance(body[1], Mapping)
        and isinstance(body[2] or {}, Mapping)
    ):
        raise InvalidTaskError(f"message {job_id} of {name} has a body other than [[arguments], {{keywords}}, {{...}}]")


def _without_id(name: str, found: Any) -> InvalidTaskError:
    return InvalidTaskError(f"a message of {name} has {found!r} in place of an id; it needs a non-empty string")


def _accepted(message: Any) -> bool:
    """Whether Celery would decode it at all."""
    return message.accept is None or message.content_type in message.accept


def _raw(message: Any) -> Raw:
    return Raw(message.content_type, message.content_encoding, message.body)
