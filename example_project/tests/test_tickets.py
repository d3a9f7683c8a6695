"""A ticket's handling: what it does, whether it does the same again, and whether it stands a crash anywhere."""

from __future__ import annotations

from typing import Any

import pytest

from celery_safe_effects import Outcome, OutcomeUnknown
from celery_safe_effects.faults import Point
from celery_safe_effects.testing import CrashProblem, NotReplayable, assert_replayable, crash_everywhere, stub_effects
from example_project.effects import Plan, Ticket, ask_model, open_deployment, refund_payment, scripted_model, send_email
from example_project.provider_client import Declined, Provider
from example_project.tasks import handle_ticket, handle_ticket_plain

TICKET: Ticket = {
    "id": "T-1",
    "customer": "customer@example.com",
    "payment": "pay_1",
    "cents": 4200,
    "service": "checkout",
}
PLAN: Plan = {"refund_cents": 4200, "reply": "Hello", "version": "1.4.2"}
ANSWERS: dict[Any, Any] = {
    ask_model: PLAN,
    refund_payment: Outcome("refund_1", 4200),
    send_email: "email_1",
    open_deployment: "deployment_1",
}


# -- without a database ------------------------------------------------------------------------------------------------


def test_it_acts_on_the_models_answer() -> None:
    with stub_effects(handle_ticket, ANSWERS) as job:
        summary = handle_ticket(TICKET)
    assert summary == {"ticket": "T-1", "refund": "refund_1", "email": "email_1", "deployment": "deployment_1"}
    assert [call.effect for call in job.calls] == [one.name for one in ANSWERS]
    assert job.of(refund_payment)[0].arguments == {"payment": "pay_1", "cents": 4200}
    assert job.checkpoints == 3


def test_a_declined_refund_is_no_reason_to_stop() -> None:
    with stub_effects(handle_ticket, ANSWERS | {refund_payment: Declined("no funds")}) as job:
        assert handle_ticket(TICKET)["refund"] is None
    assert job.of(refund_payment)[0].status == "refused"
    assert job.of(send_email)[0].status == "outcome_confirmed"


def test_behind_a_refund_in_doubt_nothing_is_done() -> None:
    with stub_effects(handle_ticket, ANSWERS | {refund_payment: TimeoutError()}) as job, pytest.raises(OutcomeUnknown):
        handle_ticket(TICKET)
    assert job.of(send_email) == []


@pytest.mark.parametrize("refund", [Outcome("refund_1", 4200), Declined("no funds")], ids=["paid", "declined"])
def test_it_does_the_same_when_it_runs_again(refund: Any) -> None:
    assert_replayable(handle_ticket, (TICKET,), answers=ANSWERS | {refund_payment: refund})


def test_a_model_that_is_asked_beside_the_record_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for `ask_model` to be an effect: its answer may be another one each time."""
    replies = iter("abc")
    monkeypatch.setattr("random.choice", lambda _greetings: next(replies))

    def run(self: Any, ticket: Ticket) -> None:
        send_email(ticket["customer"], scripted_model(ticket)["reply"])

    monkeypatch.setattr(handle_ticket._get_current_object(), "run", run.__get__(handle_ticket))
    with pytest.raises(NotReplayable, match="has other arguments: in a redacted one"):
        assert_replayable(handle_ticket, (TICKET,), answers=ANSWERS)


# -- with a database and a provider ------------------------------------------------------------------------------------


def test_it_stands_a_crash_anywhere(safe_effects_postgres: str, provider: Provider) -> None:
    report = crash_everywhere(
        handle_ticket,
        (TICKET,),
        database_url=safe_effects_postgres,
        happened=lambda: [(row["kind"], row["key"]) for row in provider.ledger()],
        recovery=False,
    )
    assert len(report.boundaries) > 40


def test_a_provider_that_forgot_its_promise_would_be_found(safe_effects_postgres: str, provider: Provider) -> None:
    """`idempotent_for` and the lookup say what the provider does; one that does neither pays twice."""
    provider.control(dedupe=False, lookup_lag=3600)
    with pytest.raises(CrashProblem, match=r"happened 2 times: \('refund'"):
        crash_everywhere(
            handle_ticket,
            (TICKET,),
            database_url=safe_effects_postgres,
            happened=lambda: [(row["kind"], row["key"]) for row in provider.ledger()],
            points=[Point.AFTER_CALL],
            recovery=False,
        )


def test_the_plain_task_is_none_of_this() -> None:
    with pytest.raises(TypeError, match="SafeTask"):
        crash_everywhere(handle_ticket_plain, (TICKET,))
