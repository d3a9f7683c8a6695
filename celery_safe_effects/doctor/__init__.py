"""The doctor: what will hurt, and how to mend it. One small function for each check, grouped by what it looks at."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import psycopg

from ..config import RISKS
from ..errors import ConfigurationError, SafeEffectsError
from ..store.grants import WORKER
from . import broker, database, tasks, upkeep
from .finding import Check, Finding, Patient, problem, warning

if TYPE_CHECKING:
    from ..app import SafeEffects

logger = logging.getLogger(__name__)

UNREACHABLE: Final = ("store_unavailable", "schema_mismatch", "configuration", "permission_missing")

CHECKS: Final[tuple[Check, ...]] = (*database.CHECKS, *upkeep.CHECKS, *tasks.CHECKS, *broker.CHECKS)


def examine(safe: SafeEffects) -> list[Finding]:
    """Look at everything.

    Arguments:
        safe: the app's SafeEffects; its task modules should have been imported.

    Returns:
        what was found, problems first.
    """
    patient = Patient(safe)
    found = _run(patient, (upkeep.schema, tasks.declarations))
    # Without our schema the database has nothing to say; without the database, nothing else that asks it.
    reachable = not any(finding.code in UNREACHABLE for finding in found)
    if reachable:
        may = _run(patient, (database.rights,))
        found, reachable = found + may, not may
    found += _run(patient, CHECKS if reachable else (tasks.plain_with_effects, *broker.CHECKS[:2]))
    return sorted(found, key=lambda finding: finding.severity != "problem")


def refuse(safe: SafeEffects) -> None:
    """Before a worker starts: what is certain to break safety.

    Raises:
        ConfigurationError: with the words of the finding.
    """
    patient = Patient(safe, kinds=(WORKER,))
    for check in database.CERTAIN:
        for finding in check(patient):
            if finding.code in safe.config.accept_risks:
                logger.warning("accepted by safe_effects_accept_risks: [%s] %s", finding.code, finding.what)
            elif finding.refuses:
                accept = f"; safe_effects_accept_risks = ['{finding.code}'] starts all the same, for tests"
                raise ConfigurationError(
                    f"[{finding.code}] {finding.message}" + (accept if finding.code in RISKS else "")
                )


def _run(patient: Patient, checks: Iterable[Check]) -> list[Finding]:
    found: list[Finding] = []
    for check in checks:
        try:
            found += check(patient)
        except SafeEffectsError as exc:
            found.append(problem(exc.code, exc.message, ""))
        except psycopg.Error as exc:
            found.append(
                warning("not_checked", f"{check.__name__} could not be checked: {exc}".strip(), "run it again")
            )
        except Exception as exc:
            logger.debug("check %s failed", check.__name__, exc_info=True)
            what = f"{check.__name__} could not be checked: {type(exc).__name__}: {exc}"
            found.append(warning("not_checked", what, "run it again, or say what happened to the maintainers"))
    return found


__all__ = ["CHECKS", "Finding", "examine", "refuse"]
