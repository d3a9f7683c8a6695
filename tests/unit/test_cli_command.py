"""What every command shares: checked texts, errors in one line, the user's name."""

from __future__ import annotations

import getpass

import click
import psycopg
import pytest
from sqlalchemy.exc import OperationalError

from celery_safe_effects.cli import acting, command, safe_effects
from celery_safe_effects.errors import NotFound


@pytest.mark.parametrize("value", ["", "  ", "\udcff", "a\x00b"])
def test_text_that_postgresql_cannot_hold_is_wrong_usage(value: str) -> None:
    with pytest.raises(click.BadParameter):
        command.text(value)


@pytest.mark.parametrize("value", ["", "nope", "NaN", "[Infinity]", "[" * 100_000])
def test_what_is_not_json_is_wrong_usage(value: str) -> None:
    with pytest.raises(click.BadParameter, match="not JSON"):
        acting.json_value(value)


def test_null_is_a_value() -> None:
    assert acting.json_value("null").value is None
    assert acting.json_value('{"a": [1]}').value == {"a": [1]}


@pytest.mark.parametrize(
    ("exc", "code", "words"),
    [
        (NotFound("there is\nno job"), "not_found", "there is; no job"),
        (psycopg.OperationalError("gone\n\tIs it up?"), "store_unavailable", "gone; Is it up?"),
        (OperationalError("SELECT", {}, psycopg.OperationalError("gone")), "store_unavailable", "gone"),
        (psycopg.errors.InsufficientPrivilege("permission denied"), "permission_missing", "owns the schema"),
        (psycopg.errors.DiskFull("no room"), "database", "PostgreSQL refuses: no room"),
        (psycopg.errors.UndefinedTable("no table"), "schema_mismatch", "safe-effects upgrade"),
    ],
)
def test_an_error_is_one_line(exc: Exception, code: str, words: str) -> None:
    found = command.describe(exc)
    assert found is not None
    assert found[0] == code
    assert words in found[1]
    assert "\n" not in found[1]


def test_a_bug_is_not_explained_away() -> None:
    assert command.describe(KeyError("x")) is None


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise OSError("no such uid")

    monkeypatch.setattr(getpass, "getuser", nobody)
    assert acting.os_user().startswith("uid ")


def test_every_command_takes_json_and_says_what_it_does() -> None:
    wanted = (
        "upgrade status jobs show log operations resolve retry cancel limits republish sweep reconcile prune metrics"
    )
    assert set(safe_effects.commands) == {*wanted.split(), "metrics", "doctor", "console"}
    for found in safe_effects.commands.values():
        assert found.help
        assert any("--json" in p.opts for p in found.params)
