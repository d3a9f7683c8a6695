"""Class-based and typed tasks: users' own classes, hooks and options take part, or are refused by name at start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import celery
import pytest
from celery import Celery, Task, _state, shared_task
from celery.exceptions import Ignore
from celery.worker.request import Request
from pydantic import BaseModel

from celery_safe_effects import NoActiveJob, Outcome, SafeEffects, SafeTask, effect
from celery_safe_effects.errors import ConfigurationError
from celery_safe_effects.glue.request import SafeRequest
from tests.support.lab import Lab, names
from tests.support.services import PostgresServer, Sql

# -- users' own base classes -------------------------------------------------------------------------------------------


class Contextual(Task):
    """A base class that other frameworks' docs recommend: every run in a context of the framework's."""

    entered: list[str] = []  # noqa: RUF012 - one list for all, cleared by the fixture

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.entered.append(f"{self.request.id or 'directly'}")
        return self.run(*args, **kwargs)


class Before(Contextual, SafeTask):
    abstract = True


class Behind(SafeTask, Contextual):
    abstract = True


class CoOperating(SafeTask):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        Contextual.entered.append(f"{self.request.id or 'directly'}")
        return super().__call__(*args, **kwargs)


@pytest.fixture(autouse=True)
def _nothing_entered() -> None:
    Contextual.entered.clear()


@pytest.mark.parametrize("base", [Before, Behind, CoOperating])
def test_a_users_own_call_runs_once_inside_the_job_and_in_a_direct_call(lab: Lab, base: type[SafeTask]) -> None:
    a = lab.effect("a")

    @lab.app.task(base=base, bind=True, shared=False, name=next(names), effects=[a])
    def task(self: Any, depth: int = 0) -> Any:
        if depth:
            return self(depth - 1)
        with contextlib.suppress(NoActiveJob):
            return a().ref
        return "directly"

    job = lab.run(task)
    assert Contextual.entered == [job]
    assert lab.calls == [("a", f"{job}:1")]
    Contextual.entered.clear()
    assert task(1) == "directly"
    assert set(Contextual.entered) == {"directly"}
    assert len(lab.calls) == 1


class Hooked(SafeTask):
    """All hooks, in all kinds of methods, and an ``on_bound`` that does not call super()."""

    abstract = True
    seen: list[tuple[str, str]] = []  # noqa: RUF012 - one list for all, cleared by the test

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """As Celery's own, it asks for no super()."""

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        self.note("before_start", task_id)

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        self.note("on_success", task_id)

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self.note("on_failure", task_id)

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self.note("on_retry", task_id)

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self.note(f"after_return {status}", task_id)

    def note(self, hook: str, job: str) -> None:
        row = self.safe_effects.job(job)
        self.seen.append((hook, row.status))


ENDS = {
    "returns": [("before_start", "running"), ("on_success", "succeeded"), ("after_return SUCCESS", "succeeded")],
    "fails": [("before_start", "running"), ("on_failure", "failed"), ("after_return FAILURE", "failed")],
    "retries": [
        ("before_start", "running"),
        ("on_retry", "queued"),
        ("before_start", "running"),
        ("on_success", "succeeded"),
        ("after_return SUCCESS", "succeeded"),
    ],
    "parks": [("before_start", "running")],
    "ignores": [("before_start", "running")],
}


@pytest.mark.parametrize("how", list(ENDS))
def test_hooks_run_after_the_row_says_so_and_never_for_a_parked_job(lab: Lab, how: str) -> None:
    Hooked.seen.clear()
    a = lab.effect("a")

    def body(self: Any) -> Any:
        if how == "parks":
            lab.behaviour["a"] = ValueError("?")
            a()
        if how == "fails":
            raise KeyError("no such order")
        if how == "ignores":
            raise Ignore
        if how == "retries" and self.request.retries == 0:
            self.retry(countdown=0)
        return 1

    task = lab.task(body, base=Hooked, effects=[a])
    lab.run(task)
    assert Hooked.seen == ENDS[how]


def test_a_hook_may_be_static_or_of_the_class(lab: Lab) -> None:
    seen: list[Any] = []

    class Static(SafeTask):
        abstract = True

        @staticmethod
        def before_start(task_id: str, *given: Any) -> None:
            seen.append((task_id, given))

        @staticmethod
        def __call__(*args: int) -> int:
            return sum(args)

    task = lab.task(lambda *args: None, base=Static, bind=False, effects=[])
    job = lab.run(task, 1, 2)
    assert lab.row(job)["result"] == 3
    assert seen == [(job, ((1, 2), {}))]


def test_the_first_run_of_a_stale_delivery_runs_no_hook(lab: Lab) -> None:
    Hooked.seen.clear()
    task = lab.task(lambda self: 1, base=Hooked, effects=[])
    job = lab.run(task)
    first = list(Hooked.seen)
    lab.run(task, job=job)
    assert Hooked.seen == first


@pytest.mark.parametrize("name", ["job", "safe_effects"])
def test_a_class_that_takes_away_what_a_safe_task_provides_is_refused_by_name(lab: Lab, name: str) -> None:
    mixin = type("Greedy", (), {name: 1})
    base = type("Base", (mixin, SafeTask), {"abstract": True})
    with pytest.raises(ConfigurationError, match=rf"Greedy defines '{name}'"):
        lab.task(lambda self: None, base=base, lazy=False)


@pytest.mark.parametrize("hook", ["before_start", "on_success", "on_failure", "on_retry", "after_return"])
def test_a_hook_that_nobody_would_await_is_refused_by_name(lab: Lab, hook: str) -> None:
    async def never(self: Any, *args: Any) -> None: ...

    base = type("Base", (SafeTask,), {hook: never, "abstract": True})
    with pytest.raises(ConfigurationError, match=f"its {hook} is `async def`"):
        lab.task(lambda self: None, base=base, lazy=False)


def test_of_two_tasks_with_one_name_the_first_stands(lab: Lab) -> None:
    """As in Celery, which warns of it from 5.7 on."""
    name = next(names)
    first = lab.task(lambda self: "first", name=name, effects=[])
    lab.run(first)  # the app has it
    warned = pytest.warns(match="already registered") if celery.__version__ >= "5.7" else contextlib.nullcontext()
    with warned:
        lab.app.task(base=SafeTask, bind=True, shared=False, name=name, effects=[], lazy=False)(lambda self: "second")
    assert lab.row(lab.run(lab.app.tasks[name]))["result"] == "first"


def test_common_names_of_users_own_methods_are_free(lab: Lab) -> None:
    class Busy(SafeTask):
        abstract = True

        def body(self) -> str:
            return "body"

        def check(self) -> str:
            return self.body() + " checked"

        def invoke(self) -> str:
            return self.check() + " invoked"

    task = lab.task(lambda self: self.invoke(), base=Busy)
    assert lab.row(lab.run(task))["result"] == "body checked invoked"


@pytest.mark.parametrize("behind", [False, True])
def test_a_request_that_would_fail_a_lost_job_is_refused_at_start(lab: Lab, behind: bool) -> None:
    class MyRequest(Request):
        pass

    class Requesting(Task):
        Request = MyRequest

    bases = (SafeTask, Requesting) if behind else (Requesting, SafeTask)
    lab.task(lambda self: None, base=type("Base", bases, {}))
    with pytest.raises(ConfigurationError, match=r"MyRequest of its class Requesting must derive from .*SafeRequest"):
        lab.safe.check_declarations()


def test_a_request_that_derives_from_ours_is_welcome(lab: Lab) -> None:
    base = type("Base", (SafeTask,), {"Request": type("MyRequest", (SafeRequest,), {}), "abstract": True})
    lab.task(lambda self: None, base=base)
    lab.safe.check_declarations()


def test_a_task_that_is_based_on_another_one_has_its_own_body(lab: Lab) -> None:
    first = lab.task(lambda self, x: x)
    lab.run(first, 1)
    base = type(lab.app.tasks[first.name])
    second = lab.task(lambda self, y: [y], base=base)
    job = lab.run(second, 2)
    assert lab.sql("SELECT effect, args FROM operations WHERE job_id = %s", job) == [
        {"effect": second.name, "args": {"y": 2}}
    ]


# -- task classes ------------------------------------------------------------------------------------------------------


def test_registered_instances_and_classes(lab: Lab) -> None:
    a = lab.effect("a")

    class Bill(SafeTask):
        name = "classes.bill"
        effects = [a]  # noqa: RUF012
        autoretry_for = (KeyError,)
        retry_backoff = False
        default_retry_delay = 0
        max_attempts = 4

        def __init__(self, currency: str = "eur") -> None:
            self.currency = currency
            self.runs = 0

        def run(self, customer: str, cents: int = 5) -> Any:
            self.runs += 1
            if self.runs == 1:
                raise KeyError("once")
            return [a(customer, cents).ref, self.currency]

    task = lab.app.register_task(Bill("usd"))
    job = lab.run(task, "cus_1")
    assert (lab.row(job)["result"], task.runs) == (["a-1", "usd"], 2)
    assert lab.sql("SELECT max_attempts FROM job") == [{"max_attempts": 4}]

    class Whole(SafeTask):
        name = "classes.whole"

        def run(self, customer: str, cents: int = 5) -> Any:
            operation = self.job.operation
            assert operation is not None
            return operation.key

    job = lab.run(lab.app.register_task(Whole), "cus_1")
    assert lab.row(job)["result"] == f"{job}:body"
    assert lab.safe.operation(f"{job}:body").args == {"customer": "cus_1", "cents": 5}


def test_options_from_annotations(lab: Lab) -> None:
    around: list[str] = []

    def announced(call: Any) -> Any:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            around.append(self.job.id)
            return call(self, *args, **kwargs)

        return run

    lab.app.conf.task_annotations = {"annotated": {"max_attempts": 2, "lease_ttl": 7, "@__call__": announced}}
    task = lab.task(lambda self: 1, name="annotated", effects=[])
    job = lab.run(task)
    assert lab.sql("SELECT max_attempts FROM job") == [{"max_attempts": 2}]
    assert (lab.status(job), around) == ("succeeded", [job])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_attempts", 0),
        ("max_attempts", True),
        ("lease_ttl", "soon"),
        ("max_age", -1),
        ("pool", object()),
        ("tenant", lambda self: "acme"),
    ],
)
def test_a_bad_option_is_refused_when_the_task_is_made(lab: Lab, option: str, value: Any) -> None:
    lab.app.conf.task_annotations = {"annotated": {option: value}}
    with pytest.raises(ConfigurationError, match=f"'annotated': {option} must be"):
        lab.task(lambda self: 1, lazy=False, name="annotated", effects=[])


# -- which app ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def other_app() -> Iterator[Celery]:
    app = Celery("other", broker="memory://", backend="cache+memory://", set_as_current=False)
    yield app
    app.close()


def test_without_safe_effects_nothing_is_enqueued(other_app: Celery) -> None:
    @other_app.task(base=SafeTask, shared=False, name="lost")
    def task() -> None: ...

    for call in (task.delay, task.apply, task.s().apply_async, lambda: task.apply_async(idempotency_key="k")):
        with pytest.raises(ConfigurationError, match=r"add `SafeEffects\(app\)`"):
            call()


def test_safe_task_for_the_whole_app_leaves_celerys_own_tasks_alone(database_url: str, sql: Sql) -> None:
    app = Celery("all", broker="memory://", backend="cache+memory://", set_as_current=False, task_cls=SafeTask)
    app.conf.safe_effects_database_url = database_url
    safe = SafeEffects(app)

    @app.task(shared=False, name="mine")
    def mine() -> int:
        return 1

    assert "mine" in safe.task_names()
    assert not [name for name in safe.task_names() if name.startswith("celery")]
    assert "celery.chord_unlock" in app.tasks
    assert app.tasks["celery_safe_effects.sweep"].apply().state == "SUCCESS"
    assert mine.apply().get() == 1
    assert [row["task"] for row in sql("SELECT task FROM jobs")] == ["mine"]
    safe.close()
    app.close()


def test_safe_task_for_the_whole_app_comes_before_its_use() -> None:
    app = Celery("all", broker="memory://", set_as_current=False, task_cls=SafeTask)
    app.finalize()
    with pytest.raises(ConfigurationError, match="make SafeEffects"):
        SafeEffects(app)
    app.close()


@pytest.fixture
def second_url(postgres_server: PostgresServer) -> Iterator[str]:
    from celery_safe_effects.store import migrate

    name = f"second_{uuid4().hex[:12]}"
    url = postgres_server.create_database(name)
    migrate.upgrade(url)
    yield url
    postgres_server.drop_database(name)


@effect(name="classes.shared_effect")
def shared_effect(op: Any) -> Any:
    return Outcome(op.key, op.job_id)


@pytest.fixture
def _shared_tasks_end_here() -> Iterator[None]:
    """A shared task is one of all later apps of the process."""
    before = set(_state._on_app_finalizers)
    yield
    _state._on_app_finalizers &= before


@pytest.mark.usefixtures("_shared_tasks_end_here")
def test_one_shared_task_in_several_apps(lab: Lab, other_app: Celery, second_url: str) -> None:
    """Each app's job stands in that app's database; a job of one may send one of the other, once."""
    other_app.conf.safe_effects_database_url = second_url
    other = SafeEffects(other_app)
    plain = Celery("plain", broker="memory://", set_as_current=False)

    @plain.task(shared=False, name="classes.plain")
    def plain_task() -> None: ...

    @shared_task(base=SafeTask, bind=True, name="classes.shared", effects=[shared_effect])
    def shared(self: Any) -> Any:
        return shared_effect().ref

    here, there = (app.tasks["classes.shared"] for app in (lab.app, other_app))
    assert here is not there
    mine, theirs = lab.run(here), str(uuid4())
    there.apply(task_id=theirs)
    assert [row.id for row in lab.safe.jobs()] == [mine]
    assert [row.id for row in other.jobs()] == [theirs]

    def body(self: Any) -> Any:
        sent = there.delay().id
        plain_task.delay()
        if self.job.attempt == 1:
            lab.crash(self)
        return sent

    task = lab.task(body, effects=[])
    job = lab.run(task)
    lab.run(task, job=job)
    child = lab.row(job)["result"]
    assert [(row.id, row.parent_id) for row in other.jobs() if row.id != theirs] == [(child, job)]
    assert len(lab.safe.jobs()) == 2
    other.close()
    plain.close()


# -- a task called as a function ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("called", ["whole body", "effects", "none"])
@pytest.mark.parametrize("caller", ["whole body", "effects", "nobody"])
def test_a_task_called_as_a_function(lab: Lab, caller: str, called: str) -> None:
    """It belongs to its caller: recorded with the caller's effects, or a part of its whole body, or nobody's."""
    a = lab.effect("a")
    wrote: list[int] = []
    bodies: dict[str, tuple[Any, dict[str, Any]]] = {
        "whole body": (lambda self: wrote.append(1), {}),
        "effects": (lambda self: a().ref, {"effects": [a]}),
        "none": (lambda self: 5, {"effects": []}),
    }
    body, options = bodies[called]
    inner = lab.task(body, **options)
    if caller == "nobody":
        if called == "effects":
            with pytest.raises(NoActiveJob):
                inner()
        else:
            inner()
        assert lab.safe.jobs() == []
        assert wrote == ([1] if called == "whole body" else [])
    else:
        outer = lab.task(lambda self: inner(), **({"effects": [a]} if caller == "effects" else {}))
        job = lab.run(outer)
        allowed = called in ("none", caller)
        assert lab.status(job) == ("succeeded" if allowed else "unknown" if caller == "whole body" else "failed")
        if not allowed:
            assert "UndeclaredEffect" in lab.row(job)["last_error"]
        assert wrote == ([1] if (caller, called) == ("whole body", "whole body") else [])
        assert lab.calls == ([("a", f"{job}:1")] if (caller, called) == ("effects", "effects") else [])
    assert len(lab.safe.jobs()) == (caller != "nobody")


# -- pydantic ----------------------------------------------------------------------------------------------------------


class Order(BaseModel):
    number: str
    cents: int


class Receipt(BaseModel):
    ref: str


@pytest.mark.parametrize("whole", [False, True])
def test_pydantic_models_go_in_and_out(lab: Lab, whole: bool) -> None:
    a = lab.effect("a")
    seen: list[Any] = []

    def body(self: Any, order: Order, note: str | None = None) -> Receipt:
        seen.append((order, note))
        if self.request.retries == 0:
            again = Order(number=order.number, cents=7)
            # Before 5.7, Celery encodes no models among the arguments.
            raise self.retry(args=(again if celery.__version__ >= "5.7" else again.model_dump(),), countdown=0)
        return Receipt(ref=self.job.operation.key if whole else a(order.number).ref)

    task = lab.task(body, pydantic=True, **({} if whole else {"effects": [a]}))
    job = lab.run(task, {"number": "o-1", "cents": "5"})
    assert seen == [(Order(number="o-1", cents=5), None), (Order(number="o-1", cents=7), None)]
    assert lab.row(job)["result"] == {"ref": f"{job}:body" if whole else "a-1"}
    if whole:
        assert lab.safe.operation(f"{job}:body").args == {"order": {"number": "o-1", "cents": 7}, "note": None}


@pytest.mark.parametrize("whole", [False, True])
def test_what_pydantic_refuses(lab: Lab, whole: bool) -> None:
    """With effects, the job fails. A whole body parks: nothing tells whether its own code raised that."""

    def body(self: Any, order: Order) -> int:
        return 1

    task = lab.task(body, pydantic=True, pydantic_strict=True, **({} if whole else {"effects": []}))
    job = lab.run(task, {"number": "o-1", "cents": "5"})
    assert lab.status(job) == ("unknown" if whole else "failed")
    assert "ValidationError" in lab.row(job)["last_error"]


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"typing": False}])
def test_arguments_that_do_not_fit_fail_a_job_whose_body_was_never_entered(lab: Lab, options: dict[str, Any]) -> None:
    entered: list[int] = []

    def body(self: Any, a: int, b: int = 2) -> Any:
        entered.append(a)

    declared: list[dict[str, Any]] = [{}, {"effects": []}]
    for effects in declared:
        task = lab.task(body, **options, **effects)
        if not options:
            with pytest.raises(TypeError):
                task.delay()
        job = lab.run(task)
        row = lab.row(job)
        assert (row["status"], "missing" in row["last_error"]) == ("failed", True)
    assert entered == []
