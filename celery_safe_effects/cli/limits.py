"""``limits``: what is limited, what stands against it, and how to change that without a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from . import output
from .acting import ACTOR
from .command import Answer, Console, command, text
from .output import Column

if TYPE_CHECKING:
    from ..app import SafeEffects

COLUMNS: Final = (
    Column("SCOPE", keep=True),
    Column("LIMIT", keep=True),
    Column("VALUE", keep=True),
    Column("NOW", keep=True),
    Column("FROM"),
)
NAMES: Final = ("tenant_queued", "tenant_running", "pool_running", "max_operations", "max_age", "max_attempts")


def _assignment(value: Any) -> tuple[str, float]:
    """The type of ``--set``: ``NAME=NUMBER``."""
    if isinstance(value, tuple):
        return value
    name, separator, number = str(value).partition("=")
    name = name.strip().replace("-", "_")
    if not separator or name not in NAMES:
        raise click.BadParameter(f"write NAME=NUMBER, where NAME is one of {', '.join(NAMES)}")
    try:
        return name, (float(number) if name == "max_age" else int(number))
    except ValueError:
        raise click.BadParameter(f"{number.strip()!r} is not a number") from None


def _check(
    tenant: str | None, task: str | None, pool: str | None, given: tuple[tuple[str, float], ...], clear: bool, **_: Any
) -> None:
    if sum(name is not None for name in (tenant, task, pool)) > 1:
        raise click.UsageError("choose one of --tenant, --task and --pool")
    if given and clear:
        raise click.UsageError("--set and --clear exclude each other")
    for name, _value in given:
        if (name == "pool_running") != (pool is not None):
            raise click.UsageError("pool_running goes with --pool, and --pool with nothing else")


@command(check=_check)
@click.option("--tenant", type=text, help="Limits of this tenant.")
@click.option("--task", type=text, help="Limits of this task.")
@click.option("--pool", type=text, help="The limit of this concurrency pool.")
@click.option(
    "--set", "given", type=_assignment, multiple=True, metavar="NAME=NUMBER", help="Store a limit; may be repeated."
)
@click.option("--clear", is_flag=True, help="Remove what is stored for the scope; without a scope, everything.")
@ACTOR
def limits(
    console: Console,
    safe: SafeEffects,
    tenant: str | None,
    task: str | None,
    pool: str | None,
    given: tuple[tuple[str, float], ...],
    clear: bool,
    actor: str,
) -> Answer:
    """Show the limits and what stands against them, or change stored ones, for every process and without a restart.

    Other limits of the scope stay as they are stored. Stored limits go before the settings'.
    """
    wanted = f"tenant:{tenant}" if tenant else f"task:{task}" if task else f"pool:{pool}" if pool else None
    if given or clear:
        safe.admission.change(wanted or "*", dict(given), clear=clear, actor=f"operator:{actor}")
    rows = [row for row in safe.limits() if wanted is None or row.scope == wanted]
    table = output.table(
        COLUMNS,
        [
            (row.scope, row.limit, f"{row.value:g}", "" if row.current is None else str(row.current), row.source)
            for row in rows
        ],
    )
    return Answer({"limits": rows}, table if rows else ["no limits are set" + (f" for {wanted}" if wanted else "")])
