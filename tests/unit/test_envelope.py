"""The stored message, its mark, and the ids of its continuations."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, chain, chord, group

from celery_safe_effects.glue.envelope import MARK, Envelope, Mark, arguments_digest, is_marked, with_stable_ids

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


@pytest.fixture
def add() -> Any:
    app = Celery("unit", broker="memory://", set_as_current=False)

    @app.task(name="unit.add", shared=False)
    def add(x: int, y: int) -> int:
        return x + y

    return add


def ids(signature: Any) -> list[str]:
    found = [signature["options"]["task_id"]]
    for name in ("tasks", "header", "body") if signature.get("subtask_type") else ():
        inner = signature["kwargs"].get(name) or []
        for member in [inner] if isinstance(inner, dict) else inner:
            found += ids(member)
    return found


def test_continuations_get_ids_that_follow_from_the_job(add: Any) -> None:
    links = [add.s(1), group(add.s(1), add.s(2)), chain(add.s(1), add.s(2)), chord([add.s(1), add.s(2)], add.s(3))]
    first = with_stable_ids("job", ((), {}, {"callbacks": links}))[2]["callbacks"]
    second = with_stable_ids("job", ((), {}, {"callbacks": links}))[2]["callbacks"]
    other = with_stable_ids("other", ((), {}, {"callbacks": links}))[2]["callbacks"]
    assert [ids(s) for s in first] == [ids(s) for s in second]
    flat = [i for s in first for i in ids(s)]
    assert len(set(flat)) == len(flat) == 1 + 3 + 3 + 4 + isinstance(links[3].kwargs["header"], dict)
    assert not set(flat) & {i for s in other for i in ids(s)}
    assert "task_id" not in links[0].options, "the user's signature is left alone"


def test_an_id_that_is_there_stays(add: Any) -> None:
    link = add.s(1).set(task_id="mine")
    assert with_stable_ids("job", ((), {}, {"callbacks": [link]}))[2]["callbacks"][0]["options"]["task_id"] == "mine"


def test_only_a_job_with_something_to_tell_needs_settling() -> None:
    def needs(headers: dict[str, Any], **embed: Any) -> bool:
        return Envelope({**HEADERS, **headers}, {}, ((), {}, embed), {}).needs_settling

    assert needs({})
    assert not needs({"ignore_result": True})
    assert needs({"ignore_result": True}, callbacks=[{"task": "t"}])
    assert needs({"ignore_result": True, "group": "g"})
