"""The wire: publishes task messages, one or many, and says which of them did not go out."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kombu import exceptions
from kombu.exceptions import ChannelError
from kombu.exceptions import OperationalError as BrokerError
from kombu.transport import virtual

from .. import faults
from ..faults import Point
from . import routing
from .envelope import Raw

if TYPE_CHECKING:
    from celery import Celery

    from .envelope import Envelope

logger = logging.getLogger(__name__)

BROKER_ERRORS: Final = (BrokerError, OSError, getattr(exceptions, "BatchPublishError", BrokerError))
"""The broker could not be reached, or did not answer: a message may have gone out, or not."""
PRECONDITION_FAILED: Final = 406
BATCH: Final = 500
"""Messages that a broker gets in one round trip, where it can take several."""


class _Later:
    """Stands for a producer while none is needed yet."""

    @property
    def connection(self) -> _Later:
        return self

    @staticmethod
    def _reraise_as_library_errors() -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


LATER: Final = _Later()
"""Handed to Celery in place of a producer: there are only `broker_pool_limit` of them, and who waits for the database,
or for a key in another's transaction, would keep all others in the process from sending."""


class Message(NamedTuple):
    """A task message that is ready to go out: what Celery's ``send_task_message`` takes."""

    name: str
    parts: tuple[dict[str, Any], dict[str, Any], Any, Any]
    options: dict[str, Any]

    @classmethod
    def of(cls, app: Celery, envelope: Envelope, sent_event: dict[str, Any] | None = None) -> Message:
        """A stored message, and what its event `task-sent` says, if it is to be sent."""
        parts = (envelope.headers, dict(envelope.properties), envelope.body, sent_event)
        made = cls(envelope.task, parts, routing.to_send(app, envelope.options))
        return made.exactly(envelope.body) if isinstance(envelope.body, Raw) else made

    def exactly(self, raw: Raw) -> Message:
        """The same with a serialized body, which goes out byte for byte."""
        headers, properties, _, sent_event = self.parts
        options = {**self.options, "content_type": raw.content_type, "content_encoding": raw.encoding}
        return Message(self.name, (headers, properties, raw.data, sent_event), options)

    def into(self, queue: Any) -> Message:
        """The same message, sent to another queue."""
        options = {
            name: value for name, value in self.options.items() if name not in ("exchange", "routing_key", "declare")
        }
        return self._replace(options={**options, "queue": queue})

    @property
    def id(self) -> str:
        return str(self.parts[0]["id"])

    @property
    def route(self) -> tuple[Any, ...]:
        """Where it goes, as far as something may have to be declared for it."""
        queue = self.options.get("queue")
        return getattr(queue, "name", queue), self.options.get("exchange"), self.options.get("routing_key")


class Wire:
    """Publishes through an app's producers.

    Arguments:
        app: the Celery app.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.send: Callable[..., Any] | None = None
        """Celery's own ``send_task_message``, known once the app has made its AMQP object."""

    def lane(self, name: str) -> Any:
        """The broker's queue of an express lane, the same whoever asks for it."""
        queues = self.app.amqp.queues
        found = dict.get(queues, name)
        return found if found is not None else queues.add(queues.new_missing(name))

    def declare_again(self, queue: str) -> None:
        """Where messages got lost, the queue or its binding may have, too, which a connection declares only once."""
        found = dict.get(self.app.amqp.queues, queue)
        if found is None:
            return  # how it is declared, only its maker knows
        try:
            with self.app.producer_pool.acquire(block=True) as producer, producer.connection.channel() as channel:
                bound = found(channel)
                if isinstance(channel, virtual.Channel) and bound.exchange:
                    bound.unbind_from(bound.exchange, bound.routing_key)  # makes kombu forget that it wrote the binding
                bound.declare()
        except Exception:
            logger.warning("queue %s could not be declared", queue, exc_info=True)

    def send_one(self, message: Message, producer: Any = None) -> None:
        """Publish a message.

        Raises:
            One of BROKER_ERRORS: the broker could not be reached.
            Exception: what else is wrong with this message.
        """
        with self.app.producer_or_acquire(producer) as found, found.connection._reraise_as_library_errors():
            self._send(found, message)

    def send_all(self, messages: Sequence[Message]) -> list[int]:
        """Publish messages in order, many in one round trip where the broker can take them so.

        Returns:
            the places of those that did not go out, or may not have, because the broker could not be reached. A
            message that is wrong in itself is logged and does not hold up the others.
        """
        done = 0
        declared: set[tuple[Any, ...]] = set()
        try:
            with self.app.producer_pool.acquire(block=True) as producer:
                at = producer.connection
                lost = (*BROKER_ERRORS, *at.recoverable_connection_errors, *at.recoverable_channel_errors)
                while done < len(messages):
                    part = messages[done : done + BATCH]
                    rest = []
                    for message in part:
                        if message.route in declared:
                            rest.append(message)
                        else:  # the first to go somewhere declares it, and tries again if the connection is stale
                            declared.add(message.route)
                            with producer.connection._reraise_as_library_errors():
                                self._send_logged(producer, message, lost)
                    with producer.connection._reraise_as_library_errors(), _together(producer):
                        for message in rest:
                            at_once = {**message.options, "retry": False, "declare": []}
                            self._send_logged(producer, Message(message.name, message.parts, at_once), lost)
                    done += len(part)
        except BROKER_ERRORS as exc:
            logger.warning("publishing %d messages is put off: %r", len(messages) - done, exc)
        return list(range(done, len(messages)))

    def _send_logged(self, producer: Any, message: Message, lost: tuple[type[BaseException], ...]) -> None:
        try:
            try:
                self._send(producer, message)
            except ChannelError as exc:
                queue = message.options.get("queue")
                if exc.reply_code != PRECONDITION_FAILED:
                    raise
                # It is there, made otherwise than this process would make it: send to it all the same.
                as_it_is = routing.as_it_is(queue) if isinstance(queue, str) else {"declare": []}
                self._send(producer, message._replace(options=message.options | as_it_is))
        except lost:
            raise
        except Exception:
            logger.exception("publishing %s[%s] failed", message.name, message.parts[0]["id"])

    def _send(self, producer: Any, message: Message) -> None:
        if self.send is None:
            _ = self.app.amqp.send_task_message  # made at its first use, and then known
        assert self.send is not None
        if faults.armed is not None:
            faults.at(Point.BEFORE_PUBLISH, message.id)
        self.send(producer, message.name, message.parts, **message.options)
        if faults.armed is not None:
            faults.at(Point.AFTER_PUBLISH, message.id)


def _together(producer: Any) -> contextlib.AbstractContextManager[Any]:
    """Publishes within go out together where kombu and the transport can do that."""
    batch = getattr(producer, "batch", None)
    return batch(BATCH) if batch is not None else contextlib.nullcontext()
