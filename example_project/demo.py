"""`python -m example_project.demo`: a worker is killed in the middle of a refund, once with plain Celery, once safe.

Everything runs on this machine: a PostgreSQL and a Redis of our own (or those that SAFE_EFFECTS_TEST_DATABASE_URL and
SAFE_EFFECTS_TEST_REDIS_URL name; that Redis database is emptied), two providers with a ledger each, workers and beat.

The provider takes `ACCEPTS_AFTER` seconds to accept the first refund. In that time the whole worker is killed, and
another one starts. Exit status 0: the safe ledger has one row a key and the job succeeded. 1: not so. 130: interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from celery_safe_effects.testing import BeatProcess, ServerFailed, ServerNotFound, WorkerProcess, eventually
from example_project import report
from example_project.provider_process import ProviderProcess
from example_project.report import Narrator, Row
from example_project.services import Services, running

ROOT = Path(__file__).resolve().parents[1]
APP = "example_project.app:app"
TICKET = {"id": "T-1001", "customer": "ada@example.com", "payment": "pay_42", "cents": 4200, "service": "checkout"}

ACCEPTS_AFTER = 1.5  # seconds: the window in which the worker is killed
REDELIVERED_AFTER = 4  # seconds: Redis gives an unacknowledged message to another worker
PLAIN_PATIENCE = 20.0
SAFE_PATIENCE = 45.0

# A demo must not take minutes; a service would keep the defaults.
SETTINGS: dict[str, Any] = {
    "broker_transport_options": {
        "visibility_timeout": REDELIVERED_AFTER,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": 2,  # the killed worker may have held it
    },
    "safe_effects_lease_ttl": 3,
    "safe_effects_sweep_interval": 1,
    "safe_effects_reconcile_interval": 1,
}


@dataclass
class Run:
    """What came of one run.

    Attributes:
        id: the task's id.
        ledger: the provider's rows; the independent judge.
        killed_while_accepting: whether the provider had received the refund and not accepted it yet.
        state: Celery's state of the task at the end.
        problem: what is wrong with the ledger, in words.
    """

    id: str = ""
    ledger: list[Row] = field(default_factory=list)
    killed_while_accepting: bool = False
    state: str = ""
    problem: str | None = None


@dataclass
class SafeRun(Run):
    """What came of the safe run."""

    status: str = ""
    outcome_ref: str | None = None
    result: Any = None
    transitions: list[Any] = field(default_factory=list)


class Demo:
    """The two runs.

    Args:
        services: what they run on.
        narrator: tells what happens.
    """

    def __init__(self, services: Services, narrator: Narrator) -> None:
        self.services = services
        self.say = narrator.say
        self.head = narrator.head
        self.line = narrator.line

    def plain(self) -> Run:
        """Plain Celery tasks with late acks.

        Returns:
            What came of it.
        """
        from example_project.tasks import handle_ticket_plain

        run = Run()
        self.head("1. Plain Celery task: acks_late=True, reject_on_worker_lost=True")
        with ExitStack() as stack:
            result = self._interrupted(run, self.services.plain, lambda: handle_ticket_plain.delay(TICKET))
            self._worker(stack, self.services.plain, "worker-b")
            self.say(f"worker-b is up; Redis gives it the message {REDELIVERED_AFTER} s after the first delivery")
            follow = self._follow_ledger(self.services.plain, 1)
            done = self._wait(lambda: follow() or result.state == "SUCCESS", PLAIN_PATIENCE)
            follow()
            run.state = str(result.state)
            self.say(f"Celery says {run.state}", None if done else "red")
        run.ledger = self.services.plain.client.ledger()
        run.problem = report.problem(run.ledger, run.state == "SUCCESS")
        return run

    def safe(self) -> SafeRun:
        """The same work as a SafeTask.

        Returns:
            What came of it.
        """
        from example_project.app import safe
        from example_project.tasks import handle_ticket

        run = SafeRun()
        self.head("2. SafeTask with declared effects")
        with ExitStack() as stack:
            stack.callback(safe.close)

            def send() -> Any:
                return handle_ticket.apply_async((TICKET,), idempotency_key=f"ticket:{TICKET['id']}")

            result = self._interrupted(run, self.services.safe, send)
            follow = self._follow_log(run.id)
            follow()
            self._worker(stack, self.services.safe, "worker-b")
            self._beat(stack)
            self.say("worker-b and beat are up; the lease of worker-a runs out by itself")
            self._wait(lambda: follow() or safe.job(run.id).finished_at is not None, SAFE_PATIENCE)
            follow()
            self._wait(lambda: result.state == "SUCCESS", 10.0)
            run.state = str(result.state)
            job = safe.job(run.id)
            run.status, run.outcome_ref, run.result = job.status, job.outcome_ref, job.result
            run.transitions = safe.transitions(run.id)
            self.say(f"job {job.status}, outcome {job.outcome_ref}; Celery says {run.state}")
        run.ledger = self.services.safe.client.ledger()
        run.problem = report.problem(run.ledger, run.status == "succeeded")
        return run

    def _interrupted(self, run: Run, provider: ProviderProcess, send: Callable[[], Any]) -> Any:
        """Send the task, and kill the worker while the provider accepts the refund."""
        client = provider.client
        client.control(kind="refund", delay_before=ACCEPTS_AFTER, times=1)
        with ExitStack() as stack:
            worker = self._worker(stack, provider, "worker-a")
            result = send()
            run.id = str(result.id)
            self.say(f"ticket {TICKET['id']} is sent as task {run.id[:8]}…")
            eventually(lambda: client.received("refund"), 15, 0.02, message="the provider received the refund")
            self.say("the provider has received the refund and is accepting it")
            processes = 1 + len(worker.children())
            worker.kill()
            run.killed_while_accepting = not client.ledger()
        self.say(f"worker-a is killed: SIGKILL to all of its {processes} processes", "yellow")
        eventually(client.ledger, 15, 0.05, message="the provider accepted the refund")
        self.say(f"the provider has accepted the refund ({client.ledger()[0]['ref']}); nobody heard its answer")
        return result

    def _environment(self, provider: ProviderProcess) -> dict[str, str]:
        return {**environment(self.services), "EXAMPLE_PROVIDER_URL": provider.url}

    def _worker(self, stack: ExitStack, provider: ProviderProcess, name: str) -> WorkerProcess:
        made = WorkerProcess(
            APP,
            name=name,
            hostname="demo",
            env=self._environment(provider),
            cwd=ROOT,
            log_path=self.services.logs / f"{provider.folder.name}-{name}.log",
        )
        stack.callback(made.kill)
        return made.start()

    def _beat(self, stack: ExitStack) -> None:
        made = BeatProcess(
            APP,
            env=self._environment(self.services.safe),
            max_interval=1,
            cwd=ROOT,
            log_path=self.services.logs / "beat.log",
        )
        stack.callback(made.kill)
        made.start()

    def _follow_ledger(self, provider: ProviderProcess, seen: int) -> Callable[[], None]:
        def follow() -> None:
            nonlocal seen
            rows = provider.client.ledger()
            for row in rows[seen:]:
                again = any(r["kind"] == row["kind"] for r in rows[: row["id"] - 1])
                self.say(f"the provider accepts: {row['kind']}{' AGAIN' if again else ''}", "red" if again else None)
            seen = len(rows)

        return follow

    def _follow_log(self, job_id: str) -> Callable[[], None]:
        """Says each new row of the job's log."""
        from example_project.app import safe

        last = 0

        def follow() -> None:
            nonlocal last
            rows = safe.transitions(job_id, after=last)
            names = effect_names(job_id) if rows else {}
            for row in rows:
                styles = {"unknown": "yellow", "outcome_confirmed": "green", "succeeded": "green"}
                self.say(report.transition(row, names), styles.get(row.to_status))
                last = row.id

        return follow

    @staticmethod
    def _wait(predicate: Callable[[], Any], patience: float) -> bool:
        try:
            eventually(predicate, patience, 0.1)
        except AssertionError:
            return False
        return True


def effect_names(job_id: str) -> dict[str, str]:
    """Short names of a job's effects.

    Args:
        job_id: the job.

    Returns:
        The names, by operation key.
    """
    from example_project.app import safe

    return {row.key: row.effect.rpartition(".")[2] for row in safe.operations(job_id)}


def environment(services: Services) -> dict[str, str]:
    """The example app's settings.

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


def failures(run: SafeRun) -> list[str]:
    """Check the promise.

    Args:
        run: the safe run.

    Returns:
        What is broken; empty if all holds.
    """
    broken: list[str] = []
    if run.problem is not None:
        broken.append(run.problem)
    keys = [row["key"] for row in run.ledger]
    if len(run.ledger) != len(report.KINDS) or len(set(keys)) != len(keys):
        broken.append(f"the ledger has {len(run.ledger)} rows under {len(set(keys))} keys, not one row a key")
    if any(not str(key).startswith(f"{run.id}:") for key in keys):
        broken.append("a ledger row has a key that is not the job's")
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
    narrator.line("A worker is killed while the provider is accepting a refund.")
    with running(keep) as services:
        narrator.say(f"started: {services.described}, two providers")
        # The app is ours alone from here on: its settings come from the environment.
        os.environ.update(environment(services))
        from example_project.app import safe as safe_effects

        safe_effects.upgrade()
        demo = Demo(services, narrator)
        plain = demo.plain()
        safe = demo.safe()
        broken = failures(safe)
        narrator.head("The job's log of transitions")
        names = effect_names(safe.id)
        safe_effects.close()
        start = safe.transitions[0].at if safe.transitions else None
        for row in safe.transitions:
            narrator.line(f"  +{(row.at - start).total_seconds():5.1f} s  {report.transition(row, names)}")
        narrator.head("The providers' ledgers")
        report.ledgers(narrator, plain.ledger, safe.ledger, safe.id)
        narrator.line("")
        _verdicts(narrator, plain, safe, broken)
        if keep:
            narrator.line(f"data and logs are kept in {services.logs.parent}")
        return {
            "ok": not broken,
            "broken": broken,
            "seconds": round(narrator.seconds, 1),
            "plain": {**asdict(plain), "counts": report.counts(plain.ledger)},
            "safe": {**asdict(safe), "counts": report.counts(safe.ledger)},
            "kept": str(services.logs.parent) if keep else None,
        }


def _verdicts(narrator: Narrator, plain: Run, safe: SafeRun, broken: list[str]) -> None:
    if plain.problem is not None:
        narrator.line(narrator.paint(f"plain: {plain.problem}.", "red"))
    else:
        narrator.line("plain: each effect happened once, so this run did not show the problem.")
    if broken:
        narrator.line(narrator.paint(f"safe:  BROKEN: {'; '.join(broken)}.", "red"))
    else:
        narrator.line(narrator.paint(f"safe:  each effect happened once; outcome {safe.outcome_ref}.", "green"))
    for name, run in (("plain", plain), ("safe", safe)):
        if not run.killed_while_accepting:
            narrator.line(f"Note: in the {name} run the refund had been accepted before the worker was dead.")


def _interrupt(number: int, _frame: Any) -> NoReturn:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; None takes ours.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python3 example_project", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print a summary as JSON; the story goes to stderr")
    parser.add_argument("--keep", action="store_true", help="keep data and logs in a new folder")
    options = parser.parse_args(arguments)
    # Everything that we started is stopped while the stack unwinds.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    narrator = Narrator(report.default_stream(options.json))
    try:
        summary = perform(narrator, options.keep)
    except KeyboardInterrupt:
        narrator.line("interrupted; everything is stopped")
        return 130
    except (ServerNotFound, ServerFailed, AssertionError) as error:
        narrator.line(f"the demo could not run: {error}")
        return 1
    if options.json:
        print(json.dumps(summary, default=str, indent=2))
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
