"""The list of guards that `tests/mutants.py` takes away is of the code as it is."""

from __future__ import annotations

import pytest

from tests import mutants


@pytest.mark.parametrize("one", mutants.MUTANTS, ids=lambda one: one.guard)
def test_a_guard_stands_where_the_list_says(one: mutants.Mutant) -> None:
    """A guard that moved would be taken away nowhere, and its mutant noticed by nobody."""
    assert mutants.text_of(one).count(one.old) == one.times
    assert one.old != one.new
    for test in one.tests:
        assert (mutants.ROOT / test.partition("::")[0]).exists()


def test_each_guard_has_a_name_of_its_own() -> None:
    names = [one.guard for one in mutants.MUTANTS]
    assert len(set(names)) == len(names)
