"""Text that fits a terminal, and JSON for programs."""

from __future__ import annotations

import json
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime, timezone
from typing import Any, Final, NamedTuple

GAP: Final = "  "
GOOD: Final = 12
"""Spare columns are left out rather than that others get narrower than this."""
LEAST: Final = 5
"""No column gets narrower than this."""
VALUE_LINES: Final = 6
"""Lines that one long value may take where it is shown alone."""


# -- JSON ----------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Turn rows and times into what JSON knows.

    Arguments:
        value: JSON values, dataclasses, and times with a zone.

    Returns:
        dicts, lists, strings and numbers; times are ISO 8601 in UTC.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, datetime):
        return value.astimezone(timezone.utc).isoformat()
    return value


def document(value: Any, *, one_line: bool = False) -> str:
    """A JSON document, in ASCII, whatever the terminal's encoding.

    Arguments:
        value: see :func:`plain`.
        one_line: without line breaks.

    Returns:
        the text.
    """
    return json.dumps(plain(value), indent=None if one_line else 2, default=str)


# -- words ---------------------------------------------------------------------------------------------------------


def encodable(text: str) -> bool:
    """Whether standard output can carry a text."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def ellipsis() -> str:
    """What stands for text that was left out."""
    return "…" if encodable("…") else "~"


def arrow() -> str:
    """What stands between two states."""
    return "→" if encodable("→") else "->"


def clean(text: Any) -> str:
    """One line of printable text: recorded words must not move the cursor of the terminal that shows them.

    Arguments:
        text: anything; ``None`` gives an empty text.

    Returns:
        the text with white space folded, and everything unprintable escaped.
    """
    if text is None:
        return ""
    folded = " ".join(str(text).split())
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in folded)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return escaped.encode(encoding, "backslashreplace").decode(encoding)


def width(text: str) -> int:
    """Columns that a text takes in a terminal."""
    return sum(_columns(c) for c in text)


def _columns(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def cut(text: str, columns: int, *, tail: bool = False) -> str:
    """Shorten a text to some columns, with an ellipsis where something is missing.

    Arguments:
        text: one line.
        columns: the most that it may take.
        tail: keep its end, not its beginning.

    Returns:
        the text, or a part of it.
    """
    if width(text) <= columns:
        return text
    mark = ellipsis()
    kept, room = "", columns - width(mark)
    if room < 0:
        return ""
    for char in reversed(text) if tail else text:
        room -= _columns(char)
        if room < 0:
            break
        kept += char
    return mark + kept[::-1] if tail else kept + mark


def pad(text: str, columns: int, *, tail: bool = False) -> str:
    """Cut or fill a text to some columns."""
    text = cut(text, columns, tail=tail)
    return text + " " * (columns - width(text))


# -- layout --------------------------------------------------------------------------------------------------------


def terminal() -> int:
    """The columns of the terminal (``COLUMNS``, else the terminal's own, else 80)."""
    return max(20, shutil.get_terminal_size().columns)


class Column(NamedTuple):
    """One column of a table.

    Attributes:
        head: its name.
        keep: shortened only when nothing else is left to shorten: what people copy.
        tail: the end of its texts says more than the beginning: dotted names.
        spare: left out where room is short; the highest first, 0 never.
    """

    head: str
    keep: bool = False
    tail: bool = False
    spare: int = 0


def table(columns: Sequence[Column], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lay out rows in columns that fit the terminal.

    Arguments:
        columns: those that are empty in every row are left out.
        rows: the cells; they are made printable here.

    Returns:
        the lines, the heads first.
    """
    cells = [[clean(cell) for cell in row] for row in rows]
    wanted = [max(map(width, (c.head, *(row[at] for row in cells)))) for at, c in enumerate(columns)]
    shown = [at for at in range(len(columns)) if any(row[at] for row in cells)]
    while _needs(shown, columns, wanted) > terminal():
        spare = max(shown, key=lambda at: columns[at].spare)
        if columns[spare].spare == 0:
            break
        shown.remove(spare)
    room = terminal() - len(GAP) * (len(shown) - 1)
    for some in ([at for at in shown if not columns[at].keep], shown):
        while some and sum(wanted[at] for at in shown) > room:
            widest = max(some, key=lambda at: wanted[at])
            if wanted[widest] <= LEAST:
                break
            wanted[widest] -= 1
    lines = [GAP.join(pad(columns[at].head, wanted[at]) for at in shown)]
    lines += [GAP.join(pad(row[at], wanted[at], tail=columns[at].tail) for at in shown) for row in cells]
    return [cut(line.rstrip(), terminal()) for line in lines]


def _needs(shown: Sequence[int], columns: Sequence[Column], wanted: Sequence[int]) -> int:
    """The room that columns need to be worth reading."""
    least = (wanted[at] if columns[at].keep else min(wanted[at], GOOD) for at in shown)
    return sum(least) + len(GAP) * (len(shown) - 1)


def facts(pairs: Iterable[tuple[str, Any]]) -> list[str]:
    """Lay out names and values; long values go on over a few lines.

    Arguments:
        pairs: empty values (``None`` and ``""``) are left out.

    Returns:
        the lines.
    """
    named = [(name, clean(value)) for name, value in pairs if value is not None and value != ""]
    left = max((len(name) for name, _ in named), default=0) + len(GAP)
    lines = []
    for name, value in named:
        wrapped = _wrap(value, max(10, terminal() - left))
        lines += [pad(name if at == 0 else "", left) + part for at, part in enumerate(wrapped)]
    return lines


def _wrap(text: str, columns: int) -> list[str]:
    lines: list[str] = []
    while width(text) > columns and len(lines) < VALUE_LINES - 1:
        taken = 0
        room = columns
        for char in text:
            if _columns(char) > room:
                break
            taken += 1
            room -= _columns(char)
        space = text.rfind(" ", 0, taken)
        if space > taken // 2:
            taken = space
        lines.append(text[:taken].rstrip())
        text = text[taken:].lstrip()
    return [*lines, cut(text, columns)]


def compact(value: Any) -> str | None:
    """A JSON value on one line; ``None`` stays ``None``."""
    return None if value is None else json.dumps(plain(value), ensure_ascii=False, default=str)
