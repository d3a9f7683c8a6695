"""Which kind of role may run a statement is decided for each of them, in one place."""

from __future__ import annotations

from celery_safe_effects.store import grants, statements


def test_every_statement_belongs_to_somebody() -> None:
    """A new statement needs a decision in `store/grants.py`; `tests/integration/test_grants.py` holds it to that."""
    names = sorted(
        name
        for name, text in vars(statements).items()
        if isinstance(text, str) and name.isupper() and not name.startswith("_") and not name.endswith("_FACTS")
    )
    assert sorted(grants.STATEMENTS) == names
    declared = [name for some in grants._BY_KIND.values() for name in some.split()]
    assert len(declared) == len(set(declared))
