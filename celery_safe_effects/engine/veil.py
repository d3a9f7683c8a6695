"""Values of redacted parameters, kept out of what is recorded and told of a job beside its own message."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

HIDDEN: Final = "***"
SHORTEST: Final = 4
"""Characters; what is shorter would hide half of every text."""


class Veil:
    """What is to be hidden from the texts of one job."""

    def __init__(self) -> None:
        self._texts: set[str] = set()
        self._found: re.Pattern[str] | None = None

    def __bool__(self) -> bool:
        return bool(self._texts)

    def hide(self, *values: Any) -> None:
        """Hide these values from now on: texts and numbers, also within lists and mappings."""
        texts = {text for value in values for leaf in _leaves(value) for text in _spellings(leaf)}
        if not texts <= self._texts:
            self._texts |= texts
            longest_first = sorted(self._texts, key=len, reverse=True)
            self._found = re.compile("|".join(re.escape(text) for text in longest_first))

    def text(self, value: str) -> str:
        """A text without them."""
        return value if self._found is None else self._found.sub(HIDDEN, value)

    def over(self, value: Any) -> Any:
        """A JSON value without them, in whatever text or number of it."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return HIDDEN if str(value) in self._texts else value
        if isinstance(value, Mapping):
            return {self.over(key): self.over(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.over(inner) for inner in value]
        return value

    def shows(self, exc: BaseException) -> bool:
        """Whether one of them is in the text of an exception, or of those that led to it."""
        seen: set[int] = set()
        waiting: list[BaseException | None] = [exc]
        while waiting and self._found is not None:
            one = waiting.pop()
            if one is None or id(one) in seen:
                continue
            seen.add(id(one))
            try:
                if self._found.search(f"{one} {[arg for arg in one.args if arg is not one]!r}"):
                    return True
            except Exception:
                return True  # a text that cannot be made cannot be checked
            waiting += [one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())]
        return False


def _leaves(value: Any) -> Iterable[str]:
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, bytes):
        yield value.decode("utf-8", "backslashreplace")
    elif value is not None and not isinstance(value, bool):
        yield str(value)


def _spellings(text: str) -> Iterable[str]:
    """As it is, and as it stands in a ``repr()`` and in JSON."""
    if len(text) >= SHORTEST:
        yield from {text, repr(text)[1:-1], json.dumps(text)[1:-1]}
