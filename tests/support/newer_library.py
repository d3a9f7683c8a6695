"""A later version of the library, as far as a test needs one: it knows more migrations.

Imported by a worker (`imports=["tests.support.newer_library"]`), it adds those that the environment carries.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from celery_safe_effects.store import migrate

VARIABLE = "SAFE_EFFECTS_TEST_MIGRATIONS"

_own = migrate.migrations


def with_these(added: Sequence[Sequence[Any]]) -> list[migrate.Migration]:
    """The real migrations and some more.

    Args:
        added: each as version, name, SQL and oldest code.

    Returns:
        All of them.
    """
    return [*_own(), *(migrate.Migration(*one) for one in added)]


@contextmanager
def newer_library(*added: tuple[int, str, str, int]) -> Iterator[dict[str, str]]:
    """Be a later version for a while.

    Args:
        *added: what it knows more, each as version, name, SQL and oldest code.

    Yields:
        The environment that makes a worker one, too.
    """
    migrate.migrations = lambda: with_these(added)
    try:
        yield {VARIABLE: json.dumps(added)}
    finally:
        migrate.migrations = _own


if VARIABLE in os.environ:
    migrate.migrations = lambda: with_these(json.loads(os.environ[VARIABLE]))
