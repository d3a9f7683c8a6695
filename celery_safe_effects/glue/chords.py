"""Chords: their bodies go out, also where the result backend lost count of the members or forgot their results.

A chord with a SafeTask in its header is written down with its members: its body, and whose results that waits for.
Celery counts as ever. Once all members have ended and Celery has been told so, and the body is not out a while later,
the sweep sends it: under its own id, with the results that the rows hold. So a body that both send is one job.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from celery import canvas, states
from celery.backends.base import Backend
from celery.exceptions import ChordError
from celery.result import GroupResult
from kombu.exceptions import EncodeError

from .. import canonical
from ..engine import failures
from ..errors import ConfigurationError, IdempotencyConflict, PayloadInvalid, PayloadTooLarge, PermissionMissing
from ..states import JobStatus
from ..store.hot import STORE_ERRORS
from .batch import Chord
from .continuations import BODY_OF
from .envelope import Envelope
from .errbacks import LATER
from .wire import Message

if TYPE_CHECKING:
    from .acceptance import Run
    from .publish import Publisher

logger = logging.getLogger(__name__)

BATCH: Final = 100
SLOWEST: Final = 8
"""A chord is looked at less and less often, down to once in so many times the grace."""
NEVER: Final = (PayloadInvalid, PayloadTooLarge, ConfigurationError, EncodeError, TypeError)
"""What keeps a body from being sent for ever."""
NO_MEMBERS: Final = (
    "Callback error", "Join error", "TimeoutError", "chord_unlock could not be retried", "Cannot restore group",
    "GroupResult ",
)  # fmt: skip
"""Begin Celery's errors of chords in which perhaps no member has failed: Celery itself could not do its part."""


def install() -> None:
    """Let Celery's chords be written down, and their errors heard of; once a process."""
    if getattr(canvas._chord.run, "_safe_effects", False):
        return
    canvas._chord.run = _noted(canvas._chord.run)
    Backend.chord_error_from_stack = _heard(Backend.chord_error_from_stack)


def _noted(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Any, header: Any, body: Any, partial_args: Any, *args: Any, **options: Any) -> Any:
        safe = (options.get("app") or self._get_app(body)).__dict__.get("_safe_effects")
        chord = safe.publisher.chords.begun(header) if safe is not None else None
        result = original(self, header, body, partial_args, *args, **options)
        if chord is not None:
            chord.header = _header_of(result, chord.id)
        return result

    run._safe_effects = True  # type: ignore[attr-defined]
    return run


def _heard(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def chord_error_from_stack(self: Any, callback: Any, exc: Any = None) -> Any:
        safe, chord_id = self.app.__dict__.get("_safe_effects"), body_of(callback.options)
        if safe is None or chord_id is None:
            return original(self, callback, exc)
        if str(exc).startswith(NO_MEMBERS):
            logger.warning("the body of chord %s is left to the sweep: %s", chord_id, exc)
            return None
        told = original(self, callback, exc)
        safe.publisher.chords.failed(chord_id, callback, exc)
        return told

    return chord_error_from_stack


def body_of(options: Mapping[str, Any]) -> str | None:
    """The chord whose body a signature is, or is part of."""
    return (options.get("headers") or {}).get(BODY_OF)


def sent_with(messages: Sequence[Message]) -> list[str]:
    """The chords whose bodies are among messages."""
    found = (message.parts[0].get(BODY_OF) or body_of(message.options) for message in messages)
    return sorted({chord_id for chord_id in found if chord_id})


class _Open(Exception):
    """Internal: a member's end is not known."""


class _Silent(Exception):
    """Internal: the result backend does not answer."""


class _Failed(Exception):
    """Internal: a member has failed."""

    def __init__(self, member: str, error: BaseException) -> None:
        super().__init__(member)
        self.member, self.error = member, error


class Chords:
    """The chords of one app.

    Arguments:
        publisher: the way out.
    """

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.app: Any = publisher.app

    @property
    def grace(self) -> float:
        """Seconds that Celery has for its own count."""
        return 2 * self.publisher.safe.config.sweep_interval

    # -- with the members ----------------------------------------------------------------------------------------------

    def begun(self, header: Any) -> Chord | None:
        """A chord whose messages are about to be made; ``None``: all that it waits for is Celery's alone."""
        from .batch import gathering
        from .canvas import parts_of

        batch = gathering()
        if batch is None or not batch.takes_plain:
            return None
        if not any(self.publisher.is_safe(one["task"]) for one in parts_of(header)):
            return None
        chord_id = header.options.setdefault("task_id", header.options.get("task_id") or canvas.uuid())
        chord = batch.chords[chord_id] = Chord(chord_id)
        return chord

    def record(self, run: Run, chords: Sequence[Chord]) -> None:
        """Write chords down, in the transaction of their members."""
        for chord in chords:
            if chord.body is None or chord.header is None:
                continue  # it had no members, and its body is out
            members = list(_leaves(chord.header))
            body = (chord.body, _shape(chord.header))
            made = Envelope({"id": chord.id, "task": str(chord.body["task"])}, {}, (body, {}, {}), {})
            run(
                "CHORD",
                id=chord.id,
                envelope=made.encode(self.app.conf.task_serializer),
                grace=self.grace,
                members=[member for member, _ in members],
                before=[json.dumps(before) for _, before in members],
            )

    def add(self, chord_id: str, result: Any) -> None:
        """Let Celery count a member that a running body adds, and write it down: once, however often the body runs.

        A crash in between makes Celery count it twice, so that its count is never reached; then the sweep sends the
        chord's body.

        Raises:
            NotImplementedError: the result backend cannot count it.
        """
        store = self.publisher.safe.store
        (member, _), *_ = _leaves(result)
        if not store.rows("CHORD_HAS", id=chord_id, member=member)[0].known:
            self.app.backend.add_to_chord(chord_id, result)
            store.rows("CHORD_ADD", id=chord_id, member=member)

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def done(self, chord_ids: Sequence[str]) -> None:
        """The bodies of these chords are out; losing this sends them once more, under the same ids."""
        if not chord_ids:
            return
        try:
            self.publisher.safe.store.rows("CHORD_DONE", ids=list(chord_ids))
        except PermissionMissing:
            # A producer's role: what it sends without a header is out, and was never written down.
            logger.debug("the bodies of chords %s are left to the workers", ", ".join(chord_ids))
        except STORE_ERRORS:
            logger.warning("the bodies of chords %s will be sent once more", ", ".join(chord_ids), exc_info=True)

    def failed(self, chord_id: str, callback: Any, error: BaseException) -> None:
        """The errbacks of a body are out."""
        self.became(callback.options.get("task_id"), error=error)
        self.done([chord_id])

    def became(self, member: str | None, value: Any = None, error: BaseException | None = None) -> None:
        """Note how a member of a chord ended whose own row does not say it."""
        outcome = {"result": value} if error is None else {"error": failures.to_json(error)}
        try:
            self.publisher.safe.store.rows("CHORD_OUTCOME", member=member, outcome=canonical.encode(outcome))
        except (*STORE_ERRORS, TypeError, ValueError):
            logger.warning("how member %s of a chord ended is in the result backend alone", member, exc_info=True)

    def is_over(self, chord_id: str) -> bool:
        """Whether nobody need wait for a chord's members any more."""
        try:
            return not self.publisher.safe.store.rows("CHORD_OPEN", id=chord_id)[0].exists
        except STORE_ERRORS:
            return False

    # -- the sweep -----------------------------------------------------------------------------------------------------

    def finish(self) -> int:
        """Send the bodies that Celery did not send.

        Returns:
            how many went out.
        """
        sent = 0
        store = self.publisher.safe.store
        while rows := store.rows("CHORDS_DUE", limit=BATCH, grace=self.grace, slowest=SLOWEST):
            for row in rows:
                try:
                    sent += row.ready and self._finish(row)
                except _Silent as exc:
                    logger.warning("chords wait for the result backend: %r", exc.__cause__)
                    return sent
            if len(rows) < BATCH:
                break
        return sent

    def _finish(self, row: Any) -> bool:
        store = self.publisher.safe.store
        try:
            (body, shape), *_ = Envelope.decode(row.envelope).read(self.app.conf.accept_content)
            callback = canvas.maybe_signature(body, app=self.app)
            try:
                results = self._results(store.rows("CHORD_MEMBERS", id=row.id), shape)
            except _Failed as found:
                self._fail(callback, f"Dependency {found.member} raised {found.error!r}", found.error)
            else:
                self._send(row.id, callback, results)
        except _Open as member:
            if row.ended_for > self.publisher.safe.config.retention.succeeded:
                logger.error("chord %s: nobody can tell how %s ended; its body is left to Celery", row.id, member)
                store.rows("CHORD_GIVEN_UP", id=row.id)
            return False
        except _Silent:
            raise
        except Exception as exc:
            logger.warning("the body of chord %s is not out yet: %r", row.id, exc, exc_info=not isinstance(exc, LATER))
            return False
        self.done([row.id])
        return True

    def _send(self, chord_id: str, callback: Any, results: list[Any]) -> None:
        logger.warning("chord %s: its members have ended, and Celery did not send its body; it is sent now", chord_id)
        try:
            callback.delay(results)
        except IdempotencyConflict:
            logger.info("the body of chord %s is out already", chord_id)
        except NEVER as exc:  # as Celery does
            logger.exception("the body of chord %s cannot be sent", chord_id)
            self._fail(callback, f"the body of chord {chord_id} cannot be sent: {exc!r}", exc)

    def _fail(self, callback: Any, text: str, cause: BaseException) -> None:
        error = ChordError(text)
        error.__cause__ = cause
        try:
            raise error
        except ChordError:  # the backend looks for it there
            self.app.backend.chord_error_from_stack(callback, error)

    def _results(self, rows: Sequence[Any], shape: Any) -> list[Any]:
        """The members' results, in the order of the header; those of added members come last.

        Raises:
            _Failed, _Open: by the first member that has no result.
        """
        found: dict[str, Any] = {}
        waiting: list[str] = []
        for row in rows:
            try:
                found[row.id] = self._result(row)
            except _Open:
                waiting.append(row.id)
        if waiting:
            raise _Open(waiting[0])
        for row in rows:
            if isinstance(found[row.id], _Failed):
                raise found[row.id]
        return [*_filled(shape, found), *(found[row.id] for row in rows if row.added)]

    def _result(self, row: Any) -> Any:
        """A member's result, or its failure."""
        if row.outcome is not None:
            outcome = canonical.decode(row.outcome)
            return outcome["result"] if "result" in outcome else _Failed(row.id, failures.from_json(outcome["error"]))
        if row.status == JobStatus.SUCCEEDED and not str(row.outcome_ref).startswith("replaced:"):
            return canonical.decode(row.result)
        if row.status in (JobStatus.FAILED, JobStatus.CANCELLED):
            return _Failed(row.id, _error(row.error, f"job {row.id} is {row.status}: {row.reason}"))
        if row.failed_before is not None:
            return _Failed(row.failed_before, _error(row.error_before, f"job {row.failed_before} has not succeeded"))
        told = self.app.AsyncResult(row.id)
        try:
            state, value = told.state, told.result
        except NotImplementedError as exc:
            raise _Open(row.id) from exc
        except Exception as exc:
            raise _Silent from exc
        if state == states.SUCCESS:
            return value
        if state in states.PROPAGATE_STATES:
            return _Failed(row.id, value if isinstance(value, BaseException) else Exception(state))
        raise _Open(row.id)


def _error(text: str | None, otherwise: str) -> BaseException:
    return failures.from_json(canonical.decode(text) or {"text": otherwise})


def _header_of(result: Any, chord_id: str) -> Any:
    """The header's results, which come before those of the body."""
    while result is not None and not (isinstance(result, GroupResult) and result.id == chord_id):
        result = result.parent
    return result


def _leaves(result: Any) -> Iterator[tuple[str, list[str]]]:
    """The members whose results a body gets, each with the steps before it."""
    if isinstance(result, GroupResult):
        for one in result.results:
            yield from _leaves(one)
    else:
        yield result.id, [*_before(result.parent)]


def _before(result: Any) -> Iterator[str]:
    while result is not None:
        for member, before in _leaves(result):
            yield member
            if isinstance(result, GroupResult):
                yield from before
        result = result.parent


def _shape(result: Any) -> Any:
    return [_shape(one) for one in result.results] if isinstance(result, GroupResult) else result.id


def _filled(shape: Any, found: Mapping[str, Any]) -> Any:
    return [_filled(one, found) for one in shape] if isinstance(shape, list) else found[shape]
