"""Text of the command line: it fits the terminal, and recorded words cannot play with it."""

from __future__ import annotations

import io
import json
import sys
from datetime import datetime, timedelta, timezone

import pytest

from celery_safe_effects import words
from celery_safe_effects.cli import output
from celery_safe_effects.cli.output import Column
from celery_safe_effects.values import TransitionRow

ROWS = [
    ("6f1f5d34-0d3c-4d2e-9a8f-1d1b1c0a7e55", "shop.billing.tasks.charge_card", "succeeded", "x" * 300),
    ("2", "料金を請求する" * 5, "unknown", "two\nlines\tand \x1b[31ma colour"),
]
COLUMNS = (Column("JOB", keep=True), Column("TASK", tail=True), Column("STATUS", keep=True, spare=1), Column("REASON"))


@pytest.mark.parametrize("columns", [20, 30, 50, 80, 120, 500])
def test_no_line_of_a_table_is_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = output.table(COLUMNS, ROWS)
    assert len(lines) == 3
    assert max(map(output.width, lines)) <= columns


def test_what_people_copy_is_shortened_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, first, second = output.table(COLUMNS, ROWS)
    assert first.startswith(ROWS[0][0])
    assert "…" in first
    assert "ge_card" in first
    assert "\x1b" not in second


def test_spare_and_empty_columns_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    assert "STATUS" not in output.table(COLUMNS, ROWS)[0]
    monkeypatch.setenv("COLUMNS", "200")
    assert "STATUS" in output.table(COLUMNS, ROWS)[0]
    assert output.table(COLUMNS, [("1", "", "queued", None)])[0].split() == ["JOB", "STATUS"]


def test_long_values_go_on_over_a_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = output.facts([("short", 1), ("nothing", None), ("empty", ""), ("long", "word " * 100)])
    assert lines[0] == "short  1"
    assert len(lines) == 1 + output.VALUE_LINES
    assert max(map(output.width, lines)) <= 40
    assert lines[-1].endswith("…")


@pytest.mark.parametrize(
    ("text", "columns", "tail", "shown"),
    [
        ("abc", 3, False, "abc"),
        ("abcd", 3, False, "ab…"),
        ("abcd", 3, True, "…cd"),
        ("料金料金", 4, False, "料…"),
        ("abcd", 1, False, "…"),
        ("abcd", 0, False, ""),
    ],
)
def test_cut(text: str, columns: int, tail: bool, shown: str) -> None:
    assert output.cut(text, columns, tail=tail) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "-"), (-3, "0s"), (0.9, "0s"), (59, "59s"), (60, "1m"), (200, "3m20s"), (3600, "1h"), (90061, "1d1h")],
)
def test_age(seconds: float | None, shown: str) -> None:
    assert words.age(seconds) == shown


def test_a_terminal_without_unicode_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert output.cut("abcdef", 3) == "ab~"
    assert output.arrow() == "->"
    assert output.clean("Müller → 1") == "M\\xfcller \\u2192 1"


def test_json_has_iso_times_in_utc_and_is_ascii() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=timezone(timedelta(hours=2)))
    row = TransitionRow(1, at, "j", None, None, "queued", 0, "Müller", None)
    text = output.document({"rows": [row]})
    assert text.isascii()
    (found,) = json.loads(text)["rows"]
    assert found["at"] == "2026-01-02T01:04:05.000678+00:00"
    assert found["actor"] == "Müller"
    assert "\n" not in output.document(row, one_line=True)
