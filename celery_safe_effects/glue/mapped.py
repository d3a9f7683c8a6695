"""``map``, ``starmap`` and ``chunks`` of a SafeTask: many calls in one job, each with steps of its own.

Celery runs the items inside a task of its own, without a row, a lease or an intent. Here a companion of the task runs
them: ``<task>.map``, with the task's own options, in whose jobs the steps begin with the item's index. Of a task whose
whole body is one side effect, each item is one operation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from celery.app.autoretry import add_autoretry_behaviour
from celery.canvas import Signature, chunks, group
from celery.exceptions import Retry
from celery.utils.functional import chunks as parts_of

from ..effects import effect_of_items
from ..engine import calls, current
from ..errors import ConfigurationError, EffectRefused
from ..values import Outcome
from .asynchronous import finished

if TYPE_CHECKING:
    from .task import SafeTask

ENDING: Final = ".map"
"""Ends the name of a companion."""
CELERYS: Final = {"celery.map": False, "celery.starmap": True}
"""Celery's own tasks for it, and whether their items are lists of arguments."""


def companion(task: SafeTask) -> SafeTask:
    """The task that runs many calls of another in one job; made when it is first asked for.

    Raises:
        ConfigurationError: its name is taken.
    """
    app = task._get_app()
    name = task.name + ENDING
    found = app.tasks.get(name)
    if found is None:
        found = _made(task.__class__, name, task)
        app.tasks[name] = found
        found.bind(app)
        add_autoretry_behaviour(found)
    elif getattr(found, "mapped", None) != task.name:
        raise ConfigurationError(
            f"task {name!r} has the name under which {task.name}.map() runs its items; give it another one"
        )
    return found  # type: ignore[no-any-return]


def signature(task: SafeTask, items: Iterable[Sequence[Any]]) -> Signature:
    """One job that calls a task with each of these arguments; immutable, as Celery's own.

    Raises:
        TypeError: an item does not fit the task.
    """
    calls_made = []
    for item in items:
        if task.typing:
            task.__header__(*item)
        calls_made.append(list(task._as_sent(tuple(item), {})[0]))
    return companion(task).si(calls_made).set(route_name=task.name)


class Chunks(chunks):
    """Celery's ``chunks`` whose parts are jobs."""

    def group(self) -> group:
        """The parts, as a group."""
        task, it, n = (self.kwargs[name] for name in ("task", "it", "n"))
        return group((signature(task.type, part) for part in parts_of(iter(it), n)), app=self._app)


def rewritten(app: Any, name: str, kwargs: Any) -> tuple[str, tuple[Any, ...]] | None:
    """What is sent instead of one of Celery's own tasks for it, made by hand or by ``celery.chunks``.

    Returns:
        the companion's name and its arguments; ``None`` where the items are no calls of a SafeTask.
    """
    given = (kwargs or {}).get("task")
    if name not in CELERYS or not isinstance(given, dict):
        return None
    from .task import SafeTask

    task = app.tasks.get(given.get("task"))
    if not isinstance(task, SafeTask):
        return None
    items = [list(item) if CELERYS[name] else [item] for item in kwargs["it"]]
    return companion(task).name, (items,)


def _made(cls: Any, name: str, task: SafeTask) -> SafeTask:
    """A task of the task's own class, which differs in its body alone."""

    def run(self: Any, calls_made: list[list[Any]]) -> list[Any]:
        return [self._run_item(index, tuple(item)) for index, item in enumerate(calls_made)]

    def _run_one(*args: Any) -> Any:
        call = cls._user_call
        return finished(call(found, *args) if call is not None else inner_run(*args))

    def inner_run(*args: Any) -> Any:
        return super(made, found).run(*args)

    inside: dict[str, Any] = {
        "name": name,
        "mapped": task.name,
        "run": run,
        "_run_one": staticmethod(_run_one),
        "_inner_run": staticmethod(inner_run),
        "_run_item": _run_item,
        "_item": None,
        "retry": _retry,
        "replace": _replace,
        "_set_aside": classmethod(_nothing),  # the class has set aside what is the user's; it is called for each item
        "_user_call": None,
        "_dump_pydantic_arguments": None,
        "redact": ("calls_made",) if task._redacted() else (),
        "__header__": staticmethod(_header),
        "__doc__": f"Calls of {task.name}, one after another in one job.",
        "__module__": cls.__module__,
    }
    if task.effects is None:
        expected = task.throws or ()
        item = effect_of_items(
            task._body_effect(),
            functools.partial(_by_the_authors_word, _run_one),
            refused=lambda exc: isinstance(exc, expected) and not _safe_to_run_again(exc),
            not_happened=_safe_to_run_again,
        )
        inside |= {"effects": [item], "effect_options": None, "_item": item}
    made: Any = type(f"{cls.__name__}Map", (cls,), inside)
    found: SafeTask = made()
    return found


def _by_the_authors_word(run_one: Any, *args: Any) -> Any:
    """One call of a whole body; a retry that it asked for stands, whatever it did afterwards."""
    job = current.job_here()
    try:
        value = run_one(*args)
    except BaseException as exc:
        if job is not None and job.asked is not None and exc is job.asked.about:
            raise job.asked.retry from exc
        raise
    if job is not None and job.asked is not None:
        raise job.asked.retry
    return value


def _safe_to_run_again(exc: BaseException) -> bool:
    """``retry()`` says so, also where it was told that there is no other run."""
    job = current.job_here()
    over = job is not None and job.retry_over is not None and job.retry_over.raised is exc
    return isinstance(exc, Retry) or over


def _run_item(self: Any, index: int, args: tuple[Any, ...]) -> Any:
    """One call: an operation where the body is one, else a body whose steps begin with the index."""
    job = current.job()
    if job is None:
        return self._run_one(*args)  # called as a function, like any task
    if self._item is None:
        with job.item(index):
            value = self._run_one(*args)
    else:
        try:
            value = calls.call(job, self._item, str(index), None, args, {})
        except EffectRefused as refused:
            cause = refused.__cause__ or refused
            raise cause from EffectRefused(refused.message, **refused.details)
    return value.result if isinstance(value, Outcome) else value


def _retry(self: Any, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
    if args is not None or kwargs is not None:
        raise ConfigurationError(
            f"task {self.name!r}: an item that retries cannot change its arguments; the job's are all items'"
        )
    return super(type(self), self).retry(None, None, *more, **options)


def _replace(self: Any, sig: Any) -> Any:
    raise ConfigurationError(
        f"task {self.name!r}: an item cannot be replaced, since the job is that of all items; send a group of "
        f"{self.mapped!r} instead"
    )


def _header(calls_made: list[list[Any]]) -> None:
    """What a companion is called with."""


def _nothing(cls: Any, *args: Any) -> None:
    """Nothing is set aside."""
