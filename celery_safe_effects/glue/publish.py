"""The way out: every task message passes here, and the row of a safe one is durable before it is published."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import psycopg
from celery import current_task
from celery.utils.saferepr import saferepr
from celery.utils.time import maybe_make_aware
from kombu.exceptions import ChannelError, EncodeError

from .. import faults
from ..config import check_protocol
from ..engine import current
from ..engine.job import ActiveJob
from ..engine.lease import clock
from ..engine.republish import Depth, in_order
from ..errors import (
    AcceptanceUnknown,
    AdmissionRejected,
    ConfigurationError,
    IdempotencyConflict,
    PayloadInvalid,
    ReplayMismatch,
    SafeEffectsError,
)
from ..faults import Point
from ..states import JobStatus
from ..store.enlist import enlist
from ..store.hot import STORE_ERRORS
from . import canvas, chords, errbacks, mapped, routing
from .acceptance import ACCEPT_TRIES, Acceptance, AlreadyAccepted, Candidate, Door, Run, Verdict, time_of
from .batch import Batch, Gathered, gathering, stored
from .continuations import UNLOCK, Continuations
from .envelope import MARK, OPAQUE, Envelope, Mark, Raw
from .results import Results, restore_header
from .task import OURS, SafeTask
from .wire import BATCH, LATER, Message, Wire

if TYPE_CHECKING:
    from celery import Celery

    from ..app import SafeEffects

logger = logging.getLogger(__name__)

KNOWN_FOR: Final = 30.0
"""Seconds for which a task name that no worker has declared is taken for a plain one."""


_eta: ContextVar[str | None] = ContextVar("safe_effects_eta", default=None)
"""The time of the message that is being made, which Celery must not see: on quorum queues it would send the message
through its own delays, and the row's time is what counts."""


class _NotHandedOver(Exception):
    """Internal: the job did not end; nothing goes on in its place."""


class Publisher:
    """Wraps an app's sending of task messages.

    Arguments:
        safe: the composition root.
    """

    def __init__(self, safe: SafeEffects) -> None:
        self.safe = safe
        self.app: Celery = safe.app
        self.acceptance = Acceptance(safe)
        self.wire = Wire(safe.app)
        self.chords = chords.Chords(self)
        self.results = Results(self.app)
        self._known: dict[str, tuple[bool, float]] = {}
        self.celerys_send_task: Any = None
        """``app.send_task`` as it was."""

    # -- installation --------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Wrap ``app.send_task`` and ``app.amqp.send_task_message``, whichever of them exist already."""
        canvas.install()
        chords.install()
        errbacks.install()
        app = self.app
        send_task = self.celerys_send_task = app.send_task

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
        self.wire.send = send

        def send_task_message(producer: Any, name: str, message: Any, **options: Any) -> Any:
            return self.send_task_message(send, producer, name, message, options)

        return send_task_message

    # -- from app.send_task to the row ---------------------------------------------------------------------------------

    def send_task(self, send: Callable[..., Any], name: str, args: Any, kwargs: Any, options: dict[str, Any]) -> Any:
        """``app.send_task`` with ids that a replay finds again, and existing jobs in place of new ones."""
        instead = mapped.rewritten(self.app, name, kwargs)
        if instead is not None:
            name, args, kwargs = *instead, {}
            options["task_type"] = self.app.tasks[name]
        job = current.job()
        if job is not None and options.get("task_id") != job.id:
            job.pass_over()
            if not options.get("task_id"):
                options["task_id"] = job.child_id(_own_name(options))
        own = job is not None and options.get("task_id") == job.id
        taken = own or options.get("idempotency_key") or self.is_safe(name)
        scope = _eta.set(_taken_eta(self.app, options) if taken else None)
        try:
            if not taken:
                return send(name, args, kwargs, **options)
            return self.results.send(send, name, args, kwargs, options, reply=not own)
        except IdempotencyConflict as exc:
            raise in_a_body(exc, options.get("task_id")) from exc
        except AlreadyAccepted as found:
            result = self.results.of(found.job_id, options.get("result_cls"))
            if not options.get("ignore_result") and options.get("add_to_parent", True):
                parent = current_task
                if parent and getattr(parent, "request", None) is not None and parent.request.id:
                    parent.add_trail(result)
            return result
        finally:
            _eta.reset(scope)

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
        producer = None if producer is LATER else producer
        ours: dict[str, Any] = {key: options.pop(key) for key in OURS if key in options}
        transaction = options.pop("transaction", None)
        restore_header(message[0])
        if not isinstance(message[2], tuple):
            if ours or transaction is not None or self.is_safe(name):
                check_protocol(self.app.conf)
            with self.app.producer_or_acquire(producer) as found:
                return send(found, name, message, **options)
        headers, properties, body, sent_event = message
        job, batch = current.job(), gathering()
        if batch is not None and batch.tenant is not None:
            ours.setdefault("tenant", batch.tenant)
        own = job is not None and job.id == headers["id"]
        if not own and not self._takes(name, ours):
            body = self._definite(name, headers, body, self.acceptance.inherited(ours))
            hint = Message(name, (headers, properties, body, sent_event), options)
            return self._plain(send, producer, hint, transaction)
        eta = _eta.get()
        if eta is not None:
            headers["eta"] = eta
            if sent_event:
                sent_event["eta"] = eta
        extra = options.pop("headers", None)
        if extra:
            headers.update(extra)
        self._veil(name, headers, body, sent_event)
        self.safe.hooks.tracing.sends(headers, current_task.request if own else None)
        for said in ("expiration", "argsrepr", "kwargsrepr"):
            options.pop(said, None)  # the database judges expiry; the others are in the headers
        body = self._definite(name, headers, body, self.acceptance.tenant(ours, name))
        envelope = Envelope(
            {key: value for key, value in headers.items() if key != MARK},
            properties,
            body,
            routing.kept(self.app, options),
        )
        if own and job is not None:
            # A retry, or a replacement: written when the body has unwound, with the end of this run.
            job.outgoing = envelope
            return None
        if options.get("exchange") and not options.get("declare"):
            options["declare"] = routing.leads_to(self.app, envelope.options)
        hint = Message(name, (headers, properties, body, sent_event), options)
        if batch is not None:
            if transaction is not None:
                raise _transaction_of_a_part(name)
            batch.gathered.append(Gathered(hint, self.acceptance.candidate(envelope, ours, parent=job)))
            return None
        enlisted = enlist(transaction) if transaction is not None else None
        candidate = self.acceptance.candidate(envelope, ours, parent=job)
        of_a_chord = chords.sent_with([hint])
        try:
            verdict = self.accept(candidate, Door(enlisted=enlisted, admitted=continues(job) or bool(of_a_chord)))
        except AlreadyAccepted:
            self.chords.done(of_a_chord)
            raise
        self.chords.done(of_a_chord)
        if enlisted is not None:
            # The row says who is due; rolled back, with a savepoint or as a whole, it says nothing.
            enlisted.after_commit(functools.partial(self.deliver_now, envelope.id))
        elif verdict.express:
            self.deliver_now(envelope.id)
        elif verdict.publish:
            try:
                self.wire.send_one(self._marked(hint, candidate, verdict), producer)
            except Exception as exc:
                # Accepted is accepted, whatever ails the broker, an exchange that nobody has declared yet included: the
                # message is only a hint, and the sweeper will give it again.
                logger.warning("job %s is accepted, but its message could not be published: %r", envelope.id, exc)
                self.soon(envelope.id)
        return None

    def _veil(self, name: str, headers: dict[str, Any], body: Any, sent_event: dict[str, Any] | None) -> None:
        """Where a message shows its arguments to everybody (events, logs, Flower), redacted ones are not among them."""
        task = self.app.tasks.get(name)
        if not isinstance(task, SafeTask) or not task._redacted():
            return
        args, kwargs = task._shown(body[0], body[1])
        longest = self.app.amqp.argsrepr_maxsize
        headers["argsrepr"], headers["kwargsrepr"] = saferepr(args, longest), saferepr(kwargs, longest)
        if sent_event:
            sent_event |= {"args": headers["argsrepr"], "kwargs": headers["kwargsrepr"]}

    def _takes(self, name: str, ours: Mapping[str, Any]) -> bool:
        """Whether a message gets a row: a SafeTask's, and one with a key of a task that nobody here knows.

        Raises:
            ConfigurationError: for the key of a plain task.
        """
        if self.is_safe(name):
            return True
        if not ours.get("idempotency_key"):
            return False
        if name in self.app.tasks:
            # A row promises a claim, which a plain task never makes.
            raise ConfigurationError(
                f"task {name!r} is no SafeTask: idempotency_key= means nothing to it; give it base=SafeTask, or leave "
                "the key out; nothing was enqueued"
            )
        return True

    def _plain(self, send: Callable[..., Any], producer: Any, hint: Message, transaction: Any) -> Any:
        """The message of a plain task: out at once, or together with what it belongs to."""
        batch = gathering()
        if batch is not None and batch.takes_plain:
            if transaction is not None:
                raise _transaction_of_a_part(hint.name)
            batch.plain.append(hint)
            return None
        if transaction is not None:
            with self.whole(transaction=transaction) as batch:
                batch.plain.append(hint)
            return None
        if canvas.hand_on(self.app, hint) or self._waits_in_vain(hint):
            return None
        if faults.armed is not None:
            faults.at(Point.BEFORE_PUBLISH, hint.id)
        with self.app.producer_or_acquire(producer) as found:
            sent = send(found, hint.name, hint.parts, **hint.options)
        if faults.armed is not None:
            faults.at(Point.AFTER_PUBLISH, hint.id)
        self.chords.done(chords.sent_with([hint]))
        return sent

    def _waits_in_vain(self, hint: Message) -> bool:
        """Whether Celery is about to look once more at a chord whose body is out: its members' results may be gone."""
        headers, _, (args, *_), _ = hint.parts
        if hint.name != UNLOCK or not headers.get("retries") or len(args) < 2 or not isinstance(args[1], dict):
            return False
        return chords.body_of(args[1].get("options") or {}) == args[0] and self.chords.is_over(args[0])

    def _definite(self, name: str, headers: Mapping[str, Any], body: Any, tenant: str | None) -> Any:
        batch = gathering()
        made = Continuations(headers["id"], tenant, self.is_safe, batch.chords if batch is not None else None)
        return made.of(name, body, headers.get("group"))

    def definite(self, envelope: Envelope, ours: Mapping[str, Any]) -> Envelope:
        """A message of a producer without the library, its continuations as they would have been with it."""
        if isinstance(envelope.body, Raw):
            return envelope
        tenant = self.acceptance.tenant(ours, envelope.task)
        return replace(envelope, body=self._definite(envelope.task, envelope.headers, envelope.body, tenant))

    # -- all or nothing ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def whole(self, *, transaction: Any = None, tenant: str | None = None, name: str | None = None) -> Iterator[Batch]:
        """What is sent within is accepted whole or not at all, and published after that.

        Arguments:
            transaction: a caller's transaction, with which it commits or vanishes.
            tenant: whose it is, where a message does not say it itself.
            name: what the ids of a canvas follow from.

        Raises (at the end):
            What accepting raises; nothing is accepted then, and nothing published.
        """
        batch = Batch(enlisted=enlist(transaction) if transaction is not None else None, tenant=tenant, name=name)
        with batch.gather():
            yield batch
        self._accept_whole(batch)

    def _accept_whole(self, batch: Batch) -> None:
        if not batch.gathered and batch.enlisted is None and not batch.chords:
            for message in batch.plain:
                if not canvas.hand_on(self.app, message):
                    self.wire.send_one(message)
            self.chords.done(chords.sent_with(batch.plain))
            return
        self._together(batch, self._door(batch))

    @staticmethod
    def _door(batch: Batch) -> Door:
        body = chords.sent_with([one.hint for one in batch.gathered])
        return Door(enlisted=batch.enlisted, admitted=continues(current.job()) or bool(body))

    def hand_over(self, batch: Batch, write: Callable[[Run], list[Any]]) -> bool:
        """Accept what goes on in a job's place in the transaction in which the job ends, and publish it after that.

        Arguments:
            batch: what goes on.
            write: ends the job; where it returns nothing, nothing is accepted.

        Returns:
            whether the job has ended so.

        Raises:
            ReplayMismatch: the job's body sent something else in this place before.
            What accepting raises; nothing was written then.
        """

        def end(run: Run) -> None:
            if not write(run):
                raise _NotHandedOver

        try:
            # It is work that was accepted with the job, which no limit refuses.
            self._together(batch, Door(admitted=True), end)
        except _NotHandedOver:
            return False
        return True

    def _together(self, batch: Batch, door: Door, end: Callable[[Run], object] | None = None) -> None:
        posted: list[str] = []

        def also(run: Run, verdicts: list[Verdict]) -> None:
            if end is not None:
                end(run)
            # Where all of it stands already, the plain ones were kept with it, and are out.
            if verdicts and not any(verdict.status == "accepted" for verdict in verdicts):
                return
            if batch.plain:
                posted[:] = self._post(run, batch.plain, door)
            self.chords.record(run, list(batch.chords.values()))

        try:
            verdicts = self.acceptance.accept_whole([one.candidate for one in batch.gathered], door, also=also)
        except IdempotencyConflict as exc:
            sent_as = exc.job_id if any(exc.job_id == one.candidate.id for one in batch.gathered) else None
            raise in_a_body(exc, sent_as) from exc
        self.publish_accepted(batch.gathered, verdicts, door)
        self.chords.done(chords.sent_with([*(one.hint for one in batch.gathered), *batch.plain]))
        if not posted:
            return
        if door.enlisted is not None:
            door.enlisted.after_commit(self.deliver_posted)
            return
        rest = [message for message in batch.plain if not canvas.hand_on(self.app, message)]
        unsent = {rest[place].id for place in self.wire.send_all(rest)}
        self._out([job_id for job_id in posted if job_id not in unsent])

    def _post(self, run: Run, messages: Sequence[Message], door: Door) -> list[str]:
        """Keep messages of plain tasks until they are out."""
        kept = [stored(self.app, message) for message in messages]
        serializer = self.app.conf.task_serializer
        try:
            data = [envelope.encode(envelope.options.get("serializer") or serializer) for envelope in kept]
        except (EncodeError, TypeError, ValueError) as exc:
            raise PayloadInvalid(f"a message of a plain task cannot be encoded: {exc}; nothing was enqueued") from exc
        ids = [envelope.id for envelope in kept]
        run(
            "POST",
            ids=ids,
            tasks=[envelope.task for envelope in kept],
            envelopes=data,
            due=0.0 if door.enlisted is not None else self.safe.config.republish_after,
        )
        return ids

    def _out(self, ids: list[str]) -> None:
        """Messages of plain tasks that are out need not be kept; losing this sends them once more."""
        if ids:
            try:
                self.safe.store.rows("POSTED", ids=ids)
            except (SafeEffectsError, psycopg.Error):
                logger.warning("%d messages of plain tasks will go out once more", len(ids), exc_info=True)

    def deliver_posted(self) -> int:
        """Publish messages of plain tasks that are kept and due.

        Returns:
            how many went out.
        """
        sent = 0
        while True:
            try:
                rows = self.safe.store.rows("POST_DUE", limit=BATCH, again=self.safe.config.republish_after)
            except (SafeEffectsError, psycopg.Error):
                logger.warning("publishing messages of plain tasks is left to the sweeper", exc_info=True)
                return sent
            if not rows:
                return sent
            readable = []
            for row in rows:
                try:
                    readable.append(Message.of(self.app, Envelope.decode(row.envelope)))
                except Exception:
                    logger.exception("the message of plain task %s[%s] cannot be read", row.task, row.id)
            unsent = set(self.wire.send_all(readable))
            out = [message.id for place, message in enumerate(readable) if place not in unsent]
            self._out(out)
            sent += len(out)
            if unsent or len(rows) < BATCH:
                return sent

    def _marked(self, hint: Message, candidate: Candidate, verdict: Verdict) -> Message:
        """The message of an accepted job."""
        mark, envelope = candidate.mark(verdict.seq or 0), candidate.envelope
        headers = envelope.marked_headers(mark, eta=time_of(self.app, envelope.headers.get("eta")))
        _, properties, body, sent_event = hint.parts
        hint = Message(hint.name, (headers, properties, body, sent_event), hint.options)
        if not mark.digest.startswith(OPAQUE):
            return hint
        return hint.exactly(Raw.stored(candidate.params["envelope"]))  # serialized again, it may have other bytes

    def publish_accepted(self, gathered: Sequence[Gathered], verdicts: Sequence[Verdict], door: Door) -> None:
        """Publish what was accepted together; what does not go out now, the sweeper publishes."""
        accepted = [(one, verdict) for one, verdict in zip(gathered, verdicts, strict=True) if verdict.seq is not None]
        if door.enlisted is not None:
            # The rows say who is due; rolled back, with a savepoint or as a whole, they say nothing.
            ids = [verdict.job_id for _, verdict in accepted]
            for start in range(0, len(ids), BATCH):
                door.enlisted.after_commit(functools.partial(self.deliver_now, *ids[start : start + BATCH]))
            return
        ready = [self._marked(one.hint, one.candidate, verdict) for one, verdict in accepted if verdict.publish]
        express = [verdict.job_id for _, verdict in accepted if verdict.express]
        if express:
            self.deliver_now(*express)
        unsent = self.wire.send_all(ready)
        if unsent:
            self.soon(*(ready[place].parts[0]["id"] for place in unsent))

    def soon(self, *job_ids: str) -> None:
        """Ask the sweeper to publish messages soon; losing this costs only time."""
        try:
            self.safe.store.rows("PUBLISH_SOON", ids=list(job_ids))
        except (SafeEffectsError, psycopg.Error):
            logger.debug("%d jobs wait for their republication", len(job_ids), exc_info=True)

    def accept(self, candidate: Candidate, door: Door, *, tries: int = ACCEPT_TRIES) -> Verdict:
        """Make a job's row durable.

        Returns:
            the verdict, which is ``accepted``.

        Raises:
            PayloadInvalid, AdmissionRejected, IdempotencyConflict, StoreUnavailable: nothing was written.
            AcceptanceUnknown: the database did not say.
            AlreadyAccepted: the same call has a row; nothing was written.
        """
        (verdict,) = self.acceptance.accept([candidate], door, tries=tries)
        if verdict.error is not None:
            raise verdict.error
        if verdict.seq is None:
            raise AlreadyAccepted(verdict.job_id)
        return verdict

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
        envelope = self.definite(envelope, ours or {})
        if not isinstance(envelope.body, Raw):
            self._veil(envelope.task, envelope.headers, envelope.body, None)
        while True:
            try:
                # It is in the broker already: a size limit would only lose it.
                self.accept(
                    self.acceptance.candidate(envelope, ours or {}, limit=sys.maxsize),
                    # Its message is here, and runs next.
                    Door(actor=owner, admitted=True, due=self.safe.config.republish_after),
                    tries=1 if patience == 0 else ACCEPT_TRIES,
                )
            except AlreadyAccepted:
                return
            except (*STORE_ERRORS, AcceptanceUnknown, AdmissionRejected) as exc:
                if clock() >= give_up:
                    raise
                logger.warning("message %s waits to be persisted: %s", envelope.id, exc)
                time.sleep(min(1.0, patience))
            else:
                return

    def park_missing(self, run: Callable[..., list[Any]], envelope: Envelope, mark: Mark, owner: str) -> bool:
        """What becomes of a marked message without a row, which never runs.

        Arguments:
            run: runs a statement.
            envelope, mark: the message.
            owner: who writes.

        Returns:
            whether the database may be older than the message: then it has a row now that says so, and waits.
        """
        missing = run("MISSING", id=envelope.id, seq=mark.seq)[0]
        if missing.pruned or not missing.lost:
            return False
        serializer = envelope.serializer or self.app.conf.task_serializer
        run(
            "INSERT_MISSING",
            id=envelope.id,
            task=envelope.task,
            tenant=mark.tenant,
            queue=routing.lands_in(self.app, envelope.options),
            digest=envelope.digest(serializer),
            envelope=envelope.encode(serializer),
            owner=owner,
        )
        logger.error("job %s has a message but no row: the database is older than the broker; parked", envelope.id)
        return True

    # -- from the row to the broker ------------------------------------------------------------------------------------

    def ask(self, queue: str) -> Depth:
        """How many messages the broker holds in a queue.

        Raises:
            ConnectionError: when it cannot be reached.
        """
        with self.app.pool.acquire(block=True) as connection:
            for last in (False, True):
                try:
                    with connection.channel() as channel:
                        low_first = connection.transport.driver_type == "redis"
                        return Depth(_messages(channel, queue), low_first)
                except (OSError, *connection.connection_errors) as exc:
                    connection.collect()  # it may be an old connection to a broker that was restarted
                    if last:
                        raise ConnectionError(str(exc)) from exc
                except Exception:
                    # What a transport makes of it is its own matter, and no reason to look after no queue at all.
                    logger.warning("queue %s cannot be asked", queue, exc_info=True)
                    return Depth(None)
        raise AssertionError("unreachable")

    def deliver(self, rows: list[Any]) -> int:
        """Publish stored envelopes; the rows already say when to try next.

        Returns:
            how many were published: fewer than given when the broker could not be reached, and the rest is due again.
        """
        stored = []
        for row in rows:
            try:
                envelope = Envelope.decode(row.envelope)
                mark = Mark(row.seq, row.generation, row.args_digest, row.tenant)
                marked = envelope.marked(mark, eta=row.run_after, retries=row.retries)
                first = row.publishes == 1 and row.status == JobStatus.QUEUED
                message = Message.of(self.app, marked, self._sent_event(envelope) if first else None)
                stored.append((row.id, message if row.lane is None else message.into(self.wire.lane(row.lane))))
            except Exception:
                logger.exception("the message of job %s cannot be read", row.id)
        unsent = self.wire.send_all([message for _, message in stored])
        if unsent:
            self.soon(*(stored[place][0] for place in unsent))
        return len(rows) - len(unsent)

    def _sent_event(self, envelope: Envelope) -> dict[str, Any] | None:
        """What the event `task-sent` says of a message that goes out for the first time."""
        if not self.app.conf.task_send_sent_event:
            return None
        headers = envelope.headers
        same = ("root_id", "parent_id", "retries", "eta", "expires")
        shown = {"args": headers.get("argsrepr"), "kwargs": headers.get("kwargsrepr")}
        return {"uuid": envelope.id, "name": envelope.task, **shown, **{name: headers.get(name) for name in same}}

    def deliver_woken(self, slots: list[str]) -> None:
        """Publish who was woken for slots that have just become free; the sweep would, too, a little later."""
        try:
            woken = [row.id for row in self.safe.store.rows("WOKEN", scopes=slots)]
        except (SafeEffectsError, psycopg.Error):
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
        except (SafeEffectsError, psycopg.Error):
            logger.warning("publishing %s is left to the sweeper", ", ".join(job_ids), exc_info=True)
            return 0
        return self.deliver(in_order(rows))


def _taken_eta(app: Celery, options: dict[str, Any]) -> str | None:
    """Take countdown and ETA out of the options, as a time; a countdown goes before an ETA, as in Celery."""
    countdown, eta = options.pop("countdown", None), options.pop("eta", None)
    try:
        if countdown:
            eta = maybe_make_aware(app.now() + timedelta(seconds=countdown), tz=app.timezone)
    except (TypeError, OverflowError) as exc:
        raise PayloadInvalid(f"countdown={countdown!r} is no number of seconds ({exc}); nothing was enqueued") from exc
    if not eta:
        return None
    return eta if isinstance(eta, str) else str(eta.isoformat())


def _messages(channel: Any, queue: str) -> int | None:
    try:
        return int(channel.queue_declare(queue, passive=True).message_count)
    except ChannelError as exc:
        # Lost with its messages, or never made. Anything else, a missing permission for one, tells nothing.
        return 0 if "404" in (str(exc.code), str(exc.reply_code)) or "NOT_FOUND" in str(exc) else None
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        logger.debug("queue %s cannot be asked", queue, exc_info=True)
        return None


def _transaction_of_a_part(name: str) -> ConfigurationError:
    return ConfigurationError(f"transaction= is given to the whole, not to {name!r} in it; nothing was enqueued")


def _own_name(options: Mapping[str, Any]) -> str | None:
    """What a message of a body is called, if its author names it."""
    key = options.get("idempotency_key")
    return None if key is None else f"{options.get('tenant') or ''}/{key}"


def in_a_body(exc: IdempotencyConflict, sent_as: str | None) -> SafeEffectsError:
    """What a conflict means: under an id that follows from a job, its body sent something else before."""
    job = current.job()
    if job is None or exc.job_id != sent_as:
        return exc
    job.mismatch = ReplayMismatch(
        f"message {exc.job_id} of job {job.id} went out with another task or arguments before; the body must send the "
        "same messages each time it runs, and give those that may change places an idempotency_key",
        job_id=job.id,
    )
    return job.mismatch


def continues(job: ActiveJob | None) -> bool:
    """Whether Celery sends this after a job's end: the continuation of work that was accepted with it."""
    sender = current_task
    if job is not None or not isinstance(sender and sender._get_current_object(), SafeTask):
        return False
    return bool(sender.request.id and not sender.request.called_directly)
