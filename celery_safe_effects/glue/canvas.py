"""Canvases: a group, chain or chord of SafeTasks is accepted whole or not at all, and found again by its name.

Celery makes the messages of a canvas one by one; they are gathered, and accepted in one transaction when it is done.
It takes every id from one function of its module; in a job's body, and in a canvas that has a name, ids follow from it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from celery import canvas, current_task
from celery.app.trace import build_tracer
from kombu import serialization
from kombu.exceptions import EncodeError

from .. import canonical
from ..engine import current
from ..errors import ConfigurationError, PayloadInvalid
from .acceptance import DEFAULT_TENANT, key_of
from .batch import gathering
from .envelope import MARK
from .wire import Message

if TYPE_CHECKING:
    from .publish import Publisher

ACCUMULATE: Final = "celery.accumulate"
CANVASES: Final = (canvas.group, canvas._chain, canvas._chord)


def install() -> None:
    """Change Celery's canvas, once a process; apps without SafeEffects see no difference."""
    original = canvas.uuid
    if getattr(original, "_safe_effects", False):
        return

    def uuid(*args: Any, **kwargs: Any) -> str:
        batch = gathering()
        if batch is not None and batch.name is not None:
            return batch.next_id()
        job = current.job()
        return job.child_id() if job is not None else original(*args, **kwargs)

    uuid._safe_effects = True  # type: ignore[attr-defined]
    canvas.uuid = uuid
    for cls in CANVASES:
        cls.apply_async = _applied(cls.apply_async)
    canvas._chain.apply = _run_at_once(canvas._chain.apply)


def _applied(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply_async(self: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        safe = self.app.__dict__.get("_safe_effects")
        if safe is None:
            return original(self, args, kwargs, **options)
        return Canvas(safe.publisher, self).apply(original, args, kwargs, options)

    return apply_async


def _run_at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(self: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        if "_safe_effects" in self.app.__dict__ and ("task_id" in self.options or "task_id" in options):
            # Celery runs every step of it under the one id.
            self = self.clone()
            self.options.pop("task_id", None)
            options.pop("task_id", None)
        return original(self, args, kwargs, **options)

    return apply


class Canvas:
    """One canvas that is being applied.

    Arguments:
        publisher: the way out.
        signature: Celery's.
    """

    def __init__(self, publisher: Publisher, signature: Any) -> None:
        self.publisher = publisher
        self.app = publisher.app
        self.signature = signature

    def apply(self, original: Callable[..., Any], args: Any, kwargs: Any, options: dict[str, Any]) -> Any:
        """What its ``apply_async`` does.

        Raises:
            ConfigurationError: for a name or a transaction that cannot be kept.
            What accepting raises; nothing was accepted then, and nothing published.
        """
        transaction = options.get("transaction")
        given = {**self.signature.options, **options}
        key, tenant = given.get("idempotency_key"), given.get("tenant")
        if gathering() is not None:
            if transaction is not None or key is not None:
                raise _not_inside("transaction=" if transaction is not None else "idempotency_key=", self.signature)
            return original(self.signature, args, kwargs, **options)
        if not self._concerns_us(transaction, key):
            return original(self.signature, args, kwargs, **options)
        options = {name: value for name, value in options.items() if name not in ("transaction", "idempotency_key")}
        signature, name = self.signature, None
        if key is not None:
            named = key_of(key) or ""
            signature = copied(signature, self.app)
            signature.options.pop("idempotency_key", None)
            whose = str(self.publisher.acceptance.inherited({"tenant": tenant}) or DEFAULT_TENANT)
            name = f"{whose}\x1f{named}\x1f{self._fingerprint(signature, args, kwargs)}"
            self._give_keys(signature, named)
        if self.app.conf.task_always_eager:
            if transaction is not None:
                raise ConfigurationError("transaction= has no meaning where jobs run at once (task_always_eager)")
            return original(signature, args, kwargs, **options)
        with self.publisher.whole(transaction=transaction, tenant=tenant, name=name):
            return original(signature, args, kwargs, **options)

    def _concerns_us(self, transaction: Any, key: Any) -> bool:
        """Whether there is a SafeTask in it, or something that only we can keep."""
        inside = list(parts_of(self.signature))
        for one in inside:
            if "transaction" in one.options:
                raise _not_inside("transaction=", one)
        if any(self.publisher.is_safe(one["task"]) for one in inside):
            return True
        if key is not None:
            raise ConfigurationError(
                f"idempotency_key= names canvases of SafeTasks, and {self.signature!r} has none; nothing was enqueued"
            )
        return transaction is not None

    def _give_keys(self, signature: Any, key: str) -> None:
        """The members of a named canvas are ``<key>:<index>``, those of a canvas in it ``<key>:<index>:<index>``."""
        for index, member in enumerate(members(signature)):
            if isinstance(member, CANVASES):
                self._give_keys(member, f"{key}:{index}")
            elif self.publisher.is_safe(member["task"]):
                member.options.setdefault("idempotency_key", f"{key}:{index}")

    def _fingerprint(self, signature: Any, args: Any, kwargs: Any) -> str:
        """Of all that is called; another canvas of the same name then conflicts with it in every member."""
        shape = [_shape(signature), list(args or ()), dict(kwargs or {})]
        try:
            return canonical.fingerprint(shape)
        except (TypeError, ValueError):
            serializer = self.app.conf.task_serializer
            try:
                *_, data = serialization.dumps(shape, serializer)
            except (EncodeError, TypeError, ValueError) as exc:
                raise PayloadInvalid(
                    f"the arguments of {signature!r} cannot be encoded as {serializer}: {exc}; nothing was enqueued"
                ) from exc
            return hashlib.sha256(data if isinstance(data, bytes) else data.encode()).hexdigest()


def with_end(signature: Any, app: Any) -> Any:
    """A canvas that may take the id of a job which it replaces: that id has a row, and no other job can have it.

    Celery gives the id to the last task of the canvas. So another step takes the result on, as it already does for
    groups in this place: a task of Celery's that needs no message (see :func:`hand_on`).
    """
    if not isinstance(signature, CANVASES) or isinstance(signature, canvas.group):
        return signature
    steps = list(signature.tasks) if isinstance(signature, canvas._chain) else [signature]
    if not steps or isinstance(steps[-1], canvas.group):
        return signature
    # Written out: `|` would put the step into the body of a chord, and Celery lose the chord that the job belongs to.
    made = canvas._chain(*steps, app.tasks[ACCUMULATE].s(index=0), app=app)
    return made.set(**signature.options) if isinstance(signature, canvas._chain) else made


def hand_on(app: Any, message: Message) -> bool:
    """Run Celery's ``accumulate`` where it would be sent: whoever has the value has no need of a message to return it.

    So the continuations of a replaced job do not depend on a message that nothing would send again.

    Returns:
        whether it was done.
    """
    sender = current_task
    if message.name != ACCUMULATE or not sender or current.job() is not None:
        return False
    headers, properties, (args, kwargs, embed), _ = message.parts
    request = {
        **headers,
        **properties,
        **{what: (embed or {}).get(what) for what in ("callbacks", "errbacks", "chain", "chord")},
        "args": args,
        "kwargs": kwargs,
        "hostname": sender.request.hostname,
        "delivery_info": dict(sender.request.delivery_info or {}),
        MARK: getattr(sender.request, MARK, None),
    }
    task = app.tasks[ACCUMULATE]
    trace = build_tracer(ACCUMULATE, task, app=app, hostname=sender.request.hostname)
    value, error, *_ = trace(headers["id"], args, kwargs, request)
    safe = app.__dict__.get("_safe_effects")
    if safe is not None and error is None and request["chord"]:
        safe.publisher.chords.became(headers["id"], value)
    return True


def members(signature: Any) -> list[Any]:
    """The parts of a canvas in the order in which they are written; a chord's body comes last."""
    if isinstance(signature, canvas._chord):
        header = signature.tasks
        parts = list(header.tasks if isinstance(header, canvas.group) else header)
        return parts + ([signature.body] if signature.body is not None else [])
    return list(signature.tasks)


def parts_of(signature: Any) -> Iterator[Any]:
    """A signature, and all that are in it or linked to it."""
    signature = canvas.maybe_signature(signature)
    yield signature
    inside = members(signature) if isinstance(signature, CANVASES) else []
    for one in (*_linked(signature, "link"), *_linked(signature, "link_error"), *inside):
        yield from parts_of(one)


def _not_inside(option: str, signature: Any) -> ConfigurationError:
    return ConfigurationError(
        f"{option} is given to the apply_async() of the whole canvas, not to {signature['task']!r} in it; nothing was "
        "enqueued"
    )


def _linked(signature: Any, what: str) -> list[Any]:
    return canvas.maybe_list(signature.options.get(what)) or []


def copied(signature: Any, app: Any) -> Any:
    """A canvas whose members may be changed without the caller's being changed."""
    found = canvas.maybe_signature(signature, app=app).clone()
    if isinstance(found, canvas._chord):
        header = found.tasks
        if isinstance(header, canvas.group):
            found.tasks = copied(header, app)
        else:
            found.tasks = [copied(member, app) for member in header]
        if found.body is not None:
            found.body = copied(found.body, app)
    elif isinstance(found, CANVASES):
        found.tasks = [copied(member, app) for member in found.tasks]
    return found


def _shape(signature: Any) -> list[Any]:
    inner = {"tasks", "header", "body"} if isinstance(signature, CANVASES) else set()
    kwargs = {name: value for name, value in signature.kwargs.items() if name not in inner}
    parts = [_shape(member) for member in members(signature)] if inner else []
    return [signature["task"], list(signature.args), kwargs, bool(signature.immutable), parts]
