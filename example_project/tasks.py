"""The same work twice: as a SafeTask, and as the plain Celery task with late acks that people write today."""

from __future__ import annotations

from typing import Any, TypedDict
from uuid import uuid4

from celery_safe_effects import EffectRefused, SafeTask
from example_project.app import app
from example_project.effects import (
    Ticket,
    ask_model,
    open_deployment,
    provider,
    refund_payment,
    scripted_model,
    send_email,
)


class Summary(TypedDict):
    """What was done about a ticket: the provider's references."""

    ticket: str
    refund: str | None
    email: str
    deployment: str


@app.task(
    base=SafeTask,
    bind=True,
    name="example.handle_ticket",
    effects=[ask_model, refund_payment, send_email, open_deployment],
)
def handle_ticket(self: Any, ticket: Ticket) -> Summary:
    """Ask the model, then act on its answer.

    Between the effects this body may run again: what is recorded is returned, not done again.
    """
    plan = ask_model(ticket).result
    self.job.checkpoint()  # an operator may have cancelled while the model was thinking
    refund: str | None
    try:
        refund = refund_payment(ticket["payment"], plan["refund_cents"]).ref
    except EffectRefused:
        refund = None  # a clear no; the customer still gets an answer
    self.job.checkpoint()
    email = send_email(ticket["customer"], plan["reply"]).ref
    self.job.checkpoint()
    deployment = open_deployment(ticket["service"], plan["version"]).ref
    return {"ticket": ticket["id"], "refund": refund, "email": email, "deployment": deployment}


@app.task(name="example.handle_ticket_plain", acks_late=True, reject_on_worker_lost=True)
def handle_ticket_plain(ticket: Ticket) -> Summary:
    """The same without the library. A key made for the call protects its retry, not the task's second run."""
    plan = scripted_model(ticket)
    fields: dict[str, Any] = {"payment": ticket["payment"], "cents": plan["refund_cents"]}
    refund = provider().call("refund", str(uuid4()), fields)["ref"]
    fields = {"to": ticket["customer"], "text": plan["reply"]}
    email = provider().call("email", str(uuid4()), fields)["ref"]
    fields = {"service": ticket["service"], "version": plan["version"]}
    deployment = provider().call("deployment", str(uuid4()), fields)["ref"]
    return {"ticket": ticket["id"], "refund": refund, "email": email, "deployment": deployment}
