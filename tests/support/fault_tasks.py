"""Effects and tasks that can be met in the very moment in which they are to be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from celery import Celery, chain, chord, current_task, group
from celery.backends.redis import RedisBackend

from celery_safe_effects import Happened, NotHappened, Operation, Outcome, SafeTask, effect
from celery_safe_effects.effects import Effect
from celery_safe_effects.glue.chords import Chords, body_of
from celery_safe_effects.glue.execution import Execution
from celery_safe_effects.glue.publish import Publisher
from example_project.provider_client import Declined, Row
from tests.support import tasks
from tests.support.names import DEATH_VARIABLE

# How long a look-up of `waits_charge` may take; the client itself would wait longer.
LOOKUP_TIMEOUT = float(os.environ.get("SAFE_EFFECTS_TEST_LOOKUP_TIMEOUT", "10"))

_COMMON: dict[str, Any] = {
    "deadline": tasks.DEADLINE,
    "lookup_timeout": LOOKUP_TIMEOUT,
    "refused_on": (Declined,),
    "not_happened_on": (ConnectionRefusedError,),
}
_DECLARED: dict[str, tuple[dict[str, Any], bool]] = {
    "charge": ({}, True),
    "charge_keyed": ({"idempotent_for": tasks.IDEMPOTENT_FOR}, False),
    "charge_both": ({"idempotent_for": tasks.IDEMPOTENT_FOR}, True),
    "charge_plain": ({}, False),
}


def _waiting(kind: str) -> Effect[Any, Any]:
    """An effect that, when it is first called, waits between its intent and its call of the provider."""
    options, has_lookup = _DECLARED[kind]

    @effect(name=f"waits_{kind}", **_COMMON, **options)
    def waits(op: Operation, customer: str, cents: int, seconds: float) -> Outcome[Row]:
        if op.attempt == 1:
            time.sleep(seconds)
        return tasks._call(kind, op, {"customer": customer, "cents": cents})

    if has_lookup:

        @waits.lookup
        def find(op: Operation) -> Happened | NotHappened:
            row = tasks.provider().lookup(op.key, kind, timeout=60)
            return Happened(row["ref"]) if row is not None else NotHappened(evidence="no such key")

    return waits


WAITING = {kind: _waiting(kind) for kind in _DECLARED}


@effect(name="fatal", **_COMMON)
def fatal(op: Operation) -> Outcome[Row]:
    """Happens, and takes its process along."""
    tasks._call("fatal", op, {})
    kill_own_process()
    raise AssertionError("not reached")


@fatal.lookup
def find_fatal(op: Operation) -> Happened | NotHappened:
    return tasks._look_up("fatal", op)


def entered(name: str) -> None:
    """Let the provider count that a body was entered."""
    tasks.provider().call(f"entered_{name}", None, {"pid": os.getpid()})


def kill_own_process() -> None:
    """End this process, when its parent has had the time to read which job it took."""
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


# -- deaths between the end of a job and Celery's own bookkeeping ------------------------------------------------------


def die_once(place: str, job_id: str) -> None:
    """End the whole worker, if the environment asks for it at this place and it has not happened yet.

    Args:
        place: where we are.
        job_id: the job that must carry the wanted id.
    """
    wanted = os.environ.get(DEATH_VARIABLE)
    if not wanted:
        return
    where, victim, marker = wanted.split("|")
    if where != place or victim != job_id:
        return
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return
    os.killpg(os.getpgid(0), signal.SIGKILL)
    time.sleep(60)


class MortalTask(SafeTask):
    """Dies, on demand, after its end is recorded and before Celery knows of it."""

    abstract = True

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """Celery has stored the result and counted the chord's part, and will send `task_success`."""
        die_once("before_settling", task_id)

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Celery has stored the error and sent the errbacks, and will send `task_failure`."""
        die_once("before_settling", task_id)


def install_deaths() -> None:
    """In a worker: patch the steps, from the job's end to its settling, at which it may have to die."""
    if not os.environ.get(DEATH_VARIABLE):
        return

    def before(name: str, place: str, victim: Callable[[Any], str]) -> None:
        original: Callable[..., Any] = getattr(RedisBackend, name)

        def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
            die_once(place, victim(args[0]))
            return original(self, *args, **kwargs)

        setattr(RedisBackend, name, patched)

    def running() -> str:
        return str(current_task.request.id) if current_task else ""

    run = Execution.run

    def run_then_die(self: Execution) -> Any:
        value = run(self)
        die_once("before_dispatch", self.id)
        return value

    # The end is recorded by then; Celery has done nothing about it.
    Execution.run = run_then_die  # type: ignore[method-assign]
    # Continuations are sent by then; the result is not stored.
    before("mark_as_done", "before_store", str)
    # The result is stored; the chord does not count it yet.
    before("on_chord_part_return", "before_chord", lambda request: str(request.id))
    # The error is recorded; Celery has done nothing about it.
    before("mark_as_failure", "before_failure", str)
    # The error is stored; the errbacks are not out.
    before("_call_task_errbacks", "before_errbacks", lambda request: running())

    done, send_task_message = Chords.done, Publisher.send_task_message

    def die_then_done(self: Chords, chord_ids: Any) -> None:
        if chord_ids:
            die_once("before_done", running())
        done(self, chord_ids)

    def die_then_send(self: Publisher, send: Any, producer: Any, name: str, message: Any, options: Any) -> Any:
        if body_of(options):
            die_once("before_body", running())
        return send_task_message(self, send, producer, name, message, options)

    # The chord's body, or its errbacks, are out; the chord still stands in the database.
    Chords.done = die_then_done  # type: ignore[method-assign]
    # The chord has counted its last member; its body is not out.
    Publisher.send_task_message = die_then_send  # type: ignore[method-assign]


def add_tasks(app: Celery) -> None:
    """Add the tasks, named `tests.<name>`.

    Args:
        app: the application of the tests.
    """
    for kind, one in WAITING.items():
        _waiting_task(app, kind, one)

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.sleep_then_charge", effects=[tasks.charge])
    def sleep_then_charge(self: Any, seconds: float, customer: str, cents: int, later: float = 0) -> Any:
        """Sleep outside of any effect, for another time in later attempts; then charge."""
        entered("sleep_then_charge")
        time.sleep(seconds if self.job.attempt == 1 else later)
        return tasks.charge(customer, cents).ref

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.sleeps", effects=[])
    def sleeps(self: Any, first: float, later: float) -> None:
        """Sleep, for another time in later attempts."""
        time.sleep(first if self.job.attempt == 1 else later)

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.charge_then_mail", effects=[tasks.charge, tasks.mail])
    def charge_then_mail(self: Any, customer: str, cents: int) -> Any:
        """An effect, a checkpoint, another effect."""
        ref = tasks.charge(customer, cents).ref
        self.job.checkpoint()
        entered("after_the_checkpoint")
        return tasks.mail(f"charged {ref}").ref

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.kills_itself", effects=[])
    def kills_itself(self: Any) -> None:
        """Dies in every attempt, with nothing open."""
        entered("kills_itself")
        kill_own_process()

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.kills_itself_in_effect", effects=[fatal])
    def kills_itself_in_effect(self: Any) -> Any:
        """Dies in its effect, which happened."""
        entered("kills_itself_in_effect")
        return fatal().ref

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.kills_itself_undeclared")
    def kills_itself_undeclared(self: Any) -> None:
        """Dies in a body that is itself the effect, and that nobody can look up."""
        entered("kills_itself_undeclared")
        kill_own_process()

    @app.task(base=MortalTask, bind=True, shared=False, name="tests.mortal", effects=[tasks.refund])
    def mortal(self: Any, order: str, fails: bool = False) -> Any:
        """One effect; its worker may die when it is over."""
        refund = tasks.refund(order)
        if fails:
            raise LookupError(order)
        return refund.ref

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.follow", effects=[tasks.deploy])
    def follow(self: Any, before: Any = None) -> Any:
        """A continuation with an effect."""
        return tasks.deploy(repr(before)).ref

    @app.task(base=SafeTask, shared=False, name="tests.explaining", effects=[tasks.mail])
    def explaining(request: Any, exc: Any, traceback: Any) -> Any:
        """An errback with an effect, which gets all that Celery knows."""
        return tasks.mail(f"{request.id} failed").ref

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.child", effects=[tasks.refund])
    def child(self: Any, number: int) -> int:
        """One of many, with an effect of its own."""
        tasks.refund(f"{number:02}")
        return number

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.parent", effects=[])
    def parent(self: Any, how: str) -> None:
        """Sends fifty children, and may die half-way, the first time."""
        children = [child.si(number) for number in range(50)]
        if how == "one by one":
            for number, one in enumerate(children):
                if number == 25:
                    die_once("half_way", self.job.id)
                one.delay()
        elif how == "two canvases":
            chord(children[:25], follow.s()).apply_async()
            die_once("half_way", self.job.id)
            chain(children[25], group(children[26:]), follow.s()).apply_async()
        else:
            with _dies_after(self, 25):
                group(children).apply_async()

    @app.task(base=SafeTask, bind=True, shared=False, name="tests.errback", effects=[tasks.mail])
    def errback(self: Any, failed_id: str) -> Any:
        """An errback with an effect."""
        return tasks.mail(f"{failed_id} failed").ref


@contextlib.contextmanager
def _dies_after(task: Any, many: int) -> Iterator[None]:
    """Within, the worker dies once so many messages are out."""
    wire = task.safe_effects.publisher.wire
    send, sent = wire._send, count()

    def counted(producer: Any, message: Any) -> None:
        if next(sent) == many:
            die_once("half_way", task.job.id)
        send(producer, message)

    wire._send = counted
    try:
        yield
    finally:
        del wire._send


def _waiting_task(app: Celery, kind: str, one: Effect[Any, Any]) -> None:
    @app.task(base=SafeTask, bind=True, shared=False, name=f"tests.waits_{kind}", effects=[one])
    def bill(self: Any, customer: str, cents: int, seconds: float) -> Any:
        """Charge once, after a pause inside the effect."""
        return one(customer, cents, seconds).ref
