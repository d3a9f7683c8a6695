"""``doctor``: what will hurt, and how to mend it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import words
from . import output
from .command import Answer, Console, command

if TYPE_CHECKING:
    from ..app import SafeEffects


@command(schema=False, modules=True)
def doctor(console: Console, safe: SafeEffects) -> Answer:
    """Look for what will hurt, in the database, the broker, the workers and the app's declarations.

    Exit status 1 when there is a problem; warnings alone are 0.
    """
    found = safe.doctor()
    problems = [finding for finding in found if finding.severity == "problem"]
    lines: list[str] = []
    for finding in found:
        mend = [("to mend", finding.mend)] if finding.mend else []
        lines += [*output.facts([(finding.severity, f"[{finding.code}] {finding.what}"), *mend]), ""]
    summary = f"{words.count(len(problems), 'problem')}, {words.count(len(found) - len(problems), 'warning')}"
    return Answer({"healthy": not problems, "findings": found}, [*lines, summary], ok=not problems)


__all__ = ["doctor"]
