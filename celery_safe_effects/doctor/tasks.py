"""The app's declarations: tasks that look safe and are not, effects that nothing can resolve, idle settings."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any, Final

from ..effects import Effect, all_effects
from ..glue.task import SafeTask
from .finding import Finding, Patient, names, problem, warning

HOOKS: Final = ("apply_async", "apply", "retry", "replace", "start_strategy", "bind")
"""What SafeTask does its work in, and what an override must hand on to it."""


def declarations(p: Patient) -> Iterator[Finding]:
    """What a worker would refuse: raises, with the words that mend it."""
    p.safe.check_declarations()
    yield from ()


def plain_with_effects(p: Patient) -> Iterator[Finding]:
    """An effect in a plain task does nothing but raise; ``effects=`` on it means nothing."""
    for name, task in sorted(p.app.tasks.items()):
        if name.startswith("celery.") or isinstance(task, SafeTask):
            continue
        if getattr(task, "effects", None) is not None or getattr(task, "effect_options", None) is not None:
            yield problem(
                "plain_task_with_effects",
                f"task {name!r} declares effects and is a plain task: it is neither recorded nor protected",
                "give it base=SafeTask",
            )
            continue
        called = _effects_in(getattr(task, "_orig_run", None) or task.run)
        if called:
            yield problem(
                "plain_task_calls_effect",
                f"task {name!r} is a plain task and calls {names(called)}, which raises NoActiveJob there",
                "give it base=SafeTask and effects=[...]",
            )


def _effects_in(fn: Any) -> set[str]:
    """The effects that a function's code names."""
    fn = inspect.unwrap(getattr(fn, "__func__", fn))
    if not isinstance(fn, types.FunctionType):
        return set()
    found: set[str] = set()
    codes = [fn.__code__]
    while codes:
        code = codes.pop()
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        values = [fn.__globals__.get(name) for name in code.co_names]
        found |= {value.name for value in values if isinstance(value, Effect)}
    for cell in fn.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not yet assigned
            continue
        if isinstance(value, Effect):
            found.add(value.name)
    return found


def bypassed_hooks(p: Patient) -> Iterator[Finding]:
    """A base class that does not hand on what it overrides leaves jobs unrecorded."""
    for task in p.safe_tasks:
        for hook in HOOKS:
            owner = next(base for base in type(task).__mro__ if hook in vars(base))
            if owner is SafeTask or not issubclass(type(task), SafeTask) or owner in SafeTask.__mro__:
                continue
            code = getattr(inspect.unwrap(getattr(vars(owner)[hook], "__func__", vars(owner)[hook])), "__code__", None)
            if code is not None and not _hands_on(code):
                yield problem(
                    "hook_bypassed",
                    f"task {task.name!r}: its class {owner.__name__} overrides {hook} and never calls "
                    f"super().{hook}(): "
                    "what SafeTask does there does not happen",
                    f"call super().{hook}(...) in it",
                )


def _hands_on(code: types.CodeType) -> bool:
    if {"super", "SafeTask"} & set(code.co_names):
        return True
    return any(_hands_on(const) for const in code.co_consts if isinstance(const, types.CodeType))


def unresolvable_effects(p: Patient) -> Iterator[Finding]:
    """Without key, lookup and policy, only an operator can tell what became of a lost call."""
    bodies = [task._body_effect() for task in p.safe_tasks if task.effects is None]
    open_ended = {
        found.name
        for found in [*all_effects(), *bodies]
        if not found.options.repeatable
        and found.find is None
        and found.options.idempotent_for is None
        and found.options.if_unknown == "park"
    }
    if open_ended:
        yield warning(
            "effect_unresolvable",
            f"{names(open_ended)}: neither idempotent_for nor a lookup is declared, so each call that a crash "
            "interrupts "
            "waits for an operator",
            "declare how long the provider retains keys, or a lookup",
        )


def unknown_to_workers(p: Patient) -> Iterator[Finding]:
    """Workers go first: an old one would run the task unclaimed, and producers take its name for a plain task's."""
    wanted = [task.name for task in p.safe_tasks]
    missing = {row.name for row in p.safe.store.rows("DOCTOR_TASKS", names=wanted) if not row.known}
    if missing:
        yield warning(
            "task_unknown_to_workers",
            f"no worker has ever declared {names(missing)} as a SafeTask",
            "deploy workers before producers: a worker with older code may run it unclaimed",
        )


def settings(p: Patient) -> Iterator[Finding]:
    """Settings of Celery that do nothing for SafeTasks, or undo them."""
    eager = p.conf.task_always_eager
    if eager:
        yield warning(
            "always_eager",
            "task_always_eager is on: jobs run inside the producer",
            "turn it off outside tests",
        )
    rejecting = {task.name for task in p.safe_tasks if task.reject_on_worker_lost}
    if rejecting or p.conf.task_reject_on_worker_lost:
        which = names(rejecting) if rejecting else "every task"
        yield warning(
            "reject_on_worker_lost",
            f"reject_on_worker_lost is set for {which}, and has no effect there: a SafeTask whose worker is lost "
            "goes back "
            "to the queue, or is parked, by its row",
            "remove it, so that nobody relies on it",
        )


CHECKS: Final = (plain_with_effects, bypassed_hooks, unresolvable_effects, unknown_to_workers, settings)
