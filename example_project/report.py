"""What the demo prints: time-stamped lines while it runs, then two ledgers side by side and the job's log."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TextIO

from celery_safe_effects.values import TransitionRow

Row = dict[str, Any]
KINDS = ("refund", "email", "deployment")
_CODES = {"bold": "1", "red": "31", "green": "32", "yellow": "33", "dim": "2"}
_COLUMN = 46


class Narrator:
    """Prints what happens, each line with the seconds since the start.

    Args:
        stream: where to; colours only if it is a terminal and NO_COLOR is not set.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._colours = stream.isatty() and not os.environ.get("NO_COLOR")
        self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._since

    def paint(self, text: str, style: str | None) -> str:
        """Colour a text.

        Args:
            text: what.
            style: a name of `_CODES`, or None.

        Returns:
            The text, with codes where colours are on.
        """
        return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if style and self._colours else text

    def say(self, text: str, style: str | None = None) -> None:
        """Print one line with its time.

        Args:
            text: the line.
            style: its colour.
        """
        self.line(f"{self.paint(f'{self.seconds:6.1f}', 'dim')}  {self.paint(text, style)}")

    def head(self, text: str) -> None:
        """Print a heading.

        Args:
            text: the heading.
        """
        self.line("")
        self.line(self.paint(text, "bold"))

    def line(self, text: str) -> None:
        """Print a line as it is.

        Args:
            text: the line.
        """
        print(text, file=self._stream, flush=True)


def counts(ledger: Iterable[Row]) -> dict[str, int]:
    """Count a ledger's rows.

    Args:
        ledger: its rows.

    Returns:
        The number of rows of each of `KINDS`.
    """
    found = Counter(row["kind"] for row in ledger)
    return {kind: found[kind] for kind in KINDS}


def problem(ledger: Sequence[Row], finished: bool) -> str | None:
    """Say in words what is wrong with a ledger.

    Args:
        ledger: its rows.
        finished: whether the task came to its end.

    Returns:
        What is wrong, or None.
    """
    number = counts(ledger)
    wrong = [f"{kind} happened {n} times" for kind, n in number.items() if n > 1]
    wrong += [f"{kind} lost" for kind, n in number.items() if n == 0]
    if not finished and not wrong:
        wrong.append("the task never came to its end")
    return ", ".join(wrong) or None


def ledgers(narrator: Narrator, plain: Sequence[Row], safe: Sequence[Row], job_id: str) -> None:
    """Print two ledgers side by side.

    Args:
        narrator: where to.
        plain: rows of the plain run.
        safe: rows of the safe run.
        job_id: the safe job, whose keys are shortened.
    """
    left, right = (_cells(rows, job_id) for rows in (plain, safe))
    narrator.line(
        narrator.paint(f"  {'plain Celery task, late acks':{_COLUMN}}  SafeTask (keys <job id>:<step>)", "dim")
    )
    for n in range(max(len(left), len(right))):
        a, again_a = left[n] if n < len(left) else ("", False)
        b, again_b = right[n] if n < len(right) else ("", False)
        left_cell = narrator.paint(f"{a:{_COLUMN}}", "red" if again_a else None)
        right_cell = narrator.paint(b, "red" if again_b else "green") if b else ""
        narrator.line(f"  {left_cell}  {right_cell}".rstrip())


def _cells(rows: Sequence[Row], job_id: str) -> list[tuple[str, bool]]:
    cells: list[tuple[str, bool]] = []
    seen: set[str] = set()
    for row in rows:
        again = row["kind"] in seen
        seen.add(row["kind"])
        key = str(row["key"]).replace(job_id, "<job id>")
        key = key if key.startswith("<") else f"{key[:8]}..."
        cells.append((f"{row['id']}. {row['kind']:<10} key {key}{'  AGAIN' if again else ''}", again))
    return cells


def transition(row: TransitionRow, effects: Mapping[str, str]) -> str:
    """Say one row of the log.

    Args:
        row: the row.
        effects: short names of the operations' effects, by key.

    Returns:
        The line.
    """
    move = f"{row.from_status or '(new)'} -> {row.to_status}"
    return f"{_subject(row, effects):<16} {move:<38} fence {row.fence}  {_who(row):<9} {_why(row)}".rstrip()


def moves(rows: Sequence[TransitionRow], effects: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Say rows of the log in few lines: those of one subject that follow each other share one.

    Args:
        rows: the rows, oldest first.
        effects: as for `transition`.

    Yields:
        The lines, each with the last status in it.
    """
    for subject, group in groupby(rows, lambda row: _subject(row, effects)):
        found = list(group)
        states = " -> ".join(row.to_status for row in found)
        if found[0].from_status is not None:
            states = f"{found[0].from_status} -> {states}"
        notes = ", ".join(filter(None, (_why(found[-1]), f"by {_who(found[-1])}")))
        yield f"{subject:<16} {states} ({notes})", found[-1].to_status


def _subject(row: TransitionRow, effects: Mapping[str, str]) -> str:
    return "job" if row.operation_key is None else effects.get(row.operation_key, row.operation_key)


def _who(row: TransitionRow) -> str:
    node, _, rest = row.actor.partition("/")
    return f"{node.partition('@')[0]}{', standing in' if rest == 'stand-in' else ''}"


def _why(row: TransitionRow) -> str:
    return (row.reason or "").replace(row.job_id, "<job id>")
