"""Canonical JSON and fingerprints: equal content gives equal text, whatever the order of keys."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kombu.utils import json as kombu_json


def encode(value: Any) -> str:
    """Encode a value as strict JSON text, with kombu's extended types (dates, decimals, UUIDs).

    Arguments:
        value: anything that kombu's JSON serializer takes.

    Returns:
        JSON text; ``NaN`` and infinities are refused, since PostgreSQL and other languages cannot read them.

    Raises:
        TypeError, ValueError: when the value is not JSON.
    """
    try:
        return str(kombu_json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        raise
    except Exception as exc:  # kombu wraps what the standard encoder raises
        raise TypeError(f"{type(value).__name__} is not JSON: {exc}") from exc


def decode(text: str | None) -> Any:
    """Decode what :func:`encode` wrote; ``None`` gives ``None``."""
    return None if text is None else kombu_json.loads(text)


def is_text(value: Any) -> bool:
    """Whether a value is a non-empty string that the database can hold: no NUL, no lone surrogate."""
    return isinstance(value, str) and bool(value) and printable(value) == value


def printable(value: Any) -> Any:
    """A JSON value whose strings the database can hold and show: NUL and lone surrogates are written as escapes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8").replace("\x00", "\\x00")
    if isinstance(value, dict):
        return {printable(k): printable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [printable(v) for v in value]
    return value


def roundtrip(value: Any) -> Any:
    """The value as a replay would see it: encoded and decoded again."""
    return decode(encode(value))


def canonical(value: Any) -> str:
    """JSON text with sorted keys and no spaces, from which fingerprints are made."""
    return flat(json.loads(encode(value)))


def flat(value: Any) -> str:
    """The same of what JSON gives back as it is.

    Raises:
        ValueError: for ``NaN`` and infinities.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def fingerprint(value: Any) -> str:
    """SHA-256 (hex) of the canonical JSON of a value."""
    return digest(canonical(value))


def digest(text: str) -> str:
    """SHA-256 (hex) of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
