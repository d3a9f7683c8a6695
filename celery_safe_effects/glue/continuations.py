"""Continuations: callbacks, errbacks, chain steps and chord bodies, which a message carries along as signatures.

However often the end of a task is told, each of its continuations is one: it has an id that follows from the message it
came with. And it belongs to the tenant of the job that it goes on from, whoever sends it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final
from uuid import NAMESPACE_OID, uuid5

if TYPE_CHECKING:
    from .batch import Chord

LISTS: Final = ("callbacks", "errbacks", "chain")
NESTED: Final = ("tasks", "header", "body")
BODY_OF: Final = "safe_effects_chord"
"""The header of a body's message, and of its signature, that says which chord's body it is."""
UNLOCK: Final = "celery.chord_unlock"
"""The task of Celery's that waits for a chord's members, where the result backend does not count them."""


class Continuations:
    """What is said of all continuations of one message.

    Arguments:
        message_id: the message's.
        tenant: whom they belong to, where they do not say it themselves; ``None`` says nothing.
        is_safe: whether a task of a name is a SafeTask.
        chords: those whose messages are made just now; each learns its body.
    """

    def __init__(
        self,
        message_id: str,
        tenant: str | None,
        is_safe: Callable[[str], bool],
        chords: dict[str, Chord] | None = None,
    ) -> None:
        self.message_id = message_id
        self.tenant = tenant
        self.is_safe = is_safe
        self.chords = chords or {}

    def of(self, name: str, body: Any, group: str | None = None) -> Any:
        """A message's body with its continuations made definite; the given one is not changed.

        Arguments:
            name: the message's task.
            body: ``(args, kwargs, embed)``.
            group: the group to which the message belongs.
        """
        args, kwargs, embed = body
        changed: dict[str, Any] = {}
        for what in LISTS:
            found = (embed or {}).get(what)
            if found:
                changed[what] = [self._definite(s, f"{self.message_id}:{what}:{i}") for i, s in enumerate(found)]
        if (embed or {}).get("chord"):
            changed["chord"] = self._body(embed["chord"], f"{self.message_id}:chord", group)
        if name == UNLOCK and len(args) > 1:
            args = (args[0], self._body(args[1], f"{args[0]}:chord", args[0]), *args[2:])
        elif not changed:
            return body
        return args, kwargs, {**(embed or {}), **changed}

    def _body(self, signature: Any, path: str, chord_id: str | None) -> Any:
        """A chord's body, which says whose it is, where somebody has to hear that it is out."""
        found = self._definite(signature, path)
        chord = self.chords.get(chord_id or "")
        if chord is not None and isinstance(found, dict):
            options = found["options"]
            options["headers"] = {**(options.get("headers") or {}), BODY_OF: chord.id}
            chord.body = found
        return found

    def _definite(self, signature: Any, path: str) -> Any:
        if not isinstance(signature, dict):
            return signature
        found = dict(signature)
        found["options"] = options = dict(found.get("options") or {})
        if not options.get("task_id"):
            options["task_id"] = str(uuid5(NAMESPACE_OID, path))
        if self.tenant and not options.get("tenant") and self.is_safe(str(found.get("task"))):
            options["tenant"] = self.tenant
        # An errback of a chord's body comes along with each member: its id follows from the body's, not from the path.
        own = str(options["task_id"])
        for what in ("link", "link_error"):
            if options.get(what):
                options[what] = self._all(options[what], f"{own}:{what}")
        if options.get("chord") and options.get("group_id") in self.chords:
            options["chord"] = self._body(options["chord"], f"{own}:chord", options["group_id"])
        found["kwargs"] = kwargs = dict(found.get("kwargs") or {})
        if found.get("subtask_type"):
            for what in NESTED:
                if kwargs.get(what):
                    kwargs[what] = self._all(kwargs[what], f"{path}:{what}")
        return found

    def _all(self, inner: Any, path: str) -> Any:
        if isinstance(inner, (list, tuple)):
            return [self._definite(one, f"{path}:{i}") for i, one in enumerate(inner)]
        return self._definite(inner, path)
