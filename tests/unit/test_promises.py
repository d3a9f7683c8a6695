"""The README's table of promises: each has its row, the tests that it names exist, and so do the guards."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests import mutants

ROOT = Path(__file__).resolve().parents[2]
PROMISES = 15
UNGUARDED = {12, 13}
"""Promises that no single guard keeps: a mode of commits, and the absence of something."""
LINK = re.compile(r"\[(\w+)\]\(([^)]+)\): ((?:`\w+`(?:, )?)+)")


def _rows() -> list[list[str]]:
    text = (ROOT / "README.md").read_text().partition("<!-- promises -->")[2]
    lines = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


ROWS = _rows()


def _tests(row: list[str]) -> list[tuple[Path, str]]:
    return [(ROOT / path, name) for _, path, names in LINK.findall(row[2]) for name in re.findall(r"`(\w+)`", names)]


def test_every_promise_has_a_row() -> None:
    assert [row[0] for row in ROWS] == [str(number) for number in range(1, PROMISES + 1)]
    assert len({row[1] for row in ROWS}) == PROMISES


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_tests_that_a_promise_names_exist(row: list[str]) -> None:
    found = _tests(row)
    assert found
    assert sum(len(re.findall(r"`\w+`", part)) for part in [row[2]]) == len(found), "a name without its file"
    for path, name in found:
        defined = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
        assert name in defined, f"{path.name} has no {name}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_guards_of_a_promise_are_taken_away_by_a_mutant(row: list[str]) -> None:
    """And what the mutant runs holds at least one of the tests that the row names, so that the row is what fails."""
    guards = re.findall(r"`([^`]+)`", row[3])
    known = {one.guard: one for one in mutants.MUTANTS}
    assert [guard for guard in guards if guard not in known] == []
    assert bool(guards) != (int(row[0]) in UNGUARDED)
    run = {test.partition("::")[0] for guard in guards for test in known[guard].tests}
    named = {str(path.relative_to(ROOT)) for path, _ in _tests(row)}
    assert not guards or run & named, f"no mutant of {guards} runs any of {named}"
