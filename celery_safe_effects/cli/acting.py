"""Commands that change something: upgrade, resolve, retry, cancel, republish, sweep, reconcile."""

from __future__ import annotations

import getpass
import json
import os
from typing import TYPE_CHECKING, Any, Final

import click

from ..errors import NotAllowed, NotFound
from ..states import JobStatus, OperationStatus
from ..words import count, moment
from . import output
from .command import Answer, Console, command, import_modules, text
from .looking import ENDED, operation_table, waits_for

if TYPE_CHECKING:
    from ..app import SafeEffects
    from ..values import Happened, JobRow, NotHappened, Refused


KINDS = ("producer", "worker", "observer")
SEVERAL: Final = 10_000
"""Operations that one command resolves, at most."""


def _role(value: Any) -> tuple[str, str]:
    """The type of ``--grant``: ``KIND=ROLE``."""
    if isinstance(value, tuple):
        return value
    kind, separator, role = str(value).partition("=")
    if not separator or kind not in KINDS:
        raise click.BadParameter(f"write KIND=ROLE, where KIND is one of {', '.join(KINDS)}")
    return kind, text(role)


@command(schema=False)
@click.option(
    "--grant",
    "granted",
    type=_role,
    multiple=True,
    metavar="KIND=ROLE",
    help="Give a database role what a producer, a worker or an observer needs, now and at every later upgrade.",
)
@click.option("--revoke", "revoked", type=text, multiple=True, metavar="ROLE", help="Take all of it away from a role.")
def upgrade(
    console: Console, safe: SafeEffects, granted: tuple[tuple[str, str], ...], revoked: tuple[str, ...]
) -> Answer:  # fmt: skip
    """Make the schema, or bring it up to date, and the rights of database roles with it.

    Several at once, and one too many, are harmless.
    """
    from ..store import migrate

    with safe.store.connections.connection():
        pass  # a wrong or unreachable address is told here, within the time limit of a connection
    grants: dict[str, list[str]] = {}
    for kind, role in granted:
        grants.setdefault(kind, []).append(role)
    applied = safe.upgrade(grants=grants, revoke=revoked)
    name, version = safe.config.schema, safe.store.rows("SCHEMA_VERSION")[0].version
    names = {m.version: m.name for m in migrate.migrations()}
    document = {
        "schema": name,
        "version": version,
        "applied": [{"version": number, "name": names[number]} for number in applied],
        "roles": [{"role": row.role, "kinds": row.kinds} for row in safe.store.rows("ROLES")],
    }
    lines = [f"applied migration {number:04d}_{names[number]}" for number in applied]
    lines += [f"role {role!r} has lost what it had" for role in revoked]
    lines += [f"role {row['role']!r} has the rights of {' and '.join(row['kinds'])}" for row in document["roles"]]
    end = f"schema {name!r} is at version {version}"
    return Answer(document, [*lines, end if applied or granted or revoked else f"{end} already; nothing to do"])


# -- resolve -------------------------------------------------------------------------------------------------------


class _Given:
    """A value that was given, even ``null``."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON value")


def json_value(value: Any) -> _Given:
    """The type of an option that takes a JSON value.

    Raises:
        click.BadParameter: for what is not JSON.
    """
    if isinstance(value, _Given):
        return value
    try:
        return _Given(json.loads(value, parse_constant=_refuse))
    except (ValueError, RecursionError) as exc:
        raise click.BadParameter(f"it is not JSON: {exc}") from None


def os_user() -> str:
    """The name of the user that runs this process, or the number where it has no name."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return f"uid {os.getuid()}" if hasattr(os, "getuid") else "unknown"


def _verdict(
    happened: bool, ref: str | None, result: _Given | None, not_happened: bool, refused: str | None, **_: Any
) -> Happened | NotHappened | Refused:
    from .. import values

    if happened + not_happened + (refused is not None) != 1:
        raise click.UsageError("say what became of it: one of --happened --ref REF, --not-happened, --refused TEXT")
    if happened:
        if ref is None:
            raise click.UsageError("--happened needs --ref, the provider's reference")
        return values.Happened(ref, None if result is None else result.value)
    if ref is not None or result is not None:
        raise click.UsageError("--ref and --result go with --happened")
    return values.NotHappened() if refused is None else values.Refused(refused)


ACTOR = click.option(
    "--actor", type=text, default=os_user, show_default="your user name", help="Who says so; it is recorded."
)


def _which_ones(
    key: str | None, effect: str | None, tenant: str | None, older_than: float | None, yes: bool, **verdict: Any
) -> None:
    several = effect is not None or tenant is not None or older_than is not None
    if (key is None) != several:
        raise click.UsageError("name a KEY, or choose several by --effect, --tenant, --older-than")
    if yes and not several:
        raise click.UsageError("--yes goes with --effect, --tenant or --older-than")
    _verdict(**verdict)
    if several and verdict["happened"]:
        raise click.UsageError("each that happened has a reference of its own: --happened goes with a KEY")


@command(check=_which_ones)
@click.argument("key", type=text, required=False)
@click.option("--effect", type=text, help="Instead of a KEY: all unknown operations of this effect.")
@click.option("--tenant", type=text, help="Instead of a KEY: all of this tenant.")
@click.option(
    "--older-than", type=click.FloatRange(min=0), metavar="SECONDS", help="Instead of a KEY: all sent longer ago."
)
@click.option("--yes", is_flag=True, help="With these: do it. Without it they are only shown.")
@click.option("--happened", is_flag=True, help="The provider did it; needs --ref.")
@click.option("--ref", type=text, help="With --happened: the provider's reference.")
@click.option("--result", type=json_value, help="With --happened: what the effect would have returned, as JSON.")
@click.option(
    "--not-happened", is_flag=True, help="The provider did not do it, and will not any more: it may be sent again."
)
@click.option("--refused", type=text, help="The provider said no, in these words.")
@click.option("--reason", type=text, required=True, help="How you know; it is recorded.")
@ACTOR
def resolve(
    console: Console,
    safe: SafeEffects,
    key: str | None,
    effect: str | None,
    tenant: str | None,
    older_than: float | None,
    yes: bool,
    happened: bool,
    ref: str | None,
    result: _Given | None,
    not_happened: bool,
    refused: str | None,
    reason: str,
    actor: str,
) -> Answer:
    """Say what became of the operation KEY, whose outcome is unknown, or of several. The job goes on from there.

    With --effect, --tenant or --older-than it only shows which operations these are, until --yes is added. Exit status
    1 when one of them was resolved otherwise meanwhile.
    """
    verdict = _verdict(happened, ref, result, not_happened, refused)
    if key is None:
        wanted = {"effect": effect, "tenant": tenant, "older_than": older_than}
        return _resolve_several(console, safe, wanted, verdict, actor, reason, yes)
    operation = safe.operation(key)
    said = _in_words(verdict)
    console.say(
        *output.facts(
            [
                ("operation", f"{key} ({operation.effect}, step {operation.step} of job {operation.job_id})"),
                ("now", f"{operation.status}, attempt {operation.attempt} at {moment(operation.intent_at)}"),
                ("verdict", said),
                ("actor", actor),
                ("reason", reason),
            ]
        )
    )
    resolved = safe.resolve(key, verdict, actor, reason)
    job = safe.job(resolved.job_id)
    lines = [f"done: the operation is {resolved.status}, the job is {_state(job)}"]
    rest = waits_for(job, safe.operations(job_id=job.id))
    lines += output.facts([("it waits for", text) for text in rest])
    document = {"verdict": said, "actor": actor, "reason": reason, "operation": resolved, "job": job}
    return Answer(document, lines)


def _resolve_several(
    console: Console,
    safe: SafeEffects,
    wanted: dict[str, Any],
    verdict: Happened | NotHappened | Refused,
    actor: str,
    reason: str,
    yes: bool,
) -> Answer:
    found = safe.operations(status=OperationStatus.UNKNOWN, limit=SEVERAL, **wanted)
    said = _in_words(verdict)
    document: dict[str, Any] = {"verdict": said, "actor": actor, "reason": reason, "found": len(found), "resolved": 0}
    document |= {"done": yes, "missed": [], "keys": [operation.key for operation in found]}
    if not found:
        return Answer(document, ["no such operation is unknown"])
    console.say(*operation_table(found), "", *output.facts([("verdict", said), ("actor", actor), ("reason", reason)]))
    if not yes:
        return Answer(document, [f"nothing was changed: --yes resolves these {count(len(found), 'operation')}"])
    warnings = []
    with console.progress("resolving") as move:
        for number, operation in enumerate(found, 1):
            try:
                safe.resolve(operation.key, verdict, actor, reason)
                document["resolved"] += 1
            except (NotAllowed, NotFound) as exc:
                document["missed"].append(operation.key)
                warnings.append(f"warning: [{exc.code}] {exc.message}")
            if move is not None:
                move(number, len(found))
    for warning in warnings:
        console.note(warning)
    lines = [f"done: {count(document['resolved'], 'operation')} resolved"]
    if len(found) == SEVERAL:
        lines.append("there may be more: run it again")
    return Answer(document, lines, ok=not document["missed"])


def _in_words(verdict: Happened | NotHappened | Refused) -> str:
    from .. import values

    if isinstance(verdict, values.Happened):
        return f"it happened: ref {verdict.ref}, result {output.compact(verdict.result) or 'none'}"
    if isinstance(verdict, values.Refused):
        return f"it was refused: {verdict.error}"
    return "it did not happen"


# -- retry, cancel -------------------------------------------------------------------------------------------------


@command(modules=True)
@click.argument("job", type=text)
@click.option("--reason", type=text, required=True, help="Why; it is recorded.")
@click.option(
    "--new-key",
    "new_keys",
    type=text,
    multiple=True,
    metavar="STEP",
    help="Send this refused step again, under a new key; may be repeated.",
)
@ACTOR
def retry(console: Console, safe: SafeEffects, job: str, reason: str, new_keys: tuple[str, ...], actor: str) -> Answer:
    """Run a failed or cancelled JOB again, or a parked one without an open question.

    Attempts start anew. What its effects achieved is remembered, and not done again; a step that the provider refused
    stays refused, unless --new-key names it.
    """
    row = safe.retry(job, reason, new_keys=new_keys, actor=actor)
    return Answer({"job": row}, [f"done: job {row.id} is {_state(row)}"])


@command()
@click.argument("job", type=text)
@click.option("--reason", type=text, required=True, help="Why; it is recorded.")
@ACTOR
def cancel(console: Console, safe: SafeEffects, job: str, reason: str, actor: str) -> Answer:
    """Cancel a JOB: at once where nobody works on it, else at its next checkpoint or effect."""
    row = safe.cancel(job, reason, actor=actor)
    if row.status == JobStatus.CANCELLED:
        text = f"done: job {row.id} is {_state(row)}"
    elif row.status in ENDED:
        text = f"too late: job {row.id} is {_state(row)}"
    elif row.status == JobStatus.UNKNOWN:
        text = f"asked: job {row.id} is parked, and ends cancelled when its open questions are answered"
    else:
        text = f"asked: job {row.id} is {row.status}, and stops at its next checkpoint or effect"
    return Answer({"job": row}, [text])


def _state(job: JobRow) -> str:
    return f"{job.status} ({job.reason})" if job.reason else job.status


# -- republish, sweep, reconcile -----------------------------------------------------------------------------------


def _which(
    job: tuple[str, ...], everything: bool, new_epoch: bool, park: bool, spare: tuple[str, ...], **_: Any
) -> None:
    if everything and job:
        raise click.UsageError("name JOBs or give --all, not both")
    if new_epoch and not everything:
        raise click.UsageError("--new-epoch goes with --all")
    if park and not new_epoch:
        raise click.UsageError("--park goes with --new-epoch")
    if spare and not park:
        raise click.UsageError("--spare goes with --park")


@command(check=_which)
@click.argument("job", nargs=-1, type=text)
@click.option("--all", "everything", is_flag=True, help="Of every queued job: the broker lost its messages.")
@click.option(
    "--new-epoch", is_flag=True, help="First: the database was restored from an older state than the broker's."
)
@click.option("--park", is_flag=True, help="And park what may have had effects since that state.")
@click.option("--spare", type=text, multiple=True, metavar="TASK", help="With --park: a task that may go on.")
@ACTOR
def republish(
    console: Console,
    safe: SafeEffects,
    job: tuple[str, ...],
    everything: bool,
    new_epoch: bool,
    park: bool,
    spare: tuple[str, ...],
    actor: str,
) -> Answer:
    """Publish the stored messages of the JOBs again, or of all that are due, or (--all) of every queued job.

    A message is only a hint: one too many does no harm. With JOBs or --all, exit status 1 when one of them was not
    published.
    """
    if everything:
        return _republish_all(console, safe, new_epoch, park, spare, actor)
    rows = [safe.job(job_id) for job_id in dict.fromkeys(job)]
    published = safe.republish(*(row.id for row in rows))
    lines = [f"published {count(published, 'message')}"]
    missed = len(rows) - published if rows else 0
    if missed > 0:
        lines += [f"{row.id} is {_state(row)}" for row in rows]
        lines.append(f"{missed} of them had nothing to publish, or the broker did not take it")
    return Answer({"published": int(published), "missed": max(0, missed)}, lines, ok=missed <= 0)


def _republish_all(
    console: Console, safe: SafeEffects, new_epoch: bool, park: bool, spare: tuple[str, ...], actor: str
) -> Answer:
    document: dict[str, Any] = {"epoch": None, "parked": 0}
    if park:
        import_modules(safe.app)  # which effects a task declares
    if new_epoch:
        document["epoch"] = safe.new_epoch(actor=actor)
        console.say(f"a new epoch begins at number {document['epoch']}: messages of lost jobs are parked")
    if park:
        document["parked"] = safe.park_restored(spare=spare, actor=actor)
        console.say(f"parked {count(document['parked'], 'job')} that may have had effects since")
    with console.progress("publishing") as move:
        published = safe.republish(all=True, progress=move)
    document |= {"published": int(published), "missed": published.missed}
    lines = [f"published {count(published, 'message')}"]
    if published.missed:
        lines.append(f"the broker did not take {published.missed:,} of them; the sweep publishes them when it is back")
    return Answer(document, lines, ok=not published.missed)


@command(modules=True)
def sweep(console: Console, safe: SafeEffects) -> Answer:
    """Sweep now: end leases that ran out and jobs past their time, publish what is due."""
    swept = safe.sweep()
    lines = [
        f"leases that ran out, and jobs past their time: {swept.released} queued again, {swept.parked} parked, "
        f"{swept.ended} ended",
        f"messages published: {swept.published}",
        f"messages found to be lost, and published again: {swept.republished}",
        f"senders seen to be gone: {swept.gone}",
    ]
    return Answer(swept, lines)


@command()
def prune(console: Console, safe: SafeEffects) -> Answer:
    """Delete finished jobs past their retention; their ids and keys stay taken, as tombstones."""
    with console.progress("pruning") as move:
        pruned = safe.prune(progress=move)
    return Answer(pruned, [f"finished jobs deleted: {pruned.jobs}", f"old tombstones deleted: {pruned.tombstones}"])


@command(modules=True)
@click.argument("key", nargs=-1, type=text)
def reconcile(console: Console, safe: SafeEffects, key: tuple[str, ...]) -> Answer:
    """Ask the providers now, in this process: about the operations KEY, or about all that are due.

    With KEYs, exit status 1 when one of them was not asked about.
    """
    keys = list(dict.fromkeys(key))
    for one in keys:
        safe.operation(one)
    done = safe.reconcile(keys or None)
    rows = [safe.operation(one) for one in keys]
    results = ", ".join(f"{n} {name}" for name, n in sorted(done.results.items()))
    lines = [f"asked about {count(done.asked, 'operation')}" + (f": {results}" if results else "")]
    for row in rows:
        at = row.next_reconcile_at
        when = f", next look at {moment(at)}" if row.status == OperationStatus.UNKNOWN and at is not None else ""
        lines.append(f"{row.key} is {row.status}{when}")
    document: dict[str, Any] = {"asked": done.asked, "results": done.results}
    if rows:
        document["operations"] = rows
    return Answer(document, lines, ok=done.asked >= len(keys))
