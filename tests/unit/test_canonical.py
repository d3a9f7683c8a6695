"""Equal content, equal fingerprint; and a replay sees what the first call saw."""

from __future__ import annotations

from datetime import datetime, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from celery_safe_effects import canonical

VALUES: list[Any] = [
    {"b": 1, "a": [1, 2.5, None, True, "ü\u2028"]},
    {1: "int", 10: "key", 9: "order"},
    {"when": datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc), "how": Decimal("1.10"), "who": UUID(int=7)},
    "nul\x00",
    2**70,
    [(1, 2), [3]],
]


@pytest.mark.parametrize("value", VALUES)
def test_what_a_worker_decodes_has_the_producers_fingerprint(value: Any) -> None:
    assert canonical.fingerprint(canonical.roundtrip(value)) == canonical.fingerprint(value)


def test_the_order_of_keys_does_not_matter() -> None:
    assert canonical.fingerprint({"a": 1, "b": {"c": 2, "d": 3}}) == canonical.fingerprint(
        {"b": {"d": 3, "c": 2}, "a": 1}
    )


@pytest.mark.parametrize(("one", "other"), [({"a": 1}, {"a": 2}), ([1, 2], [2, 1]), ({"a": 1}, {"a": "1"}), (1, True)])
def test_other_content_has_another_fingerprint(one: Any, other: Any) -> None:
    assert canonical.fingerprint(one) != canonical.fingerprint(other)


@pytest.mark.parametrize("value", [object(), float("nan"), float("inf"), b"\xff".__class__])
def test_what_is_no_json_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        canonical.encode(value)
