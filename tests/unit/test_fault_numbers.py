"""Every fault of the list has a test that bears its number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

TESTS: Final = Path(__file__).resolve().parents[1]
LAST: Final = 42
"""The number of the last fault that users of Celery and its peers told of."""
_NAMED: Final = re.compile(r"^\s*(?:async )?def test_(?:fault_)?(\d\d)[a-d]?(?:_\w+)?\(", re.MULTILINE)


def numbers() -> dict[int, list[str]]:
    """The faults that have tests, and where."""
    found: dict[int, list[str]] = {}
    for folder in ("faults", "acceptance"):
        for path in sorted((TESTS / folder).glob("test_*.py")):
            for number in _NAMED.findall(path.read_text()):
                found.setdefault(int(number), []).append(f"{folder}/{path.name}")
    return found


@pytest.mark.parametrize("number", range(1, LAST + 1))
def test_a_fault_has_a_test_of_its_number(number: int) -> None:
    assert numbers().get(number)


def test_no_test_bears_a_number_beyond_the_last() -> None:
    assert max(numbers()) == LAST
