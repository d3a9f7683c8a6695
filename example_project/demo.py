"""`python -m example_project.demo`: a worker is killed in the middle of a refund, under plain Celery and as a SafeTask.

Everything runs on this machine: a PostgreSQL and a Redis of our own (or those that SAFE_EFFECTS_TEST_DATABASE_URL and
SAFE_EFFECTS_TEST_REDIS_URL name; that Redis database is emptied), two providers with a ledger each, workers and beat.

The provider takes `ACCEPTS_AFTER` seconds to accept the first refund. In that time the whole worker is killed, and
another one starts. Exit status 0: the safe ledger has one row a key and the job succeeded; 1: not so, or the demo
could not run; 130: interrupted. What the plain run did is told as it was seen and does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from celery_safe_effects.testing import (
    BeatProcess,
    CeleryProcess,
    ServerFailed,
    ServerNotFound,
    WorkerProcess,
    eventually,
)
from celery_safe_effects.values import TransitionRow
from example_project import report
from example_project.provider_process import ProviderProcess
from example_project.report import Narrator, Row
from example_project.services import Services, running

if TYPE_CHECKING:
    from example_project.effects import Ticket

ROOT = Path(__file__).resolve().parents[1]
APP = "example_project.app:app"
TICKET: Ticket = {
    "id": "T-1001",
    "customer": "customer@example.com",
    "payment": "pay_42",
    "cents": 4200,
    "service": "checkout",
}

ACCEPTS_AFTER = 1.5  # seconds: the window in which the worker is killed
REDELIVERED_AFTER = 4  # seconds: Redis then gives an unacknowledged message to another worker
LEASE_TTL = 3
PLAIN_PATIENCE = 20.0
SAFE_PATIENCE = 45.0

# A demo must not take minutes; a service keeps the defaults.
SETTINGS: dict[str, Any] = {
    "broker_transport_options": {
        "visibility_timeout": REDELIVERED_AFTER,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": 2,  # the killed worker may have held it
    },
    "safe_effects_lease_ttl": LEASE_TTL,
    "safe_effects_sweep_interval": 1,
    "safe_effects_reconcile_interval": 1,
}

Follow = Callable[[], None]
"""Tells what is new since it was last called."""


@dataclass
class Run:
    """What came of one run.

    Attributes:
        id: the task's id.
        state: Celery's state of the task at the end.
        killed_while_accepting: whether the provider had received the refund and not accepted it yet.
        ledger: the provider's rows; the independent judge.
        problem: what is wrong with the ledger, in words.
    """

    id: str = ""
    state: str = ""
    killed_while_accepting: bool = False
    ledger: list[Row] = field(default_factory=list)
    problem: str | None = None


@dataclass
class SafeRun(Run):
    """What came of the safe run, with the job's row and log."""

    status: str = ""
    outcome_ref: str | None = None
    result: Any = None
    transitions: list[TransitionRow] = field(default_factory=list)
    effects: dict[str, str] = field(default_factory=dict)


class Demo:
    """The two runs.

    Args:
        services: what they run on.
        narrator: tells what happens.
    """

    def __init__(self, services: Services, narrator: Narrator) -> None:
        self.services = services
        self.narrator = narrator

    def plain(self) -> Run:
        """Run the plain Celery task with late acks.

        Returns:
            What came of it.
        """
        from example_project.tasks import handle_ticket_plain

        run, provider = Run(), self.services.plain
        self.narrator.head("1. Plain Celery task: acks_late=True, reject_on_worker_lost=True")
        with ExitStack() as stack:
            follow = self._follow_ledger(provider)
            provider.client.control(kind="refund", delay_before=ACCEPTS_AFTER, times=1)
            worker = self._worker(stack, provider, "worker-a")
            self._await_ready(worker)
            result = handle_ticket_plain.delay(TICKET)
            run.id = result.id
            self._kill_in_refund(run, provider, worker, follow)
            self._await_ready(self._worker(stack, provider, "worker-b"), follow)
            self._say("worker-b", f"is up; Redis gives it the message {REDELIVERED_AFTER} s after the first delivery")
            self._wait(lambda: result.state == "SUCCESS", PLAIN_PATIENCE, follow)
            run.state = str(result.state)
            self._say("celery", f"says {run.state}")
        run.ledger = provider.client.ledger()
        run.problem = report.problem(run.ledger, run.state == "SUCCESS")
        return run

    def safe(self) -> SafeRun:
        """Run the same work as a SafeTask.

        Returns:
            What came of it.
        """
        from example_project.app import safe
        from example_project.tasks import handle_ticket

        run, provider = SafeRun(), self.services.safe
        self.narrator.head("2. SafeTask with declared effects")
        with ExitStack() as stack:
            provider.client.control(kind="refund", delay_before=ACCEPTS_AFTER, times=1)
            beat = self._beat(stack)
            worker = self._worker(stack, provider, "worker-a")
            self._await_ready(beat)
            self._await_ready(worker)
            result = handle_ticket.apply_async((TICKET,), idempotency_key=f"ticket:{TICKET['id']}")
            run.id = result.id
            follow_log, follow_ledger = self._follow_log(run.id), self._follow_ledger(provider)

            def follow() -> None:
                follow_ledger()
                follow_log()

            self._kill_in_refund(run, provider, worker, follow)
            self._await_ready(self._worker(stack, provider, "worker-b"), follow)
            self._say("worker-b", f"is up; the lease of worker-a ends {LEASE_TTL} s after its last renewal")
            self._wait(lambda: safe.job(run.id).finished_at, SAFE_PATIENCE, follow)
            self._wait(lambda: result.state == "SUCCESS", 10.0, follow)
            run.state = str(result.state)
            self._say("celery", f"says {run.state}")
        job = safe.job(run.id)
        run.status, run.outcome_ref, run.result = job.status, job.outcome_ref, job.result
        run.transitions, run.effects = safe.transitions(run.id), _effects(run.id)
        run.ledger = provider.client.ledger()
        run.problem = report.problem(run.ledger, run.status == "succeeded")
        return run

    def _kill_in_refund(self, run: Run, provider: ProviderProcess, worker: WorkerProcess, follow: Follow) -> None:
        client = provider.client
        self._say("producer", f"ticket {TICKET['id']} is sent as task {run.id}")
        eventually(lambda: client.received("refund"), 15, 0.02, message="the provider received the refund")
        processes = 1 + len(worker.children())
        worker.kill()
        run.killed_while_accepting = not client.ledger()
        self._say("provider", "received the refund and is accepting it")
        follow()
        self._say(worker.name, f"SIGKILL to all of its {processes} processes, in the middle of the call", "yellow")

        def accepted() -> bool:
            follow()
            return bool(client.ledger())

        eventually(accepted, 15, message="the provider accepted the refund")

    def _say(self, who: str, text: str, style: str | None = None) -> None:
        self.narrator.say(f"{who:<16} {text}", style)

    def _environment(self, provider: ProviderProcess) -> dict[str, str]:
        return {**environment(self.services), "EXAMPLE_PROVIDER_URL": provider.url}

    def _worker(self, stack: ExitStack, provider: ProviderProcess, name: str) -> WorkerProcess:
        made = WorkerProcess(
            APP,
            name=name,
            hostname="demo",
            env=self._environment(provider),
            cwd=ROOT,
            log_path=self.services.logs / f"{'safe' if provider is self.services.safe else 'plain'}-{name}.log",
        )
        stack.callback(made.kill)
        return made.start(ready=False)

    def _beat(self, stack: ExitStack) -> BeatProcess:
        made = BeatProcess(
            APP,
            env=self._environment(self.services.safe),
            max_interval=1,
            cwd=ROOT,
            log_path=self.services.logs / "safe-beat.log",
        )
        stack.callback(made.kill)
        return made.start(ready=False)

    @staticmethod
    def _await_ready(process: CeleryProcess, follow: Follow = lambda: None) -> None:
        def ready() -> bool:
            follow()
            if process.running:
                process.wait_ready(0)  # its AssertionError means "not yet"
            return True

        eventually(ready, 30, message=f"{process.name} is ready")
        process.wait_ready(0)

    @staticmethod
    def _wait(predicate: Callable[[], Any], patience: float, follow: Follow) -> None:
        """Wait, and go on either way: what was reached is looked at afterwards."""

        def reached() -> bool:
            # The predicate first: what it sees is then told before we go on.
            done = bool(predicate())
            follow()
            return done

        with contextlib.suppress(AssertionError):
            eventually(reached, patience, 0.1)

    def _follow_ledger(self, provider: ProviderProcess) -> Follow:
        seen = 0

        def follow() -> None:
            nonlocal seen
            rows = provider.client.ledger()
            for row in rows[seen:]:
                again = any(r["kind"] == row["kind"] for r in rows[: row["id"] - 1])
                text = f"accepted: {row['kind']}{' AGAIN' if again else ''} ({row['ref']})"
                self._say("provider", text, "red" if again else None)
            seen = len(rows)

        return follow

    def _follow_log(self, job_id: str) -> Follow:
        from example_project.app import safe

        last = 0
        styles = {"unknown": "yellow", "outcome_confirmed": "green", "succeeded": "green"}

        def follow() -> None:
            nonlocal last
            rows = safe.transitions(job_id, after=last)
            if rows:
                for text, status in report.moves(rows, _effects(job_id)):
                    self.narrator.say(text, styles.get(status))
                last = rows[-1].id

        return follow


def _effects(job_id: str) -> dict[str, str]:
    """Short names of a job's effects, by operation key."""
    from example_project.app import safe

    return {row.key: row.effect.rpartition(".")[2] for row in safe.operations(job_id)}


def environment(services: Services) -> dict[str, str]:
    """Make the example app's settings.

    Args:
        services: what it runs on.

    Returns:
        Environment variables.
    """
    return {
        "EXAMPLE_BROKER_URL": services.redis_url,
        "EXAMPLE_DATABASE_URL": services.database_url,
        "EXAMPLE_SETTINGS": json.dumps(SETTINGS),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }


def broken_promises(run: SafeRun) -> list[str]:
    """Check the safe run.

    Args:
        run: what came of it.

    Returns:
        What is wrong, in words; empty if all holds.
    """
    broken = [run.problem] if run.problem is not None else []
    keys = [str(row["key"]) for row in run.ledger]
    if len(keys) != len(report.KINDS) or len(set(keys)) != len(keys):
        broken.append(f"the ledger has {len(keys)} rows under {len(set(keys))} keys, not one row a key")
    if not all(key.startswith(f"{run.id}:") for key in keys):
        broken.append("the ledger has a key that is not the job's")
    if run.status != "succeeded" or not run.outcome_ref:
        broken.append(f"the job is {run.status} with outcome {run.outcome_ref}, not succeeded with one")
    if run.state != "SUCCESS":
        broken.append(f"Celery says {run.state}, not SUCCESS")
    return broken


def perform(narrator: Narrator, keep: bool) -> dict[str, Any]:
    """Run the demo and tell it.

    Args:
        narrator: tells what happens.
        keep: leave data and logs behind.

    Returns:
        The machine-readable summary.
    """
    narrator.line("A worker is killed while the provider is accepting a refund, twice.")
    with running(keep) as services:
        narrator.say(f"{'services':<16} {services.described}, two providers")
        # The app reads its settings when it is imported, so this comes first.
        os.environ.update(environment(services))
        from example_project.app import safe as safe_effects

        safe_effects.upgrade()
        try:
            demo = Demo(services, narrator)
            plain, safe = demo.plain(), demo.safe()
        finally:
            safe_effects.close()
    broken = broken_promises(safe)
    _conclude(narrator, plain, safe, broken)
    if services.kept is not None:
        narrator.line(f"\nData and logs are kept in {services.kept}")
    return {
        "ok": not broken,
        "broken": broken,
        "seconds": round(narrator.seconds, 1),
        "plain": {**asdict(plain), "counts": report.counts(plain.ledger)},
        "safe": {**asdict(safe), "counts": report.counts(safe.ledger)},
        "kept": str(services.kept) if services.kept is not None else None,
    }


def _conclude(narrator: Narrator, plain: Run, safe: SafeRun, broken: list[str]) -> None:
    narrator.head(f"The log of job {safe.id}")
    for row in safe.transitions:
        since = (row.at - safe.transitions[0].at).total_seconds()
        narrator.line(f"  +{since:4.1f} s  {report.transition(row, safe.effects)}")
    narrator.head("The providers' ledgers")
    report.ledgers(narrator, plain.ledger, safe.ledger, safe.id)
    narrator.line("")
    for name, run in (("plain", plain), ("safe", safe)):
        if not run.killed_while_accepting:
            narrator.line(f"Note: in the {name} run the provider was done with the refund when the worker was dead.")
    if plain.problem is None:
        narrator.line("plain: every effect happened once; this run did not show the problem.")
    else:
        narrator.line(narrator.paint(f"plain: {plain.problem}; Celery says {plain.state}.", "red"))
    if broken:
        narrator.line(narrator.paint(f"safe:  BROKEN: {'; '.join(broken)}.", "red"))
    else:
        narrator.line(narrator.paint(f"safe:  every effect happened once; outcome {safe.outcome_ref}.", "green"))


def _end(number: int, _frame: Any) -> NoReturn:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; None takes ours.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python3 example_project", description=str(__doc__).partition(": ")[2])
    parser.add_argument("--json", action="store_true", help="print a summary as JSON; the story goes to stderr")
    parser.add_argument("--keep", action="store_true", help="keep data and logs in a new folder")
    options = parser.parse_args(arguments)
    # As with Ctrl-C, everything that runs is stopped on the way out.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    narrator = Narrator(sys.stderr if options.json else sys.stdout)
    try:
        summary = perform(narrator, options.keep)
    except KeyboardInterrupt:
        narrator.line("\nInterrupted; everything is stopped.")
        return 130
    except (ServerNotFound, ServerFailed, AssertionError) as error:
        narrator.line(f"\nThe demo could not run: {error}")
        return 1
    if options.json:
        print(json.dumps(summary, default=str, indent=2))
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
