"""What the service does to the outside world: each effect with what its provider promises."""

from __future__ import annotations

import os
import random
from datetime import timedelta
from typing import TypedDict

from celery_safe_effects import Happened, NotHappened, Operation, Outcome, effect
from example_project.provider_client import Declined, Provider

RETAINED = timedelta(hours=24)  # the provider answers a known key with the first result for a day
DEADLINE = 10  # seconds; no request of ours is in flight longer

_GREETINGS = ("Hello", "Good day", "Dear customer")


class Ticket(TypedDict):
    """What a customer asks for."""

    id: str
    customer: str
    payment: str
    cents: int
    service: str


class Plan(TypedDict):
    """What the model answers."""

    refund_cents: int
    reply: str
    version: str


def provider() -> Provider:
    """The provider that the environment names."""
    return Provider(os.environ.get("EXAMPLE_PROVIDER_URL", "http://localhost:8001"))


def scripted_model(ticket: Ticket) -> Plan:
    """Stands in for a language model: the same question may get another answer."""
    return {
        "refund_cents": ticket["cents"],
        "reply": f"{random.choice(_GREETINGS)}, we return {ticket['cents'] / 100:.2f} and fix {ticket['service']}.",
        "version": "1.4.2",
    }


# No outside effect. Recorded all the same, so that a job that runs again goes on with the answer that it acted on.
@effect(name="example.ask_model", repeatable=True)
def ask_model(op: Operation, ticket: Ticket) -> Plan:
    """Ask the model what to do about a ticket."""
    del op  # a question needs no key
    return scripted_model(ticket)


@effect(
    name="example.refund_payment",
    idempotent_for=RETAINED,
    deadline=DEADLINE,
    refused_on=(Declined,),  # the provider's clear no
    not_happened_on=(ConnectionRefusedError,),  # nobody listened, so nothing was sent
)
def refund_payment(op: Operation, payment: str, cents: int) -> Outcome[int]:
    """Give a payment back."""
    row = provider().call("refund", op.key, {"payment": payment, "cents": cents}, timeout=op.remaining())
    return Outcome(ref=row["ref"], result=cents)


@refund_payment.lookup
def find_refund(op: Operation) -> Happened | NotHappened:
    """Ask the provider whether it knows the refund."""
    row = provider().lookup(op.key, "refund", timeout=op.remaining())
    return Happened(row["ref"], row["body"]["cents"]) if row else NotHappened("no refund under this key")


@effect(
    name="example.send_email",
    idempotent_for=RETAINED,
    deadline=DEADLINE,
    refused_on=(Declined,),
    not_happened_on=(ConnectionRefusedError,),
    redact=("text",),  # neither the database nor `op.arguments` holds it
)
def send_email(op: Operation, to: str, text: str) -> str:
    """Write to the customer."""
    row = provider().call("email", op.key, {"to": to, "text": text}, timeout=op.remaining())
    return str(row["ref"])


@send_email.lookup
def find_email(op: Operation) -> Happened | NotHappened:
    """Ask the provider whether it knows the message."""
    row = provider().lookup(op.key, "email", timeout=op.remaining())
    return Happened(row["ref"], row["ref"]) if row else NotHappened("no message under this key")


@effect(
    name="example.open_deployment",
    idempotent_for=RETAINED,
    deadline=DEADLINE,
    refused_on=(Declined,),
    not_happened_on=(ConnectionRefusedError,),
)
def open_deployment(op: Operation, service: str, version: str) -> str:
    """Roll a version out."""
    fields = {"service": service, "version": version}
    row = provider().call("deployment", op.key, fields, timeout=op.remaining())
    return str(row["ref"])


@open_deployment.lookup
def find_deployment(op: Operation) -> Happened | NotHappened:
    """Ask the provider whether it knows the deployment."""
    row = provider().lookup(op.key, "deployment", timeout=op.remaining())
    return Happened(row["ref"], row["ref"]) if row else NotHappened("no deployment under this key")
