"""The stored message, its mark, and the ids of its continuations."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from kombu import serialization
from kombu.exceptions import ContentDisallowed, EncodeError

from celery_safe_effects.glue.envelope import MARK, Envelope, Mark, Raw, arguments_digest, is_marked
from celery_safe_effects.glue.wire import Message

HEADERS = {
    "id": "j",
    "task": "t",
    "eta": "2030-01-01T00:00:00+00:00",
    "expires": "2030-01-01T00:00:00+00:00",
    "retries": 1,
}


def envelope(args: Any = (), kwargs: Any = None, **embed: Any) -> Envelope:
    return Envelope(dict(HEADERS), {"correlation_id": "j"}, (args, kwargs or {}, embed), {"queue": "q"})


def published(stored: bytes) -> tuple[Any, Any, Any]:
    """What a worker gets of a stored message."""
    message = Message.of(Celery("unit", set_as_current=False), Envelope.decode(stored))
    body, options = message.parts[2], message.options
    if "content_type" not in options:
        options["content_type"], options["content_encoding"], body = serialization.dumps(body, options["serializer"])
    accept = {options["content_type"]}
    args, kwargs, embed = serialization.loads(body, options["content_type"], options["content_encoding"], accept=accept)
    return args, kwargs, embed


@pytest.mark.parametrize("serializer", ["json", "yaml", "msgpack", "pickle"])
def test_what_is_stored_is_what_is_published(serializer: str) -> None:
    stored = envelope([1, {"a": "ü"}], {"k": None}, callbacks=None).encode(serializer)
    again = Envelope.decode(stored)
    assert again.headers == HEADERS
    assert again.options["queue"] == "q"
    assert published(stored)[:2] == ([1, {"a": "ü"}], {"k": None})


class Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("unpickled",)


def test_what_is_not_json_is_passed_on_unread() -> None:
    made = Envelope.decode(envelope([Bomb()]).encode("pickle"))
    assert isinstance(made.body, Raw)
    with pytest.raises(ContentDisallowed):
        made.read(["json"])


VALUES: dict[str, Any] = {
    "datetime": datetime(2026, 3, 29, 2, 30, 15, 123456),  # noqa: DTZ001 - naive ones are sent, too
    "utc": datetime(2026, 3, 29, 2, 30, tzinfo=timezone.utc),
    "offset": datetime(2026, 3, 29, 2, 30, tzinfo=timezone(timedelta(hours=5, minutes=30))),
    "zone": datetime(2026, 7, 1, tzinfo=ZoneInfo("Europe/Paris")),
    "date": date(2026, 3, 29),
    "time": time(2, 30, 1),
    "decimal": Decimal("10.50"),
    "uuid": UUID(int=7),
    "bytes": b"\xff\x00",
    "text bytes": b"text",
    "tuple": (1, (2, "x")),
    "float": 0.1 + 0.2,
    "large": 2**70,
    "text": "a\x00ü\U0001f600",
    "keys": {1: "one", "b": None, "a": True},
    "set": {1, 2, 3},
    "nan": float("nan"),
}


@pytest.mark.parametrize("serializer", ["json", "yaml", "msgpack", "pickle"])
@pytest.mark.parametrize("kind", list(VALUES))
def test_producer_and_worker_agree_on_a_calls_fingerprint(kind: str, serializer: str) -> None:
    """Or the call is refused at the door: what no worker could read, or would read as another call."""
    made = envelope([VALUES[kind]], {"k": [VALUES[kind]]})
    try:
        stored = made.encode(serializer)
    except (EncodeError, TypeError, ValueError):
        return
    args, kwargs, _ = published(stored)
    received = Envelope(dict(HEADERS), {}, (args, kwargs, {}), {})
    assert received.digest(serializer) == made.digest(serializer)
    assert made.digest(serializer) == envelope([VALUES[kind]], {"k": [VALUES[kind]]}, chain=[]).digest(serializer)


def test_what_no_worker_could_read_is_refused() -> None:
    with pytest.raises(ValueError, match="no worker could decode them"):
        envelope([{1: "one"}]).encode("msgpack")


def test_the_mark_replaces_times_that_the_database_judges() -> None:
    marked = envelope().marked(Mark(7, 0, "d", "acme"), retries=3)
    assert Mark.of(marked.headers[MARK]) == Mark(7, 0, "d", "acme")
    assert (marked.headers["expires"], marked.headers["eta"], marked.headers["retries"]) == (None, None, 3)


@pytest.mark.parametrize("value", [None, "x", {}, {"v": 2}, {"v": 1, "seq": "x", "gen": 0, "digest": "", "tenant": ""}])
def test_nonsense_is_no_mark(value: Any) -> None:
    """But what some version of the library wrote is known to be one, even where it cannot be read."""
    assert Mark.of(value) is None
    assert is_marked(value) is (isinstance(value, dict) and "v" in value)


def test_the_digest_is_of_task_and_arguments() -> None:
    assert arguments_digest("t", (1,), {"a": 1, "b": 2}) == arguments_digest("t", [1], {"b": 2, "a": 1})
    assert arguments_digest("t", (1,), {}) != arguments_digest("u", (1,), {})
    assert arguments_digest("t", (object(),), {}) is None


def test_only_a_job_with_something_to_tell_needs_settling() -> None:
    def needs(headers: dict[str, Any], **embed: Any) -> bool:
        return Envelope({**HEADERS, **headers}, {}, ((), {}, embed), {}).needs_settling

    assert needs({})
    assert not needs({"ignore_result": True})
    assert needs({"ignore_result": True}, callbacks=[{"task": "t"}])
    assert needs({"ignore_result": True, "group": "g"})
