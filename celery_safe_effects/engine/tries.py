"""Deliveries that came to nothing before a claim: counted, spaced, and over after as many as the job has runs."""

from __future__ import annotations

from .. import canonical
from ..errors import AttemptsExhausted
from ..store.hot import Store
from . import failures
from .sweep import BACKOFF, MAX_BACKOFF


def may_read(store: Store, job: str) -> bool:
    """Count a delivery before its message is read, which may end the process.

    Returns:
        whether to read it; if not, it was fatal too often, or there is nothing to do for it.
    """
    return bool(store.rows("READING", id=job, most=store.config.max_attempts))


def was_read(store: Store, job: str) -> None:
    """Take back what :func:`may_read` counted."""
    store.rows("READ", id=job)


def came_to_nothing(
    store: Store,
    job: str,
    generation: int,
    reason: str,
    exc: BaseException | str,
    *,
    counted: bool = False,
    actor: str,
    owner: str | None = None,
) -> None:
    """Count a delivery that ended before the job was claimed, and end the job if it was the last that it may have.

    Arguments:
        job, generation: whose message it was.
        reason: shown while the job waits for another delivery.
        exc: how it ended.
        counted: whether :func:`may_read` has counted it.
        actor: who writes.
        owner: the beginning of the name of the process that died; if it had claimed the job, it is not counted.
    """
    why = exc if isinstance(exc, str) else failures.to_json(exc)["text"]
    error = AttemptsExhausted(f"no delivery of the job came as far as its start; the last one ended by: {why}")
    store.rows(
        "UNREAD",
        id=job,
        generation=generation,
        reason=reason,
        error=canonical.encode(failures.to_json(error)),
        by=0 if counted else 1,
        most=store.config.max_attempts,
        actor=actor,
        owner=owner,
        delay=BACKOFF,
        max_delay=MAX_BACKOFF,
    )
