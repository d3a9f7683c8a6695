"""The stored message, its mark, and the ids of its continuations."""

from __future__ import annotations

from typing import Any

import pytest

from celery_safe_effects.glue.envelope import MARK, Envelope, Mark, arguments_digest, is_marked

HEADERS = {
    "id": "j",
    "task": "t",
    "eta": "2030-01-01T00:00:00+00:00",
    "expires": "2030-01-01T00:00:00+00:00",
    "retries": 1,
}


def envelope(args: Any = (), kwargs: Any = None, **embed: Any) -> Envelope:
    return Envelope(dict(HEADERS), {"correlation_id": "j"}, (args, kwargs or {}, embed), {"queue": "q"})


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_what_is_stored_is_what_is_published(serializer: str) -> None:
    stored = envelope([1, {"a": "ü"}], {"k": None}).encode(serializer)
    again = Envelope.decode(stored, [serializer])
    assert again.headers == HEADERS
    assert list(again.body[0]) == [1, {"a": "ü"}]
    assert again.body[1] == {"k": None}
    assert again.options["queue"] == "q"


def test_only_accepted_content_is_decoded() -> None:
    stored = envelope([1]).encode("pickle")
    with pytest.raises(Exception, match="untrusted"):
        Envelope.decode(stored, ["json"])


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
