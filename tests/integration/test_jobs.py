"""What a job does, run in this process (``task.apply``) on real PostgreSQL: replay, steps, verdicts, policies, ends."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from celery import chain, chord, group
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from celery_safe_effects import (
    EffectRefused,
    Happened,
    IdempotencyConflict,
    NoActiveJob,
    NotHappened,
    OperationBusy,
    Outcome,
    OutcomeUnknown,
    Refused,
    ReplayMismatch,
    SafeTask,
    StepNameRequired,
    effect,
    signals,
)
from celery_safe_effects.errors import ConfigurationError, NotAllowed, NotFound
from tests.support.lab import Declined, Lab, names

# -- replay ------------------------------------------------------------------------------------------------------------


def test_a_replay_returns_what_is_recorded_and_calls_only_what_is_new(lab: Lab) -> None:
    a, b, c = lab.effect("a", lookup=True), lab.effect("b", lookup=True), lab.effect("c", lookup=True)
    seen = []

    def body(self: Any) -> Any:
        first = a(1)
        second = b(first.ref)
        seen.append((first.replayed, second.replayed, second.result))
        if self.job.attempt == 1:
            lab.crash(self)
        return c(second.ref).ref

    task = lab.task(body, effects=[a, b, c])
    job = lab.run(task)
    assert lab.status(job) == "queued"
    lab.run(task, job=job)
    assert lab.row(job)["outcome_ref"] == "c-3"
    assert [name for name, _ in lab.calls] == ["a", "b", "c"]
    assert [key for _, key in lab.calls] == [f"{job}:1", f"{job}:2", f"{job}:3"]
    assert seen == [(False, False, ["a-1"]), (True, True, ["a-1"])]


def test_the_result_is_json_on_the_first_call_too(lab: Lab) -> None:
    a = lab.effect("a")
    lab.behaviour["a"] = lambda op: Outcome("r", {"t": (1, 2), 3: "x"})
    seen = []
    task = lab.task(lambda self: seen.append(a().result), effects=[a])
    lab.run(task)
    assert seen == [{"t": [1, 2], "3": "x"}]


def test_messages_and_canvases_of_a_body_are_sent_once_however_often_it_runs(lab: Lab) -> None:
    child = lab.task(lambda self, *args: None, effects=[])

    def body(self: Any) -> Any:
        child.delay(1)
        chain(child.s(2), child.s(3)).apply_async()
        group(child.s(4), child.s(5)).apply_async()
        chord([child.s(6), child.s(7)], child.s(8)).apply_async()
        if self.job.attempt < 3:
            lab.crash(self)
        return "done"

    task = lab.task(body, effects=[])
    job = lab.run(task)
    first = {r["id"] for r in lab.sql("SELECT id FROM jobs WHERE id <> %s", job)}
    assert len(first) == 1 + 1 + 2 + 2
    for _ in range(2):
        lab.run(task, job=job)
    assert {r["id"] for r in lab.sql("SELECT id FROM jobs WHERE id <> %s", job)} == first
    assert lab.status(job) == "succeeded"
    other = lab.run(task)
    assert not first & {r["id"] for r in lab.sql("SELECT id FROM jobs WHERE parent_id = %s", other)}


@pytest.mark.parametrize("change", ["effect", "arguments"])
def test_another_call_at_a_recorded_step_parks_the_job_even_if_it_is_swallowed(lab: Lab, change: str) -> None:
    a, b = lab.effect("a"), lab.effect("b")

    def body(self: Any) -> Any:
        try:
            if self.job.attempt == 1:
                a(1)
                lab.crash(self)
            return (b(1) if change == "effect" else a(2)).ref
        except ReplayMismatch:
            return "swallowed"

    task = lab.task(body, effects=[a, b])
    job = lab.run(task)
    lab.run(task, job=job)
    row = lab.row(job)
    assert (row["status"], row["reason"]) == ("unknown", "replay_mismatch")
    assert len(lab.calls) == 1
    assert lab.operations(job) == {"1": "outcome_confirmed"}
    assert lab.reconcile() == {}, "nobody but an operator moves it"
    lab.safe.retry(job, "the code is mended")
    assert lab.status(job) == "queued"


def test_a_repeatable_effect_is_asked_again_after_a_crash_and_answers_the_same_on_replay(lab: Lab) -> None:
    ask, tool = lab.effect("ask", repeatable=True), lab.effect("tool", lookup=True)
    answers = iter(["first", "second", "third"])
    lab.behaviour["ask"] = lambda op: next(answers)
    told = []

    def body(self: Any) -> Any:
        told.append(ask().result)
        if self.job.attempt == 1:
            lab.crash(self)
        return tool().ref

    task = lab.task(body, effects=[ask, tool])
    job = lab.run(task)
    assert lab.operations(job) == {"1": "outcome_confirmed"}
    lab.run(task, job=job)
    assert told == ["first", "first"]
    assert lab.status(job) == "succeeded"


def test_a_repeatable_effect_that_raises_is_never_unknown_and_is_asked_again(lab: Lab) -> None:
    ask = lab.effect("ask", repeatable=True)
    lab.behaviour["ask"] = TimeoutError("slow model")
    task = lab.task(lambda self: ask().result, effects=[ask])
    job = lab.run(task)
    assert lab.operations(job) == {"1": "not_happened"}
    assert lab.status(job) == "failed"
    lab.behaviour["ask"] = lambda op: "answer"
    lab.safe.retry(job, "again")
    lab.run(task, job=job)
    assert lab.row(job)["result"] == "answer"
    assert lab.row(job)["outcome_ref"] == f"result:{job}"


# -- what an exception proves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raised", [ValueError("?"), Retry(), Ignore(), Reject("?"), KeyboardInterrupt(), SystemExit(1)]
)
def test_any_exception_outside_the_lists_is_unknown_and_parks(lab: Lab, raised: BaseException) -> None:
    a, b = lab.effect("a", not_happened_on=ConnectionRefusedError), lab.effect("b")
    lab.behaviour["a"] = raised

    def body(self: Any) -> Any:
        try:
            a()
        except Exception:
            pytest.fail("OutcomeUnknown must pass")
        return b().ref

    job = lab.run(lab.task(body, effects=[a, b]))
    assert lab.operations(job) == {"1": "unknown"}
    assert lab.status(job) == "unknown"
    assert lab.calls == [("a", f"{job}:1")]


def test_a_swallowed_unknown_still_parks_and_nothing_further_starts(lab: Lab) -> None:
    a, b = lab.effect("a"), lab.effect("b")
    lab.behaviour["a"] = ValueError("?")

    def body(self: Any) -> Any:
        with contextlib.suppress(BaseException):
            a()
        with contextlib.suppress(OutcomeUnknown):
            b()
        return "done"

    job = lab.run(lab.task(body, effects=[a, b]))
    assert lab.status(job) == "unknown"
    assert [name for name, _ in lab.calls] == ["a"]


@pytest.mark.parametrize("at", ["INTENT", "OUTCOME"])
def test_a_time_limit_between_intent_and_record_parks_and_nothing_further_starts(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Celery's soft limit strikes while a statement is under way; the body takes it for an error of its own."""
    a, b = lab.effect("a"), lab.effect("b")
    send = lab.safe.store.send

    def interrupted(statement: str, params: Any, sending: Any = None) -> Any:
        found = send(statement, params, sending)
        if statement.startswith(at):
            monkeypatch.undo()
            raise SoftTimeLimitExceeded
        return found

    def body(self: Any) -> Any:
        monkeypatch.setattr(lab.safe.store, "send", interrupted)
        with contextlib.suppress(SoftTimeLimitExceeded):
            a()
        with contextlib.suppress(OutcomeUnknown):
            b()
        return "done"

    job = lab.run(lab.task(body, effects=[a, b]))
    assert lab.status(job) == ("unknown" if at == "INTENT" else "queued")
    assert [name for name, _ in lab.calls] == (["a"] if at == "OUTCOME" else [])


def test_a_refusal_is_raised_with_its_cause_and_the_same_again_on_replay(lab: Lab) -> None:
    a, b = lab.effect("a", refused_on=Declined), lab.effect("b")
    lab.behaviour["a"] = Declined("no funds", 402)
    causes = []

    def body(self: Any) -> Any:
        try:
            a()
        except EffectRefused as exc:
            causes.append(exc.__cause__)
        if self.job.attempt == 1:
            lab.crash(self)
        return b().ref

    task = lab.task(body, effects=[a, b])
    job = lab.run(task)
    lab.behaviour["a"] = None
    lab.run(task, job=job)
    assert [(type(c), c.args) for c in causes] == [(Declined, ("no funds", 402))] * 2  # type: ignore[union-attr]
    assert lab.operations(job) == {"1": "refused", "2": "outcome_confirmed"}


def test_what_did_not_happen_is_sent_again_only_as_the_last_step(lab: Lab) -> None:
    a, b = lab.effect("a", not_happened_on=ConnectionRefusedError), lab.effect("b")
    lab.behaviour["a"] = ConnectionRefusedError(111, "refused")
    seen = []

    def body(self: Any) -> Any:
        try:
            ref = a().ref
        except ConnectionRefusedError as exc:
            seen.append(exc.args)
            ref = b().ref
        if self.job.attempt == 1:
            lab.crash(self)
        return ref

    task = lab.task(body, effects=[a, b])
    job = lab.run(task)
    lab.behaviour["a"] = None
    lab.run(task, job=job)
    assert lab.row(job)["result"] == "b-2"
    assert [name for name, _ in lab.calls] == ["a", "b"], "the primary is not sent behind its fallback"
    assert seen == [(111, "refused")] * 2


def test_an_uncaught_not_happened_runs_again_under_the_same_key_until_attempts_are_over(lab: Lab) -> None:
    a = lab.effect("a", not_happened_on=ConnectionRefusedError)
    lab.behaviour["a"] = ConnectionRefusedError(111, "refused")
    task = lab.task(lambda self: a().ref, effects=[a], max_attempts=2)
    job = lab.run(task)
    assert (lab.status(job), lab.row(job)["reason"]) == ("queued", "not_happened")
    lab.sql("UPDATE job SET run_after = NULL")
    lab.run(task, job=job)
    assert (lab.status(job), lab.row(job)["reason"]) == ("failed", "max_attempts")
    assert lab.calls == [("a", f"{job}:1")] * 2


@pytest.mark.parametrize("text", ["a\x00b", "a\ud800b"], ids=["nul", "surrogate"])
def test_an_error_whose_text_the_database_cannot_hold(lab: Lab, text: str) -> None:
    a = lab.effect("a", refused_on=Declined)
    lab.behaviour["a"] = Declined(text)

    def body(self: Any) -> Any:
        with contextlib.suppress(EffectRefused):
            a(text)
        raise ValueError(text)

    job = lab.run(lab.task(body, effects=[a]))
    assert lab.status(job) == "failed"
    assert lab.safe.job(job).last_error
    assert len(lab.safe.jobs()) == 1
    assert lab.safe.operation(f"{job}:1").args == {"args": [text]}


def test_an_error_of_the_body_between_effects_fails_the_job(lab: Lab) -> None:
    a = lab.effect("a")

    def body(self: Any) -> Any:
        a()
        raise ValueError("a bug")

    job = lab.run(lab.task(body, effects=[a]))
    assert (lab.status(job), lab.row(job)["last_error"]) == ("failed", "ValueError: a bug")


# -- which effects, which steps ----------------------------------------------------------------------------------------


def test_an_undeclared_effect_is_refused_before_anything_is_recorded(lab: Lab) -> None:
    a, b = lab.effect("a"), lab.effect("b")
    declared: list[list[Any]] = [[a], []]
    for effects in declared:
        job = lab.run(lab.task(lambda self: b().ref, effects=effects))
        assert "UndeclaredEffect" in lab.row(job)["last_error"]
        assert lab.operations(job) == {}
    assert lab.calls == []


def test_a_call_whose_intent_took_longer_than_its_deadline_does_not_begin(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner can prove that it did not happen; the next run sends it."""
    a = lab.effect("a", deadline=1)
    store, intent = lab.safe.store, lab.safe.store.intent
    task = lab.task(lambda self: a().ref, effects=[a])

    def slowly(*args: Any) -> Any:
        answer = intent(*args)
        time.sleep(1.2)
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(store, "intent", slowly)
        job = lab.run(task)
    assert (lab.calls, lab.operations(job)) == ([], {"1": "not_happened"})
    lab.sql("UPDATE job SET lease_until = clock_timestamp() - interval '1 s' WHERE id = %s", job)
    lab.safe.sweep()
    lab.sql("UPDATE job SET run_after = NULL WHERE id = %s", job)
    lab.run(task, job=job)
    assert (lab.calls, lab.status(job)) == ([("a", f"{job}:1")], "succeeded")


def test_an_unnamed_call_while_another_is_open_needs_a_name(lab: Lab) -> None:
    a, b = lab.effect("a"), lab.effect("b")
    errors: list[Exception] = []

    def nested(op: Any) -> Any:
        try:
            b()
        except StepNameRequired as exc:
            errors.append(exc)
        try:
            a.step("outer")()
        except OperationBusy as exc:
            errors.append(exc)
        return Outcome("a")

    lab.behaviour["a"] = nested
    job = lab.run(lab.task(lambda self: a.step("outer")().ref, effects=[a, b]))
    assert [type(e) for e in errors] == [StepNameRequired, OperationBusy]
    assert lab.operations(job) == {"outer": "outcome_confirmed"}


def test_named_steps_overlap_in_threads(lab: Lab) -> None:
    a = lab.effect("a")
    barrier = threading.Barrier(3, timeout=10)
    lab.behaviour["a"] = lambda op, n: (barrier.wait(), Outcome(f"ref-{n}"))[1]

    def body(self: Any) -> Any:
        import contextvars

        refs: dict[int, str] = {}
        threads = []
        for n in range(3):
            context = contextvars.copy_context()
            call = lambda n=n: refs.__setitem__(n, a.step(f"tool-{n}")(n).ref)  # noqa: E731
            threads.append(threading.Thread(target=context.run, args=(call,)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return refs

    job = lab.run(lab.task(body, effects=[a]))
    assert lab.row(job)["result"] == {"0": "ref-0", "1": "ref-1", "2": "ref-2"}
    assert set(lab.operations(job).values()) == {"outcome_confirmed"}


def test_unnamed_steps_are_counted_by_themselves(lab: Lab) -> None:
    """Whether a named call has begun by now may be another way in the next run; the unnamed one is the same step."""
    a, b = lab.effect("a"), lab.effect("b")

    def body(self: Any) -> Any:
        if self.job.attempt == 1:
            a.step("y")()
            b()
            lab.crash(self)
        b()
        return a.step("y")().ref

    task = lab.task(body, effects=[a, b])
    job = lab.run(task)
    lab.run(task, job=job)
    assert lab.status(job) == "succeeded"
    assert lab.calls == [("a", f"{job}:y"), ("b", f"{job}:1")]


def test_a_step_that_did_not_happen_is_sent_again_where_others_had_begun_before_that_was_known(lab: Lab) -> None:
    """They are no fallback of it: three tools in parallel, one of them finds its provider closed."""
    a = lab.effect("a", not_happened_on=ConnectionRefusedError)
    begun = threading.Barrier(3, timeout=10)
    attempts: list[int] = []

    def tool(op: Any, n: int) -> Any:
        if attempts[-1] == 1:
            begun.wait()
            if n == 0:
                raise ConnectionRefusedError(111, "refused")
        return Outcome(f"ref-{n}")

    lab.behaviour["a"] = tool

    def body(self: Any) -> Any:
        attempts.append(self.job.attempt)
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(copy_context().run, a.step(f"tool-{n}"), n) for n in range(3)]
        return [call.result().ref for call in calls]

    task = lab.task(body, effects=[a])
    job = lab.run(task)
    assert sorted(lab.operations(job).values()) == ["not_happened", "outcome_confirmed", "outcome_confirmed"]
    lab.sql("UPDATE job SET run_after = NULL")
    lab.run(task, job=job)
    assert lab.row(job)["result"] == ["ref-0", "ref-1", "ref-2"]
    assert [key for _, key in lab.calls].count(f"{job}:tool-0") == 2
    assert len(lab.calls) == 4


def test_outside_a_job_there_is_none(lab: Lab) -> None:
    a = lab.effect("a")
    task = lab.task(lambda self: self.job, effects=[a])
    with pytest.raises(NoActiveJob):
        a()
    with pytest.raises(NoActiveJob):
        task()
    assert lab.calls == []


def test_redacted_arguments_are_kept_out_of_the_record(lab: Lab) -> None:
    seen = []

    @effect(name=next(names), redact=["card"])
    def pay(op: Any, customer: str, card: str) -> Any:
        seen.append((dict(op.arguments), card))
        return "ref"

    task = lab.task(lambda self: pay("c", "4111").ref, effects=[pay])
    job = lab.run(task)
    assert seen == [({"customer": "c"}, "4111")]
    assert lab.sql("SELECT args FROM operations WHERE job_id = %s", job) == [{"args": {"customer": "c"}}]


# -- its time ----------------------------------------------------------------------------------------------------------


def test_a_time_that_comes_while_a_refused_delivery_looks_is_not_missed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim came too early, and the row says that it is due: nobody else would deliver it for a while."""
    task = lab.task(lambda self: "ran", effects=[])
    job = str(uuid4())
    task.apply_async(task_id=job, countdown=30)
    rows = lab.safe.store.rows
    looked: list[str] = []

    def slowly(statement: str, /, **params: Any) -> Any:
        if statement == "CLAIMED":
            looked.append(statement)
            lab.sql("UPDATE job SET run_after = clock_timestamp() - interval '1 ms' WHERE id = %s", job)
        return rows(statement, **params)

    monkeypatch.setattr(lab.safe.store, "rows", slowly)
    lab.deliver(lab.app.tasks[task.name], job, due=False)
    assert (lab.status(job), looked) == ("succeeded", ["CLAIMED"])


# -- sent again --------------------------------------------------------------------------------------------------------


def to_be_sent_again(lab: Lab, task: Any) -> str:
    """A job whose call was not heard of, and may be made anew."""
    job = lab.run(task)
    lab.past_deadline()
    lab.reconcile()
    assert lab.status(job) == "queued"
    return job


def test_a_refused_connection_of_a_resend_says_nothing_of_the_call_before(lab: Lab) -> None:
    """Neither does the body take its other branch, nor does the job fail: the first call may have happened."""
    a, b = (
        lab.effect("a", idempotent_for=timedelta(hours=1), not_happened_on=(ConnectionRefusedError,)),
        lab.effect("b"),
    )

    def body(self: Any) -> Any:
        try:
            return a().ref
        except ConnectionRefusedError:
            return b().ref

    lab.behaviour["a"] = ValueError("accepted, and not heard")
    task = lab.task(body, effects=[a, b])
    job = to_be_sent_again(lab, task)
    lab.behaviour["a"] = ConnectionRefusedError("down")
    lab.run(task, job=job)
    assert (lab.status(job), lab.operations(job)) == ("unknown", {"1": "unknown"})
    lab.behaviour["a"] = None
    lab.past_deadline()
    lab.reconcile()
    lab.run(task, job=job)
    assert (lab.status(job), lab.operations(job)) == ("succeeded", {"1": "outcome_confirmed"})
    assert [name for name, _ in lab.calls] == ["a", "a", "a"]


@pytest.mark.parametrize("keyed", [True, False])
def test_a_refusal_of_a_resend_tells_of_the_call_before_only_where_the_key_does(lab: Lab, keyed: bool) -> None:
    """A provider that answers a repeated key with the first result has refused that, too; another may have accepted."""
    options: dict[str, Any] = {"idempotent_for": timedelta(hours=1)} if keyed else {"if_unknown": "send_again"}
    a = lab.effect("a", refused_on=(Declined,), **options)

    def body(self: Any) -> Any:
        with contextlib.suppress(EffectRefused):
            a()
        return "refused"

    lab.behaviour["a"] = ValueError("accepted or refused, and not heard")
    task = lab.task(body, effects=[a], max_attempts=3)
    job = to_be_sent_again(lab, task)
    lab.behaviour["a"] = Declined("no")
    lab.run(task, job=job)
    wanted = ("succeeded", {"1": "refused"}) if keyed else ("unknown", {"1": "unknown"})
    assert (lab.status(job), lab.operations(job)) == wanted
    assert [name for name, _ in lab.calls] == ["a", "a"]


@pytest.mark.parametrize("keyed", [True, False])
def test_a_refused_resend_of_a_whole_body_likewise(lab: Lab, keyed: bool) -> None:
    options: dict[str, Any] = {"idempotent_for": timedelta(hours=1)} if keyed else {"if_unknown": "send_again"}

    def body(self: Any) -> None:
        raise raised[0]

    raised: list[Exception] = [ValueError("accepted or refused, and not heard")]
    task = lab.task(body, effect_options={"refused_on": (Declined,), **options}, max_attempts=3)
    job = to_be_sent_again(lab, task)
    raised[0] = Declined("no")
    with contextlib.suppress(Declined):
        lab.run(task, job=job)
    assert lab.status(job) == ("failed" if keyed else "unknown")


# -- keyed -------------------------------------------------------------------------------------------------------------


def test_a_business_key_is_called_once_for_all_jobs(lab: Lab) -> None:
    a = lab.effect("a", lookup=True)
    lab.behaviour["a"] = ValueError("?")
    seen = []

    def body(self: Any) -> Any:
        outcome = a.keyed("invoice-7")(5)
        seen.append(outcome.replayed)
        return outcome.ref

    task = lab.task(body, effects=[a])
    first, second = lab.run(task), lab.run(task)
    row = lab.row(second)
    key = f"default/{a.name}/invoice-7"
    assert (row["status"], row["reason"], row["attempts"]) == ("queued", f"waiting_for:{key}", 0)
    lab.verdict = Happened("paid", {"cents": 5})
    lab.reconcile()
    due = lab.sql("SELECT id FROM job WHERE status = 'queued' AND next_publish_at <= clock_timestamp()")
    assert {r["id"] for r in due} == {first, second}, "the resolution wakes both"
    for job in (second, first):
        lab.run(task, job=job)
        assert lab.row(job)["result"] == "paid"
    assert seen == [True, True]
    assert len(lab.calls) == 1


def test_a_business_key_with_other_arguments_is_a_conflict(lab: Lab) -> None:
    a = lab.effect("a")
    task = lab.task(lambda self, cents: a.keyed("invoice-8")(cents).ref, effects=[a])
    lab.run(task, 5)
    job = lab.run(task, 6)
    assert "IdempotencyConflict" in lab.row(job)["last_error"]
    assert len(lab.calls) == 1


# -- reconciliation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("keyed", [False, True])
def test_when_an_absence_counts(lab: Lab, keyed: bool, late: bool, gone: bool) -> None:
    """Only after deadline and lag; without a key, only if the sender is gone too. The table of the contract's §4."""
    options: dict[str, Any] = {"idempotent_for": timedelta(hours=1)} if keyed else {}
    a = lab.effect("a", lookup=True, **options)
    lab.behaviour["a"] = ValueError("?")
    task = lab.task(lambda self: a().ref, effects=[a])
    job = lab.run(task)
    lab.verdict = NotHappened("no such key")
    if late:
        lab.past_deadline()
    if gone:
        lab.make_gone()
    lab.reconcile()
    assert lab.operations(job)["1"] == ("not_happened" if late and gone else "unknown")
    assert lab.status(job) == ("queued" if late and (gone or keyed) else "unknown")
    lab.behaviour["a"] = None
    if lab.status(job) == "queued":
        lab.run(task, job=job)
        assert lab.status(job) == "succeeded"
        assert lab.calls == [("a", f"{job}:1")] * 2
        assert lab.safe.operation(f"{job}:1").attempt == 2
    else:
        lab.run(task, job=job)
        assert len(lab.calls) == 1


def test_a_key_alone_is_sent_again_while_it_is_retained_and_not_after(lab: Lab) -> None:
    a = lab.effect("a", idempotent_for=timedelta(hours=1))
    lab.behaviour["a"] = ValueError("?")
    task = lab.task(lambda self: a().ref, effects=[a])
    job, other = lab.run(task), lab.run(task)
    lab.reconcile()
    assert {lab.status(job), lab.status(other)} == {"unknown"}, "the first request may still be in flight"
    lab.past_deadline()
    # The guard against changing it is the trigger's; here the clock cannot be turned instead.
    lab.sql("ALTER TABLE operation DISABLE TRIGGER USER")
    lab.sql("UPDATE operation SET first_intent_at = first_intent_at - interval '2 h' WHERE job_id = %s", other)
    lab.sql("ALTER TABLE operation ENABLE TRIGGER USER")
    lab.reconcile()
    assert (lab.status(job), lab.status(other)) == ("queued", "unknown")
    lab.behaviour["a"] = None
    lab.run(task, job=job)
    lab.run(task, job=other)
    assert lab.status(job) == "succeeded"
    first, second = [key for _, key in lab.calls if key.startswith(job)]
    assert first == second
    assert len([key for _, key in lab.calls if key.startswith(other)]) == 1


@pytest.mark.parametrize("policy", ["park", "assume_happened", "send_again"])
def test_the_authors_policy_applies_after_the_deadline_and_is_recorded_as_such(lab: Lab, policy: str) -> None:
    a = lab.effect("a", if_unknown=policy)
    lab.behaviour["a"] = ValueError("?")
    task = lab.task(lambda self: a().ref, effects=[a])
    job = lab.run(task)
    lab.reconcile()
    assert lab.status(job) == "unknown", "not before the deadline"
    lab.past_deadline()
    results = lab.reconcile()
    assert results == {"park": {"parked": 1}}.get(policy, {f"policy_{policy}": 1})
    lab.behaviour["a"] = None
    lab.run(task, job=job)
    assert lab.status(job) == ("unknown" if policy == "park" else "succeeded")
    assert len(lab.calls) == (2 if policy == "send_again" else 1)
    reasons = {r["reason"] for r in lab.sql("SELECT reason FROM transitions WHERE job_id = %s", job)}
    assert (f"policy:{policy}" in {(r or "")[: len(f"policy:{policy}")] for r in reasons}) is (policy != "park")


def test_send_again_is_bounded_by_the_attempts(lab: Lab) -> None:
    a = lab.effect("a", if_unknown="send_again")
    lab.behaviour["a"] = ValueError("?")
    task = lab.task(lambda self: a().ref, effects=[a], max_attempts=3)
    job = lab.run(task)
    for _ in range(6):
        lab.past_deadline()
        lab.reconcile()
        lab.run(task, job=job)
    assert len(lab.calls) == 3
    assert lab.status(job) == "unknown"


def test_a_refusal_found_by_the_lookup_is_a_refusal(lab: Lab) -> None:
    a = lab.effect("a", lookup=True)
    lab.behaviour["a"] = ValueError("?")
    task = lab.task(lambda self: a().ref, effects=[a])
    job = lab.run(task)
    lab.verdict = Refused(Declined("no funds"))
    lab.reconcile()
    assert lab.operations(job) == {"1": "refused"}
    lab.run(task, job=job)
    assert (lab.status(job), len(lab.calls)) == ("failed", 1)
    assert "EffectRefused" in lab.row(job)["last_error"]


def test_a_verdict_belongs_to_the_attempt_that_was_asked_about(lab: Lab) -> None:
    """Asked about attempt 1; before the answer is written, attempt 2 was sent and is unknown: the answer is dropped."""
    a = lab.effect("a", lookup=True, idempotent_for=timedelta(hours=1))
    lab.behaviour["a"] = ValueError("?")
    task = lab.task(lambda self: a().ref, effects=[a])
    job = lab.run(task)
    lab.past_deadline()

    def asked(op: Any) -> Any:
        lab.verdict = NotHappened()
        lab.reconcile()
        lab.run(task, job=job)
        assert lab.safe.operation(f"{job}:1").attempt == 2
        lab.make_gone()
        lab.past_deadline()
        return NotHappened("about attempt 1")

    lab.verdict = asked
    lab.reconcile()
    assert lab.operations(job) == {"1": "unknown"}
    assert len(lab.calls) == 2


@pytest.mark.parametrize(
    ("verdict", "status", "ends"),
    [(Happened("seen"), "outcome_confirmed", "succeeded"), (NotHappened(), "not_happened", "succeeded"),
     (Refused("no"), "refused", "failed")],
)  # fmt: skip
def test_an_operators_word_is_recorded_with_actor_and_reason(lab: Lab, verdict: Any, status: str, ends: str) -> None:
    a = lab.effect("a")
    lab.behaviour["a"] = ValueError("?")
    task = lab.task(lambda self: a().ref, effects=[a])
    job = lab.run(task)
    for reason in ("", "  "):
        with pytest.raises(NotAllowed, match="reason"):
            lab.safe.resolve(f"{job}:1", verdict, actor="ops", reason=reason)
    row = lab.safe.resolve(f"{job}:1", verdict, actor="ops", reason="seen in the bank's list")
    assert (row.status, row.resolved_by) == (status, "operator:ops")
    with pytest.raises(NotAllowed):
        lab.safe.resolve(f"{job}:1", verdict, actor="ops", reason="twice")
    log = lab.safe.transitions(job)
    assert [(t.actor, t.reason) for t in log if t.to_status == status] == [("operator:ops", "seen in the bank's list")]
    lab.behaviour["a"] = None
    lab.run(task, job=job)
    assert lab.status(job) == ends


# -- late outcomes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resent", [False, True])
def test_a_late_outcome_confirms_its_own_operation_and_a_second_one_is_a_double_effect(lab: Lab, resent: bool) -> None:
    """The worker is fenced out during its call; the operator's word (or nobody) sends it again before it returns."""
    a = lab.effect("a")
    doubles: list[dict[str, Any]] = []
    receiver = lambda **kwargs: doubles.append(kwargs)  # noqa: E731
    signals.double_effect.connect(receiver)
    task = lab.task(lambda self: a().ref, effects=[a])
    job = str(uuid4())

    def slow(op: Any) -> Any:
        lab.sql("UPDATE job SET lease_until = clock_timestamp() - interval '1 s' WHERE id = %s", job)
        lab.safe.sweep()
        assert lab.operations(job) == {"1": "unknown"}
        if resent:
            lab.behaviour["a"] = None
            lab.safe.resolve(op.key, NotHappened(), actor="ops", reason="a wrong guess")
            lab.sql("UPDATE job SET run_after = NULL")
            other = threading.Thread(target=lab.run, args=(task,), kwargs={"job": job})
            other.start()
            other.join()
        return Outcome("late")

    lab.behaviour["a"] = slow
    lab.run(task, job=job)
    signals.double_effect.disconnect(receiver)
    operation = lab.safe.operation(f"{job}:1")
    assert operation.status == "outcome_confirmed"
    if resent:
        assert operation.provider_ref != "late", "evidence never overwrites"
        assert [d["operation_key"] for d in doubles] == [f"{job}:1"]
        assert lab.sql("SELECT value FROM counter WHERE name = 'double_effects'") == [{"value": 1}]
    else:
        assert operation.provider_ref == "late"
        assert doubles == []
        assert lab.status(job) == "queued"
        lab.run(task, job=job)
        assert lab.row(job)["result"] == "late"


# -- effects in the same database --------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["commits", "rolls back", "raises before", "raises after", "forgets"])
def test_confirm_commits_the_outcome_with_the_users_own_rows(lab: Lab, database_url: str, then: str) -> None:
    """Exactly once: the record and the row are both there, or neither is and the effect runs again."""
    lab.sql("CREATE TABLE public.books (entry text)")
    attempts: list[int] = []

    def write(op: Any) -> Any:
        attempts.append(op.attempt)
        good = len(attempts) > 1
        with psycopg.connect(database_url.replace("+psycopg", "")) as conn:
            conn.execute("INSERT INTO public.books VALUES ('entry')")
            if then == "raises before" and not good:
                raise ValueError("before the confirmation")
            op.confirm("entry-1", {"n": 1}, transaction=conn)
            if then in ("rolls back", "forgets") and not good:
                conn.rollback()
        if then == "rolls back" and not good:
            raise ValueError("rolled back")
        if then == "raises after":
            raise ValueError("after the commit")
        return "ignored"

    a = lab.effect("a", not_happened_on=ValueError)
    lab.behaviour["a"] = write
    task = lab.task(lambda self: a().result, effects=[a])
    job = lab.run(task)
    expected = 1 if then in ("commits", "raises after") else 2
    if expected == 2:
        assert lab.operations(job) == {"1": "not_happened"}
        assert lab.sql("SELECT * FROM public.books") == []
        lab.sql("UPDATE job SET run_after = NULL")
        lab.run(task, job=job)
    assert attempts == list(range(1, expected + 1))
    assert lab.sql("SELECT * FROM public.books") == [{"entry": "entry"}]
    assert (lab.row(job)["outcome_ref"], lab.row(job)["result"]) == ("entry-1", {"n": 1})


# -- whole body --------------------------------------------------------------------------------------------------------


def test_a_whole_body_is_one_operation_and_its_outcome_is_the_end(lab: Lab) -> None:
    seen = []

    def body(self: Any, x: int) -> Any:
        seen.append((self.job.operation.key, dict(self.job.operation.arguments), self.job.operation.remaining()))
        return {"x": x}

    job = lab.run(lab.task(body), 5)
    assert seen == [(f"{job}:body", {"x": 5}, float("inf"))]
    assert lab.operations(job) == {"body": "outcome_confirmed"}
    assert (lab.status(job), lab.row(job)["outcome_ref"], lab.row(job)["result"]) == (
        "succeeded",
        f"{job}:body",
        {"x": 5},
    )


@pytest.mark.parametrize("raised", [ValueError("?"), KeyboardInterrupt(), Ignore(), Reject("?")])
def test_an_exception_of_a_whole_body_parks_it(lab: Lab, raised: BaseException) -> None:
    def body(self: Any) -> Any:
        raise raised

    job = lab.run(lab.task(body))
    assert (lab.status(job), lab.operations(job)) == ("unknown", {"body": "unknown"})


def test_throws_of_a_whole_body_is_a_failure(lab: Lab) -> None:
    def body(self: Any) -> Any:
        raise Declined("no funds")

    job = lab.run(lab.task(body, throws=(Declined,)))
    assert (lab.status(job), lab.row(job)["last_error"]) == ("failed", "Declined: no funds")
    assert lab.operations(job) == {"body": "refused"}


def test_max_retries_ends_a_job_whose_effect_never_happens(lab: Lab) -> None:
    a = lab.effect("a", not_happened_on=ConnectionRefusedError)
    lab.behaviour["a"] = ConnectionRefusedError(111, "refused")
    task = lab.task(lambda self: a().ref, effects=[a], autoretry_for=(Exception,), max_retries=2, retry_backoff=False)
    job = lab.run(task)
    assert (lab.status(job), len(lab.calls)) == ("failed", 3)


@pytest.mark.parametrize("explicit", [False, True])
def test_retry_is_a_statement_and_autoretry_is_not(lab: Lab, explicit: bool) -> None:
    def body(self: Any) -> Any:
        if explicit and self.request.retries == 0:
            raise self.retry(countdown=0, exc=ValueError("again"))
        if not explicit:
            raise ValueError("?")
        return "done"

    task = lab.task(body, autoretry_for=(ValueError,), max_retries=3)
    job = lab.run(task)
    if explicit:
        # apply() runs the retry itself, at once.
        assert (lab.status(job), lab.row(job)["attempts"]) == ("succeeded", 2)
        assert [t.to_status for t in lab.safe.transitions(job) if t.operation_key][:2] == [
            "intent_recorded",
            "not_happened",
        ]
    else:
        assert (lab.status(job), lab.operations(job)) == ("unknown", {"body": "unknown"})


def test_a_lookup_ends_a_parked_whole_body(lab: Lab) -> None:
    def body(self: Any) -> Any:
        raise ValueError("?")

    task = lab.task(body, effect_options={"lookup": lambda op: Happened("found", {"n": 1})})
    job = lab.run(task)
    lab.reconcile()
    row = lab.row(job)
    assert (row["status"], row["outcome_ref"], row["result"]) == ("succeeded", "found", {"n": 1})


# -- cancellation ------------------------------------------------------------------------------------------------------


def test_no_effect_starts_after_the_cancel_committed(lab: Lab) -> None:
    a, b = lab.effect("a"), lab.effect("b")

    def body(self: Any) -> Any:
        a()
        lab.safe.cancel(self.job.id, "the customer left")
        return b().ref

    job = lab.run(lab.task(body, effects=[a, b]))
    row = lab.row(job)
    assert (row["status"], row["reason"]) == ("cancelled", "the customer left")
    assert lab.operations(job) == {"1": "outcome_confirmed"}
    assert [name for name, _ in lab.calls] == ["a"]


def test_a_cancelled_job_with_an_open_question_parks_with_its_end(lab: Lab) -> None:
    a = lab.effect("a")

    def cancelled(op: Any) -> Any:
        lab.safe.cancel(op.job_id, "the customer left")
        raise ValueError("?")

    lab.behaviour["a"] = cancelled
    job = lab.run(lab.task(lambda self: a().ref, effects=[a]))
    assert lab.status(job) == "unknown"
    lab.safe.resolve(f"{job}:1", Happened("seen"), actor="ops", reason="seen")
    row = lab.row(job)
    assert (row["status"], row["reason"]) == ("cancelled", "the customer left")
    assert lab.operations(job) == {"1": "outcome_confirmed"}


# -- run at once -------------------------------------------------------------------------------------------------------


def test_always_eager_keeps_idempotency_keys(lab: Lab) -> None:
    a = lab.effect("a")
    task = lab.task(lambda self, n: a(n).ref, effects=[a])
    lab.app.conf.task_always_eager = True
    first = task.apply_async((1,), idempotency_key="k", tenant="acme")
    again = task.apply_async((1,), idempotency_key="k", tenant="acme")
    assert (again.id, again.get(), again.state) == (first.id, first.get(), "SUCCESS")
    with pytest.raises(IdempotencyConflict):
        task.apply_async((2,), idempotency_key="k", tenant="acme")
    with pytest.raises(ConfigurationError, match="transaction="):
        task.apply_async((1,), transaction=object())
    assert len(lab.calls) == 1
    assert (lab.row(first.id)["idempotency_key"], lab.row(first.id)["tenant"]) == ("k", "acme")


@pytest.mark.parametrize("co_operates", [False, True])
def test_a_users_own_call_runs_inside_the_job(lab: Lab, co_operates: bool) -> None:
    """The documented pattern of other frameworks: ``__call__`` that wraps ``run`` in a context, with super() or not."""
    a = lab.effect("a")
    inside: list[str] = []

    class Wrapped(SafeTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            inside.append(self.job.id)
            return super().__call__(*args, **kwargs) if co_operates else self.run(*args, **kwargs)

    def body(self: Any) -> Any:
        return a().ref

    task = lab.app.task(base=Wrapped, bind=True, shared=False, name=next(names), effects=[a])(body)
    job = lab.run(task)
    assert inside == [job]
    assert (lab.status(job), len(lab.calls)) == ("succeeded", 1)


@pytest.mark.parametrize("whole", [False, True])
def test_an_outcome_that_a_body_returns_counts_by_its_result(lab: Lab, whole: bool) -> None:
    a = lab.effect("a")
    task = lab.task(lambda self: Outcome("r", {"n": 1})) if whole else lab.task(lambda self: a(1), effects=[a])
    job = str(uuid4())
    result = task.apply((), task_id=job)
    assert result.get() == lab.row(job)["result"] == ({"n": 1} if whole else [1])
    assert lab.row(job)["outcome_ref"] == ("r" if whole else "a-1")


def test_a_body_that_ends_its_process_does_not_do_so_for_ever(lab: Lab) -> None:
    task = lab.task(lambda self: sys.exit(3), effects=[], max_attempts=2)
    job = str(uuid4())
    for _ in range(2):
        with pytest.raises(SystemExit):
            lab.run(task, job=job)
        lab.sql("UPDATE job SET run_after = NULL WHERE status = 'queued'")
    assert (lab.status(job), lab.row(job)["attempts"]) == ("failed", 2)


# -- telling Celery ----------------------------------------------------------------------------------------------------


def test_a_job_whose_runs_are_over_says_how_and_its_end_is_due_at_once(lab: Lab) -> None:
    def body(self: Any) -> Any:
        lab.crash(self)

    task = lab.task(body, effects=[], max_attempts=2)
    job = lab.run(task)
    lab.run(task, job=job)
    row = lab.row(job)
    assert (row["status"], row["reason"]) == ("failed", "max_attempts")
    assert "failed after 2 attempts; the last one ended by: lease_expired" in row["last_error"]
    # The very sweep that ended it also delivered the end.
    assert lab.sql("SELECT run_after, publishes FROM job") == [{"run_after": None, "publishes": 1}]


def test_a_worker_whose_job_was_ended_by_the_sweep_tells_celery_nothing(lab: Lab) -> None:
    """Nothing but a job that succeeded ever reads SUCCESS, also where the worker itself believes that it did."""

    def body(self: Any) -> Any:
        with contextlib.suppress(SystemExit):
            lab.crash(self)
        return "done"

    task = lab.task(body, effects=[], max_attempts=1)
    job = str(uuid4())
    result = task.apply((), task_id=job)
    assert (lab.status(job), lab.row(job)["reason"]) == ("failed", "max_attempts")
    assert result.state == "FAILURE", "what the row says, to the caller of apply() too"


def test_an_end_is_told_by_one_delivery_at_a_time(lab: Lab) -> None:
    job = lab.run(lab.task(lambda self: 1, effects=[]))
    lab.safe.flush()
    lab.sql("UPDATE job SET settled_at = NULL, next_publish_at = clock_timestamp()")
    told = [lab.safe.store.rows("TELL", id=job, fence=1) for _ in range(2)]
    assert [len(rows) for rows in told] == [1, 0]


# -- signals -----------------------------------------------------------------------------------------------------------


def test_every_transition_is_announced_as_it_is_logged(lab: Lab) -> None:
    told: list[Any] = []
    receiver = lambda sender, row, **_: told.append((sender, row))  # noqa: E731
    signals.job_transition.connect(receiver)
    signals.operation_transition.connect(receiver)
    a = lab.effect("a")
    task = lab.task(lambda self: a().ref, effects=[a])
    job = lab.run(task)
    signals.job_transition.disconnect(receiver)
    signals.operation_transition.disconnect(receiver)
    assert sorted((row for _, row in told), key=lambda r: r.id) == lab.safe.transitions(job)
    assert {sender for sender, _ in told} == {task.name}


def test_a_receiver_that_raises_disturbs_nothing(lab: Lab) -> None:
    def receiver(**_: Any) -> None:
        raise RuntimeError

    signals.job_transition.connect(receiver)
    job = lab.run(lab.task(lambda self: 1, effects=[]))
    signals.job_transition.disconnect(receiver)
    assert lab.status(job) == "succeeded"


# -- a refused step, again ---------------------------------------------------------------------------------------------


def test_a_refused_step_is_sent_again_under_a_new_key_when_an_operator_says_so(lab: Lab) -> None:
    """Every other step keeps its key and its outcome; the new one is replayed like any."""
    a, b = lab.effect("a"), lab.effect("b", refused_on=(Declined,))
    stops: list[str] = []

    def body(self: Any) -> Any:
        a()
        ref = b(7).ref
        if stops:
            lab.crash(self)
        return ref

    task = lab.task(body, effects=[a, b])
    lab.behaviour["b"] = Declined("no money")
    job = lab.run(task)
    assert (lab.status(job), lab.calls) == ("failed", [("a", f"{job}:1"), ("b", f"{job}:2")])
    lab.behaviour.clear()

    lab.safe.retry(job, "tried once more")
    lab.run(task, job=job)
    assert (lab.status(job), len(lab.calls)) == ("failed", 2), "refused stays refused"

    for number in (2, 3):
        if number == 3:
            lab.behaviour.clear()
        else:
            lab.behaviour["b"] = Declined("no money still")
        lab.safe.retry(job, "another card", new_keys=["2"])
        stops[:] = ["once"] if number == 3 else []
        lab.run(task, job=job)
        assert lab.calls[-1] == ("b", f"{job}:2#{number}")
    stops.clear()
    lab.run(task, job=job)
    assert lab.status(job) == "succeeded"
    assert [call for call in lab.calls if call[0] == "a"] == [("a", f"{job}:1")]
    assert len(lab.calls) == 4, "the crash in between sent nothing again"
    rows = lab.sql("SELECT key, status FROM operations WHERE job_id = %s ORDER BY first_intent_at", job)
    assert [(row["key"].removeprefix(f"{job}:"), row["status"]) for row in rows] == [
        ("1", "outcome_confirmed"), ("2", "refused"), ("2#2", "refused"), ("2#3", "outcome_confirmed"),
    ]  # fmt: skip
    (last,) = lab.sql("SELECT provider_ref FROM operations WHERE key = %s", f"{job}:2#3")
    assert lab.row(job)["outcome_ref"] == last["provider_ref"]


@pytest.mark.parametrize("step", ["1", "3", "shared", "body"])
def test_what_gets_no_new_key(lab: Lab, step: str) -> None:
    """A step that happened, that is not there, that other jobs share, and a whole body."""
    a, b = lab.effect("a"), lab.effect("b", refused_on=(Declined,))
    lab.behaviour["b"] = Declined("no")

    def body(self: Any) -> Any:
        a()
        b.keyed("shared")()

    task = lab.task(body, effects=[a, b])
    if step == "body":

        def fails(self: Any) -> Any:
            raise Declined("no")

        task = lab.task(fails, throws=(Declined,))
    job = lab.run(task)
    assert lab.status(job) == "failed"
    with pytest.raises(NotAllowed, match="nothing was changed"):
        lab.safe.retry(job, "again", new_keys=[step])
    assert lab.status(job) == "failed"
    with pytest.raises(NotFound):
        lab.safe.retry("nobody", "again", new_keys=[step])


def test_threads_that_come_first_at_once_share_one_pool_of_connections(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pools would be more connections than the setting allows, and those of one would never be closed."""
    from celery_safe_effects import app as module

    made: list[Any] = []

    def slowly(*args: Any, **options: Any) -> Any:
        time.sleep(0.1)
        made.append(original(*args, **options))
        return made[-1]

    original: Any = vars(module)["Store"]
    monkeypatch.setattr(module, "Store", slowly)
    assert lab.safe._store is None
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: id(lab.safe.store), range(4)))
    assert (len(found), len(made)) == (1, 1)


def test_a_connection_that_comes_back_to_a_closed_pool_is_closed(lab: Lab) -> None:
    connections = lab.safe.store.connections
    seen: list[bool] = []
    with connections.connection() as borrowed:
        connections.close()
        seen.append(borrowed.closed)
    seen.append(borrowed.closed)
    assert seen == [False, True]
    with connections.connection() as fresh:
        assert fresh is not borrowed


def test_a_transport_that_errs_oddly_is_one_that_cannot_be_asked(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no reason to look after no other queue: the sweep goes on, by the time alone."""

    def odd(channel: Any, queue: str) -> int:
        raise LookupError("no such thing")

    monkeypatch.setattr("celery_safe_effects.glue.publish._messages", odd)
    assert lab.safe.publisher.ask("celery").messages is None
