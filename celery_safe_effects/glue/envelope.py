"""The stored message: everything needed to publish it again, and the mark that ties it to its row."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from kombu import serialization

from .. import canonical
from . import routing

MARK: Final = "safe_effects"
"""The message header that says: this message has a row."""

HEADERS: Final = (
    "lang", "task", "id", "shadow", "eta", "expires", "group", "group_index", "retries", "timelimit", "root_id",
    "parent_id", "argsrepr", "kwargsrepr", "origin", "ignore_result", "replaced_task_nesting", "stamped_headers",
    "stamps",
)  # fmt: skip
"""What Celery's message protocol 2 carries in the headers."""

TRACE: Final = ("traceparent", "tracestate")
"""What a tracer adds to them (W3C Trace Context)."""

OPAQUE: Final = "raw:"
"""Begins the digest of a call whose arguments are not JSON."""


def is_marked(header: Any) -> bool:
    """Whether a message's header was written by some version of this library: its message has a row."""
    return isinstance(header, Mapping) and isinstance(header.get("v"), int)


@dataclass(frozen=True)
class Mark:
    """What a marked message says of its row."""

    seq: int
    generation: int
    digest: str
    tenant: str

    def header(self) -> dict[str, Any]:
        """As a message header."""
        return {"v": 1, "seq": self.seq, "gen": self.generation, "digest": self.digest, "tenant": self.tenant}

    @classmethod
    def of(cls, value: Any) -> Mark | None:
        """Read a header; ``None`` where there is none that this version understands."""
        if not is_marked(value) or value["v"] != 1:
            return None
        try:
            return cls(int(value["seq"]), int(value["gen"]), str(value["digest"]), str(value["tenant"]))
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True)
class Envelope:
    """A task message with its routing, before it is published."""

    headers: dict[str, Any]
    properties: dict[str, Any]
    body: Any
    options: dict[str, Any]

    @classmethod
    def of_request(cls, request: Mapping[str, Any], args: Any, kwargs: Any) -> Envelope:
        """The envelope of a message that a worker received.

        Arguments:
            request: the request as Celery's mapping, with the message's headers, properties and delivery info.
            args, kwargs: the decoded arguments.
        """
        embed = {name: request.get(name) for name in ("callbacks", "errbacks", "chain", "chord")}
        delivery = request.get("delivery_info") or {}
        options = routing.of_delivery(delivery)
        properties = {
            "correlation_id": request.get("correlation_id") or request["id"],
            "reply_to": request.get("reply_to") or "",
        }
        headers = {name: request.get(name) for name in HEADERS}
        headers |= {name: request[name] for name in TRACE if request.get(name)}
        return cls(headers, properties, (list(args), dict(kwargs), embed), options)

    @property
    def id(self) -> str:
        return str(self.headers["id"])

    @property
    def task(self) -> str:
        return str(self.headers["task"])

    @property
    def needs_settling(self) -> bool:
        """Whether Celery has anything to do after the job's end: a result to store, or a continuation to send."""
        embed = self.body[2] or {}
        follows = any(embed.get(name) for name in ("callbacks", "errbacks", "chain", "chord"))
        return bool(follows or self.headers.get("group") or not self.headers.get("ignore_result"))

    def digest(self, encoded: bytes) -> str:
        """Fingerprint of task and arguments; of the encoded message, where the arguments are not JSON."""
        found = arguments_digest(self.task, self.body[0], self.body[1])
        return found or OPAQUE + hashlib.sha256(encoded).hexdigest()

    def encode(self, serializer: str) -> bytes:
        """As stored in the row.

        Raises:
            kombu.exceptions.EncodeError, TypeError, ValueError: when the arguments cannot be encoded.
        """
        content_type, encoding, data = serialization.dumps(self.body, serializer)
        if isinstance(data, bytes):
            body: Any = {"base64": base64.b64encode(data).decode("ascii")}
        else:
            body = data
        # Signatures and lazy objects may hide in the metadata.
        return canonical.encode(
            {
                "headers": self.headers,
                "properties": self.properties,
                "options": self.options,
                "content": [content_type, encoding, body, serializer],
            }
        ).encode("utf-8", "surrogatepass")

    @classmethod
    def decode(cls, data: bytes, accept: Any) -> Envelope:
        """Read a stored envelope; ``accept`` are the app's accepted content types."""
        stored = json.loads(bytes(data).decode("utf-8", "surrogatepass"))
        content_type, encoding, body, serializer = stored["content"]
        raw = base64.b64decode(body["base64"]) if isinstance(body, dict) else body
        decoded = serialization.loads(raw, content_type, encoding, accept=serialization.prepare_accept_content(accept))
        options = dict(stored["options"])
        options["serializer"] = serializer
        return cls(stored["headers"], stored["properties"], decoded, options)

    def marked(self, mark: Mark, *, eta: datetime | None = None, retries: int | None = None) -> Envelope:
        """The message to publish for a row: marked, without expiry (the database judges it), with the row's time."""
        headers = dict(self.headers)
        headers[MARK] = mark.header()
        headers["expires"] = None
        headers["eta"] = eta.isoformat() if eta is not None else None
        if retries is not None:
            headers["retries"] = retries
        return replace(self, headers=headers)


def arguments_digest(task: str, args: Any, kwargs: Any) -> str | None:
    """Fingerprint of a call; ``None`` for arguments that are not JSON, which are then compared by the mark alone."""
    try:
        return canonical.fingerprint([task, list(args or ()), dict(kwargs or {})])
    except (TypeError, ValueError):
        return None


def stamps_of(headers: Mapping[str, Any]) -> str | None:
    """A message's stamps as the row keeps them, so that a revoke by stamp finds it; ``None`` where there are none."""
    values = headers.get("stamps") or {}
    found = stamps({name: values.get(name) for name in headers.get("stamped_headers") or ()})
    return json.dumps(found) if found else None


def stamps(values: Mapping[str, Any]) -> list[str]:
    """Stamps as texts that are equal where they are: one for each header and value."""
    found: set[str] = set()
    for name, value in values.items():
        many = value if isinstance(value, (list, tuple, set, frozenset)) else [value]
        found.update(canonical.encode([name, one]) for one in many if one is not None)
    return sorted(found)
