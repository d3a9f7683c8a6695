"""``async def`` bodies, effects and lookups, run in this process on real PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from celery import Celery, chord, current_task, group
from celery.exceptions import SoftTimeLimitExceeded
from pydantic import BaseModel
from sqlalchemy import pool, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from celery_safe_effects import (
    EffectRefused,
    Happened,
    NoActiveJob,
    Outcome,
    OutcomeUnknown,
    SafeEffects,
    SafeTask,
    StepNameRequired,
    effect,
    native,
)
from celery_safe_effects.engine import loop
from celery_safe_effects.engine.republish import Depth
from celery_safe_effects.errors import ConfigurationError
from celery_safe_effects.testing import eventually
from tests.support.lab import Declined, Lab, names

structured = pytest.mark.skipif(sys.version_info < (3, 11), reason="TaskGroup and timeout came with Python 3.11")
structured_group: Any = getattr(asyncio, "TaskGroup", None)
structured_timeout: Any = getattr(asyncio, "timeout", None)


@contextlib.contextmanager
def limit(exc: type[BaseException] = SoftTimeLimitExceeded) -> Iterator[None]:
    """Raise in the main thread soon after `near_the_limit`, as Celery's soft limit does."""

    def strike(signum: int, frame: Any) -> None:
        raise exc

    before = signal.signal(signal.SIGALRM, strike)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def near_the_limit() -> None:
    """The limit of `limit` strikes in a moment."""
    signal.setitimer(signal.ITIMER_REAL, 0.3)


async def long(op: Any = None) -> None:
    """Take longer than the limit allows."""
    near_the_limit()
    await asyncio.sleep(30)


@contextlib.contextmanager
def slow(lab: Lab, monkeypatch: pytest.MonkeyPatch, statement: str, seconds: float) -> Iterator[threading.Event]:
    """Let a statement take its time; the event says that one is under way."""
    send = lab.safe.store.send
    begun = threading.Event()

    def slowly(name: str, params: Any, sending: Any = None) -> Any:
        if name.startswith(statement):
            begun.set()
            time.sleep(seconds)
        return send(name, params, sending)

    with monkeypatch.context() as patch:
        patch.setattr(lab.safe.store, "send", slowly)
        yield begun


# -- calls and replay --------------------------------------------------------------------------------------------------


def test_an_async_body_calls_and_replays(lab: Lab) -> None:
    a, b, c = (lab.async_effect(name, lookup=True) for name in "abc")
    seen = []

    async def body(self: Any) -> Any:
        first = await a(1)
        await asyncio.sleep(0)
        second = await b(first.ref)
        await self.job.acheckpoint()
        seen.append((first.replayed, second.replayed, second.result))
        if self.job.attempt == 1:
            lab.crash(self)
        return (await c(second.ref)).ref

    task = lab.task(body, effects=[a, b, c])
    job = lab.run(task)
    assert lab.status(job) == "queued"
    lab.run(task, job=job)
    assert (lab.row(job)["outcome_ref"], lab.row(job)["result"]) == ("c-3", "c-3")
    assert lab.calls == [("a", f"{job}:1"), ("b", f"{job}:2"), ("c", f"{job}:3")]
    assert seen == [(False, False, ["a-1"]), (True, True, ["a-1"])]


def test_a_synchronous_effect_is_a_function_in_a_coroutine_too(lab: Lab) -> None:
    """Called, it blocks the loop like any function; in ``to_thread`` it does not."""
    a = lab.effect("a")
    threads = []

    def call(op: Any, n: int) -> Any:
        threads.append(threading.current_thread().name)
        return Outcome(f"ref-{n}")

    lab.behaviour["a"] = call

    async def body(self: Any) -> Any:
        return [a(1).ref, (await asyncio.to_thread(a, 2)).ref, (await asyncio.to_thread(a.step("x"), 3)).ref]

    job = lab.run(lab.task(body, effects=[a]))
    assert lab.row(job)["result"] == ["ref-1", "ref-2", "ref-3"]
    assert [key for _, key in lab.calls] == [f"{job}:1", f"{job}:2", f"{job}:x"]
    assert [name == "safe-effects-loop" for name in threads] == [True, False, False]


def test_an_async_effect_in_synchronous_code_returns_its_outcome(lab: Lab) -> None:
    """... except in an event loop of the body's own, where it is awaited as everywhere."""
    a = lab.async_effect("a")

    def body(self: Any) -> Any:
        async def own() -> Any:
            one, two = await asyncio.gather(a.step("x")(2), a.step("y")(3))
            return [one.result, two.result]

        return [a(1).result, *asyncio.run(own()), a.step("z")(4).result]

    job = lab.run(lab.task(body, effects=[a]))
    assert lab.row(job)["result"] == [[1], [2], [3], [4]]
    assert set(lab.operations(job)) == {"1", "x", "y", "z"}


def test_a_repeatable_async_effect_answers_the_same_on_replay(lab: Lab) -> None:
    ask = lab.async_effect("ask", repeatable=True)
    answers = iter(["first", "second"])
    lab.behaviour["ask"] = lambda op: next(answers)
    told = []

    async def body(self: Any) -> Any:
        told.append((await ask()).result)
        if self.job.attempt == 1:
            lab.crash(self)

    task = lab.task(body, effects=[ask])
    job = lab.run(task)
    lab.run(task, job=job)
    assert told == ["first", "first"]
    assert lab.status(job) == "succeeded"


def test_a_function_that_makes_a_coroutine_is_waited_for(lab: Lab) -> None:
    """Decorated in a way that hides its ``async def``: without this its coroutine would be taken for the result."""
    a = lab.effect("a")

    async def later(op: Any) -> Any:
        await asyncio.sleep(0)
        return Outcome("late")

    lab.behaviour["a"] = later
    job = lab.run(lab.task(lambda self: a().ref, effects=[a]))
    assert lab.row(job)["result"] == "late"

    async def made() -> str:
        return "made"

    job = lab.run(lab.task(lambda self: made(), effects=[]))
    assert lab.row(job)["result"] == "made"


# -- what a coroutine sees of Celery and of its context ----------------------------------------------------------------

number: contextvars.ContextVar[int] = contextvars.ContextVar("number", default=0)


def test_request_task_job_and_context_are_found_wherever_the_body_is(lab: Lab) -> None:
    def here(self: Any) -> Any:
        return [self.request.id, current_task.name, self.job.id, number.get()]

    async def body(self: Any) -> Any:
        async def child() -> Any:
            await asyncio.sleep(0)
            return here(self)

        number.set(number.get() + 1)
        both = await asyncio.gather(child(), child())
        return [here(self), await asyncio.to_thread(here, self), *both]

    task = lab.task(body, effects=[])
    number.set(6)
    job = lab.run(task)
    assert lab.row(job)["result"] == [[job, task.name, job, 7]] * 4
    assert number.get() == 6


def test_two_bodies_at_once_see_their_own(lab: Lab) -> None:
    """In the thread pool: one loop, several jobs."""
    met = [asyncio.Event(), asyncio.Event()]

    async def body(self: Any, n: int) -> Any:
        met[n].set()
        await asyncio.wait_for(met[1 - n].wait(), 10)
        return [self.request.id, self.job.id]

    task = lab.task(body, effects=[])
    jobs = [str(uuid4()), str(uuid4())]
    threads = [threading.Thread(target=task.apply, args=((n,),), kwargs={"task_id": jobs[n]}) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for job in jobs:
        assert lab.row(job)["result"] == [job, job]


def test_class_based_and_registered_tasks_and_autoretry(lab: Lab) -> None:
    a = lab.async_effect("a", not_happened_on=ConnectionRefusedError)
    tries = iter([ConnectionRefusedError(111, "refused"), None])

    async def once(op: Any) -> Any:
        exc = next(tries)
        if exc is not None:
            raise exc
        return Outcome("charged")

    lab.behaviour["a"] = once

    class Bill(SafeTask):
        name = next(names)
        effects = (a,)
        autoretry_for = (ConnectionRefusedError,)
        default_retry_delay = 0

        async def run(self, customer: str) -> Any:
            return [customer, self.request.retries, (await a()).ref]

    task = lab.app.register_task(Bill())
    job = lab.run(task, "c")
    assert lab.row(job)["result"] == ["c", 1, "charged"]
    assert [t.reason for t in lab.safe.transitions(job) if t.to_status == "queued"][1:] == [
        "retry: ConnectionRefusedError: [Errno 111] refused"
    ]


@pytest.mark.parametrize("explicit", [False, True])
def test_retry_and_autoretry_of_an_async_body(lab: Lab, explicit: bool) -> None:
    async def body(self: Any) -> Any:
        await asyncio.sleep(0)
        if self.request.retries == 0:
            if explicit:
                raise self.retry(countdown=0)
            raise ValueError("again")
        return "done"

    task = lab.task(body, effects=[], autoretry_for=(ValueError,), default_retry_delay=0)
    job = lab.run(task)
    assert (lab.status(job), lab.row(job)["attempts"]) == ("succeeded", 2)


@pytest.mark.parametrize("explicit", [False, True])
def test_in_a_whole_body_retry_is_a_statement_and_autoretry_is_not(lab: Lab, explicit: bool) -> None:
    async def body(self: Any) -> Any:
        if explicit and self.request.retries == 0:
            raise self.retry(countdown=0)
        if not explicit:
            raise ValueError("?")
        return self.job.operation.key

    job = lab.run(lab.task(body, autoretry_for=(ValueError,)))
    if explicit:
        assert (lab.status(job), lab.row(job)["result"]) == ("succeeded", f"{job}:body")
    else:
        assert (lab.status(job), lab.operations(job)) == ("unknown", {"body": "unknown"})


class Order(BaseModel):
    number: int


@pytest.mark.parametrize("whole", [False, True])
def test_pydantic_models_go_in_and_out(lab: Lab, whole: bool) -> None:
    async def body(self: Any, order: Order) -> Order:
        assert isinstance(order, Order)
        await asyncio.sleep(0)
        return Order(number=order.number + 1)

    body.__annotations__ |= {"order": Order, "return": Order}  # Celery 5.5 does not look up what is written as text
    options: dict[str, Any] = {} if whole else {"effects": []}
    job = lab.run(lab.task(body, pydantic=True, **options), {"number": 1})
    assert lab.row(job)["result"] == {"number": 2}


def test_called_as_a_function_it_is_a_coroutine(lab: Lab) -> None:
    async def body(self: Any, n: int) -> int:
        return n + 1

    task = lab.task(body, effects=[])
    assert asyncio.run(task(1)) == 2
    assert asyncio.run(task.run(1)) == 2

    async def outer(self: Any) -> int:
        return int(await task(1))

    job = lab.run(lab.task(outer, effects=[]))
    assert lab.row(job)["result"] == 2


# -- in parallel -------------------------------------------------------------------------------------------------------


def test_named_steps_overlap_and_unnamed_ones_need_a_name(lab: Lab) -> None:
    a = lab.async_effect("a")
    together = threading.Barrier(3)

    async def wait(op: Any, n: int) -> Any:
        await asyncio.to_thread(together.wait, 10)
        return Outcome(f"ref-{n}")

    lab.behaviour["a"] = wait

    async def body(self: Any) -> Any:
        done = await asyncio.gather(*(a.step(f"tool-{n}")(n) for n in range(3)))
        first = asyncio.create_task(a.step("long")(9))
        await asyncio.sleep(0)
        with pytest.raises(StepNameRequired):
            await a(10)
        await asyncio.gather(a.step("other")(8), a.step("third")(7), first)
        return [outcome.ref for outcome in done]

    job = lab.run(lab.task(body, effects=[a]))
    assert lab.row(job)["result"] == ["ref-0", "ref-1", "ref-2"]
    assert len(lab.calls) == 6


@structured
def test_an_unknown_in_a_task_group_parks_though_it_comes_in_a_group(lab: Lab) -> None:
    a, b = lab.async_effect("a"), lab.async_effect("b")
    begun = asyncio.Event()

    async def slowly(op: Any) -> None:
        begun.set()
        await asyncio.sleep(30)

    lab.behaviour |= {"a": ValueError("?"), "b": slowly}

    async def body(self: Any) -> Any:
        with contextlib.suppress(BaseException):
            async with structured_group() as group:
                group.create_task(b.step("slow")())
                await begun.wait()
                group.create_task(a.step("bad")())
        with contextlib.suppress(OutcomeUnknown):
            await b.step("later")()
        return "swallowed"

    job = lab.run(lab.task(body, effects=[a, b]))
    assert lab.status(job) == "unknown"
    # The sibling was cancelled in the middle of its call: what became of it, nobody knows.
    assert lab.operations(job) == {"slow": "unknown", "bad": "unknown"}


@structured
def test_a_timeout_around_an_effect_is_unknown(lab: Lab) -> None:
    a, fallback = lab.async_effect("a"), lab.async_effect("fallback")
    lab.behaviour["a"] = lambda op: asyncio.sleep(30)

    async def body(self: Any) -> Any:
        try:
            async with structured_timeout(1):
                await a()
        except TimeoutError:
            return (await fallback()).ref

    job = lab.run(lab.task(body, effects=[a, fallback]))
    assert (lab.status(job), lab.operations(job)) == ("unknown", {"1": "unknown"})
    assert "CancelledError" in lab.safe.operation(f"{job}:1").error["text"]
    assert [name for name, _ in lab.calls] == ["a"]


@structured
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_call_that_was_cancelled_before_it_began_did_not_happen(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """The body may end so; but it does not go on to something else, since a replay would make the call."""
    a, fallback = lab.async_effect("a"), lab.async_effect("fallback")

    async def body(self: Any) -> Any:
        if self.job.attempt > 1:
            return (await a()).ref
        try:
            async with structured_timeout(0.2):
                await a()
        except TimeoutError:
            with contextlib.suppress(BaseException):
                return (await fallback()).ref if goes_on else "given up"

    task = lab.task(body, effects=[a, fallback])
    with slow(lab, monkeypatch, "INTENT", 1.5):
        job = lab.run(task)
    assert lab.calls == []
    assert lab.operations(job) == {"1": "not_happened"}
    if goes_on:
        assert (lab.status(job), lab.row(job)["reason"]) == ("queued", "cancelled_call")
        lab.sql("UPDATE job SET run_after = NULL")
        lab.run(task, job=job)
        assert lab.row(job)["result"] == "a-1"
    else:
        assert (lab.status(job), lab.row(job)["result"]) == ("succeeded", "given up")


@pytest.mark.parametrize("statement", ["INTENT", "OUTCOME"])
def test_a_cancellation_waits_for_the_statement_that_is_under_way(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    a = lab.async_effect("a")

    async def body(self: Any) -> Any:
        calling = asyncio.create_task(a())
        await asyncio.to_thread(begun.wait, 10)
        for _ in range(3):
            calling.cancel()
            await asyncio.sleep(0.05)
        with contextlib.suppress(asyncio.CancelledError):
            await calling
        return [calling.cancelled(), len(lab.calls)]

    with slow(lab, monkeypatch, statement, 1) as begun:
        job = lab.run(lab.task(body, effects=[a]))
    assert lab.row(job)["result"] == [True, int(statement == "OUTCOME")]
    assert lab.operations(job) == {"1": "not_happened" if statement == "INTENT" else "outcome_confirmed"}


def test_statements_do_not_block_the_loop(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    a = lab.async_effect("a")
    gaps: list[float] = []

    async def body(self: Any) -> Any:
        async def tick() -> None:
            last = time.monotonic()
            while True:
                await asyncio.sleep(0.01)
                now = time.monotonic()
                gaps.append(now - last)
                last = now

        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0.05)
        await a()
        await self.job.acheckpoint()
        ticking.cancel()

    with slow(lab, monkeypatch, "", 0.8):
        job = lab.run(lab.task(body, effects=[a]))
    assert lab.status(job) == "succeeded"
    assert len(gaps) > 30, "three statements of 0.8 s each"
    assert max(gaps) < 0.7


def test_calls_in_flight_when_the_body_fails_are_waited_for(lab: Lab) -> None:
    """``gather`` leaves its other coroutines behind: what they do is known in the end, and not parked."""
    a, b = lab.async_effect("a", refused_on=Declined), lab.async_effect("b")
    lab.behaviour["a"] = Declined("no")
    later: list[BaseException] = []

    async def slowly(op: Any) -> Any:
        await asyncio.sleep(1)
        return Outcome("done")

    lab.behaviour["b"] = slowly

    async def body(self: Any) -> Any:
        async def two() -> None:
            await b.step("b")()
            try:
                await b.step("too late")()
            except NoActiveJob as exc:
                later.append(exc)

        await asyncio.gather(two(), a.step("a")())

    job = lab.run(lab.task(body, effects=[a, b]))
    assert (lab.status(job), lab.row(job)["reason"]) == ("failed", "error")
    assert "EffectRefused" in lab.row(job)["last_error"]
    assert lab.operations(job) == {"b": "outcome_confirmed", "a": "refused"}
    assert eventually(lambda: later, 5), "what the body left behind starts no effect"


# -- messages ----------------------------------------------------------------------------------------------------------


def test_messages_of_a_coroutine_keep_their_ids_however_often_it_runs(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The transport in memory may not be used by several threads; who sweeps would ask it for the depth of a queue.
    monkeypatch.setattr(lab.safe.publisher, "ask", lambda queue: Depth(None))
    child = lab.task(lambda self, *args: None, effects=[])
    send_task = lab.safe.publisher.send_task

    def in_another_order(send: Any, name: str, args: Any, kwargs: Any, options: Any) -> Any:
        """The threads that send are as fast as they happen to be."""
        time.sleep(0.3 if args == (attempts[-1],) else 0)
        return send_task(send, name, args, kwargs, options)

    monkeypatch.setattr(lab.safe.publisher, "send_task", in_another_order)
    attempts: list[int] = []

    async def body(self: Any) -> Any:
        attempts.append(self.job.attempt + 1)
        child.delay(1)
        await asyncio.gather(child.adelay(2), child.aapply_async((3,)), lab.safe.aapply_async(child.s(4)))
        await asyncio.gather(
            lab.safe.aapply_async(chord([child.s(5), child.s(6)], child.s(7))),
            lab.safe.aapply_async(group(child.s(8), child.s(9))),
            lab.safe.aenqueue_many([child.s(10), child.s(11)]),
        )
        if self.job.attempt < 3:
            lab.crash(self)
        return "done"

    task = lab.task(body, effects=[])
    job = lab.run(task)
    first = {r["id"] for r in lab.sql("SELECT id FROM jobs WHERE id <> %s", job)}
    assert len(first) == 1 + 3 + 2 + 2 + 2
    for _ in range(2):
        lab.run(task, job=job)
    assert {r["id"] for r in lab.sql("SELECT id FROM jobs WHERE id <> %s", job)} == first
    assert lab.status(job) == "succeeded"
    assert {r["parent_id"] for r in lab.sql("SELECT parent_id FROM jobs WHERE id = ANY (%s)", list(first))} == {job}


@pytest.mark.parametrize("named", [False, True])
def test_messages_that_may_change_places_have_a_key(lab: Lab, named: bool) -> None:
    """Without one it is said, and nothing is sent twice."""
    child = lab.task(lambda self, *args: None, effects=[])

    async def body(self: Any) -> Any:
        order = [1, 2, 3] if self.job.attempt == 1 else [3, 1, 2]
        for n in order:
            key = {"idempotency_key": f"child-{n}"} if named else {}
            await child.aapply_async((n,), **key)
        if self.job.attempt == 1:
            lab.crash(self)

    task = lab.task(body, effects=[])
    job = lab.run(task)
    lab.run(task, job=job)
    assert (lab.status(job), lab.row(job)["reason"]) == (
        ("succeeded", None) if named else ("unknown", "replay_mismatch")
    )
    assert len(lab.sql("SELECT id FROM jobs WHERE id <> %s", job)) == 3


# -- effects in the same database --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["session", "psycopg", "synchronous"])
@pytest.mark.parametrize("then", ["commits", "rolls back"])
def test_aconfirm_commits_the_outcome_with_the_users_own_rows(
    lab: Lab, database_url: str, kind: str, then: str
) -> None:
    lab.sql("CREATE TABLE public.books (entry text)")
    a = lab.async_effect("a", not_happened_on=ValueError)
    dsn = database_url.replace("+psycopg", "")
    attempts: list[int] = []

    async def write(op: Any) -> Any:
        attempts.append(op.attempt)
        good = then == "commits" or len(attempts) > 1
        insert = "INSERT INTO public.books VALUES ('entry')"
        if kind == "session":
            engine = create_async_engine(database_url, poolclass=pool.NullPool)
            async with AsyncSession(engine) as session:
                await session.execute(text(insert))
                with pytest.raises(ConfigurationError, match="aconfirm"):
                    op.confirm("entry-1", transaction=session)
                await op.aconfirm("entry-1", {"n": 1}, transaction=session)
                await (session.commit() if good else session.rollback())
            await engine.dispose()
        elif kind == "psycopg":
            async with await psycopg.AsyncConnection.connect(dsn) as connection:
                await connection.execute(insert)
                await op.aconfirm("entry-1", {"n": 1}, transaction=connection)
                await (connection.commit() if good else connection.rollback())
        else:
            with psycopg.connect(dsn) as sync:
                sync.execute(insert)
                await op.aconfirm("entry-1", {"n": 1}, transaction=sync)
                (sync.commit if good else sync.rollback)()
        if not good:
            raise ValueError("rolled back")
        return "ignored"

    lab.behaviour["a"] = write

    async def body(self: Any) -> Any:
        return (await a()).result

    task = lab.task(body, effects=[a])
    job = lab.run(task)
    if then != "commits":
        assert lab.operations(job) == {"1": "not_happened"}
        assert lab.sql("SELECT * FROM public.books") == []
        lab.sql("UPDATE job SET run_after = NULL")
        lab.run(task, job=job)
    assert lab.sql("SELECT * FROM public.books") == [{"entry": "entry"}]
    assert (lab.row(job)["outcome_ref"], lab.row(job)["result"]) == ("entry-1", {"n": 1})


# -- interrupted -------------------------------------------------------------------------------------------------------


def test_a_soft_limit_in_an_effect_parks(lab: Lab) -> None:
    a, b = lab.async_effect("a"), lab.async_effect("b")
    lab.behaviour["a"] = long

    async def body(self: Any) -> Any:
        try:
            await a()
        finally:
            with contextlib.suppress(OutcomeUnknown):
                await b()

    started = time.monotonic()
    with limit():
        job = lab.run(lab.task(body, effects=[a, b]))
    assert time.monotonic() - started < 20
    assert (lab.status(job), lab.operations(job)) == ("unknown", {"1": "unknown"})
    assert [name for name, _ in lab.calls] == ["a"]


def test_a_soft_limit_cancels_the_calls_that_the_body_left_behind(lab: Lab) -> None:
    a = lab.async_effect("a")
    lab.behaviour["a"] = long
    left: list[Any] = []

    async def body(self: Any) -> Any:
        left.append(asyncio.create_task(a.step("left")()))
        await asyncio.sleep(30)

    started = time.monotonic()
    with limit():
        job = lab.run(lab.task(body, effects=[a]))
    assert time.monotonic() - started < loop.GRACE
    assert (lab.status(job), lab.operations(job)) == ("unknown", {"left": "unknown"})
    assert "CancelledError" in lab.safe.operation(f"{job}:left").error["text"]


def test_a_call_whose_body_has_ended_is_not_made(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its intent was on the way when the body returned."""
    a = lab.async_effect("a")
    left: list[Any] = []

    async def body(self: Any) -> Any:
        left.append(asyncio.create_task(a.step("left")()))
        await asyncio.to_thread(begun.wait, 10)
        return "done"

    with slow(lab, monkeypatch, "INTENT", 0.5) as begun:
        job = lab.run(lab.task(body, effects=[a]))
    assert (lab.status(job), lab.row(job)["result"]) == ("succeeded", "done")
    assert (lab.calls, lab.operations(job)) == ([], {"left": "not_happened"})
    assert eventually(left[0].done, 5)
    assert isinstance(left[0].exception(), NoActiveJob)


@pytest.mark.parametrize("handled", [False, True])
def test_a_soft_limit_between_effects_is_the_bodys_end_unless_it_returns(lab: Lab, handled: bool) -> None:
    a = lab.async_effect("a")

    async def body(self: Any) -> Any:
        await a()
        try:
            await long()
        except asyncio.CancelledError:
            if not handled:
                raise
            return (await a()).ref

    with limit():
        job = lab.run(lab.task(body, effects=[a]))
    row = lab.row(job)
    if handled:
        assert (row["status"], row["result"]) == ("succeeded", "a-2")
    else:
        assert (row["status"], row["last_error"]) == ("failed", "SoftTimeLimitExceeded: SoftTimeLimitExceeded()")


def test_a_shutdown_puts_the_job_back(lab: Lab) -> None:
    async def body(self: Any) -> Any:
        with contextlib.suppress(asyncio.CancelledError):
            await long()
        return "handled"

    task = lab.task(body, effects=[])
    job = str(uuid4())
    with limit(KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        lab.run(task, job=job)
    assert (lab.status(job), lab.row(job)["reason"]) == ("queued", "stopped")


def test_a_body_that_blocks_is_given_up_and_none_of_its_effects_starts_later(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "GRACE", 0.3)
    a = lab.async_effect("a")
    later: list[BaseException] = []
    awake: list[bool] = []

    async def body(self: Any) -> Any:
        near_the_limit()
        time.sleep(3)  # noqa: ASYNC251
        awake.append(True)
        try:
            await a()
        except BaseException as exc:
            later.append(exc)
            raise

    with limit():
        job = lab.run(lab.task(body, effects=[a]))
    assert awake == [], "it was not waited for"
    assert lab.status(job) == "failed"
    assert eventually(lambda: later, 10)
    assert isinstance(later[0], (NoActiveJob, asyncio.CancelledError))
    assert lab.calls == []
    assert lab.operations(job) == {}


def test_a_body_that_leaves_its_process_takes_nobody_along(lab: Lab) -> None:
    async def body(self: Any, code: int) -> Any:
        if code:
            sys.exit(code)
        return "alive"

    task = lab.task(body, effects=[])
    job = str(uuid4())
    with pytest.raises(SystemExit):
        lab.run(task, 3, job=job)
    assert lab.status(job) == "queued"
    assert lab.row(lab.run(task, 0))["result"] == "alive"


def test_a_body_that_cancels_itself_has_failed(lab: Lab) -> None:
    async def body(self: Any) -> Any:
        raise asyncio.CancelledError

    job = lab.run(lab.task(body, effects=[]))
    assert (lab.status(job), lab.row(job)["reason"]) == ("failed", "error")


# -- at once, inside an event loop -------------------------------------------------------------------------------------


def test_apply_inside_a_running_loop(lab: Lab) -> None:
    """As in a test of the user's that is a coroutine, and in a body that is one."""
    a = lab.async_effect("a")

    async def inner(self: Any, n: int) -> Any:
        return [(await a(n)).result, self.request.id == self.job.id]

    task = lab.task(inner, effects=[a])
    sync = lab.task(lambda self, n: [a(n).result, self.request.id == self.job.id], effects=[a])

    async def outer(self: Any) -> Any:
        both = await asyncio.gather(*(asyncio.to_thread(task.apply, (n,)) for n in range(2)))
        own = [self.request.id == self.job.id]
        return [task.apply((7,)).get(), sync.apply((8,)).get(), *(result.get() for result in both), own]

    async def test() -> Any:
        return [task.apply((1,)).get(), sync.apply((2,)).get(), lab.task(outer, effects=[]).apply().get()]

    good = [[[7], True], [[8], True], [[0], True], [[1], True], [True]]
    assert asyncio.run(test()) == [[[1], True], [[2], True], good]


# -- lookups -----------------------------------------------------------------------------------------------------------


def test_an_async_lookup_and_one_that_hangs(lab: Lab) -> None:
    a, b = lab.async_effect("a", lookup=True), lab.async_effect("b", lookup=True, lookup_timeout=1)
    lab.behaviour |= {"a": ValueError("?"), "b": ValueError("?")}
    ended: list[str] = []

    async def answer(op: Any) -> Any:
        if op.effect == b.name:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(op.key)
        await asyncio.sleep(0)
        return Happened("found", {"n": 1})

    lab.verdict = answer
    good, bad = (lab.run(lab.task(self_calls(one), effects=[one])) for one in (a, b))
    started = time.monotonic()
    results = lab.reconcile()
    assert time.monotonic() - started < 30
    assert results == {"outcome_confirmed": 1, "unresolved": 1}
    assert lab.operations(good) == {"1": "outcome_confirmed"}
    assert lab.operations(bad) == {"1": "unknown"}
    assert eventually(lambda: ended == [f"{bad}:1"], 5), "a lookup that is over its time is cancelled"


def self_calls(one: Any) -> Callable[[Any], Any]:
    async def body(self: Any) -> Any:
        return (await one()).ref

    return body


def test_the_lookup_of_an_async_whole_body(lab: Lab) -> None:
    async def find(op: Any) -> Any:
        return Happened("found")

    async def body(self: Any) -> Any:
        raise ValueError("?")

    job = lab.run(lab.task(body, effect_options={"lookup": find}))
    assert lab.status(job) == "unknown"
    lab.reconcile()
    assert (lab.status(job), lab.row(job)["outcome_ref"]) == ("succeeded", "found")


def test_a_refusal_in_a_coroutine_is_the_same_again_on_replay(lab: Lab) -> None:
    a = lab.async_effect("a", refused_on=Declined)
    lab.behaviour["a"] = Declined("no funds")
    causes = []

    async def body(self: Any) -> Any:
        try:
            await a()
        except EffectRefused as exc:
            causes.append(type(exc.__cause__))
        if self.job.attempt == 1:
            lab.crash(self)

    task = lab.task(body, effects=[a])
    job = lab.run(task)
    lab.run(task, job=job)
    assert causes == [Declined, Declined]
    assert len(lab.calls) == 1


# -- the loop ----------------------------------------------------------------------------------------------------------


def test_the_loop_ends_with_its_tasks_and_a_new_one_begins_when_needed() -> None:
    ended: list[str] = []

    async def left_behind() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    async def main() -> Any:
        tasks.append(asyncio.create_task(left_behind()))
        await asyncio.sleep(0)
        return threading.current_thread()

    tasks: list[Any] = []
    first = loop.complete(main())
    assert loop.complete(main()) is first
    loop.close()
    assert ended == ["cancelled"] * 2
    assert not first.is_alive()
    assert loop.complete(main()) is not first
    loop.close()


@pytest.mark.parametrize("what", ["body", "effect", "lookup", "lookup of the body"])
def test_a_pool_of_greenlets_is_refused_at_start(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    async def later(op: Any) -> Any:
        return None

    def now(op: Any) -> Any:
        return None

    charge: Any = effect(name=next(names))(later if what == "effect" else now)
    if what == "lookup":
        charge.lookup(later)
    app = Celery("greenlets", set_as_current=False)
    safe = SafeEffects(app)
    options = {"effect_options": {"lookup": later}} if what == "lookup of the body" else {"effects": [charge]}
    task = app.task(base=SafeTask, name=next(names), shared=False, **options)(later if what == "body" else now)
    safe.check_declarations()
    monkeypatch.setattr(native, "threads_are_greenlets", lambda: True)
    named = charge.name if what in ("effect", "lookup") else task.name
    with pytest.raises(ConfigurationError, match=rf"{named}' is `async def`.*prefork, threads or solo"):
        safe.check_declarations()
    with pytest.raises(ConfigurationError, match="an event loop in a thread of its own"):
        loop.check()
    app.close()
