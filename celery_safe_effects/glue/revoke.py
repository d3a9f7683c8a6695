"""Celery's revoke, as every worker hears it: the rows are told first, since they outlive the worker's memory.

Celery keeps revoked ids in the memory of those workers that run at that moment, and stores REVOKED for whatever seems
to have no state yet. A job is cancelled in its row, and reads REVOKED when it is: not while it runs, and not while it
has an open question.
"""

from __future__ import annotations

import logging
from collections import ChainMap
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.app.task import Context
from celery.utils.functional import maybe_list
from celery.worker import state as worker_state
from celery.worker.control import ok

from ..states import JobStatus
from ..store.hot import RETRYABLE, STORE_ERRORS, Row
from .envelope import MARK, Envelope, Raw, stamps

if TYPE_CHECKING:
    from ..app import SafeEffects

logger = logging.getLogger(__name__)

REASON = "revoked"
AGAIN = 2.0
"""Seconds until a revoke that the database did not take is tried again."""


class Commands(ChainMap[str, Callable[..., Any]]):
    """Remote control commands: ours, then Celery's."""


def install(safe: SafeEffects, consumer: Any) -> None:
    """Put our commands before Celery's own, for this consumer alone."""
    for step in consumer.steps:
        node = getattr(getattr(step, "box", None), "node", None)
        if node is not None and not isinstance(node.handlers, Commands):
            node.handlers = Commands(Revoker(safe, consumer.hostname, node.handlers).commands(), node.handlers)


class Revoker:
    """Remote control commands that end jobs.

    Arguments:
        safe: the composition root.
        hostname: the worker's node name.
        original: Celery's commands, for what is no job of ours.
    """

    def __init__(self, safe: SafeEffects, hostname: str, original: Mapping[str, Callable[..., Any]]) -> None:
        self.safe = safe
        self.original = original
        self.actor = f"{safe.owner(hostname)}/main"

    def commands(self) -> dict[str, Callable[..., Any]]:
        """By their names."""
        return {
            "revoke": self.revoke,
            "terminate": self.terminate,
            "revoke_by_stamped_headers": self.revoke_by_stamped_headers,
        }

    def revoke(self, state: Any, task_id: Any, terminate: bool = False, signal: Any = None, **kwargs: Any) -> Any:
        """Revoke by id, or by a list of ids."""
        ids = {str(one) for one in maybe_list(task_id) or ()}
        ours = self._revoke("REVOKE", ids=sorted(ids))
        if ours is None:
            # Nobody can tell whose they are: as Celery does it for now, and without a word to the result backend.
            worker_state.revoked.update(ids)
            ours = ids
        reply = self.original["revoke"](state, sorted(ids - ours), terminate, signal, **kwargs) if ids - ours else {}
        if not terminate:
            return ok(f"tasks {ids} flagged as revoked")
        ended = [request for request in map(worker_state.requests.get, ours) if request is not None]
        for request in ended:
            request.terminate(state.consumer.pool, signal=signal)
        if not ended:
            return reply or ok("terminate: tasks unknown")
        theirs = str(reply.get("ok", "")).removeprefix("terminate: ").replace("tasks unknown", "")
        return ok("terminate: " + ", ".join(filter(None, [*(request.id for request in ended), theirs])))

    def terminate(self, state: Any, signal: Any, task_id: Any, **kwargs: Any) -> Any:
        """Revoke by id, and end what runs."""
        return self.revoke(state, task_id, terminate=True, signal=signal, **kwargs)

    def revoke_by_stamped_headers(self, state: Any, headers: Any, *args: Any, **kwargs: Any) -> Any:
        """Revoke by stamps: the jobs that are there by their rows, later ones by this worker's memory, as Celery."""
        pairs = dict(one.split("=", 1) for one in headers) if isinstance(headers, list) else headers
        self._revoke("REVOKE_STAMPED", stamps=stamps(pairs))
        return self.original["revoke_by_stamped_headers"](state, headers, *args, **kwargs)

    def _revoke(self, statement: str, **which: Any) -> set[str] | None:
        """Cancel in the rows, and tell of those that are over by it.

        Returns:
            which of the ids are jobs; ``None``: the database did not say, and is asked again later.
        """
        try:
            rows = self.safe.store.rows(statement, reason=REASON, actor=self.actor, **which)
        except (*STORE_ERRORS, *RETRYABLE) as exc:
            logger.warning("a revoke waits for the database: %s", exc)
            self.safe.call_later(AGAIN, partial(self._revoke, statement, **which))
            return None
        moved = [row for row in rows if row.moved]
        self.safe.announce(self.actor, *(row.id for row in moved))
        for row in moved:
            if row.status == JobStatus.CANCELLED and not row.settled:
                self._tell(row)
        return {row.id for row in rows}

    def _tell(self, row: Row) -> None:
        """Now, and not when a slot of the pool is free. What fails here, the sweep delivers."""
        try:
            task = self.safe.app.tasks[row.task]
            envelope = Envelope.decode(row.envelope)
            if isinstance(envelope.body, Raw) and not envelope.body.inert:
                return  # reading it could end this process
            args, kwargs, embed = envelope.read(self.safe.app.conf.accept_content)
            context = Context({**envelope.headers, **(embed or {}), MARK: None, "args": args, "kwargs": kwargs})
            if self.safe.store.rows("TELL", id=row.id, fence=row.fence):
                self.safe.teller.cancelled(task, row.id, context, row.reason or REASON, row.fence)
        except Exception:
            logger.warning("the end of job %s is left to the sweep", row.id, exc_info=True)
