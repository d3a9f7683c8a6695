"""Celery's versions: the names that the library relies upon beyond what Celery documents, and what versions do apart.

Everything else of the package is written against what Celery 5.5 to 5.7 have in common. A worker on a Celery that lacks
one of these names does not start: a hook that is no longer called would let messages out without a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import CodeType
from typing import Any, Final, NamedTuple

import celery

from ..errors import ConfigurationError

SUPPORTED: Final = ("5.5", "5.6", "5.7")
"""The minor versions of Celery that the tests are run on."""


class Reliance(NamedTuple):
    """A name of Celery's, and what it is needed for.

    ``owner`` is a module, ``module:Class``, or ``module:function()`` for an attribute that a function's code names.
    """

    owner: str
    name: str
    why: str


RELIED_UPON: Final = (
    Reliance("celery.app.base:Celery", "amqp_cls", "publish: our AMQP wraps the sending of task messages"),
    Reliance("celery.app.base:Celery", "send_task", "publish: existing jobs in place of new ones"),
    Reliance("celery.app.base:Celery", "_task_from_fun", "task: task_cls=SafeTask leaves Celery's own tasks alone"),
    Reliance("celery.app.amqp:AMQP", "_create_task_sender", "publish: the function that sends a task message"),
    Reliance("celery.app.amqp:AMQP", "send_task_message", "publish: what everything that is sent passes"),
    Reliance("celery.app.amqp:Queues", "select_add", "worker: our queue is consumed, also with -Q"),
    Reliance("celery.app.amqp:Queues", "new_missing", "wire: an express lane is made as a missing queue is"),
    Reliance("celery.backends.rpc:RPCBackend", "on_task_call", "results: the reply queue, declared without end"),
    Reliance("celery.backends.rpc:RPCBackend", "binding", "results: the reply queue"),
    Reliance("celery.canvas", "uuid", "canvas: ids that follow from the job or the canvas's name"),
    Reliance("celery.canvas", "_chain", "canvas: accepted whole"),
    Reliance("celery.canvas", "_chord", "canvas: accepted whole"),
    Reliance("celery.canvas:_chord", "run", "chords: written down with their members"),
    Reliance("celery.backends.base:Backend", "chord_error_from_stack", "chords: what Celery tells a body's errbacks"),
    Reliance("celery.backends.base:Backend", "_call_task_errbacks", "errbacks: jobs, not calls"),
    Reliance("kombu.connection:Connection", "_reraise_as_library_errors", "wire: what a lost broker raises"),
    Reliance("celery.local:Proxy", "_get_current_object", "publish: the task behind current_task"),
    Reliance("celery.app.task:Task", "_get_app", "task: the app's SafeEffects"),
    Reliance("celery.app.task:Task", "request_stack", "asynchronous: a coroutine finds its request"),
    Reliance("celery._state", "_task_stack", "asynchronous: a coroutine finds its task"),
    Reliance("celery.utils.threads:_LocalStack", "__ident_func__", "asynchronous: whose stack it is"),
    Reliance("celery.app.task:Task", "Request", "task: our request in the worker's main process"),
    Reliance("celery.app.task:Task", "start_strategy", "task: no consuming without SafeEffects"),
    Reliance("celery.app.autoretry:add_autoretry_behaviour()", "_orig_run", "execution: autoretry is not the author"),
    Reliance("celery.worker.consumer:Consumer", "update_strategies", "gate: our mapping is filled by it"),
    Reliance("celery.worker.consumer:Consumer", "create_task_handler", "gate: our mapping is asked by it"),
    Reliance("celery.worker.consumer:Consumer.__init__()", "strategies", "gate: the mapping that ours replaces"),
    Reliance("celery.worker.consumer:Consumer", "on_unknown_task", "gate: an unmarked message of an unknown task"),
    Reliance("celery.worker.request:Request", "_request_dict", "request: the message's headers"),
    Reliance("celery.worker.request:Request", "_payload", "request: the message's arguments"),
    Reliance("celery.worker.request:Request", "_context", "request: what backends take"),
    Reliance("celery.worker.request:Request", "_apply_result", "request: the pool's handle on the task"),
    Reliance("celery.worker.request:Request", "_already_cancelled", "request: given up once"),
    Reliance("celery.worker.request:Request", "_already_revoked", "request: revoked once"),
    Reliance("celery.worker.request:Request", "_announce_revoked", "request: a revoke cancels the row"),
    Reliance("celery.worker.request:Request", "on_accepted", "request: persisted before it is acknowledged"),
    Reliance("celery.worker.request:Request", "on_failure", "request: a lost child"),
    Reliance("celery.worker.request:Request", "on_timeout", "request: a hard time limit"),
    Reliance("celery.worker.request:Request", "cancel", "request: given up by the worker"),
    Reliance("celery.worker.request:Request", "terminate", "request: revoke(terminate=True)"),
    Reliance("celery.worker.request:Request", "maybe_expire", "request: the database judges expiry"),
    Reliance("celery.worker.state", "should_stop", "stopping: a stop of the worker costs no attempt"),
    Reliance("celery.worker.state", "should_terminate", "stopping, request: the same"),
    Reliance("celery.worker.worker:WorkController", "wait_for_soft_shutdown", "worker: a cold stop begins with it"),
    Reliance("billiard.common", "_should_have_exited", "stopping: a child was told to end by a signal"),
    Reliance("celery.worker.pidbox:Pidbox.__init__()", "node", "revoke: our commands come before Celery's"),
    Reliance("celery.worker.consumer.control:Control.__init__()", "box", "revoke: the step that has the mailbox"),
    Reliance("kombu.pidbox:Node", "handlers", "revoke: the commands that a worker hears"),
    Reliance("celery.worker.control:Panel", "data", "revoke: Celery's own commands"),
)


def missing() -> list[Reliance]:
    """The names that the installed Celery does not have."""
    return [one for one in RELIED_UPON if not _has(one)]


def check() -> None:
    """Refuse a Celery that the library cannot keep its promises on.

    Raises:
        ConfigurationError: naming what is missing and which versions are known to work.
    """
    lacking = missing()
    if lacking:
        names = ", ".join(f"{one.owner}.{one.name}" for one in lacking)
        raise ConfigurationError(
            f"Celery {celery.__version__} lacks {names}, which celery-safe-effects relies upon; install Celery "
            f"{SUPPORTED[0]} to {SUPPORTED[-1]}, or a newer celery-safe-effects"
        )


def _has(one: Reliance) -> bool:
    module, _, path = one.owner.partition(":")
    try:
        owner: Any = import_module(module)
        for part in path.removesuffix("()").split(".") if path else ():
            owner = getattr(owner, part)
    except (ImportError, AttributeError):
        return False
    if path.endswith("()"):
        return any(one.name in code.co_names for code in _codes(owner.__code__))
    return hasattr(owner, one.name)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)
