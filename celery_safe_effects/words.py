"""Times, numbers and addresses in words, for whoever reads them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any


def age(seconds: float | None) -> str:
    """A length of time in at most two units, such as ``3m20s``; ``-`` for none."""
    if seconds is None:
        return "-"
    left = int(max(0.0, seconds))
    units = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
    for at, (name, size) in enumerate(units):
        if left >= size:
            rest, (small, smaller) = left % size, units[min(at + 1, 3)]
            more = f"{rest // smaller}{small}" if at < 3 and rest // smaller else ""
            return f"{left // size}{name}{more}"
    return "0s"


def moment(at: datetime | None) -> str:
    """A time in UTC, to the second; empty for none."""
    return "" if at is None else f"{at.astimezone(timezone.utc):%Y-%m-%d %H:%M:%SZ}"


def address(host: str, port: int) -> str:
    """Where something is served, as a browser takes it."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def count(number: int, what: str) -> str:
    """A number with its noun."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def since(found: Mapping[str, Any], name: str) -> float | None:
    """Seconds between a recorded time and the database's present."""
    at: datetime | None = found[name]
    return None if at is None else max(0.0, (found["at"] - at).total_seconds())
