"""Many messages of one form: the first of them goes all of Celery's way, and the others are cast after it.

What Celery and we make of a call depends on its task, its options and its surroundings, which are the same for all of
them, and only in a few named places on its arguments. Where somebody has changed a function on that way, or looks at
arguments on it, all of them go there.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from json.encoder import encode_basestring_ascii as quoted
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from celery import Celery, Task, signals
from celery._state import get_current_task
from celery.app.amqp import AMQP
from celery.app.routes import MapRoute
from celery.canvas import Signature
from kombu.exceptions import EncodeError

from .. import canonical
from ..engine import current
from ..engine.tracing import Tracing
from .acceptance import Candidate, key_of
from .batch import Gathered
from .envelope import JSON, Envelope, Raw
from .task import SafeTask
from .wire import Message

if TYPE_CHECKING:
    from .publish import Publisher

CAST: Final = frozenset({"tenant", "pool", "queue", "priority", "max_attempts", "max_age"})
"""Options that say the same for every call that has them; those with the key are the ones that a call may have."""
_KEY: Final = "idempotency_key"
_PLAIN: Final = (str, int, float, type(None))
_ID, _ARGS, _KWARGS, _BODY = ("<id>", "<argsrepr>", "<kwargsrepr>", "<body>")
IDS: Final = 256
"""Ids that are made of one reading of the system's randomness."""


class Shown(NamedTuple):
    """Plain arguments as texts.

    Attributes:
        reprs: as Celery shows them: the options ``argsrepr`` and ``kwargsrepr``.
        values, named: each of them as JSON.
    """

    reprs: dict[str, str]
    values: list[str]
    named: dict[str, str]

    @classmethod
    def of(cls, args: Any, kwargs: Mapping[str, Any], longest: int) -> Shown | None:
        """The texts, where a short way gives the same as the long one.

        Arguments:
            args, kwargs: a call's.
            longest: characters after which Celery shortens what it shows.
        """
        try:
            values = [_JSON[type(value)](value) for value in args]
            named = {quoted(name): _JSON[type(value)](value) for name, value in kwargs.items()}
        except (KeyError, TypeError, ValueError):
            return None
        shown_args, shown_kwargs = repr(tuple(args)), repr(dict(kwargs))
        if len(shown_args) >= longest or len(shown_kwargs) >= longest:
            return None
        return cls({"argsrepr": shown_args, "kwargsrepr": shown_kwargs}, values, named)

    def body(self, embed: str) -> str:
        """The message's body as kombu's JSON serializer writes it."""
        named = ", ".join([f"{name}: {value}" for name, value in self.named.items()])
        return f"[[{', '.join(self.values)}], {{{named}}}, {embed}]"

    def digest(self, task: str) -> str:
        """What ``arguments_digest`` gives."""
        named = ",".join([f"{name}:{value}" for name, value in sorted(self.named.items())])
        return canonical.digest(f"[{task},[{','.join(self.values)}],{{{named}}}]")


def _text(value: str) -> str:
    """Its JSON.

    Raises:
        ValueError: Celery shows it otherwise than ``repr`` does.
    """
    if not value.isprintable() or "'" in value or '"' in value or "\\" in value:
        raise ValueError
    return quoted(value)


def _number(value: float) -> str:
    if not isfinite(value):
        raise ValueError
    return repr(value)


_JSON: Final[Mapping[type, Callable[[Any], str]]] = {
    str: _text,
    int: repr,
    float: _number,
    bool: {True: "true", False: "false"}.__getitem__,
    type(None): {None: "null"}.__getitem__,
}


class _Mould:
    """A form.

    Arguments:
        first: the message that went all the way.
        longest: characters after which Celery shortens what it shows.
        exact: whether nobody looks at messages on their way to the broker, who would find a body there that is encoded.

    Raises:
        ValueError: it makes another message than that.
    """

    def __init__(self, first: Gathered, longest: int, exact: bool) -> None:
        self.hint, self.candidate = first
        envelope = self.candidate.envelope
        args, kwargs, self.embed = envelope.body
        self.exact = exact
        self.is_root = envelope.headers["root_id"] == self.candidate.id
        self.embedded = canonical.encode(self.embed)
        self.task = quoted(envelope.task)
        headers = {**envelope.headers, "id": _ID, "argsrepr": _ARGS, "kwargsrepr": _KWARGS}
        if self.is_root:
            headers["root_id"] = _ID
        properties = {**envelope.properties, "correlation_id": _ID}
        text = replace(envelope, headers=headers, properties=properties, body=_BODY).encode("json").decode()
        self.pieces = re.split(
            f"({'|'.join(map(quoted, (_ID, _ARGS, _KWARGS)))}|{re.escape(quoted(quoted(_BODY)))})", text
        )
        shown = Shown.of(args, kwargs, longest)
        if shown is None or self.encoded(self.candidate.id, shown)[1:] != (
            self.candidate.params["envelope"],
            self.candidate.params["digest"],
        ):
            raise ValueError("messages of this form cannot be cast")

    def encoded(self, job_id: str, shown: Shown) -> tuple[str, bytes, str]:
        """The body, the stored message and the fingerprint of a call."""
        body = shown.body(self.embedded)
        places = {
            quoted(_ID): quoted(job_id),
            quoted(_ARGS): quoted(shown.reprs["argsrepr"]),
            quoted(_KWARGS): quoted(shown.reprs["kwargsrepr"]),
            quoted(quoted(_BODY)): quoted(body),
        }
        return body, "".join([places.get(piece, piece) for piece in self.pieces]).encode(), shown.digest(self.task)

    def cast(
        self, job_id: str, args: tuple[Any, ...], kwargs: dict[str, Any], key: str | None, shown: Shown
    ) -> Gathered:
        """A message of this form."""
        body, data, digest = self.encoded(job_id, shown)
        envelope, hint = self.candidate.envelope, self.hint
        headers = {**envelope.headers, **shown.reprs, "id": job_id}
        if self.is_root:
            headers["root_id"] = job_id
        properties = {**envelope.properties, "correlation_id": job_id}
        made = Envelope(headers, properties, (args, kwargs, self.embed), envelope.options)
        params = {**self.candidate.params, "id": job_id, "key": key, "digest": digest, "envelope": data}
        message = Message(hint.name, (headers, properties, made.body, None), hint.options)
        if self.exact:
            message = message.exactly(Raw(JSON, "utf-8", body))
        return Gathered(message, Candidate(made, params))


class Moulds:
    """The forms of one ``enqueue_many``.

    Arguments:
        publisher: the way out.
    """

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self._made: dict[Any, _Mould] = {}
        self._tasks: dict[str, bool] = {}
        self._usable = self._is_usual()
        self._exact = not signals.before_task_publish.receivers
        self._longest: int = publisher.app.amqp.argsrepr_maxsize
        self._ids = _ids()

    def shown(self, signature: Signature) -> Shown | None:
        """The arguments of a call as texts; ``None`` where only Celery can tell."""
        if "argsrepr" in signature.options or "kwargsrepr" in signature.options:
            return None
        return Shown.of(signature.args, signature.kwargs, self._longest)

    def cast(self, signature: Signature, shown: Shown | None) -> Gathered | None:
        """The message of a call, if one of its form was made before.

        Arguments:
            signature: the call.
            shown: its arguments.

        Returns:
            what a batch gathers; ``None`` where the call has to go all the way, and is kept then.

        Raises:
            TypeError: the task does not take these arguments.
            PayloadInvalid, PayloadTooLarge: as on the long way.
        """
        form = self._form(signature) if shown is not None else None
        mould = self._made.get(form) if form is not None else None
        if mould is None or shown is None:
            return None
        args, kwargs = tuple(signature.args), dict(signature.kwargs)
        task = self.publisher.app.tasks[signature["task"]]
        if task.typing:
            task.__header__(*args, **kwargs)
        made = mould.cast(next(self._ids), args, kwargs, key_of(signature.options.get(_KEY)), shown)
        self.publisher.acceptance.must_fit(made.candidate.envelope.task, made.candidate.params["envelope"])
        return made

    def keep(self, signature: Signature, shown: Shown | None, made: Gathered) -> None:
        """Remember a message that went all the way."""
        form = self._form(signature) if shown is not None else None
        _, properties, _, sent_event = made.hint.parts
        if form is None or sent_event is not None or properties.get("correlation_id") != made.candidate.id:
            return
        with contextlib.suppress(ValueError, EncodeError):
            self._made[form] = _Mould(made, self._longest, self._exact)

    def _form(self, signature: Signature) -> Any:
        """What calls of one form have in common; ``None`` for a call that has to go all the way."""
        if not self._usable or type(signature) is not Signature:
            return None
        options = signature.options
        said = [(name, options[name]) for name in sorted(options) if name != _KEY]
        if not all(name in CAST and type(value) in _PLAIN for name, value in said):
            return None
        name = signature["task"]
        if name not in self._tasks:
            self._tasks[name] = self._is_usual_task(self.publisher.app.tasks.get(name))
        return (name, *said) if self._tasks[name] else None

    def _is_usual(self) -> bool:
        """Nothing around here looks at single messages while they are made."""
        publisher = self.publisher
        app: Any = publisher.app
        return (
            current.job() is None
            and get_current_task() is None
            and getattr(publisher.celerys_send_task, "__func__", None) is Celery.send_task
            and type(app.amqp).as_task_v2 is AMQP.as_task_v2
            and all(isinstance(router, MapRoute) for router in app.amqp.routes)
            and type(publisher.safe.hooks.tracing) is Tracing
        )

    @staticmethod
    def _is_usual_task(task: Any) -> bool:
        made = type(task)
        return (
            isinstance(task, SafeTask)
            and made.apply_async is SafeTask.apply_async
            and made.shadow_name is Task.shadow_name
            and not task._redacted()
        )


def _ids() -> Iterator[str]:
    """Random ids as Celery's: of one reading of the system's randomness, many."""
    while True:
        found = os.urandom(16 * IDS).hex()
        for at in range(0, len(found), 32):
            one = found[at : at + 32]
            variant = "89ab"[int(one[16], 16) & 3]
            yield f"{one[:8]}-{one[8:12]}-4{one[13:16]}-{variant}{one[17:20]}-{one[20:]}"


__all__ = ["Moulds", "Shown"]
