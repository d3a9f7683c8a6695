"""``crash_everywhere``: a task once without a crash, and then once for each boundary that it passed, with one."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from celery.app.trace import build_tracer
from kombu import serialization

from celery_safe_effects import canonical, faults
from celery_safe_effects.address import conninfo_from_url, quote_schema
from celery_safe_effects.effects import Effect
from celery_safe_effects.engine.republish import Depth
from celery_safe_effects.faults import Fault, Pass, Plan, Point
from celery_safe_effects.glue.task import SafeTask
from celery_safe_effects.states import TERMINAL, UNRESOLVED
from celery_safe_effects.testing.process import patience
from celery_safe_effects.values import Happened, NotHappened, Operation

ROUNDS: Final = 12
"""Recoveries until whatever is not over is taken for stuck."""
SWEEP_INTERVAL: Final = 0.05
"""Seconds; what waits for some sweeps waits no longer."""
MOST: Final = 500
"""Deliveries of one round."""
UNSTEADY: Final = {Point.BEFORE_RENEW, Point.AFTER_RENEW}
"""Passed when it is time, and not by what a task does."""
_OVER: Final = {status.value for status in TERMINAL}
_OPEN: Final = {status.value for status in UNRESOLVED}

# Time is the database's: what recovery waits for in production is made to be over.
_HASTEN: Final = (
    "UPDATE {s}.job SET lease_until = clock_timestamp() - interval '1 second'"
    " WHERE status IN ('leased', 'running') AND seq > %(seq)s",
    "UPDATE {s}.job SET run_after = NULL, next_publish_at = clock_timestamp()"
    " WHERE status = 'queued' AND run_after IS NOT NULL AND seq > %(seq)s",
    "UPDATE {s}.operation SET deadline_at = clock_timestamp() - interval '1 second',"
    " absent_from = clock_timestamp() - interval '1 second'"
    " WHERE status = 'unknown' AND job_id IN (SELECT id FROM {s}.job WHERE seq > %(seq)s)",
    "UPDATE {s}.job SET next_publish_at = clock_timestamp() WHERE finished_at IS NOT NULL AND settled_at IS NULL"
    " AND next_publish_at IS NOT NULL AND seq > %(seq)s",
    "UPDATE {s}.chord SET next_check_at = clock_timestamp() WHERE next_check_at IS NOT NULL",
)
_LAST: Final = "SELECT coalesce(max(seq), 0) FROM {s}.job"
_JOBS: Final = (
    "SELECT id, task, status, reason, settled_at IS NOT NULL OR next_publish_at IS NULL FROM {s}.job"
    " WHERE seq > %(seq)s ORDER BY seq"
)
_CHORDS: Final = "SELECT count(*) FROM {s}.chord WHERE next_check_at IS NOT NULL"
_OPERATIONS: Final = (
    "SELECT o.key, o.job_id, o.step, o.effect, o.status, o.evidence::text, o.idempotent_for IS NOT NULL, o.has_lookup,"
    " o.repeatable,"
    " (SELECT count(*) FROM {s}.transitions t WHERE t.operation_key = o.key AND t.to_status = 'not_happened')"
    " FROM {s}.operation o JOIN {s}.job j ON j.id = o.job_id WHERE j.seq > %(seq)s ORDER BY o.first_intent_at"
)


class CrashProblem(AssertionError):
    """A task that does not stand a crash somewhere.

    Attributes:
        report: all runs.
    """

    def __init__(self, report: CrashReport) -> None:
        super().__init__(str(report))
        self.report = report


@dataclass(frozen=True)
class Boundary:
    """A place where a run of the task is cut off.

    Attributes:
        point: which point of the protocol.
        step: the step of the job, where there is one.
        effect: its effect.
        task: the task whose job it is, where the point is about a job.
        number: at which pass of this point (and step) of the run, from 1.
        after: where the crash is in a recovery: the crash that is recovered from.
    """

    point: Point
    step: str | None = None
    effect: str | None = None
    task: str | None = None
    number: int = 1
    after: Boundary | None = None

    def __str__(self) -> str:
        text = str(self.point)
        if self.step is not None:
            text += f" of step {self.step!r}" + (f" ({self.effect})" if self.effect else "")
        if self.number > 1:
            text += f", pass {self.number}"
        if self.task is not None:
            text += f", in {self.task}"
        return f"{text}; in the recovery from {self.after}" if self.after is not None else text

    @property
    def fault(self) -> Fault:
        """What crashes there."""
        return Fault(self.point, step=self.step, on=self.number, role="sweeper" if self.after else None)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """All that is to happen in a run that crashes there."""
        return (self.fault,) if self.after is None else (*self.after.faults, self.fault)


@dataclass
class CrashRun:
    """One run of the task.

    Attributes:
        boundary: where it crashed; ``None`` for the run without a crash.
        jobs: the statuses of its jobs at the end, the task's own first, with their reasons.
        calls: how often the effect of each operation was called, by key.
        problems: what is wrong with it, in words.
    """

    boundary: Boundary | None
    jobs: list[tuple[str, str, str | None]] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        end = ", ".join(dict.fromkeys(f"{status}" for _, status, _ in self.jobs)) or "no job"
        lines = [f"{'FAILS' if self.problems else 'ok   '} {self.boundary or 'without a crash'}: {end}"]
        return "\n".join([*lines, *(f"        - {problem}" for problem in self.problems)])


@dataclass
class CrashReport:
    """All runs of a task; as text, one line for each.

    Attributes:
        task: its name.
        runs: the run without a crash first.
    """

    task: str
    runs: list[CrashRun] = field(default_factory=list)

    @property
    def problems(self) -> list[CrashRun]:
        """The runs that failed."""
        return [run for run in self.runs if run.problems]

    @property
    def boundaries(self) -> list[Boundary]:
        """Where it was crashed."""
        return [run.boundary for run in self.runs if run.boundary is not None]

    def __str__(self) -> str:
        bad = len(self.problems)
        head = f"{self.task}: crashed at {len(self.boundaries)} boundaries, {bad or 'no'} run{'s' * (bad != 1)} failed"
        # What failed comes first: assertion messages are cut off at their end.
        runs = sorted(self.runs, key=lambda run: not run.problems)
        return "\n".join([head, *(f"  {run}" for run in runs)])


def crash_everywhere(
    task: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    database_url: str | None = None,
    answers: Mapping[Effect[Any, Any], Any] | None = None,
    happened: Callable[[], Iterable[Hashable]] | None = None,
    options: Mapping[str, Any] | None = None,
    points: Collection[Point] | None = None,
    recovery: bool = True,
    timeout: float = 60.0,
) -> CrashReport:
    """Kill a task at every boundary of the protocol that it passes, one after another, and see that it stands it.

    The task runs once and its boundaries are recorded: each commit, message, call of an effect, and what Celery is
    told. Then it runs once for each of them, in a process that is killed there (SIGKILL); a sweep, a reconciliation and
    workers in further processes recover it, with leases and deadlines that are over at once. No broker is needed: the
    messages are lost with their process, as a broker may lose them, and given again from the database.

    A run is good if each effect happened once a key (a resend under a key that the provider still retains, and what was
    proven not to have happened, aside), the operations are those of the run without a crash, and every job came to
    the same end, or is parked for an effect that has neither key nor lookup.

    Args:
        task: a task with ``base=SafeTask``.
        args, kwargs: its arguments, as JSON has them.
        database_url: a database with the schema, of a test's own; else the one of the app's settings. Jobs that stand
            in it are left alone. Its role owns the schema.
        answers: effects that get a provider of their own here, with a ledger that survives the crashes, keys and a
            lookup where the effect declares them: what the provider answers, or a callable, as for ``stub_effects``.
        happened: tells what really happened so far, such as the keys in a fake provider's ledger. In each run nothing
            may be added twice, and no more than in the run without a crash. Only this sees a side effect that is no
            declared one. A provider in this process is no use: what the task does happens in other processes.
        options: of ``apply_async``, such as ``tenant``.
        points: crash at these points of the protocol alone; ``None``: at all that it passes.
        recovery: also crash at each boundary of the recovery of a job that was killed in an effect.
        timeout: seconds for one run; the environment's ``SAFE_EFFECTS_TEST_PATIENCE`` multiplies it.

    Returns:
        what was done, run by run.

    Raises:
        CrashProblem: naming each boundary at which the task does not stand a crash, and why.
        AssertionError: when it does not come to an end without a crash.
    """
    if not isinstance(task, SafeTask):
        raise TypeError(f"{task!r} is no task with base=SafeTask")
    for module in ("kombu.transport.memory", "celery.backends.filesystem", "psycopg"):
        importlib.import_module(module)  # once, and not in each of the processes
    folder = Path(tempfile.mkdtemp(prefix="safe-effects-crash-"))
    try:
        made = _Crashing(task, args, kwargs, database_url, answers, happened, options, timeout * patience(), folder)
        report = CrashReport(task.name)
        first, passes = made.run(None)
        report.runs.append(first)
        ends = {status for _, status, _ in first.jobs}
        if first.problems or not ends <= _OVER:
            raise AssertionError(f"task {task.name} does not come to an end without a crash:\n{first}")
        boundaries = made.boundaries(passes)
        recovered: dict[Boundary, list[Pass]] = {}
        for boundary in boundaries:
            if points is None or boundary.point in points:
                run, recovered[boundary] = made.run(boundary, first)
                report.runs.append(run)
        for boundary in made.of_recoveries(recovered) if recovery else ():
            if points is None or boundary.point in points:
                report.runs.append(made.run(boundary, first)[0])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if report.problems:
        raise CrashProblem(report)
    return report


class _Crashing:
    """The runs of one task."""

    def __init__(
        self,
        task: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        database_url: str | None,
        answers: Mapping[Effect[Any, Any], Any] | None,
        happened: Callable[[], Iterable[Hashable]] | None,
        options: Mapping[str, Any] | None,
        timeout: float,
        folder: Path,
    ) -> None:
        self.task = task
        self.args = args
        self.kwargs = kwargs
        self.database_url = database_url
        self.answers = dict(answers or {})
        self.happened = happened
        self.options = dict(options or {})
        self.timeout = timeout
        self.folder = folder
        self._runs = 0
        self._steps: set[tuple[str, str, str]] = set()
        self._many = 0
        self._effects: dict[tuple[str, str], str] = {}
        self._tasks: dict[str, str] = {}

    def run(self, boundary: Boundary | None, first: CrashRun | None = None) -> tuple[CrashRun, list[Pass]]:
        """One run, and the passes that were recorded in it."""
        self._runs += 1
        folder = self.folder / str(self._runs)
        plan = Plan(boundary.faults if boundary is not None else (), folder, record=True)
        plan.prepare()
        job = str(uuid4())
        made = CrashRun(boundary)
        before = Counter(self.happened()) if self.happened is not None else Counter()
        told: dict[str, Any] = {}
        limit = time.monotonic() + self.timeout
        start = _Process(self, plan, job, 0).wait(limit)
        for _ in range(4):  # a recovery may be killed, too
            told = _Process(self, plan, job, start.get("seq", 0), recovers=True).wait(limit)
            if told.get("error") or told.get("jobs"):
                break
        if told.get("error") or not told.get("jobs"):
            made.problems.append(told.get("error") or "no recovery came to its end")
            return made, plan.passes()
        made.jobs = [(task, status, reason) for _, task, status, reason, _ in told["jobs"]]
        self._judge(made, told, plan, first)
        if self.happened is not None:
            self._judge_happened(made, Counter(self.happened()) - before, first)
        for effect, key in _ledger_twice(folder):
            made.problems.append(f"{effect} happened twice under the key {key.replace(job, '<job>')}")
        return made, plan.passes()

    def boundaries(self, passes: list[Pass]) -> list[Boundary]:
        """Where the run without a crash can be cut off."""
        found = []
        seen: Counter[tuple[Point, str | None]] = Counter()
        for one in passes:
            seen[one.point, None] += 1
            if one.step is not None:
                seen[one.point, one.step] += 1
            if one.point in UNSTEADY or one.role == "sweeper":
                continue
            job = next((job for job in one.jobs if job in self._tasks), "")
            effect = self._effects.get((job, one.step or ""))
            found.append(Boundary(one.point, one.step, effect, self._tasks.get(job), seen[one.point, one.step]))
        return found

    def of_recoveries(self, recovered: Mapping[Boundary, list[Pass]]) -> list[Boundary]:
        """What the recovery of a job that was killed in an effect passes: each point once."""
        found: dict[Point, Boundary] = {}
        for boundary, passes in recovered.items():
            for one in passes if boundary.point is Point.AFTER_CALL else ():
                if one.role == "sweeper" and one.point not in UNSTEADY:
                    found.setdefault(one.point, Boundary(one.point, after=boundary))
        return list(found.values())

    def _judge(self, made: CrashRun, told: dict[str, Any], plan: Plan, first: CrashRun | None) -> None:
        tasks = {job: task for job, task, *_ in told["jobs"]}
        root = told["jobs"][0][0]
        operations = told["operations"]
        died = {fault.point for fault in plan.happened()}
        begun = Counter(
            (one.jobs[0], one.step or "") for one in plan.passes() if one.point is Point.BEFORE_CALL and one.jobs
        )
        for fault in plan.faults if Point.BEFORE_CALL in died else ():
            if fault.point is Point.BEFORE_CALL and fault.step is not None:
                killed = [key for key in begun if key[1] == fault.step]
                if killed:
                    begun[max(killed, key=lambda key: begun[key])] -= 1
        for key, job, step, effect, status, evidence, keyed, lookup, repeatable, not_happened in operations:
            made.calls[key] = begun[job, step]
            name = f"step {step!r} ({effect}) of {tasks[job]}"
            if not (repeatable or keyed) and begun[job, step] > 1 + not_happened:
                made.problems.append(f"{name} was called {begun[job, step]} times under one key")
            if status in _OPEN and (keyed or lookup):
                made.problems.append(
                    f"{name} stays {status}, although it has a {'lookup' if lookup else 'key'}"
                    + (f": {evidence}" if evidence else "")
                )
        parked = {job for _, job, _, _, status, _, keyed, lookup, _, _ in operations if status in _OPEN}
        for job, task, status, reason, _ in told["jobs"]:
            if status not in _OVER and (status != "unknown" or job not in parked):
                made.problems.append(f"{task} is {status}" + (f" ({reason.replace(root, '<job>')})" if reason else ""))
        steps = {(tasks[job], step, effect) for _, job, step, effect, *_ in operations}
        bodies = Counter(one.jobs[0] for one in plan.passes() if one.point is Point.AFTER_BODY and one.jobs)
        for job, times in bodies.items():
            whole = getattr(self.task.app.tasks.get(tasks.get(job, "")), "effects", ()) is None
            if whole and times > 1:
                made.problems.append(f"{tasks[job]}, whose whole body is one effect, ran to its end {times} times")
        if first is None:
            self._steps = steps
            self._tasks = tasks
            self._effects = {(job, step): effect for _, job, step, effect, *_ in operations}
            return
        if made.boundary is not None and not set(plan.faults) <= set(plan.happened()):
            made.problems.append("the run did not come there again: the task takes another way each time")
        for task, step, effect in sorted(steps - self._steps):
            made.problems.append(f"step {step!r} ({effect}) of {task} appears: the run without a crash has none such")
        ends, wanted = ([status for _, status, _ in run.jobs] for run in (made, first))
        if ends == wanted:
            for task, step, effect in sorted(self._steps - steps):
                made.problems.append(f"step {step!r} ({effect}) of {task} vanishes")
        elif "unknown" not in ends:
            made.problems.append(f"its jobs ended as {', '.join(ends)}, and without a crash as {', '.join(wanted)}")

    def _judge_happened(self, made: CrashRun, new: Counter[Hashable], first: CrashRun | None) -> None:
        for what, times in new.items():
            if times > 1:
                made.problems.append(f"happened {times} times: {what!r}")
        total = sum(new.values())
        if first is None:
            self._many = total
        elif total > self._many and not any(times > 1 for times in new.values()):
            made.problems.append(f"{total} things happened, and without a crash {self._many}: {list(new)!r}")
        elif total < self._many and all(status == "succeeded" for _, status, _ in made.jobs):
            made.problems.append(f"only {total} things happened, and without a crash {self._many}: {list(new)!r}")


class _Process:
    """A process of a run: it accepts the job and works on it, or recovers what another one left behind."""

    def __init__(self, of: _Crashing, plan: Plan, job: str, seq: int, *, recovers: bool = False) -> None:
        self.of = of
        self.plan = plan
        self.job = job
        self.seq = seq
        self._answer = plan._file(f"answer-{time.monotonic_ns()}")
        with warnings.catch_warnings():
            # Python warns of threads that a fork leaves behind; what runs here needs none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            sys.stdout.flush()
            sys.stderr.flush()
            self.pid = os.fork()
        if not self.pid:
            self._be(recovers)

    def wait(self, limit: float) -> dict[str, Any]:
        """Wait for its end, which may be a crash; what it has told."""
        while True:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() > limit:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                return {**self._told(), "error": "it did not come to an end in time"}
            time.sleep(0.005)
        told = self._told()
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            told.setdefault("error", f"a process of the run ended with status {os.WEXITSTATUS(status)}")
        return told

    def _told(self) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self._answer.exists():
            for line in self._answer.read_text().splitlines():
                told |= json.loads(line)
        return told

    def _tell(self, **what: Any) -> None:
        with self._answer.open("a") as answer:
            answer.write(json.dumps(what, default=str) + "\n")

    # -- in the process ------------------------------------------------------------------------------------------------

    def _be(self, recovers: bool) -> None:
        status = 1
        try:
            here = _Here(self.of, self.plan, self.job)
            if recovers:
                self._tell(**here.recover(self.seq))
            else:
                self._tell(seq=here.last())
                here.start()
            status = 0
        except BaseException:
            with contextlib.suppress(BaseException):
                self._tell(error=traceback.format_exc())
        finally:
            os._exit(status)


class _Here:
    """The app in a process of a run: its own database and result backend, and no broker."""

    def __init__(self, of: _Crashing, plan: Plan, job: str) -> None:
        self.of = of
        self.job = job
        self.plan = plan
        self.app = of.task.app
        self.safe = of.task.safe_effects
        self._queue: deque[tuple[dict[str, Any], Any]] = deque()
        self._connection: Any = None
        faults.enter("producer")
        app, safe = self.app, self.safe
        # What the parent has open stays open, and is not ours.
        self._kept = [safe._store, safe._keeper, dict(vars(app))]
        safe._config = safe._store = safe._keeper = safe._admission = None
        app.close()  # its connections to the broker
        vars(app).pop("amqp", None)
        url = "memory://"
        results = plan._file("results")  # which outlive a crash, as in production
        results.mkdir(exist_ok=True)
        app.conf.update(broker_url=url, broker_write_url=url, broker_read_url=url, result_backend=f"file://{results}")
        app.conf.task_always_eager = False
        app.conf.safe_effects_sweep_interval = SWEEP_INTERVAL
        if of.database_url is not None:
            app.conf.safe_effects_database_url = of.database_url
        vars(app).update(_backend_cache=None, _local=threading.local())  # where Celery keeps its result backend
        for task in app.tasks.values():
            task._backend = None
        app.set_current()
        safe.publisher.ask = lambda _queue: Depth(None)  # there is no broker to ask
        safe.publisher.wire.declare_again = lambda _queue: None
        app.amqp.__dict__["send_task_message"] = safe.publisher.wrap(self._keep)
        self._schema = quote_schema(safe.config.schema)
        for effect, answer in of.answers.items():
            _give_a_provider(effect, answer, plan._file("ledger"))
        faults.arm(plan)

    def _keep(self, _producer: Any, _name: str, message: Any, **options: Any) -> None:
        headers, _, body, _ = message
        if isinstance(body, (bytes, str)):
            body = serialization.loads(body, options.get("content_type"), options.get("content_encoding") or "utf-8")
        else:
            serializer = options.get("serializer") or self.app.conf.task_serializer
            content_type, encoding, data = serialization.dumps(body, serializer)
            body = serialization.loads(data, content_type, encoding)
        self._queue.append((dict(headers), body))

    def _rows(self, text: str, **params: Any) -> list[list[Any]]:
        import psycopg

        if self._connection is None:
            self._connection = psycopg.connect(conninfo_from_url(self.safe.config.database_url), autocommit=True)
        cursor = self._connection.execute(text.replace("{s}", self._schema).encode(), params)
        return [list(row) for row in cursor.fetchall()] if cursor.description else []

    def last(self) -> int:
        """The number of the last job that stands in the database already."""
        return int(self._rows(_LAST)[0][0])

    def start(self) -> None:
        """Enqueue the task, and work."""
        self._accept()
        self._work()

    def _accept(self) -> None:
        faults.enter("producer")
        self.of.task.apply_async(self.of.args, self.of.kwargs, task_id=self.job, **self.of.options)

    def _work(self) -> None:
        faults.enter("child")
        for _ in range(MOST):
            if not self._queue:
                break
            headers, (args, kwargs, embed) = self._queue.popleft()
            task = self.app.tasks.get(headers["task"])
            if task is None:
                continue
            request = {
                **headers,
                **(embed or {}),
                "args": args,
                "kwargs": kwargs,
                "delivery_info": {"exchange": "", "routing_key": "", "priority": None},
                "hostname": "crash_everywhere",
                "is_eager": False,
            }
            task.__trace__ = build_tracer(task.name, task, app=self.app, hostname="crash_everywhere")
            task.__trace__(headers["id"], args, kwargs, request)
            self.safe.flush()

    def recover(self, seq: int) -> dict[str, Any]:
        """Sweep, reconcile and work until everything is over or nothing moves; what the database says then."""
        seen: Any = None
        self._accept()  # whoever does not know whether it was accepted enqueues it again
        self._queue.clear()  # lost, like the messages of whoever was killed
        for _ in range(ROUNDS):
            faults.enter("child")
            for text in _HASTEN:
                self._rows(text, seq=seq)
            self.safe.sweep()
            open_keys = [row[0] for row in self._rows(_OPERATIONS, seq=seq) if row[4] == "unknown"]
            if open_keys:
                self.safe.reconcile(open_keys)
            self.safe.republish(all=True)
            self._work()
            jobs, operations = self._rows(_JOBS, seq=seq), self._rows(_OPERATIONS, seq=seq)
            chords = self._rows(_CHORDS)[0][0]
            if not chords and all(row[2] in _OVER and row[4] for row in jobs):
                break
            if (jobs, operations) == seen and not chords:
                break
            if chords:
                time.sleep(3 * SWEEP_INTERVAL)  # Celery's own time for its count
            seen = (jobs, operations)
        return {"jobs": jobs, "operations": operations}


def _give_a_provider(effect: Effect[Any, Any], answer: Any, path: Path) -> None:
    """A provider that keeps a ledger in a file: with keys and a lookup, where the effect declares them."""

    def call(op: Operation, *args: Any, **kwargs: Any) -> Any:
        with path.open("a+") as ledger:
            fcntl.flock(ledger, fcntl.LOCK_EX)
            known = _known(path, effect.name, op.key)
            if known is not None and effect.options.idempotent_for is not None:
                return _outcome(known)
            given = answer(op, *args, **kwargs) if callable(answer) else answer
            if isinstance(given, BaseException):
                raise given
            ref, result = _ref_and_result(given, op.key)
            ledger.write(json.dumps([effect.name, op.key, ref, result]) + "\n")
        return given

    async def awaited(op: Operation, *args: Any, **kwargs: Any) -> Any:
        return call(op, *args, **kwargs)

    def find(op: Operation) -> Happened | NotHappened:
        known = _known(path, effect.name, op.key)
        return Happened(known[2], known[3]) if known is not None else NotHappened()

    effect.fn = awaited if effect.is_async else call
    if effect.find is not None:
        effect.find = find


def _ref_and_result(given: Any, key: str) -> tuple[str, Any]:
    from celery_safe_effects.engine.outcomes import outcome_of

    ref, result, _ = outcome_of(given, key)
    return ref, canonical.decode(result)


def _outcome(row: list[Any]) -> Any:
    from celery_safe_effects.values import Outcome

    return Outcome(row[2], row[3])


def _ledger(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _known(path: Path, effect: str, key: str) -> list[Any] | None:
    return next((row for row in _ledger(path) if row[:2] == [effect, key]), None)


def _ledger_twice(folder: Path) -> list[tuple[str, str]]:
    counted = Counter((row[0], row[1]) for row in _ledger(folder / "ledger"))
    return [key for key, times in counted.items() if times > 1]
