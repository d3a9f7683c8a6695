"""What a tracer may want to know. Nothing here knows one; ``contrib.otel`` does."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..effects import Effect
    from ..store.hot import Intent, Row
    from ..values import Verdict
    from .job import ActiveJob


class Span:
    """One stretch of work that nobody watches; whoever does, derives from it."""

    trace: str | None = None
    """Where the work is to be found in a trace, as W3C writes it; recorded with an intent."""

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Within this block, whatever is called belongs to the span."""
        yield

    def carry(self, awaitable: Awaitable[Any]) -> Awaitable[Any]:
        """The same for something that is awaited."""
        return awaitable

    def end(self, status: str | None, exc: BaseException | None = None) -> None:
        """It is over, with this status of the job or operation; ``None`` where it has none."""


class Tracing:
    """Told of what is sent, run, called and asked."""

    def sends(self, headers: dict[str, Any], again_of: Any) -> None:
        """A message is about to be stored with its row.

        Arguments:
            headers: the message's, to add to.
            again_of: the request that sends itself again (a retry, a replacement), ``None`` for a new message.
        """

    def sent_by(self, request: Any) -> str | None:
        """Where a delivery's producer is to be found in a trace."""
        return None

    def job(self, task: Any, request: Any, job: ActiveJob) -> Span:
        """An attempt of a job begins."""
        return Span()

    def effect(self, job: ActiveJob, effect: Effect[Any, Any], intent: Intent) -> Span:
        """An effect is about to be recorded and called."""
        return Span()

    def lookup(self, row: Row) -> Span:
        """A provider is about to be asked what became of an operation."""
        return Span()

    @staticmethod
    def verdict(answer: Verdict | Any) -> str:
        """A verdict in one word."""
        return {"Happened": "outcome_confirmed", "NotHappened": "not_happened", "Refused": "refused"}.get(
            type(answer).__name__, "unresolved"
        )
