"""``celery -A yourproject safe-effects …``: what operators see and do.

Celery loads this module whenever its own command line starts, so nothing heavy is imported before a command runs.
"""

from __future__ import annotations

from typing import Any

import click

from . import acting, console, doctor, limits, looking, metrics


@click.group("safe-effects", context_settings={"help_option_names": ["-h", "--help"]})
def safe_effects(**_: Any) -> None:  # an app may add preload options of its own to every command
    """Jobs whose side effects happen once: look at them, and move them on.

    Every command takes --json. Exit status: 0 done, 1 the answer is "no" or "unhealthy", 2 wrong usage.
    """


for _command in (
    acting.upgrade,
    looking.status,
    looking.jobs,
    looking.show,
    looking.log,
    looking.operations,
    acting.resolve,
    acting.retry,
    acting.cancel,
    limits.limits,
    acting.republish,
    acting.sweep,
    acting.reconcile,
    acting.prune,
    metrics.metrics,
    console.console,
    doctor.doctor,
):
    safe_effects.add_command(_command)

__all__ = ["safe_effects"]
