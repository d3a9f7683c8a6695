"""Batches: messages that are gathered while they are made, and then accepted together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

from .acceptance import Candidate
from .envelope import Envelope
from .wire import Message


class Gathered(NamedTuple):
    """A message that waits for its batch."""

    hint: Message
    envelope: Envelope
    candidate: Candidate


class Batch:
    """Safe messages that are sent in one context go here, instead of into the database and to the broker."""

    def __init__(self) -> None:
        self.gathered: list[Gathered] = []

    def add(self, hint: Message, envelope: Envelope, candidate: Candidate) -> None:
        """Keep a message."""
        self.gathered.append(Gathered(hint, envelope, candidate))

    @contextlib.contextmanager
    def gather(self) -> Iterator[None]:
        """Within, messages are gathered."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[Batch | None] = ContextVar("safe_effects_batch", default=None)


def gathering() -> Batch | None:
    """The batch that gathers what is sent here."""
    return _current.get()
