"""The stored message: everything needed to publish it again, and the mark that ties it to its row."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, NamedTuple

from kombu import serialization
from kombu.exceptions import DecodeError

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

INERT: Final = frozenset(
    {"application/json", "application/x-msgpack", "application/data", "application/text", "text/plain"}
)
"""Content types that are data and nothing else: decoding them runs no code of the message's."""
SCALARS: Final = frozenset({str, int, float, bool, type(None)})
OPAQUE: Final = "raw:"
"""Begins the digest of a call whose arguments are not JSON."""


def is_marked(header: Any) -> bool:
    """Whether a message's header was written by some version of this library: its message has a row."""
    return isinstance(header, Mapping) and isinstance(header.get("v"), int)


JSON: Final = "application/json"
SURE: Final = ("json", "pickle")
"""Serializers that give back what they were given, or say so at once."""
CONTENT_TYPE: Final = "safe_effects_content_type"
"""Where a request keeps the content type of its message."""


class Raw(NamedTuple):
    """A message's body as the broker has it."""

    content_type: str
    encoding: str
    data: Any

    @property
    def inert(self) -> bool:
        """Whether decoding it cannot run anything."""
        return self.content_type in INERT

    @classmethod
    def stored(cls, data: bytes) -> Raw:
        """The body of a stored envelope."""
        content_type, encoding, body, _ = json.loads(bytes(data).decode("utf-8", "surrogatepass"))["content"]
        return cls(content_type, encoding, base64.b64decode(body["base64"]) if isinstance(body, dict) else body)

    def same_as(self, other: Raw) -> bool:
        """Whether both carry the same call: byte for byte, or as JSON."""
        if self.content_type != other.content_type:
            return False
        mine, others = _bytes(self.data), _bytes(other.data)
        return mine == others or (self.content_type == JSON and _plain(mine) == _plain(others))


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

    @property
    def serializer(self) -> str | None:
        """The serializer of the message; ``None`` leaves it to the app."""
        return self.options.get("serializer")

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
        serializer = serialization.registry.type_to_name.get(request.get(CONTENT_TYPE) or "")
        if serializer is not None:
            options["serializer"] = serializer
        properties = {
            "correlation_id": request.get("correlation_id") or request["id"],
            "reply_to": request.get("reply_to") or "",
        }
        headers = {name: request.get(name) for name in HEADERS}
        headers |= {name: request[name] for name in TRACE if request.get(name)}
        return cls(headers, properties, (list(args), dict(kwargs), embed), options)

    @classmethod
    def unread(cls, message: Any) -> Envelope:
        """The envelope of a received message that cannot be decoded here.

        Arguments:
            message: kombu's.
        """
        delivery = {"priority": message.properties.get("priority"), **(message.delivery_info or {})}
        made = cls.of_request({**message.headers, **message.properties, "delivery_info": delivery}, (), {})
        return replace(made, body=Raw(message.content_type, message.content_encoding, message.body))

    @property
    def id(self) -> str:
        return str(self.headers["id"])

    @property
    def task(self) -> str:
        return str(self.headers["task"])

    @property
    def needs_settling(self) -> bool:
        """Whether Celery has anything to do after the job's end: a result to store, or a continuation to send."""
        if isinstance(self.body, Raw):
            return True
        embed = self.body[2] or {}
        follows = any(embed.get(name) for name in ("callbacks", "errbacks", "chain", "chord"))
        return bool(follows or self.headers.get("group") or not self.headers.get("ignore_result"))

    def digest(self, serializer: str) -> str:
        """Fingerprint of task and arguments; of the arguments as they are encoded, where they are not JSON."""
        if isinstance(self.body, Raw):
            return OPAQUE + hashlib.sha256(_bytes(self.body.data)).hexdigest()
        args, kwargs, _ = self.body
        found = arguments_digest(self.task, args, kwargs)
        if found is not None:
            return found
        _, _, data = serialization.dumps([self.task, list(args or ()), dict(kwargs or {})], serializer)
        return OPAQUE + hashlib.sha256(_bytes(data)).hexdigest()

    def encode(self, serializer: str) -> bytes:
        """As stored in the row.

        Raises:
            kombu.exceptions.EncodeError, TypeError, ValueError: when the arguments cannot be encoded, or would come out
                differently.
        """
        if isinstance(self.body, Raw):
            content_type, encoding, data = self.body
            stored_as = None
        else:
            content_type, encoding, data = serialization.dumps(self.body, serializer)
            stored_as = serializer
            if serializer not in SURE:
                self._must_come_out(content_type, encoding, data)
        body = {"base64": base64.b64encode(data).decode("ascii")} if isinstance(data, bytes) else data
        # Signatures and lazy objects may hide in the metadata.
        return canonical.encode(
            {
                "headers": self.headers,
                "properties": self.properties,
                "options": self.options,
                "content": [content_type, encoding, body, stored_as],
            }
        ).encode("utf-8", "surrogatepass")

    def _must_come_out(self, content_type: str, encoding: str, data: Any) -> None:
        """What no worker can read, or reads as another call, is not accepted."""
        try:
            args, kwargs, _ = serialization.loads(data, content_type, encoding, accept={content_type})
        except Exception as exc:
            raise ValueError(f"no worker could decode them ({exc})") from exc
        if arguments_digest(self.task, args, kwargs) != arguments_digest(self.task, *self.body[:2]):
            raise ValueError("a worker would get others")

    @classmethod
    def decode(cls, data: bytes) -> Envelope:
        """Read a stored envelope. What is not JSON is passed on as it is: nobody here needs to understand it."""
        stored = json.loads(bytes(data).decode("utf-8", "surrogatepass"))
        body: Any = Raw.stored(data)
        options = dict(stored["options"])
        if body.content_type == JSON:
            options["serializer"] = stored["content"][3]
            with contextlib.suppress(DecodeError):  # kept unread, since it could not be read
                body = serialization.loads(body.data, body.content_type, body.encoding, accept={JSON})
        return cls(stored["headers"], stored["properties"], body, options)

    def read(self, accept: Any) -> Any:
        """The body, decoded.

        Arguments:
            accept: the app's accepted content types.

        Raises:
            kombu.exceptions.ContentDisallowed, DecodeError: it is not for this process.
        """
        if not isinstance(self.body, Raw):
            return self.body
        content_type, encoding, data = self.body
        return serialization.loads(data, content_type, encoding, accept=serialization.prepare_accept_content(accept))

    def marked(self, mark: Mark, *, eta: datetime | None = None, retries: int | None = None) -> Envelope:
        """The message to publish for a row: marked, without expiry (the database judges it), with the row's time."""
        return replace(self, headers=self.marked_headers(mark, eta=eta, retries=retries))

    def marked_headers(self, mark: Mark, *, eta: datetime | None = None, retries: int | None = None) -> dict[str, Any]:
        """The headers of that message."""
        headers = dict(self.headers)
        headers[MARK] = mark.header()
        headers["expires"] = None
        headers["eta"] = eta.isoformat() if eta is not None else None
        if retries is not None:
            headers["retries"] = retries
        return headers


def _plain(data: bytes) -> Any:
    try:
        return json.loads(data, parse_constant=str)  # NaN is not equal to itself
    except ValueError:
        return object()


def _bytes(data: Any) -> bytes:
    return data.encode("utf-8", "surrogatepass") if isinstance(data, str) else bytes(data)


def arguments_digest(task: str, args: Any, kwargs: Any) -> str | None:
    """Fingerprint of a call; ``None`` for arguments that are not JSON, which are then compared by the mark alone."""
    try:
        args, kwargs = list(args or ()), dict(kwargs or {})
        if _is_flat(args, kwargs):
            return canonical.digest(canonical.flat([task, args, kwargs]))
        return canonical.fingerprint([task, args, kwargs])
    except (TypeError, ValueError):
        return None


def _is_flat(args: list[Any], kwargs: dict[Any, Any]) -> bool:
    """Whether JSON gives the arguments back as they are, which is then known without trying."""
    return (
        SCALARS.issuperset(map(type, args))
        and SCALARS.issuperset(map(type, kwargs.values()))
        and all(type(name) is str for name in kwargs)
    )


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
