"""Tasks that pass as many of the protocol's fault points as a job can."""

from __future__ import annotations

from typing import Any

from celery import Celery, chord, group

from celery_safe_effects import SafeTask
from tests.support.tasks import ask_model, charge, charge_both, charge_keyed, charge_plain, deploy, mail, provider


def add_tasks(app: Celery) -> None:
    """Add the tasks, named `tests.<name>`.

    Args:
        app: the application of the tests.
    """

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.member", effects=[deploy])
    def member(self: Any, name: str) -> Any:
        """A job that another one sends."""
        return deploy(name).ref

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.gathered", effects=[mail])
    def gathered(self: Any, refs: Any) -> Any:
        """A chord's body."""
        return mail(f"{len(refs)} members").ref

    @app.task(
        base=SafeTask,
        bind=True,
        shared=False,
        name="tests.points",
        effects=[ask_model, charge, charge_both, charge_keyed, mail],
    )
    def points(self: Any, name: str) -> Any:
        """An answer, three kinds of effect, a checkpoint, a message, a chord."""
        ask_model(name)
        charge(name, 1)
        charge_both(name, 2)
        self.job.checkpoint()
        member.delay(f"{name} alone")
        charge_keyed(name, 3)
        chord(group(member.s(f"{name} {n}") for n in range(2)), gathered.s()).apply_async()
        return mail(name).ref

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.one_plain", effects=[charge_plain])
    def one_plain(self: Any, name: str) -> Any:
        """An effect that nobody can ask about."""
        return charge_plain(name, 1).ref

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.retries_itself", max_retries=1)
    def retries_itself(self: Any, name: str) -> Any:
        """A body that is an effect, and runs twice by its author's word."""
        if self.request.retries == 0:
            raise self.retry(countdown=0)
        return provider().call("retries_itself", self.job.operation.key, {"name": name})["ref"]
