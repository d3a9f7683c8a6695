"""`docs/model.md`, the model and the statements are of one another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from celery_safe_effects.store import statements
from tests.model.test_model import GUARDS, MODEL

PAGE: Final = (Path(__file__).resolve().parents[2] / "docs" / "model.md").read_text()
TEXT: Final = MODEL.read_text()


def rows(heading: str) -> dict[str, list[str]]:
    """A table of the page: the names in code of its first column, with those of its second."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [
        [re.findall(r"`(\w+)`", cell) for cell in line.split("|")[1:3]] for line in section.splitlines() if "|" in line
    ]
    return {name: names for first, names in cells for name in first}


def test_every_transition_of_the_model_is_in_the_table() -> None:
    named = set(re.findall(r"SQL: (\w+)", TEXT))
    assert named
    assert set(rows("Transitions")) == named


def test_every_statement_that_is_named_exists() -> None:
    for name in rows("Transitions"):
        assert isinstance(getattr(statements, name), str), name


def test_every_guard_can_be_taken_away_and_is_in_the_table() -> None:
    taken = set(re.findall(r"^#ifn?def NO_(\w+)", TEXT, re.MULTILINE))
    assert taken == {*GUARDS, "SWEEPER"}
    assert set(rows("Guards")) == taken
