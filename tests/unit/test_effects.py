"""Declarations: options, names, steps; wrong ones are refused with the effect's and the option's name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

from celery_safe_effects import NoActiveJob, NotHappened, Operation, Outcome, SafeEffects, SafeTask, effect
from celery_safe_effects.effects import Effect, registered
from celery_safe_effects.engine.outcomes import classify, outcome_of
from celery_safe_effects.errors import ConfigurationError
from celery_safe_effects.states import OperationStatus


class Declined(Exception):
    pass


@effect(
    name="unit.charge",
    idempotent_for=timedelta(hours=24),
    deadline=30,
    lookup_lag=5,
    refused_on=(Declined, lambda exc: "no funds" in str(exc)),
    not_happened_on=ConnectionRefusedError,
    redact=["card"],
)
def charge(op: Operation, customer: str, cents: int = 5, *, card: str = "") -> Outcome[Any]:
    """Charge a card."""
    return Outcome("ref")


def test_an_effect_keeps_its_functions_face() -> None:
    assert isinstance(charge, Effect)
    assert charge.__doc__ == "Charge a card."
    assert registered("unit.charge") is charge
    assert charge.options.idempotent_for == 86400
    assert list(charge.signature.parameters) == ["customer", "cents", "card"]
    assert charge.bind(("c",), {}).arguments == {"customer": "c", "cents": 5, "card": ""}


def test_the_default_name_is_module_and_function() -> None:
    @effect()
    def unnamed(op: Operation) -> None:
        return None

    assert unnamed.name == f"{__name__}.test_the_default_name_is_module_and_function.unnamed"


def test_outside_a_job_nothing_is_called() -> None:
    with pytest.raises(NoActiveJob):
        charge("c")


@pytest.mark.parametrize(
    ("exc", "status"),
    [
        (Declined(), OperationStatus.REFUSED),
        (ValueError("no funds"), OperationStatus.REFUSED),
        (ConnectionRefusedError(), OperationStatus.NOT_HAPPENED),
        (TimeoutError(), OperationStatus.UNKNOWN),
        (KeyboardInterrupt(), OperationStatus.UNKNOWN),
    ],
)
def test_only_the_allow_lists_prove_anything(exc: BaseException, status: OperationStatus) -> None:
    assert classify(charge.options, exc) == status


def test_a_predicate_that_raises_proves_nothing() -> None:
    def boom(exc: BaseException) -> bool:
        raise RuntimeError

    @effect(name="unit.boom", refused_on=boom)
    def fragile(op: Operation) -> None:
        return None

    assert classify(fragile.options, ValueError()) == OperationStatus.UNKNOWN


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Outcome("r", {"a": 1}), ("r", '{"a": 1}', None)),
        ("text", ("text", '"text"', None)),
        (None, ("key", "null", None)),
        ([1], ("key", "[1]", None)),
    ],
)
def test_what_an_effect_may_return(value: Any, expected: Any) -> None:
    assert outcome_of(value, "key") == expected


@pytest.mark.parametrize("value", [Outcome("", 1), Outcome(None, 1), Outcome(5, 1), Outcome("a\x00", 1)])  # type: ignore[arg-type]
def test_a_bad_ref_still_counts_as_happened(value: Any) -> None:
    ref, result, invalid = outcome_of(value, "key")
    assert (ref, result) == ("key", None)
    assert invalid is not None
    assert "reference" in invalid


@pytest.mark.parametrize("result", [object(), float("nan"), {1, 2}.__iter__()])
def test_a_result_that_is_no_json_keeps_its_ref(result: Any) -> None:
    ref, encoded, invalid = outcome_of(Outcome("r", result), "key")
    assert (ref, encoded) == ("r", None)
    assert invalid is not None
    assert "not JSON" in invalid


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"if_unknown": "retry"}, "if_unknown"),
        ({"deadline": 0}, "deadline"),
        ({"deadline": "30"}, "deadline"),
        ({"lookup_lag": -1}, "lookup_lag"),
        ({"refused_on": ("Declined",)}, "refused_on"),
        ({"not_happened_on": int}, "not_happened_on"),
        ({"repeatable": True, "idempotent_for": 5}, "repeatable"),
        ({"repeatable": True, "if_unknown": "send_again"}, "repeatable"),
        ({"detached": True, "trust_deadline_kill": True}, "detached"),
        ({"idempotent_for": 10, "deadline": 60}, "idempotent_for"),
        ({"redact": ["nobody"]}, "redact"),
        ({"redact": "card"}, "redact"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):

        @effect(name="unit.bad", **options)
        def bad(op: Operation, card: str) -> None:
            return None

    assert registered("unit.bad") is None


def test_an_effect_without_an_operation_argument_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Operation as its first argument"):

        @effect(name="unit.noargs")  # type: ignore[arg-type]
        def noargs() -> None:
            return None


def test_a_bare_decorator_says_how_to_write_it() -> None:
    with pytest.raises(ConfigurationError, match=r"@effect\(\)"):
        effect(print)  # type: ignore[arg-type]


def test_two_effects_with_one_name_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"two effects are named 'unit\.charge'"):

        @effect(name="unit.charge")
        def other(op: Operation) -> None:
            return None

    assert registered("unit.charge") is charge


@pytest.mark.parametrize("name", ["", "1", "body", 5])
def test_step_names(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="step"):
        charge.step(name)


def test_a_repeatable_effect_takes_no_lookup() -> None:
    @effect(name="unit.model", repeatable=True)
    def model(op: Operation) -> None:
        return None

    with pytest.raises(ConfigurationError, match="never unknown"):
        model.lookup(print)  # type: ignore[type-var]


def test_an_effect_is_as_asynchronous_as_its_function() -> None:
    @effect(name="unit.async")
    async def later(op: Operation) -> None:
        return None

    @effect(name="unit.sync")
    def now(op: Operation) -> None:
        return None

    @now.lookup
    async def find(op: Operation) -> NotHappened:
        return NotHappened()

    assert (later.is_async, now.is_async) == (True, False)
    assert now.find is find
    assert id(later.blocking) == id(later)
    with pytest.raises(ConfigurationError, match="Operation alone"):
        now.lookup(lambda: None)  # type: ignore[type-var]


def test_a_generator_is_no_effect() -> None:
    async def several(op: Operation) -> AsyncIterator[int]:
        yield 1

    def others(op: Operation) -> Iterator[int]:
        yield 1

    for fn in (several, others):
        with pytest.raises(ConfigurationError, match="yield"):
            effect(name="unit.generator")(fn)
    assert registered("unit.generator") is None


@pytest.fixture
def app() -> Celery:
    made = Celery("unit", broker="memory://", set_as_current=False)
    made.conf.safe_effects_database_url = "postgresql+psycopg://localhost/nowhere"
    SafeEffects(made)
    return made


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"effects": [charge, charge]}, "twice"),
        ({"effects": [len]}, "no effect"),
        ({"effects": charge}, "list of effects"),
        ({"effects": [charge], "effect_options": {"deadline": 5}}, "effect_options"),
    ],
)
def test_wrong_task_declarations_are_refused_when_bound(app: Celery, options: dict[str, Any], words: str) -> None:
    @app.task(base=SafeTask, shared=False, name="unit.task", **options)
    def task() -> None:
        return None

    with pytest.raises(ConfigurationError, match=words):
        app.finalize()


@pytest.mark.parametrize(
    "options",
    [
        {"lease_ttl": 0},
        {"lease_ttl": "30"},
        {"max_attempts": -3},
        {"max_age": -1},
        {"tenant": ""},
        {"pool": 5},
        {"Request": "celery.worker.request:Request"},
    ],
)
def test_wrong_task_options_are_found_at_start(app: Celery, options: dict[str, Any]) -> None:
    @app.task(base=SafeTask, shared=False, name="unit.options", effects=[], **options)
    def task() -> None:
        return None

    with pytest.raises(ConfigurationError, match=next(iter(options))):
        app.__dict__["_safe_effects"].check_declarations()


def test_a_body_that_yields_is_refused(app: Celery) -> None:
    @app.task(base=SafeTask, shared=False, name="unit.yields", effects=[])
    async def task() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(ConfigurationError, match="yield"):
        app.finalize()


@pytest.mark.parametrize("options", [{"deadline": -1}, {"nonsense": 1}, {"lookup": 5}])
def test_wrong_options_of_a_whole_body_are_found_at_start(app: Celery, options: dict[str, Any]) -> None:
    @app.task(base=SafeTask, shared=False, name="unit.body", effect_options=options)
    def task() -> None:
        return None

    with pytest.raises(ConfigurationError):
        app.__dict__["_safe_effects"].check_declarations()


def test_one_app_one_safe_effects(app: Celery) -> None:
    with pytest.raises(ConfigurationError, match="already"):
        SafeEffects(app)
