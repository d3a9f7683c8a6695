"""``map``, ``starmap`` and ``chunks`` of SafeTasks: one job, a step or more for each item."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import chain, chunks, group, xmap, xstarmap

from celery_safe_effects import Happened, NotHappened, Outcome, SafeTask
from celery_safe_effects.errors import ConfigurationError
from celery_safe_effects.glue import mapped
from tests.support.lab import Declined, Lab
from tests.support.services import Sql
from tests.support.shop import Shop


def run(lab: Lab, task: Any, *items: Any, job: str | None = None) -> str:
    """Deliver a job of these items once, each a list of arguments; its id."""
    return lab.run(mapped.companion(task), [list(item) for item in items], job=job)


def result(lab: Lab, job: str) -> Any:
    return lab.row(job)["result"]


# -- declared effects --------------------------------------------------------------------------------------------------


def test_steps_begin_with_the_items_index(lab: Lab) -> None:
    a, b = lab.effect("a"), lab.effect("b")

    def body(self: Any, x: int) -> Any:
        a(x)
        b.step("named")(x)
        return a(x + 100).result

    job = run(lab, lab.task(body, effects=[a, b]), (1,), (2,))
    assert lab.operations(job) == dict.fromkeys(["0.1", "0.named", "0.2", "1.1", "1.named", "1.2"], "outcome_confirmed")
    assert [key for _, key in lab.calls] == [f"{job}:{s}" for s in ("0.1", "0.named", "0.2", "1.1", "1.named", "1.2")]
    assert (lab.status(job), result(lab, job)) == ("succeeded", [[101], [102]])


def test_a_replay_calls_only_what_is_new(lab: Lab) -> None:
    a = lab.effect("a", lookup=True)
    crashes = [1, 2]

    def body(self: Any, x: int) -> Any:
        done = a(x)
        if x in crashes:
            crashes.remove(x)
            lab.crash(self)
        return [done.result, a(-x).replayed]

    task = lab.task(body, effects=[a])
    job = run(lab, task, (1,), (2,), (3,))
    for _ in range(2):
        assert lab.status(job) == "queued"
        run(lab, task, (1,), (2,), (3,), job=job)
    assert lab.status(job) == "succeeded"
    assert [key.removeprefix(f"{job}:") for _, key in lab.calls] == ["0.1", "0.2", "1.1", "1.2", "2.1", "2.2"]
    assert result(lab, job) == [[[1], True], [[2], False], [[3], False]]


def test_an_item_parks_and_the_rest_runs_after_the_verdict(lab: Lab) -> None:
    a = lab.effect("a", lookup=True)

    def body(self: Any, x: int) -> Any:
        return a(x).ref

    task = lab.task(body, effects=[a])
    lab.behaviour["a"] = lambda op, x: (_ for _ in ()).throw(OSError("cut")) if x == 2 else Outcome(f"ref-{x}")
    job = run(lab, task, (1,), (2,), (3,))
    assert lab.operations(job) == {"0.1": "outcome_confirmed", "1.1": "unknown"}
    assert lab.status(job) == "unknown"
    lab.verdict = Happened("found")
    lab.reconcile()
    lab.behaviour["a"] = lambda op, x: Outcome(f"ref-{x}")
    run(lab, task, (1,), (2,), (3,), job=job)
    assert (lab.status(job), result(lab, job)) == ("succeeded", ["ref-1", "found", "ref-3"])
    assert len(lab.calls) == 3


def test_an_error_of_an_item_is_the_jobs(lab: Lab) -> None:
    def body(self: Any, x: int) -> Any:
        if x == 2:
            raise KeyError(x)
        return x

    job = run(lab, lab.task(body, effects=[]), (1,), (2,), (3,))
    assert (lab.status(job), lab.row(job)["last_error"]) == ("failed", "KeyError: 2")


def test_messages_of_items_are_the_same_each_time(lab: Lab) -> None:
    child = lab.task(lambda self, x: x, effects=[])
    crashes = [1]

    def body(self: Any, x: int) -> Any:
        sent = child.delay(x).id
        if x == 2 and crashes:
            crashes.clear()
            lab.crash(self)
        return sent

    task = lab.task(body, effects=[])
    job = run(lab, task, (1,), (2,))
    run(lab, task, (1,), (2,), job=job)
    assert lab.status(job) == "succeeded"
    assert {row["id"] for row in lab.sql("SELECT id FROM jobs WHERE id <> %s", job)} == set(result(lab, job))


# -- whole bodies ------------------------------------------------------------------------------------------------------


def whole(lab: Lab, calls: list[Any], **options: Any) -> Any:
    def body(self: Any, x: Any, y: Any = None) -> Any:
        calls.append((self.job.operation.key, self.request.id))
        if isinstance(x, BaseException):
            raise x
        wanted = lab.behaviour.get(str(x))
        if wanted is not None:
            return wanted(self)
        return f"ref-{x}"

    return lab.task(body, **options)


def test_each_item_is_one_operation(lab: Lab) -> None:
    calls: list[Any] = []
    job = run(lab, whole(lab, calls), (1,), (2, "two"))
    assert calls == [(f"{job}:0", job), (f"{job}:1", job)]
    assert lab.operations(job) == {"0": "outcome_confirmed", "1": "outcome_confirmed"}
    assert (lab.status(job), result(lab, job)) == ("succeeded", ["ref-1", "ref-2"])
    assert lab.row(job)["outcome_ref"] == "ref-2"
    rows = lab.sql("SELECT args FROM operations WHERE job_id = %s ORDER BY step", job)
    assert [row["args"] for row in rows] == [{"x": 1, "y": None}, {"x": 2, "y": "two"}]


@pytest.mark.parametrize("verdict", [Happened("found", "answer"), NotHappened()])
def test_a_crash_parks_only_its_item(lab: Lab, verdict: Any) -> None:
    """The lookup of the task's ``effect_options`` answers for it; the others are returned from the record."""
    calls: list[Any] = []
    asked: list[Any] = []

    def find(op: Any) -> Any:
        asked.append((op.key, op.arguments["x"]))
        return verdict

    task = whole(lab, calls, effect_options={"lookup": find, "deadline": 60})
    lab.behaviour["2"] = lambda self: (_ for _ in ()).throw(OSError("cut"))
    job = run(lab, task, (1,), (2,), (3,))
    assert lab.operations(job) == {"0": "outcome_confirmed", "1": "unknown"}
    assert lab.status(job) == "unknown"
    lab.make_gone()
    lab.past_deadline()
    lab.reconcile()
    assert asked == [(f"{job}:1", 2)]
    assert lab.status(job) == "queued"
    lab.behaviour.clear()
    run(lab, task, (1,), (2,), (3,), job=job)
    assert lab.status(job) == "succeeded"
    again = isinstance(verdict, NotHappened)
    assert result(lab, job) == ["ref-1", "ref-2" if again else "answer", "ref-3"]
    assert [key.rpartition(":")[2] for key, _ in calls] == ["0", "1", "1", "2"] if again else ["0", "1", "2"]


def test_an_operator_answers_for_an_item(lab: Lab) -> None:
    calls: list[Any] = []
    task = whole(lab, calls)
    lab.behaviour["boom"] = lambda self: (_ for _ in ()).throw(OSError("cut"))
    job = run(lab, task, ("boom",), (2,))
    assert lab.status(job) == "unknown"
    lab.safe.resolve(f"{job}:0", Happened("known"), "me", "seen there")
    run(lab, task, ("boom",), (2,), job=job)
    assert (lab.status(job), result(lab, job)) == ("succeeded", [None, "ref-2"])


def test_an_expected_error_fails_the_job_as_itself_and_is_not_tried_again(lab: Lab) -> None:
    calls: list[Any] = []
    task = whole(lab, calls, throws=(Declined,), autoretry_for=(Declined,), max_retries=5)
    lab.behaviour["no"] = lambda self: (_ for _ in ()).throw(Declined("no"))
    job = run(lab, task, (1,), ("no",), (3,))
    assert lab.operations(job) == {"0": "outcome_confirmed", "1": "refused"}
    assert (lab.status(job), lab.row(job)["last_error"]) == ("failed", "Declined: no")
    assert len(calls) == 2


def test_what_did_not_happen_is_tried_again(lab: Lab) -> None:
    calls: list[Any] = []
    task = whole(lab, calls, effect_options={"not_happened_on": ConnectionRefusedError})
    lab.behaviour["2"] = lambda self: (_ for _ in ()).throw(ConnectionRefusedError("closed"))
    job = run(lab, task, (1,), (2,))
    assert lab.operations(job) == {"0": "outcome_confirmed", "1": "not_happened"}
    assert lab.status(job) == "queued"
    lab.behaviour.clear()
    lab.sql("UPDATE job SET run_after = NULL")
    run(lab, task, (1,), (2,), job=job)
    assert (lab.status(job), result(lab, job)) == ("succeeded", ["ref-1", "ref-2"])
    assert [key.rpartition(":")[2] for key, _ in calls] == ["0", "1", "1"]


@pytest.mark.parametrize("how", ["raise", "swallow", "over"])
def test_an_item_retries_by_its_authors_word(lab: Lab, how: str) -> None:
    """It did not happen then, and runs again alone; also if ``Retry`` is swallowed, and where no run is left."""
    calls: list[Any] = []
    task = whole(lab, calls, max_retries=1)
    failing = [1, 2] if how == "over" else [1]

    def again(self: Any) -> Any:
        if not failing:
            return "done"
        failing.pop()
        return self.retry(countdown=0, exc=LookupError("not yet"), throw=how != "swallow") and "swallowed"

    lab.behaviour["2"] = again
    job = run(lab, task, (1,), (2,), (3,))
    assert [key.rpartition(":")[2] for key, _ in calls] == ["0", "1", "1"] + ["2"] * (how != "over")
    if how == "over":
        assert lab.operations(job) == {"0": "outcome_confirmed", "1": "not_happened"}
        assert (lab.status(job), lab.row(job)["reason"]) == ("failed", "max_retries")
    else:
        assert (lab.status(job), result(lab, job)) == ("succeeded", ["ref-1", "done", "ref-3"])


@pytest.mark.parametrize("effects", [None, []])
def test_what_an_item_cannot_do_is_refused(lab: Lab, effects: Any) -> None:
    def body(self: Any, how: str) -> Any:
        if how == "replace":
            return self.replace(self.s("x"))
        return self.retry(args=("other",))

    options = {"effects": effects} if effects is not None else {"throws": (ConfigurationError,)}
    task = lab.task(body, **options)
    for how in ("replace", "retry"):
        job = run(lab, task, (how,))
        assert lab.status(job) == "failed"
        assert "[configuration] task" in lab.row(job)["last_error"]


def test_outcomes_and_bodies_that_are_coroutines(lab: Lab) -> None:
    async def later(self: Any, x: int) -> Any:
        return Outcome(f"ref-{x}", {"x": x})

    job = run(lab, lab.task(later), (1,), (2,))
    assert (lab.status(job), result(lab, job)) == ("succeeded", [{"x": 1}, {"x": 2}])
    assert lab.operations(job) == {"0": "outcome_confirmed", "1": "outcome_confirmed"}
    other = run(lab, lab.task(later, effects=[]), (1,), (2,))
    assert (lab.status(other), result(lab, other)) == ("succeeded", [{"x": 1}, {"x": 2}])


def test_a_users_own_call_is_made_for_each_item(lab: Lab) -> None:
    seen: list[Any] = []

    class Traced(SafeTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            seen.append((args, self.request.id))
            return super().__call__(*args, **kwargs)

        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            seen.append("before")

    declarations: list[dict[str, Any]] = [{"effects": []}, {}]
    for options in declarations:
        seen.clear()

        @lab.app.task(base=Traced, bind=True, shared=False, name=f"map.traced{len(options)}", **options)
        def traced(self: Any, x: int) -> Any:
            return x

        job = run(lab, traced, (1,), (2,))
        assert seen == ["before", ((1,), job), ((2,), job)]
        assert (lab.status(job), result(lab, job)) == ("succeeded", [1, 2])


# -- as Celery's canvas ------------------------------------------------------------------------------------------------


@pytest.fixture
def add(shop: Shop) -> Any:
    @shop.app.task(base=SafeTask, shared=False, name="shop.add", effects=[])
    def add(x: int, y: int = 0) -> int:
        return x + y

    return add


def sent(shop: Shop, sql: Sql) -> list[tuple[str, Any]]:
    shop.messages()
    rows = sql("SELECT id, task FROM jobs ORDER BY created_at")
    return [(row["task"], row["id"]) for row in rows]


def test_signatures_as_celerys(shop: Shop, add: Any, sql: Sql) -> None:
    shop.app.conf.task_routes = {"shop.add": {"queue": shop.queue}}
    made = [
        add.map([1, 2, 3]),
        add.starmap(zip([1, 2], [3, 4], strict=True)),
        xmap(add.s(), [1, 2, 3], app=shop.app),
        xstarmap(add.s(), [(1, 3), (2, 4)], app=shop.app),
    ]
    results = [one.apply_async(tenant="acme") for one in made]
    assert [row["task"] for row in sql("SELECT task FROM jobs")] == ["shop.add.map"] * 4
    messages = shop.messages()
    assert [headers["id"] for headers, _ in messages] == [one.id for one in results]
    assert [body[0] for _, body in messages] == [
        [[[1], [2], [3]]],
        [[[1, 3], [2, 4]]],
        [[[1], [2], [3]]],
        [[[1, 3], [2, 4]]],
    ]
    rows = sql("SELECT tenant, queue FROM jobs")
    assert [(row["tenant"], row["queue"]) for row in rows] == [("acme", shop.queue)] * 4, "routed as the task is"


def test_chunks_are_a_group_of_jobs(shop: Shop, add: Any, sql: Sql) -> None:
    items = [(n, n) for n in range(5)]
    for one in (add.chunks(items, 2), chunks(add.s(), items, 2, app=shop.app)):
        before = len(sql("SELECT id FROM jobs"))
        found = one.apply_async()
        assert len(found.results) == 3
        assert len(sql("SELECT id FROM jobs")) == before + 3
    named = add.chunks(items, 2).group()
    first = named.apply_async(idempotency_key="named")
    assert named.apply_async(idempotency_key="named").as_tuple() == first.as_tuple()
    assert add.chunks(items, 2)().results
    assert named.skew(start=1, stop=10).tasks[0].options["countdown"] == 1


def test_in_chains_and_groups(shop: Shop, add: Any, sql: Sql) -> None:
    """What is mapped is immutable, as in Celery: it does not take the result of what goes before."""
    chain(add.map([1]), add.si(5)).apply_async()
    group(add.map([1]), add.starmap([(1, 2)])).apply_async()
    (headers, body), *_ = shop.messages()
    assert headers["task"] == "shop.add.map"
    assert body[2]["chain"][0]["task"] == "shop.add"
    chain(add.si(5), add.map([1])).apply_async()
    embed = sql("SELECT envelope FROM job WHERE task = 'shop.add' ORDER BY seq DESC LIMIT 1")[0]["envelope"]
    assert b"shop.add.map" in bytes(embed)


def test_a_call_that_does_not_fit_is_refused_where_it_is_made(add: Any) -> None:
    with pytest.raises(TypeError):
        add.starmap([(1, 2), (1, 2, 3)])


def test_eager(shops: Callable[..., Shop], sql: Sql) -> None:
    shop = shops(task_always_eager=True)

    @shop.app.task(base=SafeTask, shared=False, name="shop.add", effects=[])
    def add(x: int, y: int = 0) -> int:
        return x + y

    assert add.map([1, 2]).apply_async().get() == [1, 2]
    assert add.starmap([(1, 2)]).delay().get() == [3]
    assert [one.get() for one in add.chunks([(1, 2), (3, 4), (5, 6)], 2).apply_async()] == [[3, 7], [11]]
    assert {row["task"] for row in sql("SELECT task FROM jobs")} == {"shop.add.map"}
    with pytest.raises(ConfigurationError, match="would run unrecorded"):
        xmap(add.s(), [1, 2], app=shop.app).apply().get()


def test_a_name_that_is_taken_is_refused(shop: Shop, add: Any) -> None:
    @shop.app.task(base=SafeTask, shared=False, name="shop.add.map", effects=[])
    def other() -> None:
        """Has the companion's name."""

    with pytest.raises(ConfigurationError, match=r"add\.map\(\)"):
        add.map([1])
    with pytest.raises(ConfigurationError, match=r"add\.map\(\)"):
        shop.safe.add_companions()


def test_plain_tasks_are_celerys_alone(shop: Shop, sql: Sql) -> None:
    shop.plain.map([1, 2]).apply_async()
    shop.plain.chunks([(1,), (2,)], 1).apply_async()
    assert [headers["task"] for headers, _ in shop.messages()] == ["celery.map", "celery.starmap", "celery.starmap"]
    assert sql("SELECT id FROM jobs") == []
