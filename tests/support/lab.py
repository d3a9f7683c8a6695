"""An app whose tasks run in this process (``task.apply``) on real PostgreSQL, one delivery at a time."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints
from uuid import uuid4

import pytest
from celery import Celery
from celery.app.trace import build_tracer

from celery_safe_effects import Outcome, SafeEffects, SafeTask, Unresolved, effect
from tests.support.services import Sql

names = (f"jobs.{n}" for n in itertools.count())


class Declined(Exception):
    pass


class Lab:
    """An app whose tasks run here, and the record of every call that reached the provider."""

    def __init__(self, database_url: str, sql: Sql) -> None:
        self.app = Celery("lab", broker="memory://", backend="cache+memory://", set_as_current=False)
        self.app.conf.update(
            safe_effects_database_url=database_url,
            safe_effects_max_connections=8,
            safe_effects_reconcile_interval=0.2,
            safe_effects_sweep_interval=0.2,
        )
        self.safe = SafeEffects(self.app)
        self.sql = sql
        self.calls: list[tuple[str, str]] = []
        self.behaviour: dict[str, Any] = {}
        self.verdict: Any = Unresolved("not asked")

    def effect(self, name: str, *, lookup: bool = False, **options: Any) -> Any:
        """An effect that is counted; ``behaviour[name]`` is raised, called, or returned."""

        @effect(name=next(names), **options)
        def made(op: Any, *args: Any) -> Any:
            self.calls.append((name, op.key))
            wanted = self.behaviour.get(name)
            if isinstance(wanted, BaseException):
                raise wanted
            return wanted(op, *args) if callable(wanted) else Outcome(f"{name}-{len(self.calls)}", list(args))

        if lookup:
            made.lookup(lambda op: self.verdict(op) if callable(self.verdict) else self.verdict)
        return made

    def async_effect(self, name: str, *, lookup: bool = False, **options: Any) -> Any:
        """The same as ``async def``; where ``behaviour[name]`` gives something awaitable, it is awaited."""

        @effect(name=next(names), **options)
        async def made(op: Any, *args: Any) -> Any:
            self.calls.append((name, op.key))
            wanted = self.behaviour.get(name)
            if isinstance(wanted, BaseException):
                raise wanted
            if not callable(wanted):
                return Outcome(f"{name}-{len(self.calls)}", list(args))
            given = wanted(op, *args)
            return await given if inspect.isawaitable(given) else given

        if lookup:

            @made.lookup
            async def find(op: Any) -> Any:
                given = self.verdict(op) if callable(self.verdict) else self.verdict
                return await given if inspect.isawaitable(given) else given

        return made

    def task(self, body: Callable[..., Any], **options: Any) -> Any:
        """A bound SafeTask; any option may be given differently."""
        body.__name__ = "body"
        if options.get("pydantic"):
            body.__annotations__ = get_type_hints(body)  # Celery 5.5 does not read them as text
        return self.app.task(**{"base": SafeTask, "bind": True, "shared": False, "name": next(names), **options})(body)

    def crash(self, task: Any) -> None:
        """The worker is gone: nothing that it writes from here on matches, and the sweep found its lease over."""
        job = task.job.id
        self.sql("UPDATE job SET lease_until = clock_timestamp() - interval '1 s' WHERE id = %s", job)
        self.safe.sweep()
        self.sql("UPDATE job SET run_after = NULL WHERE id = %s", job)
        raise SystemExit

    def run(self, task: Any, *args: Any, job: str | None = None) -> str:
        """Deliver a job once; returns its id."""
        job = job or str(uuid4())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.safe.publisher, "deliver_now", lambda *ids: 0)
            task.apply(args, task_id=job)
        return job

    def deliver(self, task: Any, job: str, *args: Any, due: bool = True, **kwargs: Any) -> Any:
        """Deliver a job once, as a worker does: the result is stored, and a retry waits in the queue.

        Arguments:
            due: whether that retry is due at once.

        Returns:
            what Celery's tracer says.
        """
        request = {"id": job, "task": task.name, "is_eager": False, "delivery_info": {}, "hostname": "lab"}
        task = self.app.tasks[task.name]
        task.__trace__ = build_tracer(task.name, task, app=self.app)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.safe.publisher, "deliver_now", lambda *ids: 0)
            told = task.__trace__(job, args, kwargs, request)
        if due:
            self.sql("UPDATE job SET run_after = NULL WHERE id = %s AND status = 'queued'", job)
        return told

    def status(self, job: str) -> str:
        return str(self.row(job)["status"])

    def row(self, job: str) -> dict[str, Any]:
        return self.sql("SELECT * FROM jobs WHERE id = %s", job)[0]

    def operations(self, job: str) -> dict[str, str]:
        rows = self.sql("SELECT step, status FROM operations WHERE job_id = %s ORDER BY first_intent_at", job)
        return {row["step"]: row["status"] for row in rows}

    def reconcile(self) -> dict[str, int]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.safe.publisher, "deliver_now", lambda *ids: 0)
            keys = [row["key"] for row in self.sql("SELECT key FROM operations WHERE status = 'unknown'")]
            return self.safe.reconcile(keys).results

    def make_gone(self) -> None:
        self.sql("UPDATE operation SET gone_at = now() WHERE status = 'unknown'")

    def past_deadline(self) -> None:
        self.sql(
            "UPDATE operation SET deadline_at = now() - interval '1 s', absent_from = now() - interval '1 s'"
            " WHERE status = 'unknown'"
        )


@pytest.fixture
def lab(database_url: str, sql: Sql) -> Iterator[Lab]:
    made = Lab(database_url, sql)
    yield made
    made.safe.flush()
    made.safe.close()
    made.app.close()
