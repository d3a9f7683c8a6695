"""Batches: messages that are gathered while they are made, and then accepted together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple
from uuid import NAMESPACE_OID, uuid5

from ..store.enlist import Enlisted
from . import routing
from .acceptance import Candidate
from .envelope import Envelope
from .wire import Message


class Gathered(NamedTuple):
    """A SafeTask's message that waits for its batch."""

    hint: Message
    candidate: Candidate


class Chord:
    """A chord while its messages are made.

    Attributes:
        id: Celery's group id.
        body: the signature of its body, as the members' messages carry it.
        header: the results that it waits for.
    """

    def __init__(self, chord_id: str) -> None:
        self.id = chord_id
        self.body: Any = None
        self.header: Any = None


class Batch:
    """What is sent in one context goes here, instead of into the database and to the broker.

    Arguments:
        plain: whether messages of plain tasks wait, too; else they go out at once.
        enlisted: a caller's transaction, with which all of it commits or vanishes.
        tenant: whose messages they are, where they do not say it themselves.
        name: what the ids of a canvas follow from, or ``None``.
    """

    def __init__(
        self,
        *,
        plain: bool = True,
        enlisted: Enlisted | None = None,
        tenant: str | None = None,
        name: str | None = None,
    ) -> None:
        self.takes_plain = plain
        self.enlisted = enlisted
        self.tenant = tenant
        self.name = name
        self.gathered: list[Gathered] = []
        self.plain: list[Message] = []
        self.chords: dict[str, Chord] = {}
        self._ids = 0

    @contextlib.contextmanager
    def gather(self) -> Iterator[None]:
        """Within, messages are gathered."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def next_id(self) -> str:
        """The next id of a named canvas: the same each time that it is called."""
        self._ids += 1
        return str(uuid5(NAMESPACE_OID, f"{self.name}:{self._ids}"))


_current: ContextVar[Batch | None] = ContextVar("safe_effects_batch", default=None)


def gathering() -> Batch | None:
    """The batch that gathers what is sent here."""
    return _current.get()


def stored(app: Any, message: Message) -> Envelope:
    """A plain task's message as it is kept until it is out."""
    headers, properties, body, _ = message.parts
    options = dict(message.options)
    return Envelope({**headers, **(options.pop("headers", None) or {})}, properties, body, routing.kept(app, options))
