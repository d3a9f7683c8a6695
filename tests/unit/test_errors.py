"""Errors are part of the interface: picklable, coded, with a message; control flow escapes ``except Exception``."""

from __future__ import annotations

import pickle

import pytest

import celery_safe_effects
from celery_safe_effects import errors

ALL = sorted(
    (found for found in vars(errors).values() if isinstance(found, type) and issubclass(found, errors._Coded)),
    key=lambda cls: cls.__name__,
)


@pytest.mark.parametrize("cls", ALL)
def test_survives_pickling_with_its_details(cls: type[errors._Coded]) -> None:
    error = cls("do this next", job_id="j", limit=3, reason="tenant_queue_limit")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == str(error) == f"[{cls.code}] do this next"
    assert again.details == error.details


def test_codes_are_distinct() -> None:
    codes = [cls.code for cls in ALL if cls is not errors._Coded]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("name", ["OutcomeUnknown", "LeaseLost", "JobCancelled"])
def test_control_flow_passes_except_exception(name: str) -> None:
    cls = getattr(celery_safe_effects, name)
    assert not issubclass(cls, Exception)
    swallowed = []

    def body() -> None:
        try:
            raise cls("x")
        except Exception as exc:  # what users write around an effect
            swallowed.append(exc)

    with pytest.raises(cls):
        body()
    assert not swallowed


@pytest.mark.parametrize(
    "name",
    [
        "AdmissionRejected", "AcceptanceUnknown", "IdempotencyConflict", "ReplayMismatch", "UndeclaredEffect",
        "StepNameRequired", "OperationBusy", "NoActiveJob", "EffectRefused",
    ],
)  # fmt: skip
def test_ordinary_errors_have_one_base(name: str) -> None:
    assert issubclass(getattr(celery_safe_effects, name), celery_safe_effects.SafeEffectsError)


def test_a_refusal_at_the_door_says_why_in_fields() -> None:
    error = errors.AdmissionRejected("x", reason="tenant_queue_limit", limit=10, current=10, retry_after=2.5)
    assert (error.reason, error.limit, error.current, error.retry_after) == ("tenant_queue_limit", 10, 10, 2.5)
