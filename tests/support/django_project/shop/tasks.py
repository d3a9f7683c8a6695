"""Tasks on orders."""

from __future__ import annotations

from typing import Any

from celery import shared_task
from django.db import transaction

from celery_safe_effects import Happened, NotHappened, Operation, effect
from celery_safe_effects.contrib.django import DjangoSafeTask
from tests.support.tasks import charge, provider

from .models import Order


@effect(name="shop.settle", deadline=4)
def settle(op: Operation, order: str, cents: int) -> str:
    """The outcome and the business row in one transaction."""
    row = provider().call("settle", op.key, {"customer": order, "cents": cents}, timeout=op.remaining())
    with transaction.atomic():
        Order.objects.filter(pk=order).update(ref=row["ref"])
        op.confirm(row["ref"], transaction="default")
    return str(row["ref"])


@settle.lookup
def find_settled(op: Operation) -> Happened | NotHappened:
    """What became of it is in our own table, too."""
    found = Order.objects.get(pk=op.arguments["order"])
    row = provider().lookup(op.key, "settle", timeout=5)
    return Happened(row["ref"]) if row and found.ref in ("", row["ref"]) else NotHappened()


@shared_task(base=DjangoSafeTask, bind=True, name="shop.bill", effects=[charge])
def bill(self: Any, order: str) -> str:
    """Charge an order, and note the reference."""
    found = Order.objects.get(pk=order)
    ref = charge(order, found.cents).ref
    Order.objects.filter(pk=order).update(ref=ref)
    return str(ref)


@shared_task(base=DjangoSafeTask, name="shop.close", effects=[settle])
def close(order: str) -> str:
    """Settle an order."""
    return str(settle(order, Order.objects.get(pk=order).cents).ref)


@shared_task(base=DjangoSafeTask, bind=True, name="shop.whole", time_limit=30)
def whole(self: Any, order: str) -> str:
    """The whole body is one effect, whose outcome nobody can look up."""
    return str(provider().call("whole_body", self.job.operation.key, {"customer": order})["ref"])


@shared_task(name="shop.plain")
def plain(order: str) -> int:
    """A plain task: Celery's own DjangoTask."""
    return int(Order.objects.get(pk=order).cents)
