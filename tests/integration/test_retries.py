"""Retries as Celery's users write them: what each leaves in the row, what the body sees, and how they end."""

from __future__ import annotations

import contextlib
import itertools
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import pytest
from celery.exceptions import Ignore, MaxRetriesExceededError, Reject, Retry

from celery_safe_effects import EffectRefused, Limits
from celery_safe_effects.glue.envelope import Envelope, arguments_digest
from tests.support.lab import Declined, Lab

KINDS = ["whole", "effects", "none"]


def declared(kind: str, *effects: Any) -> dict[str, Any]:
    return {"whole": {}, "effects": {"effects": list(effects)}, "none": {"effects": []}}[kind]


def log(lab: Lab, job: str) -> list[str]:
    """The job's way, without its operations."""
    return [f"{t.to_status} {t.reason or ''}".strip() for t in lab.safe.transitions(job) if t.operation_key is None]


# -- what is kept ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_retry_keeps_the_id_costs_one_attempt_and_logs_its_reason(lab: Lab, kind: str) -> None:
    a = lab.effect("a")
    seen: list[Any] = []

    def body(self: Any, n: int) -> Any:
        seen.append((self.request.id, self.request.retries, self.job.attempt))
        if kind == "effects":
            a(1)
        if self.request.retries < 2:
            raise self.retry(exc=KeyError("not there yet"), countdown=3)
        return n

    task, job = lab.task(body, **declared(kind, a)), str(uuid4())
    for _ in range(3):
        lab.deliver(task, job, 7)
    row = lab.row(job)
    assert (row["status"], row["attempts"], row["result"]) == ("succeeded", 3, 7)
    assert seen == [(job, 0, 1), (job, 1, 2), (job, 2, 3)]
    again = "queued retry: KeyError: 'not there yet'"
    assert [line for line in log(lab, job) if line not in ("leased", "running")] == [
        "queued",
        again,
        again,
        "succeeded",
    ]
    assert len(lab.calls) == (1 if kind == "effects" else 0)
    if kind == "whole":
        assert lab.safe.operation(f"{job}:body").attempt == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["countdown", "eta", "naive", "default", "by hand"])
def test_when_a_retry_runs(lab: Lab, kind: str, how: str) -> None:
    eta = datetime.now(timezone.utc) + timedelta(seconds=100)

    def body(self: Any) -> Any:
        if how == "by hand":
            raise Retry(when=100)
        whens: dict[str, dict[str, Any]] = {
            "countdown": {"countdown": 100},
            "eta": {"eta": eta.astimezone(timezone(timedelta(hours=5)))},
            "naive": {"eta": eta.replace(tzinfo=None)},
            "default": {},
        }
        raise self.retry(**whens[how])

    task, job = lab.task(body, default_retry_delay=100, **declared(kind)), str(uuid4())
    lab.deliver(task, job, due=False)
    wait = lab.sql("SELECT extract(epoch FROM run_after - clock_timestamp())::float8 AS s FROM job")[0]["s"]
    assert 90 < wait <= 100


@pytest.mark.parametrize("kind", ["whole", "none"])
@pytest.mark.parametrize("how", ["args", "kwargs", "both"])
def test_a_retry_may_change_its_arguments(lab: Lab, kind: str, how: str) -> None:
    seen: list[Any] = []

    def body(self: Any, page: int, size: int = 10) -> Any:
        seen.append((page, size))
        if self.request.retries == 0:
            changed: dict[str, dict[str, Any]] = {
                "args": {"args": (2,)},
                "kwargs": {"kwargs": {"size": 20}},
                "both": {"args": (3,), "kwargs": {"size": 30}},
            }
            raise self.retry(countdown=0, **changed[how])
        return "done"

    task, job = lab.task(body, **declared(kind)), str(uuid4())
    lab.deliver(task, job, 1)
    row = lab.sql("SELECT args_digest, envelope FROM job")[0]
    envelope = Envelope.decode(row["envelope"])  # which the sweep would publish
    args, kwargs, _ = envelope.body
    assert arguments_digest(task.name, args, kwargs) == row["args_digest"]
    assert envelope.headers["retries"] == 1
    lab.deliver(task, job, *args, **kwargs)
    assert lab.status(job) == "succeeded"
    assert seen == [(1, 10), {"args": (2, 10), "kwargs": (1, 20), "both": (3, 30)}[how]]
    if kind == "whole":
        assert lab.safe.operation(f"{job}:body").args == dict(zip(("page", "size"), seen[1], strict=True))


def test_changed_arguments_of_a_recorded_effect_park_the_job(lab: Lab) -> None:
    """The replay must make the calls that are recorded."""
    a = lab.effect("a")

    def body(self: Any, cents: int) -> Any:
        a(cents)
        raise self.retry(args=(cents + 1,), countdown=0)

    task, job = lab.task(body, effects=[a]), str(uuid4())
    lab.deliver(task, job, 5)
    lab.deliver(task, job, 6)
    assert (lab.status(job), lab.row(job)["reason"]) == ("unknown", "replay_mismatch")
    assert len(lab.calls) == 1


@pytest.mark.parametrize("kind", ["whole", "none"])
def test_a_retry_may_change_queue_expiry_and_priority(lab: Lab, kind: str) -> None:
    def body(self: Any) -> Any:
        raise self.retry(countdown=0, queue="slow", expires=50, priority=3)

    task, job = lab.task(body, **declared(kind)), str(uuid4())
    lab.deliver(task, job)
    row = lab.sql("SELECT *, extract(epoch FROM expires_at - clock_timestamp())::float8 AS ends FROM job")[0]
    assert (row["status"], row["queue"], 40 < row["ends"] <= 50) == ("queued", "slow", True)
    options = Envelope.decode(row["envelope"]).options
    assert (options["queue"], options["priority"]) == ("slow", 3)


# -- how often ---------------------------------------------------------------------------------------------------------

LIMITS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int, str]] = {
    # what the task says, what retry() says, what the call says: runs, and what ends them
    "celery's default": ({}, {}, {}, 4, "max_retries"),
    "max_retries=0": ({"max_retries": 0}, {}, {}, 1, "max_retries"),
    "max_retries=2": ({"max_retries": 2}, {}, {}, 3, "max_retries"),
    "max_retries=7": ({"max_retries": 7}, {}, {}, 8, "max_retries"),
    "retry(max_retries=1)": ({}, {"max_retries": 1}, {}, 2, "max_retries"),
    "retry(max_retries=7)": ({}, {"max_retries": 7}, {}, 8, "max_retries"),
    "max_attempts=2": ({"max_attempts": 2}, {}, {}, 2, "max_attempts"),
    "max_attempts=2, max_retries=None": ({"max_attempts": 2, "max_retries": None}, {}, {}, 2, "max_attempts"),
    "max_attempts=6, retry(max_retries=7)": ({"max_attempts": 6}, {"max_retries": 7}, {}, 6, "max_attempts"),
    "a call's max_attempts=6": ({}, {"max_retries": 7}, {"max_attempts": 6}, 6, "max_attempts"),
    "a call's max_attempts=2": ({"max_retries": 7}, {}, {"max_attempts": 2}, 2, "max_attempts"),
}


@pytest.mark.parametrize("kind", ["whole", "none"])
def test_what_the_body_sees_when_either_limit_is_reached(lab: Lab, kind: str) -> None:
    """Both end as Celery's users know it: retry() raises ``exc``, or MaxRetriesExceededError, in the body."""
    lab.app.conf.task_always_eager = True
    for (case, (options, asked, call, runs, reason)), exc in itertools.product(
        LIMITS.items(), (None, KeyError("gone"))
    ):
        raised: list[BaseException] = []

        def body(self: Any) -> Any:
            try:
                raise self.retry(exc=exc, countdown=0, **asked)  # noqa: B023 - called here and now
            except Retry:
                raise
            except Exception as final:
                raised.append(final)  # noqa: B023
                raise

        result = lab.task(body, **options, **declared(kind)).apply_async(**call)
        row = lab.row(result.id)
        assert (row["status"], row["reason"], row["attempts"]) == ("failed", reason, runs), case
        assert [type(one) for one in raised] == [MaxRetriesExceededError if exc is None else KeyError], case
        with pytest.raises(type(raised[0])):
            result.get()
        assert row["last_error"].startswith(type(raised[0]).__name__), case
        if kind == "whole":
            assert lab.operations(result.id) == {"body": "not_happened"}, case


def test_retries_without_end(lab: Lab) -> None:
    def body(self: Any) -> Any:
        if self.request.retries < 12:
            raise self.retry(countdown=0)
        return self.request.retries

    job = lab.run(lab.task(body, max_retries=None, effects=[]))
    assert (lab.status(job), lab.row(job)["attempts"]) == ("succeeded", 13)


def test_a_stored_limit_goes_before_what_a_retry_asks_for(lab: Lab) -> None:
    lab.safe.set_limits(Limits(max_attempts=3))

    def body(self: Any) -> Any:
        raise self.retry(countdown=0, max_retries=10)

    job = lab.run(lab.task(body, max_retries=8, effects=[]))
    assert (lab.row(job)["attempts"], lab.row(job)["reason"]) == (3, "max_attempts")


def test_a_crash_costs_an_attempt_too(lab: Lab) -> None:
    """max_attempts counts runs, whatever ended the one before; max_retries counts retries alone."""

    def body(self: Any) -> Any:
        if self.job.attempt % 2:
            lab.crash(self)
        raise self.retry(countdown=0)

    task, job = lab.task(body, max_attempts=6, max_retries=2, effects=[]), str(uuid4())
    for _ in range(6):
        with contextlib.suppress(SystemExit):
            lab.deliver(task, job)
    row = lab.row(job)
    assert (row["attempts"], row["reason"]) == (6, "max_retries")


@pytest.mark.parametrize("kind", ["whole", "effects"])
def test_a_body_may_go_on_when_its_retries_are_over(lab: Lab, kind: str) -> None:
    """The usual fallback: tell somebody, and succeed."""
    a = lab.effect("a")

    def body(self: Any) -> Any:
        try:
            self.retry(countdown=0)
        except MaxRetriesExceededError:
            return a("gave up").ref if kind == "effects" else "gave up"

    job = lab.run(lab.task(body, max_retries=1, **declared(kind, a)))
    assert (lab.status(job), lab.row(job)["attempts"]) == ("succeeded", 2)


def test_one_jobs_max_retries_is_not_the_next_ones(lab: Lab) -> None:
    """Celery keeps what retry(max_retries=...) said on the task."""

    def body(self: Any, explicit: bool) -> Any:
        if explicit:
            raise self.retry(countdown=0, max_retries=0, exc=KeyError())
        raise ValueError

    task = lab.task(body, effects=[], autoretry_for=(ValueError,), retry_backoff=False, default_retry_delay=0)
    lab.run(task, True)
    job = lab.run(task, False)
    assert lab.row(job)["attempts"] == 4


# -- asked for, and then? ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "then", ["returns", "swallows", "raises it", "raises another", "ignores", "rejects", "parks", "asks again"]
)
def test_a_retry_that_was_asked_for_stands(lab: Lab, kind: str, then: str) -> None:
    """Celery has sent the message by then, whatever the body does: so it is here, but for open questions."""
    a = lab.effect("a")

    def body(self: Any) -> Any:
        if self.request.retries:
            return "second run"
        about = KeyError("busy")
        if then == "swallows":
            with contextlib.suppress(Exception):
                self.retry(exc=about, countdown=0)
        else:
            self.retry(exc=about, countdown=0, throw=False)
        if then == "raises it":
            raise about
        if then == "raises another":
            raise ValueError("?")
        if then == "ignores":
            raise Ignore
        if then == "rejects":
            raise Reject("?")
        if then == "parks" and kind == "effects":
            lab.behaviour["a"] = ValueError("?")
            a()
        if then == "asks again":
            raise self.retry(exc=about, countdown=0)
        return "first run"

    task, job = lab.task(body, **declared(kind, a)), str(uuid4())
    told = lab.deliver(task, job)
    open_question = (
        then == "parks"
        if kind == "effects"
        else kind == "whole"
        and then
        in (
            "raises another",
            "ignores",
            "rejects",
        )
    )
    if open_question:
        assert lab.status(job) == "unknown"
        return
    assert lab.row(job)["reason"] == "retry: KeyError: 'busy'"
    assert told.info.state == "RETRY"
    assert lab.safe.job(job).attempts == 1
    lab.deliver(task, job)
    assert (lab.status(job), lab.row(job)["result"]) == ("succeeded", "second run")


def test_the_last_of_two_retries_counts(lab: Lab) -> None:
    def body(self: Any, n: int) -> Any:
        if n == 0:
            self.retry(args=(1,), countdown=0, throw=False)
            raise self.retry(args=(2,), countdown=0)
        return n

    job = lab.run(lab.task(body, effects=[]), 0)
    assert (lab.row(job)["result"], lab.row(job)["attempts"]) == (2, 2)


@pytest.mark.parametrize("kind", ["whole", "none"])
def test_a_retry_of_a_cancelled_job_is_its_end(lab: Lab, kind: str) -> None:
    def body(self: Any) -> Any:
        lab.safe.cancel(self.job.id, "not wanted any more")
        raise self.retry(countdown=0)

    task, job = lab.task(body, **declared(kind)), str(uuid4())
    lab.deliver(task, job)
    assert (lab.status(job), lab.row(job)["reason"]) == ("cancelled", "not wanted any more")


@pytest.mark.parametrize("kind", ["whole", "none"])
def test_a_retry_that_cannot_be_sent_fails_its_job(lab: Lab, kind: str) -> None:
    def body(self: Any, value: Any) -> Any:
        raise self.retry(args=(object(),), countdown=0)

    def wrong(self: Any, value: Any) -> Any:
        raise self.retry(countdown="soon")

    for fn, reason, words in ((body, "retry_not_encodable", "JSON"), (wrong, "retry_not_sent", "soon")):
        task, job = lab.task(fn, **declared(kind)), str(uuid4())
        lab.deliver(task, job, 1)
        row = lab.row(job)
        assert (row["status"], row["reason"], words in row["last_error"]) == ("failed", reason, True), row


def test_what_did_not_happen_is_not_sent_again_when_its_retries_are_over(lab: Lab) -> None:
    a = lab.effect("a", not_happened_on=ConnectionRefusedError)
    lab.behaviour["a"] = ConnectionRefusedError(111, "refused")

    def body(self: Any) -> Any:
        try:
            a()
        except ConnectionRefusedError as exc:
            with contextlib.suppress(MaxRetriesExceededError):
                self.retry(countdown=0)
            raise exc

    job = lab.run(lab.task(body, effects=[a], max_retries=1))
    assert (lab.status(job), len(lab.calls)) == ("failed", 2)


# -- autoretry ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raised", [ConnectionRefusedError(), KeyError(), Reject("no"), Ignore(), SystemExit()])
def test_autoretry_between_effects(lab: Lab, raised: BaseException) -> None:
    """As Celery: it sees ``Reject``, and neither ``Ignore`` nor a ``BaseException``."""

    def body(self: Any) -> Any:
        if self.request.retries == 0:
            raise raised
        return "again"

    task = lab.task(body, effects=[], autoretry_for=(Exception,), default_retry_delay=0)
    job = str(uuid4())
    with contextlib.suppress(SystemExit):
        lab.deliver(task, job)
    expected = {Ignore: ("succeeded", "ignored"), SystemExit: ("queued", "stopped")}
    row = lab.row(job)
    found = (row["status"], row["reason"].partition(":")[0])
    assert found == expected.get(type(raised), ("queued", "retry"))


def test_autoretry_does_not_repeat_what_was_refused(lab: Lab) -> None:
    a = lab.effect("a", refused_on=Declined)
    lab.behaviour["a"] = Declined("no funds")
    job = lab.run(lab.task(lambda self: a().ref, effects=[a], autoretry_for=(Exception,), default_retry_delay=0))
    assert (lab.status(job), lab.row(job)["attempts"]) == ("failed", 1)
    assert EffectRefused.__name__ in lab.row(job)["last_error"]


@pytest.mark.parametrize("option", ["dont_autoretry_for", "throws"])
def test_what_is_not_retried(lab: Lab, option: str) -> None:
    def body(self: Any) -> Any:
        raise Declined("no funds")

    options: dict[str, Any] = {option: (Declined,)}
    if option == "dont_autoretry_for":
        options["autoretry_for"] = (Exception,)
    job = lab.run(lab.task(body, effects=[], **options))
    assert (lab.status(job), lab.row(job)["attempts"]) == ("failed", 1)


@pytest.mark.parametrize("jitter", [False, True])
def test_retry_backoff(lab: Lab, jitter: bool) -> None:
    def body(self: Any) -> Any:
        raise KeyError

    task = lab.task(
        body, effects=[], autoretry_for=(KeyError,), retry_backoff=10, retry_backoff_max=25, retry_jitter=jitter
    )
    job = str(uuid4())
    waits: list[float] = []
    for _ in range(3):
        lab.deliver(task, job, due=False)
        row = lab.sql("SELECT extract(epoch FROM run_after - clock_timestamp())::float8 AS s FROM job")[0]
        waits.append(row["s"])
        lab.sql("UPDATE job SET run_after = NULL")
    for wait, most in zip(waits, (10, 20, 25), strict=True):
        assert (wait <= most) if jitter else (most - 5 < wait <= most)


@pytest.mark.parametrize("n", [1, 7])
def test_retry_kwargs(lab: Lab, n: int) -> None:
    def body(self: Any) -> Any:
        raise KeyError

    task = lab.task(body, effects=[], autoretry_for=(KeyError,), retry_kwargs={"max_retries": n, "countdown": 0})
    job = lab.run(task)
    assert (lab.status(job), lab.row(job)["attempts"]) == ("failed", n + 1)


@pytest.mark.parametrize("kind", ["whole", "effects"])
def test_autoretry_of_what_did_not_happen(lab: Lab, kind: str) -> None:
    """A whole body is retried only for what its author says proves that nothing happened, and not for ever."""
    a = lab.effect("a", not_happened_on=ConnectionRefusedError)
    lab.behaviour["a"] = ConnectionRefusedError(111, "refused")

    def body(self: Any) -> Any:
        if kind == "effects":
            return a().ref
        raise ConnectionRefusedError(111, "refused")

    options: dict[str, Any] = {"autoretry_for": (Exception,), "max_retries": 2, "default_retry_delay": 0}
    if kind == "whole":
        options["effect_options"] = {"not_happened_on": ConnectionRefusedError}
    job = lab.run(lab.task(body, **options, **declared(kind, a)))
    row = lab.row(job)
    assert (row["status"], row["reason"], row["attempts"]) == ("failed", "max_retries", 3)
    assert row["last_error"] == "ConnectionRefusedError: [Errno 111] refused"


# -- other ways to leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requeue", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_reject(lab: Lab, kind: str, requeue: bool) -> None:
    """The broker gets no reject: requeued means queued again, spaced and counted; else the job has failed."""

    def body(self: Any) -> Any:
        raise Reject("not mine", requeue=requeue)

    task, job = lab.task(body, max_attempts=2, **declared(kind)), str(uuid4())
    lab.deliver(task, job)
    if kind == "whole":
        assert lab.status(job) == "unknown"
        return
    assert lab.status(job) == ("queued" if requeue else "failed")
    if requeue:
        assert lab.row(job)["reason"] == "rejected"
        lab.deliver(task, job)
        assert (lab.status(job), lab.row(job)["reason"]) == ("failed", "max_attempts")
    assert "not mine" in lab.row(job)["last_error"]


# -- exceptions of all sorts -------------------------------------------------------------------------------------------


class Picky(Exception):
    """Needs two arguments, keeps none."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__()
        self.code = code


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Holding(Exception):
    """Holds what cannot be pickled or encoded."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lock = iter(())


HARD = [
    Picky(1, "x"),
    Unspeakable("x"),
    Holding(object()),
    Holding(lambda: 1),
    KeyError("x" * 2_000_000),
    ValueError(*range(100_000)),
    ValueError({1, 2}),
]


@pytest.mark.parametrize("how", ["raise", "retry"])
@pytest.mark.parametrize("kind", ["whole", "none"])
def test_exceptions_that_are_hard_to_keep(lab: Lab, kind: str, how: str) -> None:
    for raised in HARD:

        def body(self: Any) -> Any:
            if how == "retry" and self.request.retries == 0:
                raise self.retry(exc=raised, countdown=0)  # noqa: B023 - called here and now
            raise raised  # noqa: B023

        name = type(raised).__name__
        task, job = lab.task(body, throws=(type(raised),), **declared(kind)), str(uuid4())
        for _ in range(2 if how == "retry" else 1):
            told = lab.deliver(task, job)
        row = lab.row(job)
        assert (row["status"], name in row["last_error"], told.info.state) == ("failed", True, "FAILURE")
        assert lab.app.backend.get_task_meta(job, cache=False)["status"] == "FAILURE"
        assert len(lab.sql("SELECT error::text AS e FROM job WHERE id = %s", job)[0]["e"]) < 30_000
        # What is told again later is of the same class where that can be made, and never another state.
        lab.safe.flush()
        lab.sql("UPDATE job SET settled_at = NULL, next_publish_at = clock_timestamp() WHERE id = %s", job)
        again = lab.deliver(task, job)
        assert again.info.state == "FAILURE"
        assert type(again.info.retval).__name__ in (name, "RecordedError")
